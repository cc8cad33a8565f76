"""Packed documents for the Hopper kernels: `documents(ids) & band`, where each document is one run of positions.

    keys of query i = [max(document begins, i − far), min(document ends, i − near + 1))

Neither end of these intervals ever decreases, so the queries of a key are one interval, too, and so are the keys of
neighboring queries. A tile is at most 64 of them: of one document, or of several short ones that fit as a whole. The
tables depend on the contents of the ids, so they are kept with a copy of these, and dropped with it.

Nothing here imports Triton before a call runs.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce
from itertools import pairwise
from operator import and_
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ... import compat
from ...pattern import Both, Pattern, documents, full
from ...pattern.classification import intervals
from ...pattern.clauses import conjuncts
from ...progression import FAR, Ints
from ..call import Cache, CallFacts, Place, eager

if TYPE_CHECKING:
    from .schedule import DevicePasses, Schedule

MEMBERS = 64  # of a tile, and of a block
WIDTHS = range(33, 257)  # of heads that the Hopper kernels take
MAX_CACHED = 8  # ids whose tables are kept: those of a batch, one for each pattern beside them
MAX_KEPT = 64  # tables and prepared launches of one of them


class Tiles(NamedTuple):
    """Tiles of neighboring members of all batch rows, one row after the other, and the interval of each member."""

    first: Ints
    size: Ints
    low: Ints  # of each member, its first partner and the end of its partners; FAR and 0 if it has none
    high: Ints
    begin: Ints  # the same of each tile: of any of its members; the end is 0 if none has a partner
    end: Ints
    pairs: int  # that are computed, of all batch rows


@dataclass(frozen=True, eq=False, repr=False)
class Packed(Both):
    """`documents(ids) & band` of a copy of ids that were read."""

    first: Ints  # (rows, m): where the document of each key begins; of each batch row, or of all
    end: Ints  # … and ends
    kept: Cache = field(default_factory=lambda: Cache(MAX_KEPT))  # what belongs to these ids

    @property
    def rows(self) -> int:
        """How many batch rows have tables of their own; 1: all have the same."""
        return len(self.first)

    def tiles(self, n: int, start: int, by_keys: bool) -> Tiles:
        key = "tiles", n, start, by_keys
        return self.kept.get(key) or self.kept.put(key, _cut(*self._intervals(n, start, by_keys)))

    def passes(self, place: Place, by_keys: bool, device: torch.device) -> "DevicePasses":
        from .schedule import DevicePass, DevicePasses

        _, n, _, start, _ = place
        key = "passes", n, start, by_keys, device
        if (made := self.kept.get(key)) is None:
            tiles = self.tiles(n, start, by_keys)
            works = [_schedule(tiles, self.rows, device)] if tiles.pairs else []
            steps = tuple(DevicePass(work, None, False, False) for work in works)
            made = self.kept.put(key, DevicePasses(steps, bool((tiles.end > 0).all())))
        return made

    def _intervals(self, n: int, start: int, by_keys: bool) -> tuple[Ints, Ints, Ints]:
        """Of each query, or each key: where its document begins, its first partner, the end of its partners."""
        m, i = self.first.shape[1], np.arange(start, start + n)
        inside = np.clip(i, 0, m - 1)
        first = np.where(i < 0, -1, np.where(i < m, self.first[:, inside], m))
        end = np.where(i < 0, 0, self.end[:, inside])  # beyond the ids, no interval ends after it begins
        low, high = _bounds(self.right, n, m, start)
        low, high = np.maximum(first, low), np.minimum(end, high)
        if not by_keys:
            return first, low, high
        low, high = (np.stack([_up_to(row, m) for row in x]) for x in (high, low))
        return self.first, low, high


def _up_to(ends: Ints, m: int) -> Ints:
    """How many of these are at most 0, 1, …, m − 1."""
    return np.bincount(np.clip(ends, 0, m), minlength=m + 1)[:m].cumsum()


@lru_cache(maxsize=64)
def _bounds(band: Pattern, n: int, m: int, start: int) -> tuple[Ints, Ints] | None:
    """The first key of each query and the end of its keys, if they are one interval whose ends never decrease."""
    found = intervals(band, np.arange(start, start + n), m)
    if found is None or any((np.diff(x) < 0).any() for x in found):
        return None
    return found[0], found[1] + 1


# Tables


def _cut(document: Ints, low: Ints, high: Ints) -> Tiles:
    """Members in tiles: a document from its beginning on, short ones together as far as they fit."""
    length, size = document.shape[1], document.size
    edges = np.append(np.flatnonzero(np.diff(document, axis=1, prepend=-2)), size)
    room = np.minimum(edges[:-1] + MEMBERS, (edges[:-1] // length + 1) * length)
    after = np.maximum(np.searchsorted(edges, room, side="right") - 1, np.arange(1, len(edges))).tolist()
    runs, at = [0], 0
    while (at := after[at]) < len(after):
        runs.append(at)
    tiles = -(-np.diff(edges[runs], append=size) // MEMBERS)
    first = np.repeat(edges[runs], tiles) + MEMBERS * _nth(tiles)
    empty = (low >= high).ravel()
    low, high = np.where(empty, FAR, low.ravel()), np.where(empty, 0, high.ravel())
    rows, ends = np.diff(first, append=size), np.maximum.reduceat(high, first)
    begins = np.minimum.reduceat(low, first)
    return Tiles(first, rows, low, high, begins, ends, int((rows * (ends - begins).clip(0)).sum()))


def _nth(counts: Ints) -> Ints:
    """0, 1, … for each of these counts."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _schedule(tiles: Tiles, rows: int, device: torch.device) -> "Schedule":
    """The blocks of these tiles with their masks; on the host, as they are assigned to programs before they move."""
    from .schedule import BEGINS, ITEM, TESTED, WIDTH, Schedule
    from .tile_lists import Masks, _distinct

    per_tile = -(-(tiles.end - tiles.begin).clip(0) // MEMBERS)
    tile = np.repeat(np.arange(len(per_tile)), per_tile)
    key = tiles.begin[tile] + MEMBERS * _nth(per_tile)
    latest = np.maximum.reduceat(tiles.low, tiles.first)
    earliest = np.minimum.reduceat(tiles.high, tiles.first)
    tested = (latest[tile] > key) | (earliest[tile] < key + MEMBERS)
    order = np.argsort(2 * tile + tested, kind="stable")  # blocks that need no mask come first
    tile, key, tested = tile[order], key[order], tested[order]
    of = tile[tested, None]
    member = tiles.first[of] + np.minimum(np.arange(MEMBERS), tiles.size[of] - 1)  # then the last one again
    ends = (x[member] - key[tested, None] for x in (tiles.low, tiles.high))
    columns = np.concatenate([np.clip(x, 0, MEMBERS).astype(np.uint8) for x in ends], axis=1)
    distinct, which = _distinct(columns.view(np.int64))
    distinct = np.pad(distinct, ((1, 0), (0, 0)))  # the first mask allows no pair
    words = torch.from_numpy(_bits(distinct.view(np.uint8)))
    length = len(tiles.low) // rows
    blocks = np.zeros((len(tile), WIDTH), dtype=np.int32)
    blocks[:, 0], blocks[:, 1], blocks[:, 8] = key, 1, np.minimum(tiles.end[tile] - key, MEMBERS)
    blocks[tested, 8] += 256 * (1 + which).astype(np.int32)
    blocks[:, 9] = TESTED * tested + BEGINS * (np.diff(tile, prepend=-1) > 0) + 256 * tiles.size[tile]
    blocks[:, 10], blocks[:, 11] = tiles.first[tile] % length, 1
    none = torch.zeros((0, ITEM), dtype=torch.int32)
    work = Schedule(
        pattern=full(), items=none, blocks=torch.from_numpy(blocks), joins=none, segments=1, ragged=True, slots=0,
        ends=np.cumsum(per_tile[per_tile > 0]), masks=Masks(words),
    )  # fmt: skip
    at = [0, *np.searchsorted(tiles.first[tile] // length, np.arange(1, rows)).tolist(), len(tile)]
    each = (
        replace(work, blocks=work.blocks[a:b], ends=work.ends[(work.ends > a) & (work.ends <= b)] - a)
        for a, b in pairwise(at)
    )
    return replace(work, rows=tuple(each), masks=Masks(words.to(device)))


BELOW = np.array([(1 << x) - 1 for x in range(MEMBERS + 1)], dtype="<u8")  # the bits of the columns before x


def _bits(ends: NDArray[np.uint8]) -> NDArray[np.int32]:
    """`tile_lists._bits` of intervals. ends: of each mask, the first column of each row, then the end of each."""
    of_rows = BELOW[ends[:, MEMBERS:]] & ~BELOW[ends[:, :MEMBERS]]
    eight = of_rows.view(np.uint8).reshape(-1, 4, 2, 8, 1, 8)  # columns of rows 16 · x + y and 16 · x + y + 8
    two = eight >> 2 * np.arange(4, dtype=np.uint8)[:, None] & 3
    four = two[:, :, 0] | two[:, :, 1] << 2
    return (four[..., ::2] | four[..., 1::2] << 4).view("<i4").reshape(len(ends), -1)


# Which calls

# By the tensor of ids and how often it was written, with the tensor, so that its id stays its own; and by contents.
_by_tensor, _by_contents = Cache(MAX_CACHED), Cache(MAX_CACHED)


def read(f: CallFacts) -> Packed | str:
    """The pattern of a call, after reading its ids, or why the kernels cannot run it."""
    factors = conjuncts(f.pattern)
    words = [x for x in factors if isinstance(x, documents)]
    rest = [x for x in factors if not isinstance(x, documents)]
    if len(words) != 1 or any(x.has_data for x in rest):
        return f"{f.pattern!r} carries data, which no progression describes"
    band: Pattern = reduce(and_, rest) if rest else full()
    ids = words[0].ids
    if reason := _unsupported(f, ids):
        return reason
    if _bounds(band, f.n, f.m, f.offset[0]) is None:
        return f"{f.pattern!r}: beside documents, kernels take a band of i − j (causal, a window, or both)"
    version = compat.version(ids)
    if version is not None and (found := _by_tensor.get((id(ids), version, band))):
        return found[0]
    if ids.is_cuda and compat.stream_is_capturing():
        return "the ids of documents cannot be read while a CUDA graph is captured; call it once before"
    data = ids.detach().cpu().numpy()
    contents = data.tobytes(), data.dtype.str, data.shape, band, ids.device
    if (made := _by_contents.get(contents)) is None:
        made = _by_contents.put(contents, _packed(ids, band, data))
    return made if version is None else _by_tensor.put((id(ids), version, band), (made, ids))[0]


def _packed(ids: Tensor, band: Pattern, data: NDArray[np.integer]) -> Packed | str:
    rows = data.reshape(-1, data.shape[-1])
    rows = rows[:1] if (rows == rows[:1]).all() else rows
    begins = np.diff(rows, axis=1, prepend=rows[:, :1] - 1) != 0
    if any(len(np.unique(row[new])) < new.sum() for row, new in zip(rows, begins)):
        return "a document is in several places of its batch row: ids that are not contiguous"
    at = np.arange(rows.shape[1] + 1)
    first = np.maximum.accumulate(np.where(begins, at[:-1], 0), axis=1)
    ends = np.where(np.append(begins[:, 1:], np.full((len(rows), 1), True), axis=1), at[1:], at[-1])
    end = np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]
    return Packed(documents(ids.clone()), band, first, end)


def _unsupported(f: CallFacts, ids: Tensor) -> str | None:
    """What the Hopper kernels do not compute with documents, and shapes that they do not take."""
    if f.observed or ids.is_meta or not eager(ids):  # sizes may be symbols, which are not to be compared
        return "the ids of documents cannot be read under a compiler or a transform, or on meta"
    from .call import MAX_SOFTCAP

    dtype, step = str(f.dtype).removeprefix("torch."), f.offset[1]
    reasons: tuple[tuple[Any, str], ...] = (
        (f.bias != "none", "documents with a bias are not supported"),
        ((f.softcap or 0.0) > MAX_SOFTCAP, f"documents with a softcap above {MAX_SOFTCAP} are not supported"),
        (f.dropout_p > 0, "documents with dropout are not supported"),
        (f.dtype.itemsize != 2, f"documents take float16 or bfloat16, not {dtype}"),
        (f.d_k != f.d_v or f.d_k not in WIDTHS,
         f"documents with heads {f.d_k} and {f.d_v} wide: one width from {WIDTHS[0]} to {WIDTHS[-1]} is needed"),
        (f.n < 2 or f.m == 0, "documents need two queries or more, and keys"),
        (step != 1, f"documents with queries {step} positions apart are not supported"),
        ((f.heads + 2 * f.kv_heads) * f.d_k * max(f.n, f.m) >= 2**31, "documents with 2³¹ numbers in a batch row"),
        (not _is_hopper(f.device), "documents need a Hopper GPU (compute capability 9)"),
    )  # fmt: skip
    return next((reason for holds, reason in reasons if holds), None)


def _is_hopper(device: str) -> bool:
    if not torch.cuda.is_available():
        return False
    from .launches import is_hopper

    return is_hopper(torch.device(device))
