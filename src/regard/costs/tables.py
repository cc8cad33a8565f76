"""A cost as a table: plain text, rich, HTML, LaTeX. The first three show the same rows."""

import html as escape
from collections.abc import Iterator
from typing import Any, NamedTuple

from .memory.declared import declared_rows
from .tree import CONVENTION, Amounts, Cost, Part

HEADINGS = {
    "parameters": "parameters",
    "flops": "FLOPs",
    "executed_flops": "executed",
    "backward_flops": "backward",
    "executed_backward_flops": "executed backward",
    "elementwise_flops": "elementwise",
}


class Row(NamedTuple):
    """One line of the table: depth in the tree, name, cells, and a note."""

    depth: int
    name: str
    cells: tuple[str, ...]
    note: str


def columns(cost: Cost) -> list[str]:
    """The amounts that get a column: those that are not zero and not equal to another column."""
    total, shown = cost.total, ["parameters", "flops"]
    if total.executed_flops != total.flops:
        shown.append("executed_flops")
    if cost.sizes.get("train"):
        shown.append("backward_flops")
        if total.executed_backward_flops != total.backward_flops:
            shown.append("executed_backward_flops")
    if total.elementwise_flops:
        shown.append("elementwise_flops")
    return shown


def headings(cost: Cost) -> list[str]:
    return [*(HEADINGS[c] for c in columns(cost)), "share"]


def rows(cost: Cost) -> Iterator[Row]:
    """The tree, top down, in amounts of the whole model; the last cell is the share of the FLOPs."""
    shown, total = columns(cost), cost.total.flops
    for depth, part, amounts in cost.tree.nodes():
        share = f"{amounts.flops / total:.1%}" if total and amounts.flops else ""
        name = part.name if part.times == 1 else f"{part.name} × {part.times}"
        yield Row(depth, name, (*(_number(getattr(amounts, c)) for c in shown), share), part.note)


def _number(amount: Any) -> str:
    return "" if amount == 0 else f"{amount:,}" if isinstance(amount, int) else str(amount)


def heading(cost: Cost) -> str:
    sizes = ", ".join(
        name if v is True else f"{name} = {v}" for name, v in cost.sizes.items() if v is not False
    )
    name = cost.name if len(cost.name) <= 100 else cost.name[:97] + "…"
    return f"{name}\n{sizes}"


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
    """Everything if it was computed or a training step was requested; else what has a formula."""
    if not cost.sizes.get("train") and "memory" not in vars(cost) and cost.request is not None:
        rows, later = declared_rows(cost.request), ["memory  peaks are computed on request: cost.memory"]
    elif cost.memory is None:
        return []
    else:
        rows = cost.memory.rows()
        later = [] if cost.memory.peak is None else [cost.explain_peak()]
    width = max((len(name) for name, _ in rows), default=0)
    return [*(f"memory  {name:<{width}}  {size:>18,} bytes" for name, size in rows), *later] if rows else []


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
    lines = [
        f"pairs in {p.path}: {p.pattern} allows {p.needed:,} of {p.full:,}; "
        f"backend {p.backend} computes {p.computed:,} ({p.waste:.2f} × needed)"
        for p in cost.pairs
    ]
    saving = cost.saving
    if saving is not None and saving.core:
        lines.append(str(saving))
    return lines


def text(cost: Cost) -> str:
    """Plain text: the tree on the left, numbers right-aligned."""
    titles = ("", *headings(cost))
    lines = [("  " * r.depth + r.name, *r.cells, r.note) for r in rows(cost)]
    widths = [max(len(line[k]) for line in [titles, *lines]) for k in range(len(titles))]
    out = [heading(cost), ""]
    for line in [(*titles, ""), *lines]:
        name, *cells = line[: len(titles)]
        note = f"  ({line[-1]})" if line[-1] else ""
        aligned = [name.ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells, widths[1:]))]
        out.append(("  ".join(aligned) + note).rstrip())
    return "\n".join([*out, "", *remarks(cost)])


def rich(cost: Cost) -> Any:
    """For a terminal."""
    from rich.console import Group
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("")
    for title in headings(cost):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", style="dim")
    for r in rows(cost):
        style = "bold" if r.depth == 0 else None
        table.add_row("  " * r.depth + r.name, *r.cells, r.note, style=style)
    return Group(heading(cost), "", table, "", *remarks(cost))


def html(cost: Cost) -> str:
    """For a notebook."""
    titles = "".join(f"<th>{t}</th>" for t in ("", *headings(cost), ""))
    lines = []
    for r in rows(cost):
        cells = "".join(f'<td style="text-align:right">{c}</td>' for c in r.cells)
        name = f'<td style="text-align:left;padding-left:{0.5 + 1.2 * r.depth:.1f}em">{escape.escape(r.name)}</td>'
        note = f'<td style="text-align:left">{escape.escape(r.note)}</td>'
        lines.append(f"<tr>{name}{cells}{note}</tr>")
    under = "<br>".join(map(escape.escape, remarks(cost)))
    above = escape.escape(heading(cost)).replace("\n", "<br>")
    return f"<p>{above}</p><table><tr>{titles}</tr>{''.join(lines)}</table><p><small>{under}</small></p>"


def latex(cost: Cost) -> str:
    """Formulas term by term, and their sums: parameters, FLOPs, elementwise FLOPs."""
    import sympy

    def as_latex(formula: Any) -> str:
        formula = sympy.sympify(formula)
        words = {
            s: r"\mathrm{" + s.name + "}"
            for s in formula.free_symbols
            if len(s.name) > 2 and "_" not in s.name
        }
        return sympy.latex(formula, symbol_names=words)

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
