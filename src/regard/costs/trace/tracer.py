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
from functools import lru_cache, partial
from threading import RLock
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from ... import compat
from ...compat import DispatchMode, aten_operator, without_dispatch_modes, without_function_modes
from ...errors import ShapeError
from ...nested import map_leaves, tensors_in
from ..tree import Amount, Amounts, Pairs
from . import autocast, data_dependent, kernels
from .attention import H200, Gpu, Need, flex, sdpa
from .device import OnDevice, dropout, rms_norm, simulated_facts, unchecked
from .engine import OWN_HANDLERS, traced_engine
from .kernels import has_no_product, product_flops
from .meter import Meter

MAX_VALUE_ENTRIES = 1 << 24  # larger values are not computed
MAX_CONSTANT_ENTRIES = 1 << 20  # larger constants are not computed either
CONSTANTS = compat.aten_operators("new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like")
COPIES = (aten_operator("_to_copy"), torch.ops.aten.clone)
# Traced by the operations that they consist of on any device.
BY_PARTS = compat.aten_operators("_trilinear", "dist", "affine_grid_generator")
READ_SCALAR = aten_operator("_local_scalar_dense")
SDPA = F.scaled_dot_product_attention
_one_at_a_time = RLock()  # functions of PyTorch are replaced while a trace runs
FAST_PATH = "PyTorch's attention modules are traced without their fast path, which stores all n × n weights"
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
    tensors: int = 0  # how many tensors an operation of a foreach optimizer updates at once
    again: bool = False  # part of the forward pass that a checkpoint repeats in the backward pass


class DataDependent(ShapeError):
    """A module reads a value that a run on meta tensors does not have."""


class Trace(DispatchMode):
    """Amounts by module and operation, pairs of each attention, operations that were not counted, storages."""

    def __init__(self, device: str = "cpu", gpu: Gpu = H200):
        super().__init__()
        self.device, self.gpu = device, gpu
        self.amounts: dict[tuple[str, str], Amounts] = {}
        self.pairs: list[Pairs] = []
        self.unknown: Counter[str] = Counter()
        self.notes: dict[str, None] = {}  # assumptions, in order
        self.work: list[Work] = []  # what the host and the device do, in order
        self.meter = Meter()
        self.kept: set[int | None] = set()  # storages that the first call allocates and later ones find
        self.by_card = False  # whether another GPU would run other kernels
        self.prepared: dict[tuple, Any] = {}  # prepared calls of the engine
        self.counts = True  # False inside an attention that is counted as a whole
        self.paths: list[str] = []  # paths of the modules being called, innermost last
        self.names: dict[int, str] = {}
        self._calls: list[tuple[int, str]] = [(-1, "")]  # first node of the autograd graph → module, in order
        self._uncounted: list[tuple[int, int]] = []  # first and last node of calls counted as a whole
        self.values: Any = WeakIdKeyDictionary()  # meta tensor → its real value
        self._masks: Any = WeakIdKeyDictionary()  # meta tensor → a mask that excludes the same pairs
        self._metas: Any = WeakIdKeyDictionary()  # real tensor → its meta twin

    @property
    def path(self) -> str:
        """The path of the module that is being called; in a backward pass, of the module that made its node."""
        if self.in_backward and (node := compat.running_node()) is not None:
            return self._calls[bisect_right(self._calls, (node, "\uffff")) - 1][1]
        return self.paths[-1] if self.paths else ""

    in_backward = property(lambda self: self.meter.phase == "backward")

    def enter(self, module: nn.Module, given: Any) -> None:
        path = self.names.get(id(module))
        if path is not None:
            self.paths.append(path)
            self._calls.append((compat.node_number(), path))
            self.work.append(Work(self.meter.phase, path, "module", again=self.in_backward))
            trains = module.training or torch.is_grad_enabled()
            of_itself = isinstance(module, nn.MultiheadAttention) and all(x is given[0] for x in given[:3])
            if (of_itself or isinstance(module, nn.TransformerEncoderLayer)) and not trains:
                self.notes[FAST_PATH] = None

    def leave(self, module: nn.Module, *_: Any) -> None:
        if id(module) in self.names and self.paths:
            self.paths.pop()
            self._calls.append((compat.node_number(), self.paths[-1] if self.paths else ""))

    def add(self, name: str, amounts: Amounts, path: str | None = None) -> None:
        key = (self.path if path is None else path, name)
        self.amounts[key] = self.amounts.get(key, Amounts()) + amounts

    def _count(self, op: Any, args: tuple, kwargs: dict, out: Any) -> None:
        if op.is_view:
            self.note_work("view", 0, 0)
            return
        name, tensors = op.__name__.split(".")[0], tensors_in((args, out))
        flops, moved = product_flops(op, args, kwargs, out), sum(x.nbytes for x in tensors)
        made = self.meter.phase == "optimizer" and name in ("zeros_like", "empty_like", "clone")  # its state
        if not made and any(x.is_meta for x in tensors):
            dtype = next((x.dtype for x in tensors if x.is_floating_point()), torch.float32)
            fused = "attention" if "attention" in name else "operation"
            kind = "own" if op.namespace == "regard" else fused
            lists = sum(len(a) for a in args if isinstance(a, list | tuple)) if "foreach" in name else 0
            self.note_work(kind, flops or 0, moved, str(dtype), lists)
        if not self.counts or self.meter.phase not in ("forward", "backward"):
            return
        if flops is None:
            if not has_no_product(op) and not self._skipped():
                self.unknown[f"{op.namespace}.{name} in {self.path or 'the top-level call'}"] += 1
            elif not self.in_backward and isinstance(out, Tensor) and out.is_floating_point():
                self.add("elementwise", Amounts(elementwise_flops=out.numel(), bytes=2 * out.nbytes))
        elif not self.in_backward:
            self.add(name, Amounts(flops=flops, executed_flops=flops, bytes=moved))
        elif not self._skipped():
            counted = Amounts(backward_flops=flops, executed_backward_flops=flops)
            self.add(name, counted, self.path or "backward")

    def note_work(self, kind: str, flops: Amount, moved: Amount, dtype: str = "", tensors: int = 0) -> None:
        """A kernel or a view of the phase that runs."""
        dtype, again = dtype.removeprefix("torch."), self.in_backward and bool(self.paths)
        self.work.append(Work(self.meter.phase, merged(self.path), kind, flops, moved, dtype, tensors, again))

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Neither operations inside nor, in the backward pass, the nodes that are made inside are counted."""
        first, before, self.counts = compat.node_number(), self.counts, False
        try:
            yield
        finally:
            self.counts = before
            self._uncounted.append((first, compat.node_number()))

    def _skipped(self) -> bool:
        if (node := compat.running_node()) is None:
            return False
        at = bisect_right(self._uncounted, (node, 1 << 62)) - 1
        return at >= 0 and node < self._uncounted[at][1]

    def to_meta(self, x: Any) -> Any:
        """The meta twin of a tensor, always the same one; the value of a small constant is remembered."""
        if not isinstance(x, Tensor) or x.is_meta:
            return x
        if x not in self._metas:
            self._metas[x] = self.copied(x)
        return self._metas[x]

    def copied(self, x: Tensor) -> Tensor:
        """A new meta tensor like x; it is freed where a module replaces it, as old weight norms do at every call."""
        with torch.no_grad(), without_dispatch_modes():
            twin = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        if x.requires_grad:
            twin.requires_grad_(x.is_floating_point() or x.is_complex())
        elif x.numel() <= MAX_VALUE_ENTRIES and not isinstance(x, nn.Parameter):
            self.values[twin] = self._alone(torch.clone, (x,), {})  # a module may write to its buffers
        return nn.Parameter(twin) if isinstance(x, nn.Parameter) else twin

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

    def keeping(self, allocate: Callable, *args: Any) -> Any:
        """What this function returns; what it allocates stays from call to call."""
        first = len(self.meter.records)
        out = allocate(*args)
        self.kept.update(range(first, len(self.meter.records)))
        return out

    def placed(self, x: Tensor) -> Tensor:
        """A copy of a real tensor on the simulated device; its value is known."""
        return self.tracked(lambda: self.to_meta(x), "copy to the device")

    def tracked(self, make: Callable[[], Tensor], operation: str) -> Tensor:
        """What this function returns, metered, while nothing inside it is."""
        with without_function_modes(), without_dispatch_modes():
            x = make()
            self.meter.track(x, self.path, operation)
        return x

    def known(self, x: Tensor) -> Tensor:
        """The value of a meta tensor; an error if it is not known."""
        if x not in self.values:
            raise DataDependent(
                f"{self.path or 'the top-level call'} reads a value that a meta tensor does not have; pass the "
                f"inputs that it depends on as real tensors (a value that depends on weights is never known)"
            )
        return self.values[x]

    def value_of(self, x: Tensor | None) -> Tensor | None:
        """The value of a tensor if it is known; for a mask it is enough to know which pairs it excludes."""
        with without_function_modes():
            return self.values.get(x, self._masks.get(x)) if x is not None and x.is_meta else x

    def readable(self, x: Tensor) -> bool:
        """Whether the engine reads this table of rows without a key; where it is unknown, no row is empty."""
        with without_function_modes():
            if x.is_meta and x not in self.values:
                self.values[x] = torch.zeros(x.shape, dtype=x.dtype)
        return x.is_cpu

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with without_function_modes():
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: tuple, kwargs: dict) -> Any:
        tensors = tensors_in((args, kwargs))
        if any(x.is_nested for x in tensors):
            raise NotImplementedError("NestedTensorImpl")  # which `run` says in words
        if func.overloadpacket is READ_SCALAR:
            return func(self.known(tensors[0]) if tensors[0].is_meta else tensors[0])
        metas = [x.is_meta for x in tensors]
        if any(metas) and not all(metas):
            args, kwargs = map_leaves(self.joined, (args, kwargs))
            tensors = tensors_in((args, kwargs))
        if any(metas) and func.overloadpacket in BY_PARTS:
            with self:
                if (out := compat.call_parts(func, *args, **kwargs)) is not NotImplemented:
                    return out
        special = HANDLERS.get(func.overloadpacket) if any(metas) else None
        out = NotImplemented if special is None else special(self, func, args, kwargs)
        plain = out is NotImplemented
        if plain:
            out = func(*args, **kwargs)
        outs = tensors_in(out)
        if outs and outs[0].is_meta:
            if plain:
                self._compute_values(func, args, kwargs, tensors, outs)
            name = "view" if func.is_view else func.__name__.split(".")[0]
            for x in outs:
                if self.meter.key_of(x) is None:
                    self.meter.track(x, self.path, name)
            self.workspace(kernels.workspace(name, args, outs, self.device), name)
        self._count(func, args, kwargs, out)
        return out

    def workspace(self, need: int | Need, operation: str) -> None:
        """Bytes that an operation allocates and frees while it runs."""
        size, formula = (need.bytes(self.gpu), need) if isinstance(need, Need) else (need, None)
        self.meter.workspace(size, self.path, operation, formula)

    def _compute_values(self, func: Any, args: tuple, kwargs: dict, tensors: list, outs: list) -> None:
        """The same call on real values, if all inputs are known and nothing is random."""
        out, name = outs[0], func.__name__
        if sum(x.numel() for x in outs) > MAX_VALUE_ENTRIES:
            return
        if func.overloadpacket in CONSTANTS:  # they depend on no value of the tensor that they are like
            if not self.in_backward and out.numel() <= MAX_CONSTANT_ENTRIES:
                with without_dispatch_modes():
                    like = torch.empty((), dtype=args[0].dtype).expand(args[0].shape)
                self.values[out] = self._alone(func, (like, *map(self._real, args[1:])), kwargs)
        elif not self.all_known(*tensors):
            if tensors and out is tensors[0]:  # written in place with unknown values
                self.values.pop(out, None)
            self._propagate_mask(func, args, kwargs, out)
        elif torch.Tag.nondeterministic_seeded in func.tags:
            if out.numel() == 1 and name.startswith(("rand.", "uniform")):  # so that no layer is dropped
                self.values[out] = torch.full(out.shape, 0.999, dtype=out.dtype)
            elif not out.dim() and name.startswith("randint"):  # a seed
                self.values[out] = torch.ones((), dtype=out.dtype)
        elif not name.startswith(("cos.", "sin.")) and not ("empty" in name and out.is_floating_point()):
            for x, value in zip(outs, self.computed(func, args, kwargs)):  # no mask is made of angles
                self.values[x] = value

    def computed(self, func: Any, args: tuple, kwargs: dict) -> list[Tensor]:
        """The results of a call on known values."""
        return tensors_in(self._alone(func, *map_leaves(self._real, (args, kwargs))))

    @staticmethod
    def _alone(func: Any, args: tuple, kwargs: dict) -> Any:
        """A call on real tensors that is neither counted nor metered."""
        on_cpu = {"device": torch.device("cpu")} if "device" in kwargs else {}
        with torch.no_grad(), without_dispatch_modes():
            return func(*args, **{**kwargs, **on_cpu})

    def all_known(self, *tensors: Tensor) -> bool:
        return all(x in self.values or not x.is_meta for x in tensors)

    def _real(self, x: Any) -> Any:
        return self.known(x) if isinstance(x, Tensor) and x.is_meta else x

    def _propagate_mask(self, func: Any, args: tuple, kwargs: dict, out: Tensor) -> None:
        """A mask with −∞ to which something learned is added still excludes the same pairs, and so do its views."""
        name = func.__name__.split(".")[0]
        if name in ("masked_fill", "masked_fill_", "where"):
            self._record_fill(name, args, out)
        elif func is torch.ops.aten.add.Tensor:
            known = [self.values[x] for x in args[:2] if isinstance(x, Tensor) and x in self.values]
            tables = [v for v in known if v.is_floating_point() and v.dim() >= 2 and (v <= LOWEST).any()]
            if len(known) == len(tables) == 1:
                self._masks[out] = known[0].expand(out.shape)
        elif func.is_view or func.overloadpacket in COPIES:
            mask = self._masks.get(args[0]) if args and isinstance(args[0], Tensor) else None
            if mask is not None:
                self._masks[out] = self._alone(func, (mask.contiguous(), *args[1:]), kwargs)

    def _record_fill(self, name: str, args: tuple, out: Tensor) -> None:
        """An unknown tensor filled with −∞ (or the lowest number) by a known condition excludes those pairs."""
        condition, value = self.values.get(args[0 if name == "where" else 1]), args[2]
        value = self.values.get(value) if isinstance(value, Tensor) else value
        if condition is None or value is None or (isinstance(value, Tensor) and value.numel() != 1):
            return
        if float(value) <= LOWEST:
            self._masks[out] = (condition if name == "where" else ~condition).expand(out.shape)


@lru_cache(maxsize=1 << 14)
def merged(path: str) -> str:
    """The path with layer numbers merged: layers.3.linear → layers.*.linear; a path of numbers alone keeps them."""
    short = re.sub(r"(?<![^/.])\d+(?![^/.])", "*", path)
    return path if set(short) <= set("*/.") else short


@contextmanager
def tracing(trace: Trace, module: nn.Module) -> Iterator[None]:
    """Everything that is called inside runs on meta tensors and is counted; calls of modules are noted."""
    with without_function_modes(), Trace():
        torch.empty(0)  # the first dispatch imports torch._dynamo, and keeps its tensors meanwhile
    fused = partial(sdpa, trace)
    trace.names = {id(inner): path for path, inner in module.named_modules()}
    # Modules that have imported flex_attention by name.
    real = getattr(sys.modules.get("torch.nn.attention.flex_attention"), "flex_attention", sys)
    names = ("flex_attention", "compiled_flex_attention")
    held = [(m, vars(m)) for m in list(sys.modules.values()) if isinstance(m, ModuleType)]
    importers = [(m, x) for m, here in held for x in names if x in here and here[x] is real]
    # A checkpoint saves the state of the random generators; that of a GPU takes no memory of the GPU.
    replaced: list[tuple[Any, str, Any]] = [
        (F, "scaled_dot_product_attention", fused),
        (F, "gaussian_nll_loss", unchecked(trace, F.gaussian_nll_loss)),
        (checkpoint, "get_device_states", lambda *_: ([], [])),
        *((module, name, partial(flex, trace)) for module, name in importers),
    ]
    if trace.device == "cuda":
        replaced += [(F, "dropout", dropout), (F, "rms_norm", rms_norm)]
        for name in ("get_device_capability", "get_device_properties"):
            replaced.append((torch.cuda, name, partial(simulated_facts, trace, getattr(torch.cuda, name))))
    if trace.device == "cpu":
        state = partial(trace.tracked, torch.get_rng_state, "get_rng_state")
        replaced.append((torch, "get_rng_state", state))
    with ExitStack() as stack:
        stack.enter_context(_one_at_a_time)
        for module, name, replacement in replaced:
            stack.enter_context(patch.object(module, name, replacement))
        stack.enter_context(traced_engine(trace, fused))
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)  # nn.MultiheadAttention runs step by step
        stack.enter_context(compat.checkpoints_ignore_devices())
        stack.callback(gc.enable if gc.isenabled() else gc.disable)
        gc.disable()  # reference cycles would be collected at other times than in a real run
        stack.enter_context(autocast.simulated(trace.device if trace.device == "cuda" else "cpu"))
        stack.enter_context(OnDevice(trace, {SDPA: fused}))
        stack.enter_context(trace)
        stack.callback(trace.paths.clear)
        stack.enter_context(register_module_forward_pre_hook(trace.enter))
        stack.enter_context(register_module_forward_hook(trace.leave, always_call=True))
        yield
