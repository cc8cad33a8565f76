"""Calls of the streaming kernels (Gluon, Hopper), prepared once: where they can go, and what they are given."""

import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .added import base2
from .backward import sum_kernel
from .configs import Config
from .launches import Launch, Layout, dense, wide
from .route import Route, route
from .shares import Shares, shares
from .together import end_to_end

STREAMED = (64, 128)  # widths of heads that the streaming kernels take
LATE = 0.1  # of a forward pass, left for programs that are through early: sharing a multiprocessor, some are slower
SLICE = 4  # members that one program of an ordered sum adds up: few, as it waits for memory most of the time


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
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
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


def _sizes(step: Any, config: Config, d: int, dtype: torch.dtype) -> dict[str, Any]:
    from . import hopper  # Gluon is imported where there is a Hopper GPU

    return {
        **hopper.tests(step.work.pattern),
        "keep": None if step.kept is None else hopper.keep(step.kept),
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
    from . import hopper

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
    from . import hopper_backward

    way, (q, k, v, o, do) = end_to_end(way, task.step, given)
    (b, h, n, d), h_kv, config = q.shape, k.shape[1], task.configs.stream_dq
    launches = []
    for step in way.steps:
        cut = shares(step.work, b * h, at_a_time(config, device), multiple=2)
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
    from . import hopper_backward

    q, k, v, _, do = given  # each head apart: the programs of one head read the same rows at one time
    (b, h, n, d), (h_kv, m), config = q.shape, k.shape[1:3], task.configs.stream_dkv
    like, twice = dense(b, h_kv, m, d), dense(2 * b, h_kv, m, d)
    launches: list[tuple[Shares, Launch, Launch]] = []
    for step in way.steps:
        cut = shares(step.work, b * h_kv, at_a_time(config, device), h // h_kv, multiple=2)
        first = Launch(
            hopper_backward.dkv_stream, len(cut.chunks) * b * h_kv, config,
            *q.steps, *k.steps, *v.steps, *do.steps, *like.steps,
            h_kv, b * h_kv, n, task.start, task.step, task.scale, base2(task.scale),
            tables=(cut.chunks, cut.blocks, cut.slot), early=True, WAITS=not launches, GROUP=h // h_kv,
            SPLIT=cut.slots > 0, **_sizes(step, config, d, dtype),
        )  # fmt: skip
        then = Launch(  # of dk and dv at once: as heads of twice the batch
            sum_kernel, len(cut.joins) * 2 * b * h_kv * (config.tile // SLICE), config,
            *twice.steps, h_kv, 2 * b * h_kv, 0, 1, 0, tables=(cut.joins,),
            keep=step.keep, R=config.tile, SLICE=SLICE, d=d, D=d, PART_WIDTH=d, GOES_ON=False, WIDE=wide(twice),
        )  # fmt: skip
        launches.append((cut, first, then))

    def call(q, k, v, do, lse2, delta, dk, dv, parts):
        rest, sums = iter(parts), []
        for cut, first, then in launches:  # without a pause: none needs what another has made
            part = next(rest) if cut.slots else delta
            first(q, k, v, do, lse2, delta, dk, dv, part)
            if cut.slots:
                sums.append((then, part))
        for then, part in sums:
            then(dk, part)

    return call, [cut.slots * 2 * b * h_kv * config.tile * d for cut, _, _ in launches if cut.slots]
