"""The kernels of the CPU tiles: batched matrix products and what lies between them, on one piece of scores at a time;
and PyTorch's fused attention, which holds no scores.

    s = scale · q kᵀ + mask      weights = exp(s − lse)      ds = weights ∘ (do vᵀ − δ)

The keys of a piece are one part or several, and the columns of s are those of all parts side by side. The first part
has keys for each tile, (t, l, d); the others are shared by all tiles of a head, (1 or heads, l, d).

exp(x) is computed as 2^(x log₂ e): over −∞ MKL's exp takes eight times as long, exp2 no longer than elsewhere.

Fresh pages cost as much as the products that write to them, so memory is kept from call to call, within bounds.
"""

import ctypes
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from math import e, inf, log2, prod
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from ... import compat

LOG2E = log2(e)
MAX_VIEWS = 256  # shapes that a set of buffers remembers
MAX_POOLED = 16  # sets of buffers that wait for a call: more threads than that allocate their own
SAVED_WEIGHTS = 1 << 21, 1 << 24  # weights that may be saved for the backward pass: 8 to 64 MiB in float32
# Seconds per pair of heads of 64 in float32 on two cores, forward, and with backward (bench/auto_choice.py).
PAIR = 1.6e-9, 5.6e-9

# Memory: buffers that one call after another writes to, and what the C library keeps.


class Buffers:
    """Named memory for intermediate results. One call uses it at a time."""

    def __init__(self, like: Tensor):
        self.like = like.new_empty(0)
        self.memory: dict[str, Tensor] = {}
        self.views: dict[tuple, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """A tensor of this shape with any content, valid until the same name is requested again."""
        if (view := self.views.get((name, *shape))) is not None:
            return view
        with torch.inference_mode(False):  # an inference tensor could not be written to in training later
            return self._allocate(name, shape)

    def _allocate(self, name: str, shape: tuple[int, ...]) -> Tensor:
        count = prod(shape)
        if name not in self.memory or len(self.memory[name]) < count:
            self.memory[name] = self.like.new_empty(count)
            self.views = {key: view for key, view in self.views.items() if key[0] != name}
        if len(self.views) >= MAX_VIEWS:
            self.views.clear()
        self.views[name, *shape] = view = self.memory[name][:count].view(shape)
        return view


_pool: list[Buffers] = []  # not in use; pop and append are atomic, so no two threads get the same


def with_buffers(run: Callable[..., Any], q: Tensor, *arguments: Any) -> Any:
    """run(buffers, q, …) with buffers that no other call uses at the same time."""
    try:
        buffers = _pool.pop()
    except IndexError:
        keep_freed_memory()
        buffers = Buffers(q)
    if buffers.like.dtype != q.dtype:
        buffers = Buffers(q)
    try:
        return run(buffers, q, *arguments)
    finally:
        if len(_pool) < MAX_POOLED:
            _pool.append(buffers)


# As glibc numbers them, with bytes: blocks up to the first size come from its heap, and of the free memory at the end
# of the heap this much is kept. Otherwise it would go back to the system after each call, and the next call, whose
# weights and gradients are new tensors, would write to fresh pages.
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = (-3, 32 << 20), (-1, 128 << 20)


@cache
def keep_freed_memory() -> None:
    """Once in a process; where the C library is another one, nothing changes."""
    if sys.platform.startswith("linux"):
        with suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None)
            for name, size in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
                libc.mallopt(name, size)


def max_saved(numbers: int) -> int:
    """How many weights the backward pass may find saved. numbers: those that q, k, v and o have together."""
    return min(max(numbers, SAVED_WEIGHTS[0]), SAVED_WEIGHTS[1])


def pair_time(d_k: int, d_v: int, dtype: torch.dtype) -> float:
    """The time of a pair in heads of 64 in float32 is 1: products take longer in wider heads, exp does not."""
    return (0.23 + 0.77 * (d_k + d_v) / 128) * (2.1 if dtype == torch.float64 else 1.0)


# Products, and what lies between them.


def product(a: Tensor, b: Tensor, alpha: float, into: Tensor) -> Float[Tensor, "t r l"]:
    """into = alpha · a b; without a factor there is a faster operation."""
    if alpha == 1.0:
        return torch.bmm(a, b, out=into)
    return torch.baddbmm(into, a, b, beta=0, alpha=alpha, out=into)


def scores(
    rows: Float[Tensor, "t r d"],
    parts: list[Tensor],
    scale: float,
    into: Float[Tensor, "t r keys"],
    buffers: Buffers,
    mask: Float[Tensor, "c r l"] | None = None,
) -> Float[Tensor, "t r keys"]:
    """into = scale · rows partᵀ for all parts side by side. In the first part, mask[t mod c] is added to tile t."""
    if len(parts) == 1:
        if mask is None:
            return product(rows, parts[0].mT, scale, into)
        if mask.shape[0] == 1 or mask.shape[0] == rows.shape[0]:  # len() of a tensor takes longer
            return torch.baddbmm(mask, rows, parts[0].mT, alpha=scale, out=into)
    for part, columns in _with_columns(parts, into):
        if part is not parts[0] and len(part) == 1:
            flat = columns.flatten(0, 1)
            torch.addmm(flat, rows.flatten(0, 1), part[0].mT, beta=0, alpha=scale, out=flat)
            continue
        # A batched product writes to contiguous memory only, so the step that scales also puts it in its columns.
        contiguous = torch.bmm(rows, part.mT, out=buffers("part", *columns.shape))
        if part is parts[0] and mask is not None:
            cycles, to = (x.unflatten(0, (-1, len(mask))) for x in (contiguous, columns))
            torch.add(mask, cycles, alpha=scale, out=to)
        else:
            torch.mul(contiguous, scale, out=columns)
    return into


def exponentials_(s: Float[Tensor, "t r l"]) -> tuple[Float[Tensor, "t r 1"], Float[Tensor, "t r 1"]]:
    """s becomes exp(s − largest); the largest score and the sum of each row. A row of −∞ has −∞ and 1."""
    largest = s.amax(-1, keepdim=True)
    exp_(s.sub_(largest.clamp_min(torch.finfo(s.dtype).min)))  # −∞ − (−∞) would be NaN
    return largest, s.sum(-1, keepdim=True).clamp_min_(1.0)  # the largest alone gives 1, an empty row 0


def exp_(x: Tensor) -> Tensor:
    return x.mul_(LOG2E).exp2_()


def mix(
    weights: Float[Tensor, "t r keys"],
    parts: list[Tensor],
    into: Float[Tensor, "t r d"],
    alpha: float = 1.0,
) -> Float[Tensor, "t r d"]:
    """into = alpha · Σ weights part over all parts; `into` is contiguous."""
    if len(parts) == 1:
        return product(weights, parts[0], alpha, into)
    for part, columns in _with_columns(parts, weights):
        if part is parts[0]:
            product(columns, part, alpha, into)
        elif len(part) == 1:
            into.flatten(0, 1).addmm_(columns.flatten(0, 1), part[0], alpha=alpha)
        else:
            into.baddbmm_(columns, part, alpha=alpha)
    return into


def _with_columns(parts: list[Tensor], of_all: Float[Tensor, "t r keys"]) -> list[tuple[Tensor, Tensor]]:
    """Each part with its columns."""
    return list(zip(parts, of_all.split([part.shape[1] for part in parts], -1)))


def join(
    o: Float[Tensor, "*b n d_v"],
    lse: Float[Tensor, "*b n"],
    part: Float[Tensor, "*b n d_v"],
    part_lse: Float[Tensor, "*b n"],
) -> None:
    """o and lse become those of both sets of keys, in place and without gradients."""
    share = torch.sigmoid(part_lse - lse).nan_to_num_(0.0)  # −∞ − (−∞): empty in both
    # Without einops: decoding joins parts of a few keys, where it would take as long as the sigmoid.
    o.lerp_(part, share.unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


# A bias by distance is a vector e of each head. With the rows of a tile in reverse order, the bias of a tile is
# e[first + a·r + c·l], a and c positive: a view of e (TileGroup.bias_of), and nothing is n × m. Its gradient is a sum
# along the anti-diagonals of the tile, which are the columns of another view.


def padded(shape: tuple[int, int, int], buffers: Buffers) -> Float[Tensor, "t r l"]:
    """Memory for ds in which each row is followed by as many zeros as there are rows."""
    t, r, l = shape
    buffer = buffers("padded", t, r, l + r)
    buffer[..., l:].zero_()
    return buffer[..., :l]


def add_along_diagonals(
    de: Float[Tensor, "heads x"], ds: Float[Tensor, "t r l"], diagonals: tuple[int, int, int]
) -> None:
    """de[first + a·r + c·l] += Σ_t ds[t, r, l]; the tiles are those of one head, or one of each head.

    Where a = c: rows are followed by zeros (`padded`), so read with a pitch of one less, row r is shifted by r.
    """
    (first, a, c), (t, r, l) = diagonals, ds.shape
    if a == c:
        pitch = l + r - 1
        shifted = ds.as_strided((t, r, pitch), (r * (l + r), pitch, 1))
        columns = torch.bmm(ds.new_ones(1, 1, r).expand(t, 1, r), shifted)[:, 0]  # a sum, but faster
        columns = columns.sum(0, keepdim=True) if len(de) == 1 else columns
        de[:, first : first + c * (pitch - 1) + 1 : c] += columns
        return
    ds = ds.sum(0, keepdim=True) if len(de) == 1 else ds
    chunk = c // a if c % a == 0 else 1  # this many rows reach no entry twice
    for low in range(0, r, chunk):
        rows, entries = ds[:, low : low + chunk], de[:, first + a * low :]
        entries.as_strided(rows.shape, (de.stride(0), a, c)).add_(rows)


# PyTorch's fused CPU attention with its log-sum-exp, which is private and reached through compat.py. Corrected here
# is what it does on torch 2.11 and 2.13: an empty row has lse 0, not −∞; a bool mask is silently wrong in the
# backward; no queries or no keys end the process; d_v has to equal d_k.


def fused_forward(
    q: Float[Tensor, "b h n d_k"],
    k: Float[Tensor, "b h_kv m d_k"],
    v: Float[Tensor, "b h_kv m d_v"],
    scale: float,
    mask: Float[Tensor, "*b n m"] | None = None,
    triangle: bool = False,
    empty: Bool[Tensor, " n"] | None = None,
) -> tuple[Float[Tensor, "b h n d_v"], Float[Tensor, "b h n"]]:
    """o and lse, the mask added to the scores: a bias, and −∞ for pairs that are not allowed.

    triangle: row r has keys 0 … r, of as many; the pairs beyond are skipped, not masked.
    empty: the rows in which the mask is −∞ everywhere; they get zeros and −∞.
    """
    d = max(q.shape[-1], v.shape[-1])
    if not (q.numel() and k.numel()):
        return q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_full(q.shape[:3], -inf)
    padded = (padded_to(x, d) for x in (q, k, v))
    o, lse = compat.flash_forward_direct(*padded, 0.0, triangle, attn_mask=mask, scale=scale)
    o = o if v.shape[-1] == d else o[..., : v.shape[-1]]
    return o, lse if empty is None else lse.masked_fill(empty, -inf)


def fused_backward(
    grad: Float[Tensor, "b h n d_v"],
    saved: tuple[Tensor, ...],
    scale: float,
    mask: Float[Tensor, "*b n m"] | None = None,
    triangle: bool = False,
) -> tuple[Float[Tensor, "b h n d_k"], Float[Tensor, "b h_kv m d_k"], Float[Tensor, "b h_kv m d_v"]]:
    """The gradients of q, k and v. of: q, k, v, o, lse. The last two may be those of a larger set of pairs, and lse
    is +∞ in a row without any key: there exp(score − lse) is 0."""
    q, k, v, o, lse = saved
    d_k, d_v = q.shape[-1], v.shape[-1]
    if not (q.numel() and k.numel()):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    padded = [padded_to(x, max(d_k, d_v)) for x in (grad, q, k, v, o)]
    dq, dk, dv = compat.flash_backward(*padded, lse, 0.0, triangle, attn_mask=mask, scale=scale)
    return (dq, dk, dv) if d_k == d_v else (dq[..., :d_k], dk[..., :d_k], dv[..., :d_v])


def padded_to(x: Tensor, d: int) -> Tensor:
    """x with zeros up to width d, and the width as its innermost stride."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x if x.shape[-1] == d else F.pad(x, (0, d - x.shape[-1]))
