"""Neighborhoods on grids of 1 to 3 dimensions (images, video), read in row-major order."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from .. import value
from ..errors import ShapeError, SpecError
from ..progression import Ints
from .algebra import Pattern, query_offset, register
from .classification import BLOCK, Classes

BORDERS = ("clipped", "shifted")
MAX_AXES = 3


@dataclass(frozen=True)
class Axis:
    """One axis of a neighborhood: `kernel` coordinates, `step` apart, around that of the query."""

    length: int
    kernel: int
    step: int
    shifted: bool
    causal: bool

    def interval(self, x: Any) -> tuple[Any, Any]:
        """The first and the last neighbor of coordinate x, counted in steps: both are ⌊coordinate / step⌋."""
        y, last = x // self.step, (self.length - 1 - x % self.step) // self.step
        if self.causal:
            return _larger(y - (self.kernel - 1), 0), y
        first = y - self.kernel // 2
        if self.shifted:
            first = _larger(_smaller(first, last - (self.kernel - 1)), 0)
        end = first + self.kernel - 1
        return _larger(first, 0), _smaller(end, last)

    def allows(self, x: Any, z: Any) -> Any:
        low, high = self.interval(x)
        y = z // self.step
        return (x % self.step == z % self.step) & (y >= low) & (y <= high)

    def ends(self, by_keys: bool) -> tuple[Ints, Ints]:
        """The first and the last neighbor of each coordinate; by_keys: of those that it is a neighbor of."""
        x = np.arange(self.length)
        low, high = (y * self.step + x % self.step for y in self.interval(x))
        if not by_keys:
            return low, high
        first, last = np.zeros_like(x), np.zeros_like(x)
        for residue in range(min(self.step, self.length)):
            of = x[residue :: self.step]  # along which both ends only grow
            first[of] = of[np.searchsorted(high[of], of)]
            last[of] = of[np.searchsorted(low[of], of, side="right") - 1]
        return first, last

    def counts(self) -> Ints:
        """How many neighbors each coordinate has."""
        low, high = self.interval(np.arange(self.length))
        return high - low + 1


def _larger(a: Any, b: int) -> Any:
    return max(a, b) if isinstance(a, int) else a.clip(min=b)


def _smaller(a: Any, b: Any) -> Any:
    if isinstance(a, int):
        return min(a, b)
    return np.minimum(a, b) if isinstance(a, np.ndarray) else torch.minimum(a, b)


@dataclass(frozen=True, repr=False)
class neighborhood(Pattern):
    """Each position of a grid attends to those around it: `kernel` along each axis, `step` apart (dilation).

    border: at an edge the neighborhood is "clipped", so that it has fewer keys, or "shifted" inwards, so that it has
    as many as elsewhere. Along a causal axis it is the position itself and those before it.

    >>> print(neighborhood((2, 3), (1, 3)).draw(6))
    ■ ■ · · · ·
    ■ ■ ■ · · ·
    · ■ ■ · · ·
    · · · ■ ■ ·
    · · · ■ ■ ■
    · · · · ■ ■
    """

    grid: tuple[int, ...]
    kernel: tuple[int, ...]
    step: tuple[int, ...]
    border: str
    causal: tuple[bool, ...]

    has_data = True  # no relation of i − j describes it: backends read its mask, or its own tiles
    reads_query = True
    reads_key = True
    shift_period = 0
    device = None

    def __init__(
        self,
        grid: int | Sequence[int],
        kernel: int | Sequence[int],
        step: int | Sequence[int] = 1,
        border: str = "clipped",
        causal: bool | Sequence[bool] = False,
    ):
        sizes = tuple(grid) if isinstance(grid, Sequence) else (grid,)
        if not 1 <= len(sizes) <= MAX_AXES:
            raise SpecError(f"neighborhood: a grid of {len(sizes)} axes; 1 to {MAX_AXES} are supported")
        given = {"grid": sizes, "border": border}
        for name, x in (("kernel", kernel), ("step", step), ("causal", causal)):
            each = tuple(x) if isinstance(x, Sequence) else (x,) * len(sizes)
            if len(each) != len(sizes):
                raise SpecError(
                    f"neighborhood: {name}={x!r} for a grid of {len(sizes)} axes; give one for each"
                )
            given[name] = each
        for name, field in given.items():
            object.__setattr__(self, name, field)
        self._check()
        object.__setattr__(self, "text", value.to_json(self))

    def _check(self) -> None:
        for name in ("grid", "kernel", "step"):
            for x in getattr(self, name):
                if type(x) is not int or x < 1:
                    raise SpecError(f"neighborhood: {name} has {x!r}; whole numbers >= 1 are needed")
        for x in self.causal:
            if type(x) is not bool:
                raise SpecError(f"neighborhood: causal has {x!r}; True or False is needed")
        if self.border not in BORDERS:
            raise SpecError(f"neighborhood: border={self.border!r}; use 'clipped' or 'shifted'")
        for axis, (length, kernel, step) in enumerate(zip(self.grid, self.kernel, self.step)):
            if self.border == "shifted" and kernel * step > length:
                raise SpecError(
                    f"neighborhood: a kernel of {kernel} with step {step} does not fit axis {axis} of {length}, "
                    "so it cannot be shifted inwards; use border='clipped'"
                )

    @property
    def axes(self) -> tuple[Axis, ...]:
        shifted = self.border == "shifted"
        each = zip(self.grid, self.kernel, self.step, self.causal)
        return tuple(Axis(length, kernel, step, shifted, causal) for length, kernel, step, causal in each)

    @property
    def size(self) -> int:
        return prod(self.grid)

    def coordinates(self, i: Any) -> list[Any]:
        """Of each axis, the coordinate of position i."""
        found = []
        for length in reversed(self.grid):
            found.append(i % length)
            i = i // length
        return found[::-1]

    def allows(self, i, j):
        inside = (i >= 0) & (i < self.size) & (j < self.size)
        if isinstance(i, int) and not inside:
            return False
        for axis, x, z in zip(self.axes, self.coordinates(i), self.coordinates(j)):
            inside = inside & axis.allows(x, z)
        return inside

    def row_mask(self, inside):
        return lambda b, i, j: self.allows(i, j)

    @property
    def fields(self) -> list[int]:
        """Of each axis, the bits that a coordinate takes in `condition`."""
        return [(axis.length + 2 * axis.kernel).bit_length() + 1 for axis in self.axes]

    def condition(self) -> str:
        """`allows` as source that Triton reads, of positions i and j in the grid.

        The coordinates of a position are fields of one number, each with a bit in front that stays 1 in a difference
        that is not negative: few operations compare all axes of a pair.
        """
        query, key, same, apart, shift = [], [], [], self.size, sum(self.fields)
        guards = lower = upper = 0  # the bits in front; with them, how far an interval reaches to either side
        first, last = (
            [],
            [],
        )  # at an edge of a shifted axis: all of the first or the last `kernel` coordinates
        for axis, bits in zip(self.axes, self.fields):
            apart, shift, step = apart // axis.length, shift - bits, axis.step
            x, z = (_coordinate(name, apart, axis.length, apart * axis.length < self.size) for name in "ij")
            left = axis.kernel - 1 if axis.causal else axis.kernel // 2
            query.append(f"({x if step == 1 else f'{x} // {step}'} << {shift})")
            key.append(f"({z if step == 1 else f'{z} // {step}'} << {shift})")
            same += [f"({x} % {step} == {z} % {step})"] if step > 1 else []
            guard = 1 << (shift + bits - 1)
            guards, lower, upper = guards + guard, lower + guard + (left << shift), upper + guard
            upper += axis.kernel - 1 - left << shift
            shifted = axis.shifted and not axis.causal
            end = f"({axis.length - 1} - {z} % {step}) // {step}" if step > 1 else f"{axis.length - 1}"
            begin = f"({end} + {1 - axis.kernel})" if shifted else f"{axis.length}"
            first.append(f"{guard} - ({begin} << {shift})")
            last.append(f"{guard + ((axis.kernel if shifted else 0) - 1 << shift)}")
        at = f"({' + '.join(key)})"
        near = f"({at} - ({' + '.join(query)}))"
        low, high = f"({near} + {lower})", f"({upper} - {near})"
        if any(axis.shifted and not axis.causal for axis in self.axes):
            low = f"({low} | ({at} + {' + '.join(first)}))"
            high = f"({high} | ({' + '.join(last)} - {at}))"
        return f"({' & '.join([f'(({low} & {high} & {guards}) == {guards})', *same])})"

    def tiles(self, rows: int, by_keys: bool) -> tuple[Ints, Ints, Ints]:
        """Runs of `rows` queries, and the keys of each as runs along the last axis: tiles (first, step, count), where
        the runs of each begin, runs (first, step, count, 0). by_keys: runs of keys, and the queries of each."""
        meet, width = np.ones((1, 1), dtype=bool), self.grid[-1]  # which lines of the grid meet
        for axis in self.axes[:-1]:
            x = np.arange(axis.length)
            meet = np.kron(meet, axis.allows(x[:, None], x))
        meet, (low, high) = meet.T if by_keys else meet, self.axes[-1].ends(by_keys)
        firsts, runs = range(0, self.size, rows), []
        for first in firsts:
            begin, end = np.full(len(meet), width), np.full(len(meet), -1)
            for line in range(first // width, (min(first + rows, self.size) - 1) // width + 1):
                part = slice(max(first - line * width, 0), min(first + rows - line * width, width))
                begin[meet[line]] = np.minimum(begin[meet[line]], low[part].min())
                end[meet[line]] = np.maximum(end[meet[line]], high[part].max())
            some = np.flatnonzero(end >= 0)
            count = (end - begin + 1)[some]
            runs.append(np.column_stack([some * width + begin[some], count**0, count, 0 * count]))
        tiles = np.array([(first, 1, min(rows, self.size - first)) for first in firsts])
        return tiles, np.cumsum([0, *map(len, runs)]), np.concatenate(runs)

    def by_blocks(self, count: int) -> Int[Tensor, " size"]:
        """All positions, block by block of the grid, of about `count` positions each."""
        at = torch.arange(self.size, device="cpu")
        side = round(count ** (1 / len(self.grid)))
        block, inner = torch.zeros_like(at), torch.zeros_like(at)
        for length, x in zip(self.grid, self.coordinates(at)):
            block, inner = block * -(-length // side) + x // side, inner * side + x % side
        return (block * side ** len(self.grid) + inner).argsort()

    def fits(self, m: int, last: int = -1) -> None:
        if m != self.size:
            grid = " × ".join(map(str, self.grid))
            raise ShapeError(f"{self!r} over {m} keys: a grid of {grid} has {self.size} positions")

    def row_counts(self, n, m=None, at=None):
        m = n if m is None else m
        self.fits(m)
        start, step = query_offset(self, n, m, at)
        i = start + step * np.arange(n, dtype=np.int64)
        counts = ((i >= 0) & (i < self.size)).astype(np.int64)
        for axis, x in zip(self.axes, self.coordinates(i)):
            counts = counts * axis.counts()[x]
        return counts

    def count(self, n, m=None, at=None):
        return int(self.row_counts(n, m, at).sum())

    def classify(self, grid):
        """By the pairs in each block, counted line by line: the neighbors along the last axis are a progression."""
        i = grid.positions
        inside = (i >= 0) & (i < self.size)
        at = self.coordinates(i.clamp(0, self.size - 1))
        ends = [(*axis.interval(x), x % axis.step) for axis, x in zip(self.axes, at)]
        row = torch.arange(i.shape[1], device=i.device) // BLOCK
        across = -(-self.size // BLOCK)
        pairs = torch.zeros(len(i), int(row[-1]) + 1, across, dtype=torch.int64, device=i.device)
        batch, last = torch.arange(len(i), device=i.device)[:, None], self.axes[-1]
        for nth in product(*(range(axis.kernel) for axis in self.axes[:-1])):
            line, there = torch.zeros_like(i), inside
            for axis, (low, high, residue), t in zip(self.axes, ends, nth):
                there = there & (low + t <= high)
                line = line * axis.length + (low + t) * axis.step + residue
            low, high, residue = ends[-1]
            first, end = (line * last.length + x * last.step + residue for x in (low, high))
            for further in range((last.kernel - 1) * last.step // BLOCK + 2):
                block = first // BLOCK + further
                begin, stop = (block * BLOCK).maximum(first), (block * BLOCK + BLOCK - 1).minimum(end)
                count = (stop - first) // last.step - (begin - first + last.step - 1) // last.step + 1
                count = torch.where(there & (begin <= stop), count, 0)
                where = (batch, row.expand_as(i), block.clamp(max=across - 1))
                pairs.index_put_(where, count, accumulate=True)
        return Classes(pairs == BLOCK**2, pairs == 0)

    def __repr__(self):
        options = [] if set(self.step) == {1} else [f"step={_short(self.step)}"]
        options += [] if self.border == "clipped" else [f"border={self.border!r}"]
        options += [f"causal={_short(self.causal)}"] if any(self.causal) else []
        return f"neighborhood({', '.join([repr(self.grid), repr(self.kernel), *options])})"


def _coordinate(name: str, apart: int, length: int, inner: bool) -> str:
    """Along an axis of which neighbors are `apart` positions apart, as source; powers of two need no division."""
    text = (
        name
        if apart == 1
        else f"({name} >> {apart.bit_length() - 1})"
        if apart.bit_count() == 1
        else f"({name} // {apart})"
    )
    if not inner:
        return text
    return f"({text} & {length - 1})" if length.bit_count() == 1 else f"({text} % {length})"


def _short(each: tuple) -> Any:
    return each[0] if len(set(each)) == 1 else each


def grid_size(pattern: Pattern) -> int | None:
    """The only number of positions that a pattern with a neighborhood accepts; None: there is no grid in it.

    >>> from regard.pattern import causal
    >>> grid_size(causal() & neighborhood((2, 3), 3)), grid_size(causal())
    (6, None)
    """
    return next((word.size for word in pattern.leaves() if isinstance(word, neighborhood)), None)


register(neighborhood)
