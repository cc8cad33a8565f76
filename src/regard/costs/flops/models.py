"""Blocks, stacks and complete models, part by part."""

from dataclasses import replace

from ...errors import SpecError
from ...position import Position, learned
from ...spec import (
    Block,
    ClassifierHead,
    Decoder,
    Embedding,
    Encoder,
    EncoderDecoder,
    FeedForward,
    LanguageHead,
    MaskedHead,
    Pooler,
    Vision,
)
from ..sizes import Length, Scope
from ..tree import Amount, Amounts, Part
from .attention import attention, input_position_parameters, position_parameters
from .terms import ACTIVATIONS, elementwise, linear, lookup, norm, present

Stack = Encoder | Decoder


def feed_forward(spec: FeedForward, scope: Scope, d: Amount) -> Part:
    """f(x W₁ + b₁) W₂ + b₂; a gated activation has a third matrix."""
    rows, d_ff = scope.b * scope.n, scope.size("d_ff", spec.d_ff)
    parts = present(
        linear("w_in", scope, rows, d, d_ff, spec.bias),
        linear("w_gate", scope, rows, d, d_ff, spec.bias) if spec.gated else None,
        elementwise("activation", scope, rows * d_ff, ACTIVATIONS[spec.activation], 3 if spec.gated else 2),
        linear("w_out", scope, rows, d_ff, d, spec.bias),
    )
    return Part("feed_forward", parts=parts)


def block(spec: Block, scope: Scope, name: str = "block", shared: Position | None = None) -> Part:
    """Each branch with its norm and residual addition. Self-attention has its queries as keys."""
    scope = scope.inside(name)
    d, rows = scope.size("d_model", spec.d_model), scope.b * scope.n
    self_scope = replace(scope, keys=scope.queries)

    def norm_and_residual(branch: str) -> tuple[Part, ...]:
        return present(
            norm(f"{branch}_norm", spec.norm, scope, rows, d, spec.norm_bias),
            elementwise(f"{branch}_sum", scope, rows * d, 1, 3) if spec.residual else None,
        )

    parts = [attention(spec.attention, self_scope, shared=shared), *norm_and_residual("attention")]
    if spec.cross is not None:
        parts += [attention(spec.cross, scope, "cross", cross=True), *norm_and_residual("cross")]
    if spec.feed_forward is not None:
        parts += [feed_forward(spec.feed_forward, scope, d), *norm_and_residual("feed_forward")]
    return Part(name, parts=tuple(parts))


def stack(spec: Stack, scope: Scope, name: str, shares_table: bool = False) -> Part:
    """An embedding, identical layers, a norm, a head."""
    scope = scope.inside(name)
    d, layers = scope.size("d_model", spec.d_model), scope.size("layers", spec.layers)
    position, inner = spec.position, spec.block
    if (
        position is not None and position.acts == "query_key"
    ):  # like the module: each layer rotates its own q and k
        inner, position = replace(inner, attention=replace(inner.attention, position=position)), None
    parts = present(
        None if spec.embedding is None else embedding(spec.embedding, scope, shares_table),
        None if position is None else _shared_position(position, inner, scope),
        _layers(spec, inner, position, scope, layers),
        norm("norm", inner.norm, scope, scope.b * scope.n, d, inner.norm_bias)
        if spec.has_final_norm
        else None,
        head(spec, scope, d),
    )
    return Part(name, parts=parts)


def _layers(spec: Stack, inner: Block, shared: Position | None, scope: Scope, layers: Amount) -> Part:
    one = block(inner, scope, shared=shared)
    requested = getattr(scope.request.train, "checkpointing", None)
    if not (spec.checkpoint if requested is None else requested):
        return replace(one, times=layers)
    recomputed = Part(
        "recomputed",
        Amounts(executed_backward_flops=one.total.executed_flops - _last_product(inner, one, scope)),
        note="checkpointed: the backward pass recomputes each block up to the last saved tensor",
    )
    return replace(one, parts=(*one.parts, recomputed), times=layers)


def _last_product(inner: Block, one: Part, scope: Scope) -> Amount:
    """The last product of a block, which is not recomputed unless a norm or dropout after it saves a tensor."""
    normed = inner.norm_at == "post" and inner.norm != "none"
    if normed or (scope.request.train and inner.dropout > 0):
        return 0
    if inner.feed_forward is not None:
        return one["feed_forward/w_out"].total.executed_flops
    name, last = ("attention", inner.attention) if inner.cross is None else ("cross", inner.cross)
    return (
        one[f"{name}/output"].total.executed_flops
        if last.output
        else one[f"{name}/mixing"].total.executed_flops
    )


def _shared_position(position: Position, inner: Block, scope: Scope) -> Part:
    """The table of a position encoding that all layers share."""
    return Part(
        "position",
        Amounts(parameters=position_parameters(position, scope, scope.reader.attention(inner.attention))),
        note="shared by all layers",
    )


def embedding(spec: Embedding, scope: Scope, shares_table: bool = False) -> Part:
    """A table lookup for each token, which has no FLOPs, and what is added to it."""
    d, vocab, rows = scope.size("d_model", spec.d_model), scope.size("vocab", spec.vocab), scope.b * scope.n
    _check_length(spec.position, scope.queries)
    tokens = lookup(scope, rows, vocab, d)
    if shares_table:
        tokens = replace(tokens, parameters=0)
    parts = present(
        Part("tokens", tokens, note="shared with the encoder" if shares_table else ""),
        elementwise("scale", scope, rows * d) if spec.scaled else None,
        _input_position(spec.position, scope, rows, d) if spec.position is not None else None,
        _types(spec, scope, rows, d) if spec.types else None,
        norm("norm", "layer", scope, rows, d) if spec.norm else None,
    )
    return Part("embedding", parts=parts)


def _input_position(position: Position, scope: Scope, rows: Amount, d: Amount) -> Part:
    own = Amounts(
        input_position_parameters(position, scope, d),
        elementwise_flops=rows * d,
        bytes=3 * scope.itemsize * rows * d,
    )
    return Part("position", own)


def _types(spec: Embedding, scope: Scope, rows: Amount, d: Amount) -> Part:
    types = scope.size("types", spec.types)
    return Part("types", Amounts(types * d, elementwise_flops=rows * d, bytes=2 * scope.itemsize * rows * d))


def _check_length(position: Position | None, n: Length) -> None:
    if not isinstance(position, learned) or position.grid is not None or position.beyond != "refuse":
        return
    if n.value > position.entries:
        raise SpecError(f"n={n.value} exceeds the table of {position!r}; use n up to {position.entries}")


def head(spec: Stack, scope: Scope, d: Amount) -> Part | None:
    """The head of a stack; a tied language head has no table of its own."""
    rows = scope.b * scope.n
    match spec.head, spec.embedding:
        case LanguageHead() as h, Embedding() as e:
            return _language_head(h, scope, rows, d, scope.size("vocab", e.vocab))
        case MaskedHead() as h, Embedding() as e:
            vocab = scope.size("vocab", e.vocab)
            parts = present(
                linear("transform", scope, rows, d, d, True),
                elementwise("activation", scope, rows * d, ACTIVATIONS[h.activation]),
                norm("norm", "layer", scope, rows, d),
                _tied(linear("logits", scope, rows, d, vocab, True), vocab),
            )
            return Part("head", parts=parts)
        case ClassifierHead() as h, _:
            return classifier(h, scope, d)
        case Pooler(), _:
            return Part(
                "head",
                parts=(linear("pooler", scope, scope.b, d, d, True), elementwise("tanh", scope, scope.b * d)),
            )
    return None


def _language_head(spec: LanguageHead, scope: Scope, rows: Amount, d: Amount, vocab: Amount) -> Part:
    logits = linear("logits", scope, rows, d, vocab, spec.bias)
    if spec.tied:
        logits = _tied(logits, vocab if spec.bias else 0)
    return Part("head", parts=present(elementwise("scale", scope, rows * d) if spec.scaled else None, logits))


def _tied(logits: Part, bias: Amount) -> Part:
    return replace(logits, own=replace(logits.own, parameters=bias), note="tied to the embedding")


def classifier(spec: ClassifierHead, scope: Scope, d: Amount) -> Part:
    """One pooled state per batch row, an optional hidden tanh layer, then the classes."""
    b, classes = scope.b, scope.size("classes", spec.classes)
    hidden = None if spec.hidden is None else scope.size("d_hidden", spec.hidden)
    pooled = spec.pool in ("mean", "max")
    parts = present(
        elementwise("pool", scope, b * scope.n * d, 1, 1) if pooled else None,
        None if hidden is None else linear("hidden", scope, b, d, hidden, True),
        None if hidden is None else elementwise("tanh", scope, b * hidden),
        linear("classes", scope, b, d if hidden is None else hidden, classes, True),
    )
    return Part("head", parts=parts)


def encoder_decoder(spec: EncoderDecoder, scope: Scope) -> Part:
    """The encoder reads m tokens; the decoder writes n tokens and attends to them."""
    source = replace(scope, queries=scope.keys)
    return Part(
        "model",
        parts=(
            stack(spec.encoder, source, "encoder"),
            stack(spec.decoder, scope, "decoder", shares_table=spec.share_embedding),
        ),
    )


def vision(spec: Vision, scope: Scope) -> Part:
    """Patches as one product, class token and registers, positions, encoder, classes. Images need no gradient."""
    d, patch = scope.size("d_model", spec.d_model), spec.channels * spec.patch[0] * spec.patch[1]
    patches = linear(
        "patches", scope, scope.b * (scope.n - spec.in_front), scope.size("d_patch", patch), d, True,
        note="no gradient flows to the images",
    )  # fmt: skip
    flops = patches.own.flops  # of the gradient of the weights
    patches = replace(patches, own=replace(patches.own, backward_flops=flops, executed_backward_flops=flops))
    position = _input_position(spec.position or learned(spec.tokens), scope, scope.b * scope.n, d)
    if spec.position is None:  # one vector per token: the same symbol n
        position = replace(position, own=replace(position.own, parameters=scope.n * d))
    parts = present(
        patches,
        Part("class_token", Amounts(parameters=d)) if spec.class_token else None,
        Part("registers", Amounts(parameters=spec.registers * d)) if spec.registers else None,
        position,
        stack(spec.encoder, scope, "encoder"),
        None if spec.head is None else classifier(spec.head, scope, d),
    )
    return Part("model", parts=parts)
