"""Blocks, stacks and whole models: the parts of a declaration, each priced where it stands."""

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
from .attention import attention, table, table_at_input
from .terms import ACTIVATIONS, elementwise, linear, norm, some

Stack = Encoder | Decoder
ID = 8  # bytes of a token's number


def feed_forward(spec: FeedForward, at: Scope, d: Amount) -> Part:
    """f(x W₁ + b₁) W₂ + b₂; a gated kind has a third matrix."""
    rows, d_ff = at.b * at.n, at.size("d_ff", spec.d_ff)
    parts = some(
        linear("w_in", at, rows, d, d_ff, spec.bias),
        linear("w_gate", at, rows, d, d_ff, spec.bias) if spec.gated else None,
        elementwise("activation", at, rows * d_ff, ACTIVATIONS[spec.activation], 3 if spec.gated else 2),
        linear("w_out", at, rows, d_ff, d, spec.bias),
    )
    return Part("feed_forward", parts=parts)


def block(spec: Block, at: Scope, name: str = "block", shared: Position | None = None) -> Part:
    """Each branch with its norm and its sum. Cross-attention looks at `at.keys`, self-attention at itself."""
    at = at.inside(name)
    d, rows = at.size("d_model", spec.d_model), at.b * at.n
    itself = replace(at, keys=at.queries)

    def beside(what: str) -> tuple[Part, ...]:
        return some(
            norm(f"{what}_norm", spec.norm, at, rows, d, spec.norm_bias),
            elementwise(f"{what}_sum", at, rows * d, 1, 3) if spec.residual else None,
        )

    parts = [attention(spec.attention, itself, shared=shared), *beside("attention")]
    if spec.cross is not None:
        parts += [attention(spec.cross, at, "cross", cross=True), *beside("cross")]
    if spec.feed_forward is not None:
        parts += [feed_forward(spec.feed_forward, at, d), *beside("feed_forward")]
    return Part(name, parts=tuple(parts))


def stack(spec: Stack, at: Scope, name: str, shares_table: bool = False) -> Part:
    """An embedding, layers alike, a norm, a head."""
    at = at.inside(name)
    d, layers = at.size("d_model", spec.d_model), at.size("layers", spec.layers)
    where, inner = spec.position, spec.block
    if where is not None and where.acts == "query_key":  # as the module does: each layer turns its own
        inner, where = replace(inner, attention=replace(inner.attention, position=where)), None
    parts = some(
        None if spec.embedding is None else embedding(spec.embedding, at, shares_table),
        None if where is None else _shared_position(where, inner, at),
        _layers(spec, inner, where, at, layers),
        norm("norm", inner.norm, at, at.b * at.n, d, inner.norm_bias) if spec.has_final_norm else None,
        head(spec, at, d),
    )
    return Part(name, parts=parts)


def _layers(spec: Stack, inner: Block, shared: Position | None, at: Scope, layers: Amount) -> Part:
    one = block(inner, at, shared=shared)
    asked = getattr(at.given.train, "checkpointing", None)
    if not (spec.checkpoint if asked is None else asked):
        return replace(one, times=layers)
    again = Part(
        "recomputed",
        Amounts(executed_backward=one.total.executed - _not_again(inner, one, at)),
        note="checkpointed: the backward pass runs each block again, up to the last tensor it needs",
    )
    return replace(one, parts=(*one.parts, again), times=layers)


def _not_again(inner: Block, one: Part, at: Scope) -> Amount:
    """The product that a block ends with, where nothing after it keeps a tensor: a norm does, and dropout."""
    normed = inner.norm_at == "post" and inner.norm != "none"
    if normed or (at.given.train and inner.dropout > 0):
        return 0
    if inner.feed_forward is not None:
        return one["feed_forward/w_out"].total.executed
    name, last = ("attention", inner.attention) if inner.cross is None else ("cross", inner.cross)
    return one[f"{name}/output"].total.executed if last.output else one[f"{name}/mixing"].total.executed


def _shared_position(position: Position, inner: Block, at: Scope) -> Part:
    """The one table of a position that all layers read."""
    return Part(
        "position",
        Amounts(parameters=table(position, at, at.read.attention(inner.attention))),
        note="one for all layers",
    )


def embedding(spec: Embedding, at: Scope, shares_table: bool = False) -> Part:
    """A row of a table for each token: no operation but what is added to it."""
    d, vocab, rows = at.size("d_model", spec.d_model), at.size("vocab", spec.vocab), at.b * at.n
    _check_length(spec.position, at.queries)
    lookup = Amounts(parameters=0 if shares_table else vocab * d, bytes=rows * (ID + 2 * at.itemsize * d))
    parts = some(
        Part("tokens", lookup, note="shared with the encoder's" if shares_table else ""),
        elementwise("scale", at, rows * d) if spec.scaled else None,
        _input_position(spec.position, at, rows, d) if spec.position is not None else None,
        _types(spec, at, rows, d) if spec.types else None,
        norm("norm", "layer", at, rows, d) if spec.norm else None,
    )
    return Part("embedding", parts=parts)


def _input_position(position: Position, at: Scope, rows: Amount, d: Amount) -> Part:
    own = Amounts(table_at_input(position, at, d), other=rows * d, bytes=3 * at.itemsize * rows * d)
    return Part("position", own)


def _types(spec: Embedding, at: Scope, rows: Amount, d: Amount) -> Part:
    types = at.size("types", spec.types)
    return Part("types", Amounts(types * d, other=rows * d, bytes=2 * at.itemsize * rows * d))


def _check_length(position: Position | None, n: Length) -> None:
    if not isinstance(position, learned) or position.grid is not None or position.beyond != "refuse":
        return
    if n.value > position.entries:
        raise SpecError(
            f"n={n.value} is past {position!r}, which has no vector there; use n up to {position.entries}"
        )


def head(spec: Stack, at: Scope, d: Amount) -> Part | None:
    """What a stack ends with; a tied language head brings no table of its own."""
    rows = at.b * at.n
    match spec.head, spec.embedding:
        case LanguageHead() as h, Embedding() as e:
            return _language_head(h, at, rows, d, at.size("vocab", e.vocab))
        case MaskedHead() as h, Embedding() as e:
            vocab = at.size("vocab", e.vocab)
            parts = some(
                linear("transform", at, rows, d, d, True),
                elementwise("activation", at, rows * d, ACTIVATIONS[h.activation]),
                norm("norm", "layer", at, rows, d),
                _tied(linear("logits", at, rows, d, vocab, True), vocab),
            )
            return Part("head", parts=parts)
        case ClassifierHead() as h, _:
            return classifier(h, at, d)
        case Pooler(), _:
            return Part(
                "head", parts=(linear("pooler", at, at.b, d, d, True), elementwise("tanh", at, at.b * d))
            )
    return None


def _language_head(spec: LanguageHead, at: Scope, rows: Amount, d: Amount, vocab: Amount) -> Part:
    logits = linear("logits", at, rows, d, vocab, spec.bias)
    if spec.tied:
        logits = _tied(logits, vocab if spec.bias else 0)
    return Part("head", parts=some(elementwise("scale", at, rows * d) if spec.scaled else None, logits))


def _tied(logits: Part, bias: Amount) -> Part:
    return replace(logits, own=replace(logits.own, parameters=bias), note="tied to the embedding")


def classifier(spec: ClassifierHead, at: Scope, d: Amount) -> Part:
    """One pooled state a row, perhaps a hidden layer of tanh, then the classes."""
    b, classes = at.b, at.size("classes", spec.classes)
    hidden = None if spec.hidden is None else at.size("d_hidden", spec.hidden)
    pooled = spec.pool in ("mean", "max")
    parts = some(
        elementwise("pool", at, b * at.n * d, 1, 1) if pooled else None,
        None if hidden is None else linear("hidden", at, b, d, hidden, True),
        None if hidden is None else elementwise("tanh", at, b * hidden),
        linear("classes", at, b, d if hidden is None else hidden, classes, True),
    )
    return Part("head", parts=parts)


def encoder_decoder(spec: EncoderDecoder, at: Scope) -> Part:
    """The encoder reads m tokens, the decoder writes n looking at them."""
    source = replace(at, queries=at.keys)
    return Part(
        "model",
        parts=(
            stack(spec.encoder, source, "encoder"),
            stack(spec.decoder, at, "decoder", shares_table=spec.share_embedding),
        ),
    )


def vision(spec: Vision, at: Scope) -> Part:
    """Patches as one product, the class token, positions, the encoder, the classes. Images want no gradient."""
    d, patch = at.size("d_model", spec.d_model), spec.channels * spec.patch[0] * spec.patch[1]
    patches = linear(
        "patches", at, at.b * (at.n - int(spec.class_token)), at.size("d_patch", patch), d, True,
        note="no gradient flows to the images",
    )  # fmt: skip
    once = patches.own.operations
    patches = replace(patches, own=replace(patches.own, backward=once, executed_backward=once))
    where = spec.position or learned(spec.tokens)
    entries = at.n if spec.position is None else None
    rows = at.b * at.n
    position = _input_position(where, at, rows, d)
    if entries is not None:  # a vector a token: n of them, by the same symbol
        position = replace(position, own=replace(position.own, parameters=entries * d))
    parts = some(
        patches,
        Part("class_token", Amounts(parameters=d)) if spec.class_token else None,
        position,
        stack(spec.encoder, at, "encoder"),
        None if spec.head is None else classifier(spec.head, at, d),
    )
    return Part("model", parts=parts)
