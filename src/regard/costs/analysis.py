"""Conclusions from a cost: biases side by side, savings of a pattern, the bottleneck, orders of products."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ..position import quadratic
from ..spec import Attention
from ..spec.attention import BIASES
from .declaration import build_tree, with_biases
from .sizes import Numbers, Request
from .trace.tracer import merged
from .tree import Amount, Amounts, Cost, Part

CORE = ("scores", "mixing")
PROJECTIONS = ("q", "k", "v", "output", "w_q", "w_k")


@lru_cache(maxsize=64)
def biases(request: Request) -> dict[str, int]:
    """Parameters with biases in no linear map, in the output of attention only, and in all."""
    variants = {word: replace(request, spec=with_biases(request.spec, word)) for word in BIASES}
    return {word: build_tree(r, Numbers())[0].total.parameters for word, r in variants.items()}


@dataclass(frozen=True)
class Saving:
    """The share of FLOPs that the patterns save compared with full attention."""

    core: float  # of scores and mixing, by the pairs that the pattern allows
    total: float  # of the whole model: a pattern does not change projections
    core_executed: float  # by the pairs that the backend evaluates: a mask alone saves nothing
    total_executed: float

    def __str__(self) -> str:
        return (
            f"the pattern saves {self.core:.4%} of the FLOPs of scores and mixing, {self.total:.4%} of the total; "
            f"with this backend {self.core_executed:.4%} and {self.total_executed:.4%}"
        )


@lru_cache(maxsize=64)
def saving(request: Request) -> Saving:
    sparse, _ = build_tree(request, Numbers())
    dense, _ = build_tree(request, Numbers(), ignore_patterns=True)
    core, dense_core = core_of(sparse), core_of(dense)

    def saved(now: Amount, before: Amount) -> float:
        return 1 - now / before if before else 0.0

    return Saving(
        saved(core.flops, dense_core.flops),
        saved(sparse.total.flops, dense.total.flops),
        saved(core.executed_flops, dense_core.flops),
        saved(core.executed_flops + sparse.total.flops - core.flops, dense.total.flops),
    )


def core_of(tree: Part) -> Amounts:
    """Scores and mixing of all attentions."""
    return sum((a for path, a in tree.terms() if path.rpartition("/")[2] in CORE), Amounts())


@dataclass(frozen=True)
class Bottleneck:
    """The kind of work with the most FLOPs, and its arithmetic intensity."""

    part: str  # projections, core, feed-forward, head or rest
    share: float  # of the FLOPs
    flops: Amount
    bytes: Amount
    why: str

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOP/byte: if it is below the machine balance, memory bandwidth is the limit."""
        return self.flops / self.bytes if self.bytes else float("inf")

    def limit(self, balance: float) -> str:
        """`compute` or `memory`, on a machine with this balance: peak FLOP/s divided by bytes/s."""
        return "compute" if self.intensity >= balance else "memory"

    def __str__(self) -> str:
        return (
            f"bottleneck: {self.part}, {self.share:.1%} of the FLOPs ({self.why}); "
            f"arithmetic intensity {self.intensity:.1f} FLOP/byte"
        )


def kind_of(path: str) -> str:
    """The kind of work of a term of a declaration."""
    last = path.rpartition("/")[2]
    if "feed_forward/" in path:
        return "feed-forward"
    if "head/" in path or last in ("head", "logits"):
        return "head"
    if last in CORE:
        return "core"
    return "projections" if last in PROJECTIONS else "rest"


def module_of(path: str) -> str:
    """For a traced module: the attention core, or the module of a term, with layers merged (`layers.*.linear1`)."""
    inside, _, last = path.rpartition("/")
    if "attention" in last:
        return "core"
    return merged(inside) or last


def bottleneck(cost: Cost) -> Bottleneck | None:
    """The dominating kind of work; None if there are no matrix products."""
    name = kind_of if cost.request is not None else module_of
    kinds: dict[str, Amounts] = {}
    for path, amounts in cost.tree.terms():
        kinds[name(path)] = kinds.get(name(path), Amounts()) + amounts
    total = cost.total.executed_flops
    if not total:
        return None
    part = max(kinds, key=lambda kind: kinds[kind].executed_flops)
    flops = kinds[part].executed_flops
    return Bottleneck(part, flops / total, flops, kinds[part].bytes, _why(part, kinds, cost))


def _why(part: str, kinds: dict[str, Amounts], cost: Cost) -> str:
    if cost.request is None and part != "core":
        return "more than any other module"
    core, projections = (kinds.get(k, Amounts()).executed_flops for k in ("core", "projections"))
    if part == "core":
        return (
            f"pairs grow as n·m, projections as n + m: here {core / projections:.1f} times the projections"
            if projections
            else "more than everything else"
        )
    if part == "projections" and core:
        return f"few pairs for this width: {projections / core:.1f} times the attention core"
    return {
        "feed-forward": "its matrices are the widest",
        "head": "the vocabulary is larger than all layers together",
    }.get(part, "there is no attention in it")


def leading_order(formula: Any) -> Any:
    """The monomials of a sum that no other one dominates, without coefficients: 6·n·d² + 4·n²·d → n·d² + n²·d."""
    import sympy

    def powers(term: Any) -> dict[Any, Any]:
        return {base: power for base, power in term.as_powers_dict().items() if base.free_symbols}

    monomials = {
        sympy.Mul(*(base**p for base, p in powers(t).items())) for t in sympy.Add.make_args(formula.expand())
    }

    def dominated(term: Any) -> bool:
        mine = powers(term)
        others = (powers(t) for t in monomials if t != term)
        return any(all(theirs.get(base, 0) >= p for base, p in mine.items()) for theirs in others)

    return sympy.Add(*(term for term in monomials if not dominated(term)))


@dataclass(frozen=True)
class ScoreOrders:
    """FLOPs of all content scores x_i W_q W_kᵀ x_jᵀ of one attention, in three orders of the same products.

    naive      every pair projects its query and its key        n·m·(2·d·d_k + 2·d·d_k + 2·d_k) per head
    projected  every vector is projected once                   2·n·d·h·d_k + 2·m·d·h·d_k + 2·n·m·h·d_k
    merged_qk  W_q W_kᵀ first, then x (W_q W_kᵀ) xᵀ             2·d·d_k·d + 2·n·d·d + 2·n·m·d per head
    """

    naive: Amount
    projected: Amount
    merged_qk: Amount


def score_orders(
    n: Amount, m: Amount, d: Amount, heads: Amount = 1, d_k: Amount | None = None
) -> ScoreOrders:
    """FLOPs of content scores in three orders; the sizes may be numbers or symbols.

    >>> score_orders(1000, 1000, 512)
    ScoreOrders(naive=1049600000000, projected=2072576000, merged_qk=1816723456)
    """
    d_k = d if d_k is None else d_k
    return ScoreOrders(
        naive=heads * n * m * (4 * d * d_k + 2 * d_k),
        projected=heads * (2 * n * d * d_k + 2 * m * d * d_k + 2 * n * m * d_k),
        merged_qk=heads * (2 * d * d_k * d + 2 * n * d * d + 2 * n * m * d),
    )


@dataclass(frozen=True)
class RelativeOrders:
    """FLOPs of scores r_{j−i} · v of relative positions with d_p features: per pair, or per distinct offset."""

    per_pair: Amount
    offsets: Amount  # the number of distinct offsets: n + m − 1 on a line
    per_offset: Amount
    with_content: Amount  # per pair, plus content scores with each vector projected once


def relative_orders(
    n: Amount, m: Amount, d_p: Amount, d: Amount, heads: Amount = 1, offsets: Amount | None = None
) -> RelativeOrders:
    """FLOPs of position scores, and together with content scores of heads of width d / heads.

    offsets: the number of distinct offsets; needed on a grid.

    >>> relative_orders(1000, 1000, 3, 512)
    RelativeOrders(per_pair=6000000, offsets=1999, per_offset=11994, with_content=2078576000)
    """
    offsets = n + m - 1 if offsets is None else offsets
    per_pair = 2 * heads * n * m * d_p
    content = (
        2 * n * d * d + 2 * m * d * d + 2 * n * m * d
    )  # for any number of heads: together their width is d
    return RelativeOrders(per_pair, offsets, 2 * heads * offsets * d_p, content + per_pair)


def position_orders_of(request: Request) -> RelativeOrders | None:
    """For a declared attention with a quadratic position, ‖δ‖² and δ: d_p is 2 on a line, 3 on a grid."""
    spec: Any = request.spec
    if not isinstance(spec, Attention) or not isinstance(spec.position, quadratic):
        return None
    s, grid = spec.sizes, spec.position.grid
    offsets = None if grid is None else (2 * grid[0] - 1) * (2 * grid[1] - 1)
    return relative_orders(request.n, request.m, spec.position.axes + 1, s.heads * s.d_k, s.heads, offsets)


def score_orders_of(request: Request) -> ScoreOrders | None:
    """For a declared attention with dot-product scores."""
    spec: Any = request.spec
    if not isinstance(spec, Attention) or spec.score != "dot":
        return None
    s = spec.sizes
    if s.d_context != s.d_model:
        return None
    return score_orders(request.n, request.m, s.d_model, s.heads, s.d_k)
