"""What an allocator makes of a sequence of allocations: its peak, and the memory that it takes from the device.

The CPU's allocator hands out what was asked for: sizes add up. PyTorch's caching allocator for CUDA rounds up to 512
bytes, takes segments of at least 2 MiB from the device, splits and merges blocks in them, and does not split off a
remainder of 1 MiB or less of a large block: so allocated memory exceeds what was requested, and depends on the order.
"""

from bisect import bisect_left, insort
from typing import Any, NamedTuple

import torch
from torch import Tensor

SMALL, SMALL_SEGMENT = 1 << 20, 2 << 20  # blocks up to 1 MiB come from segments of 2 MiB
LARGE, LARGE_SEGMENT = 10 << 20, 20 << 20  # blocks below 10 MiB come from segments of 20 MiB
ROUND = 512
SEGMENT_ROUND = 2 << 20
GIB = 1 << 30


def readable(size: int | float) -> str:
    """Bytes in the largest unit of which there is at least one.

    >>> readable(3 << 29), readable(1536), readable(10)
    ('1.50 GiB', '1.50 KiB', '10 bytes')
    """
    for unit, name in ((1 << 40, "TiB"), (GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size:,} bytes"


class OutOfMemory(Exception):
    """A segment does not fit the given limit, even after the free ones are returned."""


class Block:
    """A piece of a segment."""

    __slots__ = ("at", "free", "next", "previous", "size", "small")

    def __init__(self, at: int, size: int, small: bool):
        self.at, self.size, self.small = at, size, small
        self.free = True
        self.previous: Block | None = None
        self.next: Block | None = None


class Caching:
    """PyTorch's caching allocator for CUDA, on one stream; `limit`: bytes that it may take from the device."""

    def __init__(self, limit: int | None = None):
        self.limit = limit
        self.allocated = self.peak = self.taken = self.reserved = 0
        self._address = 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}  # by size, then address

    def malloc(self, size: int) -> Block:
        size = max(ROUND, -(-size // ROUND) * ROUND)
        small = size <= SMALL
        pool = self._free[small]
        at = bisect_left(pool, (size, -1))
        block = pool.pop(at)[2] if at < len(pool) else self._segment(size, small)
        remainder = block.size - size
        if remainder >= ROUND if small else remainder > SMALL:
            rest = Block(block.at + size, remainder, small)
            rest.previous, rest.next = block, block.next
            if block.next is not None:
                block.next.previous = rest
            block.next, block.size = rest, size
            self._put(rest)
        block.free = False
        self.allocated += block.size
        self.peak = max(self.peak, self.allocated)
        return block

    def _segment(self, size: int, small: bool) -> Block:
        if small:
            bytes_taken = SMALL_SEGMENT
        elif size < LARGE:
            bytes_taken = LARGE_SEGMENT
        else:
            bytes_taken = -(-size // SEGMENT_ROUND) * SEGMENT_ROUND
        if self.limit is not None and self.taken + bytes_taken > self.limit:
            self._return_free_segments()
            if self.taken + bytes_taken > self.limit:
                raise OutOfMemory
        self.taken += bytes_taken
        self.reserved = max(self.reserved, self.taken)
        at, self._address = self._address, self._address + bytes_taken + SEGMENT_ROUND
        return Block(at, bytes_taken, small)

    def _return_free_segments(self) -> None:
        for small, pool in self._free.items():
            unused = [e for e in pool if e[2].previous is None and e[2].next is None]
            self.taken -= sum(e[0] for e in unused)
            whole = {id(e[2]) for e in unused}
            self._free[small] = [e for e in pool if id(e[2]) not in whole]

    def _put(self, block: Block) -> None:
        block.free = True
        insort(self._free[block.small], (block.size, block.at, block))

    def _take(self, block: Block) -> None:
        pool = self._free[block.small]
        del pool[bisect_left(pool, (block.size, block.at))]

    def free(self, block: Block) -> None:
        self.allocated -= block.size
        for other in (block.previous, block.next):
            if other is not None and other.free:
                self._take(other)
                first, second = (other, block) if other is block.previous else (block, other)
                first.size += second.size
                first.next = second.next
                if second.next is not None:
                    second.next.previous = first
                block = first
        self._put(block)


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
    blocks: dict[int, Any] = {}

    def apply(event: tuple[int, int]) -> None:
        key, change = event
        if change > 0:
            if sizes[key]:
                blocks[key] = memory.malloc(sizes[key])
        elif key in blocks:
            memory.free(blocks.pop(key))

    for event in events.setup:
        apply(event)
    at = highest = 0
    by_phase: dict[str, int] = {}
    for turn in range(1 + repeats):
        memory.peak, highest = memory.allocated, -1
        by_phase.clear()
        for index, event in enumerate(events.step):
            if turn and event[0] in events.persistent:
                continue
            apply(event)
            if memory.allocated > highest:
                at, highest = index, memory.allocated
            if event[1] > 0:
                phase = events.phases[event[0]]
                by_phase[phase] = max(by_phase.get(phase, 0), memory.allocated)
        for key in {key for key, _ in events.step} - events.persistent:
            if key in blocks:  # what is still referred to goes with the next step
                memory.free(blocks.pop(key))
    return Usage(memory.peak, memory.reserved, at, by_phase)


def summed(sizes: Tensor, events: Events, repeats: int) -> Usage:
    """The same without gaps: sizes add up. So does the CPU's allocator, and CUDA's with expandable segments."""
    key, change = torch.tensor(events.step, dtype=torch.long).reshape(-1, 2).T
    there = _alive(sizes, events.setup)
    kept = torch.ones(len(key), dtype=torch.bool)
    if repeats:  # storages that the first step allocates for good, or frees once and for all
        first = {k for k, c in events.step if c < 0} - {k for k, c in events.step if c > 0}
        once = torch.zeros(len(sizes), dtype=torch.bool)
        once[torch.tensor([*events.persistent, *first], dtype=torch.long)] = True
        kept = ~once[key]
        there += int((change * sizes[key])[~kept].sum())
    level = there + (change * sizes[key] * kept).cumsum(0)
    if not len(level):
        return Usage(there, there, 0, {})
    highest = int(level.max())
    names = list(dict.fromkeys(events.phases))
    code = torch.tensor([names.index(phase) for phase in events.phases], dtype=torch.long)[key]
    grows = kept & (change > 0)
    by_phase = {name: level[grows & (code == i)] for i, name in enumerate(names)}
    at = int((kept & (level == highest)).nonzero()[0]) if highest > there else 0
    peaks = {name: int(x.max()) for name, x in by_phase.items() if len(x)}
    return Usage(max(highest, there), max(highest, there), at, peaks)


def rounded(sizes: Tensor) -> Tensor:
    """As CUDA's allocator rounds them up."""
    return (sizes + ROUND - 1) // ROUND * ROUND


def _alive(sizes: Tensor, events: list[tuple[int, int]]) -> int:
    key, change = torch.tensor(events, dtype=torch.long).reshape(-1, 2).T
    return int((change * sizes[key]).sum())
