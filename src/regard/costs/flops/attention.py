"""Attention, term by term: projections, what a position adds, scores, scale, softmax, mixing, output."""

from dataclasses import replace

from ...position import Position, alibi, learned, quadratic, relative_table, rope, shaw, t5_buckets
from ...spec import Attention, Sizes
from ..sizes import Core, Scope, core
from ..tree import Amount, Amounts, Part
from .terms import linear, some


def attention(
    spec: Attention, at: Scope, name: str = "attention", shared: Position | None = None, cross: bool = False
) -> Part:
    """concat_h softmax(scale · Q_h K_hᵀ + bias) V_h, times W_O. `shared`: a position that the stack holds."""
    at = at.inside(name)
    s, b, n, m = at.read.attention(spec), at.b, at.n, at.m
    every = spec.biases == "all"
    pairs = core(spec, at, shared, cross)
    parts: tuple[Part, ...] = some(
        linear("q", at, b * n, s.d_model, s.heads * s.d_k, every) if spec.score != "position" else None,
        linear("k", at, b * m, s.d_context, s.kv_heads * s.d_k, every)
        if spec.score in ("dot", "additive")
        else None,
        linear("v", at, b * m, s.d_context, s.kv_heads * s.d_v, every),
        *positions(spec, at, s),
        _scores(spec, at, s, pairs),
        _bias(spec, at, s, pairs, shared),
        Part("scale", Amounts(other=b * s.heads * pairs.needed, bytes=_table(at, s, pairs, 2))),
        _softmax(spec, at, s, pairs),
        _mixing(spec, at, s, pairs),
        linear("output", at, b * n, s.heads * s.d_v, s.d_out, spec.biases != "none") if spec.output else None,
    )
    if hard(spec):
        parts = tuple(_without_gradient(p) if p.name in ("q", "k", "position") else p for p in parts)
    return Part(name, parts=parts)


def hard(spec: Attention) -> bool:
    """The largest score takes all: a step, whose gradient reaches the values alone."""
    return spec.factor == float("inf")


def weights_are_fixed(spec: Attention) -> bool:
    """No gradient flows through the weights: they are hard, or made of what does not learn."""
    return hard(spec) or (spec.score == "position" and isinstance(spec.position, alibi))


def _without_gradient(part: Part) -> Part:
    return replace(part, own=replace(part.own, backward=0, executed_backward=0))


def _scores(spec: Attention, at: Scope, s: Sizes, pairs: Core) -> Part:
    """q·k: 2 d_k a pair. An additive score is no matrix product: add, tanh, multiply, add, a value of d_k.

    A score that is no dot product reaches the engine as a bias on zeros, which are multiplied all the same.
    """
    width = 1 if spec.score == "position" else s.d_k
    rows = at.b * s.heads
    needed = 2 * rows * pairs.needed * width if spec.score in ("dot", "bilinear") else 0
    executed = 0 if _outer(pairs, spec.sizes.d_k if width != 1 else 1) else 2 * rows * pairs.computed * width
    moved = at.itemsize * at.b * width * (s.heads * at.n + s.kv_heads * at.m) + _table(at, s, pairs, 1)
    if pairs.backend == "masked":
        moved += at.n * at.m  # the table of allowed pairs, a byte each
    if spec.score == "additive":
        moved += 2 * at.itemsize * rows * at.n * at.m * s.d_k
    own = Amounts(
        parameters=s.heads * s.d_k if spec.score == "additive" else 0,
        operations=needed,
        backward=0 if hard(spec) else 2 * needed,
        other=rows * pairs.needed * (4 * s.d_k - 1) if spec.score == "additive" else 0,
        executed=executed,
        executed_backward=_back_of_scores(spec, pairs) * executed,
        bytes=moved,
    )
    again = "once more in the backward pass" if pairs.fused and at.given.train else ""
    return Part("scores", own, note=again)


def _back_of_scores(spec: Attention, pairs: Core) -> int:
    """How many products as large the backward pass runs: to q, to k, and where fused the scores once more."""
    if pairs.fused:
        return 3
    if hard(spec):
        return 0
    return {"additive": 1, "position": 0}.get(spec.score, 2)  # zeros want no gradient


def _outer(pairs: Core, summed: int) -> bool:
    """Whether einsum, of which the plain way is made, multiplies entry by entry: there is one product to sum."""
    return pairs.backend == "plain" and summed == 1


def _softmax(spec: Attention, at: Scope, s: Sizes, pairs: Core) -> Part:
    """5m − 2 a row of m entries: m − 1 comparisons, m subtractions, m exponentials, m − 1 sums, m divisions.

    Hard attention compares with the largest instead: 4m − 2.
    """
    other = at.b * s.heads * ((4 if hard(spec) else 5) * pairs.needed - 2 * pairs.rows)
    return Part("softmax", Amounts(other=other, bytes=_table(at, s, pairs, 2)))


def _mixing(spec: Attention, at: Scope, s: Sizes, pairs: Core) -> Part:
    """weights · v: 2 d_v a pair. With dropout the plain way mixes twice, before it and after."""
    needed, executed = (2 * at.b * s.heads * count * s.d_v for count in (pairs.needed, pairs.computed))
    executed = 0 if _outer(pairs, at.keys.value) else executed
    moved = at.itemsize * at.b * s.d_v * (s.kv_heads * at.m + s.heads * at.n) + _table(at, s, pairs, 1)
    back = 1 if weights_are_fixed(spec) else 2
    twice = pairs.backend == "plain" and at.given.train and spec.dropout > 0
    own = Amounts(0, needed, back * needed, 0, (2 if twice else 1) * executed, back * executed, moved)
    return Part("mixing", own)


def _table(at: Scope, s: Sizes, pairs: Core, times: int) -> Amount:
    """Bytes of moving the table of scores so often; a fused way keeps it on the chip."""
    return 0 if pairs.fused else times * at.itemsize * at.b * s.heads * pairs.computed


def positions(spec: Attention, at: Scope, s: Sizes) -> tuple[Part, ...]:
    """What a position inside this attention does to queries, keys, scores and values."""
    match spec.position:
        case None:
            return ()
        case rope() as turn:
            width = at.size("d_turned", turn.width(spec.sizes.d_k)) if turn.fraction != 1 else s.d_k
            values = at.b * (s.heads * at.n + s.kv_heads * at.m) * width
            return (Part("position", Amounts(other=3 * values, bytes=at.itemsize * 2 * values)),)
        case shaw() as vectors:
            return _shaw(vectors, at, s, hard(spec))
    return (Part("position", Amounts(parameters=table(spec.position, at, s))),)


def table(position: Position, at: Scope, s: Sizes) -> Amount:
    """Parameters of a position that scores, for all heads."""
    match position:
        case t5_buckets():
            return s.heads * at.size("buckets", position.buckets)
        case relative_table():
            return s.heads * at.size("entries", position.entries)
        case quadratic():
            return s.heads * (position.axes + 1)
        case alibi() | rope():
            return 0
    raise AssertionError(f"{position!r} is no position of all layers")


def _shaw(position: shaw, at: Scope, s: Sizes, fixed: bool) -> tuple[Part, ...]:
    """q against 2·reach + 1 vectors, and the weights summed by distance against as many more.

    The weights of the second come from a formula of their own: scores once more, and a product thrown away.
    fixed: no gradient flows through the weights.
    """
    entries, rows = at.size("entries", 2 * position.reach + 1), at.b * s.heads * at.n
    keys = 2 * rows * entries * s.d_k
    moved = at.itemsize * rows * (s.d_k + entries + at.m)
    parts = (Part("position", Amounts(entries * s.d_k, keys, 2 * keys, 0, keys, 2 * keys, moved)),)
    if not position.values:
        return parts
    values, again = 2 * rows * entries * s.d_v, 2 * rows * at.m * s.d_k
    own = Amounts(
        parameters=entries * s.d_v,
        operations=values,
        backward=(1 if fixed else 2) * values,
        other=rows * at.m,
        executed=values + 2 * again,
        executed_backward=values if fixed else 2 * values + 2 * again,
        bytes=at.itemsize * rows * (3 * at.m + entries + s.d_v),
    )
    return (*parts, Part("position_values", own, note="the weights are computed apart for it"))


def _bias(spec: Attention, at: Scope, s: Sizes, pairs: Core, shared: Position | None) -> Part | None:
    """One addition a pair where a position scores."""
    acting = shared or spec.position
    if spec.score != "additive" and (acting is None or acting.acts != "score"):
        return None
    return Part(
        "bias", Amounts(other=at.b * s.heads * pairs.needed, bytes=at.itemsize * s.heads * at.n * at.m)
    )


def table_at_input(position: Position | None, at: Scope, d: Amount) -> Amount:
    """Parameters of a position that is added to the input."""
    return at.size("positions", position.entries) * d if isinstance(position, learned) else 0
