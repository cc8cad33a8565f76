"""Faults of causal masks and windows."""

from typing import Any

from .make import variant as _v
from .masks import _ones


def _blocks(back: int) -> Any:
    """Blocks of as many keys as the window has before a query, with the query's own."""

    def allowed(i: Any, j: Any, c: Any) -> Any:
        before, after = c.options["window"]
        width = before + 1
        near = (i + c.offset) // width - j // width
        return (near <= back) & (near >= (0 if after == 0 else -back))

    return allowed


def _causal(change: Any) -> Any:
    return lambda i, j, c: change(i + c.offset, j)


def _window(change: Any) -> Any:
    return lambda i, j, c: change(i + c.offset - j, *c.options["window"])


SINKS = (  # of a module that has them
    _v(
        "the attention sinks are ignored: a query attends to its window only",
        "sinks ignored",
        "allow the first keys for every query, besides its window",
        sinks=lambda i, j, c: j < 0,
    ),
    *(
        _v(
            f"there is one attention sink too {'many' if more > 0 else 'few'}",
            "sinks off by one",
            "allow j < sinks for every query, besides its window",
            sinks=lambda i, j, c, more=more: j < c.options["sinks"] + more,
        )
        for more in (-1, 1)
    ),
)

CAUSAL = (
    _v(
        "causal is ignored: queries attend to the future",
        "causal ignored",
        "mask keys j > i",
        causal=_ones,
    ),
    _v(
        "causal is inverted: queries attend to the future only",
        "causal inverted",
        "mask keys j > i, keep j ≤ i",
        causal=_causal(lambda i, j: j >= i),
    ),
    _v(
        "causal is inverted and excludes the query itself: only keys j > i",
        "causal inverted",
        "mask keys j > i, keep j ≤ i",
        causal=_causal(lambda i, j: j > i),
    ),
    _v(
        "causal is off by one: a query also attends to the next key",
        "causal off by one",
        "mask keys j > i: triu(diagonal=1)",
        causal=_causal(lambda i, j: j <= i + 1),
    ),
    _v(
        "causal is off by one: a query does not attend to itself",
        "causal off by one",
        "mask keys j > i only: triu(diagonal=1), not triu(0)",
        causal=_causal(lambda i, j: j < i),
    ),
    _v(
        "causal is off by one, except that query 0 attends to itself",
        "causal off by one",
        "mask keys j > i only: triu(diagonal=1), not triu(0)",
        causal=_causal(lambda i, j: (j < i) | ((i == 0) & (j == 0))),
    ),
    _v(
        "causal is aligned with the first key where n ≠ m (j ≤ i instead of j ≤ i + m − n)",
        "causal alignment",
        "add the offset m − n to the query index",
        causal=lambda i, j, c: j <= i,
    ),
    _v(
        "causal is aligned with the last key where n ≠ m (j ≤ i + m − n instead of j ≤ i)",
        "causal alignment",
        "do not add m − n to the query index",
        causal=lambda i, j, c: j <= i + (c.k.shape[-2] - c.q.shape[-2]),
    ),
    _v(
        "the causal offset is one too large where n ≠ m",
        "causal alignment",
        "the offset of query 0 is m − n",
        causal=lambda i, j, c: j <= i + c.offset + (1 if c.offset else 0),
    ),
    _v(
        "the causal offset is one too small where n ≠ m",
        "causal alignment",
        "the offset of query 0 is m − n",
        causal=lambda i, j, c: j <= i + c.offset - (1 if c.offset else 0),
    ),
    _v(
        "causal is not applied where n ≠ m",
        "causal alignment",
        "mask keys j > i + m − n",
        causal=lambda i, j, c: (j <= i) if c.q.shape[-2] == c.k.shape[-2] else _ones(i, j, c),
    ),
    *(
        _v(
            f"causal is applied by tiles of {size}: a query attends to its whole tile",
            "causal by tiles",
            "mask the pairs j > i inside the tiles on the diagonal",
            causal=_causal(lambda i, j, size=size: j // size <= i // size),
        )
        for size in (2, 3, 4, 8, 16, 32, 64)
    ),
    *(
        _v(
            f"the causal mask restarts in each tile of {size} queries: the tile's offset is missing",
            "causal by tiles",
            "add the first query of the tile to the query index",
            causal=_causal(lambda i, j, size=size: j <= i % size),
        )
        for size in (2, 4, 8, 16, 32, 64, 128)
    ),
    *(
        _v(
            f"the causal mask restarts in each tile of {size} keys: the tile's offset is missing",
            "causal by tiles",
            "add the first key of the tile to the key index",
            causal=_causal(lambda i, j, size=size: j % size <= i),
        )
        for size in (2, 4, 8, 16, 32, 64, 128)
    ),
    *(
        _v(
            f"the tile of {size} on the diagonal is skipped",
            "causal by tiles",
            "process the tile that holds the diagonal, with its mask",
            causal=_causal(
                lambda i, j, size=size: ((j // size < i // size) | ((i < size) & (j <= i))) & (j <= i)
            ),
        )
        for size in (2, 4, 8, 16, 32, 64)
    ),
)

WINDOW = (
    _v("the window is ignored", "window ignored", "mask pairs outside the window", window=_ones),
    *(
        _v(
            f"the window is cut into blocks: a query attends to {words}",
            "window as blocks",
            "compare i − j with the window, not the numbers of blocks",
            window=_blocks(back),
        )
        for back, words in ((0, "its own block"), (1, "its own block and the one before"))
    ),
    _v(
        "the window is one key too wide on the left",
        "window off by one",
        "allow i − j ≤ before",
        window=_window(lambda d, before, after: (d <= before + 1) & (-d <= after)),
    ),
    _v(
        "the window is one key too narrow on the left",
        "window off by one",
        "allow i − j ≤ before, not <",
        window=_window(lambda d, before, after: (d < before) & (-d <= after)),
    ),
    _v(
        "the window is one key too wide on the right",
        "window off by one",
        "allow j − i ≤ after",
        window=_window(lambda d, before, after: (d <= before) & (-d <= after + 1)),
    ),
    _v(
        "the window is one key too narrow on the right",
        "window off by one",
        "allow j − i ≤ after, not <",
        window=_window(lambda d, before, after: (d <= before) & (-d < after)),
    ),
    _v(
        "the window is one key too wide on both sides",
        "window off by one",
        "allow −after ≤ i − j ≤ before",
        window=_window(lambda d, before, after: (d <= before + 1) & (-d <= after + 1)),
    ),
    _v(
        "the window is one key too narrow on both sides",
        "window off by one",
        "allow −after ≤ i − j ≤ before, ends included",
        window=_window(lambda d, before, after: (d < before) & (-d < after)),
    ),
    _v(
        "before and after are exchanged in the window",
        "window sides exchanged",
        "allow −after ≤ i − j ≤ before",
        window=_window(lambda d, before, after: (d <= after) & (-d <= before)),
    ),
    _v(
        "the left side of the window is ignored",
        "window one-sided",
        "allow −after ≤ i − j ≤ before",
        window=_window(lambda d, before, after: -d <= after),
    ),
    _v(
        "the right side of the window is ignored",
        "window one-sided",
        "allow −after ≤ i − j ≤ before",
        window=_window(lambda d, before, after: d <= before),
    ),
    _v(
        "the window is symmetric with the left size on both sides",
        "window sides exchanged",
        "allow −after ≤ i − j ≤ before",
        window=_window(lambda d, before, after: d.abs() <= before),
    ),
    _v(
        "the window is inverted",
        "window inverted",
        "allow −after ≤ i − j ≤ before",
        window=_window(lambda d, before, after: ~((d <= before) & (-d <= after))),
    ),
    _v(
        "the window is aligned with the first key where n ≠ m",
        "window alignment",
        "add the offset m − n to the query index",
        window=lambda i, j, c: (i - j <= c.options["window"][0]) & (j - i <= c.options["window"][1]),
    ),
)
