"""Attention, term by term: projections, position encoding, scores, scale, softmax, mixing, output."""

from dataclasses import replace

from ...position import Position, alibi, learned, quadratic, relative_table, rope, shaw, t5_buckets
from ...spec import Attention, Sizes
from ..sizes import Scope
from ..tree import Amount, Amounts, Part
from .pairs import AttentionPairs, attention_pairs
from .terms import linear, present, product


def attention(
    spec: Attention,
    scope: Scope,
    name: str = "attention",
    shared: Position | None = None,
    cross: bool = False,
) -> Part:
    """concat_h softmax(scale · Q_h K_hᵀ + bias) V_h, times W_O. `shared`: a position encoding of the stack."""
    scope = scope.inside(name)
    s, b, n, m = scope.reader.attention(spec), scope.b, scope.n, scope.m
    biased = spec.biases == "all"
    pairs = attention_pairs(spec, scope, shared, cross)
    parts: tuple[Part, ...] = present(
        linear("q", scope, b * n, s.d_model, s.heads * s.d_k, biased) if spec.score != "position" else None,
        linear("k", scope, b * m, s.d_context, s.kv_heads * s.d_k, biased)
        if spec.score in ("dot", "additive")
        else None,
        linear("v", scope, b * m, s.d_values, s.kv_heads * s.d_v, biased),
        *position_parts(spec, scope, s),
        _scores(spec, scope, s, pairs),
        _bias(spec, scope, s, pairs, shared),
        Part(
            "scale",
            Amounts(elementwise_flops=b * s.heads * pairs.needed, bytes=_score_table(scope, s, pairs, 2)),
        ),
        _softmax(spec, scope, s, pairs),
        _mixing(spec, scope, s, pairs),
        _extra_key(scope, s) if spec.extra_key else None,
        linear("output", scope, b * n, s.heads * s.d_v, s.d_out, spec.biases != "none")
        if spec.output
        else None,
    )
    if is_hard(spec):
        parts = tuple(_without_gradient(p) if p.name in ("q", "k", "position") else p for p in parts)
    return Part(name, parts=parts)


def is_hard(spec: Attention) -> bool:
    """Hard attention (argmax) is a step function of the scores: gradients reach only the values."""
    return spec.factor == float("inf")


def weights_are_fixed(spec: Attention) -> bool:
    """Whether no gradient flows through the weights: they are hard, or contain nothing that is learned."""
    return is_hard(spec) or (spec.score == "position" and isinstance(spec.position, alibi))


def _without_gradient(part: Part) -> Part:
    return replace(part, own=replace(part.own, backward_flops=0, executed_backward_flops=0))


def _scores(spec: Attention, scope: Scope, s: Sizes, pairs: AttentionPairs) -> Part:
    """q·k: 2 d_k per pair. An additive score is elementwise: add, tanh, multiply, add for each of d_k values.

    A score that is not a dot product reaches the engine as a bias on zero queries, whose products still run.
    """
    width = 1 if spec.score == "position" else s.d_k
    rows = scope.b * s.heads
    needed = 2 * rows * pairs.needed * width if spec.score in ("dot", "bilinear") else 0
    executed_flops = (
        0
        if _is_outer_product(pairs, spec.sizes.d_k if width != 1 else 1)
        else 2 * rows * pairs.computed * width
    )
    moved = scope.itemsize * scope.b * width * (s.heads * scope.n + s.kv_heads * scope.m) + _score_table(
        scope, s, pairs, 1
    )
    if pairs.variant == "masked":
        moved += scope.n * scope.m  # the bool mask, one byte per pair
    if spec.score == "additive":
        moved += 2 * scope.itemsize * rows * scope.n * scope.m * s.d_k
    own = Amounts(
        parameters=s.heads * s.d_k if spec.score == "additive" else 0,
        flops=needed,
        backward_flops=0 if is_hard(spec) else 2 * needed,
        elementwise_flops=rows * pairs.needed * _per_pair(spec, s),
        executed_flops=executed_flops,
        executed_backward_flops=_backward_products(spec, pairs) * executed_flops,
        bytes=moved,
    )
    note = "recomputed in the backward pass" if pairs.fused and scope.request.train else ""
    return Part("scores", own, note=note)


def _per_pair(spec: Attention, s: Sizes) -> Amount:
    """Elementwise FLOPs of one score: of an additive one, and of a softcap (divide, tanh, multiply)."""
    return (4 * s.d_k - 1 if spec.score == "additive" else 0) + (0 if spec.softcap is None else 3)


def _backward_products(spec: Attention, pairs: AttentionPairs) -> int:
    """The number of products of this size in the backward pass: for q, for k, and if fused the scores again."""
    if pairs.fused:
        return 3
    if is_hard(spec):
        return 0
    return {"additive": 1, "position": 0}.get(spec.score, 2)  # constant zeros need no gradient


def _is_outer_product(pairs: AttentionPairs, summed: int) -> bool:
    """Whether the einsum of the reference backend multiplies elementwise, because the summed axis has size 1."""
    return pairs.backend == "reference" and summed == 1


def _softmax(spec: Attention, scope: Scope, s: Sizes, pairs: AttentionPairs) -> Part:
    """5m − 2 per row of m entries: m − 1 comparisons, m subtractions, m exponentials, m − 1 sums, m divisions.

    Hard attention compares with the maximum instead: 4m − 2. A sink logit is one more entry, which is not divided: a
    comparison, a subtraction, an exponential and a sum.
    """
    per_row = 2 if spec.sink_logits else -2
    flops = scope.b * s.heads * ((4 if is_hard(spec) else 5) * pairs.needed + per_row * pairs.rows)
    own = Amounts(
        parameters=s.heads if spec.sink_logits else 0,
        elementwise_flops=flops,
        bytes=_score_table(scope, s, pairs, 2),
    )
    return Part("softmax", own)


def _extra_key(scope: Scope, s: Sizes) -> Part:
    """One more key and value per head, joined after the softmax: a score, its share, and a sum for each row."""
    rows = scope.b * s.heads * scope.n
    own = Amounts(
        parameters=s.kv_heads * (s.d_k + s.d_v), elementwise_flops=rows * (2 * s.d_k + 3 * s.d_v + 6),
        bytes=scope.itemsize * rows * (s.d_k + 2 * s.d_v),
    )  # fmt: skip
    return Part("extra_key", own)


def _mixing(spec: Attention, scope: Scope, s: Sizes, pairs: AttentionPairs) -> Part:
    """weights · v: 2 d_v per pair. With dropout the reference backend mixes twice, without and with dropout."""
    needed, executed_flops = (
        2 * scope.b * s.heads * count * s.d_v for count in (pairs.needed, pairs.computed)
    )
    executed_flops = 0 if _is_outer_product(pairs, scope.keys.value) else executed_flops
    moved = scope.itemsize * scope.b * s.d_v * (s.kv_heads * scope.m + s.heads * scope.n) + _score_table(
        scope, s, pairs, 1
    )
    backward = 1 if weights_are_fixed(spec) else 2
    twice = pairs.backend == "reference" and scope.request.train and spec.dropout > 0
    own = Amounts(
        0,
        needed,
        backward * needed,
        0,
        (2 if twice else 1) * executed_flops,
        backward * executed_flops,
        moved,
    )
    return Part("mixing", own)


def _score_table(scope: Scope, s: Sizes, pairs: AttentionPairs, times: int) -> Amount:
    """Bytes of reading or writing the table of scores this many times; a fused kernel keeps it on chip."""
    return 0 if pairs.fused else times * scope.itemsize * scope.b * s.heads * pairs.computed


def position_parts(spec: Attention, scope: Scope, s: Sizes) -> tuple[Part, ...]:
    """The parts of a position encoding that belongs to this attention."""
    match spec.position:
        case None:
            return ()
        case rope() as rotary:
            width = scope.size("d_rotated", rotary.width(spec.sizes.d_k)) if rotary.fraction != 1 else s.d_k
            values = scope.b * (s.heads * scope.n + s.kv_heads * scope.m) * width
            return (
                Part("position", Amounts(elementwise_flops=3 * values, bytes=scope.itemsize * 2 * values)),
            )
        case shaw() as vectors:
            return _shaw(vectors, scope, s, is_hard(spec))
    return (Part("position", Amounts(parameters=position_parameters(spec.position, scope, s))),)


def position_parameters(position: Position, scope: Scope, s: Sizes) -> Amount:
    """Parameters of a position encoding that acts on scores, for all heads."""
    match position:
        case t5_buckets():
            return s.heads * scope.size("buckets", position.buckets)
        case relative_table():
            return s.heads * scope.size("entries", position.entries)
        case quadratic():
            return s.heads * (position.axes + 1)
        case alibi() | rope():
            return 0
    raise AssertionError(f"{position!r} does not act on scores")


def _shaw(position: shaw, scope: Scope, s: Sizes, fixed: bool) -> tuple[Part, ...]:
    """q times 2·reach + 1 key vectors, and the weights summed by distance times as many value vectors.

    The second needs the weights, which the reference computes separately: two products more are executed.
    fixed: no gradient flows through the weights.
    """
    entries, rows = scope.size("entries", 2 * position.reach + 1), scope.b * s.heads * scope.n
    moved = scope.itemsize * rows * (s.d_k + entries + scope.m)
    keys = product(2 * rows * entries * s.d_k, parameters=entries * s.d_k, bytes=moved)
    parts = (Part("position", keys),)
    if not position.values:
        return parts
    values, weights = 2 * rows * entries * s.d_v, 2 * rows * scope.m * s.d_k
    own = Amounts(
        parameters=entries * s.d_v,
        flops=values,
        backward_flops=(1 if fixed else 2) * values,
        elementwise_flops=rows * scope.m,
        executed_flops=values + 2 * weights,
        executed_backward_flops=values if fixed else 2 * values + 2 * weights,
        bytes=scope.itemsize * rows * (3 * scope.m + entries + s.d_v),
    )
    return (*parts, Part("position_values", own, note="computes the weights separately"))


def _bias(
    spec: Attention, scope: Scope, s: Sizes, pairs: AttentionPairs, shared: Position | None
) -> Part | None:
    """One addition per pair, if a position encoding acts on the scores."""
    position = shared or spec.position
    if spec.score != "additive" and (position is None or position.acts != "score"):
        return None
    return Part(
        "bias",
        Amounts(
            elementwise_flops=scope.b * s.heads * pairs.needed,
            bytes=scope.itemsize * s.heads * scope.n * scope.m,
        ),
    )


def input_position_parameters(position: Position | None, scope: Scope, d: Amount) -> Amount:
    """Parameters of a position encoding that is added to the input."""
    return scope.size("positions", position.entries) * d if isinstance(position, learned) else 0
