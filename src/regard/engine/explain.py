"""The plan in words: what a pattern would cost to run, by which way, and why."""

from dataclasses import dataclass

import torch

from ..pattern import At, Pattern
from . import choose
from .plan import NoPlan


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
        full = self.n * self.m
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
    walks = choice.backend in ("progressions", "tiled")
    computed = choose.computed(facts) if walks else _dense(facts, choice.backend)
    needed = pattern.count(n, m, facts.stands)
    return Explanation(pattern, n, m, needed, computed, *choice, _passes(facts))


def _dense(facts: choose.Facts, backend: str) -> int:
    """Square causal attention skips the future by blocks; whatever else PyTorch runs computes every pair."""
    if backend == "dense" and facts.n == facts.m and facts.pattern.reads_query:
        return facts.pattern.count(facts.n)
    return facts.n * facts.m


def _passes(facts: choose.Facts) -> tuple[str, ...]:
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
