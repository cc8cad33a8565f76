"""The Hopper kernels, prepared for one call: which calls they can run, and what each is launched with."""

import math
from typing import Any

import torch
from torch import Tensor

from .... import compat
from ..call import CallLayout, base2, contiguous, exceeds_int32
from ..configs import Config
from ..prepared import Launch, Program
from ..schedule import DevicePass, DevicePasses
from ..triton.backward import sum_kernel
from ..triton.launches import SLICE, Backward, Launches
from ..triton.launches import passes as general_passes
from ..work_split import WorkSplit, flatten_heads, split_work

WIDTHS = (64, 128)  # head widths that the kernels take
DYNAMIC_SHARE = (
    0.1  # of the work, kept for programs that finish early: those that share a multiprocessor differ in speed
)


def is_hopper(device: torch.device) -> bool:
    """Whether the kernels run on this device: compute capability 9, and a Triton that has Gluon."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return hopper and compat.has_gluon()


def passes(call: CallLayout, config: Config | None, by_keys: bool) -> DevicePasses | None:
    """The passes of the plan where the Hopper kernels can run them; else None.

    They need 16-bit types, one head width for all, no bias, dropout or lengths, and no pass that goes on from an
    earlier one. By queries no tile may be split or be without a key. The scale may not be negative, because the
    largest score is scaled last.
    """
    task, d = call.task, call.tensors[0].shape[-1]
    if config is None or call.has_lengths or not task.plain or task.scale < 0 or call.dtype.itemsize != 2:
        return None
    if d not in WIDTHS or exceeds_int32(*call.tensors):
        return None
    if any(x.shape[-1] != d or not x.aligned or any(s % 8 for s in x.strides) for x in call.tensors):
        return None
    if not is_hopper(call.device):
        return None
    route = general_passes(call, config, by_keys)
    simple = all(not (s.accumulates or s.work.empty or (s.work.slots and not by_keys)) for s in route.steps)
    return route if simple else None


def programs_per_multiprocessor(config: Config) -> int:
    """By their registers."""
    return 65536 // (32 * config.warps * (config.registers or 255))


def programs_at_a_time(config: Config, device: torch.device) -> int:
    return (
        programs_per_multiprocessor(config) * torch.cuda.get_device_properties(device).multi_processor_count
    )


def _kept(step: DevicePass) -> Any:
    """Which members' results a pass writes, as a function for the kernels; None: all."""
    from .forward import keep  # Gluon is imported only where there is a Hopper GPU

    return None if step.keep_pattern is None else keep(step.keep_pattern)


def _sizes(step: DevicePass, config: Config, d: int, dtype: torch.dtype) -> dict[str, Any]:
    from .forward import layouts, tests

    return {
        **tests(step.work.pattern),
        "keep": _kept(step),
        "MARKS": step.work.marks,
        "R": config.tile,
        "D": d,
        "SEGMENTS": step.work.segments,
        **layouts(config.block, d, config.warps, dtype),
    }


def forward(call: CallLayout) -> tuple[DevicePasses, Program] | None:
    """Fills o and lse; None where these kernels cannot run the call."""
    route = passes(call, call.task.configs.hopper_forward, False)
    if route is None:
        return None
    from .forward import hopper_forward

    flat, (q, k, v) = flatten_heads(route, call.task.step, call.tensors)
    task, (b, h, n, d), h_kv = call.task, q.shape, k.shape[1]
    config: Any = task.configs.hopper_forward
    launches: Launches = []
    for step in flat.steps:
        cut = split_work(
            step.work, b * h, programs_at_a_time(config, call.device), dynamic_share=DYNAMIC_SHARE
        )
        launch = Launch(
            hopper_forward, len(cut.chunks) * b * h, config,
            *q.strides, *k.strides, *v.strides, *contiguous(b, h, n, d).strides,
            h, b * h, h // h_kv, n, task.start, task.step, base2(task.scale),
            below=step.work.free[0], above=step.work.free[1], **_sizes(step, config, d, call.dtype),
        )  # fmt: skip
        launches.append((launch, ("q", "k", "v", "o", "lse", cut.chunks, cut.blocks)))
    return route, Program(("q", "k", "v", "o", "lse"), launches, {}, call.device)


def backward(call: CallLayout) -> Backward | None:
    """Fills dq, dk and dv; None where these kernels cannot run the call."""
    by_queries = passes(call, call.task.configs.hopper_dq, False)
    by_keys = passes(call, call.task.configs.hopper_dkv, True)
    if by_queries is None or by_keys is None:
        return None
    q, k, dtype, device = call.tensors[0].shape, call.tensors[1].shape, call.dtype, call.device
    for_keys, parts = dkv(call, by_keys)
    rows = math.prod(q[:3])
    workspace = {"lse2": rows, "delta": rows} | parts
    make = torch.empty if by_queries.covers and by_keys.covers else torch.zeros
    inputs = "q", "k", "v", "o", "do", "lse", *call.optional_inputs, "dq", "dk", "dv"
    program = Program(inputs, dq(call, by_queries) + for_keys, workspace, device, zeroed=make is torch.zeros)

    def outputs(_: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """dk and dv are halves of one tensor, so that one launch adds up the parts of both."""
        if q == k:
            return make((3, *q), dtype=dtype, device=device).unbind(0)
        return make(q, dtype=dtype, device=device), *make((2, *k), dtype=dtype, device=device).unbind(0)

    return Backward(outputs, program)


def dq(call: CallLayout, route: DevicePasses) -> Launches:
    """Fills dq and, for dk and dv, lse2 (lse in base 2) and delta (Σ do ∘ o − dlse)."""
    from .backward import hopper_dq

    route, (q, k, v, o, do) = flatten_heads(route, call.task.step, call.tensors)
    task, (b, h, n, d), h_kv = call.task, q.shape, k.shape[1]
    config: Any = task.configs.hopper_dq
    dlse = "dlse" if call.has_dlse else "lse"
    launches: Launches = []
    for step in route.steps:
        cut = split_work(
            step.work, b * h, programs_at_a_time(config, call.device), multiple=2, backwards=True
        )
        launch = Launch(
            hopper_dq, len(cut.chunks) * b * h, config,
            *q.strides, *k.strides, *v.strides, *o.strides, *do.strides, *contiguous(b, h, n, d).strides,
            h, b * h, h // h_kv, n, task.start, task.step, task.scale, base2(task.scale),
            early=True, HAS_DLSE=call.has_dlse, **_sizes(step, config, d, call.dtype),
        )  # fmt: skip
        names = "q", "k", "v", "o", "do", "lse", dlse, "lse2", "delta", "dq", cut.chunks, cut.blocks
        launches.append((launch, names))
    return launches


def dkv(call: CallLayout, route: DevicePasses) -> tuple[Launches, dict[str, int]]:
    """Fills dk and dv; also the workspace for the parts of split tiles.

    Split tiles come first: the next launch adds up their parts if it can, else a launch at the end does.
    """
    b, h_kv, m, d = call.tensors[1].shape
    config: Any = call.task.configs.hopper_dkv
    both = contiguous(2 * b, h_kv, m, d)  # dk and dv as heads of twice the batch
    steps = sorted(route.steps, key=lambda x: not x.work.slots)
    launches: Launches = []
    sums: Launches = []
    workspace: dict[str, int] = {}
    part, before = "delta", None  # a launch without parts is given a buffer that it does not read
    for nth, step in enumerate(steps):
        adds = before if _adds(steps, nth) else None
        cut, launch = _by_keys(call, step, adds, waits=nth == 0)
        if cut.slots:
            part = f"part{nth}"
            workspace[part] = cut.slots * 2 * b * h_kv * config.tile * d
        slots = cut.slot if adds is None else adds[1]
        names = "q", "k", "v", "do", "lse2", "delta", "dk", "dv", part, cut.chunks, cut.blocks, slots
        launches.append((launch, names))
        if cut.slots and not _adds(steps, nth + 1):
            total = Launch(
                sum_kernel, len(cut.joins) * 2 * b * h_kv * (config.tile // SLICE), config,
                *both.strides, h_kv, 2 * b * h_kv, 0, 1, 0, keep=step.keep, R=config.tile, SLICE=SLICE,
                d=d, D=d, PART_WIDTH=d, ACCUMULATES=False, WIDE=exceeds_int32(both),
            )  # fmt: skip
            sums.append((total, ("dk", part, cut.joins)))
        before = step, cut.joins
    return launches + sums, workspace


def _adds(steps: list[DevicePass], at: int) -> bool:
    """Whether step `at` adds up what the one before has left in parts: it has programs, and no parts of its own."""
    if not 0 < at < len(steps):
        return False
    before, work = steps[at - 1].work, steps[at].work
    return before.slots > 0 and not work.slots and len(work.ends) > 0


def _by_keys(
    call: CallLayout, step: DevicePass, left: tuple[DevicePass, Tensor] | None, waits: bool
) -> tuple[WorkSplit, Launch]:
    """The launch of one pass of dk and dv; left: the pass before and its joins, if this one adds up its parts.

    Where programs share tiles, heads are not flattened into one, so that programs of a head read the same rows at
    the same time.
    """
    from .backward import hopper_dkv

    layouts, task = call.tensors, call.task
    h, (rows, h_kv, m) = layouts[0].shape[1], layouts[1].shape[:3]
    config: Any = task.configs.hopper_dkv
    whole = not step.work.slots
    if whole:
        flat, layouts = flatten_heads(DevicePasses((step,), True), task.step, layouts)
        (step,) = flat.steps
    q, k, v, _, do = layouts
    (b, heads, _, d), group = k.shape, h // h_kv
    at_a_time = programs_at_a_time(config, call.device)
    cut = split_work(step.work, b * heads, at_a_time, group, 2, DYNAMIC_SHARE if whole else 0.0)
    launch = Launch(
        hopper_dkv, len(cut.chunks) * b * heads, config,
        *q.strides, *k.strides, *v.strides, *do.strides, *contiguous(*k.shape).strides, heads, b * heads, q.shape[2],
        0 if left is None else len(left[1]), rows * h_kv, m, task.start, task.step, task.scale, base2(task.scale),
        early=True, WAITS=waits, GROUP=group, SPLIT=cut.slots > 0, ADDS=left is not None,
        adds=None if left is None else _kept(left[0]), **_sizes(step, config, d, call.dtype),
    )  # fmt: skip
    return cut, launch
