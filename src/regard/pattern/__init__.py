"""Which pairs: a pattern is a set of pairs (query position i, key position j).

Words (`causal()`, `window(2)`, …) combine with `&`, `|`, `~` and `-`. Nothing is n × m until `allowed(n, m)`.

    >>> print((causal() & (window(1) | every(4))).draw(6))
    ■ · · · · ·
    ■ ■ · · · ·
    ■ ■ ■ · · ·
    ■ · ■ ■ · ·
    ■ · · ■ ■ ·
    ■ · · · ■ ■

Positions: of n queries over m keys, query r is at position r + m − n, so that a few new queries follow a cache
of old keys; `at=start` or `at=(start, step)` gives another query offset.

A word is one class that states its relation (word.py, words.py, relation.py); what tensors decide is in data.py.
"""

from .algebra import KINDS, At, Both, Either, Not, Pattern, positions, query_offset
from .classification import BlockGrid, Classes, Run, classify
from .data import Data, lengths, selected, tree, where
from .grid import neighborhood
from .heads import per_head
from .packed import documents
from .parse import parse_pattern
from .relation import Relation
from .rows import count_rows, empty_rows
from .word import Related, Shorthand, Word
from .words import *  # noqa: F403  # the words, which its own __all__ lists
from .words import __all__ as _words

WORDS = tuple(globals()[name] for name in _words)

__all__ = [
    "KINDS",
    "WORDS",
    "At",
    "BlockGrid",
    "Both",
    "Classes",
    "Data",
    "Either",
    "Not",
    "Pattern",
    "Related",
    "Relation",
    "Run",
    "Shorthand",
    "Word",
    "classify",
    "count_rows",
    "documents",
    "empty_rows",
    "lengths",
    "neighborhood",
    "parse_pattern",
    "per_head",
    "positions",
    "query_offset",
    "selected",
    "tree",
    "where",
    *_words,
]
