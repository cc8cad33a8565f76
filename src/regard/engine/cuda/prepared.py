"""Prepared launches: what depends on shapes, strides and pattern is computed once; a repeated call only launches.

One bounded cache, shared by all threads, holds every prepared call.
"""

import os
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from operator import itemgetter
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ... import compat
from ..call import NO_SEED, Cache
from .call import OPTIONAL_INPUTS, Config

# Bound to names of this module: on the path of a launch every attribute lookup counts.
_address = Tensor.data_ptr
current_device, raw_stream = compat.current_device, compat.raw_stream
_is_capturing = compat.stream_is_capturing
hooks_set = compat.triton_hooks()

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

PREPARED = Cache(1024)
# Compiled kernels by what they are compiled for. Launches that differ in their tables and the number of programs, as
# those of new ids, share one: Triton would take longer to find it than to launch it.
COMPILED = Cache(1024)


@lru_cache(maxsize=256, typed=True)
def constants(size: Any) -> Any:
    """What a kernel is compiled for, as Triton 3.6 needs it: each field of a NamedTuple is a constant of its own."""
    if INTERPRETED or not isinstance(size, tuple):
        return size
    return type(size)(*(x if x is None or callable(x) else tl.constexpr(x) for x in size))


class Launch:
    """A kernel and its constant arguments; the arguments of a call are tensors and the seed of dropout.

    early: its programs may start before the previous kernel has ended, and wait for it themselves (Hopper).
    cooperative: its programs wait for one another, so all of them must run at the same time.
    """

    def __init__(
        self, kernel: Any, programs: int, config: Config, *numbers: Any,
        early: bool = False, cooperative: bool = False, **sizes: Any,
    ):  # fmt: skip
        self.kernel, self.grid, self.numbers = kernel, (programs, 1, 1), numbers
        self.key = id(kernel), config, early, cooperative, numbers, tuple(sizes.items())
        self.sizes = {name: constants(x) for name, x in sizes.items()}
        # Fused multiply-add. Triton 3.9 warns where this is not stated; 3.10 will not fuse by default.
        self.options = {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True}
        more = {"launch_pdl": early, "launch_cooperative_grid": cooperative, "maxnreg": config.registers}
        self.options |= {name: value for name, value in more.items() if value}
        self.compiled: Any = None  # the kernel, after the first launch
        self.run: Any = None
        self.handles: tuple[Any, ...] = ()
        self.constant_arguments: tuple[Any, ...] = ()

    def __call__(self, *arguments: Tensor | int) -> None:
        """Launch through Triton; the first time, compile for these tensors."""
        if self.compiled is None:
            tensors = (x for x in arguments if isinstance(x, Tensor))
            key = *self.key, *((x.dtype, x.device, x.data_ptr() % 16) for x in tensors)
            if (cached := COMPILED.get(key)) is None:
                self._compile(arguments)
                if self.compiled is not None:  # the interpreter compiles nothing
                    COMPILED.put(key, (self.compiled, self.run, self.handles, self.constant_arguments))
                return
            self.compiled, self.run, self.handles, self.constant_arguments = cached
        self.compiled[self.grid](*arguments, *self.constant_arguments)

    def _compile(self, arguments: tuple[Tensor | int, ...]) -> None:
        compiled = self.kernel[self.grid](*arguments, *self.numbers, **self.sizes, **self.options)
        if compiled is not None:
            names = self.kernel.arg_names[len(arguments) + len(self.numbers) :]
            sizes = {**self.sizes, **self.options}
            self.constant_arguments = *self.numbers, *(sizes[name] for name in names)
            self.run, other_handles = compat.triton_launcher(compiled.run)
            self.handles = compiled.function, *other_handles, compiled.packed_metadata, None, None, None
            self.compiled = compiled


# Of a launch: names of inputs, outputs and pieces of the workspace; then tables (tensors) of its own.
Arguments = tuple[Any, ...]


class Program:
    """The launches of one call, in order, and the workspace that they share.

    inputs: names of the tensors that are passed to `run`; "seed" is the name of its number. workspace: the number of
    float32 values of each buffer. For an empty buffer and an optional input that the call does not have, lse is
    passed, and not read. Once compiled, launches are called with addresses, each looked up once: for a tensor, Triton
    would ask the driver for its address, and creating tensors for the buffers would take longer.
    """

    def __init__(
        self, inputs: Sequence[Any], launches: Sequence[tuple[Launch, Arguments]],
        workspace: dict[str, int], device: torch.device, zeroed: bool = False,
    ):  # fmt: skip
        pieces = {name: size for name, size in workspace.items() if size}
        index = {name: place for place, name in enumerate([*inputs, "seed", *pieces])}
        absent = (name for name in (*OPTIONAL_INPUTS, *workspace) if name not in index)
        index |= dict.fromkeys(absent, index.get("lse", 0))
        self.launches: list[tuple[Launch, Any, Arguments]] = []
        for launch, names in launches:
            indices = [index[x] for x in names if not isinstance(x, Tensor)]
            if launch.grid[0]:
                self.launches.append((launch, itemgetter(*indices), names[len(indices) :]))
        self.pieces = [-(-size // 4) * 4 for size in pieces.values()]  # from multiples of 16 bytes on
        self.size, self.on_gpu = sum(self.pieces), device.type == "cuda"
        self.make = partial(torch.zeros if zeroed else torch.empty, dtype=torch.float32, device=device)
        self.offsets = [4 * x for x in accumulate([0, *self.pieces[:-1]])]
        self.direct: list[tuple[Any, ...]] = []  # what to launch with addresses, once all is compiled

    def run(self, tensors: Sequence[Tensor], seed: int = NO_SEED, numbers: tuple[Any, ...] = ()) -> None:
        """numbers: of the first launch, instead of its own; it has no tables, and its kernel is compiled for both."""
        if self.on_gpu and _is_capturing():
            REPLAYED.add(self)
        if not self.direct or hooks_set():
            assert not numbers
            self._through_triton(tensors, seed)
            return
        addresses = [*map(_address, tensors), seed]
        if self.size:
            workspace = self.make(self.size)
            base = workspace.data_ptr()
            addresses += [base + x for x in self.offsets]
        stream = raw_stream(current_device())
        for run, grid, handles, pick, others in self.direct:
            if numbers:
                others, numbers = (*numbers, *others[len(numbers) :]), ()
            run(*grid, stream, *handles, *pick(addresses), *others)

    def _through_triton(self, tensors: Sequence[Tensor], seed: int) -> None:
        pieces = self.make(self.size).split(self.pieces) if self.size else ()
        buffers = [*tensors, seed, *pieces]
        for launch, pick, tables in self.launches:
            launch(*pick(buffers), *tables)
        if all(launch.compiled is not None for launch, _, _ in self.launches):
            self.direct = [
                (x.run, x.grid, x.handles, pick, (*(y.data_ptr() for y in tables), *x.constant_arguments))
                for x, pick, tables in self.launches
            ]


REPLAYED: set[Program] = set()  # by CUDA graphs, which refer to their tables: these are kept for good

# A prepared backward pass: (q, k, v, …) → dq, dk, dv, to be filled; and what fills them.
Backward = tuple[Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]], Program]
