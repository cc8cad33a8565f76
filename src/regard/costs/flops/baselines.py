"""Models that attention is compared with: recurrent and convolutional models, and fixed mixing."""

from dataclasses import replace

from ...spec import Convolutional, Mixing, Recurrent
from ..sizes import Length, Scope
from ..tree import Amount, Amounts, Part
from .terms import elementwise, linear, lookup, present, product

GATES = {"rnn": 1, "gru": 3, "lstm": 4}
# Elementwise FLOPs per state and step: additions, gate activations, forgetting and input.
ELEMENTWISE = {"rnn": 2, "gru": 12, "lstm": 13}


def recurrent(spec: Recurrent, scope: Scope) -> Part:
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
        _attention(spec, scope, d) if attends else None,
        linear("head", scope, b * scope.n, (2 if attends else 1) * d, target, True),
    )
    return Part("model", parts=parts)


def cells(spec: Recurrent, scope: Scope, steps: Length, name: str) -> Part:
    """gates · 2 · (d_in + d) · d per step: the input and the state are each multiplied by a matrix."""
    d, gates = scope.size("d_model", spec.d_model), GATES[spec.cell]
    directions = 2 if spec.bidirectional and name == "encoder" else 1
    width = d if directions == 1 else d / 2 if not isinstance(d, int) else d // 2
    rows = scope.b * steps.amount
    parts = []
    for l in range(spec.layers):
        inputs = linear("inputs", scope, rows, d, gates * width, True)
        states = linear("states", scope, rows, width, gates * width, True)
        if name == "encoder":  # its initial state is a constant zero, which needs no gradient
            backward = states.own.backward_flops - 2 * scope.b * width * gates * width
            states = replace(
                states, own=replace(states.own, backward_flops=backward, executed_backward_flops=backward)
            )
        inside = elementwise("gates", scope, rows * width, ELEMENTWISE[spec.cell], gates + 2)
        parts.append(Part(f"layer_{l}", parts=(inputs, states, inside), times=directions))
    return Part(name, parts=tuple(parts))


def _attention(spec: Recurrent, scope: Scope, d: Amount) -> Part:
    """Luong's attention: every decoder state scores every source state, then mixes them."""
    b, n, m = scope.b, scope.n, scope.m
    pairs = product(2 * b * n * m * d, bytes=scope.itemsize * b * (n * d + m * d + n * m))
    additive = Amounts(
        d,
        elementwise_flops=b * n * m * (4 * d - 1),
        bytes=scope.itemsize * b * (n * d + m * d + 2 * n * m * d + n * m),
    )
    is_additive = spec.attention == "additive"
    softmax = Amounts(elementwise_flops=b * n * (5 * m - 2), bytes=2 * scope.itemsize * b * n * m)
    parts = present(
        linear("w_q", scope, b * n, d, d, False),
        linear("w_k", scope, b * m, d, d, False) if is_additive else None,
        Part("scores", additive if is_additive else pairs),
        Part("softmax", softmax),
        Part("mixing", pairs),
    )
    return Part("attention", parts=parts)


def convolutional(spec: Convolutional, scope: Scope) -> Part:
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


def mixing(spec: Mixing, scope: Scope) -> Part:
    """No parameters and no matrix product. The width of the values is not declared, so this is for one column."""
    flops = {"identity": 0, "average": scope.b * scope.n, "select": 0}[spec.how]
    return Part("mixing", Amounts(elementwise_flops=flops), note="per column of the values")
