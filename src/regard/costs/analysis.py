"""What is read off a cost: biases side by side, what a pattern saves, which part dominates, other ways to score."""

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ..position import quadratic
from ..spec import Attention
from ..spec.attention import BIASES
from .declaration import read, with_biases
from .sizes import Given, Numbers
from .tree import Amount, Amounts, Cost, Part

CORE = ("scores", "mixing")
PROJECTIONS = ("q", "k", "v", "output", "w_q", "w_k")


@lru_cache(maxsize=64)
def biases(given: Given) -> dict[str, int]:
    """Parameters with biases in no linear map, in attention's output alone, and in all (D7)."""
    each = {word: replace(given, spec=with_biases(given.spec, word)) for word in BIASES}
    return {word: read(g, Numbers())[0].total.parameters for word, g in each.items()}


@dataclass(frozen=True)
class Saving:
    """What the patterns save against looking everywhere, as shares: of operations counted and computed."""

    core: float  # scores and mixing, by the pairs that the pattern needs
    whole: float  # with projections and all the rest, which a pattern leaves as they are
    core_computed: float  # by the pairs that the backend computes: a mask alone saves nothing
    whole_computed: float

    def __str__(self) -> str:
        return (
            f"saved by the pattern: {self.core:.4%} of scores and mixing, {self.whole:.4%} of the whole; "
            f"by this backend {self.core_computed:.4%} and {self.whole_computed:.4%}"
        )


@lru_cache(maxsize=64)
def saving(given: Given) -> Saving:
    ours, _ = read(given, Numbers())
    dense, _ = read(given, Numbers(), ignore_patterns=True)
    core, full = core_of(ours), core_of(dense)

    def less(now: Amount, before: Amount) -> float:
        return 1 - now / before if before else 0.0

    return Saving(
        less(core.operations, full.operations),
        less(ours.total.operations, dense.total.operations),
        less(core.executed, full.operations),
        less(core.executed + ours.total.operations - core.operations, dense.total.operations),
    )


def core_of(tree: Part) -> Amounts:
    """Scores and mixing of all attentions."""
    return sum((a for path, a in tree.terms() if path.rpartition("/")[2] in CORE), Amounts())


@dataclass(frozen=True)
class Bottleneck:
    """The kind of work that most operations go to, and how many of them come with each byte that is moved."""

    part: str  # projections, core, feed-forward, head or rest
    share: float  # of the operations
    operations: Amount
    bytes: Amount
    why: str

    @property
    def intensity(self) -> float:
        """Operations a byte: below what the machine does in the time of one byte, memory is the limit."""
        return self.operations / self.bytes if self.bytes else float("inf")

    def limit(self, balance: float) -> str:
        """`operations` or `bytes`, on a machine that does `balance` operations while it moves a byte."""
        return "operations" if self.intensity >= balance else "bytes"

    def __str__(self) -> str:
        return (
            f"bottleneck: {self.part}, {self.share:.1%} of the operations; {self.why}; "
            f"{self.intensity:.1f} operations a byte: a machine that does more in that time waits for bytes"
        )


def kind_of(path: str) -> str:
    """Which kind of work a term is."""
    last = path.rpartition("/")[2]
    if "feed_forward/" in path:
        return "feed-forward"
    if "head/" in path or last in ("head", "logits"):
        return "head"
    if last in CORE:
        return "core"
    return "projections" if last in PROJECTIONS else "rest"


def module_of(path: str) -> str:
    """In a traced module: attention's core, or the module a term is in, alike ones together (`layers.*.linear1`)."""
    inside, _, last = path.rpartition("/")
    if "attention" in last:
        return "core"
    return re.sub(r"(?<![^/.])\d+(?![^/.])", "*", inside) or last


def bottleneck(cost: Cost) -> Bottleneck | None:
    """The dominating kind of work; None where there are no matrix products."""
    name = kind_of if cost.facts is not None else module_of
    kinds: dict[str, Amounts] = {}
    for path, amounts in cost.tree.terms():
        kinds[name(path)] = kinds.get(name(path), Amounts()) + amounts
    whole = cost.total.executed
    if not whole:
        return None
    part = max(kinds, key=lambda kind: kinds[kind].executed)
    most = kinds[part]
    return Bottleneck(part, most.executed / whole, most.executed, most.bytes, _why(part, kinds, cost))


def _why(part: str, kinds: dict[str, Amounts], cost: Cost) -> str:
    if cost.facts is None and part != "core":
        return "no other module multiplies as much"
    core, projections = (kinds.get(k, Amounts()).executed for k in ("core", "projections"))
    if part == "core":
        return (
            f"pairs grow as n·m, projections as n + m: {core / projections:.1f} times their work here"
            if projections
            else "the rest multiplies less"
        )
    if part == "projections" and core:
        return f"pairs are few for the width: {projections / core:.1f} times their work here"
    return {
        "feed-forward": "its matrices are the widest",
        "head": "the vocabulary is wider than all layers",
    }.get(part, "no attention is in it")


def leading_order(formula: Any) -> Any:
    """The monomials of a sum that no other one outgrows, without their factors: 6·n·d² + 4·n²·d → n·d² + n²·d."""
    import sympy

    def powers(term: Any) -> dict[Any, Any]:
        return {base: power for base, power in term.as_powers_dict().items() if base.free_symbols}

    found = {
        sympy.Mul(*(base**p for base, p in powers(t).items())) for t in sympy.Add.make_args(formula.expand())
    }

    def outgrown(term: Any) -> bool:
        mine = powers(term)
        others = (powers(t) for t in found if t != term)
        return any(all(theirs.get(base, 0) >= p for base, p in mine.items()) for theirs in others)

    return sympy.Add(*(term for term in found if not outgrown(term)))


@dataclass(frozen=True)
class ScoreWays:
    """Operations of all scores of one attention, by three orders of the same products; and with positions.

    again   each pair projects its query and its key anew       n·m·(2·d·d_k + 2·d·d_k + 2·d_k) a head
    once    each vector is projected once                       2·n·d·h·d_k + 2·m·d·h·d_k + 2·n·m·h·d_k
    merged  W_q W_kᵀ first, then x (W_q W_kᵀ) x                  2·d·d_k·d + 2·n·d·d + 2·n·m·d a head
    """

    again: Amount
    once: Amount
    merged: Amount


def score_ways(n: Amount, m: Amount, d: Amount, heads: Amount = 1, d_k: Amount | None = None) -> ScoreWays:
    """Content scores x_i W_q W_kᵀ x_jᵀ counted three ways; by symbols too.

    >>> score_ways(1000, 1000, 512)
    ScoreWays(again=1049600000000, once=2072576000, merged=1816723456)
    """
    d_k = d if d_k is None else d_k
    return ScoreWays(
        again=heads * n * m * (4 * d * d_k + 2 * d_k),
        once=heads * (2 * n * d * d_k + 2 * m * d * d_k + 2 * n * m * d_k),
        merged=heads * (2 * d * d_k * d + 2 * n * d * d + 2 * n * m * d),
    )


@dataclass(frozen=True)
class RelativeWays:
    """Operations of scores r_{j−i} · v of relative positions d_p wide: a pair each, or each offset once."""

    pairs: Amount
    offsets: Amount  # how many there are: n + m − 1 on a line
    each_offset_once: Amount
    with_content: Amount  # the pairs, and content scores projected once


def relative_ways(
    n: Amount, m: Amount, d_p: Amount, d: Amount, heads: Amount = 1, offsets: Amount | None = None
) -> RelativeWays:
    """Position scores alone, and beside content scores of heads d / heads wide; on a grid say how many offsets.

    >>> relative_ways(1000, 1000, 3, 512)
    RelativeWays(pairs=6000000, offsets=1999, each_offset_once=11994, with_content=2078576000)
    """
    offsets = n + m - 1 if offsets is None else offsets
    pairs = 2 * heads * n * m * d_p
    content = 2 * n * d * d + 2 * m * d * d + 2 * n * m * d  # any number of heads: together they are d wide
    return RelativeWays(pairs, offsets, 2 * heads * offsets * d_p, content + pairs)


def positions_of(given: Given) -> RelativeWays | None:
    """The ways of a declared attention whose position scores by ‖δ‖² and δ: d_p is 2 on a line, 3 on a grid."""
    spec: Any = given.spec
    if not isinstance(spec, Attention) or not isinstance(spec.position, quadratic):
        return None
    s, grid = spec.sizes, spec.position.grid
    offsets = None if grid is None else (2 * grid[0] - 1) * (2 * grid[1] - 1)
    return relative_ways(given.n, given.m, spec.position.axes + 1, s.heads * s.d_k, s.heads, offsets)


def ways_of(given: Given) -> ScoreWays | None:
    """The three ways, for one declared attention with a dot score."""
    spec: Any = given.spec
    if not isinstance(spec, Attention) or spec.score != "dot":
        return None
    s = spec.sizes
    return score_ways(given.n, given.m, s.d_model, s.heads, s.d_k) if s.d_context == s.d_model else None
