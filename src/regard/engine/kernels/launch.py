"""From tensors to launches: what a pattern needs on a device is prepared once, then kept."""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ...errors import BackendError
from ...pattern import Pattern
from .calls import Layout, backward_call, forward_call, layout
from .configs import Configs, default
from .route import route

__all__ = ["Task", "attend", "backward", "forward", "route", "task"]

WIDEST = 256
DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Task:
    """What one call computes, apart from its tensors."""

    pattern: Pattern
    start: int  # query r stands at start + step · r
    step: int
    scale: float
    configs: Configs


@lru_cache(maxsize=256)
def _task(
    d_k: int, d_v: int, dtype: torch.dtype, pattern: Pattern, start: int, step: int, scale: float
) -> Task:
    return Task(pattern, start, step, scale, default(d_k, d_v, dtype))


def task(
    q: Float[Tensor, "b h n d_k"],
    v: Float[Tensor, "b h_kv m d_v"],
    pattern: Pattern,
    start: int,
    step: int,
    scale: float,
) -> Task:
    """The task with the stored configuration of these widths."""
    return _task(q.shape[-1], v.shape[-1], q.dtype, pattern, start, step, scale)


def forward(
    q: Float[Tensor, "b h n d_k"],
    k: Float[Tensor, "b h_kv m d_k"],
    v: Float[Tensor, "b h_kv m d_v"],
    task: Task,
    lengths: Int[Tensor, " b"] | None = None,
) -> tuple[Float[Tensor, "b h n d_v"], Float[Tensor, "b h n"]]:
    """o and ln Σ exp(scores); zeros and −∞ for a query that may look nowhere."""
    if not q.numel() or not k.numel():
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
        return q.new_zeros((*q.shape[:3], v.shape[-1])), lse
    if task.scale < 0:  # the running maximum is taken before scaling
        return forward(-q, k, v, replace(task, scale=-task.scale), lengths)
    d_v = v.shape[-1]
    q, k, v = _rows(q), _rows(k), _rows(v)
    call = forward_call(task, layout(q), layout(k), layout(v), q.dtype, q.device, lengths is not None)
    with torch.cuda.device(q.device if q.is_cuda else -1):
        o, lse = call(q, k, v, _limits(lengths, q))
    return o[..., :d_v], lse


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
) -> tuple[Float[Tensor, "b h n d_k"], Float[Tensor, "b h_kv m d_k"], Float[Tensor, "b h_kv m d_v"]]:
    """dq, dk, dv from what the forward pass gave and the gradients of both its outputs."""
    if not q.numel() or not k.numel():
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if task.scale < 0:
        dq, dk, dv = backward(-q, k, v, o, lse, do, dlse, replace(task, scale=-task.scale), lengths)
        return -dq, dk, dv
    d_k, d_v = q.shape[-1], v.shape[-1]
    q, k, v, o, do = _rows(q), _rows(k), _rows(v), _rows(o), _rows(do)
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
    given: tuple[Layout, ...] = tuple(map(layout, (q, k, v, o, do)))
    call = backward_call(task, given, q.dtype, q.device, dlse is not None, lengths is not None)
    with torch.cuda.device(q.device if q.is_cuda else -1):
        dq, dk, dv = call(q, k, v, o, do, lse, dlse, _limits(lengths, q))
    return dq[..., :d_k], dk[..., :d_k], dv[..., :d_v]


def _rows(x: Tensor) -> Tensor:
    """Rows of adjacent numbers that begin and end at multiples of 16 bytes: what the kernels load in whole."""
    whole = 16 // x.element_size()
    if short := -x.shape[-1] % whole:
        return F.pad(x, (0, short))
    *strides, last = x.stride()
    aligned = all(s >= 0 and s % whole == 0 for s in strides) and x.storage_offset() % whole == 0
    return x if last == 1 and aligned else x.clone(memory_format=torch.contiguous_format)


def _limits(lengths: Tensor | None, q: Tensor) -> Tensor | None:
    return None if lengths is None else lengths.to(q.device, torch.int32).contiguous()


class Attend(torch.autograd.Function):
    """(q, k, v) → (o, lse), both differentiable."""

    @staticmethod
    def forward(ctx, q, k, v, lengths, task):
        o, lse = forward(q, k, v, task, lengths)
        ctx.save_for_backward(q, k, v, o, lse, lengths)
        ctx.task = task
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        q, k, v, o, lse, lengths = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do
        return *backward(q, k, v, o, lse, do, dlse, ctx.task, lengths), None, None


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
    configs: Configs | None = None,
) -> tuple[Float[Tensor, "b h n d_v"], Float[Tensor, "b h n"]]:
    """softmax(scale · q kᵀ) v over the pairs of the pattern, and ln Σ exp(scores): (o, lse).

    Query r stands at start + step · r. Keys at and past lengths[b] are hidden, whatever they hold.
    """
    _check(q, k, v)
    what = task(q, v, pattern, start, step, q.shape[-1] ** -0.5 if scale is None else scale)
    return Attend.apply(q, k, v, lengths, what if configs is None else replace(what, configs=configs))


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
