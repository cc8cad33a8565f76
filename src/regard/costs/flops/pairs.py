"""The query-key pairs of one attention: allowed by its pattern, and evaluated by the backend that would run it."""

from typing import NamedTuple

from ...engine.backends import choose
from ...engine.call import CallFacts
from ...pattern import Pattern, causal, full
from ...position import Position, shaw
from ...spec import Attention
from ..sizes import Request, Scope
from ..tree import Amount, Pairs

# Backends that never store the table of scores; their backward pass recomputes the scores.
FUSED = ("sdpa", "tiles", "triton", "flex", "flash4")


class AttentionPairs(NamedTuple):
    """The pairs of one attention for one head, and the backend that evaluates them."""

    needed: Amount
    computed: Amount
    rows: Amount  # queries with at least one allowed key
    backend: str
    variant: str

    @property
    def fused(self) -> bool:
        return self.backend in FUSED


def attention_pairs(spec: Attention, scope: Scope, shared: Position | None, cross: bool) -> AttentionPairs:
    """The pairs of this attention; they are also appended to `scope.attentions`."""
    n, m = scope.queries, scope.keys
    pattern = full() if scope.ignore_patterns else spec.pattern
    facts = call_facts(spec, scope.request, n.value, m.value, shared, cross, pattern)
    choice = choose(facts, scope.request.backend)
    needed = pattern.count(n.value, m.value, facts.offset)
    computed, rows = choice.computed, _rows_with_keys(pattern, facts)
    scope.attentions.append(
        Pairs(scope.path, repr(pattern), needed, computed, n.value * m.value, choice.backend, choice.reason)
    )
    amount = scope.reader.pairs("pairs", needed, pattern, n, m)
    return AttentionPairs(
        amount,
        amount if computed == needed else scope.reader.pairs("pairs_computed", computed, full(), n, m),
        n.amount if rows == n.value else scope.size("rows", rows),
        choice.backend,
        choice.variant,
    )


def _rows_with_keys(pattern: Pattern, facts: CallFacts) -> int:
    """The number of queries with at least one allowed key."""
    if isinstance(pattern, full | causal):
        return facts.n
    return int((pattern.row_counts(facts.n, facts.m, facts.offset) > 0).sum())


def call_facts(
    spec: Attention,
    request: Request,
    n: int,
    m: int,
    shared: Position | None = None,
    cross: bool = False,
    pattern: Pattern | None = None,
) -> CallFacts:
    """The call that the engine would receive. `shared`: a position encoding that belongs to the stack."""
    sizes, position, bias = spec.sizes, shared or spec.position, "none"
    if spec.score == "additive":
        bias = "tensor"
    elif position is not None and position.acts == "score":
        bias = "distance" if _depends_on_distance_only(position) else "tensor"
    return CallFacts(
        spec.pattern if pattern is None else pattern,
        n,
        m,
        1 if spec.score == "position" else sizes.d_k,
        sizes.d_v,
        request.batch,
        sizes.heads,
        sizes.kv_heads,
        request.compute_dtype,
        request.device,
        at=0 if cross and n > m else None,
        bias=bias,
        bias_grad=bool(request.train) and bias != "none",
        scale=spec.factor if spec.factor == float("inf") else None,
        softcap=None if spec.softcap is None else float(spec.softcap),
        dropout_p=spec.dropout if request.train else 0.0,
        return_lse=spec.sink_logits,
        grad=bool(request.train),
    )


def _depends_on_distance_only(position: Position) -> bool:
    """Whether the bias is a function of i − j on a line."""
    return not isinstance(position, shaw) and getattr(position, "grid", None) is None
