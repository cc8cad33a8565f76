"""The Triton kernels, prepared for one call: what each is launched with, forward and backward."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import CallLayout, Layout, Task, base2, contiguous, dropout_threshold, exceeds_int32
from ..configs import Config, padded
from ..prepared import Arguments, Launch, Program
from ..schedule import DevicePass, DevicePasses, device_passes
from .backward import bias_kernel, dkv_kernel, dq_kernel, sum_kernel
from .common import SLOPES, TABLE
from .forward import forward_kernel, merge_kernel

SLICE = 4  # members whose parts one program of a sum adds up: few, as it mostly waits for memory

Launches = list[tuple[Launch, Arguments]]


class Backward(NamedTuple):
    """A prepared backward pass."""

    outputs: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]  # (q, k, v, …) → dq, dk, dv, to be filled
    program: Program
    final: bool = True  # dq, dk and dv are all there is, in the dtype of the call


def passes(call: CallLayout, config: Config, by_keys: bool) -> DevicePasses:
    """The passes of the plan, by tiles of queries or of keys."""
    task, (_, _, _, n, m, _, _) = call.task, call.sizes
    return device_passes((task.pattern, task.start, task.step), (n, m), config, by_keys, call.device)


def forward(call: CallLayout) -> tuple[DevicePasses, Program]:
    """Fills o and lse."""
    task, (b, h, h_kv, n, _, d_k, d_v) = call.task, call.sizes
    config, (q, k, v), o = task.configs.forward, call.tensors[:3], contiguous(b, h, n, d_v)
    route, wide = passes(call, config, False), exceeds_int32(q, k, v, o)
    rows = max((step.work.slots for step in route.steps), default=0) * b * h * config.tile
    workspace = {"part_o": rows * padded(d_v), "part_lse": rows} if rows else {}
    part_o, part_lse = ("part_o", "part_lse") if rows else ("lse", "lse")
    launches: Launches = []
    for step in route.steps:
        attend = Launch(
            forward_kernel, len(step.work.items) * b * h, config,
            *q.strides, *k.strides, *v.strides, *o.strides,
            h, b * h, h // h_kv, n, task.start, task.step, base2(task.scale), *_numbers(task),
            **_options(call), **_shape(step, config, d_k, d_v),
            SPLIT=step.work.slots > 0, ACCUMULATES=step.accumulates,
            WIDE=wide,
        )  # fmt: skip
        names = "q", "k", "v", "o", "lse", part_o, part_lse, step.work.items, step.work.blocks, *_extras(call)
        launches.append((attend, names))
        merge = Launch(
            merge_kernel, len(step.work.joins) * b * h, config, *o.strides, h, b * h, n, task.start, task.step,
            keep=step.keep, R=config.tile, d_v=d_v, DV=padded(d_v), ACCUMULATES=step.accumulates, WIDE=wide,
        )  # fmt: skip
        launches.append((merge, ("o", "lse", part_o, part_lse, step.work.joins)))
    inputs = "q", "k", "v", "o", "lse", *call.optional_inputs
    return route, Program(inputs, launches, workspace, call.device)


def backward(call: CallLayout) -> Backward:
    """Fills dq, dk and dv; for the gradient of a bias also sums of ds (see `bias_gradients`)."""
    b, h, h_kv, n, m, d_k, d_v = call.sizes
    task, device = call.task, call.device
    by_queries, by_keys = passes(call, task.configs.dq, False), passes(call, task.configs.dkv, True)
    learns_table = call.bias_gradient and task.reach is not None
    launches = dq(call, by_queries) + dkv(call, by_keys)
    counts = [len(step.work.items) for step in by_queries.steps]
    sums = tuple(f"far{nth}" for nth in range(len(counts))) if call.bias_gradient else ()
    if learns_table:
        programs = _bias_programs(call, counts)
        launches += table_gradient(call, by_queries, programs)
        sums = *sums, "near"
    inputs = ("q", "k", "v", "o", "do", "lse", *call.optional_inputs, "dq", "dk", "dv", *sums)
    part = part_size(call, by_queries, by_keys)
    workspace = {"stats": b * h * n * 4} | ({"part": part} if part else {})
    program = Program(inputs, launches, workspace, device, zeroed=not by_queries.covers)
    shapes = (b, h, n, d_k), (b, h_kv, m, d_k), (b, h_kv, m, d_v)
    ways = by_queries, by_keys, by_keys

    def outputs(_: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        grads = tuple(
            (torch.empty if route.covers else torch.zeros)(
                shape, dtype=torch.float32 if route.joins else call.dtype, device=device
            )
            for shape, route in zip(shapes, ways)
        )
        if not call.bias_gradient:
            return grads
        far = torch.zeros((sum(counts), b, h, 4), device=device).split(counts)
        near = (torch.zeros((programs, b, h, 2 * task.reach + 1), device=device),) if learns_table else ()  # type: ignore[operator]
        return *grads, *far, *near

    return Backward(outputs, program, not (call.bias_gradient or by_queries.joins or by_keys.joins))


def dq(call: CallLayout, route: DevicePasses) -> Launches:
    """Fills dq and, for the kernels after it, stats: lse in base 2 and delta of each row."""
    (b, h, h_kv, n, _, d_k, d_v), task, (q, k, v, o, do) = call.sizes, call.task, call.tensors
    config, out = task.configs.dq, contiguous(b, h, n, d_k)
    wide = exceeds_int32(*call.tensors, out)
    launches: Launches = []
    for nth, step in enumerate(route.steps):
        launch = Launch(
            dq_kernel, len(step.work.items) * b * h, config,
            *q.strides, *k.strides, *v.strides, *o.strides, *do.strides, *out.strides,
            h, b * h, h // h_kv, n, task.start, task.step, task.scale, base2(task.scale), *_numbers(task),
            **_options(call), **_shape(step, config, d_k, d_v),
            SPLIT=step.work.slots > 0, ACCUMULATES=step.accumulates,
            HAS_DLSE=call.has_dlse, LEARNS=call.bias_gradient, WIDE=wide,
        )  # fmt: skip
        far = f"far{nth}" if call.bias_gradient else "lse"
        dlse = "dlse" if call.has_dlse else "lse"
        tables = step.work.items, step.work.blocks
        names = (
            "q",
            "k",
            "v",
            "o",
            "do",
            "lse",
            dlse,
            "stats",
            "dq",
            _part(route),
            far,
            *tables,
            *_extras(call),
        )
        launches.append((launch, names))
        total = _sum(out, (0, padded(d_k)), step, config, (task.start, task.step), wide)
        launches.append((total, ("dq", _part(route), step.work.joins)))
    return launches


def dkv(call: CallLayout, route: DevicePasses) -> Launches:
    """Fills dk and dv from stats."""
    (b, h, h_kv, n, m, d_k, d_v), task, (q, k, v, _, do) = call.sizes, call.task, call.tensors
    config, dk, dv = task.configs.dkv, contiguous(b, h_kv, m, d_k), contiguous(b, h_kv, m, d_v)
    wide, both = exceeds_int32(q, k, v, do, dk, dv), padded(d_k) + padded(d_v)
    launches: Launches = []
    for step in route.steps:
        launch = Launch(
            dkv_kernel, len(step.work.items) * b * h_kv, config,
            *q.strides, *k.strides, *v.strides, *do.strides, *dk.strides, *dv.strides,
            h_kv, b * h_kv, n, task.start, task.step, task.scale, base2(task.scale), *_numbers(task),
            **_options(call), **_shape(step, config, d_k, d_v),
            SPLIT=step.work.slots > 0, ACCUMULATES=step.accumulates,
            GROUP=h // h_kv, WIDE=wide,
        )  # fmt: skip
        tables = step.work.items, step.work.blocks
        names = "q", "k", "v", "do", "stats", "dk", "dv", _part(route), *tables, *_extras(call)
        launches.append((launch, names))
        for name, out, part_at in (("dk", dk, 0), ("dv", dv, padded(d_k))):
            total = _sum(out, (part_at, both), step, config, (0, 1), wide)
            launches.append((total, (name, _part(route), step.work.joins)))
    return launches


def table_gradient(call: CallLayout, route: DevicePasses, programs: int) -> Launches:
    """Fills near, one row of sums per program: Σ ds by distance, short of ±reach."""
    (b, h, h_kv, n, _, d_k, d_v), task, (q, k, v, _, do) = call.sizes, call.task, call.tensors
    config, wide = task.configs.dq, exceeds_int32(q, k, v, do)
    launches: Launches = []
    for step in route.steps:
        launch = Launch(
            bias_kernel, programs * b * h, config,
            *q.strides, *k.strides, *v.strides, *do.strides, len(step.work.items), programs,
            h, b * h, h // h_kv, n, task.start, task.step, base2(task.scale), *_numbers(task),
            **_options(call), **_shape(step, config, d_k, d_v), WIDE=wide,
        )  # fmt: skip
        tables = step.work.items, step.work.blocks
        launches.append((launch, ("q", "k", "v", "do", "stats", "near", *tables, *_extras(call))))
    return launches


def bias_gradients(call: CallLayout, sums: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
    """Of the table, (h, 2·reach + 1), and of the slopes, (h,), in float32.

    sums: Σ ds of each pass far from the diagonal, then near to it. Past the reach, ds belongs to the table's ends.
    """
    learns_table = call.task.reach is not None
    near = sums[-1].sum((0, 1)) if learns_table else None
    parts = sums[:-1] if learns_table else sums
    if not parts:  # no pair at all
        return near, None
    far = torch.cat(parts).sum((0, 1))  # (h, 4): Σ ds below −reach, above reach, and times |j − i|
    if near is not None:
        near[:, 0] += far[:, 0]
        near[:, -1] += far[:, 1]
    return near, -far[:, 2] if call.task.has_slopes else None


def _bias_programs(call: CallLayout, counts: list[int]) -> int:
    """Programs per head, each with a row of sums: about as many as a GPU runs at a time, and no more than items."""
    b, h = call.sizes[:2]
    device = call.device
    at_a_time = (
        2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    )
    return min(max(at_a_time // (b * h), 1), max(counts, default=1))


def part_size(call: CallLayout, by_queries: DevicePasses, by_keys: DevicePasses) -> int:
    """Numbers in the parts of split tiles of one pass; passes run one after the other and share the room."""
    b, h, h_kv, _, _, d_k, d_v = call.sizes
    dq, dkv = call.task.configs.dq, call.task.configs.dkv
    sizes = [step.work.slots * b * h * dq.tile * padded(d_k) for step in by_queries.steps]
    both = padded(d_k) + padded(d_v)
    return max(sizes + [step.work.slots * b * h_kv * dkv.tile * both for step in by_keys.steps], default=0)


def _part(route: DevicePasses) -> str:
    """The buffer for parts of split tiles; lse takes its place where there are none, and is not read."""
    return "part" if any(step.work.slots for step in route.steps) else "lse"


def _sum(
    out: Layout, part: tuple[int, int], step: DevicePass, config: Config, at: tuple[int, int], wide: bool
) -> Launch:
    """Adds up the parts of split tiles. part: where a row of `out` begins in a row of parts, and how long that is."""
    b, h, _, d = out.shape
    return Launch(
        sum_kernel, len(step.work.joins) * b * h * (config.tile // SLICE), config,
        *out.strides, h, b * h, *at, part[0],
        keep=step.keep, R=config.tile, SLICE=SLICE, d=d, D=padded(d), PART_WIDTH=part[1],
        ACCUMULATES=step.accumulates, WIDE=wide,
    )  # fmt: skip


def _shape(step: DevicePass, config: Config, d_k: int, d_v: int) -> dict[str, Any]:
    return {
        "allowed": step.allowed, "keep": step.keep, "R": config.tile, "B": config.block, "d_k": d_k, "d_v": d_v,
        "DK": padded(d_k), "DV": padded(d_v), "SEGMENTS": step.work.segments, "RAGGED": step.work.ragged,
    }  # fmt: skip


def _options(call: CallLayout) -> dict[str, Any]:
    """What is compiled into a kernel beside the shape of its work."""
    task = call.task
    bias = TABLE * (task.reach is not None) + SLOPES * task.has_slopes
    precision = matmul_precision(call.dtype)
    return {"BIAS": bias, "DROPS": task.dropout_p > 0, "LENGTHS": call.has_lengths, "PRECISION": precision}


def _numbers(task: Task) -> tuple[Any, ...]:
    """Reach of the table, threshold of dropout, factor of the weights that are kept."""
    return task.reach or 0, dropout_threshold(task.dropout_p), 1.0 / (1.0 - task.dropout_p)


def _extras(call: CallLayout) -> tuple[str, ...]:
    """Lengths, table, slopes and seed; lse takes the place of what is not there, and is not read."""
    there = call.optional_inputs
    return *(name if name in there else "lse" for name in ("lengths", "table", "slopes")), "seed"


def matmul_precision(dtype: torch.dtype) -> str:
    """IEEE products in float32, unless PyTorch's own setting allows TF32."""
    ieee = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32"
    return "ieee" if ieee else "tf32"
