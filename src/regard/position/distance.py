"""Scores by distance, which is j − i from query i to key j."""

from bisect import bisect_left
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Float, Int, Real
from torch import Tensor

from ..errors import ShapeError
from .words import t5_buckets


@dataclass(frozen=True, eq=False)
class ByDistance:
    """table_h[clip(j − i, ±R)] − slope_h · |j − i|: a bias on the scores that depends only on the distance.

    Entry R of the table (r = 2R + 1) is distance 0. Both parts are differentiable; either may be absent.
    """

    table: Float[Tensor, "h r"] | None = None
    slopes: Float[Tensor, " h"] | None = None

    def __post_init__(self):
        if self.table is None and self.slopes is None:
            raise ShapeError("ByDistance() is empty; pass a table (h, 2R + 1), slopes (h), or both")
        if self.table is not None and self.table.shape[-1] % 2 == 0:
            raise ShapeError(
                f"a table of {self.table.shape[-1]} distances has no center; use 2R + 1 distances, from −R to R"
            )
        if self.table is not None and self.slopes is not None and len(self.table) != len(self.slopes):
            raise ShapeError(
                f"the table has {len(self.table)} heads and the slopes have {len(self.slopes)}; use the same number"
            )

    @property
    def heads(self) -> int:
        return len(self.slopes) if self.slopes is not None else len(self.table)  # type: ignore[arg-type]

    @property
    def reach(self) -> int:
        """R, beyond which the bias of the table is constant; 0 without a table."""
        return 0 if self.table is None else self.table.shape[-1] // 2

    def at(self, distances: Int[Tensor, "*o"]) -> Float[Tensor, "h *o"]:
        """The bias at each distance j − i, in float32 at least: 16 bits hold neither a distance nor a long sum of
        gradients."""
        table, slopes = (None if x is None else at_least_float32(x) for x in (self.table, self.slopes))
        if table is None:
            return -_outer(slopes, distances.abs())  # type: ignore[arg-type]
        near = table[:, distances.clamp(-self.reach, self.reach) + self.reach]
        return near if slopes is None else near - _outer(slopes, distances.abs())

    def dense(
        self, q_positions: Int[Tensor, "*b n"], k_positions: Int[Tensor, " m"]
    ) -> Float[Tensor, "*b h n m"]:
        """The bias of every pair, n × m for each head."""
        return rearrange(self.at(offsets(q_positions, k_positions)), "h ... n m -> ... h n m")

    def along(self, low: int, high: int) -> Float[Tensor, "h x"]:
        """The bias at distances low … high. Its gradient is summed in one order; that of indexing is not."""
        parts, reach = [], self.reach
        if self.table is not None:
            near = self.table[:, max(low + reach, 0) : max(high + reach + 1, 0)]
            first = self.table[:, :1].expand(-1, max(min(high + 1, -reach) - low, 0))
            last = self.table[:, -1:].expand(-1, max(high - max(low - 1, reach), 0))
            parts.append(torch.cat([first, near, last], -1))
        if self.slopes is not None:
            slopes = at_least_float32(self.slopes)
            distances = torch.arange(low, high + 1, dtype=slopes.dtype, device=slopes.device).abs()
            parts.append(-einsum(slopes, distances, "h, x -> h x"))
        return reduce(add, parts)

    def along_backward(
        self, de: Float[Tensor, "h x"], low: int, high: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of table and slopes: those of far distances are summed into the ends of the table."""
        table, slopes, reach = None, None, self.reach
        if self.table is not None:
            table = torch.zeros_like(self.table, dtype=de.dtype)
            first, last = max(low, -reach), min(high, reach)
            if first <= last:
                table[:, first + reach : last + reach + 1] = de[:, first - low : last - low + 1]
            table[:, 0] += de[:, : max(min(high + 1, -reach) - low, 0)].sum(-1)
            table[:, -1] += de[:, max(reach + 1 - low, 0) :].sum(-1)
        if self.slopes is not None:
            slopes = -(de @ torch.arange(low, high + 1, dtype=de.dtype, device=de.device).abs())
        return table, slopes


def alibi_slopes(heads: int, device: torch.device | None = None) -> Float[Tensor, "{heads}"]:
    """2^(−8(t + 1)/p) for t = 0 … p − 1, p the largest power of two up to `heads`; the others lie half-way between.

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

    B is the number of buckets per direction; future keys (j > i) use the next B. The edges are computed in integers,
    so no result depends on the rounding of a logarithm.
    """
    declared = t5_buckets(buckets, max_distance, bidirectional)
    return t5_bucket_between(distances, declared, t5_edges(declared))


def t5_edges(declared: t5_buckets) -> tuple[int, ...]:
    """The smallest distance of each bucket of one direction but the first."""
    exact, log_steps = declared.exact, declared.one_way - declared.exact
    reachable = range(exact, declared.max_distance + 1)

    def edge(t: int) -> int:  # the smallest distance with (distance/e)^(B−e) ≥ (max_distance/e)^t
        past = declared.max_distance**t * exact**log_steps
        return reachable[bisect_left(reachable, past, key=lambda distance: distance**log_steps * exact**t)]

    return (*range(1, exact + 1), *(edge(t) for t in range(1, log_steps)))


def t5_bucket_between(
    distances: Int[Tensor, "*o"], declared: t5_buckets, edges: tuple[int, ...]
) -> Int[Tensor, "*o"]:
    """`t5_bucket` with its edges, which a compiler cannot compute."""
    size = distances.abs() if declared.bidirectional else (-distances).clamp(min=0)
    bucket = torch.bucketize(size, torch.tensor(edges, device=distances.device), right=True)
    return bucket + declared.one_way * (distances > 0) if declared.bidirectional else bucket


def quadratic_scores(
    center: Float[Tensor, "h c"], alpha: Float[Tensor, " h"], offsets: Real[Tensor, "*o c"]
) -> Float[Tensor, "h *o"]:
    """−α(‖δ‖² − 2 δ·Δ) = −α‖δ − Δ‖² + α‖Δ‖² at each offset δ = k − q; softmax drops the constant."""
    precise = torch.promote_types(center.dtype, torch.float32)  # bfloat16 has 8 bits, and 17² already needs 9
    delta, center = offsets.to(precise), center.to(precise)
    inner = sum(_outer(middle, along) for middle, along in zip(center.T, delta.unbind(-1)))
    return -_outer(alpha.to(precise), torch.ones_like(delta[..., 0])) * ((delta**2).sum(-1) - 2 * inner)


def offsets(q_positions: Real[Tensor, "*b n"], k_positions: Real[Tensor, " m"]) -> Real[Tensor, "*b n m"]:
    """j − i for every query and key."""
    return k_positions - rearrange(q_positions, "... n -> ... n 1")


def skew(logits: Float[Tensor, "*b n r"]) -> Float[Tensor, "*b n m"]:
    """out[i, j] = logits[i, j − i + n − 1], r = n + m − 1: from one entry per distance to one per key.

    One pad and one reshape: with one more column each row starts one entry later than the row above it.
    """
    n, r = logits.shape[-2:]
    flat = rearrange(F.pad(logits, (0, 1)), "... n r -> ... (n r)")
    rows = rearrange(flat[..., n - 1 : n - 1 + n * r], "... (n r) -> ... n r", n=n)
    return rows[..., : r - n + 1]


def at_least_float32(x: Float[Tensor, "*o"]) -> Float[Tensor, "*o"]:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _outer(per_head: Float[Tensor, " h"], each: Real[Tensor, "*o"]) -> Float[Tensor, "h *o"]:
    """The outer product, computed elementwise: autocast would round a matrix product."""
    return per_head.reshape(-1, *(1,) * each.ndim) * each
