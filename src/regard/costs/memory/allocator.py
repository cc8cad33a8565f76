"""What an allocator makes of a sequence of allocations: its peak, and the memory that it takes from the device.

The CPU's allocator returns exactly the requested size: sizes add up. PyTorch's caching allocator for CUDA rounds up
to 512 bytes, takes segments of at least 2 MiB from the device, splits and merges blocks in them, and does not split
off a remainder of 1 MiB or less of a large block: so allocated memory exceeds what was requested, and depends on the
order.
"""

from bisect import bisect_left, insort
from typing import NamedTuple

import torch
from torch import Tensor

SMALL, SMALL_SEGMENT = 1 << 20, 2 << 20  # blocks up to 1 MiB come from segments of 2 MiB
LARGE, LARGE_SEGMENT = 10 << 20, 20 << 20  # blocks below 10 MiB come from segments of 20 MiB
ROUND = 512
SEGMENT_ROUND = 2 << 20


class Caching:
    """PyTorch's caching allocator for CUDA, on one stream. A block is known by its address."""

    def __init__(self):
        self.allocated = self.peak = self.reserved = self._top = 0
        self._used: dict[int, tuple[int, bool]] = {}  # address → size, whether it is a small block
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # (size, address), sorted
        self._starts: dict[int, int] = {}  # address of a free block → its size
        self._ends: dict[int, int] = {}  # and the address after it → its size

    def malloc(self, size: int) -> int:
        size = max(ROUND, -(-size // ROUND) * ROUND)
        small = size <= SMALL
        best = bisect_left(self._free[small], (size, -1))
        if best < len(self._free[small]):
            found, at = self._free[small][best]
            self._take(at, small)
        else:  # a new segment
            found = -(-size // SEGMENT_ROUND) * SEGMENT_ROUND if size >= LARGE else LARGE_SEGMENT
            found = SMALL_SEGMENT if small else found
            self.reserved += found
            at, self._top = self._top, self._top + found + SEGMENT_ROUND
        rest = found - size
        if rest >= ROUND if small else rest > SMALL:
            self._put(at + size, rest, small)
        else:
            size = found
        self._used[at] = size, small
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        return at

    def free(self, at: int) -> None:
        size, small = self._used.pop(at)
        self.allocated -= size
        if at + size in self._starts:
            size += self._take(at + size, small)
        if at in self._ends:
            before = self._take(at - self._ends[at], small)
            at, size = at - before, size + before
        self._put(at, size, small)

    def _put(self, at: int, size: int, small: bool) -> None:
        insort(self._free[small], (size, at))
        self._starts[at] = self._ends[at + size] = size

    def _take(self, at: int, small: bool) -> int:
        size = self._starts.pop(at)
        del self._ends[at + size], self._free[small][bisect_left(self._free[small], (size, at))]
        return size


class Usage(NamedTuple):
    """Peak bytes, bytes taken from the device, the index of the event of the peak, and the peak of each phase."""

    peak: int
    reserved: int
    at: int
    by_phase: dict[str, int]


class Events(NamedTuple):
    """What a run allocates and frees, as (key of a storage, ±1): before the first step, and in each step.

    persistent: storages that the first step allocates and later ones find, such as optimizer state.
    """

    setup: list[tuple[int, int]]
    step: list[tuple[int, int]]
    persistent: set[int]
    phases: list[str]  # of each storage


def replay(memory: Caching, sizes: list[int], events: Events, repeats: int) -> Usage:
    """The peak of the last of 1 + `repeats` equal steps after the setup."""
    blocks: dict[int, int] = {}

    def apply(key: int, change: int) -> None:
        if change > 0 and sizes[key]:
            blocks[key] = memory.malloc(sizes[key])
        elif change < 0 and key in blocks:
            memory.free(blocks.pop(key))

    for event in events.setup:
        apply(*event)
    at, by_phase = 0, dict[str, int]()
    for turn in range(1 + repeats):
        memory.peak, highest = memory.allocated, -1
        by_phase.clear()
        for index, (key, change) in enumerate(events.step):
            if turn and key in events.persistent:
                continue
            apply(key, change)
            if memory.allocated > highest:
                at, highest = index, memory.allocated
            if change > 0:
                phase = events.phases[key]
                by_phase[phase] = max(by_phase.get(phase, 0), memory.allocated)
        for key in {key for key, _ in events.step} - events.persistent:
            apply(key, -1)  # the next step releases what is still referenced
    return Usage(memory.peak, memory.reserved, at, by_phase)


def summed(sizes: Tensor, events: Events, repeats: int) -> Usage:
    """The same without gaps: sizes add up. So does the CPU's allocator, and CUDA's with expandable segments."""
    setup, step = (torch.tensor(e, dtype=torch.long).reshape(-1, 2) for e in (events.setup, events.step))
    there, (key, change) = int((setup[:, 1] * sizes[setup[:, 0]]).sum()), step.T
    grown, repeated = change * sizes[key], torch.ones(len(key), dtype=torch.bool)
    if repeats:  # later steps do not repeat what the first allocates or frees for good
        freed = {k for k, c in events.step if c < 0} - {k for k, c in events.step if c > 0}
        repeated = ~torch.isin(key, torch.tensor([*events.persistent, *freed], dtype=torch.long))
        there += int(grown[~repeated].sum())
    level = there + (grown * repeated).cumsum(0)
    highest = max(there, int(level.max())) if len(level) else there
    at = int((repeated & (level == highest)).nonzero()[0]) if highest > there else 0
    names = list(dict.fromkeys(events.phases))
    phase = torch.tensor([names.index(name) for name in events.phases], dtype=torch.long)[key]
    levels = {name: level[repeated & (change > 0) & (phase == i)] for i, name in enumerate(names)}
    return Usage(highest, highest, at, {name: int(x.max()) for name, x in levels.items() if len(x)})


def rounded(sizes: Tensor) -> Tensor:
    """As CUDA's allocator rounds them up."""
    return (sizes + ROUND - 1) // ROUND * ROUND
