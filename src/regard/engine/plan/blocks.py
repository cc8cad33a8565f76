"""Which blocks of 128 × 128 pairs hold any pair, and which hold nothing else: what FlexAttention skips and masks.

A word that reads positions in order is judged by the ends of a block, and ids by the least and the largest in it;
what may hold a pair without holding one costs time, not truth. Where the ends tell nothing, pairs are looked at.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from ...pattern import (
    Both,
    Either,
    Not,
    Pattern,
    blocks,
    causal,
    documents,
    full,
    lengths,
    prefix,
    sinks,
    window,
)

BLOCK = 128
LOOKED_AT = 1 << 24  # pairs at a time


class Blocks(NamedTuple):
    """For each block of queries and of keys, in each batch row or in all: may some pair be in, are all of them?"""

    some: Bool[Tensor, "#b x y"]
    all: Bool[Tensor, "#b x y"]


class Ends(NamedTuple):
    """The positions of the queries, (1 or b, n), and the least and largest of each block; of keys the same."""

    i: Int[Tensor, "#b n"]
    j: Int[Tensor, " m"]

    def of(self, x: Int[Tensor, "b n"]) -> tuple[Int[Tensor, "b x 1"], Int[Tensor, "b x 1"]]:
        low, high = ends(x)
        return low[..., None], high[..., None]

    @property
    def rows(self) -> tuple[Int[Tensor, "b x 1"], Int[Tensor, "b x 1"]]:
        return self.of(self.i)

    @property
    def keys(self) -> tuple[Int[Tensor, "1 1 y"], Int[Tensor, "1 1 y"]]:
        low, high = ends(self.j[None])
        return low[:, None], high[:, None]


def ends(x: Int[Tensor, "b n"]) -> tuple[Int[Tensor, "b x"], Int[Tensor, "b x"]]:
    """The least and the largest of each BLOCK neighbours."""
    short = -x.shape[-1] % BLOCK
    if short:
        x = torch.cat([x, x[:, -1:].expand(-1, short)], -1)
    return x.unflatten(-1, (-1, BLOCK)).aminmax(dim=-1)


def divide(pattern: Pattern, at: Ends, kept: Int[Tensor, " b"] | None = None) -> Blocks:
    """The blocks of a pattern; kept: keys from there on are hidden. A block that ends outside is never whole."""
    found = _blocks(pattern, at)
    if kept is not None:
        found = _both(found, _blocks(lengths(kept), at))
    inside = [
        torch.arange(1, -(-n // BLOCK) + 1, device=at.j.device) * BLOCK <= n
        for n in (at.i.shape[-1], len(at.j))
    ]
    whole = inside[0][:, None] & inside[1]
    return Blocks(found.some, found.all & whole)


def _both(a: Blocks, b: Blocks) -> Blocks:
    return Blocks(a.some & b.some, a.all & b.all)


def _blocks(pattern: Pattern, at: Ends) -> Blocks:
    match pattern:
        case Both():
            return _both(_blocks(pattern.left, at), _blocks(pattern.right, at))
        case Either():
            a, b = _blocks(pattern.left, at), _blocks(pattern.right, at)
            return Blocks(a.some | b.some, a.all | b.all)
        case Not():
            inner = _blocks(pattern.inner, at)
            return Blocks(~inner.all, ~inner.some)
        case documents():
            return _of_ids(pattern.ids.reshape(-1, pattern.ids.shape[-1]), at)
        case blocks():
            return _of_labels(at.i // pattern.size, (at.j // pattern.size)[None])
    return _of_word(pattern, at)


def _of_word(word: Pattern, at: Ends) -> Blocks:
    (i, i_last), (j, j_last) = at.rows, at.keys
    everywhere = (i == i) & (j == j)
    match word:
        case full():
            return Blocks(everywhere, everywhere)
        case causal():
            return Blocks(j <= i_last, j_last <= i)
        case window():
            some = (i - j_last <= word.before) & (j - i_last <= word.ahead)
            return Blocks(some, (i_last - j <= word.before) & (j_last - i <= word.ahead))
        case sinks():
            return Blocks((j < word.m) & everywhere, (j_last < word.m) & everywhere)
        case prefix():
            return Blocks((i < word.m) & (j < word.m), (i_last < word.m) & (j_last < word.m))
        case lengths():
            l = word.l[:, None, None]
            return Blocks((j < l) & everywhere, (j_last < l) & everywhere)
    return _looked_at(word, at)


def _of_ids(ids: Int[Tensor, "b m"], at: Ends) -> Blocks:
    last = ids.shape[-1] - 1
    inside = (at.i >= 0) & (at.i <= last)  # a query past the ids stands in no document
    i = at.i.clamp(0, last).expand(max(len(ids), len(at.i)), -1)
    found = _of_labels(ids.expand(len(i), -1).gather(1, i), ids)
    none, every = (x[..., None] for x in ends(inside.int()))
    return Blocks(found.some & (every > 0), found.all & (none > 0))


def _of_labels(of_rows: Int[Tensor, "b n"], of_keys: Int[Tensor, "b m"]) -> Blocks:
    """Pairs of equal labels: their ranges meet; they are one and the same."""
    (i, i_last), (j, j_last) = (ends(x) for x in (of_rows, of_keys))
    i, i_last, j, j_last = i[..., None], i_last[..., None], j[:, None], j_last[:, None]
    return Blocks((i <= j_last) & (j <= i_last), (i == i_last) & (j == j_last) & (i == j))


def _looked_at(word: Pattern, at: Ends) -> Blocks:
    """Any pattern without a batch, some rows at a time."""
    n, m = at.i.shape[-1], len(at.j)
    short = -m % BLOCK
    step = max(LOOKED_AT // (m + short) // BLOCK, 1) * BLOCK
    some: list[Tensor] = []
    whole: list[Tensor] = []
    for a in range(0, n, step):
        i = at.i[:, a : a + step]
        table = torch.broadcast_to(word.allows(i[..., None], at.j), (*i.shape, m))
        for into, fill in ((some, False), (whole, True)):
            padded = F.pad(table, (0, short, 0, -i.shape[-1] % BLOCK), value=fill)
            cells = padded.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
            into.append(cells.all(-1).all(2) if fill else cells.any(-1).any(2))
    return Blocks(torch.cat(some, 1), torch.cat(whole, 1))
