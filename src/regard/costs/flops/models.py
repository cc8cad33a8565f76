"""Blocks, stacks and complete models, part by part; recurrent and convolutional models, and fixed mixing."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ... import spec as specs
from ...errors import SpecError
from ...position import Position, learned
from ...spec import Block, ClassifierHead, Decoder, Embedding, Encoder, FeedForward, LanguageHead, MaskedHead
from ..sizes import Request, Scope, Symbols
from ..tree import Amount, Amounts, Pairs, Part
from .attention import attention, position_parameters
from .terms import ACTIVATIONS, elementwise, linear, lookup, norm, present, product

Stack = Encoder | Decoder


def build_tree(request: Request, symbols: Symbols | None = None) -> tuple[Part, tuple[Pairs, ...]]:
    """The tree, with numbers or with symbols, and the pairs of each attention in it."""
    kind = type(request.spec)
    if kind not in BUILDERS:
        raise SpecError(
            f"{request.spec!r} has no width of its own; ask for the cost of the block or model that contains it"
        )
    tree = BUILDERS[kind](request.spec, Scope(request, symbols, request.n, request.m))
    nodes = tree.nodes()
    return tree, tuple(replace(p, path=path or tree.name) for path, part, _ in nodes for p in part.pairs)


def feed_forward(spec: FeedForward, scope: Scope, d: Amount) -> Part:
    """f(x W₁ + b₁) W₂ + b₂; a gated activation has a third matrix."""
    rows, d_ff = scope.b * scope.n, scope.size("d_ff", spec.d_ff)
    parts = present(
        linear("w_in", scope, rows, d, d_ff, spec.bias),
        spec.gated and linear("w_gate", scope, rows, d, d_ff, spec.bias),
        elementwise("activation", scope, rows * d_ff, ACTIVATIONS[spec.activation], 3 if spec.gated else 2),
        linear("w_out", scope, rows, d_ff, d, spec.bias),
    )
    return Part("feed_forward", parts=parts)


def block(spec: Block, scope: Scope, shared: Position | None = None) -> Part:
    """Each branch with its norm and residual addition. Self-attention has its queries as keys."""
    d, rows = scope.size("d_model", spec.d_model), scope.b * scope.n
    branches = [attention(spec.attention, replace(scope, keys=scope.queries), shared=shared)]
    if spec.cross is not None:
        branches.append(attention(spec.cross, scope, "cross", cross=True))
    if spec.feed_forward is not None:
        branches.append(feed_forward(spec.feed_forward, scope, d))
    parts: list[Part | None] = []
    for branch in branches:
        added = elementwise(f"{branch.name}_sum", scope, rows * d, 1, 3) if spec.residual else None
        parts += [branch, norm(f"{branch.name}_norm", spec.norm, scope, rows, d, spec.norm_bias), added]
    return Part("block", parts=present(*parts))


def stack(spec: Stack, scope: Scope, name: str = "model", shares_table: bool = False) -> Part:
    """An embedding, identical layers, a norm, a head."""
    d, layers = scope.size("d_model", spec.d_model), scope.size("layers", spec.layers)
    position, inner = spec.position, spec.block
    if position is not None and position.acts == "query_key":  # each layer rotates its own q and k
        inner, position = replace(inner, attention=replace(inner.attention, position=position)), None
    shared = None
    if position is not None:
        table = Amounts(position_parameters(position, scope, scope.sizes(inner.attention)))
        shared = Part("position", table, note="shared by all layers")
    rows = scope.b * scope.n
    parts = present(
        spec.embedding is not None and embedding(spec.embedding, scope, shares_table),
        shared,
        replace(_layer(spec, inner, position, scope), times=layers),
        spec.has_final_norm and norm("norm", inner.norm, scope, rows, d, inner.norm_bias),
        head(spec, scope, d),
    )
    return Part(name, parts=parts)


def _layer(spec: Stack, inner: Block, shared: Position | None, scope: Scope) -> Part:
    one = block(inner, scope, shared)
    requested = getattr(scope.request.train, "checkpointing", None)
    if not (spec.checkpoint if requested is None else requested):
        return one
    again = one.total.executed_flops
    saves_the_end = inner.norm_at == "post" and inner.norm != "none"
    if not saves_the_end and not (scope.request.train and inner.dropout > 0):
        # The last product is not recomputed: nothing after it saves a tensor.
        last = [p for p in one.parts if p.name in ("attention", "cross", "feed_forward")][-1]
        products = [p for p in last.parts if p.name in ("w_out", "output", "mixing")]
        again -= products[-1].total.executed_flops
    note = "checkpointed: the backward pass recomputes each block up to the last saved tensor"
    recomputed = Part("recomputed", Amounts(executed_backward_flops=again), note=note)
    return replace(one, parts=(*one.parts, recomputed))


def embedding(spec: Embedding, scope: Scope, shares_table: bool = False) -> Part:
    """A table lookup for each token, which has no FLOPs, and what is added to it."""
    d, vocab, rows = scope.size("d_model", spec.d_model), scope.size("vocab", spec.vocab), scope.b * scope.n
    position, n = spec.position, scope.queries
    match position:
        case learned(grid=None, beyond="refuse", entries=most) if n > most:
            raise SpecError(f"n={n} exceeds the table of {position!r}; use n up to {most}")
    tokens = Part("tokens", lookup(scope, rows, vocab, d))
    if shares_table:
        tokens = replace(tokens.with_own(parameters=0), note="shared with the encoder")
    types = spec.types and scope.size("types", spec.types) * d
    parts = present(
        tokens,
        spec.scaled and elementwise("scale", scope, rows * d),
        position is not None and _input_position(position, scope, d),
        bool(spec.types) and elementwise("types", scope, rows * d).with_own(parameters=types),
        spec.norm and norm("norm", "layer", scope, rows, d),
    )
    return Part("embedding", parts=parts)


def _input_position(position: Position, scope: Scope, d: Amount) -> Part:
    """A position encoding that is added to the input."""
    table = scope.size("positions", position.entries) * d if isinstance(position, learned) else 0
    return elementwise("position", scope, scope.b * scope.n * d, 1, 3).with_own(parameters=table)


def head(spec: Stack, scope: Scope, d: Amount) -> Part | None:
    """The head of a stack; a tied language head has no table of its own."""
    rows = scope.b * scope.n
    vocab = None if spec.embedding is None else scope.size("vocab", spec.embedding.vocab)
    match spec.head:
        case LanguageHead(tied=tied, bias=bias, scaled=scaled):
            logits = linear("logits", scope, rows, d, vocab, bias)
            logits = _tied(logits, vocab if bias else 0) if tied else logits
            parts = present(scaled and elementwise("scale", scope, rows * d), logits)
        case MaskedHead() as h:
            parts = present(
                linear("transform", scope, rows, d, d, True),
                elementwise("activation", scope, rows * d, ACTIVATIONS[h.activation]),
                norm("norm", "layer", scope, rows, d),
                _tied(linear("logits", scope, rows, d, vocab, True), vocab),
            )
        case ClassifierHead() as h:
            return classifier(h, scope, d)
        case specs.Pooler():
            parts = linear("pooler", scope, scope.b, d, d, True), elementwise("tanh", scope, scope.b * d)
        case _:
            return None
    return Part("head", parts=parts)


def _tied(logits: Part, bias: Amount) -> Part:
    return replace(logits.with_own(parameters=bias), note="tied to the embedding")


def classifier(spec: ClassifierHead, scope: Scope, d: Amount) -> Part:
    """One pooled state per batch row, an optional hidden tanh layer, then the classes."""
    b, parts = scope.b, list[Part]()
    if spec.pool in ("mean", "max"):
        parts.append(elementwise("pool", scope, b * scope.n * d, 1, 1))
    if spec.hidden is not None:
        hidden = scope.size("d_hidden", spec.hidden)
        parts += [linear("hidden", scope, b, d, hidden, True), elementwise("tanh", scope, b * hidden)]
        d = hidden
    classes = linear("classes", scope, b, d, scope.size("classes", spec.classes), True)
    return Part("head", parts=(*parts, classes))


def encoder_decoder(spec: specs.EncoderDecoder, scope: Scope) -> Part:
    """The encoder reads m tokens; the decoder writes n tokens and attends to them."""
    encoder = stack(spec.encoder, replace(scope, queries=scope.keys), "encoder")
    decoder = stack(spec.decoder, scope, "decoder", shares_table=spec.share_embedding)
    return Part("model", parts=(encoder, decoder))


def vision(spec: specs.Vision, scope: Scope) -> Part:
    """Patches as one product, class token and registers, positions, encoder, classes. Images need no gradient."""
    d, patch = scope.size("d_model", spec.d_model), spec.channels * spec.patch[0] * spec.patch[1]
    rows = scope.b * (scope.n - spec.in_front)
    patches = linear("patches", scope, rows, scope.size("d_patch", patch), d, True)
    flops = patches.own.flops  # only the weights have a gradient
    patches = patches.with_own(backward_flops=flops, executed_backward_flops=flops)
    patches = replace(patches, note="no gradient flows to the images")
    position = _input_position(spec.position or learned(spec.tokens), scope, d)
    if spec.position is None:  # one vector per token: the same symbol n
        position = position.with_own(parameters=scope.n * d)
    parts = present(
        patches,
        spec.class_token and Part("class_token", Amounts(d)),
        bool(spec.registers) and Part("registers", Amounts(spec.registers * d)),
        position,
        stack(spec.encoder, scope, "encoder"),
        spec.head is not None and classifier(spec.head, scope, d),
    )
    return Part("model", parts=parts)


GATES = {"rnn": 1, "gru": 3, "lstm": 4}
# Elementwise FLOPs per state and step: additions, gate activations, forgetting and input.
ELEMENTWISE = {"rnn": 2, "gru": 12, "lstm": 13}


def recurrent(spec: specs.Recurrent, scope: Scope) -> Part:
    """An encoder over m source tokens, a decoder over n target tokens, attention between them, logits."""
    d, b = scope.size("d_model", spec.d_model), scope.b
    vocab = scope.size("vocab", spec.vocab)
    target = vocab if spec.target_vocab is None else scope.size("target_vocab", spec.target_vocab)
    attends = spec.attention != "none"
    parts = present(
        Part("embed_source", lookup(scope, b * scope.m, vocab, d)),
        Part("embed_target", lookup(scope, b * scope.n, target, d)),
        cells(spec, scope, scope.keys, "encoder"),
        cells(spec, scope, scope.queries, "decoder"),
        attends and _luong(spec, scope, d),
        linear("head", scope, b * scope.n, (2 if attends else 1) * d, target, True),
    )
    return Part("model", parts=parts)


def cells(spec: specs.Recurrent, scope: Scope, steps: int, name: str) -> Part:
    """gates · 2 · (d_in + d) · d per step: the input and the state are each multiplied by a matrix."""
    d, gates = scope.size("d_model", spec.d_model), GATES[spec.cell]
    directions = 2 if spec.bidirectional and name == "encoder" else 1
    width = d if directions == 1 else d / 2 if not isinstance(d, int) else d // 2
    rows = scope.b * scope.length(steps)
    parts = []
    for l in range(spec.layers):
        inputs = linear("inputs", scope, rows, d, gates * width, True)
        states = linear("states", scope, rows, width, gates * width, True)
        if name == "encoder":  # its initial state is a constant zero, which needs no gradient
            backward = states.own.backward_flops - 2 * scope.b * width * gates * width
            states = states.with_own(backward_flops=backward, executed_backward_flops=backward)
        inside = elementwise("gates", scope, rows * width, ELEMENTWISE[spec.cell], gates + 2)
        parts.append(Part(f"layer_{l}", parts=(inputs, states, inside), times=directions))
    return Part(name, parts=tuple(parts))


def _luong(spec: specs.Recurrent, scope: Scope, d: Amount) -> Part:
    """Luong's attention: every decoder state scores every source state, then mixes them."""
    b, n, m, is_additive = scope.b, scope.n, scope.m, spec.attention == "additive"
    pairs = product(2 * b * n * m * d, bytes=scope.itemsize * b * (n * d + m * d + n * m))
    moved = scope.itemsize * b * (n * d + m * d + 2 * n * m * d + n * m)
    additive = Amounts(d, elementwise_flops=b * n * m * (4 * d - 1), bytes=moved)
    softmax = Amounts(elementwise_flops=b * n * (5 * m - 2), bytes=2 * scope.itemsize * b * n * m)
    parts = present(
        linear("w_q", scope, b * n, d, d, False),
        is_additive and linear("w_k", scope, b * m, d, d, False),
        Part("scores", additive if is_additive else pairs),
        Part("softmax", softmax),
        Part("mixing", pairs),
    )
    return Part("attention", parts=parts)


def convolutional(spec: specs.Convolutional, scope: Scope) -> Part:
    """Layers with kernel size k: k·n·d² multiply-adds, or k·n·d + n·d² if separable."""
    d, k, rows = scope.size("d_model", spec.d_model), scope.size("k", spec.kernel), scope.b * scope.n
    if spec.separable:
        moved = scope.itemsize * (2 * rows * d + k * d)
        depthwise = Part("depthwise", product(2 * rows * k * d, parameters=k * d, bytes=moved))
        mixing: tuple[Part, ...] = (depthwise, linear("pointwise", scope, rows, d, d, True))
    else:
        mixing = (linear("convolution", scope, rows, k * d, d, True),)
    inside = (elementwise("activation", scope, rows * d, 5), elementwise("sum", scope, rows * d, 1, 3))
    layers = Part("layer", parts=(*mixing, *inside), times=scope.size("layers", spec.layers))
    if spec.vocab is None:
        return Part("model", parts=(layers,))
    vocab = scope.size("vocab", spec.vocab)
    tokens = Part("embedding", lookup(scope, rows, vocab, d))
    return Part("model", parts=(tokens, layers, linear("head", scope, rows, d, vocab, True)))


def mixing(spec: specs.Mixing, scope: Scope) -> Part:
    """No parameters and no matrix product. The width of the values is not declared, so this is for one column."""
    flops = {"identity": 0, "average": scope.b * scope.n, "select": 0}[spec.how]
    return Part("mixing", Amounts(elementwise_flops=flops), note="per column of the values")


BUILDERS: dict[type, Callable[[Any, Scope], Part]] = {
    specs.Attention: lambda s, scope: attention(s, scope, cross=s.d_context is not None),
    specs.Block: block,
    specs.Embedding: embedding,
    specs.Encoder: stack,
    specs.Decoder: stack,
    specs.EncoderDecoder: encoder_decoder,
    specs.Vision: vision,
    specs.Recurrent: recurrent,
    specs.Convolutional: convolutional,
    specs.Mixing: mixing,
}
