"""Tables as plain text, for a terminal and for a notebook; the table of a cost; its formulas in LaTeX."""

import html as escape
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from .memory.peak import readable
from .trace.tracer import merged
from .tree import CONVENTION, Amounts, Cost, Part

HEADINGS = {
    "parameters": "parameters",
    "flops": "FLOPs",
    "executed_flops": "executed",
    "backward_flops": "backward",
    "executed_backward_flops": "executed backward",
    "elementwise_flops": "elementwise",
}


class Table(NamedTuple):
    """Lines of cells under a heading, with text above and below. The first column may be indented by spaces."""

    above: str
    heading: tuple[str, ...]
    lines: Sequence[tuple[str, ...]]
    below: tuple[str, ...] = ()

    def _is_left(self, column: int) -> bool:
        """Whether a column holds words: numbers are aligned to the right."""
        cells = [line[column] for line in self.lines if line[column]]
        return not column or not any(c[0].isdigit() or c[0] in "+-−" for c in cells)

    def text(self) -> str:
        every = [self.heading, *self.lines]
        widths = [max(len(line[k]) for line in every) for k in range(len(self.heading))]
        rows = [
            "  ".join(
                c.ljust(w) if self._is_left(k) else c.rjust(w) for k, (c, w) in enumerate(zip(line, widths))
            )
            for line in every
        ]
        return "\n".join(
            [self.above, "", *(row.rstrip() for row in rows), *(["", *self.below] if self.below else [])]
        )

    def rich(self) -> Any:
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=None, header_style="bold", pad_edge=False)
        for k, title in enumerate(self.heading):
            table.add_column(title, justify="left" if self._is_left(k) else "right", no_wrap=True)
        for line in self.lines:
            table.add_row(*map(Text, line))
        return Group(Text(self.above), "", table, "", *map(Text, self.below))

    def html(self) -> str:
        def row(line: tuple[str, ...], tag: str) -> str:
            cells = []
            for k, cell in enumerate(line):
                indent = len(cell) - len(cell.lstrip())
                side = "left" if self._is_left(k) else "right"
                style = f"text-align:{side};padding-left:{0.5 + 0.6 * indent:.1f}em"
                cells.append(f'<{tag} style="{style}">{escape.escape(cell.strip())}</{tag}>')
            return f"<tr>{''.join(cells)}</tr>"

        lines = "".join(row(line, "td") for line in self.lines)
        above = escape.escape(self.above).replace("\n", "<br>")
        below = "<br>".join(map(escape.escape, self.below))
        return f"<p>{above}</p><table>{row(self.heading, 'th')}{lines}</table><p><small>{below}</small></p>"


def columns(cost: Cost) -> list[str]:
    """The amounts that get a column: those that are not zero and not equal to another column."""
    total, shown = cost.total, ["parameters", "flops"]
    if total.executed_flops != total.flops:
        shown.append("executed_flops")
    if cost.sizes.get("train"):
        shown.append("backward_flops")
        if total.executed_backward_flops != total.backward_flops:
            shown.append("executed_backward_flops")
    return [*shown, "elementwise_flops"] if total.elementwise_flops else shown


def table(cost: Cost, depth: int | None = None) -> Table:
    """The tree, top down, in amounts of the whole model, to this depth; the last number is the share of the FLOPs."""
    shown, total, lines = columns(cost), cost.total.flops, []
    traced = cost.request is None
    for at, part, amounts in cost.tree.nodes():
        # The operations of a traced module are left out, but for attention: they would double the table.
        operation = (
            traced and at > 0 and part.is_term and not part.own.parameters and "attention" not in part.name
        )
        if operation or (depth is not None and at > depth):
            continue
        share = f"{amounts.flops / total:.1%}" if total and amounts.flops else ""
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


def above(cost: Cost) -> str:
    """The name, the sizes, and the sums."""
    shown = {k: v for k, v in cost.sizes.items() if v is not False}
    sizes = ", ".join(k if v is True else f"{k} = {v}" for k, v in shown.items())
    name = cost.name if len(cost.name) <= 100 else cost.name[:97] + "…"
    return f"{name}\n{sizes}" + (f"\n{summary(cost)}" if cost.sizes else "")


def summary(cost: Cost) -> str:
    """Parameters, FLOPs and peak memory, in one line."""
    words = [f"{short(cost.parameters)} parameters", f"{short(cost.flops)}FLOP"]
    if cost.sizes.get("train"):
        words[-1] += f" forward, {short(cost.total.backward_flops)}FLOP backward"
    if _has_memory(cost):
        memory, kind = cost.memory, "training" if cost.memory.trains else "inference"
        words.append(f"{kind} peak {readable(memory.usage.peak)} (weights {readable(memory.weights)})")
    return ", ".join(words)


def _has_memory(cost: Cost) -> bool:
    """Whether memory was computed or a training step was requested: a trace takes longer than the formulas."""
    wanted = cost.sizes.get("train") or "memory" in vars(cost) or cost.request is None
    return bool(wanted) and cost.memory is not None


def remarks(cost: Cost) -> list[str]:
    """The lines below the table: biases, pairs, savings, bottleneck, memory, convention."""
    lines = [*_biases(cost), *_pairs(cost), *_scores(cost)]
    if (bottleneck := cost.bottleneck) is not None:
        lines.append(str(bottleneck))
    lines += _memory(cost)
    lines += [f"not counted: {name}" for name in cost.uncounted]
    lines += [f"assumed: {note}" for note in cost.notes]
    return [*lines, CONVENTION]


def _memory(cost: Cost) -> list[str]:
    if not _has_memory(cost):
        return [] if cost.request is None else ["memory  peaks are computed on request: cost.memory"]
    rows = cost.memory.rows()
    width = max(len(name) for name, _ in rows)
    sizes = [
        (name, size if isinstance(size, str) else f"{size:>18,} bytes  {readable(size):>12}")
        for name, size in rows
    ]
    return [*(f"memory  {name:<{width}}  {size}" for name, size in sizes), cost.explain_peak()]


def _biases(cost: Cost) -> list[str]:
    counts = cost.biases
    if counts is None or len(set(counts.values())) == 1:
        return []
    return [
        f"parameters: {counts['none']:,} without biases, {counts['output']:,} with output biases only, "
        f"{counts['all']:,} with all biases"
    ]


def _scores(cost: Cost) -> list[str]:
    lines = []
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
    return lines


def _pairs(cost: Cost) -> list[str]:
    """A line for each attention; equal ones of several layers are one line."""
    lines = Counter(
        f"pairs in {merged(p.path)}: {p.pattern} allows {p.needed:,} of {p.full:,}; "
        f"backend {p.backend} computes {p.computed:,} ({p.waste:.2f} × needed)"
        for p in cost.pairs
    )
    saving = cost.saving
    saved = [str(saving)] if saving is not None and saving.core else []
    return [*(line if times == 1 else f"{line}, {times} times" for line, times in lines.items()), *saved]


def latex(cost: Cost) -> str:
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

    tree: Part = cost.symbolic
    lines = [line(path, amounts) for path, amounts in tree.terms()]
    total = tree.total.map(lambda a: sympy.expand(a))
    head = r"\text{term} & \text{parameters} & \text{FLOPs} & \text{elementwise FLOPs} \\ \hline"
    return "\n".join(
        [r"\begin{array}{l|r|r|r}", head, *lines, r"\hline", line("total", total), r"\end{array}"]
    )
