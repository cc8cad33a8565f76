"""Calls of the streaming kernels (Gluon, Hopper), prepared once: where they can go, and what they are given."""

import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..configs import Config
from ..prepared import Launch, Layout, dense, wide
from ..schedule import Route, Step, route
from ..triton.backward import sum_kernel
from ..triton.bias_and_dropout import base2
from ..work_split import Shares, end_to_end, shares

STREAMED = (64, 128)  # widths of heads that the streaming kernels take
LATE = 0.1  # left for programs that are through early: sharing a multiprocessor, some are slower
SLICE = 4  # members that one program of an ordered sum adds up: few, as it waits for memory most of the time


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def stream_route(
    task: Any,
    config: Config | None,
    by_keys: bool,
    given: tuple[Layout, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Route | None:
    """The route of a streaming kernel where it can go it: no pass that goes on, Hopper, 16 bits, one width.

    By queries no tile may be split, nor be without a key. No scale may be below 0: the largest score is scaled last.
    """
    (q, k), d = given[:2], given[0].shape[-1]
    if config is None or task.adds or task.scale < 0 or dtype.itemsize != 2:
        return None
    if d not in STREAMED or wide(*given):
        return None
    if any(x.shape[-1] != d or not x.aligned or any(s % 8 for s in x.steps) for x in given):
        return None
    if not is_hopper(device):
        return None
    way = route(task.pattern, q.shape[2], k.shape[2], task.start, task.step, config, by_keys, device)
    simple = all(not (s.goes_on or s.work.empty or (s.work.slots and not by_keys)) for s in way.steps)
    return way if simple else None


def side_by_side(config: Config) -> int:
    """Programs that share a multiprocessor, by their registers."""
    return 65536 // (32 * config.warps * (config.registers or 255))


def at_a_time(config: Config, device: torch.device) -> int:
    """Programs that run at a time."""
    return side_by_side(config) * torch.cuda.get_device_properties(device).multi_processor_count


def _kept(step: Step) -> Any:
    """Which members' results this step writes, for the kernels; None: all."""
    from . import forward as hopper  # Gluon is imported where there is a Hopper GPU

    return None if step.kept is None else hopper.keep(step.kept)


def _sizes(step: Step, config: Config, d: int, dtype: torch.dtype) -> dict[str, Any]:
    from . import forward as hopper

    return {
        **hopper.tests(step.work.pattern),
        "keep": _kept(step),
        "MARKS": step.work.marks,
        "R": config.tile,
        "D": d,
        "SEGMENTS": step.work.segments,
        **hopper.layouts(config.block, d, config.warps, dtype),
    }


def forward_stream(
    task: Any, way: Route, q: Layout, k: Layout, v: Layout, dtype: torch.dtype, device: torch.device
) -> Callable[..., tuple[Tensor, Tensor]]:
    """(q, k, v, limits, added, spare) → (o, lse); a spare tensor takes an lse that nobody wants."""
    from . import forward as hopper

    alike, like = q == dense(*q.shape), torch.empty_like
    rows = torch.empty(q.shape[:3], device=device)
    rows.untyped_storage().resize_(0)  # a shape without memory: 6 µs by `like`, 9 by `empty`
    way, (q, k, v) = end_to_end(way, task.step, (q, k, v))
    (b, h, n, d), h_kv, config = q.shape, k.shape[1], task.configs.stream
    launches = []
    for step in way.steps:
        cut = shares(step.work, b * h, at_a_time(config, device), late=LATE)
        launch = Launch(
            hopper.stream_kernel, len(cut.chunks) * b * h, config,
            *q.steps, *k.steps, *v.steps, *dense(b, h, n, d).steps,
            h, b * h, h // h_kv, n, task.start, task.step, base2(task.scale),
            tables=(cut.chunks, cut.blocks), below=step.work.free[0], above=step.work.free[1],
            **_sizes(step, config, d, dtype),
        )  # fmt: skip
        launches.append(launch)

    def call(
        q: Tensor, k: Tensor, v: Tensor, limits: Tensor | None, added: Any, spare: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if way.covers:
            o = like(q) if alike else torch.empty(q.shape, dtype=dtype, device=device)
            lse = like(rows) if spare is None else spare
        else:
            o = torch.zeros(q.shape, dtype=dtype, device=device)
            lse = torch.full(q.shape[:3], -torch.inf, device=device)
        for launch in launches:
            launch.tensors(q, k, v, o, lse)
        return o, lse

    return call


def backward_stream(
    task: Any, given: tuple[Layout, ...], dtype: torch.dtype, device: torch.device, dlse: bool
) -> Callable[..., tuple[Tensor, Tensor, Tensor, None, None]] | None:
    """(q, k, v, o, do, lse, dlse, limits, added) → dq, dk, dv, None, None; None where they cannot be streams."""
    by_queries = stream_route(task, task.configs.stream_dq, False, given, dtype, device)
    by_keys = stream_route(task, task.configs.stream_dkv, True, given, dtype, device)
    if by_queries is None or by_keys is None:
        return None
    fill_queries = dq_call(task, by_queries, given, dtype, device, dlse)
    fill_keys, parts = dkv_call(task, by_keys, given, dtype, device)
    make = torch.empty if by_queries.covers and by_keys.covers else torch.zeros
    (of_q, of_k), alike = (x.shape for x in given[:2]), given[0].shape == given[1].shape
    # Each piece of the room begins at a multiple of 16 bytes.
    rows = -(-math.prod(of_q[:3]) // 4) * 4
    pieces = [rows, rows, *parts]
    size = sum(pieces)
    begins = [4 * x for x in accumulate([0, *pieces[:-1]])]
    compiled = False

    def call(q, k, v, o, do, lse, dlse, limits, added):
        nonlocal compiled
        if alike:
            dq, dk, dv = make((3, *of_q), dtype=dtype, device=device).unbind(0)
        else:
            dq = make(of_q, dtype=dtype, device=device)
            dk, dv = make((2, *of_k), dtype=dtype, device=device).unbind(0)
        room = make(size, device=device)
        at: list[Any] = [q, k, v, o, do, lse, lse if dlse is None else dlse, dq, dk, dv]
        if compiled:  # addresses will do, each looked up once: a tensor for each piece would take longer
            at, first = [x.data_ptr() for x in at], room.data_ptr()
            lse2, delta, *part = [first + x for x in begins]
        else:
            lse2, delta, *part = room.split(pieces)
        fill_queries(*at[:7], lse2, delta, at[7])
        fill_keys(*at[:3], at[4], lse2, delta, *at[8:], part)
        compiled = True
        return dq, dk, dv, None, None

    return call


def dq_call(
    task: Any, way: Route, given: tuple[Layout, ...], dtype: torch.dtype, device: torch.device, has_dlse: bool
) -> Callable[..., None]:
    """(q, k, v, o, do, lse, dlse, lse2, delta, dq): fills the last three; lse in base 2, Σ do ∘ o − dlse."""
    from . import backward as hopper_backward

    way, (q, k, v, o, do) = end_to_end(way, task.step, given)
    (b, h, n, d), h_kv, config = q.shape, k.shape[1], task.configs.stream_dq
    launches = []
    for step in way.steps:
        cut = shares(step.work, b * h, at_a_time(config, device), multiple=2, backwards=True)
        launch = Launch(
            hopper_backward.dq_stream, len(cut.chunks) * b * h, config,
            *q.steps, *k.steps, *v.steps, *o.steps, *do.steps, *dense(b, h, n, d).steps,
            h, b * h, h // h_kv, n, task.start, task.step, task.scale, base2(task.scale),
            tables=(cut.chunks, cut.blocks), early=True, HAS_DLSE=has_dlse, **_sizes(step, config, d, dtype),
        )  # fmt: skip
        launches.append(launch)

    def call(*given: Tensor | int) -> None:
        for launch in launches:
            launch(*given)

    return call


def dkv_call(
    task: Any, way: Route, given: tuple[Layout, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Callable[..., None], list[int]]:
    """(q, k, v, do, lse2, delta, dk, dv, parts): fills dk and dv, the halves of one tensor, so that one launch adds
    up both; and how many numbers each of the parts has room for."""
    (b, h_kv, m, d), config = given[1].shape, task.configs.stream_dkv
    twice = dense(2 * b, h_kv, m, d)
    steps = sorted(way.steps, key=lambda x: not x.work.slots)  # parts first: who comes next adds them up
    cuts: list[Shares] = []
    launches: list[tuple[Launch, Launch | None]] = []
    for at, step in enumerate(steps):
        left = (steps[at - 1], cuts[-1].joins) if _adds(steps, at) else None
        cut, first = _by_keys(task, step, left, given, dtype, device, waits=not at)
        then = None
        if cut.slots and not _adds(steps, at + 1):
            then = Launch(  # of dk and dv at once: as heads of twice the batch
                sum_kernel, len(cut.joins) * 2 * b * h_kv * (config.tile // SLICE), config,
                *twice.steps, h_kv, 2 * b * h_kv, 0, 1, 0, tables=(cut.joins,),
                keep=step.keep, R=config.tile, SLICE=SLICE, d=d, D=d, PART_WIDTH=d, GOES_ON=False, WIDE=wide(twice),
            )  # fmt: skip
        cuts.append(cut)
        launches.append((first, then))

    def call(q, k, v, do, lse2, delta, dk, dv, parts):
        rest, part, sums = iter(parts), delta, []
        for cut, (first, then) in zip(cuts, launches):  # without a pause
            part = next(rest) if cut.slots else part
            first(q, k, v, do, lse2, delta, dk, dv, part)
            if then is not None:
                sums.append((then, part))
        for then, part in sums:
            then(dk, part)

    return call, [cut.slots * 2 * b * h_kv * config.tile * d for cut in cuts if cut.slots]


def _adds(steps: list[Step], at: int) -> bool:
    """Whether step `at` adds up what the one before has left in parts: it has programs, and no parts of its own."""
    if not 0 < at < len(steps):
        return False
    before, work = steps[at - 1].work, steps[at].work
    return before.slots > 0 and not work.slots and len(work.ends) > 0


def _by_keys(
    task: Any,
    step: Step,
    left: tuple[Step, Tensor] | None,
    given: tuple[Layout, ...],
    dtype: torch.dtype,
    device: torch.device,
    waits: bool,
) -> tuple[Shares, Launch]:
    """The launch of one step of dk and dv; left: the step before and its joins, if this one is to add up its parts.

    Where programs share tiles, each head is apart, so that they read the same rows at one time.
    """
    from . import backward as hopper_backward

    h, (rows, h_kv, m) = given[0].shape[1], given[1].shape[:3]
    whole, config = not step.work.slots, task.configs.stream_dkv
    if whole:
        together, given = end_to_end(Route((step,), True), task.step, given)
        (step,) = together.steps
    q, k, v, _, do = given
    (b, heads, _, d), group = k.shape, h // h_kv
    cut = shares(step.work, b * heads, at_a_time(config, device), group, 2, LATE if whole else 0.0)
    launch = Launch(
        hopper_backward.dkv_stream, len(cut.chunks) * b * heads, config,
        *q.steps, *k.steps, *v.steps, *do.steps, *dense(*k.shape).steps, heads, b * heads, q.shape[2],
        0 if left is None else len(left[1]), rows * h_kv, m, task.start, task.step, task.scale,
        base2(task.scale), tables=(cut.chunks, cut.blocks, cut.slot if left is None else left[1]), early=True,
        WAITS=waits, GROUP=group, SPLIT=cut.slots > 0, ADDS=left is not None,
        adds=None if left is None else _kept(left[0]), **_sizes(step, config, d, dtype),
    )  # fmt: skip
    return cut, launch
