"""Tables as plain text, for a terminal and for a notebook; the table of a cost; its formulas in LaTeX."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, Literal, NamedTuple

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


class Table(NamedTuple):
    """Lines of cells under a heading, with text above and below. The first column may be indented by spaces."""

    above: str
    heading: tuple[str, ...]
    lines: Sequence[tuple[str, ...]]
    below: tuple[str, ...] = ()

    def _sides(self) -> list[Literal["left", "right"]]:
        """Columns of words are aligned to the left, of numbers to the right."""
        columns = zip(*self.lines, strict=True) if self.lines else [()] * len(self.heading)
        numbers = [any(c[0].isdigit() or c[0] in "+-−" for c in cells if c) for cells in columns]
        return ["right" if k and number else "left" for k, number in enumerate(numbers)]

    def text(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.heading, *self.lines)]
        formats = [f"{'<' if s == 'left' else '>'}{w}" for s, w in zip(self._sides(), widths)]
        rows = ["  ".join(map(format, line, formats)).rstrip() for line in (self.heading, *self.lines)]
        return "\n".join([self.above, "", *rows, *(["", *self.below] if self.below else [])])

    def rich(self) -> Any:
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=None, header_style="bold", pad_edge=False)
        for title, side in zip(self.heading, self._sides()):
            table.add_column(title, justify=side, no_wrap=True)
        for line in self.lines:
            table.add_row(*map(Text, line))
        return Group(Text(self.above), "", table, "", *map(Text, self.below))

    def html(self) -> str:
        sides = self._sides()

        def row(line: tuple[str, ...], tag: str) -> str:
            indents = [0.5 + 0.6 * (len(cell) - len(cell.lstrip())) for cell in line]
            styles = [f"text-align:{s};padding-left:{i:.1f}em" for s, i in zip(sides, indents)]
            cells = (f'<{tag} style="{s}">{escape(c.strip())}</{tag}>' for c, s in zip(line, styles))
            return f"<tr>{''.join(cells)}</tr>"

        lines = row(self.heading, "th") + "".join(row(line, "td") for line in self.lines)
        above, below = escape(self.above).replace("\n", "<br>"), "<br>".join(map(escape, self.below))
        return f"<p>{above}</p><table>{lines}</table><p><small>{below}</small></p>"


class ShownAsTables:
    """A result that is shown as tables; `plain()` has dictionaries, lists, numbers and strings for programs."""

    plain: Callable[[], dict[str, Any]]
    tables: Callable[[], list[Table]]

    def json(self, indent: int | None = None) -> str:
        return json.dumps(self.plain(), indent=indent, ensure_ascii=False)

    def __str__(self) -> str:
        return "\n\n".join(t.text() for t in self.tables())

    def __rich__(self) -> Any:
        from rich.console import Group

        return Group(*(t.rich() for t in self.tables()))

    def _repr_html_(self) -> str:
        return "".join(t.html() for t in self.tables())


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
