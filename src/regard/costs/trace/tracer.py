"""Tracing on meta tensors: every operation is counted and metered, and attributed to the module that called it.

Values that follow from constants and from real inputs (masks, positions, lengths) are computed as well, so that a
mask reduces the pairs and a module may branch on a value. Where a router chooses experts by values that are unknown,
the choice is taken to be balanced. Operations that cannot be counted are listed by name.
"""

import gc
import re
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, wraps
from threading import RLock
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from ... import compat
from ...compat import (
    DispatchMode,
    aten_operator,
    aten_operators,
    without_dispatch_modes,
    without_function_modes,
)
from ...errors import ShapeError
from ..tree import Amounts, Pairs
from . import autocast, data_dependent, kernels
from .attention import Gpu, Need, flex, sdpa
from .device import OnDevice, asked, dropout, rms_norm
from .engine import OWN_HANDLERS, traced_engine
from .meter import Meter
from .nested import map_leaves, tensors_in
from .patches import patched
from .products import has_no_product, product_flops

MAX_VALUE_ENTRIES = 1 << 24  # larger values are not computed
MAX_CONSTANT_ENTRIES = 1 << 20  # and larger constants neither
CONSTANTS = aten_operators("new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like")
COPIES = (aten_operator("_to_copy"), torch.ops.aten.clone)
STATE = ("zeros_like", "empty_like", "clone")  # by which the first step creates an optimizer's state
READ_SCALAR = aten_operator("_local_scalar_dense")
SDPA = F.scaled_dot_product_attention
_one_at_a_time = RLock()  # functions of PyTorch are replaced while a trace runs
LOWEST = torch.finfo(torch.float32).min / 2
HANDLERS = data_dependent.HANDLERS | OWN_HANDLERS


class Work(NamedTuple):
    """One operation, view or call of a module: what the host does, and the kernel it launches if any."""

    phase: str
    path: str
    kind: str  # operation, attention (PyTorch's), own (of this library), view, module
    flops: float = 0
    bytes: float = 0
    dtype: str = ""
    tensors: int = 0  # of the lists that an optimizer's operation updates at once
    again: bool = False  # part of the forward pass that a checkpoint repeats in the backward pass


class Trace(DispatchMode):
    """Amounts by module and operation, pairs of each attention, operations that were not counted, storages."""

    def __init__(self, device: str = "cpu", gpu: Gpu | None = None):
        super().__init__()
        self.device, self.gpu = device, gpu or Gpu()
        self.amounts: dict[tuple[str, str], Amounts] = {}
        self.pairs: list[Pairs] = []
        self.unknown: Counter[str] = Counter()
        self.notes: dict[str, None] = {}  # assumptions, in order
        self.work: list[Work] = []  # of the host and the device, in order
        self.meter = Meter()
        self.kept: set[int | None] = set()  # storages that the first call allocates and later ones find
        self.by_card = False  # whether another GPU would run other kernels
        self.prepared: dict[tuple, Any] = {}  # calls of the engine
        self.counts = True  # False inside an attention that is counted as a whole
        self._paths: list[str] = []  # of the modules being called, innermost last
        self._names: dict[int, str] = {}
        self._calls: list[tuple[int, str]] = [(-1, "")]  # first node of the autograd graph → module, in order
        self._uncounted: list[
            tuple[int, int]
        ] = []  # first and last node of calls that are counted as a whole
        self._values: Any = WeakIdKeyDictionary()  # meta tensor → its real value
        self._masks: Any = WeakIdKeyDictionary()  # meta tensor → a mask that excludes the same pairs
        self._metas: Any = WeakIdKeyDictionary()  # real tensor → its meta twin

    # -- modules --------------------------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """The path of the module that is being called; in a backward pass, of the module that made its node."""
        if self.in_backward and (node := compat.running_node()) is not None:
            at = bisect_right(self._calls, (node, "\uffff")) - 1
            return self._calls[max(at, 0)][1]
        return self._paths[-1] if self._paths else ""

    @property
    def in_backward(self) -> bool:
        return self.meter.phase == "backward"

    @contextmanager
    def modules_of(self, module: nn.Module) -> Iterator[None]:
        """Calls of this module and of those inside it are noted, without hooks of their own on them."""
        self._names = {id(inner): path for path, inner in module.named_modules()}
        enter = register_module_forward_pre_hook(self._enter)
        leave = register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            enter.remove()
            leave.remove()
            self._paths.clear()

    def _enter(self, module: nn.Module, _: Any) -> None:
        path = self._names.get(id(module))
        if path is not None:
            self._paths.append(path)
            self._calls.append((compat.node_number(), path))
            self.work.append(Work(self.meter.phase, path, "module", again=self.in_backward))

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if id(module) in self._names and self._paths:
            self._paths.pop()
            self._calls.append((compat.node_number(), self._paths[-1] if self._paths else ""))

    # -- counting -------------------------------------------------------------------------------------------------

    def add(self, name: str, amounts: Amounts, path: str | None = None) -> None:
        key = (self.path if path is None else path, name)
        self.amounts[key] = self.amounts.get(key, Amounts()) + amounts

    def _count(self, op: Any, args: tuple, kwargs: dict, out: Any) -> None:
        if op.is_view:
            self.note_work(0, 0, "", "view")
            return
        name, tensors = op.__name__.split(".")[0], tensors_in((args, out))
        flops, moved = (
            product_flops(op, args, kwargs, out),
            sum(x.numel() * x.element_size() for x in tensors),
        )
        made = self.meter.phase == "optimizer" and name in STATE
        if not made and any(x.is_meta for x in tensors):
            dtype = next((x.dtype for x in tensors if x.is_floating_point()), torch.float32)
            own = "own" if op.namespace == "regard" else "operation"
            kind = "attention" if own == "operation" and "attention" in name else own
            lists = sum(len(a) for a in args if isinstance(a, list | tuple)) if "foreach" in name else 0
            self.note_work(flops or 0, moved, str(dtype), kind, lists)
        if not self.counts or self.meter.phase not in ("forward", "backward"):
            return
        if flops is None:
            if not has_no_product(op):
                self.unknown[f"{op.namespace}.{name} in {self.path or 'the top-level call'}"] += 1
            elif not self.in_backward:
                self._count_elementwise(out)
        elif not self.in_backward:
            self.add(name, Amounts(flops=flops, executed_flops=flops, bytes=moved))
        elif not self._skipped():
            counted = Amounts(backward_flops=flops, executed_backward_flops=flops)
            self.add(name, counted, self.path or "backward")

    def note_work(
        self, flops: int | float, moved: int | float, dtype: str, kind: str = "operation", tensors: int = 0
    ) -> None:
        """A kernel or a view of the phase that runs."""
        dtype, again = dtype.removeprefix("torch."), self.in_backward and bool(self._paths)
        self.work.append(Work(self.meter.phase, merged(self.path), kind, flops, moved, dtype, tensors, again))

    def _count_elementwise(self, out: Any) -> None:
        if isinstance(out, Tensor) and out.is_floating_point():
            moved = 2 * out.numel() * out.element_size()
            self.add("elementwise", Amounts(elementwise_flops=out.numel(), bytes=moved))

    @contextmanager
    def uncounted_backward(self) -> Iterator[None]:
        """The nodes of the autograd graph that are made inside are not counted in the backward pass."""
        first = compat.node_number()
        try:
            yield
        finally:
            self._uncounted.append((first, compat.node_number()))

    def _skipped(self) -> bool:
        if not self._uncounted or (node := compat.running_node()) is None:
            return False
        at = bisect_right(self._uncounted, (node, 1 << 62)) - 1
        return at >= 0 and node < self._uncounted[at][1]

    # -- tensors --------------------------------------------------------------------------------------------------

    def to_meta(self, x: Any) -> Any:
        """The meta twin of a tensor, always the same one; the value of a small constant is remembered."""
        if not isinstance(x, Tensor) or x.is_meta:
            return x
        if x not in self._metas:
            with torch.no_grad(), without_dispatch_modes():
                twin = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            if x.requires_grad:
                twin.requires_grad_(x.is_floating_point() or x.is_complex())
            elif x.numel() <= MAX_VALUE_ENTRIES and not isinstance(x, nn.Parameter):
                self._values[twin] = x.detach()
            self._metas[x] = nn.Parameter(twin) if isinstance(x, nn.Parameter) else twin
        return self._metas[x]

    def joined(self, x: Any) -> Any:
        """The meta twin of a tensor that an operation takes; a real one on the CPU is a table of the engine."""
        twin = self.to_meta(x)
        if twin is not x and x.dim() and self.device == "cpu":
            self.keep(x)
            self.meter.same(twin, x)
        return twin

    def keep(self, x: Tensor) -> None:
        """Meter a real tensor that stays from call to call."""
        self.meter.track(x, self.path, "table")
        self.kept.add(self.meter.key_of(x))

    def keeping(self, allocate: Callable) -> Callable:
        """The same function; what it allocates stays from call to call."""

        @wraps(allocate)
        def call(*args: Any) -> Any:
            first = len(self.meter.records)
            out = allocate(*args)
            self.kept.update(range(first, len(self.meter.records)))
            return out

        return call

    def placed(self, x: Tensor) -> Tensor:
        """A copy of a real tensor on the simulated device; its value is known."""
        with without_function_modes(), without_dispatch_modes():
            twin = self.to_meta(x)
            self.meter.track(twin, self.path, "copy to the device")
        return twin

    def tracked(self, make: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """The same function, whose real result is metered."""

        def call() -> Tensor:
            with without_function_modes(), without_dispatch_modes():
                x = make()
                self.meter.track(x, self.path, make.__name__)
            return x

        return call

    def known(self, x: Tensor) -> Tensor:
        """The value of a meta tensor; an error if it is not known."""
        value = self._values.get(x)
        if value is None:
            raise DataDependent(
                f"{self.path or 'the top-level call'} reads a value that a meta tensor does not have; pass the "
                f"inputs that it depends on as real tensors"
            )
        return value

    def value_of(self, x: Tensor) -> Tensor | None:
        """The value of a tensor if it is known; for a mask it is enough to know which pairs it excludes."""
        with without_function_modes():
            return self._values.get(x, self._masks.get(x)) if x.is_meta else x

    def readable(self, x: Tensor) -> bool:
        """Whether the engine reads this table of rows without a key; where it is unknown, no row is empty."""
        with without_function_modes():
            if x.is_meta and x not in self._values:
                self._values[x] = torch.zeros(x.shape, dtype=x.dtype)
        return x.is_cpu

    def set_value(self, x: Tensor, value: Tensor) -> None:
        self._values[x] = value

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with without_function_modes():
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: tuple, kwargs: dict) -> Any:
        tensors = tensors_in((args, kwargs))
        if func.overloadpacket is READ_SCALAR:
            return func(self.known(tensors[0]) if tensors[0].is_meta else tensors[0])
        metas = [x.is_meta for x in tensors]
        if any(metas) and not all(metas):
            args, kwargs = map_leaves(self.joined, (args, kwargs))
            tensors = tensors_in((args, kwargs))
        special = HANDLERS.get(func.overloadpacket) if any(metas) else None
        out = NotImplemented if special is None else special(self, func, args, kwargs)
        plain = out is NotImplemented
        if plain:
            out = func(*args, **kwargs)
        outs = [x for x in _flat(out) if isinstance(x, Tensor)]
        if outs and outs[0].is_meta:
            if plain:
                self._compute_values(func, args, kwargs, tensors, outs)
            self._meter(func, args, kwargs, outs)
        self._count(func, args, kwargs, out)
        return out

    def _meter(self, func: Any, args: tuple, kwargs: dict, outs: list[Tensor]) -> None:
        if func.is_view:
            for x in outs:
                if self.meter.key_of(x) is None:
                    self.meter.track(x, self.path, "view")
            return
        path, name = self.path, func.__name__.split(".")[0]
        for x in outs:
            self.meter.track(x, path, name)
        self.workspace(kernels.workspace(name, args, kwargs, outs, self.device), name)

    def workspace(self, need: int | Need, operation: str) -> None:
        """Bytes that an operation allocates and frees while it runs."""
        if isinstance(need, Need):
            self.meter.workspace(need.bytes(self.gpu), self.path, operation, need)
        else:
            self.meter.workspace(need, self.path, operation)

    def _compute_values(
        self, func: Any, args: tuple, kwargs: dict, tensors: list[Tensor], outs: list[Tensor]
    ) -> None:
        """The same call on real values, if all inputs are known and nothing is random."""
        if sum(x.numel() for x in outs) > MAX_VALUE_ENTRIES:
            return
        if func.overloadpacket in CONSTANTS:
            self._set_constant(func, args, kwargs, outs[0])
            return
        if not self.all_known(*tensors):
            if tensors and outs[0] is tensors[0]:  # written in place with unknown values
                self._values.pop(outs[0], None)
            self._propagate_mask(func, args, kwargs, outs[0])
            return
        if torch.Tag.nondeterministic_seeded in func.tags:
            if outs[0].numel() == 1 and func.__name__.startswith(("rand.", "uniform")):  # no layer is dropped
                self._values[outs[0]] = torch.full(outs[0].shape, 0.999, dtype=outs[0].dtype)
            elif not outs[0].dim() and func.__name__.startswith("randint"):  # a seed
                self._values[outs[0]] = torch.ones((), dtype=outs[0].dtype)
            return
        if func.__name__.startswith(("cos.", "sin.")):  # no mask is made of angles
            return
        if "empty" in func.__name__ and outs[0].is_floating_point():
            return
        for x, value in zip(outs, self.computed(func, args, kwargs)):
            self._values[x] = value

    def _set_constant(self, func: Any, args: tuple, kwargs: dict, out: Tensor) -> None:
        """The value of new_ones, zeros_like, …, which depends on no value of the tensor that they are like."""
        if self.in_backward or out.numel() > MAX_CONSTANT_ENTRIES:
            return
        with torch.no_grad(), without_dispatch_modes():
            like = torch.empty((), dtype=args[0].dtype).expand(args[0].shape)
            options = {k: v for k, v in kwargs.items() if k != "device"}
            self._values[out] = func(like, *map(self._real, args[1:]), **options)

    def computed(self, func: Any, args: tuple, kwargs: dict) -> list[Tensor]:
        """The results of a call on known values."""
        real_args, real_kwargs = map_leaves(self._real, (args, kwargs))
        if "device" in real_kwargs:
            real_kwargs = {**real_kwargs, "device": torch.device("cpu")}
        with torch.no_grad(), without_dispatch_modes():
            real = func(*real_args, **real_kwargs)
        return [x for x in _flat(real) if isinstance(x, Tensor)]

    def all_known(self, *tensors: Tensor) -> bool:
        return all(x in self._values or not x.is_meta for x in tensors)

    def _propagate_mask(self, func: Any, args: tuple, kwargs: dict, out: Tensor) -> None:
        """A mask with −∞ to which something learned is added still excludes the same pairs, and so do its views."""
        name = func.__name__.split(".")[0]
        if name in ("masked_fill", "masked_fill_", "where"):
            self._record_fill(name, args, out)
        elif func is torch.ops.aten.add.Tensor:
            known = [self._values[x] for x in args[:2] if isinstance(x, Tensor) and x in self._values]
            if (
                len(known) == 1
                and known[0].is_floating_point()
                and known[0].dim() >= 2
                and _excludes(known[0])
            ):
                self._masks[out] = known[0].expand(out.shape)
        elif (
            (func.is_view or func.overloadpacket in COPIES)
            and args
            and isinstance(args[0], Tensor)
            and args[0] in self._masks
        ):
            with torch.no_grad(), without_dispatch_modes():
                options = {k: v for k, v in kwargs.items() if k != "device"}
                self._masks[out] = func(self._masks[args[0]].contiguous(), *args[1:], **options)

    def _record_fill(self, name: str, args: tuple, out: Tensor) -> None:
        """An unknown tensor filled with −∞ (or the lowest number) by a known condition excludes those pairs."""
        condition, value = (args[0], args[2]) if name == "where" else (args[1], args[2])
        value = self._values.get(value) if isinstance(value, Tensor) else value
        if (
            condition not in self._values
            or value is None
            or (value.__class__ is Tensor and value.numel() != 1)
        ):
            return
        if float(value) > LOWEST:
            return
        allowed = self._values[condition] if name == "where" else ~self._values[condition]
        self._masks[out] = allowed.expand(out.shape)

    def _real(self, x: Any) -> Any:
        return self._values[x] if isinstance(x, Tensor) and x.is_meta else x


class DataDependent(ShapeError):
    """A module reads a value that a run on meta tensors does not have."""


@lru_cache(maxsize=1 << 14)
def merged(path: str) -> str:
    """The path with layer numbers merged: layers.3.linear → layers.*.linear. A path of numbers alone, as in an
    `nn.Sequential`, keeps them: it would have no name left."""
    short = re.sub(r"(?<![^/.])\d+(?![^/.])", "*", path)
    return path if set(short) <= set("*/.") else short


def _flat(out: Any) -> tuple | list:
    if isinstance(out, tuple | list):
        return [y for x in out for y in (x if isinstance(x, tuple | list) else (x,))]
    return (out,)


def _excludes(mask: Tensor) -> bool:
    return bool((mask <= LOWEST).any())


@contextmanager
def tracing(trace: Trace) -> Iterator[None]:
    """Everything that is called inside runs on meta tensors and is counted."""
    collects = gc.isenabled()
    fused = sdpa(trace)
    with ExitStack() as stack:
        stack.enter_context(_one_at_a_time)
        stack.enter_context(patched(F, "scaled_dot_product_attention", fused))
        stack.enter_context(traced_engine(trace, fused))
        if trace.device == "cuda":
            stack.enter_context(patched(F, "dropout", dropout))
            stack.enter_context(patched(F, "rms_norm", rms_norm))
            for name in ("get_device_capability", "get_device_properties"):
                stack.enter_context(patched(torch.cuda, name, asked(trace, getattr(torch.cuda, name))))
        for module, name in _importers_of_flex():
            stack.enter_context(patched(module, name, flex(trace)))
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)  # nn.MultiheadAttention by its single steps
        stack.enter_context(compat.checkpoints_ignore_devices())
        # What a checkpoint keeps of the random generators: that of a GPU is not asked for, it takes nothing there.
        stack.enter_context(patched(checkpoint, "get_device_states", lambda *_: ([], [])))
        if trace.device == "cpu":
            stack.enter_context(patched(torch, "get_rng_state", trace.tracked(torch.get_rng_state)))
        gc.disable()  # a cycle would be collected at another time than in a real run
        if collects:
            stack.callback(gc.enable)
        stack.enter_context(autocast.simulated(trace.device if trace.device == "cuda" else "cpu"))
        stack.enter_context(OnDevice(trace, {SDPA: fused}))
        stack.enter_context(trace)
        yield


def _importers_of_flex() -> list[tuple[Any, str]]:
    """Every module that has imported flex_attention by name."""
    home = sys.modules.get("torch.nn.attention.flex_attention")
    if home is None:
        return []
    original = home.flex_attention
    importers = []
    for module in list(sys.modules.values()):
        for name in ("flex_attention", "compiled_flex_attention"):
            if getattr(module, "__dict__", {}).get(name) is original:
                importers.append((module, name))
    return importers
