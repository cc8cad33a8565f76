"""The table of a cost, with the remarks below it; its formulas in LaTeX."""

from collections import Counter
from typing import Any

from ..table import Table
from .memory.allocator import readable
from .trace.tracer import merged
from .tree import Amounts, Part

CONVENTION = (
    "a multiply-add is 2 FLOPs; FLOPs are those of matrix products; "
    "a softmax over m entries is 5m − 2 elementwise FLOPs"
)
HEADINGS = {
    "parameters": "parameters",
    "flops": "FLOPs",
    "executed_flops": "executed",
    "backward_flops": "backward",
    "executed_backward_flops": "executed backward",
    "elementwise_flops": "elementwise",
}


def table(cost: Any, depth: int | None = None) -> Table:
    """The tree, top down, in amounts of the whole model, to this depth; the last number is the share of the FLOPs."""
    total, traced, train, lines = cost.total, cost.request is None, cost.sizes.get("train"), []
    left_out = {
        "executed_flops": total.executed_flops == total.flops,
        "backward_flops": not train,
        "executed_backward_flops": not train or total.executed_backward_flops == total.backward_flops,
        "elementwise_flops": not total.elementwise_flops,
    }
    shown = [name for name in HEADINGS if not left_out.get(name)]
    for path, part, times in cost.tree.nodes():
        # The operations of a traced module are left out, but for attention: they would double the table.
        at, term = path.count("/") + 1 if path else 0, not part.parts and not part.own.parameters
        operation = traced and path and term and "attention" not in part.name
        if operation or (depth is not None and at > depth):
            continue
        amounts = part.total * times
        share = f"{amounts.flops / total.flops:.1%}" if total.flops and amounts.flops else ""
        name = part.name if part.times == 1 else f"{part.name} × {part.times}"
        note = f"({part.note})" if part.note else ""
        lines.append(("  " * at + name, *(_number(getattr(amounts, c)) for c in shown), share, note))
    heading = ("", *(HEADINGS[c] for c in shown), "share", "")
    return Table(above(cost), heading, lines, tuple(remarks(cost)))


def _number(amount: Any) -> str:
    return "" if amount == 0 else f"{amount:,}" if isinstance(amount, int) else str(amount)


def short(amount: Any) -> str:
    """A number with three digits and a prefix.

    >>> short(124_439_808), short(950)
    ('124 M', '950')
    """
    for unit, name in ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if amount >= unit:
            return f"{amount / unit:.3g} {name}"
    return f"{amount}"


def above(cost: Any) -> str:
    """The name, the sizes, and the sums."""
    shown = {k: v for k, v in cost.sizes.items() if v is not False}
    sizes = ", ".join(k if v is True else f"{k} = {v}" for k, v in shown.items())
    name = cost.name if len(cost.name) <= 100 else cost.name[:97] + "…"
    return f"{name}\n{sizes}" + (f"\n{summary(cost)}" if cost.sizes else "")


def summary(cost: Any) -> str:
    """Parameters, FLOPs and peak memory, in one line."""
    words = [f"{short(cost.parameters)} parameters", f"{short(cost.flops)}FLOP"]
    if cost.sizes.get("train"):
        words[-1] += f" forward, {short(cost.total.backward_flops)}FLOP backward"
    if _has_memory(cost):
        memory, kind = cost.memory, "training" if cost.memory.trains else "inference"
        words.append(f"{kind} peak {readable(memory.usage.peak)} (weights {readable(memory.weights)})")
    return ", ".join(words)


def _has_memory(cost: Any) -> bool:
    """Whether memory was computed or a training step was requested: a trace takes longer than the formulas."""
    wanted = cost.sizes.get("train") or "memory" in vars(cost) or cost.request is None
    return bool(wanted) and cost.memory is not None


def remarks(cost: Any) -> list[str]:
    """The lines below the table: biases, pairs, savings, orders of products, bottleneck, memory, convention."""
    lines, counts = [], cost.biases or {}
    if len(set(counts.values())) > 1:
        lines.append(
            f"parameters: {counts['none']:,} without biases, {counts['output']:,} with output biases only, "
            f"{counts['all']:,} with all biases"
        )
    attentions = Counter(  # equal attentions of several layers are one line
        f"pairs in {merged(p.path)}: {p.pattern} allows {p.needed:,} of {p.full:,}; "
        f"backend {p.backend} computes {p.computed:,} ({p.waste:.2f} × needed)"
        for p in cost.pairs
    )
    lines += [line if times == 1 else f"{line}, {times} times" for line, times in attentions.items()]
    if cost.saving is not None and cost.saving.core:
        lines.append(str(cost.saving))
    if (orders := cost.score_orders) is not None:
        lines.append(
            f"FLOPs of all scores: {orders.projected:,} if each vector is projected once; {orders.merged_qk:,} with "
            f"W_q W_kᵀ merged; {orders.naive:,} if each pair projects its vectors"
        )
    if (relative := cost.position_orders) is not None:
        lines.append(
            f"FLOPs of position scores: {relative.per_pair:,} if computed for each pair; {relative.per_offset:,} for "
            f"each of {relative.offsets:,} distinct offsets"
        )
    if (bottleneck := cost.bottleneck) is not None:
        lines.append(str(bottleneck))
    if _has_memory(cost):
        width = max(len(name) for name, _ in cost.memory.rows())
        for name, size in cost.memory.rows():
            text = size if isinstance(size, str) else f"{size:>18,} bytes  {readable(size):>12}"
            lines.append(f"memory  {name:<{width}}  {text}")
        lines.append(cost.explain_peak())
    elif cost.request is not None:
        lines.append("memory  peaks are computed on request: cost.memory")
    lines += [f"not counted: {name}" for name in cost.uncounted]
    return [*lines, *(f"assumed: {note}" for note in cost.notes), CONVENTION]


def latex(tree: Part) -> str:
    """Formulas term by term, and their sums: parameters, FLOPs, elementwise FLOPs."""
    import sympy

    def as_latex(formula: Any) -> str:
        formula = sympy.sympify(formula)
        long = [s for s in formula.free_symbols if len(s.name) > 2 and "_" not in s.name]
        return sympy.latex(formula, symbol_names={s: r"\mathrm{" + s.name + "}" for s in long})

    def line(name: str, a: Amounts) -> str:
        label = name.replace("_", r"\_")
        cells = " & ".join(map(as_latex, (a.parameters, a.flops, a.elementwise_flops)))
        return rf"\text{{{label}}} & {cells} \\"

    head = r"\text{term} & \text{parameters} & \text{FLOPs} & \text{elementwise FLOPs} \\ \hline"
    lines = [line(path, amounts) for path, amounts in tree.terms()]
    lines += [r"\hline", line("total", tree.total.map(sympy.expand))]
    return "\n".join([r"\begin{array}{l|r|r|r}", head, *lines, r"\end{array}"])
