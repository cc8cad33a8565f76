"""The launches of the kernels for Hopper; this module imports Gluon, the language of these kernels."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from ..call import CallLayout, Config, Layout, contiguous, padded
from ..documents import Packed
from ..launches import PARTS, Launches, joins_sink, merge_parts, multiprocessors, parts_workspace, sum_parts
from ..prepared import Launch
from ..schedule import DevicePass, DevicePasses
from ..tile_lists import in_boxes, with_masks
from ..triton.forward import merge_kernel
from ..work_split import CACHE, by_size, chain_passes, flatten_heads, heads_at_a_time, interleave, split_work
from .backward import hopper_dkv, hopper_dq
from .forward import hopper_forward
from .static import hopper_static, keep

# The share of the work that is kept for programs that finish early: programs on one multiprocessor differ in speed.
DYNAMIC_SHARE = 0.1
FEW_TILES = 3  # of a program, forward: so few are 1 to 7 % slower by a dynamic share
FORWARD_CAP = 168  # registers of the forward kernel for heads of 64 with lengths or a softcap
SHORT_RUN = 40  # blocks of a program: so few are 1 to 9 % slower by a dynamic share (gpu_experiments)


def config_of(call: CallLayout, kernel: str) -> Config:
    """The stored configuration of a kernel. Under the cap of the forward kernel for heads of 64, lengths or a softcap
    would spill registers: short padded sequences were 7 % slower than by three programs per multiprocessor."""
    stored: Any = getattr(call.configs, kernel)
    terms = call.lengths or not call.task.plain
    return replace(stored, registers=FORWARD_CAP) if terms and stored.registers == 128 else stored


def programs_per_multiprocessor(config: Config) -> int:
    """How many programs fit on a multiprocessor, by their registers."""
    return 65536 // (32 * config.warps * (config.registers or 255))


def programs_at_a_time(config: Config, device: torch.device) -> int:
    return programs_per_multiprocessor(config) * multiprocessors(device)


def hopper_passes(call: CallLayout, config: Config, by_keys: bool) -> DevicePasses:
    """The passes of the plan, those of a grid in boxes if that is less work; long tiles are passes of their own, but
    not boxes, as what adds up the parts of a tile expects that its rows have one step."""
    (b, h), place = call.tensors[1 if by_keys else 0].shape[:2], (call.place, by_keys, call.device)
    at_a_time = programs_at_a_time(config, call.device)
    if isinstance(call.task.pattern, Packed):
        return call.task.pattern.passes(*place, b * h, at_a_time)
    return in_boxes(*place) or by_size(with_masks(*place), max(at_a_time // (b * h), 1))


def launched_passes(
    call: CallLayout, config: Config, by_keys: bool, chains: bool = True
) -> tuple[DevicePasses, list[tuple[DevicePass, tuple[Layout, ...]]], int]:
    """The passes as planned; what is launched, with flattened heads if possible, and the layouts of its tensors; and
    the number of counters that tiles wait for, if all passes are one launch, otherwise 0."""
    passes = hopper_passes(call, config, by_keys)
    if call.lengths:  # which a program reads for its batch row: heads stay apart
        return passes, [(step, call.tensors) for step in passes.steps], 0
    chained = chain_passes(passes, call.tensors, programs_at_a_time(config, call.device)) if chains else None
    if chained is not None:
        return passes, [chained[:2]], chained[2]
    distance = 1 if by_keys else call.task.step
    return passes, [flatten_heads(step, distance, call.tensors) for step in passes.steps], 0


def _launch(
    kernel: Any, config: Config, call: CallLayout, step: DevicePass, cut: Any,
    layouts: tuple[Layout, ...], heads: tuple[int, int, int], *numbers: Any, **constants: Any,
) -> Launch:  # fmt: skip
    """cut: a WorkSplit; layouts: those whose strides the kernel takes; heads: of a batch row, of all, at a time."""
    strides, chained = (x for layout in layouts for x in layout.strides), step.work.chained
    static = hopper_static(step, config, call)._replace(SPLIT=cut.slots > 0, **constants)
    # A forward pass that waits for no other may not start early: what makes its inputs may not have ended.
    early = kernel is not hopper_forward or static.WAITS_AT_END or static.ACCUMULATES
    return Launch(
        kernel, cut.programs * heads[1], config, *strides, *heads, *numbers,
        early=early and not chained, cooperative=chained, S=static,
    )  # fmt: skip


def forward(call: CallLayout) -> tuple[DevicePasses, Launches, dict[str, int]]:
    """Fills o and lse. Returns the passes, their launches, and the workspace as `dq` does."""
    task, parts, shape = call.task, 0, call.output.shape
    config = config_of(call, "hopper_forward")
    at_a_time = programs_at_a_time(config, call.device)
    # In one launch, passes read q, k, v and o from the cache. Heads of 64 are 16 to 34 % slower by that.
    chains = shape[3] > 64 and 4 * 2 * math.prod(shape) > CACHE
    passes, launched, counters = launched_passes(call, config, False, chains)
    merged = None if call.lengths else interleave(passes, call.tensors, task.step, at_a_time, DYNAMIC_SHARE)
    if merged is not None:
        launched = [merged[1:3]]
    launches: Launches = []
    overlap, query_offset = passes.overlap and merged is None, (task.start, task.step)
    for nth, (step, (q, k, v)) in enumerate(launched):
        (b, h, n, d), waits = q.shape, overlap and nth > 0
        out = call.output if q.shape == shape else contiguous(b, h, n, d)
        # Every second pass runs backwards: it begins with rows that are still in the cache.
        if merged is None:
            few = b * h * len(step.work.sizes) <= FEW_TILES * at_a_time
            share = 0.0 if counters or few else DYNAMIC_SHARE
            in_flight = heads_at_a_time(step.work, b * h, k, at_a_time)
            cut = split_work(step.work, in_flight, at_a_time, dynamic_share=share, backwards=nth % 2 == 1)
        else:
            in_flight, cut = b * h, merged[3]
        early_next = overlap or cut.slots > 0 or any(later.accumulates for later, _ in launched[nth + 1 :])
        launch = _launch(
            hopper_forward, config, call, step, cut, (q, k, v, out), (h, b * h, in_flight),
            h // k.shape[1], n, *query_offset, *task.factors, shape[2], shape[1],
            WAITS_AT_END=waits, NEXT_STARTS_EARLY=early_next, SINKS=joins_sink(call, passes),
        )  # fmt: skip
        buffers = ("counters" if counters else PARTS[0], PARTS[1])
        names = "q", "k", "v", "o", "lse", *buffers, "lengths", "sink", *cut.tables
        source = step if merged is None else merged[0]
        merge = merge_parts(call.output, cut.joins, config, query_offset, source, early=True)
        launches += [(launch, names), merge]
        parts = max(parts, cut.slots * config.tile)
    if overlap:  # merged in the end: the passes overlap
        launches.sort(key=lambda x: x[0].kernel is merge_kernel)
    return passes, launches, {**parts_workspace(math.prod(shape[:2]) * parts, shape[3]), "counters": counters}


def dq(call: CallLayout) -> tuple[DevicePasses, Launches, dict[str, int]]:
    """Fills dq and, for dk and dv, lse2 (lse in base 2) and delta (Σ do ∘ o − dlse).

    Returns the passes, their launches, and the workspace for the parts of split tiles and for counters.
    """
    task, parts, query_offset = call.task, 0, (call.task.start, call.task.step)
    config = config_of(call, "hopper_dq")
    passes, launched, counters = launched_passes(call, config, False)
    launches: Launches = []
    at_a_time = programs_at_a_time(config, call.device)
    for nth, (step, tensors) in enumerate(launched):
        (b, h, n, d), k = tensors[0].shape, tensors[1]
        in_flight = heads_at_a_time(step.work, b * h, k, at_a_time)
        cut = split_work(step.work, in_flight, at_a_time, multiple=2, backwards=nth % 2 == 0 and not counters)
        launch = _launch(
            hopper_dq, config, call, step, cut, (*tensors, contiguous(b, h, n, d)), (h, b * h, in_flight),
            h // k.shape[1], n, *query_offset, task.scale, *task.factors,
            HAS_DLSE=call.has_dlse, WAITS_AT_END=passes.overlap and nth > 0,
        )  # fmt: skip
        results = "lse2", "delta", "dq", "counters" if counters else "part"
        names = "q", "k", "v", "o", "do", "lse", "dlse", *results, "lengths", *cut.tables
        out, width = contiguous(*call.tensors[0].shape), padded(d)
        total = sum_parts(out, (0, width), step, cut.joins, config, query_offset)
        launches += [(launch, names), (total, ("dq", "part", cut.joins))]
        parts = max(parts, cut.slots * b * h * config.tile * width)
    return passes, launches, {"part": parts, "counters": counters}


def dkv(call: CallLayout) -> tuple[DevicePasses, Launches, dict[str, int]]:
    """Fills dk and dv. Returns the passes, their launches, and the workspace as `dq` does.

    Split tiles come first, unless a pass continues from an earlier one: the next launch adds up their parts if it
    can, otherwise a separate launch does.
    """
    (rows, h_kv, m, d), task = call.tensors[1].shape, call.task
    group, config = call.tensors[0].shape[1] // h_kv, config_of(call, "hopper_dkv")
    at_a_time = programs_at_a_time(config, call.device)
    passes, launched, counters = launched_passes(call, config, True)
    if not passes.accumulate:
        launched.sort(key=lambda x: not x[0].work.split)
    added = [False, *(_adds(x, y) for (x, _), (y, _) in pairwise(launched)), False]
    both = contiguous(2 * rows, h_kv, m, d)  # dk and dv as heads of twice the batch
    launches: Launches = []
    workspace = {"counters_of_keys": counters}
    # A launch without parts and counters is given a buffer that it does not read.
    part = "counters_of_keys" if counters else "delta"
    before: Any = None  # the previous pass, and which parts it left
    for nth, (step, (q, k, v, _, do)) in enumerate(launched):
        (b, heads, *_), adds = k.shape, added[nth]
        short = b * heads * group * step.work.sizes.sum() <= SHORT_RUN * at_a_time
        share = 0.0 if step.work.split or counters or short else DYNAMIC_SHARE
        backwards = step.accumulates and nth % 2 == 1
        in_flight = heads_at_a_time(step.work, b * heads, q, at_a_time)
        cut = split_work(step.work, in_flight, at_a_time, group, 2, share, backwards)
        launch = _launch(
            hopper_dkv, config, call, step, cut, (q, k, v, do, contiguous(*k.shape)), (heads, b * heads, in_flight),
            q.shape[2], len(before[1]) if adds else 0, rows * h_kv, m, task.scale, *task.factors,
            WAITS=nth == 0 or step.accumulates, GROUP=group, ADDS=adds, adds=keep(before[0].keep) if adds else None,
        )  # fmt: skip
        if cut.slots:
            part = f"part{nth}"
            workspace[part] = cut.slots * 2 * rows * h_kv * config.tile * padded(d)
        tables = replace(cut, slot=before[1]).tables if adds else cut.tables
        launches.append(
            (launch, ("q", "k", "v", "do", "lse2", "delta", "dk", "dv", part, "lengths", *tables))
        )
        if cut.slots and not added[nth + 1]:
            total = sum_parts(both, (0, padded(d)), step, cut.joins, config, (0, 1))
            launches.append((total, ("dk", part, cut.joins)))
        before = step, cut.joins
    return passes, launches, workspace


def _adds(before: DevicePass, step: DevicePass) -> bool:
    """Whether `step` adds up the parts that the previous one has left: it has no parts of its own, and neither of the
    two continues from earlier results."""
    return before.work.split and not (step.work.split or step.accumulates or before.accumulates)
