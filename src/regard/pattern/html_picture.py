"""A pattern in a notebook: the first positions as a picture, its text, and its exact counts."""

from html import escape
from typing import TYPE_CHECKING

from ..errors import RegardError

if TYPE_CHECKING:
    from .algebra import Pattern

DRAWN = 24  # positions
CELL = 9  # pixels
COUNTED = (1_000, 1_000_000)


def picture(pattern: "Pattern") -> str | None:
    """HTML; None for a pattern whose data do not fit these lengths, so that a notebook shows its text."""
    try:
        allowed = pattern.allowed(DRAWN).tolist()
        counts = [] if pattern.has_data else [(n, pattern.count(n)) for n in COUNTED]
    except (RegardError, NotImplementedError, IndexError, RuntimeError, TypeError):
        return None
    if not isinstance(allowed[0][0], bool):  # one table for each batch row or head
        return None
    squares = "".join(
        f'<rect x="{j * CELL}" y="{i * CELL}" width="{CELL - 1}" height="{CELL - 1}"/>'
        for i, row in enumerate(allowed)
        for j, may in enumerate(row)
        if may
    )
    side = DRAWN * CELL
    lines = "".join(f"<br>{count:,} of {n * n:,} pairs at n = {n:,}" for n, count in counts)
    style = "fill:#1f5fa8;background:#8882"
    drawing = (
        f'<svg width="{side}" height="{side}" role="img" aria-label="rows are queries, columns are keys" '
        f'style="{style}">{squares}</svg>'
    )
    text = f"<code>{escape(repr(pattern))}</code>{lines}<br><small>the first {DRAWN} queries (rows) and keys</small>"
    outer = "display:flex;gap:1em;align-items:flex-start;flex-wrap:wrap"
    return f'<div style="{outer}">{drawing}<div>{text}</div></div>'
