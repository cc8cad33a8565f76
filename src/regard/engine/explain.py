"""The plan in words: what a call would cost to run, by which backend, and why."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import read_facts
from ..pattern import Pattern, full
from ..pattern.algebra import whole_sizes
from ..pattern.heads import numbered, per_head
from ..table import ShownAsTable
from .attention import call_of, check, pattern_and_table
from .backends import choose, named
from .call import Call, CallFacts, Prepared, facts_of, without_default_offset
from .cpu.backend import GATHERED
from .plan import NoPlan, plan


@dataclass(frozen=True)
class Explanation(ShownAsTable):
    """How a call would run: `print` it. `backend` has several names, "tiles, sdpa", if heads need different ones."""

    pattern: Pattern
    n: int
    m: int
    needed: int  # pairs of the pattern, for one head; of a pattern per head, for all
    computed: int  # pairs that the backend computes
    rows: int  # batch rows whose data may differ, times the heads of a pattern per head: pairs are of all
    backend: str
    variant: str  # of the backend
    reason: str
    passes: tuple[str, ...]  # one line for each pass of the plan

    @property
    def waste(self) -> float:
        return self.computed / self.needed if self.needed else 1.0 + self.computed

    def __str__(self) -> str:
        total = self.n * self.m * self.rows
        share = self.needed / total if total else 0.0
        lines = [
            f"{self.pattern!r}: {self.n:,} queries, {self.m:,} keys",
            f"  pairs needed    {self.needed:,} of {total:,} ({share:.2%})",
            f"  pairs computed  {self.computed:,} ({self.waste:.2f} × needed)",
            f"  backend         {self.backend}, {self.variant}: {self.reason}",
        ]
        return "\n".join(lines + [f"  {line}" for line in self.passes])


def explain(*arguments: Any, backend: str = "auto", **options: Any) -> Explanation:
    """The backend and variant by which `attention` runs a call, the pairs it needs and computes, and why.

    explain(q, k, v, pattern, …) takes the arguments of `attention`. explain(pattern, n, m) takes sizes and, by name,
    everything else that the choice depends on: d_k=64, d_v=d_k, batch=1, heads=8, kv_heads=heads, dtype, device, at,
    scale, dropout_p, return_lse, softcap, bias="none", "tensor" or "distance"; and, as True or False, grad,
    bias_grad=grad, lengths, left_padding (lengths with a start), sink_logits, table (a bool tensor) and row_offsets
    (one query offset per batch row). What `attention` would refuse is refused.

    >>> from regard.pattern import causal, every, window
    >>> print(explain(causal() & (window(128) | every(64)), n=16384))  # doctest: +ELLIPSIS
    causal() & (window(128) | every(64)): 16,384 queries, 16,384 keys
      pairs needed    4,177,666 of 268,435,456 (1.56%)
      pairs computed  ... (... × needed)
      backend         tiles, merged tiles: about ... × faster than sdpa
      ...
    """
    first = arguments[0] if arguments else options.get("q")
    if isinstance(first, Tensor) and first.dtype != torch.bool:  # a bool tensor stands for a pattern
        facts = facts_of(call_of(*arguments, **options))
    else:
        facts = facts_from(*arguments, **options)
    return (_explain_heads if facts.pattern.differs_by_head else _explain)(facts, named(backend))


def _explain_heads(facts: CallFacts, backend: str) -> Explanation:
    """The launches of a pattern per head, as one: pairs are of all heads, and of all batch rows of data."""
    launches, lines = [], []
    for heads, part in facts.launches():
        launch = _explain(part, backend)
        launches.append((len(heads) * facts.data_rows // launch.rows, launch))
        name = numbered(heads[:6]) + (", …" if len(heads) > 6 else "")
        how = f"{launch.backend}, {launch.variant}, {launch.waste:.2f} × needed"
        lines += [f"{name:<15} {part.pattern!r}: {how}", *launch.passes]
    return Explanation(
        facts.pattern, facts.n, facts.m,
        needed=sum(count * launch.needed for count, launch in launches),
        computed=sum(count * launch.computed for count, launch in launches),
        rows=facts.heads * facts.data_rows, variant=f"{len(launches)} launches", passes=tuple(lines),
        backend=", ".join(dict.fromkeys(launch.backend for _, launch in launches)),
        reason="heads with equal patterns run together",
    )  # fmt: skip


def _explain(facts: CallFacts, backend: str) -> Explanation:
    prepared = choose(facts, backend)
    needed = facts.pattern.count(facts.n, facts.m, facts.offset)
    pairs = facts.pattern, facts.n, facts.m, needed, prepared.computed(), facts.data_rows
    return Explanation(*pairs, prepared.backend, prepared.variant, prepared.reason, _passes(facts, prepared))


def facts_from(pattern: Any = None, n: Any = None, m: Any = None, **options: Any) -> CallFacts:
    """The facts of a call by its sizes; what `attention` would refuse is refused."""
    kinds = {x.name: x.type for x in fields(CallFacts)[3:-2]}  # the last two are of traced tensors
    options = read_facts(kinds, n, options)
    n, m = whole_sizes(n, n if m is None else m)
    pattern, table = pattern_and_table(pattern)
    if isinstance(pattern, per_head):
        options.setdefault("heads", len(pattern.patterns))
    options["table"] = bool(options.get("table")) or table is not None
    options.setdefault("kv_heads", options.get("heads", 8))
    options["at"] = without_default_offset(options.get("at"), n, m)
    facts = CallFacts(pattern, n, m, **options)
    meta = replace(facts, n=min(n, 1 << 40), m=min(m, 1 << 40)).like()  # elements are counted in 64 bits
    same = {name: getattr(facts, name) for name in ("scale", "softcap", "dropout_p", "return_lse", "at")}
    check(Call(*meta, full() if pattern.has_data else pattern, **same))
    return facts


def _passes(facts: CallFacts, prepared: Prepared) -> tuple[str, ...]:
    if facts.pattern.has_data or prepared.backend not in ("tiles", "triton") or prepared.variant == GATHERED:
        return ()
    try:
        planned = plan(*facts.place)
    except NoPlan:
        return ()
    lines = []
    for tile_pass in planned.passes:
        tiles, parts = len(tile_pass.tiles), len(tile_pass.parts)
        unmasked = int(tile_pass.parts[:, 3].sum())
        steps = sorted({int(s) for s in tile_pass.parts[:, 1]})
        row_step = int(tile_pass.tiles[:, 1].max())
        rows = "neighboring queries" if row_step == 1 else f"every {row_step}th query"
        lines.append(
            f"pass            {tiles:,} tiles of {rows}, {parts / tiles:.1f} progressions each "
            f"(steps {', '.join(map(str, steps[:4]))}), {unmasked / parts:.0%} of them without a mask"
        )
    return tuple(lines)
