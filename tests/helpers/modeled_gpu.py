"""Calls as they are prepared for a Hopper GPU, where there is none."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch

from regard import compat
from regard.engine import attention as entry_point
from regard.engine.call import facts_of
from regard.engine.cuda import few_queries, host, launches, mask, prepared
from regard.engine.cuda.call import CallLayout, Layout, Task, contiguous, default
from regard.engine.cuda.hopper import launches as hopper
from regard.engine.cuda.hopper import static
from regard.pattern import Pattern


@dataclass(frozen=True)
class Case:
    """A call, and how many programs the modeled GPU runs at a time. heads_inside: (b, n, h, d) in memory."""

    pattern: Pattern
    n: int
    m: int = 0  # 0: as many as queries
    d: int = 64
    b: int = 1
    h: int = 1
    h_kv: int = 0  # 0: as many as query heads
    start: int = 0
    step: int = 1
    programs: int = 132
    heads_inside: bool = False

    @property
    def call(self) -> CallLayout:
        task = Task(
            self.pattern, self.start, self.step, 1.0, 0.0, None, default(self.d, self.d, torch.bfloat16)
        )
        q, k = self._layout(self.h, self.n), self._layout(self.h_kv or self.h, self.m or self.n)
        call = CallLayout(task, (q, k, k), torch.bfloat16, torch.device("cpu"))
        return call._replace(tensors=(q, k, k, call.output, call.output))

    def _layout(self, h: int, n: int) -> Layout:
        plain = contiguous(self.b, h, n, self.d)
        return plain._replace(stride=(n * h * self.d, self.d, h * self.d, 1)) if self.heads_inside else plain


class RecordedProgram(prepared.Program):
    """What would be launched."""

    def __init__(self, inputs, given, workspace, device, zeroed=False):
        self.launches = [x for x in given if x[0].grid[0]]
        self.workspace, self.zeroed = workspace, zeroed


class CountedProgram(prepared.Program):
    """Its launches do nothing."""

    def __init__(self, *given, **more):
        super().__init__(*given, **more)
        self.on_gpu = True
        self.direct = [(lambda *_: None, x.grid, (), pick, ()) for x, pick, _ in self.launches]


@contextmanager
def counting_gpu() -> Iterator[list[CountedProgram]]:
    """`attention` of CPU tensors as the host of a Hopper GPU runs it: programs are prepared, and listed, and their
    launches do nothing."""
    made: list[CountedProgram] = []

    def program(*given, **more) -> CountedProgram:
        made.append(CountedProgram(*given, **more))
        return made[-1]

    patches = [
        (entry_point, "facts_of", lambda call: replace(facts_of(call), device="cuda:0")),
        (torch.Tensor, "is_cuda", True),
        *((holder, "is_hopper", lambda device: True) for holder in (launches, few_queries)),
        *((holder, "Program", program) for holder in (launches, few_queries)),
        (few_queries, "multiprocessors", lambda device: 132),
        (hopper, "programs_at_a_time", lambda config, device: 132),
        (prepared, "constants", lambda sizes: sizes),
        (compat, "stream_is_capturing", lambda: False),
        *((holder, "_is_capturing", lambda: False) for holder in (host, prepared)),
        *((holder, "raw_stream", lambda device: 0) for holder in (host, prepared)),
        *((holder, "current_device", lambda: -1) for holder in (host, prepared)),
        (prepared, "hooks_set", lambda: False),
    ]
    with ExitStack() as stack:
        for holder, name, value in patches:
            stack.enter_context(mock.patch.object(holder, name, value))
        yield made


def numpy_function(prefix, arguments, body, *_, **__) -> Any:
    """In place of `mask.function`: the same text, run by NumPy."""
    return eval(f"lambda {arguments}: {body}", {"tl": np, "gl": np})


@contextmanager
def modeled_gpu(programs: int) -> Iterator[None]:
    """A Hopper GPU that runs so many programs at a time, for which nothing is compiled; empty tensors hold NaN."""
    patches = [
        (launches, "is_hopper", lambda device: True),
        (launches, "Program", RecordedProgram),
        (launches, "compiled", mask.compiled.__wrapped__),  # caches are left alone
        (hopper, "programs_at_a_time", lambda config, device: programs),
        (hopper, "CACHE", 1 << 18),  # so small that forward passes of short calls are chained too
        (hopper, "keep", static.keep.__wrapped__),
        (static, "keep", static.keep.__wrapped__),
        (static, "function", numpy_function),
        (mask, "function", numpy_function),
        (prepared, "constants", lambda sizes: sizes),
        (torch, "empty", lambda shape, **how: torch.full(shape, torch.nan, **how)),
        (torch, "empty_like", lambda x: torch.full_like(x, torch.nan)),
    ]
    with ExitStack() as stack:
        for holder, name, value in patches:
            stack.enter_context(mock.patch.object(holder, name, value))
        yield
