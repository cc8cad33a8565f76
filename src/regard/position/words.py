"""The position encodings as declared values, checked when they are created."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from .. import value
from ..errors import SpecError, nearest

# The columns of pair r: a sine and its cosine, or two columns that are rotated together.
COLUMNS = {"interleaved": "(r two)", "halves": "(two r)"}


class Position:
    """A position encoding. `acts` says where it enters the model."""

    acts: ClassVar[Literal["input", "query_key", "score"]]

    def __repr__(self) -> str:
        return value.source(self)


@dataclass(frozen=True, repr=False)
class sinusoidal(Position):
    """Columns 2i and 2i + 1 are the sine and cosine of pos · base^(−2i/d). No parameters, no maximum length.

    `order="halves"` puts all sines before all cosines. On a grid the first half of the width encodes the row,
    the second half the column.
    """

    base: int | float = 10000.0
    order: str = "interleaved"
    grid: tuple[int, int] | None = None
    acts = "input"

    def __post_init__(self):
        _check_base(self)
        _check_word("order", self.order, COLUMNS)
        _check_grid(self, self.grid)

    def check_width(self, d_model: int) -> None:
        """Checks that d_model is a multiple of 2, on a grid of 4."""
        check_pairs(d_model, self.grid, repr(self))


@dataclass(frozen=True, repr=False)
class learned(Position):
    """One learned vector for each of `table` positions, or for each cell of a `table` grid (H, W).

    Positions beyond the table: `beyond="refuse"` is an error, `beyond="resample"` interpolates the table to the
    length or grid in use, keeping its end points.
    """

    table: int | tuple[int, int]
    beyond: str = "refuse"
    acts = "input"

    def __post_init__(self):
        _check_word("beyond", self.beyond, ("refuse", "resample"))
        if isinstance(self.table, int) and self.table < 1:
            raise SpecError(f"learned({self.table}) is an empty table; use at least 1 position")
        _check_grid(self, self.grid)

    @property
    def grid(self) -> tuple[int, int] | None:
        return None if isinstance(self.table, int) else self.table

    @property
    def entries(self) -> int:
        """The number of vectors in the table."""
        return self.table if isinstance(self.table, int) else math.prod(self.table)


@dataclass(frozen=True, repr=False)
class rope(Position):
    """Rotates pair i of queries and keys by pos · base^(−2i/d), so that q·k depends only on p_q − p_k.

    `pairing`: which columns form a pair: i and i + d/2 ("halves", Llama, GPT-NeoX) or 2i and 2i + 1 ("interleaved",
    RoFormer, GPT-J). Only the first `fraction` of the columns is rotated. On a grid the first half of those is
    rotated by the row, the second half by the column.
    """

    base: int | float = 10000.0
    pairing: str = "halves"
    fraction: int | float = 1.0
    grid: tuple[int, int] | None = None
    acts = "query_key"

    def __post_init__(self):
        _check_base(self)
        _check_word("pairing", self.pairing, COLUMNS)
        _check_grid(self, self.grid)
        if not 0 < self.fraction <= 1:
            raise SpecError(f"fraction={self.fraction} is not in (0, 1]")

    def width(self, d_k: int) -> int:
        """The number of rotated columns, of d_k.

        >>> rope(fraction=0.25).width(64)
        16
        """
        width = round(self.fraction * d_k)
        if abs(width - self.fraction * d_k) > 1e-9 * d_k:
            raise SpecError(
                f"fraction={self.fraction} of d_k={d_k} is {self.fraction * d_k:g} columns, which is not an integer"
            )
        check_pairs(width, self.grid, f"{self!r} on d_k={d_k}")
        return width


@dataclass(frozen=True, repr=False)
class alibi(Position):
    """−slope_h · |i − j|, with slopes that fall geometrically over the heads. No parameters."""

    acts = "score"


@dataclass(frozen=True, repr=False)
class t5_buckets(Position):
    """A learned bias for each head and bucket of distances: exact for near keys, on a log scale for far ones.

    `bidirectional=False` puts all future keys into bucket 0; distances of `max_distance` or more share a bucket.
    """

    buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True
    acts = "score"

    def __post_init__(self):
        minimum = 4 if self.bidirectional else 2
        if self.buckets < minimum or (self.bidirectional and self.buckets % 2):
            valid = (
                "an even number of at least 4, half for each direction"
                if self.bidirectional
                else "at least 2"
            )
            raise SpecError(f"buckets={self.buckets} with bidirectional={self.bidirectional}: use {valid}")
        if self.max_distance <= self.exact:
            raise SpecError(
                f"max_distance={self.max_distance} is not above the {self.exact} distances with a bucket each;"
                f" use more than {self.exact}, or fewer buckets"
            )

    @property
    def one_way(self) -> int:
        """The number of buckets for one direction."""
        return self.buckets // 2 if self.bidirectional else self.buckets

    @property
    def exact(self) -> int:
        """Distances 0 … exact − 1 have a bucket of their own."""
        return self.one_way // 2


@dataclass(frozen=True, repr=False)
class relative_table(Position):
    """A learned bias for each head and distance j − i clipped to ±reach: 2·reach + 1 per head.

    With `grid=(H, W)` instead: one for each pair of row and column distances, (2H − 1)(2W − 1) per head.
    """

    reach: int | None = None
    grid: tuple[int, int] | None = None
    acts = "score"

    def __post_init__(self):
        if (self.reach is None) == (self.grid is None):
            raise SpecError(f"{self!r}: set either reach (for a sequence) or grid=(H, W) (for an image)")
        if self.reach is not None:
            _check_reach(self, self.reach)
        _check_grid(self, self.grid)

    @property
    def entries(self) -> int:
        """The number of biases per head."""
        if self.reach is not None:
            return 2 * self.reach + 1
        return math.prod(2 * side - 1 for side in self.grid or ())


@dataclass(frozen=True, repr=False)
class shaw(Position):
    """A learned vector a for each distance clipped to ±reach: the score is scale · q_i·(k_j + a_{j−i}).

    `values=True` adds a second set to the values: o_i = Σ_j weights_ij (v_j + a'_{j−i}). Heads share both.
    """

    reach: int
    values: bool = False
    acts = "score"

    def __post_init__(self):
        _check_reach(self, self.reach)


@dataclass(frozen=True, repr=False)
class quadratic(Position):
    """−α_h(‖δ‖² − 2 δ·Δ_h) with δ = k − q: a head that attends to offset Δ_h, more sharply for larger α_h.

    After softmax this is a Gaussian of variance 1/(2α) around q + Δ. 2-D with a grid, 1-D without.
    """

    grid: tuple[int, int] | None = None
    acts = "score"

    def __post_init__(self):
        _check_grid(self, self.grid)

    @property
    def axes(self) -> int:
        return 1 if self.grid is None else 2


KINDS = (sinusoidal, learned, rope, alibi, t5_buckets, relative_table, shaw, quadratic)


def _check_base(position: sinusoidal | rope) -> None:
    if not position.base > 1:
        raise SpecError(f"base={position.base} is not above 1; the usual base is 10000")


def _check_word(field: str, word: str, known) -> None:
    if word not in known:
        raise SpecError(f"{field}={word!r} is unknown; {nearest(word, known)}")


def _check_grid(position: Position, grid: tuple[int, int] | None) -> None:
    if grid is not None and (len(grid) != 2 or min(grid) < 1):
        raise SpecError(f"{position!r}: grid must be (height, width), both at least 1")


def _check_reach(position: Position, reach: int) -> None:
    if reach < 0:
        raise SpecError(f"{position!r}: reach is negative; use 0 or more")


def check_pairs(width: int, grid: tuple[int, int] | None, what: str) -> None:
    unit = 2 if grid is None else 4
    if width < unit or width % unit:
        multiples = (
            f"{max(width // unit, 1) * unit} or {(width // unit + 1) * unit}" if width >= unit else f"{unit}"
        )
        reason = "columns form pairs" if grid is None else "rows and columns need pairs of their own"
        raise SpecError(f"{what}: {reason}, and {width} is not a multiple of {unit}; use {multiples}")
