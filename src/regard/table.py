"""Results as tables: in text, on a terminal, in a notebook."""

import json
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, Literal, NamedTuple

Side = Literal["left", "right"]


def aligned(rows: Sequence[Sequence[str]], sides: Sequence[Side]) -> list[str]:
    """Rows of cells as lines of text, each column aligned to its side.

    >>> aligned([("a", "10"), ("bcd", "2")], ["left", "right"])
    ['a    10', 'bcd   2']
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    formats = [f"{'<' if side == 'left' else '>'}{width}" for side, width in zip(sides, widths)]
    return ["  ".join(map(format, row, formats)).rstrip() for row in rows]


class Table(NamedTuple):
    """Lines of cells under a heading, with text above and below. The first column may be indented by spaces."""

    above: str
    heading: tuple[str, ...]
    lines: Sequence[tuple[str, ...]]
    below: tuple[str, ...] = ()

    def _sides(self) -> list[Side]:
        """Columns of words are aligned to the left, of numbers to the right."""
        columns = zip(*self.lines, strict=True) if self.lines else [()] * len(self.heading)
        numbers = [any(c[0].isdigit() or c[0] in "+-−" for c in cells if c) for cells in columns]
        return ["right" if k and number else "left" for k, number in enumerate(numbers)]

    def text(self) -> str:
        rows = aligned([self.heading, *self.lines], self._sides())
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
    table: Callable[[], Table]

    def tables(self) -> list[Table]:
        return [self.table()]

    def json(self, indent: int | None = None) -> str:
        return json.dumps(self.plain(), indent=indent, ensure_ascii=False)

    def __str__(self) -> str:
        return "\n\n".join(t.text() for t in self.tables())

    def __rich__(self) -> Any:
        from rich.console import Group

        return Group(*(t.rich() for t in self.tables()))

    def _repr_html_(self) -> str:
        return "".join(t.html() for t in self.tables())


class ShownAsTable:
    """A result whose text has a title and lines of a name and a value. In a notebook it is a table."""

    def _repr_html_(self) -> str:
        title, *lines = str(self).splitlines()
        cells = [re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in lines]
        rows = "".join(
            f"<tr><th>{escape(name)}</th><td>{escape(' '.join(rest))}</td></tr>" for name, *rest in cells
        )
        return f'<b>{escape(title)}</b><table style="text-align:left">{rows}</table>'
