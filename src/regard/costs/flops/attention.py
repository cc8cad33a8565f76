"""Attention, term by term: projections, position encoding, scores, scale, softmax, mixing, output.

The query-key pairs are those that the pattern allows, and those that the backend evaluates which would run it. Heads
with a pattern of their own are a call of their own, and a term is the sum over these calls.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from ...engine.backends import choose
from ...engine.call import CallFacts
from ...pattern import causal, empty_rows, full
from ...position import Position, alibi, quadratic, relative_table, rope, shaw, t5_buckets
from ...spec import Attention, Sizes
from ..sizes import Scope
from ..tree import Amount, Amounts, Pairs, Part
from .terms import linear, present, product

# Backends that never store the table of scores; their backward pass recomputes the scores.
FUSED = ("sdpa", "tiles", "triton", "flex", "flash4")


class AttentionPairs(NamedTuple):
    """The heads of an attention that have one pattern, its pairs for each of them, and the backend that evaluates
    them."""

    heads: Amount
    kv_heads: Amount
    needed: Amount
    computed: Amount
    rows: Amount  # queries with at least one allowed key
    variant: str  # of the backend
    shown: Pairs

    @property
    def fused(self) -> bool:
        return self.shown.backend in FUSED

    def is_outer_product(self, summed: int) -> bool:
        """Whether the einsum of the reference backend multiplies elementwise: the summed axis has size 1."""
        return self.shown.backend == "reference" and summed == 1


def attention(
    spec: Attention,
    scope: Scope,
    name: str = "attention",
    shared: Position | None = None,
    cross: bool = False,
) -> Part:
    """concat_h softmax(scale · Q_h K_hᵀ + bias) V_h, times W_O. `shared`: a position encoding of the stack."""
    s, b, n, m = scope.sizes(spec), scope.b, scope.n, scope.m
    biased, position = spec.biases == "all", shared or spec.position
    calls = _pairs(spec, scope, shared, cross)
    keyed = spec.score in ("dot", "additive")
    added = spec.score == "additive" or (position is not None and position.acts == "score")
    every = sum(b * pairs.heads * pairs.needed for pairs in calls)
    tables = sum(_score_table(scope, pairs, 2) for pairs in calls)
    parts = present(
        spec.score != "position" and linear("q", scope, b * n, s.d_model, s.heads * s.d_k, biased),
        keyed and linear("k", scope, b * m, s.d_context, s.kv_heads * s.d_k, biased),
        linear("v", scope, b * m, s.d_values, s.kv_heads * s.d_v, biased),
        *_position(spec, scope, s),
        _scores(spec, scope, s, calls),
        added and Part("bias", Amounts(elementwise_flops=every, bytes=scope.itemsize * s.heads * n * m)),
        Part("scale", Amounts(elementwise_flops=every, bytes=tables)),
        Part("softmax", _sum(_softmax(spec, scope, pairs) for pairs in calls)),
        Part("mixing", _sum(_mixing(spec, scope, s, pairs) for pairs in calls)),
        spec.extra_key and _extra_key(scope, s),
        spec.output and linear("output", scope, b * n, s.heads * s.d_v, s.d_out, spec.biases != "none"),
    )
    if is_hard(spec):
        none = {"backward_flops": 0, "executed_backward_flops": 0}
        parts = tuple(p.with_own(**none) if p.name in ("q", "k", "position") else p for p in parts)
    return Part(name, parts=parts, pairs=tuple(pairs.shown for pairs in calls))


def _sum(amounts: Iterable[Amounts]) -> Amounts:
    return sum(amounts, Amounts())


def _pairs(spec: Attention, scope: Scope, shared: Position | None, cross: bool) -> list[AttentionPairs]:
    """The pairs of the calls that the engine would run. `shared`: a position encoding of the stack."""
    request, sizes, position, bias = scope.request, spec.sizes, shared or spec.position, "none"
    train = bool(request.train)
    n, m, pattern = scope.queries, scope.keys, full() if request.dense else spec.pattern
    if spec.score == "additive":
        bias = "tensor"
    elif position is not None and position.acts == "score":
        on_a_line = not isinstance(position, shaw) and getattr(position, "grid", None) is None
        bias = "distance" if on_a_line else "tensor"
    facts = CallFacts(
        pattern, n, m, 1 if spec.score == "position" else sizes.d_k, sizes.d_v, request.batch, sizes.heads,
        sizes.kv_heads, request.compute_dtype, request.device, at=0 if cross and n > m else None, bias=bias,
        bias_grad=train and bias != "none", scale=spec.factor if is_hard(spec) else None,
        softcap=None if spec.softcap is None else float(spec.softcap), dropout_p=spec.dropout if train else 0.0,
        sink_logits=spec.sink_logits, grad=train,
    )  # fmt: skip
    (heads, one), *others = facts.launches()
    if not others:
        s = scope.sizes(spec)
        return [_pairs_of(one, scope, s.heads, s.kv_heads)]
    return [_pairs_of(f, scope, f.heads, f.kv_heads, tuple(of)) for of, f in [(heads, one), *others]]


def _pairs_of(
    facts: CallFacts, scope: Scope, heads: Amount, kv_heads: Amount, numbers: tuple[int, ...] = ()
) -> AttentionPairs:
    """The pairs of one call. numbers: of its heads; none if it is of all heads."""
    n, m, pattern = facts.n, facts.m, facts.pattern
    choice = choose(facts, scope.request.backend)
    needed, computed, rows = pattern.count(n, m, facts.offset), choice.computed(), n
    if not isinstance(pattern, full | causal):
        rows = n - empty_rows(pattern, n, m, *facts.offset)
    amount = scope.pairs("pairs", needed, pattern)
    executed = amount if computed == needed else scope.pairs("pairs_computed", computed, full())
    shown = Pairs("", repr(pattern), needed, computed, n * m, choice.backend, choice.reason, numbers)
    queries = scope.n if rows == n else scope.size("rows", rows)
    return AttentionPairs(heads, kv_heads, amount, executed, queries, choice.variant, shown)


def is_hard(spec: Attention) -> bool:
    """Hard attention (argmax) is a step function of the scores: gradients reach only the values."""
    return spec.factor == float("inf")


def _scores(spec: Attention, scope: Scope, s: Sizes, calls: list[AttentionPairs]) -> Part:
    own = _sum(_score_products(spec, scope, s, pairs) for pairs in calls)
    recomputed = scope.request.train and any(pairs.fused for pairs in calls)
    return Part("scores", own, note="recomputed in the backward pass" if recomputed else "")


def _score_products(spec: Attention, scope: Scope, s: Sizes, pairs: AttentionPairs) -> Amounts:
    """q·k: 2 d_k per pair. An additive score is elementwise: add, tanh, multiply, add for each of d_k values.

    A score that is not a dot product reaches the engine as a bias on zero queries, whose products still run. A
    softcap divides, takes tanh and multiplies.
    """
    width, summed = (1, 1) if spec.score == "position" else (s.d_k, spec.sizes.d_k)
    heads, additive = pairs.heads, spec.score == "additive"
    rows = scope.b * heads
    needed = 2 * rows * pairs.needed * width if spec.score in ("dot", "bilinear") else 0
    executed = 0 if pairs.is_outer_product(summed) else 2 * rows * pairs.computed * width
    moved = scope.itemsize * scope.b * width * (heads * scope.n + pairs.kv_heads * scope.m)
    moved += _score_table(scope, pairs, 1)
    if pairs.variant == "masked":
        moved += scope.n * scope.m  # the bool mask, one byte per pair
    if additive:
        moved += 2 * scope.itemsize * rows * scope.n * scope.m * s.d_k
    # In the backward pass: products for q, for k, and if fused the scores again; constant zeros need no gradient.
    products = 0 if is_hard(spec) else {"additive": 1, "position": 0}.get(spec.score, 2)
    return Amounts(
        parameters=heads * s.d_k if additive else 0,
        flops=needed,
        backward_flops=0 if is_hard(spec) else 2 * needed,
        elementwise_flops=rows * pairs.needed * ((4 * s.d_k - 1 if additive else 0) + 3 * bool(spec.softcap)),
        executed_flops=executed,
        executed_backward_flops=(3 if pairs.fused else products) * executed,
        bytes=moved,
    )


def _softmax(spec: Attention, scope: Scope, pairs: AttentionPairs) -> Amounts:
    """5m − 2 per row of m entries: m − 1 comparisons, m subtractions, m exponentials, m − 1 sums, m divisions.

    Hard attention compares with the maximum instead: 4m − 2. A sink logit is one more entry, which is not divided: a
    comparison, a subtraction, an exponential and a sum.
    """
    per_row = 2 if spec.sink_logits else -2
    flops = scope.b * pairs.heads * ((4 if is_hard(spec) else 5) * pairs.needed + per_row * pairs.rows)
    sinks = pairs.heads if spec.sink_logits else 0
    return Amounts(sinks, elementwise_flops=flops, bytes=_score_table(scope, pairs, 2))


def _extra_key(scope: Scope, s: Sizes) -> Part:
    """One more key and value per head, joined after the softmax: a score, its share, and a sum for each row."""
    rows = scope.b * s.heads * scope.n
    own = Amounts(
        parameters=s.kv_heads * (s.d_k + s.d_v), elementwise_flops=rows * (2 * s.d_k + 3 * s.d_v + 6),
        bytes=scope.itemsize * rows * (s.d_k + 2 * s.d_v),
    )  # fmt: skip
    return Part("extra_key", own)


def _mixing(spec: Attention, scope: Scope, s: Sizes, pairs: AttentionPairs) -> Amounts:
    """weights · v: 2 d_v per pair. With dropout the reference backend mixes twice, without and with dropout.

    No gradient flows through weights that are hard, or that contain nothing learned.
    """
    each = 2 * scope.b * pairs.heads * s.d_v
    needed, executed = each * pairs.needed, 0 if pairs.is_outer_product(scope.keys) else each * pairs.computed
    moved = scope.itemsize * scope.b * s.d_v * (pairs.kv_heads * scope.m + pairs.heads * scope.n)
    fixed = is_hard(spec) or (spec.score == "position" and isinstance(spec.position, alibi))
    twice = pairs.shown.backend == "reference" and scope.request.train and spec.dropout > 0
    gradients = 1 if fixed else 2
    own = product(needed, bytes=moved + _score_table(scope, pairs, 1), gradients=gradients)
    executed_flops, backward = (2 if twice else 1) * executed, gradients * executed
    return replace(own, executed_flops=executed_flops, executed_backward_flops=backward)


def _score_table(scope: Scope, pairs: AttentionPairs, times: int) -> Amount:
    """Bytes of reading or writing the table of scores this many times; a fused kernel keeps it on chip."""
    return 0 if pairs.fused else times * scope.itemsize * scope.b * pairs.heads * pairs.computed


def _position(spec: Attention, scope: Scope, s: Sizes) -> tuple[Part, ...]:
    """The parts of a position encoding that belongs to this attention."""
    match spec.position:
        case None:
            return ()
        case rope() as rotary:
            width = scope.size("d_rotated", rotary.width(spec.sizes.d_k)) if rotary.fraction != 1 else s.d_k
            values = scope.b * (s.heads * scope.n + s.kv_heads * scope.m) * width
            own = Amounts(elementwise_flops=3 * values, bytes=scope.itemsize * 2 * values)
            return (Part("position", own),)
        case shaw() as vectors:
            return _shaw(vectors, scope, s, is_hard(spec))
    return (Part("position", Amounts(position_parameters(spec.position, scope, s))),)


def position_parameters(position: Position, scope: Scope, s: Sizes) -> Amount:
    """Parameters of a position encoding that acts on scores, for all heads."""
    match position:
        case t5_buckets():
            return s.heads * scope.size("buckets", position.buckets)
        case relative_table():
            return s.heads * scope.size("entries", position.entries)
        case quadratic():
            return s.heads * (position.axes + 1)
    return 0


def _shaw(position: shaw, scope: Scope, s: Sizes, fixed: bool) -> tuple[Part, ...]:
    """q times 2·reach + 1 key vectors, and the weights summed by distance times as many value vectors.

    The second needs the weights, which the reference computes separately: two products more are executed.
    fixed: no gradient flows through the weights.
    """
    entries, rows = scope.size("entries", 2 * position.reach + 1), scope.b * s.heads * scope.n
    moved = scope.itemsize * rows * (s.d_k + entries + scope.m)
    keys = Part("position", product(2 * rows * entries * s.d_k, entries * s.d_k, moved))
    if not position.values:
        return (keys,)
    values, weights = 2 * rows * entries * s.d_v, 2 * rows * scope.m * s.d_k
    own = replace(
        product(values, entries * s.d_v, scope.itemsize * rows * (3 * scope.m + entries + s.d_v), 2 - fixed),
        elementwise_flops=rows * scope.m,
        executed_flops=values + 2 * weights,
        executed_backward_flops=values if fixed else 2 * values + 2 * weights,
    )
    return keys, Part("position_values", own, note="computes the weights separately")
