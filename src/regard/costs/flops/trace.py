"""Tracing a module on meta tensors: every operation is counted and attributed to the module that called it.

Values that follow from constants and from real inputs (masks, positions, lengths) are computed as well, so that a
mask reduces the pairs and a module may branch on a value. Operations that cannot be counted are listed by name.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ...compat import DispatchMode, aten_operator, storage_id, without_dispatch_modes
from ..tree import Amounts, Pairs
from .nested import map_leaves, tensors_in
from .trace_attention import encoder_layer, flex, fused_attention, sdpa
from .trace_ops import has_no_product, product_flops

MAX_VALUE_ENTRIES = 1 << 24  # larger values are not computed
COPIES = (aten_operator("_to_copy"), torch.ops.aten.clone)
READ_SCALAR = aten_operator("_local_scalar_dense")
SDPA = F.scaled_dot_product_attention


class Trace(DispatchMode):
    """Amounts by module and operation, pairs of each attention, operations that were not counted, live storages."""

    def __init__(self, device: str = "cpu"):
        super().__init__()
        self.device = device
        self.amounts: dict[tuple[str, str], Amounts] = {}
        self.pairs: list[Pairs] = []
        self.unknown: Counter[str] = Counter()
        self.in_backward = False
        self._paths: list[str] = []  # of the modules being called, innermost last
        self._values: Any = WeakIdKeyDictionary()  # meta tensor → its real value
        self._masks: Any = WeakIdKeyDictionary()  # meta tensor → a mask that excludes the same pairs
        self._metas: Any = WeakIdKeyDictionary()  # real tensor → its meta twin
        self.storages = Storages()

    @property
    def path(self) -> str:
        """The path of the module that is being called."""
        return self._paths[-1] if self._paths else ""

    @contextmanager
    def inside(self, path: str) -> Iterator[None]:
        self._paths.append(path)
        try:
            yield
        finally:
            self._paths.pop()

    def enter_hook(self, path: str) -> Callable[..., None]:
        """A forward pre-hook for the module at this path."""

        def enter(*_: Any) -> None:
            self._paths.append(path)

        return enter

    def leave_hook(self, *_: Any) -> None:
        self._paths.pop()

    # -- counting -------------------------------------------------------------------------------------------------

    def add(self, name: str, amounts: Amounts, path: str | None = None) -> None:
        key = (self.path if path is None else path, name)
        self.amounts[key] = self.amounts.get(key, Amounts()) + amounts

    def _count(self, op: Any, args: tuple, kwargs: dict, out: Any) -> None:
        flops = product_flops(op, args, kwargs, out)
        name = op.__name__.split(".")[0]
        if flops is None:
            if not has_no_product(op):
                self.unknown[f"{op.namespace}.{name} in {self.path or 'the top-level call'}"] += 1
            elif not self.in_backward and not op.is_view:
                self._count_elementwise(out)
            return
        if self.in_backward:
            self.add(name, Amounts(backward_flops=flops, executed_backward_flops=flops))
        else:
            self.add(name, Amounts(flops=flops, executed_flops=flops, bytes=_bytes(args, out)))

    def _count_elementwise(self, out: Any) -> None:
        if isinstance(out, Tensor) and out.is_floating_point():
            moved = 2 * out.numel() * out.element_size()
            self.add("elementwise", Amounts(elementwise_flops=out.numel(), bytes=moved))

    # -- tensors --------------------------------------------------------------------------------------------------

    def to_meta(self, x: Any) -> Any:
        """The meta twin of a tensor, always the same one; the value of a small constant is remembered."""
        if not isinstance(x, Tensor) or x.is_meta:
            return x
        if x not in self._metas:
            with torch.no_grad():
                twin = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            if x.requires_grad:
                twin.requires_grad_(x.is_floating_point() or x.is_complex())
            elif x.numel() <= MAX_VALUE_ENTRIES and not isinstance(x, nn.Parameter):
                self._values[twin] = x
            self._metas[x] = nn.Parameter(twin) if isinstance(x, nn.Parameter) else twin
        return self._metas[x]

    def value_of(self, x: Tensor) -> Tensor | None:
        """The value of a tensor if it is known; for a mask it is enough to know which pairs it excludes."""
        return self._values.get(x, self._masks.get(x)) if x.is_meta else x

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = tensors_in((args, kwargs))
        if func.overloadpacket is READ_SCALAR:
            return self._item(func, tensors[0])
        if any(x.is_meta for x in tensors) and not all(x.is_meta for x in tensors):
            args, kwargs = map_leaves(self.to_meta, (args, kwargs))
            tensors = [self.to_meta(x) for x in tensors]
        out = func(*args, **kwargs)
        outs = [x for x in (out if isinstance(out, tuple | list) else (out,)) if isinstance(x, Tensor)]
        if outs and outs[0].is_meta:
            self._compute_values(func, args, kwargs, tensors, outs)
            for x in outs:
                self.storages.track(x)
        self._count(func, args, kwargs, out)
        return out

    def _item(self, func: Any, x: Tensor) -> Any:
        real = self._values.get(x) if x.is_meta else x
        if real is None:
            raise DataDependent(
                f"{self.path or 'the top-level call'} reads a value that a meta tensor does not have; pass the "
                f"inputs that it depends on as real tensors"
            )
        return func(real)

    def _compute_values(
        self, func: Any, args: tuple, kwargs: dict, tensors: list[Tensor], outs: list[Tensor]
    ) -> None:
        """The same call on real values, if all inputs are known and nothing is random."""
        if sum(x.numel() for x in outs) > MAX_VALUE_ENTRIES:
            return
        if any(x not in self._values for x in tensors):
            self._propagate_mask(func, args, kwargs, outs[0])
            return
        if torch.Tag.nondeterministic_seeded in func.tags or "empty" in func.__name__:
            return
        real_args, real_kwargs = map_leaves(self._real, (args, kwargs))
        if "device" in real_kwargs:
            real_kwargs = {**real_kwargs, "device": torch.device("cpu")}
        with torch.no_grad(), without_dispatch_modes():
            real = func(*real_args, **real_kwargs)
        reals = [x for x in (real if isinstance(real, tuple | list) else (real,)) if isinstance(x, Tensor)]
        for x, value in zip(outs, reals):
            self._values[x] = value

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
                self._masks[out] = func(self._masks[args[0]], *args[1:], **options)

    def _record_fill(self, name: str, args: tuple, out: Tensor) -> None:
        """An unknown tensor filled with −∞ (or the lowest number) by a known condition excludes those pairs."""
        condition, value = (args[0], args[2]) if name == "where" else (args[1], args[2])
        value = self.value_of(value) if isinstance(value, Tensor) else value
        if (
            condition not in self._values
            or value is None
            or float(value) > torch.finfo(torch.float32).min / 2
        ):
            return
        allowed = self._values[condition] if name == "where" else ~self._values[condition]
        self._masks[out] = allowed.expand(out.shape)

    def _real(self, x: Any) -> Any:
        return self._values[x] if isinstance(x, Tensor) else x


class DataDependent(Exception):
    """A module reads a value that a run on meta tensors does not have."""


class Storages:
    """Current and peak bytes, by the lifetime of PyTorch's storages."""

    def __init__(self) -> None:
        self.alive: dict[int, int] = {}
        self.current = self.peak = 0

    def track(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key = storage_id(x)
        if key in self.alive:
            return
        self.alive[key] = storage.nbytes()
        self.current += self.alive[key]
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.current -= self.alive.pop(key)


class FusedCalls(TorchFunctionMode):
    """Replaces fused calls: on meta tensors PyTorch would take its slow path, or none."""

    def __init__(self, trace: Trace):
        super().__init__()
        self.trace = trace
        self.sdpa = sdpa(trace)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is SDPA:
            return self.sdpa(*args, **kwargs)
        if name == "_transformer_encoder_layer_fwd":
            return encoder_layer(self.trace, args, kwargs)
        if name == "_native_multi_head_attention":
            return fused_attention(self.trace, args, kwargs)
        if func is F.dropout and self.trace.device == "cuda":
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """On a GPU dropout saves a mask of one byte per entry."""
    return torch.native_dropout(x, p, True)[0] if training and 0 < p < 1 else x


def _excludes(mask: Tensor) -> bool:
    return bool((mask <= torch.finfo(torch.float32).min / 2).any())


def _bytes(args: tuple, out: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors_in((args, out)))


@contextmanager
def tracing(trace: Trace) -> Iterator[None]:
    """Everything that is called inside runs on meta tensors and is counted."""
    with ExitStack() as stack:
        stack.enter_context(_patched(F, "scaled_dot_product_attention", sdpa(trace)))
        for module, name in _importers_of_flex():
            stack.enter_context(_patched(module, name, flex(trace)))
        stack.enter_context(torch.device("meta"))
        stack.enter_context(FusedCalls(trace))
        stack.enter_context(trace)
        yield


@contextmanager
def _patched(module: Any, name: str, replacement: Callable) -> Iterator[None]:
    """Replaces `module.name` inside: a function mode does not intercept calls in PyTorch's own Python code."""
    original = getattr(module, name)
    setattr(module, name, replacement)
    try:
        yield
    finally:
        setattr(module, name, original)


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
