"""One kernel and all that is known before its tensors; how those tensors lie in memory."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs

from .configs import Config

# Looked up once: on the way to a launch every name behind a dot counts. PyTorch without CUDA lacks the last two.
_address = Tensor.data_ptr
_device = getattr(torch._C, "_cuda_getDevice", None)
_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Layout(NamedTuple):
    """How a tensor lies in memory; aligned: to 16 bytes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    aligned: bool

    @property
    def steps(self) -> tuple[int, ...]:
        """Strides of batch, head and row."""
        return self.stride[:3]


def layout(x: Tensor) -> Layout:
    return Layout(x.shape, x.stride(), x.data_ptr() % 16 == 0)


def dense(*shape: int) -> Layout:
    _, h, n, d = shape
    return Layout(shape, (h * n * d, n * d, d, 1), True)


def wide(*tensors: Layout) -> bool:
    """Whether an offset within one head can pass 2³¹."""
    return any(x.shape[2] * x.stride[2] >= 2**31 for x in tensors)


class Launch:
    """A kernel with all its arguments but the first: the tensors, and the seed of dropout where it takes one.

    Tables are tensors that are the same in every call, and come after those that are not. early: its programs may
    begin as soon as there is room for them, and wait themselves for what was launched before (Hopper).
    """

    def __init__(
        self, kernel: Any, programs: int, config: Config, *numbers: Any, tables: tuple[Tensor, ...] = (),
        early: bool = False, **sizes: Any
    ):  # fmt: skip
        self.kernel, self.grid = kernel, (programs, 1, 1)
        self.tables, self.numbers, self.sizes = tables, numbers, sizes
        # Fused: a product and a sum as one operation. Triton 3.9 warns where it is not said, 3.10 will not fuse.
        self.options = {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True}
        if early:
            self.options["launch_pdl"] = True
        if config.registers is not None:
            self.options["maxnreg"] = config.registers
        self.ready: Any = None  # the compiled kernel, after the first call: from then on nothing is looked up
        self.rest: tuple[Any, ...] = ()
        self.handles: tuple[Any, ...] = ()
        self.run: Any = None

    def __call__(self, *given: Tensor | int) -> None:
        if self.ready is not None:
            self._again(*given)
        elif self.grid[0]:
            known = *self.tables, *self.numbers
            self.ready = self.kernel[self.grid](*given, *known, **self.sizes, **self.options)
            if self.ready is not None:  # not under the interpreter
                names = self.kernel.arg_names[len(given) + len(known) :]
                sizes = {**self.sizes, **self.options}
                self.rest = (
                    *(x.data_ptr() for x in self.tables),
                    *self.numbers,
                    *(sizes[name] for name in names),
                )
                self.run, more = _launcher(self.ready.run)
                self.handles = (self.ready.function, *more, self.ready.packed_metadata, None, None, None)

    def _again(self, *given: Tensor | int) -> None:
        """As Triton launches a compiled kernel, without its hooks where nobody has set one.

        It is given addresses: of a tensor, Triton would ask the driver for the address, one call each.
        """
        if _hooked():
            self.ready[self.grid](*given, *self.rest)
        else:
            at = [x if type(x) is int else x.data_ptr() for x in given]  # type: ignore[union-attr]
            self.run(*self.grid, _stream(_device()), *self.handles, *at, *self.rest)

    def tensors(self, *given: Tensor) -> None:
        """The same for tensors alone: none of them has to be looked at."""
        if self.ready is None or _hooked():
            self(*given)
        else:
            self.run(*self.grid, _stream(_device()), *self.handles, *map(_address, given), *self.rest)


def _launcher(run: Any) -> tuple[Any, tuple[Any, ...]]:
    """What launches, and what it is given before the metadata.

    In Triton 3.6 that is a function in C under a Python one, which only adds these four for kernels without scratch
    memory: a quarter of the time of a launch. In others, the Python one.
    """
    inner = getattr(run, "launch", None)
    plain = hasattr(run, "launch_pdl") and not hasattr(run, "arg_annotations")
    if inner is None or not plain or run.global_scratch_size or run.profile_scratch_size:
        return run, ()
    return inner, (run.launch_cooperative_grid, run.launch_pdl, None, None)


def _hooked() -> bool:
    runtime = knobs.runtime
    return _set(runtime.launch_enter_hook) or _set(runtime.launch_exit_hook)


def _set(hook: Any) -> bool:
    return bool(getattr(hook, "calls", hook))
