"""Packed documents for the Hopper kernels: `documents(ids) & band`, where each document is one run of positions.

    keys of query i = [max(document begins, i − far), min(document ends, i − near + 1))

Neither end of these intervals ever decreases, so the queries of a key are one interval, too, and so are the keys of
neighboring queries. A tile is at most 64 of them: of one document, or of several short ones that fit as a whole. The
tables depend on the contents of the ids, so they are kept with a copy of these, and dropped with it.

Nothing here imports Triton before a call runs.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ... import compat
from ...pattern import Both, Pattern, documents
from ...pattern.classification import intervals
from ...pattern.clauses import conjunction, parted
from ...progression import Ints
from ..call import Cache, CallFacts, Place, eager
from .mask import MEMBERS, Masks, distinct_rows, interval_mask_words

if TYPE_CHECKING:
    from .schedule import DevicePasses, HopperSchedule

WIDTHS = range(33, 257)  # of heads that the Hopper kernels take
MAX_CACHED_IDS = 8  # ids whose tables are kept: those of a batch, one for each pattern beside them
MAX_CACHED = 64  # tables and prepared launches of one of them


@dataclass(frozen=True, eq=False, repr=False)
class Packed(Both):
    """`documents(ids) & band` of a copy of ids that were read."""

    first: Ints  # (rows, m): where the document of each key begins; of each batch row, or of all
    end: Ints  # … and ends
    cache: Cache = field(default_factory=lambda: Cache(MAX_CACHED))  # what belongs to these ids

    @property
    def rows(self) -> int:
        """How many batch rows have tables of their own; 1: all have the same."""
        return len(self.first)

    def schedule(self, n: int, start: int, by_keys: bool) -> "tuple[HopperSchedule, bool]":
        """The tiles of all batch rows, row after row, on the host; and whether every member is in a tile."""
        key = "schedule", n, start, by_keys
        return self.cache.get(key) or self.cache.put(
            key, _schedule(len(self.first), *self._intervals(n, start, by_keys))
        )

    def pairs(self, n: int, start: int) -> int:
        """That are computed for one head of all batch rows."""
        return self.schedule(n, start, False)[0].masks.pairs

    def passes(self, place: Place, by_keys: bool, device: torch.device, *programs: int) -> "DevicePasses":
        """programs: the number of heads whose tiles these are, and of programs that run at the same time."""
        from .schedule import DevicePass, DevicePasses
        from .work_split import shares_tiles

        (on_host, covers), key = (
            self.schedule(place[1], place[3], by_keys),
            ("work", *place[1:], by_keys, device),
        )
        if not len(on_host.blocks):
            return DevicePasses((), covers)
        if (work := self.cache.get(key)) is None:
            masks = replace(on_host.masks, words=on_host.masks.words.to(device))
            work = self.cache.put(key, replace(on_host, masks=masks))
        work = replace(work, split=True) if shares_tiles(work, *programs) else work
        return DevicePasses((DevicePass(work, None, False, False),), covers)

    def _intervals(self, n: int, start: int, by_keys: bool) -> tuple[Ints, Ints, Ints]:
        """Of each query, or each key: where its document begins, its first partner, the end of its partners. Neither
        of the latter ever decreases; one that has no partner ends before it begins, or there."""
        m, first, end = self.first.shape[1], self.first, self.end
        if (start, n) != (0, m):
            i = np.arange(start, start + n)
            inside = np.clip(i, 0, m - 1)
            first = np.where(i < 0, -1, np.where(i < m, first[:, inside], m))
            end = np.where(i < 0, 0, end[:, inside])  # beyond the ids, no interval ends after it begins
        bounds = _bounds(self.right, n, m, start)
        assert bounds is not None
        low, high = np.maximum(first, bounds[0]), np.minimum(end, bounds[1])
        return (self.first, _up_to(high, m), _up_to(low, m)) if by_keys else (first, low, high)


def _up_to(ends: Ints, m: int) -> Ints:
    """Of each batch row, how many of these are at most 0, 1, …, m − 1."""
    rows = len(ends)
    at = (ends + (m + 1) * np.arange(rows)[:, None]).ravel()
    return np.bincount(at, minlength=rows * (m + 1)).reshape(rows, m + 1)[:, :m].cumsum(axis=1)


@lru_cache(maxsize=64)
def _bounds(band: Pattern, n: int, m: int, start: int) -> tuple[Ints, Ints] | None:
    """The first key of each query and the end of its keys, if they are one interval whose ends never decrease."""
    ends = intervals(band, np.arange(start, start + n), m)
    if ends is None or any((np.diff(x) < 0).any() for x in ends):
        return None
    return np.clip(ends[0], 0, m), np.clip(ends[1] + 1, 0, m)


# Tables


def _schedule(rows: int, document: Ints, low: Ints, high: Ints) -> "tuple[HopperSchedule, bool]":
    """As Packed.schedule. A tile has members of a document from its beginning on, or short ones as far as they fit;
    it has none without partners. The blocks of a tile that need no mask come first."""
    from .schedule import BEGINS, TESTED, WIDTH, HopperSchedule, ranks

    length, total = document.shape[1], document.size
    edges = np.append(np.flatnonzero(_begins(document)), total)
    count = len(edges) - 1
    room = np.minimum(edges + MEMBERS, (edges // length + 1) * length)
    after = np.maximum(edges.searchsorted(room, side="right") - 1, np.arange(1, count + 2))
    after[count] = count
    runs = np.zeros(1, dtype=np.int64)  # of documents, each of one long one, or of several short ones
    while runs[-1] < count:  # so many runs are known, and `after` skips as many
        runs, after = np.append(runs, after[runs]), after[after]
    runs = edges[runs[: runs.searchsorted(count)]]
    tiles = (np.append(runs[1:], total) - runs + MEMBERS - 1) // MEMBERS
    first = np.repeat(runs, tiles) + MEMBERS * ranks(tiles)
    last = np.append(first[1:], total) - 1
    # The first partner of each member and the end of its partners. A member past the end of its tile is in a later
    # document, or there is none, so it has no partners in the tile's blocks; its results are not used.
    partners = np.full((2, total + MEMBERS), max(length, int(high[-1, -1])), dtype=np.int32)
    partners[0, :total], partners[1, :total] = low.ravel(), high.ravel()
    (begin, earliest), (latest, end) = partners[:, first], partners[:, last]
    covers, *numbers = bool((end > begin).all()), first, last, begin, end, earliest, latest
    first, last, begin, end, earliest, latest = numbers if covers else (x[end > begin] for x in numbers)
    blocks, before = (end - begin + MEMBERS - 1) // MEMBERS, (latest - begin + MEMBERS - 1) // MEMBERS
    plain = np.maximum((earliest - begin) // MEMBERS - before, 0)  # after `before` masked ones
    row, before_tile = first // length, np.cumsum(blocks) - blocks

    words = np.zeros((len(first), WIDTH + 4), dtype=np.int32)  # and numbers of the tile
    words[:, 0], words[:, 1], words[:, 8], words[:, 9] = begin, 1, end - begin, 256 * (last - first + 1)
    words[:, 10], words[:, 11], words[:, 12], words[:, 13] = first - length * row, 1, before_tile, plain
    words[:, 14], words[:, 15] = before * (plain > 0), first
    table = np.repeat(words, blocks, axis=0)
    nth, plain, before = np.arange(len(table), dtype=np.int32) - table[:, 12], table[:, 13], table[:, 14]
    masked = nth >= plain
    at = MEMBERS * np.where(masked, nth - plain * (nth < plain + before), nth + before)
    table[:, 0] += at
    table[:, 8] = np.minimum(table[:, 8] - at, MEMBERS)
    table[:, 9] += TESTED * masked + BEGINS * (nth == 0)
    key, until, member = table[masked][:, [0, 8, 15]].T[:, :, None]
    # From each member on, the ends of MEMBERS of them.
    following = np.ndarray((2, total + 1, MEMBERS), np.int32, partners, 0, (*partners.strides, 4))
    columns = np.minimum(np.maximum(following[:, member[:, 0]] - key, 0), until).astype(np.uint8)
    distinct, nth_mask = distinct_rows(np.concatenate(columns, axis=1).view(np.int64))
    table[masked, 8] += 256 * (1 + nth_mask.astype(np.int32))
    no_pair = np.zeros((1, 2 * MEMBERS), dtype=np.uint8)  # the first mask
    bits = interval_mask_words(np.concatenate([no_pair, distinct.view(np.uint8)]))
    masks = Masks(torch.from_numpy(bits), pairs=int(((last - first + 1) * (end - begin)).sum()))
    on_host = torch.from_numpy(np.ascontiguousarray(table[:, :WIDTH]))
    return HopperSchedule(on_host, blocks.astype(np.int64), masks, rows=rows, row=row), covers


def _begins(rows: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Whether a number differs from the one before it in its row."""
    differs = np.ones(rows.shape, dtype=bool)
    np.not_equal(rows[:, 1:], rows[:, :-1], out=differs[:, 1:])
    return differs


# Which calls

# By the tensor of ids and how often it was written, with the tensor, so that its id stays its own; and by contents.
_by_tensor, _by_contents = Cache(MAX_CACHED_IDS), Cache(MAX_CACHED_IDS)


def for_hopper(f: CallFacts) -> Packed | str:
    """The pattern of a call, after reading its ids, or why the Hopper kernels cannot run it."""
    words, _ = parted(f.pattern, documents)
    return (_unsupported(f) if words else None) or read(f)


def read(f: CallFacts) -> Packed | str:
    """The pattern of a call, after reading its ids, or why it is not `documents(ids) & band` of contiguous ids."""
    words, others = parted(f.pattern, documents)
    if len(words) != 1 or any(x.has_data for x in others):
        return f"{f.pattern!r} carries data, which no progression describes"
    ids, within = words[0].ids, words[0].within
    if within.shift_period != 1:
        return f"{f.pattern!r}: positions within documents are not supported by these kernels"
    band = conjunction(*others, within)
    if f.observed or ids.is_meta or not eager(ids):  # sizes may be symbols, which are not to be compared
        return "the ids of documents cannot be read under a compiler or a transform, or on meta"
    if _bounds(band, f.n, f.m, f.offset[0]) is None:
        return f"{f.pattern!r}: beside documents, kernels take a band of i − j (causal, a window, or both)"
    version = compat.version(ids)
    if version is not None and (cached := _by_tensor.get((id(ids), version, band))):
        return cached[0]
    if ids.is_cuda and compat.stream_is_capturing():
        return "the ids of documents cannot be read while a CUDA graph is captured; call it once before"
    data = ids.detach().cpu().numpy()
    contents = data.tobytes(), data.dtype.str, data.shape, band, ids.device
    if (packed := _by_contents.get(contents)) is None:
        packed = _by_contents.put(contents, _packed(ids, band, data))
    return packed if version is None else _by_tensor.put((id(ids), version, band), (packed, ids))[0]


def _packed(ids: Tensor, band: Pattern, data: NDArray[np.integer]) -> Packed | str:
    rows = data.reshape(-1, data.shape[-1])
    rows = rows[:1] if len(rows) == 1 or (rows == rows[:1]).all() else rows
    of_row, first = np.divmod(np.flatnonzero(_begins(rows)), rows.shape[1])
    labels = rows[of_row, first]
    order = np.lexsort((labels, of_row))
    if ((np.diff(labels[order]) == 0) & (np.diff(of_row[order]) == 0)).any():
        return "a document is in several places of its batch row: ids that are not contiguous"
    end = np.append(first[1:], 0)
    end[end == 0] = rows.shape[1]
    ends: Any = [np.repeat(x, end - first).reshape(rows.shape) for x in (first, end)]
    return Packed(documents(ids.clone()), band, ends[0], ends[1])


def _unsupported(f: CallFacts) -> str | None:
    """What the Hopper kernels do not compute with documents, and shapes that they do not take."""
    if f.observed:  # sizes may be symbols, which are not to be compared: `read` gives the reason
        return None
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
