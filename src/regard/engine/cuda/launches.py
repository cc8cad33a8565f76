"""Which kernels run a call, and their arguments: the kernels for Hopper if they can run it, else the general ones."""

import math
from typing import Any

import torch
from torch import Tensor

from ... import compat
from ..plan import why_masked
from .call import CallLayout, Config, Layout, base2, contiguous, exceeds_int32, one_launch_config, padded
from .mask import compiled
from .prepared import Arguments, Backward, Launch, Program
from .schedule import DevicePass, DevicePasses, device_passes
from .tile_lists import one_launch_tables
from .triton.backward import FOR_KEYS, FOR_QUERIES, bias_kernel, gradients_kernel, sum_kernel
from .triton.forward import SLOPES, TABLE, Static, forward_kernel, merge_kernel, static

SLICE = 4  # members whose parts one program of a sum adds up: few, as it mostly waits for memory
MERGED = 8  # rows whose parts one program merges
PARTS = "part_o", "part_lse"  # the workspace for the parts of split tiles
TERMS = "lengths", "table", "slopes", "seed"  # arguments of the general kernels

Launches = list[tuple[Launch, Arguments]]


def forward(call: CallLayout) -> tuple[DevicePasses, Program]:
    """Fills o and lse."""
    if call.has_few_queries:
        from . import few_queries

        return DevicePasses((), True), few_queries.forward(call)
    task, (b, h, h_kv, n, _, _, d_v) = call.task, call.sizes
    config, (q, k, v), o = call.configs.forward, call.tensors[:3], call.output
    inputs = "q", "k", "v", "o", "lse", *call.optional_inputs
    if takes_hopper(call):
        from .hopper.launches import forward as hopper_launches  # it imports Gluon

        passes, launches, workspace = hopper_launches(call)
        zeroed = workspace["counters"] > 0
        return passes, Program(inputs, launches, workspace, call.device, zeroed=zeroed)
    passes = device_passes(call.place, config, False, call.device)
    wide, launches = exceeds_int32(q, k, v, o), []
    for step in passes.steps:
        attend = Launch(
            forward_kernel, len(step.work.items) * b * h, config,
            *q.strides, *k.strides, *v.strides, *o.strides,
            h, b * h, h // h_kv, n, task.start, task.step, *score_factors(call),
            S=_static(call, step, config, wide)._replace(SINKS=joins_sink(call, passes)),
        )  # fmt: skip
        names = "q", "k", "v", "o", "lse", *PARTS, *TERMS, "sink", step.work.items, step.work.blocks
        launches += [(attend, names), merge_parts(o, step.work.joins, config, (task.start, task.step), step)]
    parts = config.tile * max((step.work.slots for step in passes.steps), default=0)
    return passes, Program(inputs, launches, parts_workspace(b * h * parts, d_v), call.device)


def parts_workspace(rows: int, d_v: int) -> dict[str, int]:
    """The workspace for the parts of split tiles, if those of all heads have so many rows."""
    return dict(zip(PARTS, (rows * padded(d_v), rows)))


def merge_parts(
    out: Layout, joins: Tensor, config: Config, query_offset: tuple[int, int], step: DevicePass | None = None,
    early: bool = False,
) -> tuple[Launch, Arguments]:  # fmt: skip
    """Merges the parts of split tiles. query_offset: start and step; step: None if there is no pass before.

    early: it may start before the kernel that writes the parts has ended.
    """
    (b, h, n, d_v), keep = out.shape, None if step is None else compiled(step.keep)
    launch = Launch(
        merge_kernel, len(joins) * b * h * (config.tile // MERGED), config, *out.strides, h, b * h, n, *query_offset,
        keep=keep, R=config.tile, SLICE=MERGED, d_v=d_v, DV=padded(d_v), WIDE=exceeds_int32(out),
        ACCUMULATES=step is not None and step.accumulates, EARLY=early, early=early,
    )  # fmt: skip
    return launch, ("o", "lse", *PARTS, joins)


def backward(call: CallLayout) -> Backward:
    """Fills dq, dk and dv; for the gradient of a bias also sums of ds (see `bias_gradients`)."""
    if (one_launch := one_launch_backward(call)) is not None:
        return one_launch
    if call.per_row or (call.has_few_queries and why_masked(*call.place)):
        from . import few_queries

        return few_queries.backward(call)
    return hopper_backward(call) or general_backward(call)


# The general kernels


def general_backward(call: CallLayout) -> Backward:
    (b, h, _, n, *_), task, device, reach = call.sizes, call.task, call.device, call.task.reach or 0
    by_queries = device_passes(call.place, call.configs.dq, False, device)
    by_keys = device_passes(call.place, call.configs.dkv, True, device)
    for_queries, part = gradients(call, by_queries, call.configs.dq, FOR_QUERIES)
    for_keys, part_of_keys = gradients(call, by_keys, call.configs.dkv, FOR_KEYS)
    launches = for_queries + for_keys
    counts = [len(step.work.items) for step in by_queries.steps]
    learns_table = call.bias_gradient and task.reach is not None
    sums = [f"far{nth}" for nth in range(len(counts))] if call.bias_gradient else []
    if learns_table:
        # Each with a row of sums per head: about as many as a GPU runs at a time, and no more than items.
        programs = min(max(2 * multiprocessors(device) // (b * h), 1), max(counts, default=1))
        launches += table_gradient(call, by_queries, programs)
        sums.append("near")
    workspace = {"stats": b * h * n * 4, "part": max(part, part_of_keys)}
    inputs = "q", "k", "v", "o", "do", "lse", *call.optional_inputs, "dq", "dk", "dv", *sums
    program = Program(inputs, launches, workspace, device, zeroed=not by_queries.covers)
    allocators = [torch.empty if passes.covers else torch.zeros for passes in (by_queries, by_keys, by_keys)]

    def outputs(x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        results = [new(like.shape, dtype=call.dtype, device=device) for new, like in zip(allocators, x)]
        if call.bias_gradient:
            results += torch.zeros((sum(counts), b, h, 4), dtype=torch.float32, device=device).split(counts)
        if learns_table:
            results.append(torch.zeros((programs, b, h, 2 * reach + 1), dtype=torch.float32, device=device))
        return tuple(results)

    return outputs, program


def gradients(call: CallLayout, passes: DevicePasses, config: Config, sides: int) -> tuple[Launches, int]:
    """Fills dq and, for the kernels after it, stats: lse in base 2 and delta of each row; or else dk and dv.

    Returns the launches, and the size of the buffer for parts of split tiles: passes run one after the other and
    share it.
    """
    (b, h, h_kv, n, m, d_k, d_v), task = call.sizes, call.task
    q, k, v = contiguous(b, h, n, d_k), contiguous(b, h_kv, m, d_k), contiguous(b, h_kv, m, d_v)
    wide, by_keys = exceeds_int32(*call.tensors, q, k, v), sides == FOR_KEYS
    # Of each gradient: its name, its layout, and where its rows begin in a row of parts.
    outs = (("dk", k, 0), ("dv", v, padded(d_k))) if by_keys else (("dq", q, 0),)
    width, heads = sum(padded(out.shape[-1]) for _, out, _ in outs), b * (h_kv if by_keys else h)
    launches: Launches = []
    for nth, step in enumerate(passes.steps):
        constants = _static(call, step, config, wide)._replace(SIDES=sides)
        tables = step.work.items, step.work.items, step.work.blocks
        far = f"far{nth}" if call.bias_gradient and not by_keys else "lse"
        programs, buffers = len(step.work.items) * heads, ("stats", "part", far)
        launches.append(_gradients_launch(call, programs, config, constants, (q, k, v), buffers, tables))
        for name, out, offset in outs:
            query_offset = (0, 1) if by_keys else (task.start, task.step)
            total = sum_parts(out, (offset, width), step, step.work.joins, config, query_offset)
            launches.append((total, (name, "part", step.work.joins)))
    slots = max((step.work.slots for step in passes.steps), default=0)
    return launches, slots * heads * config.tile * width


def _gradients_launch(
    call: CallLayout, programs: int, config: Config, static: Static, outs: tuple[Layout, ...],
    buffers: tuple[str, str, str], tables: tuple[Tensor, ...], for_keys: int = 0,
) -> tuple[Launch, Arguments]:  # fmt: skip
    """One launch of the kernel for both sides. buffers: for stats, for parts of split tiles, for sums of ds."""
    (b, h, h_kv, n, _, _, _), task = call.sizes, call.task
    launch = Launch(
        gradients_kernel, programs, config, *(x for like in (*call.tensors, *outs) for x in like.strides),
        h, b * h, for_keys, n, task.start, task.step, task.scale, *score_factors(call),
        S=static._replace(GROUP=h // h_kv, HAS_DLSE=call.has_dlse),
    )  # fmt: skip
    stats, *others = buffers
    names = "q", "k", "v", "o", "do", "lse", "dlse", stats, "dq", "dk", "dv", *others
    return launch, (*names, *TERMS, *tables)


def one_launch_backward(call: CallLayout) -> Backward | None:
    """Fills dq, dk and dv in one launch, if the call is short enough."""
    if (config := one_launch_config(call)) is None:
        return None
    (b, h, h_kv, *_), outs = call.sizes, tuple(x.like() for x in call.tensors[:3])
    lists, for_keys = one_launch_tables(call.place, (config.tile, config.block), call.device)
    programs = for_keys * b * h_kv + (len(lists[0]) - for_keys) * b * h
    constants = static(call.task.pattern, config, call)._replace(SIDES=FOR_QUERIES + FOR_KEYS, LISTED=True)
    launch = _gradients_launch(call, programs, config, constants, outs, ("lse",) * 3, lists, for_keys)
    inputs = "q", "k", "v", "o", "do", "lse", *call.optional_inputs, "dq", "dk", "dv"
    return _like_inputs, Program(inputs, [launch], {}, call.device)


def _like_inputs(x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Three allocations: faster than one that is split, and no result keeps the others in memory."""
    return torch.empty_like(x[0]), torch.empty_like(x[1]), torch.empty_like(x[2])


def table_gradient(call: CallLayout, passes: DevicePasses, programs: int) -> Launches:
    """Fills near, one row of sums per program: Σ ds by distance, short of ±reach."""
    (b, h, h_kv, n, _, _, _), task, (q, k, v, _, do) = call.sizes, call.task, call.tensors
    config, wide = call.configs.dq, exceeds_int32(q, k, v, do)
    launches: Launches = []
    for step in passes.steps:
        launch = Launch(
            bias_kernel, programs * b * h, config,
            *q.strides, *k.strides, *v.strides, *do.strides, len(step.work.items), programs,
            h, b * h, h // h_kv, n, task.start, task.step, *score_factors(call),
            S=_static(call, step, config, wide)._replace(SPLIT=False, ACCUMULATES=False),
        )  # fmt: skip
        names = "q", "k", "v", "do", "stats", "near", *TERMS, step.work.items, step.work.blocks
        launches.append((launch, names))
    return launches


def bias_gradients(call: CallLayout, sums: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the table, (h, 2·reach + 1), and of the slopes, (h,), in float32.

    sums: Σ ds of each pass far from the diagonal, then near it. Beyond the reach, ds belongs to the table's ends.
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


def sum_parts(
    out: Layout, part: tuple[int, int], step: DevicePass, joins: Tensor, config: Config, offset: tuple[int, int]
) -> Launch:  # fmt: skip
    """Adds up the parts of split tiles. part: where a row of `out` begins in a row of parts, and how long that is."""
    b, h, _, d = out.shape
    return Launch(
        sum_kernel, len(joins) * b * h * (config.tile // SLICE), config, *out.strides, h, b * h, *offset, part[0],
        keep=compiled(step.keep), R=config.tile, SLICE=SLICE, d=d, D=padded(d), PART_WIDTH=part[1],
        ACCUMULATES=step.accumulates, WIDE=exceeds_int32(out),
    )  # fmt: skip


def _static(call: CallLayout, step: DevicePass, config: Config, wide: bool) -> Static:
    """What the kernels of one pass are compiled for."""
    task, work = call.task, step.work
    return static(work.pattern, config, call)._replace(
        keep=compiled(step.keep), SEGMENTS=work.segments, RAGGED=work.ragged, SPLIT=work.split,
        ACCUMULATES=step.accumulates, LENGTHS=call.lengths, CAPPED=task.softcap is not None, WIDE=wide,
        DROPS=task.dropout_p > 0, LEARNS=call.bias_gradient,
        BIAS=TABLE * (task.reach is not None) + SLOPES * task.has_slopes,
    )  # fmt: skip


def score_factors(call: CallLayout) -> tuple[Any, ...]:
    """Scale and softcap in base 2, the reach of the table, the 32-bit threshold of a random number below which a
    weight is dropped, and the factor of the remaining weights."""
    task = call.task
    threshold = min(round(task.dropout_p * 2**32), 2**32 - 1)
    cap = 1.0 if task.softcap is None else base2(task.softcap)
    return base2(task.scale), cap, task.reach or 0, threshold, 1.0 / (1.0 - task.dropout_p)


# The kernels for Hopper


def is_hopper(device: torch.device) -> bool:
    """Whether the kernels run on this device: compute capability 9, and a Triton that has Gluon."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return hopper and compat.has_gluon()


def takes_hopper(call: CallLayout) -> bool:
    """Whether the kernels for Hopper support such a call.

    They need 16-bit types, a stored configuration, one head width for all, no bias, no dropout.
    """
    d, stored = call.tensors[0].shape[-1], call.configs.hopper_forward
    if not call.task.fits_hopper or stored is None or call.dtype.itemsize != 2:
        return False
    fit = all(x.shape[-1] == d and x.aligned and not any(s % 8 for s in x.strides) for x in call.tensors)
    return fit and not exceeds_int32(*call.tensors, call.output) and is_hopper(call.device)


def joins_sink(call: CallLayout, passes: DevicePasses) -> bool:
    """Whether the forward kernel joins a sink: if one pass writes every row once. (One query has no steps.)"""
    once = len(passes.steps) <= 1 and passes.covers and not any(step.work.split for step in passes.steps)
    return call.has_sink and once


def multiprocessors(device: torch.device) -> int:
    """2 under the interpreter, which has no device."""
    return 2 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count


def hopper_backward(call: CallLayout) -> Backward | None:
    """Fills dq, dk and dv and, for the gradient of a sink, delta; None if these kernels cannot run the call."""
    if not takes_hopper(call) or call.configs.hopper_dq is None:
        return None
    from .hopper.launches import dkv, dq  # it imports Gluon

    dtype, device, (q, k) = call.dtype, call.device, (x.shape for x in call.tensors[:2])
    by_queries, for_queries, of_queries = dq(call)
    by_keys, for_keys, of_keys = dkv(call)
    rows = math.prod(q[:3])
    gives_delta = call.has_sink and by_queries.covers  # otherwise some rows have none
    workspace = {"lse2": rows, "delta": 0 if gives_delta else rows} | of_queries | of_keys
    allocate = torch.empty if by_queries.covers and by_keys.covers else torch.zeros
    inputs = ["q", "k", "v", "o", "do", "lse", *call.optional_inputs, "dq", "dk", "dv"]
    inputs += ["delta"] if gives_delta else []
    launches = for_queries + for_keys if for_queries else []  # without a pass by queries, no pair is allowed
    if by_queries.overlap and not by_keys.accumulate:  # sums in the end: the passes overlap
        launches.sort(key=lambda x: x[0].kernel is sum_kernel)
    counters = of_queries["counters"] or of_keys["counters_of_keys"]
    program = Program(inputs, launches, workspace, device, zeroed=allocate is torch.zeros or counters > 0)
    sums_both = any(launch.kernel is sum_kernel for launch, _ in for_keys)
    like_inputs = allocate is torch.empty and all(x == contiguous(*x.shape) for x in call.tensors[:3])

    def in_one_tensor(_: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """dk and dv as halves of one tensor, so that one launch adds up the parts of both."""
        if q == k:
            return allocate((3, *q), dtype=dtype, device=device).unbind(0)
        dk_and_dv = allocate((2, *k), dtype=dtype, device=device).unbind(0)
        return allocate(q, dtype=dtype, device=device), *dk_and_dv

    outputs = _like_inputs if like_inputs and not sums_both else in_one_tensor
    if not gives_delta:
        return outputs, program
    return lambda x: (*outputs(x), torch.empty(q[:3], dtype=torch.float32, device=device)), program
