"""What a position adds: the declared values, and the formulas they stand for.

acts        value                                    adds
"input"     sinusoidal, learned                      a vector to each input
"query_key" rope                                     a rotation of each query and key
"score"     alibi, t5_buckets, relative_table,       a number to each score, by the distance j − i
            shaw, quadratic                          from query i to key j

Positions count from 0. On a grid (H, W) a position is a cell number, row by row, or a pair (row, column).
Angles are products in float64: in float32 the angle of position 100,000 is off by up to 0.004.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from einops import rearrange
from jaxtyping import Float, Int, Real
from torch import Tensor

from . import value
from .errors import ShapeError, SpecError, nearest

# Where pair r stands among the columns: a sine and its cosine, or two columns that turn together.
_COLUMNS = {"interleaved": "(r two)", "halves": "(two r)"}


class Position:
    """Where a token stands, told to attention. `acts` says where it enters."""

    acts: ClassVar[Literal["input", "query_key", "score"]]

    def __repr__(self) -> str:
        return value.source(self)


@dataclass(frozen=True, repr=False)
class sinusoidal(Position):
    """Columns 2i and 2i + 1 are the sine and cosine of pos · base^(−2i/d). No parameters, no end.

    `order="halves"` puts all sines before all cosines. On a grid the first half of the width encodes the row,
    the second half the column.
    """

    base: int | float = 10000.0
    order: str = "interleaved"
    grid: tuple[int, int] | None = None
    acts = "input"

    def __post_init__(self):
        _check_base(self)
        _check_word("order", self.order, _COLUMNS)
        _check_grid(self, self.grid)

    def check_width(self, d_model: int) -> None:
        """d_model holds whole pairs, twice as many on a grid."""
        _check_pairs(d_model, self.grid, repr(self))


@dataclass(frozen=True, repr=False)
class learned(Position):
    """One trained vector for each of `table` positions, or for each cell of a `table` grid (H, W).

    Past the table there is no vector: `beyond="refuse"` is an error, `beyond="resample"` stretches the whole
    table to the length or grid in use, its end points kept.
    """

    table: int | tuple[int, int]
    beyond: str = "refuse"
    acts = "input"

    def __post_init__(self):
        _check_word("beyond", self.beyond, ("refuse", "resample"))
        if isinstance(self.table, int) and self.table < 1:
            raise SpecError(f"learned({self.table}) holds no position: a table needs at least 1")
        _check_grid(self, self.grid)

    @property
    def grid(self) -> tuple[int, int] | None:
        return None if isinstance(self.table, int) else self.table

    @property
    def entries(self) -> int:
        """How many vectors the table holds."""
        return self.table if isinstance(self.table, int) else math.prod(self.table)


@dataclass(frozen=True, repr=False)
class rope(Position):
    """Pair i of queries and keys turns by pos · base^(−2i/d), so q·k depends on p_q − p_k alone.

    `pairing` says which columns turn together: i and i + d/2 ("halves", Llama, GPT-NeoX) or 2i and 2i + 1
    ("interleaved", RoFormer, GPT-J). Only the first `fraction` of the columns turns. On a grid the first half
    of those turns by the row, the second half by the column.
    """

    base: int | float = 10000.0
    pairing: str = "halves"
    fraction: int | float = 1.0
    grid: tuple[int, int] | None = None
    acts = "query_key"

    def __post_init__(self):
        _check_base(self)
        _check_word("pairing", self.pairing, _COLUMNS)
        _check_grid(self, self.grid)
        if not 0 < self.fraction <= 1:
            raise SpecError(f"fraction={self.fraction} is no share of the columns: use one in (0, 1]")

    def width(self, d_k: int) -> int:
        """How many of d_k columns turn.

        >>> rope(fraction=0.25).width(64)
        16
        """
        width = round(self.fraction * d_k)
        if abs(width - self.fraction * d_k) > 1e-9 * d_k:
            raise SpecError(
                f"fraction={self.fraction} of d_k={d_k} is {self.fraction * d_k:g} columns, no whole number"
            )
        _check_pairs(width, self.grid, f"{self!r} on d_k={d_k}")
        return width


@dataclass(frozen=True, repr=False)
class alibi(Position):
    """−slope_h · |i − j|, the slopes falling geometrically over the heads. No parameters."""

    acts = "score"


@dataclass(frozen=True, repr=False)
class t5_buckets(Position):
    """A trained number for each head and bucket of distances: near ones exact, far ones on a log scale.

    `bidirectional=False` gives all future keys bucket 0; distances from `max_distance` on share one.
    """

    buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True
    acts = "score"

    def __post_init__(self):
        least = 4 if self.bidirectional else 2
        if self.buckets < least or (self.bidirectional and self.buckets % 2):
            need = "an even number from 4 up, half for each direction" if self.bidirectional else "at least 2"
            raise SpecError(f"buckets={self.buckets} with bidirectional={self.bidirectional}: use {need}")
        if self.max_distance <= self.exact:
            raise SpecError(
                f"max_distance={self.max_distance} lies within the {self.exact} distances that have a bucket"
                f" each: use more than {self.exact}, or fewer buckets"
            )

    @property
    def one_way(self) -> int:
        """Buckets for one direction."""
        return self.buckets // 2 if self.bidirectional else self.buckets

    @property
    def exact(self) -> int:
        """Distances 0 … exact − 1 have a bucket of their own."""
        return self.one_way // 2


@dataclass(frozen=True, repr=False)
class relative_table(Position):
    """A trained number for each head and distance j − i clipped to ±reach: 2·reach + 1 a head.

    With `grid=(H, W)` instead: one for each pair of row and column distances, (2H − 1)(2W − 1) a head.
    """

    reach: int | None = None
    grid: tuple[int, int] | None = None
    acts = "score"

    def __post_init__(self):
        if (self.reach is None) == (self.grid is None):
            raise SpecError(f"{self!r}: give either a reach (a sequence) or a grid=(H, W) (an image)")
        if self.reach is not None:
            _check_reach(self, self.reach)
        _check_grid(self, self.grid)

    @property
    def entries(self) -> int:
        """Numbers a head."""
        if self.reach is not None:
            return 2 * self.reach + 1
        return math.prod(2 * side - 1 for side in self.grid or ())


@dataclass(frozen=True, repr=False)
class shaw(Position):
    """A trained vector a for each distance clipped to ±reach: the score is scale · q_i·(k_j + a_{j−i}).

    `values=True` adds a second set to the values: o_i = Σ_j weights_ij (v_j + a'_{j−i}). Heads share both.
    """

    reach: int
    values: bool = False
    acts = "score"

    def __post_init__(self):
        _check_reach(self, self.reach)


@dataclass(frozen=True, repr=False)
class quadratic(Position):
    """−α_h(‖δ‖² − 2 δ·Δ_h) with δ = k − q: a head that looks at offset Δ_h, the sharper the larger α_h.

    By softmax this is a Gaussian of variance 1/(2α) around q + Δ. 2-D with a grid, 1-D without.
    """

    grid: tuple[int, int] | None = None
    acts = "score"

    def __post_init__(self):
        _check_grid(self, self.grid)

    @property
    def axes(self) -> int:
        return 1 if self.grid is None else 2


KINDS = (sinusoidal, learned, rope, alibi, t5_buckets, relative_table, shaw, quadratic)


@dataclass(frozen=True, eq=False)
class ByDistance:
    """table_h[clip(j − i, ±R)] − slope_h · |j − i|: a bias of the scores by distance alone.

    Entry R of the table (r = 2R + 1) is distance 0. Both parts are differentiable; either may be absent.
    """

    table: Float[Tensor, "h r"] | None = None
    slopes: Float[Tensor, " h"] | None = None

    def __post_init__(self):
        if self.table is None and self.slopes is None:
            raise ShapeError("ByDistance() is empty: give a table (h, 2R + 1), slopes (h), or both")
        if self.table is not None and self.table.shape[-1] % 2 == 0:
            raise ShapeError(
                f"a table of {self.table.shape[-1]} distances has no middle: use 2R + 1 of them, from −R to R"
            )
        if self.table is not None and self.slopes is not None and len(self.table) != len(self.slopes):
            raise ShapeError(
                f"a table for {len(self.table)} heads and slopes for {len(self.slopes)} do not fit"
            )

    @property
    def heads(self) -> int:
        return len(self.slopes) if self.slopes is not None else len(self.table)  # type: ignore[arg-type]

    @property
    def reach(self) -> int:
        """R, from which on the table is constant; 0 without a table."""
        return 0 if self.table is None else self.table.shape[-1] // 2

    def at(self, distances: Int[Tensor, "*o"]) -> Float[Tensor, "h *o"]:
        """The bias at each distance j − i."""
        if self.table is None:
            return -_outer(self.slopes, distances.abs())  # type: ignore[arg-type]
        near = self.table[:, distances.clamp(-self.reach, self.reach) + self.reach]
        return near if self.slopes is None else near - _outer(self.slopes, distances.abs())

    def dense(
        self, q_positions: Int[Tensor, "*b n"], k_positions: Int[Tensor, " m"]
    ) -> Float[Tensor, "*b h n m"]:
        """The bias of every pair, n × m for each head."""
        return rearrange(self.at(offsets(q_positions, k_positions)), "h ... n m -> ... h n m")


def rates(d: int, base: int | float = 10000.0, device: torch.device | None = None) -> Float[Tensor, " r"]:
    """base^(−2i/d) for i = 0 … d/2 − 1: radians a position. Pair i has the wavelength 2π / rate."""
    return base ** (-torch.arange(0, d, 2, dtype=torch.float64, device=device) / d)


def cos_sin(positions: Real[Tensor, "*p"], d: int, base: int | float = 10000.0) -> Float[Tensor, "2 *p r"]:
    """cos and sin of pos · base^(−2i/d), in float64."""
    if torch.compiler.is_dynamo_compiling():
        return torch.ops.regard.cos_sin(positions, d, float(base))
    angles = positions.double()[..., None] * rates(d, base, positions.device)
    return torch.stack([angles.cos(), angles.sin()])


@torch.library.custom_op("regard::cos_sin", mutates_args=())
def _cos_sin(positions: Tensor, d: int, base: float) -> Tensor:
    # Opaque to the compiler, which else fuses these float64 functions into what uses them, anew for every head
    # and batch row. With `_join`, bfloat16 queries (8, 16, 4096, 128) on an H200: 0.20 ms compiled, 1.23 before.
    return cos_sin(positions, d, base)


@_cos_sin.register_fake
def _cos_sin_shape(positions: Tensor, d: int, base: float) -> Tensor:
    return positions.new_empty((2, *positions.shape, d // 2), dtype=torch.float64)


def sinusoid(
    positions: Real[Tensor, "*p"],
    d: int,
    base: int | float = 10000.0,
    order: str = "interleaved",
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "*p {d}"]:
    """sin and cos of pos · base^(−2i/d) in columns 2i and 2i + 1; positions may be fractional or negative.

    >>> sinusoid(torch.tensor([3]), 512)[0, :4]
    tensor([ 0.1411, -0.9900,  0.2451, -0.9695])
    """
    _check_pairs(d, None, f"a sinusoid of width {d}")
    cos, sin = cos_sin(positions, d, base)
    return _join(sin, cos, order).to(dtype or torch.get_default_dtype())


def sinusoid_grid(
    coordinates: Real[Tensor, "*p 2"],
    d: int,
    base: int | float = 10000.0,
    order: str = "interleaved",
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "*p {d}"]:
    """The sinusoid of the row, then that of the column, each d/2 wide."""
    _check_pairs(d, (1, 1), f"a sinusoid of width {d} on a grid")
    both = sinusoid(coordinates, d // 2, base, order, dtype)
    return rearrange(both, "... two half -> ... (two half)")


def rotate(
    x: Float[Tensor, "*b n d"],
    positions: Real[Tensor, "*p n"],
    base: int | float = 10000.0,
    pairing: str = "halves",
) -> Float[Tensor, "*b n d"]:
    """Turn pair i of x by θ = pos · base^(−2i/d): (a, b) → (a cos θ − b sin θ, a sin θ + b cos θ).

    Positions (b, n) give each batch row its own, broadcast over what stands between b and n in x (the heads).
    """
    d = x.shape[-1]
    _check_pairs(d, None, f"a rotation of {d} columns")
    precise = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos_sin(positions, d, base).to(precise)
    if cos.ndim > 2:
        between = (1,) * (x.ndim - cos.ndim)
        cos, sin = (each.reshape(len(each), *between, *each.shape[1:]) for each in (cos, sin))
    first, second = (
        each.to(precise) for each in rearrange(x, f"... {_COLUMNS[pairing]} -> two ... r", two=2)
    )
    return _join((first * cos - second * sin).to(x.dtype), (first * sin + second * cos).to(x.dtype), pairing)


def rotate_grid(
    x: Float[Tensor, "*b n d"],
    coordinates: Real[Tensor, "*p n 2"],
    base: int | float = 10000.0,
    pairing: str = "halves",
) -> Float[Tensor, "*b n d"]:
    """Turn the first half of the columns by the row and the second half by the column."""
    _check_pairs(x.shape[-1], (1, 1), f"a rotation of {x.shape[-1]} columns on a grid")
    halves = zip(x.chunk(2, dim=-1), coordinates.unbind(-1))
    return torch.cat([rotate(half, axis, base, pairing) for half, axis in halves], dim=-1)


def alibi_slopes(heads: int, device: torch.device | None = None) -> Float[Tensor, "{heads}"]:
    """2^(−8(t + 1)/p) for t = 0 … p − 1, p the power of two up to `heads`; the rest fall half-way between.

    >>> alibi_slopes(6)
    tensor([0.2500, 0.0625, 0.0156, 0.0039, 0.5000, 0.1250])
    """
    power = 1 << (heads.bit_length() - 1)
    t = torch.arange(heads, device=device)
    steps = torch.where(t < power, t + 1.0, t - power + 0.5)
    return torch.exp2(-8 * steps / power)


def t5_bucket(
    distances: Int[Tensor, "*o"], buckets: int = 32, max_distance: int = 128, bidirectional: bool = True
) -> Int[Tensor, "*o"]:
    """|j − i| below e = ⌊B/2⌋, then e + ⌊(B − e) log(|j − i|/e) / log(max_distance/e)⌋, at most B − 1.

    B is the number of buckets a direction; future keys (j > i) come B later. The edges are found in whole
    numbers, so the rounding of a logarithm decides nothing.
    """
    declared = t5_buckets(buckets, max_distance, bidirectional)
    exact, log_steps = declared.exact, declared.one_way - declared.exact
    reachable = range(exact, max_distance + 1)

    def edge(t: int) -> int:  # the smallest distance with (distance/e)^(B−e) ≥ (max_distance/e)^t
        past = max_distance**t * exact**log_steps
        return reachable[bisect_left(reachable, past, key=lambda distance: distance**log_steps * exact**t)]

    edges = [*range(1, exact + 1), *(edge(t) for t in range(1, log_steps))]
    size = distances.abs() if bidirectional else (-distances).clamp(min=0)
    bucket = torch.bucketize(size, torch.tensor(edges, device=distances.device), right=True)
    return bucket + declared.one_way * (distances > 0) if bidirectional else bucket


def quadratic_scores(
    centre: Float[Tensor, "h c"], alpha: Float[Tensor, " h"], offsets: Real[Tensor, "*o c"]
) -> Float[Tensor, "h *o"]:
    """−α(‖δ‖² − 2 δ·Δ) = −α‖δ − Δ‖² + α‖Δ‖² at each offset δ = k − q; softmax drops the constant."""
    precise = torch.promote_types(centre.dtype, torch.float32)  # a square of 17 already needs 9 bits
    delta, centre = offsets.to(precise), centre.to(precise)
    inner = sum(_outer(middle, along) for middle, along in zip(centre.T, delta.unbind(-1)))
    return -_outer(alpha.to(precise), torch.ones_like(delta[..., 0])) * ((delta**2).sum(-1) - 2 * inner)


def offsets(q_positions: Real[Tensor, "*b n"], k_positions: Real[Tensor, " m"]) -> Real[Tensor, "*b n m"]:
    """j − i for every query and key."""
    return k_positions - rearrange(q_positions, "... n -> ... n 1")


def coordinates(positions: Real[Tensor, "*p"], grid: tuple[int, int]) -> Real[Tensor, "*q 2"]:
    """(row, column) of each cell number (n); pairs (…, n, 2) pass as they are.

    >>> coordinates(torch.tensor([0, 3, 4]), (2, 3)).tolist()
    [[0, 0], [1, 0], [1, 1]]
    """
    if positions.ndim == 1 and not positions.is_floating_point():
        return torch.stack([positions // grid[1], positions % grid[1]], dim=-1)
    if positions.ndim > 1 and positions.shape[-1] == 2:
        return positions
    raise ShapeError(
        f"positions {tuple(positions.shape)} of {positions.dtype} on a grid of {grid[0]}×{grid[1]}:"
        " give whole cell numbers (n), or rows and columns (…, n, 2)"
    )


def resample(table: Float[Tensor, "t *d"], length: int) -> Float[Tensor, "{length} *d"]:
    """The table read at `length` even steps from its first row to its last, linear in between."""
    steps = torch.arange(length, device=table.device) * (len(table) - 1)
    gaps = max(length - 1, 1)
    below, part = steps // gaps, (steps % gaps).to(table.dtype) / gaps  # whole numbers keep both ends exact
    above = (below + 1).clamp(max=len(table) - 1)
    return torch.lerp(table[below], table[above], part.reshape(-1, *(1,) * (table.ndim - 1)))


def resample_grid(
    table: Float[Tensor, "t d"], old_grid: tuple[int, int], new_grid: tuple[int, int]
) -> Float[Tensor, "t2 d"]:
    """`resample` along the rows, then along the columns: the four corners stay.

    Vectors before the grid (a class token) are kept as they are.
    """
    extra = len(table) - math.prod(old_grid)
    if extra < 0:
        raise ShapeError(
            f"a table of {len(table)} does not hold the {math.prod(old_grid)} cells of a grid of"
            f" {old_grid[0]}×{old_grid[1]}"
        )
    cells = rearrange(table[extra:], "(row col) d -> row col d", row=old_grid[0])
    cells = rearrange(resample(cells, new_grid[0]), "row col d -> col row d")
    cells = rearrange(resample(cells, new_grid[1]), "col row d -> (row col) d")
    return torch.cat([table[:extra], cells])


def skew(logits: Float[Tensor, "*b n r"]) -> Float[Tensor, "*b n m"]:
    """out[i, j] = logits[i, j − i + n − 1], r = n + m − 1: from an entry a distance to one a key.

    One pad and one reshape: with a spare column each row starts one entry later than the row above it.
    """
    n, r = logits.shape[-2:]
    flat = rearrange(torch.nn.functional.pad(logits, (0, 1)), "... n r -> ... (n r)")
    rows = rearrange(flat[..., n - 1 : n - 1 + n * r], "... (n r) -> ... n r", n=n)
    return rows[..., : r - n + 1]


def _join(first: Float[Tensor, "*p r"], second: Float[Tensor, "*p r"], order: str) -> Float[Tensor, "*p d"]:
    """The pairs back in their columns. Stacked where they belong, they compile to one pass over the data."""
    stacked = torch.stack([first, second], dim=-1 if order == "interleaved" else -2)
    return rearrange(stacked, "... one other -> ... (one other)")


def _outer(per_head: Float[Tensor, " h"], each: Real[Tensor, "*o"]) -> Float[Tensor, "h *o"]:
    """The product of every head with every entry, without a matrix product that autocast would round."""
    return per_head.reshape(-1, *(1,) * each.ndim) * each


def _check_base(position: sinusoidal | rope) -> None:
    if not position.base > 1:
        raise SpecError(f"base={position.base} gives no falling rates: use a base above 1, as 10000")


def _check_word(field: str, word: str, known) -> None:
    if word not in known:
        raise SpecError(f"{field}={word!r} is unknown: {nearest(word, known)}")


def _check_grid(position: Position, grid: tuple[int, int] | None) -> None:
    if grid is not None and (len(grid) != 2 or min(grid) < 1):
        raise SpecError(f"{position!r}: a grid is (height, width), both at least 1")


def _check_reach(position: Position, reach: int) -> None:
    if reach < 0:
        raise SpecError(f"{position!r} reaches less than nowhere: reach needs to be >= 0")


def _check_pairs(width: int, grid: tuple[int, int] | None, what: str) -> None:
    unit = 2 if grid is None else 4
    if width < unit or width % unit:
        nearby = (
            f"{max(width // unit, 1) * unit} or {(width // unit + 1) * unit}" if width >= unit else f"{unit}"
        )
        reason = "columns come in pairs" if grid is None else "rows and columns each take pairs"
        raise SpecError(f"{what}: {reason}, and {width} is no multiple of {unit}; use {nearby}")
