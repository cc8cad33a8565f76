"""What attention is compared with: recurrent and convolutional models, and fixed mixing."""

from dataclasses import replace

from ...spec import Convolutional, Mixing, Recurrent
from ..sizes import Length, Scope
from ..tree import Amount, Amounts, Part
from .terms import elementwise, linear, some

GATES = {"rnn": 1, "gru": 3, "lstm": 4}
# A step's operations on each of its states that are no product: sums, gates, what is kept and what is let in.
INSIDE = {"rnn": 2, "gru": 12, "lstm": 13}


def recurrent(spec: Recurrent, at: Scope) -> Part:
    """An encoder over m source tokens, a decoder over n target ones, attention between, logits."""
    d, b = at.size("d_model", spec.d_model), at.b
    vocab = at.size("vocab", spec.vocab)
    target = vocab if spec.target_vocab is None else at.size("target_vocab", spec.target_vocab)
    looks = spec.attention != "none"
    parts = some(
        _lookup("source", at, b * at.m, vocab, d),
        _lookup("target", at, b * at.n, target, d),
        cells(spec, at, at.keys, "encoder"),
        cells(spec, at, at.queries, "decoder"),
        _look(spec, at, d) if looks else None,
        linear("head", at, b * at.n, (2 if looks else 1) * d, target, True),
    )
    return Part("model", parts=parts)


def _lookup(name: str, at: Scope, rows: Amount, vocab: Amount, d: Amount) -> Part:
    return Part(f"embed_{name}", Amounts(vocab * d, bytes=rows * (8 + 2 * at.itemsize * d)))


def cells(spec: Recurrent, at: Scope, steps: Length, name: str) -> Part:
    """gates · 2 · (d_in + d) · d a step: what comes in and the state each meet a matrix."""
    d, gates = at.size("d_model", spec.d_model), GATES[spec.cell]
    ways = 2 if spec.bidirectional and name == "encoder" else 1
    width = d if ways == 1 else d / 2 if not isinstance(d, int) else d // 2
    rows = at.b * steps.amount
    parts = []
    for l in range(spec.layers):
        inputs = linear("inputs", at, rows, d, gates * width, True)
        states = linear("states", at, rows, width, gates * width, True)
        if name == "encoder":  # it starts from zeros, which want no gradient
            back = states.own.backward - 2 * at.b * width * gates * width
            states = replace(states, own=replace(states.own, backward=back, executed_backward=back))
        inside = elementwise("gates", at, rows * width, INSIDE[spec.cell], gates + 2)
        parts.append(Part(f"layer_{l}", parts=(inputs, states, inside), times=ways))
    return Part(name, parts=tuple(parts))


def _look(spec: Recurrent, at: Scope, d: Amount) -> Part:
    """Luong's attention: score each state with each source state, mix."""
    b, n, m = at.b, at.n, at.m
    product = 2 * b * n * m * d
    pairs = Amounts(
        0, product, 2 * product, 0, product, 2 * product, at.itemsize * b * (n * d + m * d + n * m)
    )
    additive = spec.attention == "additive"
    other = Amounts(
        d, other=b * n * m * (4 * d - 1), bytes=at.itemsize * b * (n * d + m * d + 2 * n * m * d + n * m)
    )
    parts = some(
        linear("w_q", at, b * n, d, d, False),
        linear("w_k", at, b * m, d, d, False) if additive else None,
        Part("scores", other if additive else pairs),
        Part("softmax", Amounts(other=b * n * (5 * m - 2), bytes=2 * at.itemsize * b * n * m)),
        Part("mixing", pairs),
    )
    return Part("attention", parts=parts)


def convolutional(spec: Convolutional, at: Scope) -> Part:
    """Layers of k taps: k·n·d² products, or k·n·d + n·d² where separable."""
    d, k, rows = at.size("d_model", spec.d_model), at.size("k", spec.kernel), at.b * at.n
    if spec.separable:
        product = 2 * rows * k * d
        moved = at.itemsize * (2 * rows * d + k * d)
        each = Part("depthwise", Amounts(k * d, product, 2 * product, 0, product, 2 * product, moved))
        mixing: tuple[Part, ...] = (each, linear("pointwise", at, rows, d, d, True))
    else:
        mixing = (linear("convolution", at, rows, k * d, d, True),)
    inside = (elementwise("activation", at, rows * d, 5), elementwise("sum", at, rows * d, 1, 3))
    layers = Part("layer", parts=(*mixing, *inside), times=at.size("layers", spec.layers))
    if spec.vocab is None:
        return Part("model", parts=(layers,))
    vocab = at.size("vocab", spec.vocab)
    tokens = Part("embedding", Amounts(vocab * d, bytes=rows * (8 + 2 * at.itemsize * d)))
    return Part("model", parts=(tokens, layers, linear("head", at, rows, d, vocab, True)))


def mixing(spec: Mixing, at: Scope) -> Part:
    """No parameter and no product. The width of what is mixed is not declared, so it is counted a column."""
    other = {"identity": 0, "average": at.b * at.n, "select": 0}[spec.how]
    return Part("mixing", Amounts(other=other), note="for each column of the values")
