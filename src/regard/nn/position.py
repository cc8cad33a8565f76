"""The modules that positions build. What a module is called with follows from where its position acts:

"input"      module(x, positions, length=None)            x plus a vector for each position
"query_key"  module(x, positions)                         queries or keys, rotated
"score"      module(q_positions, k_positions, q, scale)   a bias (…, h, n, m) for the scores

Positions are (n), or (b, n) where each row of the batch has its own; on a grid they are cell numbers (n) or
rows and columns (…, n, 2). A score module whose bias depends on the 1-D distance alone also gives it as
`by_distance()`, for which the engine needs no n × m tensor.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Float, Int, Real
from torch import Tensor, nn

from ..engine.call import eager, readable
from ..errors import ShapeError, SpecError
from ..position import (
    ByDistance,
    Position,
    alibi,
    alibi_slopes,
    coordinates,
    learned,
    offsets,
    quadratic,
    quadratic_scores,
    relative_table,
    resample,
    resample_grid,
    rope,
    rotate,
    rotate_grid,
    shaw,
    sinusoid,
    sinusoid_grid,
    sinusoidal,
    t5_bucket_between,
    t5_buckets,
    t5_edges,
)
from . import branch_end
from .cached_rotation import EXACT, rotate_along


def build(
    position: Position,
    d_model: int | None = None,
    heads: int | None = None,
    d_k: int | None = None,
    d_v: int | None = None,
) -> nn.Module:
    """The module of a position. Each kind uses the sizes it needs; a missing one is an error that names it."""

    def need(**sizes: int | None) -> tuple[int, ...]:
        if missing := [name for name, size in sizes.items() if size is None]:
            raise SpecError(f"{position!r} needs {' and '.join(missing)} to be built")
        return tuple(sizes.values())  # type: ignore[arg-type]

    match position:
        case sinusoidal():
            if d_model is not None:
                position.check_width(d_model)
            return Sinusoidal(position)
        case learned():
            kind = Learned if position.grid is None else LearnedGrid
            return kind(position, *need(d_model=d_model))
        case rope():
            return Rotary(position, *need(d_k=d_k))
        case alibi():
            return Alibi(position, *need(heads=heads))
        case t5_buckets():
            return T5Buckets(position, *need(heads=heads))
        case relative_table(grid=None):
            return RelativeTable(position, *need(heads=heads))
        case relative_table():
            return RelativeGrid(position, *need(heads=heads))
        case shaw(values=False):
            return Shaw(position, *need(d_k=d_k))
        case shaw():
            return Shaw(position, *need(d_k=d_k, d_v=d_v))
        case quadratic():
            return Quadratic(position, *need(heads=heads))
    raise SpecError(f"{position!r} cannot be built: it is none of regard.position.KINDS")


class Sinusoidal(nn.Module):
    """x + sinusoid(positions). No parameters."""

    def __init__(self, position: sinusoidal):
        super().__init__()
        self.position = position

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        positions: Real[Tensor, "..."],
        length: int | tuple[int, int] | None = None,
    ) -> Float[Tensor, "b n d"]:
        p = self.position
        if p.grid is None:
            return x + sinusoid(positions, x.shape[-1], p.base, p.order, x.dtype)
        return x + sinusoid_grid(coordinates(positions, p.grid), x.shape[-1], p.base, p.order, x.dtype)

    def extra_repr(self) -> str:
        return repr(self.position)


def lookup(index: Int[Tensor, "*i"], table: Float[Tensor, "entries d"]) -> Float[Tensor, "*i d"]:
    """table[index], where an index outside of the table is an error, also a negative one."""
    if torch.compiler.is_dynamo_compiling():  # code of torch 2.11 would read it from the end of the table
        index = torch.where(index < 0, len(table), index)
    return F.embedding(index, table)


class Learned(nn.Module):
    """x + table[positions]. The table is initialized normal with std 0.02.

    `length` is the last position + 1, which the caller knows without a synchronization. Without it eager code
    reads the positions, which synchronizes with a GPU; compiled code leaves the check to the lookup. A table that
    may be resampled is interpolated to `length` entries where that is more than it has, so step-by-step decoding has
    to pass the final length from the start.
    """

    def __init__(self, position: learned, d_model: int):
        super().__init__()
        self.position = position
        self.table = nn.Parameter(torch.empty(position.entries, d_model).normal_(std=0.02))

    def forward(
        self, x: Float[Tensor, "b n d"], positions: Real[Tensor, "*p n"], length: int | None = None
    ) -> Float[Tensor, "b n d"]:
        _check_integers(self.position, positions)
        size = len(self.table)
        if length is None:
            length = _used(positions, unknown=size)
        if length <= size:
            return x + lookup(positions, self.table).to(x.dtype)
        if self.position.beyond == "resample":
            return x + lookup(positions, resample(self.table, length)).to(x.dtype)
        last = length - 1
        raise ShapeError(
            f"position {last} is past the learned table of {size}: shorten the input, declare"
            f" learned({1 << last.bit_length()}), or learned({size}, beyond='resample')"
        )

    def extra_repr(self) -> str:
        return repr(self.position)


class LearnedGrid(nn.Module):
    """x + table[row, column]. As `Learned`, with `length` the (height, width) that cell numbers count in.

    A table that may be resampled is interpolated to `length`: the same field at another resolution.
    """

    def __init__(self, position: learned, d_model: int):
        super().__init__()
        self.position = position
        self.grid: tuple[int, int] = position.table  # type: ignore[assignment]
        self.table = nn.Parameter(torch.empty(position.entries, d_model).normal_(std=0.02))

    def forward(
        self, x: Float[Tensor, "b n d"], positions: Real[Tensor, "..."], length: tuple[int, int] | None = None
    ) -> Float[Tensor, "b n d"]:
        _check_integers(self.position, positions)
        height, width = self.grid
        rows, columns = coordinates(positions, length or self.grid).unbind(-1)
        new = length or (max(height, _used(rows, height)), max(width, _used(columns, width)))
        table: Tensor = self.table
        if new != self.grid and self.position.beyond == "resample":
            table, width = resample_grid(table, self.grid, new), new[1]
        elif new[0] > height or new[1] > width:
            raise ShapeError(
                f"a grid of {new[0]}×{new[1]} is past the learned table of {height}×{width}: shrink the"
                f" image, declare learned({max(new[0], height), max(new[1], width)}),"
                f" or learned({self.grid}, beyond='resample')"
            )
        inside = (columns >= 0) & (
            columns < width
        )  # otherwise the lookup would read another row; −1 is an error
        return x + lookup(torch.where(inside, rows * width + columns, -1), table).to(x.dtype)

    def extra_repr(self) -> str:
        return repr(self.position)


def _check_integers(position: learned, positions: Real[Tensor, "..."]) -> None:
    if positions.is_floating_point():
        raise ShapeError(
            f"{position!r} has vectors for integer positions, not for {positions.dtype}: round them, or use"
            " sinusoidal()"
        )


def _used(positions: Real[Tensor, "..."], unknown: int) -> int:
    """Last position + 1, or `unknown` where reading it would break a compiled graph."""
    if torch.compiler.is_compiling() or positions.numel() == 0:
        return unknown
    first, last = torch.stack(torch.aminmax(positions)).tolist()
    if first < 0:
        raise ShapeError(f"position {first} is before the learned table: positions count from 0")
    return last + 1


class Rotary(nn.Module):
    """Pair i rotated by pos · base^(−2i/d). No parameters or buffers, so a cast of the module changes no angle."""

    def __init__(self, position: rope, d_k: int):
        super().__init__()
        self.position = position
        self.d_k, self.width = d_k, position.width(d_k)
        self.fuses = False  # as one pass over memory; a training step sets it, where the GPU can

    def forward(self, x: Float[Tensor, "*b n d"], positions: Real[Tensor, "..."]) -> Float[Tensor, "*b n d"]:
        p = self.position
        if p.grid is None:
            return self._rotate_part(x, lambda part: rotate(part, positions, p.base, p.pairing))
        cells = coordinates(positions, p.grid)
        return self._rotate_part(x, lambda part: rotate_grid(part, cells, p.base, p.pairing))

    def along(self, x: Float[Tensor, "*b n d"], start: int, step: int) -> Float[Tensor, "*b n d"]:
        """The same at positions start, start + step, …; on a CPU with cached angles, on a GPU fused if `fuses`."""
        p = self.position
        if self.fuses and p.grid is None and x.shape[-1] == self.d_k and _rotates_on_gpu(x):
            from . import rotation_kernel

            return rotation_kernel.rotate(x, self.width, start, step, p.base, p.pairing)
        if p.grid is not None or x.dtype not in EXACT or not readable(x):
            return self(x, start + step * torch.arange(x.shape[-2], device=x.device))
        return self._rotate_part(x, lambda part: rotate_along(part, start, step, p.base, p.pairing))

    def _rotate_part(
        self, x: Float[Tensor, "*b n d"], rotation: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "*b n d"]:
        """The first `width` columns rotated, the rest unchanged."""
        if x.shape[-1] != self.d_k:
            raise ShapeError(
                f"{self.position!r} was built for d_k={self.d_k}; the input has {x.shape[-1]} columns"
            )
        if self.width == self.d_k:
            return rotation(x)
        return torch.cat([rotation(x[..., : self.width]), x[..., self.width :]], dim=-1)

    def extra_repr(self) -> str:
        return repr(self.position)


def _rotates_on_gpu(x: Tensor) -> bool:
    """Whether the fused rotation takes x. Under a compiler it is left to the compiler."""
    fits = x.dim() == 4 and x.numel() > 0 and x.shape[0] * x.shape[1] <= 65535 and x.shape[-1] <= 512
    return fits and not torch.compiler.is_compiling() and branch_end.on_gpu(x)


class Score(nn.Module):
    """A bias of the scores; `by_distance()` is None where it is not a function of the 1-D distance.

    What follows from the declaration is computed where it is used, on the device of the call or of the parameters. A
    buffer would lose it where weights are loaded into a module that was built on the meta device.
    """

    def __init__(self, position: Position):
        super().__init__()
        self.position = position

    def by_distance(self, reach: int | None = None, device: torch.device | None = None) -> ByDistance | None:
        """reach: the largest distance in use. device: of the queries, for a bias without parameters."""
        return None

    def extra_repr(self) -> str:
        return repr(self.position)


class DistanceScore(Score):
    """A score module that is fully described by its `by_distance()`."""

    def forward(
        self,
        q_positions: Int[Tensor, "*b n"],
        k_positions: Int[Tensor, " m"],
        q: Float[Tensor, "..."] | None = None,
        scale: float = 1.0,
    ) -> Float[Tensor, "*b h n m"]:
        bias = self.by_distance(device=q_positions.device)
        assert bias is not None
        given = bias.slopes if bias.table is None else bias.table
        assert given is not None
        return bias.dense(q_positions, k_positions).to(given.dtype)


class Alibi(DistanceScore):
    """−slope_h · |j − i|. The slopes are computed at each call, so a cast of the module does not change them."""

    def __init__(self, position: alibi, heads: int):
        super().__init__(position)
        self.heads = heads

    def by_distance(self, reach: int | None = None, device: torch.device | None = None) -> ByDistance:
        return ByDistance(slopes=alibi_slopes(self.heads, device))


class T5Buckets(DistanceScore):
    """table_h[bucket(j − i)]. The table is initialized to zero, that is, attention without positions; an additive
    bias has a nonzero gradient there."""

    position: t5_buckets

    def __init__(self, position: t5_buckets, heads: int):
        super().__init__(position)
        self.table = nn.Parameter(torch.zeros(heads, position.buckets))
        self.edges = t5_edges(position)

    def by_distance(self, reach: int | None = None, device: torch.device | None = None) -> ByDistance:
        buckets = _cached_buckets if eager(self.table) else _buckets
        return ByDistance(table=self.table[:, buckets(self.position, self.edges, self.table.device)])


def _buckets(p: t5_buckets, edges: tuple[int, ...], device: torch.device) -> Int[Tensor, " distances"]:
    """The bucket of each distance from −max_distance to max_distance."""
    return t5_bucket_between(torch.arange(-p.max_distance, p.max_distance + 1, device=device), p, edges)


@lru_cache(maxsize=64)
def _cached_buckets(p: t5_buckets, edges: tuple[int, ...], device: torch.device) -> Int[Tensor, " distances"]:
    with torch.inference_mode(False):  # a cached inference tensor could not be used in training
        return _buckets(p, edges, device)


class RelativeTable(DistanceScore):
    """table_h[clip(j − i, ±reach)], initialized to zero as `T5Buckets` is."""

    def __init__(self, position: relative_table, heads: int):
        super().__init__(position)
        self.table = nn.Parameter(torch.zeros(heads, position.entries))

    def by_distance(self, reach: int | None = None, device: torch.device | None = None) -> ByDistance:
        return ByDistance(table=self.table)


class RelativeGrid(Score):
    """table_h[row distance, column distance], clipped to the grid; initialized to zero as `T5Buckets` is."""

    def __init__(self, position: relative_table, heads: int):
        super().__init__(position)
        self.grid: tuple[int, int] = position.grid  # type: ignore[assignment]
        self.table = nn.Parameter(torch.zeros(heads, position.entries))

    def forward(
        self,
        q_positions: Int[Tensor, "..."],
        k_positions: Int[Tensor, "..."],
        q: Float[Tensor, "..."] | None = None,
        scale: float = 1.0,
    ) -> Float[Tensor, "*b h n m"]:
        height, width = self.grid
        down, right = _grid_offsets(q_positions, k_positions, self.grid)
        row = down.clamp(1 - height, height - 1) + height - 1
        column = right.clamp(1 - width, width - 1) + width - 1
        bias = self.table[:, row * (2 * width - 1) + column]
        return rearrange(bias, "h ... n m -> ... h n m")


class Shaw(Score):
    """scale · q_i · a_{clip(j − i)}: one product with 2·reach + 1 vectors, then a gather by distance.

    `values(weights, …)` is Σ_j weights_ij a'_{clip(j − i)}: weights of equal distance are summed first, so
    no tensor is n × m × d. Both sets are initialized normal with std 0.02.
    """

    position: shaw

    def __init__(self, position: shaw, d_k: int, d_v: int = 0):
        super().__init__(position)
        entries = 2 * position.reach + 1
        self.keys = nn.Parameter(torch.empty(entries, d_k).normal_(std=0.02))
        if position.values:
            self.for_values = nn.Parameter(torch.empty(entries, d_v).normal_(std=0.02))

    def forward(
        self,
        q_positions: Int[Tensor, "*p n"],
        k_positions: Int[Tensor, " m"],
        q: Float[Tensor, "*b h n d_k"],
        scale: float = 1.0,
    ) -> Float[Tensor, "*b h n m"]:
        logits = scale * einsum(q, self.keys, "... n d, r d -> ... n r")
        return logits.gather(-1, self._entries(q_positions, k_positions, logits))

    def values(
        self,
        weights: Float[Tensor, "*b h n m"],
        q_positions: Int[Tensor, "*p n"],
        k_positions: Int[Tensor, " m"],
    ) -> Float[Tensor, "*b h n d_v"]:
        if not self.position.values:
            raise SpecError(f"{self.position!r} has no vectors for the values: declare shaw(…, values=True)")
        entries = self._entries(q_positions, k_positions, weights)
        by_entry = weights.new_zeros(*weights.shape[:-1], len(self.for_values)).scatter_add(
            -1, entries, weights
        )
        return einsum(by_entry, self.for_values, "... n r, r d -> ... n d")

    def _entries(
        self,
        q_positions: Int[Tensor, "*p n"],
        k_positions: Int[Tensor, " m"],
        like: Float[Tensor, "*b h n any"],
    ) -> Int[Tensor, "*b h n m"]:
        reach = self.position.reach
        entries = offsets(q_positions, k_positions).clamp(-reach, reach) + reach
        return rearrange(entries, "... n m -> ... 1 n m").expand(*like.shape[:-1], len(k_positions))


class Quadratic(Score):
    """−α_h(‖δ‖² − 2 δ·Δ_h), δ = k − q. Centers Δ are initialized normal with std 2, so that heads attend to
    different neighbors; sharpness α is initialized to 1."""

    position: quadratic

    def __init__(self, position: quadratic, heads: int):
        super().__init__(position)
        self.center = nn.Parameter(torch.empty(heads, position.axes).normal_(std=2.0))
        self.alpha = nn.Parameter(torch.ones(heads))

    def forward(
        self,
        q_positions: Real[Tensor, "..."],
        k_positions: Real[Tensor, "..."],
        q: Float[Tensor, "..."] | None = None,
        scale: float = 1.0,
    ) -> Float[Tensor, "*b h n m"]:
        if self.position.grid is None:
            distances = [offsets(q_positions, k_positions)]
        else:
            distances = _grid_offsets(q_positions, k_positions, self.position.grid)
        scores = quadratic_scores(self.center, self.alpha, torch.stack(distances, dim=-1))
        return rearrange(scores, "h ... n m -> ... h n m")

    def by_distance(self, reach: int | None = None, device: torch.device | None = None) -> ByDistance | None:
        """On a line: the scores of the 2·reach + 1 distances."""
        if self.position.grid is not None or reach is None:
            return None
        distances = torch.arange(-reach, reach + 1, device=self.center.device)
        return ByDistance(table=quadratic_scores(self.center, self.alpha, distances[:, None]))


def _grid_offsets(
    q_positions: Real[Tensor, "..."], k_positions: Real[Tensor, "..."], grid: tuple[int, int]
) -> list[Real[Tensor, "*b n m"]]:
    """k − q along the rows and along the columns."""
    q_axes, k_axes = coordinates(q_positions, grid), coordinates(k_positions, grid)
    return [offsets(i, j) for i, j in zip(q_axes.unbind(-1), k_axes.unbind(-1))]
