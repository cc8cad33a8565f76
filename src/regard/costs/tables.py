"""A cost as a table: plain text, rich, HTML, LaTeX. All four show the same rows."""

import html as escape
from collections.abc import Iterator
from typing import Any, NamedTuple

from .tree import CONVENTION, Amounts, Cost, Part


class Row(NamedTuple):
    """One line: how deep it stands, what it is called, its cells, and a remark."""

    depth: int
    name: str
    cells: tuple[str, ...]
    note: str


def columns(cost: Cost) -> list[str]:
    """The amounts worth a column: those that differ from nothing and from one another."""
    total, shown = cost.total, ["parameters", "operations"]
    if total.executed != total.operations:
        shown.append("executed")
    if cost.sizes.get("train"):
        shown.append("backward")
        if total.executed_backward != total.backward:
            shown.append("executed_backward")
    if total.other:
        shown.append("other")
    return shown


def rows(cost: Cost) -> Iterator[Row]:
    """The tree, top down, in whole-model amounts; the last cell is the share of the operations."""
    shown, whole = columns(cost), cost.total.operations
    for depth, part, amounts in cost.tree.walk():
        share = f"{amounts.operations / whole:.1%}" if whole and amounts.operations else ""
        name = part.name if part.times == 1 else f"{part.name} × {part.times}"
        yield Row(depth, name, (*(_number(getattr(amounts, c)) for c in shown), share), part.note)


def _number(amount: Any) -> str:
    return "" if amount == 0 else f"{amount:,}" if isinstance(amount, int) else str(amount)


def heading(cost: Cost) -> str:
    sizes = ", ".join(
        name if v is True else f"{name} = {v}" for name, v in cost.sizes.items() if v is not False
    )
    what = cost.of if len(cost.of) <= 100 else cost.of[:97] + "…"
    return f"{what}\n{sizes}"


def remarks(cost: Cost) -> list[str]:
    """What stands under the table: biases, masks, savings, the bottleneck, memory, the convention."""
    told = [*_biases(cost), *_masks(cost), *_scores(cost)]
    bottleneck = getattr(cost, "bottleneck", None)
    if bottleneck is not None:
        told.append(str(bottleneck))
    if cost.memory is not None:
        wide = max((len(name) for name, _ in cost.memory.rows()), default=0)
        told += [f"memory  {name:<{wide}}  {size:>18,} bytes" for name, size in cost.memory.rows()]
    told += [f"not counted: {name}" for name in cost.uncounted]
    return [*told, CONVENTION]


def _biases(cost: Cost) -> list[str]:
    counts = cost.biases
    if counts is None or len(set(counts.values())) == 1:
        return []
    return ["parameters with biases " + ", ".join(f"{word}: {count:,}" for word, count in counts.items())]


def _scores(cost: Cost) -> list[str]:
    told = []
    if (ways := cost.score_ways) is not None:
        told.append(
            f"scores of every pair: {ways.once:,} operations, vectors projected once; {ways.merged:,} with W_q W_kᵀ "
            f"merged; {ways.again:,} projected again for each pair"
        )
    if (ways := cost.position_ways) is not None:
        told.append(
            f"scores of positions: {ways.pairs:,} operations for every pair; {ways.each_offset_once:,} for each of "
            f"{ways.offsets:,} offsets once"
        )
    return told


def _masks(cost: Cost) -> list[str]:
    told = [
        f"pairs {p.where}: {p.needed:,} needed of {p.full:,} by {p.pattern}; "
        f"{p.computed:,} computed by {p.backend} ({p.waste:.2f} × needed)"
        for p in cost.pairs
    ]
    saving = cost.saving
    if saving is not None and saving.core:
        told.append(str(saving))
    return told


def text(cost: Cost) -> str:
    """Plain text: the tree at the left, numbers right-aligned."""
    titles = ("", *columns(cost), "share")
    lines = [("  " * r.depth + r.name, *r.cells, r.note) for r in rows(cost)]
    wide = [max(len(line[k]) for line in [titles, *lines]) for k in range(len(titles))]
    out = [heading(cost), ""]
    for line in [(*titles, ""), *lines]:
        name, *cells = line[: len(titles)]
        note = f"  ({line[-1]})" if line[-1] else ""
        put = [name.ljust(wide[0]), *(c.rjust(w) for c, w in zip(cells, wide[1:]))]
        out.append(("  ".join(put) + note).rstrip())
    return "\n".join([*out, "", *remarks(cost)])


def rich(cost: Cost) -> Any:
    """For a terminal."""
    from rich.console import Group
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("")
    for title in (*columns(cost), "share"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", style="dim")
    for r in rows(cost):
        style = "bold" if r.depth == 0 else None
        table.add_row("  " * r.depth + r.name, *r.cells, r.note, style=style)
    return Group(heading(cost), "", table, "", *remarks(cost))


def html(cost: Cost) -> str:
    """For a notebook."""
    titles = "".join(f"<th>{t}</th>" for t in ("", *columns(cost), "share", ""))
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
    """Term by term: parameters and operations as formulas, and their sums."""
    import sympy

    def written(formula: Any) -> str:
        formula = sympy.sympify(formula)
        words = {
            s: r"\mathrm{" + s.name + "}"
            for s in formula.free_symbols
            if len(s.name) > 2 and "_" not in s.name
        }
        return sympy.latex(formula, symbol_names=words)

    def line(name: str, a: Amounts) -> str:
        called = name.replace("_", r"\_")
        return (
            rf"\text{{{called}}} & {written(a.parameters)} & {written(a.operations)} & {written(a.other)} \\"
        )

    tree: Part = cost.symbolic
    lines = [line(path, amounts) for path, amounts in tree.terms()]
    total = tree.total.map(lambda a: sympy.expand(a))
    head = r"\text{term} & \text{parameters} & \text{operations} & \text{other} \\ \hline"
    return "\n".join(
        [r"\begin{array}{l|r|r|r}", head, *lines, r"\hline", line("total", total), r"\end{array}"]
    )
