"""Calls of the kernels for one task and one layout of tensors, prepared once: a repeated call only launches."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .configs import Config, padded
from .hopper.launches import SLICE, backward_stream, forward_stream, stream_route
from .prepared import Launch, Layout, dense, wide
from .schedule import Route, Step, route
from .triton.backward import bias_kernel, dkv_kernel, dq_kernel, sum_kernel
from .triton.bias_and_dropout import SLOPES, TABLE, Added, base2, threshold
from .triton.forward import forward_kernel, join_kernel
from .triton.short_backward import brief_call, config_of


@lru_cache(maxsize=512)
def forward_call(
    task: Any, q: Layout, k: Layout, v: Layout, dtype: torch.dtype, device: torch.device, lengths: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    """(q, k, v, limits, added, spare) → (o, lse)."""
    way = None if lengths else stream_route(task, task.configs.stream, False, (q, k, v), dtype, device)
    if way is not None:
        return forward_stream(task, way, q, k, v, dtype, device)
    config, (b, h, n, d_k), (h_kv, m), d_v = task.configs.forward, q.shape, k.shape[1:3], v.shape[-1]
    way = route(task.pattern, n, m, task.start, task.step, config, False, device)
    o_type = torch.float32 if way.joins else dtype
    o_like = dense(b, h, n, d_v)
    far = wide(q, k, v, o_like)
    launches = []
    for step in way.steps:
        first = Launch(
            forward_kernel, len(step.work.items) * b * h, config,
            *q.steps, *k.steps, *v.steps, *o_like.steps,
            h, b * h, h // h_kv, n, task.start, task.step, base2(task.scale), *_numbers(task),
            **_parts(task), **_shape(step, config, d_k, d_v), SPLIT=step.work.slots > 0, GOES_ON=step.goes_on,
            PRECISION=_precision(dtype), WIDE=far, LENGTHS=lengths,
        )  # fmt: skip
        then = Launch(
            join_kernel, len(step.work.joins) * b * h, config, *o_like.steps, h, b * h, n, task.start, task.step,
            keep=step.keep, R=config.tile, d_v=d_v, DV=padded(d_v), GOES_ON=step.goes_on, WIDE=far,
        )  # fmt: skip
        launches.append((step.work, first, then))

    def call(
        q: Tensor, k: Tensor, v: Tensor, limits: Tensor | None, added: Added, spare: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:  # the spare is not used: a pass that goes on reads lse
        o, lse = _outputs(way, o_like.shape, o_type, device)
        rest = _rest(limits, added, lse)
        for work, first, then in launches:
            part_o = part_lse = lse
            if work.slots:
                part_o = lse.new_empty((work.slots, b * h, config.tile, padded(d_v)))
                part_lse = lse.new_empty((work.slots, b * h, config.tile))
            first(q, k, v, o, lse, part_o, part_lse, work.items, work.blocks, *rest)
            if work.slots:
                then(o, lse, part_o, part_lse, work.joins)
        return o if o_type == dtype else o.to(dtype), lse

    return call


def _outputs(
    way: Route, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    if way.covers:
        return torch.empty(shape, dtype=dtype, device=device), torch.empty(shape[:3], device=device)
    return torch.zeros(shape, dtype=dtype, device=device), torch.full(shape[:3], -torch.inf, device=device)


@lru_cache(maxsize=512)
def backward_call(
    task: Any, given: tuple[Layout, ...], dtype: torch.dtype, device: torch.device, dlse: bool, lengths: bool,
    of_bias: bool,
) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]]:  # fmt: skip
    """(q, k, v, o, do, lse, dlse, limits, added) → dq, dk, dv; near and far of the bias, where it learns."""
    config = None if lengths else config_of(task, given, dtype)
    if config is not None:
        return brief_call(task, config, given, _precision(dtype), device, dlse)
    streamed = None if lengths else backward_stream(task, given, dtype, device, dlse)
    if streamed is not None:
        return streamed
    for_queries = dq_call(task, given, dtype, device, dlse, lengths, of_bias)
    for_keys = dkv_call(task, given, dtype, device, lengths)
    for_bias = bias_call(task, given, dtype, device, lengths) if of_bias and task.reach is not None else None

    def call(q, k, v, o, do, lse, dlse, limits, added):
        stats = lse.new_empty(
            (*lse.shape, 4)
        )  # lse in base 2, delta, and room that makes the loads 16 bytes wide
        rest = _rest(limits, added, lse)
        dq, far = for_queries(q, k, v, o, do, lse, dlse, stats, rest)
        dk, dv = for_keys(q, k, v, do, stats, rest)
        near = None if for_bias is None else for_bias(q, k, v, do, stats, rest)
        return dq, dk, dv, near, far

    return call


def dq_call(
    task: Any,
    given: tuple[Layout, ...],
    dtype: torch.dtype,
    device: torch.device,
    has_dlse: bool,
    lengths: bool,
    of_bias: bool,
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """(q, k, v, o, do, lse, dlse, stats, rest) → dq, and (h, 3) Σ ds below, above and times |j − i|; fills stats."""
    q, k, v, o, do = given
    config, (b, h, n, d_k), (h_kv, m), d_v = task.configs.dq, q.shape, k.shape[1:3], v.shape[-1]
    way = route(task.pattern, n, m, task.start, task.step, config, False, device)
    like = dense(b, h, n, d_k)
    far = wide(*given, like)
    launches = []
    for step in way.steps:
        first = Launch(
            dq_kernel, len(step.work.items) * b * h, config,
            *q.steps, *k.steps, *v.steps, *o.steps, *do.steps, *like.steps,
            h, b * h, h // h_kv, n, task.start, task.step, task.scale, base2(task.scale), *_numbers(task),
            **_parts(task), **_shape(step, config, d_k, d_v), SPLIT=step.work.slots > 0, GOES_ON=step.goes_on,
            HAS_DLSE=has_dlse, LEARNS=of_bias, PRECISION=_precision(dtype), WIDE=far, LENGTHS=lengths,
        )  # fmt: skip
        then = _sum(like, 0, padded(d_k), step, config, (task.start, task.step), far)
        launches.append((step.work, first, then))

    kind = torch.float32 if way.joins else dtype

    def call(q, k, v, o, do, lse, dlse, stats, rest):
        dq = (torch.empty if way.covers else torch.zeros)(like.shape, dtype=kind, device=device)
        if not way.covers:
            stats.zero_()
        dlse = lse if dlse is None else dlse
        fars = []
        for work, first, then in launches:
            part = lse.new_empty((work.slots, b * h, config.tile, padded(d_k))) if work.slots else lse
            far = lse.new_zeros((len(work.items), b, h, 4)) if of_bias else lse
            first(q, k, v, o, do, lse, dlse, stats, dq, part, far, work.items, work.blocks, *rest)
            if work.slots:
                then(dq, part, work.joins)
            fars.append(far)
        far = torch.cat(fars).sum((0, 1))[:, :3] if of_bias and fars else None
        return dq if kind == dtype else dq.to(dtype), far

    return call


def dkv_call(
    task: Any, given: tuple[Layout, ...], dtype: torch.dtype, device: torch.device, lengths: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    """(q, k, v, do, stats, rest) → dk, dv."""
    q, k, v, _, do = given
    config, (b, h, n, d_k), (h_kv, m), d_v = task.configs.dkv, q.shape, k.shape[1:3], v.shape[-1]
    way = route(task.pattern, n, m, task.start, task.step, config, True, device)
    like_k, like_v = dense(b, h_kv, m, d_k), dense(b, h_kv, m, d_v)
    far = wide(q, k, v, do, like_k, like_v)
    both = padded(d_k) + padded(d_v)
    launches = []
    for step in way.steps:
        first = Launch(
            dkv_kernel, len(step.work.items) * b * h_kv, config,
            *q.steps, *k.steps, *v.steps, *do.steps, *like_k.steps, *like_v.steps,
            h_kv, b * h_kv, n, task.start, task.step, task.scale, base2(task.scale), *_numbers(task),
            **_parts(task), **_shape(step, config, d_k, d_v), SPLIT=step.work.slots > 0, GOES_ON=step.goes_on,
            GROUP=h // h_kv,
            PRECISION=_precision(dtype), WIDE=far, LENGTHS=lengths,
        )  # fmt: skip
        sum_k = _sum(like_k, 0, both, step, config, (0, 1), far)
        sum_v = _sum(like_v, padded(d_k), both, step, config, (0, 1), far)
        launches.append((step.work, first, sum_k, sum_v))

    kind = torch.float32 if way.joins else dtype

    def call(q, k, v, do, stats, rest):
        make = torch.empty if way.covers else torch.zeros
        dk, dv = (make(x.shape, dtype=kind, device=device) for x in (like_k, like_v))
        for work, first, sum_k, sum_v in launches:
            part = stats.new_empty((work.slots, b * h_kv, config.tile, both)) if work.slots else stats
            first(q, k, v, do, stats, dk, dv, part, work.items, work.blocks, *rest)
            if work.slots:
                sum_k(dk, part, work.joins)
                sum_v(dv, part, work.joins)
        return (dk, dv) if kind == dtype else (dk.to(dtype), dv.to(dtype))

    return call


def bias_call(
    task: Any, given: tuple[Layout, ...], dtype: torch.dtype, device: torch.device, lengths: bool
) -> Callable[..., Tensor]:
    """(q, k, v, do, stats, rest) → (h, 2·reach + 1): Σ ds by distance, short of ±reach."""
    q, k, v, _, do = given
    config, (b, h, n, d_k), (h_kv, m), d_v = task.configs.dq, q.shape, k.shape[1:3], v.shape[-1]
    way = route(task.pattern, n, m, task.start, task.step, config, False, device)
    far = wide(q, k, v, do)
    most = max((len(step.work.items) for step in way.steps), default=1)
    programs = min(max(_at_a_time(device) // (b * h), 1), most)  # of a head: no more rows of sums than these
    launches = [
        (step.work, Launch(
            bias_kernel, programs * b * h, config,
            *q.steps, *k.steps, *v.steps, *do.steps, len(step.work.items), programs,
            h, b * h, h // h_kv, n, task.start, task.step, base2(task.scale), *_numbers(task),
            **_parts(task), **_shape(step, config, d_k, d_v), PRECISION=_precision(dtype), WIDE=far, LENGTHS=lengths,
        ))
        for step in way.steps
    ]  # fmt: skip

    def call(q, k, v, do, stats, rest):
        near = stats.new_zeros((programs, b, h, 2 * task.reach + 1))
        for work, launch in launches:
            launch(q, k, v, do, stats, near, work.items, work.blocks, *rest)
        return near.sum((0, 1))

    return call


def _at_a_time(device: torch.device) -> int:
    """Programs of the bias's gradient that a GPU runs at a time, about."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _sum(
    out: Layout, part_at: int, width: int, step: Step, config: Config, at: tuple[int, int], far: bool
) -> Launch:
    b, h, _, d = out.shape
    return Launch(
        sum_kernel, len(step.work.joins) * b * h * (config.tile // SLICE), config,
        *out.steps, h, b * h, *at, part_at,
        keep=step.keep, R=config.tile, SLICE=SLICE, d=d, D=padded(d), PART_WIDTH=width,
        GOES_ON=step.goes_on, WIDE=far,
    )  # fmt: skip


def _shape(step: Step, config: Config, d_k: int, d_v: int) -> dict[str, Any]:
    return {
        "allowed": step.allowed,
        "keep": step.keep,
        "R": config.tile,
        "B": config.block,
        "d_k": d_k,
        "d_v": d_v,
        "DK": padded(d_k),
        "DV": padded(d_v),
        "SEGMENTS": step.work.segments,
        "RAGGED": step.work.ragged,
    }


def _parts(task: Any) -> dict[str, Any]:
    """What is added to a plain call, for the compiler."""
    bias = TABLE * (task.reach is not None) + SLOPES * task.sloped
    return {"BIAS": bias, "DROPS": task.dropout_p > 0}


def _numbers(task: Any) -> tuple[Any, ...]:
    """The same in numbers: reach of the table, what dropout is decided by, what it multiplies with."""
    return task.reach or 0, threshold(task.dropout_p), 1.0 / (1.0 - task.dropout_p)


def _rest(limits: Tensor | None, added: Added, some: Tensor) -> tuple[Any, ...]:
    """Limits, table, slopes and seed; `some` tensor stands for what there is not, and is not read."""
    return (
        some if limits is None else limits,
        some if added.table is None else added.table,
        some if added.slopes is None else added.slopes,
        added.seed,
    )


def _precision(dtype: torch.dtype) -> str:
    """IEEE products in float32, unless PyTorch's own setting allows TF32."""
    return (
        "ieee" if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32" else "tf32"
    )
