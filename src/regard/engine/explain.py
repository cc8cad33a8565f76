"""The plan in words: what a pattern would cost to run, by which way, and why."""

from dataclasses import dataclass

import torch

from ..pattern import At, Pattern, documents, lengths
from . import choose
from .cpu import packed
from .plan.planner import NoPlan


@dataclass(frozen=True)
class Explanation:
    """How a call would run. `print` it; the fields are for programs."""

    pattern: Pattern
    n: int
    m: int
    needed: int  # pairs of the pattern, for one head
    computed: int  # pairs the chosen way computes
    backend: str
    reason: str
    passes: tuple[str, ...]  # one line for each pass of the plan

    @property
    def waste(self) -> float:
        return self.computed / self.needed if self.needed else 1.0 + self.computed

    def __str__(self) -> str:
        full = self.n * self.m * _rows(self.pattern)
        share = self.needed / full if full else 0.0
        lines = [
            f"{self.pattern!r}: {self.n:,} queries, {self.m:,} keys",
            f"  pairs needed    {self.needed:,} of {full:,} ({share:.2%})",
            f"  pairs computed  {self.computed:,} ({self.waste:.2f} × needed)",
            f"  backend         {self.backend}: {self.reason}",
        ]
        return "\n".join(lines + [f"  {line}" for line in self.passes])


def explain(
    pattern: Pattern,
    n: int,
    m: int | None = None,
    *,
    d_k: int = 64,
    heads: int = 8,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    bias: str = "none",
    grad: bool = False,
    at: At = None,
    backend: str = "auto",
) -> Explanation:
    """The way `attention` would take for this pattern, the pairs it needs and computes, and why.

    >>> from regard.pattern import causal, every, window
    >>> print(explain(causal() & (window(128) | every(64)), n=16384))  # doctest: +ELLIPSIS
    causal() & (window(128) | every(64)): 16,384 queries, 16,384 keys
      pairs needed    4,177,666 of 268,435,456 (1.56%)
      pairs computed  ... (... × needed)
      backend         progressions: about ... of the time of a masked call
      ...
    """
    m = n if m is None else m
    facts = choose.Facts(
        pattern,
        n,
        m,
        d_k,
        d_k,
        heads,
        dtype,
        torch.device(device).type,
        at=at,
        bias=bias,
        bias_grad=grad,
        grad=grad,
    )
    choice = choose.choose(facts, backend)
    needed = pattern.count(n, m, facts.stands)
    if backend == "auto" and (cut := choose.short(facts, choice.backend)) is not None:
        told = f"it is short: {cut.tiles} × {cut.rows} queries, each time over the {cut.keys} keys gathered for them"
        return Explanation(pattern, n, m, needed, cut.pairs, choice.backend, told, ())
    if (lay := choose.abreast(facts, choice.backend)) is not None:
        told = f"{choice.reason}; tiles of {lay.rows} queries, all keys of a tile in one softmax"
        return Explanation(pattern, n, m, needed, lay.computed, choice.backend, told, _passes(facts))
    walks = choice.backend in ("progressions", "tiled")
    computed = choose.computed(facts) if walks else _whole(facts, choice.backend)
    return Explanation(pattern, n, m, needed, computed, *choice, _passes(facts))


def _whole(facts: choose.Facts, backend: str) -> int:
    """Square causal attention skips the future by blocks; packed and flex skip what the data hide, over all the
    batch rows the data speak of; whatever else PyTorch runs computes every pair."""
    pattern, n, m = facts.pattern, facts.n, facts.m
    if backend == "packed":
        return sum(way.computed for way in packed.programs(pattern, n, m, facts.at) or ())
    if backend == "flex":
        from . import flex

        return flex.visited(pattern, n, m, *facts.stands)
    if backend == "dense" and n == m and pattern.reads_query:
        return pattern.count(n)
    return n * m * _rows(pattern)


def _rows(pattern: Pattern) -> int:
    """The batch rows that the data of a pattern speak of; its pairs are counted over all of them."""
    ids = [len(leaf.ids) for leaf in pattern.leaves() if isinstance(leaf, documents) and leaf.ids.dim() > 1]
    return max([*ids, *(len(leaf.l) for leaf in pattern.leaves() if isinstance(leaf, lengths))], default=1)


def _passes(facts: choose.Facts) -> tuple[str, ...]:
    if facts.pattern.has_data:
        return ()
    try:
        plan = choose.plan_of(facts)
    except NoPlan:
        return ()
    told = []
    for one in plan.passes:
        tiles, parts = len(one.tiles), len(one.parts)
        whole = int(one.parts[:, 3].sum())
        steps = sorted({int(s) for s in one.parts[:, 1]})
        hop = int(one.tiles[:, 1].max())
        rows = "neighbours" if hop == 1 else f"every {hop}th query"
        told.append(
            f"pass            {tiles:,} tiles of {rows}, {parts / tiles:.1f} progressions each "
            f"(steps {', '.join(map(str, steps[:4]))}), {whole / parts:.0%} of them without a mask"
        )
    return tuple(told)
