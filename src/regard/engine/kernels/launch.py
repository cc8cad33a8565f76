"""From tensors to launches: what a pattern needs on a device is prepared once, then kept."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...errors import BackendError
from ...pattern import Pattern
from ...progression import Ints
from .backward import dkv_kernel, dq_kernel, sum_kernel
from .configs import Config, Configs, default, padded
from .forward import forward_kernel, join_kernel
from .mask import Stretch, compiled, stretches
from .schedule import Schedule, schedule

LOG2E = 1.4426950408889634
SLICE = 16  # members that one program of an ordered sum adds up


@dataclass(frozen=True)
class Task:
    """What one call computes, apart from its tensors."""

    pattern: Pattern
    start: int  # query r stands at start + step · r
    step: int
    scale: float
    configs: Configs


@dataclass(frozen=True, eq=False)
class Step:
    """One pass, ready to launch."""

    work: Schedule
    allowed: Any
    keep: Any
    goes_on: bool  # some of its results join those of an earlier step


@dataclass(frozen=True, eq=False)
class Route:
    """The passes of one direction."""

    steps: tuple[Step, ...]
    covers: bool  # every member is written before it is read, so outputs need no first value

    @property
    def joins(self) -> bool:
        return any(step.goes_on for step in self.steps)


@lru_cache(maxsize=256)
def route(
    pattern: Pattern,
    n: int,
    m: int,
    start: int,
    step: int,
    config: Config,
    by_keys: bool,
    device: torch.device,
) -> Route:
    """The passes of the plan (of the transposed plan: by_keys) on a device."""
    written = np.zeros(m if by_keys else n, dtype=bool)
    steps, covers = [], False
    for stretch in stretches(pattern, n, m, start, step, config.tile, by_keys):
        mine = _owned(stretch, *((0, 1) if by_keys else (start, step)))
        goes_on = bool(written[mine].any())
        covers = covers or (not goes_on and not steps and len(mine) == len(written))
        written[mine] = True
        steps.append(
            Step(
                schedule(stretch.one, config.block, start, step, by_keys, device),
                compiled(stretch.one.pattern),
                None if stretch.keep is None else compiled(stretch.keep),
                goes_on,
            )
        )
    return Route(tuple(steps), covers or (bool(written.all()) and not any(s.goes_on for s in steps)))


def _owned(stretch: Stretch, start: int, step: int) -> Ints:
    """The members whose results this stretch writes."""
    first, hop, count = stretch.one.tiles.T
    place = np.arange(int(count.max(initial=0)))
    members = (first[:, None] + hop[:, None] * place)[place < count[:, None]]
    if stretch.keep is None:
        return members
    at = start + step * members
    return members[stretch.keep.allows(at, at)]


def forward(
    q: Float[Tensor, "b h n d_k"],
    k: Float[Tensor, "b h_kv m d_k"],
    v: Float[Tensor, "b h_kv m d_v"],
    task: Task,
    lengths: Int[Tensor, " b"] | None = None,
) -> tuple[Float[Tensor, "b h n d_v"], Float[Tensor, "b h n"]]:
    """o and ln Σ exp(scores); zeros and −∞ for a query that may look nowhere."""
    (b, h, n, d_k), (h_kv, m), d_v = q.shape, k.shape[1:3], v.shape[-1]
    config = task.configs.forward
    way = route(task.pattern, n, m, task.start, task.step, config, False, q.device)
    o = q.new_empty((b, h, n, d_v), dtype=torch.float32 if way.joins else q.dtype)
    lse = q.new_empty((b, h, n), dtype=torch.float32)
    if not way.covers:
        o.zero_()
        lse.fill_(-torch.inf)
    wide = _wide(q, k, v, o)
    for step in way.steps:
        work = step.work
        part_o = o.new_empty((work.slots, b * h, config.tile, padded(d_v)), dtype=torch.float32)
        part_lse = lse.new_empty((work.slots, b * h, config.tile))
        _launch(
            forward_kernel, len(work.items) * b * h, config, q.device,
            q, k, v, o, lse, part_o, part_lse, work.items, work.blocks, lse if lengths is None else lengths,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *o.stride()[:3],
            h, b * h, h // h_kv, n, task.start, task.step, _base2(task.scale),
            **_shape(step, config, d_k, d_v),
            LENGTHS=lengths is not None, PRECISION=_precision(q), WIDE=wide,
        )  # fmt: skip
        if work.slots:
            _launch(
                join_kernel, len(work.joins) * b * h, config, q.device,
                o, lse, part_o, part_lse, work.joins, *o.stride()[:3], h, b * h, n, task.start, task.step,
                keep=step.keep, R=config.tile, d_v=d_v, DV=padded(d_v), GOES_ON=step.goes_on, WIDE=wide,
            )  # fmt: skip
    return o.to(q.dtype), lse


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
    b, h, n = q.shape[:3]
    stats = lse.new_empty((b, h, n, 4))  # lse in base 2, delta, and room that makes the loads 16 bytes wide
    dq = _dq(q, k, v, o, lse, do, dlse, stats, task, lengths)
    dk, dv = _dkv(q, k, v, do, stats, task, lengths)
    return dq, dk, dv


def _dq(q, k, v, o, lse, do, dlse, stats, task, lengths):
    (b, h, n, d_k), (h_kv, m), d_v = q.shape, k.shape[1:3], v.shape[-1]
    config = task.configs.dq
    way = route(task.pattern, n, m, task.start, task.step, config, False, q.device)
    dq = q.new_empty(q.shape, dtype=torch.float32 if way.joins else q.dtype)
    if not way.covers:
        dq.zero_()
        stats.zero_()
    wide = _wide(q, k, v, o, do, dq)
    for step in way.steps:
        work = step.work
        part = dq.new_empty((work.slots, b * h, config.tile, padded(d_k)), dtype=torch.float32)
        _launch(
            dq_kernel, len(work.items) * b * h, config, q.device,
            q, k, v, o, do, lse, lse if dlse is None else dlse, stats, dq, part,
            work.items, work.blocks, lse if lengths is None else lengths,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            *o.stride()[:3], *do.stride()[:3], *dq.stride()[:3],
            h, b * h, h // h_kv, n, task.start, task.step, task.scale, _base2(task.scale),
            **_shape(step, config, d_k, d_v),
            LENGTHS=lengths is not None, HAS_DLSE=dlse is not None, PRECISION=_precision(q), WIDE=wide,
        )  # fmt: skip
        if work.slots:
            _sum(dq, part, 0, padded(d_k), step, config, task.start, task.step, wide)
    return dq.to(q.dtype)


def _dkv(q, k, v, do, stats, task, lengths):
    (b, h, n, d_k), (h_kv, m), d_v = q.shape, k.shape[1:3], v.shape[-1]
    config = task.configs.dkv
    way = route(task.pattern, n, m, task.start, task.step, config, True, q.device)
    dtype = torch.float32 if way.joins else q.dtype
    dk, dv = k.new_empty(k.shape, dtype=dtype), v.new_empty(v.shape, dtype=dtype)
    if not way.covers:
        dk.zero_()
        dv.zero_()
    wide = _wide(q, k, v, do, dk, dv)
    both = padded(d_k) + padded(d_v)
    for step in way.steps:
        work = step.work
        part = dk.new_empty((work.slots, b * h_kv, config.tile, both), dtype=torch.float32)
        _launch(
            dkv_kernel, len(work.items) * b * h_kv, config, q.device,
            q, k, v, do, stats, dk, dv, part, work.items, work.blocks, stats if lengths is None else lengths,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            *do.stride()[:3], *dk.stride()[:3], *dv.stride()[:3],
            h_kv, b * h_kv, n, task.start, task.step, task.scale, _base2(task.scale),
            **_shape(step, config, d_k, d_v), GROUP=h // h_kv,
            LENGTHS=lengths is not None, PRECISION=_precision(q), WIDE=wide,
        )  # fmt: skip
        if work.slots:
            _sum(dk, part, 0, both, step, config, 0, 1, wide)
            _sum(dv, part, padded(d_k), both, step, config, 0, 1, wide)
    return dk.to(k.dtype), dv.to(v.dtype)


def _sum(out, part, part_at, width, step, config, start, hop, wide):
    b, h, _, d = out.shape
    _launch(
        sum_kernel, len(step.work.joins) * b * h * (config.tile // SLICE), config, out.device,
        out, part, step.work.joins, *out.stride()[:3], h, b * h, start, hop, part_at,
        keep=step.keep, R=config.tile, SLICE=SLICE, d=d, D=padded(d), PART_WIDTH=width,
        GOES_ON=step.goes_on, WIDE=wide,
    )  # fmt: skip


def _shape(step: Step, config: Config, d_k: int, d_v: int) -> dict[str, Any]:
    work = step.work
    return {
        "allowed": step.allowed,
        "keep": step.keep,
        "R": config.tile,
        "B": config.block,
        "d_k": d_k,
        "d_v": d_v,
        "DK": padded(d_k),
        "DV": padded(d_v),
        "SEGMENTS": work.segments,
        "RAGGED": work.ragged,
        "SPLIT": work.slots > 0,
        "GOES_ON": step.goes_on,
    }


def _launch(
    kernel: Any, programs: int, config: Config, device: torch.device, *args: Any, **sizes: Any
) -> None:
    if programs:
        options = {"num_warps": config.warps, "num_stages": config.stages}
        if config.registers is not None:
            options["maxnreg"] = config.registers
        with torch.cuda.device(device if device.type == "cuda" else -1):
            kernel[(programs,)](*args, **sizes, **options)


def _base2(scale: float) -> float:
    """The scale of scores in base 2. Not 0: it multiplies the −∞ of what may not be seen."""
    return max(scale * LOG2E, 1e-30)


def _wide(*tensors: Tensor) -> bool:
    """Whether an offset within one head can pass 2³¹."""
    return any(x.shape[2] * x.stride(2) >= 2**31 for x in tensors)


def _precision(x: Tensor) -> str:
    """IEEE products in float32, unless PyTorch's own setting allows TF32."""
    return (
        "ieee" if x.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32" else "tf32"
    )


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
        dlse = None if dlse is None else dlse.contiguous()
        return *backward(q, k, v, o, lse, _rows(do), dlse, ctx.task, lengths), None, None


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
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if scale < 0:  # the running maximum is taken before scaling
        q, scale = -q, -scale
    if not q.numel() or not k.numel():
        return q.new_zeros((*q.shape[:3], v.shape[-1])), q.new_full(
            q.shape[:3], -torch.inf, dtype=torch.float32
        )
    configs = configs or default(q.shape[-1], v.shape[-1], q.dtype)
    lengths = None if lengths is None else lengths.to(q.device, torch.int32).contiguous()
    return Attend.apply(_rows(q), _rows(k), _rows(v), lengths, Task(pattern, start, step, scale, configs))


def _rows(x: Tensor) -> Tensor:
    """Rows of adjacent numbers: what the kernels can load."""
    return x if x.stride(-1) == 1 and x.stride(-2) >= 0 else x.contiguous()


WIDEST = 256
DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)


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
