"""FlexAttention's BlockMask of a pattern, without an n × m table.

A square of blocks is classified as a whole: no pair allowed, every pair, or in each of its blocks some pairs but not
all. Where that is not certain the square is divided into four. Single blocks that are still uncertain lie where words
meet; most are equal up to a shift, so one of each kind is computed pair by pair.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ..progression import FAR, Ints
from .algebra import At, Pattern, positions, query_offset
from .classification import BLOCK, BlockGrid, Classes, both
from .data import composed_row_mask, without_gaps
from .relation import Relation
from .word import Word

if TYPE_CHECKING:  # it takes as long to import as the rest of regard
    from torch.nn.attention.flex_attention import BlockMask

NONE, ALL, PART, MIXED = range(
    4
)  # PART: in each block some pairs and not all; MIXED: not known of all blocks
BOTH = np.array(
    [[NONE] * 4, [NONE, ALL, PART, MIXED], [NONE, PART, MIXED, MIXED], [NONE, MIXED, MIXED, MIXED]]
)
NOT = np.array([ALL, NONE, PART, MIXED])
MAX_WIDE = 1 << 20  # entries of an index table up to which it has a column for every block, as PyTorch's have
CHUNK = 256  # blocks that are computed pair by pair at a time


def block_mask(pattern: Pattern, n: int, m: int, at: At, device: torch.device | str | None) -> "BlockMask":
    """As `Pattern.block_mask` describes it."""
    start, step = query_offset(pattern, n, m, at)
    pattern.check_data(m, n, at)
    if pattern.has_data or step != 1 or n == 0 or m == 0:
        i = positions(pattern, n, m, at, device)
        return from_grid(pattern, i if i.dim() == 2 else i[None], m, (start, step), None)
    from torch.nn.attention.flex_attention import BlockMask

    device = pattern.device or torch.get_default_device() if device is None else torch.device(device)
    cells = _divide(pattern, n, m, start)
    rows, columns = -(-n // BLOCK), -(-m // BLOCK)
    sides = (
        (0, 1, rows, columns),
        (1, 0, columns, rows),
    )  # key blocks of query blocks, and the other way around
    tables: list[Tensor] = []
    for own, other, count, others in sides:
        for state in (PART, ALL):
            which = cells[cells[:, 3] == state]
            tables += _table(which[:, [own, other, 2]], count, others, device)
    kv, kv_at, full_kv, full_kv_at, q, q_at, full_q, full_q_at = tables
    lists = kv, kv_at, full_kv, full_kv_at, q, q_at, full_q, full_q_at
    mask_mod = _mask_mod(pattern, n, m, (start, 1))
    return BlockMask((n, m), *lists, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=mask_mod)


def from_grid(
    pattern: Pattern, i: Int[Tensor, "#b n"], m: int, at: tuple[int, int] | None, lengths: Tensor | None
) -> "BlockMask":
    """By the classes of all blocks: where words meet, a block counts as PART though it may hold no pair, or all.

    i: positions of the queries. at: start and step of them; None: one offset per batch row.
    """
    n = i.shape[-1]
    lengths = None if lengths is None else without_gaps(lengths.to(i.device))
    mask_mod = _mask_mod(pattern, n, m, at, i, lengths)  # raises an error if the pattern differs by head
    grid = BlockGrid(i, m, 1 if at is None else at[1])
    blocks = grid.classify(pattern)
    if lengths is not None:
        blocks = both(blocks, grid.keys_below(lengths))
    return of_blocks(blocks, mask_mod, n, m)


def of_blocks(blocks: Classes, mask_mod: Callable[..., Tensor], n: int, m: int) -> "BlockMask":
    from torch.nn.attention.flex_attention import BlockMask

    lists = *_listed(~blocks.none & ~blocks.all), *_listed(blocks.all)
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=(n, m))


def _listed(which: Tensor) -> tuple[Int[Tensor, "b 1 x"], Int[Tensor, "b 1 x y"]]:
    """How many key blocks each query block has, and which, those in front."""
    which = which[:, None]
    order = torch.argsort(which.int(), dim=-1, descending=True, stable=True)
    return which.sum(-1, dtype=torch.int32), order.int().contiguous()


def _mask_mod(
    pattern: Pattern,
    n: int,
    m: int,
    at: tuple[int, int] | None,
    i: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Callable[..., Tensor]:
    start, step = (0, 1) if at is None else at
    usual, inside = at == (0, 1), at is not None and step == 1 and start >= 0 and start + n <= m
    allows = composed_row_mask(pattern, inside)

    def mask_mod(b, h, row, key):
        pair = allows(b, row if usual else i[b, row] if at is None else start + step * row, key)  # type: ignore[index]
        return pair if lengths is None else pair & (key < lengths[b])

    return mask_mod


# Squares of blocks


def _divide(pattern: Pattern, n: int, m: int, start: int) -> Ints:
    """Squares whose blocks are all PART or all ALL: (x, 4) of first row, first column, side (in blocks), state."""
    rows, columns = -(-n // BLOCK), -(-m // BLOCK)
    side = 1 << (max(rows, columns) - 1).bit_length()
    row, column = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    edges = Relation(query_below=start + n, key_below=m)  # beyond the last query or key no pair is allowed
    out = []
    while len(row):
        i, j = (x * BLOCK + shift for x, shift in ((row, start), (column, 0)))

        leaf = partial(_of_word, i=i, j=j, side=side)
        state = pattern.fold(leaf, _both, _either, _negated)
        state = _both(state, _of_relation(edges, i, j, side))
        if side == 1:
            open_ = state == MIXED
            state[open_] = _pair_by_pair(pattern, edges, i[open_], j[open_])
        known = (state == PART) | (state == ALL)
        out.append(np.column_stack([row[known], column[known], np.full(known.sum(), side), state[known]]))
        row, column, side = row[state == MIXED], column[state == MIXED], side // 2
        row = np.concatenate([row, row, row + side, row + side])
        column = np.concatenate([column, column + side, column, column + side])
        inside = (row < rows) & (column < columns)
        row, column = row[inside], column[inside]
    return np.concatenate(out)


def _both(a: Ints, b: Ints) -> Ints:
    return BOTH[a, b]


def _either(a: Ints, b: Ints) -> Ints:
    return NOT[BOTH[NOT[a], NOT[b]]]


def _negated(a: Ints) -> Ints:
    return NOT[a]


def _of_word(word: Any, i: Ints, j: Ints, side: int) -> Ints:
    return _of_relation(word.relation, i, j, side)


def _of_relation(r: Relation, i: Ints, j: Ints, side: int) -> Ints:
    """The state of squares that begin at positions i and j. A single condition is decided for a single block."""
    last = side * BLOCK - 1
    low, high = i - (j + last), i + last - j  # of i − j
    open_ = PART if side == 1 else MIXED
    state = np.full(len(i), ALL)

    def apply(every, none, otherwise=open_):
        nonlocal state
        state = BOTH[state, np.where(none, NONE, np.where(every, ALL, otherwise))]

    def apply_residue(begin, end, k, residue):
        there = (end - residue) // k > (begin - 1 - residue) // k
        apply(False, ~there, PART if k <= BLOCK else open_)

    if r.near > -FAR:
        apply(low >= r.near, high < r.near)
    if r.far < FAR:
        apply(high <= r.far, low > r.far)
    if r.divisor > 1:
        apply_residue(low, high, r.divisor, 0)
    if r.query_below < FAR:
        apply(i + last < r.query_below, i >= r.query_below)
    if r.key_below < FAR:
        apply(j + last < r.key_below, j >= r.key_below)
    if r.query_class[0] > 1:
        apply_residue(i, i + last, *r.query_class)
    if r.key_class[0] > 1:
        apply_residue(j, j + last, *r.key_class)
    for size in r.blocks:
        a, b, c, d = i // size, (i + last) // size, j // size, (j + last) // size
        apply((a == b) & (c == d) & (a == c), (b < c) | (d < a))
    return state


def _pair_by_pair(pattern: Pattern, edges: Relation, i: Ints, j: Ints) -> Ints:
    """The states of single blocks that begin at positions i and j; one block of each kind is computed."""
    if not len(i):
        return np.zeros(0, dtype=np.int64)
    kinds = _kinds([edges, *(leaf.relation for leaf in pattern.leaves() if isinstance(leaf, Word))], i, j)
    _, first, kind = np.unique(kinds, return_index=True, return_inverse=True)
    place = np.arange(BLOCK)
    states = []
    for at in np.split(first, range(CHUNK, len(first), CHUNK)):
        rows, keys = i[at, None, None] + place[:, None], j[at, None, None] + place
        inside = (rows < edges.query_below) & (keys < edges.key_below)
        allowed = np.broadcast_to(np.asarray(pattern.allows(rows, keys)), inside.shape) & inside
        states.append(np.where(allowed.all((1, 2)), ALL, np.where(allowed.any((1, 2)), PART, NONE)))
    return np.concatenate(states)[kind.reshape(-1)]


def _kinds(relations: list[Relation], i: Ints, j: Ints) -> Ints:
    """A number per block; blocks with the same number hold the same pairs of all these relations."""
    reach = 2 * BLOCK
    code, values = np.zeros(len(i), dtype=np.int64), 1

    def distinguish(x):
        nonlocal code, values
        x = x - x.min()
        width = int(x.max()) + 1
        if values * width >= 1 << 62:
            _, code = np.unique(code, return_inverse=True)
            values = len(code)
        code, values = code * width + x, values * width

    for r in dict.fromkeys(relations):
        for bound in (r.near, r.far):
            if abs(bound) < FAR:
                distinguish(np.clip(i - j - bound, -reach, reach))
        for bound, x in ((r.query_below, i), (r.key_below, j)):
            if bound < FAR:
                distinguish(np.clip(bound - x, 0, reach))
        for k in {r.divisor, r.query_class[0], r.key_class[0], *r.blocks} - {1}:
            distinguish(i % k)
            distinguish(j % k)
        for size in r.blocks:
            distinguish(np.clip(i // size - j // size, -reach, reach))
    return code


# Index tables


def _table(squares: Ints, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """How many blocks each row has, and which, in order. squares: (x, 3) of first row, first column, side.

    Where the blocks of each row are one run that begins at the same place, or one further in each row, the table is a
    view of one line: for `causal()` at a million positions it would have 61 million entries.
    """
    own, other, side = squares.T
    row = np.repeat(own, side) + np.arange(side.sum()) - np.repeat(np.cumsum(side) - side, side)
    begin, end = np.repeat(other, side), np.minimum(np.repeat(other + side, side), columns)
    inside = row < rows
    row, begin, end = row[inside], begin[inside], end[inside]
    order = np.argsort(row * (columns + 1) + begin, kind="stable")
    row, begin, end = row[order], begin[order], end[order]
    new = np.ones(len(row), dtype=bool)
    new[1:] = (row[1:] != row[:-1]) | (begin[1:] != end[:-1])
    first = np.flatnonzero(new)
    row, begin, end = row[first], begin[first], np.append(end[first[1:] - 1], end[-1:])
    count = np.bincount(row, end - begin, minlength=rows).astype(np.int64)
    width = columns if rows * columns <= MAX_WIDE else max(int(count.max(initial=0)), 1)
    if rows * width > MAX_WIDE and _is_line(row, begin):
        table = _view(row, begin, rows, width, device)
    else:
        table = _filled(row, begin, end, count, width, device)
    return torch.from_numpy(count.astype(np.int32))[None, None].to(device), table[None, None]


def _is_line(row: Ints, begin: Ints) -> bool:
    """Whether each row has one run, which begins at the same place as the one before or one further."""
    shift = begin[1:] - begin[:-1]
    return bool((row[1:] > row[:-1]).all() and ((shift == 0).all() or (shift == row[1:] - row[:-1]).all()))


def _view(row: Ints, begin: Ints, rows: int, width: int, device: torch.device) -> Tensor:
    slope = int(len(begin) > 1 and begin[1] > begin[0])
    offset = int(begin[0]) - slope * int(row[0])
    line = torch.arange(offset, offset + slope * (rows - 1) + width, dtype=torch.int32, device=device)
    return line.as_strided((rows, width), (slope, 1))


def _filled(row: Ints, begin: Ints, end: Ints, count: Ints, width: int, device: torch.device) -> Tensor:
    size = end - begin
    entry = np.arange(int(size.sum()))
    of_row = np.repeat(row, size)
    within = entry - (np.cumsum(count) - count)[of_row]
    listed = np.repeat(begin - (np.cumsum(size) - size), size) + entry
    where, blocks = (
        torch.from_numpy(x).to(device) for x in (of_row * width + within, listed.astype(np.int32))
    )
    if device.type == "cpu":  # NumPy's zeros take memory only where they are written
        table = torch.from_numpy(np.zeros(len(count) * width, dtype=np.int32))
    else:
        table = torch.zeros(len(count) * width, dtype=torch.int32, device=device)
    return table.index_copy_(0, where, blocks).view(len(count), width)
