"""A table of rows that prints itself, used where pandas is not installed."""

from dataclasses import dataclass
from typing import Any

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
        names = [n for n in PRINTED_COLUMNS if n in self.rows[0]] or list(self.rows[0])
        cells = [names, *([_cell(row[n]) for n in names] for row in self.rows)]
        widths = [max(len(line[c]) for line in cells) for c in range(len(names))]
        return "\n".join("  ".join(t.rjust(w) for t, w in zip(line, widths)) for line in cells)


def _cell(x: Any) -> str:
    return "–" if x is None else f"{x:.3f}" if isinstance(x, float) else str(x)
