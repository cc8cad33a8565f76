"""A plain-text table of rows, used where pandas is not installed."""

from dataclasses import dataclass
from html import escape
from typing import Any

from ..table import aligned

PRINTED_COLUMNS = (
    "layer",
    "head",
    "role",
    "kind",
    "confidence",
    "entropy",
    "distance",
    "top",
    "on_first",
    "effect",
)


@dataclass(frozen=True)
class Table:
    """Rows with the same columns."""

    rows: list[dict[str, Any]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, column: str) -> list[Any]:
        """One column."""
        return [row[column] for row in self.rows]

    def __repr__(self) -> str:
        if not self.rows:
            return "(no rows)"
        cells = self._cells()
        return "\n".join(aligned(cells, ["right"] * len(cells[0])))

    def _repr_html_(self) -> str:
        """For notebooks."""
        if not self.rows:
            return "(no rows)"
        head, *body = self._cells()
        names = "".join(f"<th>{escape(name)}</th>" for name in head)
        rows = "".join("<tr>" + "".join(f"<td>{escape(t)}</td>" for t in line) + "</tr>" for line in body)
        return f"<table><thead><tr>{names}</tr></thead><tbody>{rows}</tbody></table>"

    def _cells(self) -> list[list[str]]:
        """The names of the printed columns, then each row."""
        names = [n for n in PRINTED_COLUMNS if n in self.rows[0]] or list(self.rows[0])
        return [names, *([_cell(row[n]) for n in names] for row in self.rows)]


def _cell(x: Any) -> str:
    return "–" if x is None else f"{x:.3f}" if isinstance(x, float) else str(x)
