"""From tensors to launches: what a pattern needs on a device is prepared once, then kept."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...errors import BackendError
from ...pattern import Pattern
from ...position import ByDistance
from .configs import Configs, default, padded
from .launches import backward_call, forward_call
from .prepared import layout
from .schedule import route
from .triton import bias_and_dropout as added
from .triton.bias_and_dropout import NOTHING, Added

__all__ = ["Task", "attend", "backward", "forward", "route", "task"]

WIDEST = 256
DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class Task:
    """What one call computes, apart from its tensors. One object for all calls alike: they are known by it."""

    pattern: Pattern
    start: int  # query r stands at start + step · r
    step: int
    scale: float
    configs: Configs
    reach: int | None = None  # of the table of a bias by distance; None: no table
    sloped: bool = False  # the bias has slopes
    dropout_p: float = 0.0

    @property
    def adds(self) -> bool:
        return self.reach is not None or self.sloped or self.dropout_p > 0


@lru_cache(maxsize=256)
def _task(
    d_k: int,
    d_v: int,
    dtype: torch.dtype,
    pattern: Pattern,
    place: tuple[int, int],
    scale: float,
    more: tuple[int | None, bool, float],
    configs: Configs | None,
) -> Task:
    (start, step), (reach, sloped, dropout_p) = place, more
    task = Task(pattern, start, step, scale, configs or default(d_k, d_v, dtype), reach, sloped, dropout_p)
    return replace(task, configs=task.configs.without_caps()) if task.adds and configs is None else task


def task(
    q: Float[Tensor, "b h n d_k"],
    v: Float[Tensor, "b h_kv m d_v"],
    pattern: Pattern,
    start: int,
    step: int,
    scale: float,
    given: Added = NOTHING,
    dropout_p: float = 0.0,
    configs: Configs | None = None,
) -> Task:
    """The task, with the stored configuration of these widths unless one is given."""
    more = None if given.table is None else given.table.shape[-1] // 2, given.slopes is not None, dropout_p
    return _task(q.shape[-1], v.shape[-1], q.dtype, pattern, (start, step), scale, more, configs)


@lru_cache(maxsize=64)
def _turned(task: Task) -> Task:
    """The same with the scale's sign changed: the running maximum is taken before scaling."""
    return replace(task, scale=-task.scale)


def forward(
    q: Float[Tensor, "b h n d_k"],
    k: Float[Tensor, "b h_kv m d_k"],
    v: Float[Tensor, "b h_kv m d_v"],
    task: Task,
    lengths: Int[Tensor, " b"] | None = None,
    given: Added = NOTHING,
) -> tuple[Float[Tensor, "b h n d_v"], Float[Tensor, "b h n"]]:
    """o and ln Σ exp(scores); zeros and −∞ for a query that may look nowhere."""
    if not q.numel() or not k.numel():
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
        return q.new_zeros((*q.shape[:3], v.shape[-1])), lse
    if task.scale < 0:
        return forward(-q, k, v, _turned(task), lengths, given)
    d_v = v.shape[-1]
    q, k, v = rows(q), rows(k), rows(v, _least(q))
    call = forward_call(task, layout(q), layout(k), layout(v), q.dtype, q.device, lengths is not None)
    with _on(q):
        o, lse = call(q, k, v, _limits(lengths, q), given.ready())
    return o if v.shape[-1] == d_v else o[..., :d_v], lse


def backward(
    q: Float[Tensor, "b h n d_k"],
    k: Float[Tensor, "b h_kv m d_k"],
    v: Float[Tensor, "b h_kv m d_v"],
    o: Float[Tensor, "b h n d_v"],
    lse: Float[Tensor, "b h n"],
    do: Float[Tensor, "b h n d_v"],
    dlse: Float[Tensor, "b h n"] | None,
    task: Task,
    lengths: Int[Tensor, " b"] | None = None,
    given: Added = NOTHING,
    of_bias: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of q, k, v and, if `of_bias`, of table and slopes, from those of both outputs."""
    if not q.numel() or not k.numel():
        zeros = (None if x is None else torch.zeros_like(x) for x in (q, k, v, given.table, given.slopes))
        return tuple(zeros)  # type: ignore[return-value]
    if task.scale < 0:
        grads = backward(-q, k, v, o, lse, do, dlse, _turned(task), lengths, given, of_bias)
        return -grads[0], *grads[1:]
    d_k, d_v, least = q.shape[-1], v.shape[-1], _least(q)
    q, k, v, o, do = rows(q), rows(k), rows(v, least), rows(o, least), rows(do, least)
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
    lie = layout(q), layout(k), layout(v), layout(o), layout(do)
    call = backward_call(task, lie, q.dtype, q.device, dlse is not None, lengths is not None, of_bias)
    with _on(q):
        dq, dk, dv, near, far = call(q, k, v, o, do, lse, dlse, _limits(lengths, q), given.ready())
        of_table, of_slopes = _of_bias(given, near, far) if of_bias else (None, None)
    if q.shape[-1] != d_k:
        dq, dk = dq[..., :d_k], dk[..., :d_k]
    return dq, dk, dv if v.shape[-1] == d_v else dv[..., :d_v], of_table, of_slopes


def _of_bias(
    given: Added, near: Float[Tensor, "h r"] | None, far: Float[Tensor, "h 3"] | None
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of table and slopes: what lies past the reach belongs to the table's ends."""
    if far is None:  # no pair at all
        none = tuple(None if x is None else torch.zeros_like(x) for x in (given.table, given.slopes))
        return none[0], none[1]
    if near is not None:
        near[:, 0] += far[:, 0]
        near[:, -1] += far[:, 1]
    of_table = None if near is None or given.table is None else near.to(given.table.dtype)
    return of_table, None if given.slopes is None else -far[:, 2].to(given.slopes.dtype)


def rows(x: Tensor, least: int = 1) -> Tensor:
    """Rows of adjacent numbers that begin and end at multiples of 16 bytes: what the kernels load in whole."""
    whole = 16 // x.element_size()
    if short := max(-x.shape[-1] % whole, least - x.shape[-1]):
        return F.pad(x, (0, short))
    a, b, c, last = x.stride()
    aligned = min(a, b, c) >= 0 and not (a % whole or b % whole or c % whole or x.storage_offset() % whole)
    return x if last == 1 and aligned else x.clone(memory_format=torch.contiguous_format)


def _least(q: Tensor) -> int:
    """How wide values must be beside these queries.

    Triton 3.6 reads past shared memory in the product of 128 rows of weights with values 16 wide, where keys are
    wider (seen by compute-sanitizer on an H200).
    """
    return 24 if padded(q.shape[-1]) > 16 else 1


def _on(q: Tensor) -> AbstractContextManager[Any]:
    """The device of q as the current one; nothing to do where it is."""
    if not q.is_cuda or q.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(q.device)


def _limits(lengths: Tensor | None, q: Tensor) -> Tensor | None:
    return None if lengths is None else lengths.to(q.device, torch.int32).contiguous()


class Attend(torch.autograd.Function):
    """(q, k, v, table, slopes) → (o, lse), both differentiable."""

    @staticmethod
    def forward(ctx, q, k, v, table, slopes, lengths, seed, task):
        o, lse = forward(q, k, v, task, lengths, Added(table, slopes, seed))
        ctx.save_for_backward(q, k, v, table, slopes, o, lse, lengths)
        ctx.task, ctx.seed = task, seed
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dlse):
        q, k, v, table, slopes, o, lse, lengths = ctx.saved_tensors
        if do is None and dlse is None:
            return (None,) * 8
        do = torch.zeros_like(o) if do is None else do
        of_bias = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
        given = Added(table, slopes, ctx.seed)
        grads = backward(q, k, v, o, lse, do, dlse, ctx.task, lengths, given, of_bias)
        return *grads, None, None, None


def attend(
    q: Float[Tensor, "b h n d_k"],
    k: Float[Tensor, "b h_kv m d_k"],
    v: Float[Tensor, "b h_kv m d_v"],
    pattern: Pattern,
    start: int,
    step: int = 1,
    *,
    scale: float | None = None,
    lengths: Int[Tensor, " b"] | None = None,
    bias: ByDistance | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    configs: Configs | None = None,
) -> tuple[Float[Tensor, "b h n d_v"], Float[Tensor, "b h n"]]:
    """softmax(scale · q kᵀ + bias) v over the pairs of the pattern, and ln Σ exp(scores): (o, lse).

    Query r stands at start + step · r. Keys at and past lengths[b] are hidden, whatever they hold. Dropout takes
    weights away after the softmax, by a seed that is drawn from PyTorch's generator unless it is given.
    """
    _check(q, k, v)
    drawn = int(added.seed()) if dropout_p and seed is None else seed or NOTHING.seed
    given = NOTHING if bias is None else Added(bias.table, bias.slopes)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    what = task(q, v, pattern, start, step, scale, given, dropout_p, configs)
    return Attend.apply(q, k, v, given.table, given.slopes, lengths, drawn, what)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    widest = max(q.shape[-1], v.shape[-1])
    if widest > WIDEST:
        raise BackendError(
            f"a head of width {widest} does not fit the Triton kernels, which hold up to {WIDEST}"
        )
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        raise BackendError(
            f"the Triton kernels take float32, float16 or bfloat16, one for all; "
            f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if not q.device == k.device == v.device:
        raise BackendError(f"q, k, v lie on {q.device}, {k.device}, {v.device}: move them to one device")
