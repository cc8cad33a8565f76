"""Which pairs: a pattern is a set of pairs (query position i, key position j).

Words (`causal()`, `window(2)`, …) combine with `&`, `|`, `~` and `-`. Nothing is n × m until `allowed(n, m)`.

    >>> print((causal() & (window(1) | every(4))).draw(6))
    ■ · · · · ·
    ■ ■ · · · ·
    ■ ■ ■ · · ·
    ■ · ■ ■ · ·
    ■ · · ■ ■ ·
    ■ · · · ■ ■

Where a query stands: of n queries over m keys, query r stands at position r + m − n, so that a few new
queries follow a cache of old keys; `at=start` or `at=(start, step)` says otherwise.
"""

from .algebra import KINDS, At, Both, Either, Not, Pattern, positions, query_offset
from .data import Data, documents, lengths, where
from .words import (
    WORDS,
    Word,
    blocks,
    causal,
    dilated,
    every,
    full,
    prefix,
    rows,
    sinks,
    strided,
    window,
)

__all__ = [
    "KINDS",
    "WORDS",
    "At",
    "Both",
    "Data",
    "Either",
    "Not",
    "Pattern",
    "Word",
    "blocks",
    "causal",
    "dilated",
    "documents",
    "every",
    "full",
    "lengths",
    "positions",
    "prefix",
    "query_offset",
    "rows",
    "sinks",
    "strided",
    "where",
    "window",
]
