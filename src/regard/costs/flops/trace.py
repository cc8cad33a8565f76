"""Running a module without data: every operation is seen on meta tensors, counted, and put where it belongs.

Values that follow from constants and from the inputs given (masks, positions, lengths) are computed beside, so that a
mask can be charged and a module may look at one. What is not known is named, never counted as nothing.
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from ..tree import Amounts, Pairs
from .trace_attention import encoder_layer, flex, fused_attention, sdpa
from .trace_ops import is_plain, products

MOST = 1 << 24  # entries of a value that is computed beside
MOVES = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)
SDPA = torch._C._nn.scaled_dot_product_attention


class Trace(TorchDispatchMode):
    """Amounts by place and operation; pairs of each attention; what was not counted; storages alive."""

    def __init__(self, device: str = "cpu"):
        super().__init__()
        self.device = device
        self.amounts: dict[tuple[str, str], Amounts] = {}
        self.pairs: list[Pairs] = []
        self.unknown: Counter[str] = Counter()
        self.in_backward = False
        self._places: list[str] = []
        self._values: Any = WeakIdKeyDictionary()  # meta tensor → its real value
        self._masks: Any = WeakIdKeyDictionary()  # meta tensor → a mask that hides the same pairs
        self._metas: Any = WeakIdKeyDictionary()  # real tensor → its meta twin
        self.storages = Storages()

    @property
    def where(self) -> str:
        return self._places[-1] if self._places else ""

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        self._places.append(place)
        try:
            yield
        finally:
            self._places.pop()

    def entering(self, place: str) -> Callable[..., None]:
        """A hook for a module that stands at this place."""

        def enter(*_: Any) -> None:
            self._places.append(place)

        return enter

    def leaving(self, *_: Any) -> None:
        self._places.pop()

    # -- counting -------------------------------------------------------------------------------------------------

    def add(self, name: str, amounts: Amounts, place: str | None = None) -> None:
        key = (self.where if place is None else place, name)
        self.amounts[key] = self.amounts.get(key, Amounts()) + amounts

    def _count(self, op: Any, args: tuple, kwargs: dict, out: Any) -> None:
        found = products(op, args, kwargs, out)
        name = op.__name__.split(".")[0]
        if found is None:
            if not is_plain(op):
                self.unknown[f"{op.namespace}.{name} in {self.where or 'the call itself'}"] += 1
            elif not self.in_backward and not op.is_view:
                self._plain(name, out)
            return
        if self.in_backward:
            self.add(name, Amounts(backward=found, executed_backward=found))
        else:
            self.add(name, Amounts(operations=found, executed=found, bytes=_bytes(args, out)))

    def _plain(self, name: str, out: Any) -> None:
        if isinstance(out, Tensor) and out.is_floating_point():
            self.add("other", Amounts(other=out.numel(), bytes=2 * out.numel() * out.element_size()))

    # -- tensors --------------------------------------------------------------------------------------------------

    def to_meta(self, x: Any) -> Any:
        """A twin without data, the same one each time; its value is remembered where it is a small constant."""
        if not isinstance(x, Tensor) or x.is_meta:
            return x
        if x not in self._metas:
            with torch.no_grad():
                twin = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            if x.requires_grad:
                twin.requires_grad_(x.is_floating_point() or x.is_complex())
            elif x.numel() <= MOST and not isinstance(x, nn.Parameter):
                self._values[twin] = x
            self._metas[x] = nn.Parameter(twin) if isinstance(x, nn.Parameter) else twin
        return self._metas[x]

    def value_of(self, x: Tensor) -> Tensor | None:
        """What the tensor holds, where it is known; of a mask, at least where it hides."""
        return self._values.get(x, self._masks.get(x)) if x.is_meta else x

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        flat, _ = tree_flatten((args, kwargs))
        tensors = [x for x in flat if isinstance(x, Tensor)]
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._item(func, tensors[0])
        if any(x.is_meta for x in tensors) and not all(x.is_meta for x in tensors):
            args, kwargs = tree_map(self.to_meta, (args, kwargs))
            tensors = [self.to_meta(x) for x in tensors]
        out = func(*args, **kwargs)
        outs = [x for x in (out if isinstance(out, tuple | list) else (out,)) if isinstance(x, Tensor)]
        if outs and outs[0].is_meta:
            self._shadow(func, args, kwargs, tensors, outs)
            for x in outs:
                self.storages.see(x)
        self._count(func, args, kwargs, out)
        return out

    def _item(self, func: Any, x: Tensor) -> Any:
        real = self._values.get(x) if x.is_meta else x
        if real is None:
            raise Unknown(
                f"{self.where or 'the call itself'} looks at a number that only real data has; give the inputs it "
                f"follows from as real tensors"
            )
        return func(real)

    def _shadow(
        self, func: Any, args: tuple, kwargs: dict, tensors: list[Tensor], outs: list[Tensor]
    ) -> None:
        """The same call on real values, where all of them are known and none is random."""
        if sum(x.numel() for x in outs) > MOST:
            return
        if any(x not in self._values for x in tensors):
            self._follow(func, args, kwargs, outs[0])
            return
        if torch.Tag.nondeterministic_seeded in func.tags or "empty" in func.__name__:
            return
        given_args, given = tree_map(self._real, (args, kwargs))
        if "device" in given:
            given = {**given, "device": torch.device("cpu")}
        with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
            real = func(*given_args, **given)
        reals = [x for x in (real if isinstance(real, tuple | list) else (real,)) if isinstance(x, Tensor)]
        for x, value in zip(outs, reals):
            self._values[x] = value

    def _follow(self, func: Any, args: tuple, kwargs: dict, out: Tensor) -> None:
        """A mask with −∞ to which something learned is added still hides the same pairs, and so do its views."""
        name = func.__name__.split(".")[0]
        if name in ("masked_fill", "masked_fill_", "where"):
            self._masked(name, args, out)
        elif func is torch.ops.aten.add.Tensor:
            known = [self._values[x] for x in args[:2] if isinstance(x, Tensor) and x in self._values]
            if len(known) == 1 and known[0].is_floating_point() and known[0].dim() >= 2 and _hides(known[0]):
                self._masks[out] = known[0].expand(out.shape)
        elif (
            (func.is_view or func in MOVES)
            and args
            and isinstance(args[0], Tensor)
            and args[0] in self._masks
        ):
            with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
                given = {k: v for k, v in kwargs.items() if k != "device"}
                self._masks[out] = func(self._masks[args[0]], *args[1:], **given)

    def _masked(self, name: str, args: tuple, out: Tensor) -> None:
        """Something unknown, with −∞ (or the lowest number) where a known table says so."""
        at, value = (args[0], args[2]) if name == "where" else (args[1], args[2])
        value = self.value_of(value) if isinstance(value, Tensor) else value
        if at not in self._values or value is None or float(value) > torch.finfo(torch.float32).min / 2:
            return
        table = self._values[at] if name == "where" else ~self._values[at]
        self._masks[out] = table.expand(out.shape)

    def _real(self, x: Any) -> Any:
        return self._values[x] if isinstance(x, Tensor) else x


class Unknown(Exception):
    """A module asked for a value that a run without data does not have."""


class Storages:
    """Bytes alive now and at most, by the life of PyTorch's own storages."""

    def __init__(self) -> None:
        self.alive: dict[int, int] = {}
        self.held = self.most = 0

    def see(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self.alive:
            return
        self.alive[key] = storage.nbytes()
        self.held += self.alive[key]
        self.most = max(self.most, self.held)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.held -= self.alive.pop(key)


class Calls(TorchFunctionMode):
    """Fused calls, by their stand-ins: on meta tensors PyTorch would take its slow path, or none."""

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
    """A GPU keeps a mask of one byte an entry."""
    return torch.native_dropout(x, p, True)[0] if training and 0 < p < 1 else x


def _hides(mask: Tensor) -> bool:
    return bool((mask <= torch.finfo(torch.float32).min / 2).any())


def _bytes(args: tuple, out: Any) -> int:
    flat, _ = tree_flatten((args, out))
    return sum(x.numel() * x.element_size() for x in flat if isinstance(x, Tensor))


@contextmanager
def tracing(trace: Trace) -> Iterator[None]:
    """All that is called inside runs without data and is counted."""
    with ExitStack() as on:
        on.enter_context(_patched(F, "scaled_dot_product_attention", sdpa(trace)))
        for module, name in _holders_of_flex():
            on.enter_context(_patched(module, name, flex(trace)))
        on.enter_context(torch.device("meta"))
        on.enter_context(Calls(trace))
        on.enter_context(trace)
        yield


@contextmanager
def _patched(module: Any, name: str, stand_in: Callable) -> Iterator[None]:
    """`module.name` is the stand-in for a while: what PyTorch's own Python code calls, no mode sees."""
    true = getattr(module, name)
    setattr(module, name, stand_in)
    try:
        yield
    finally:
        setattr(module, name, true)


def _holders_of_flex() -> list[tuple[Any, str]]:
    """Every module that has imported flex_attention by name."""
    home = sys.modules.get("torch.nn.attention.flex_attention")
    if home is None:
        return []
    true = home.flex_attention
    found = []
    for module in list(sys.modules.values()):
        for name in ("flex_attention", "compiled_flex_attention"):
            if getattr(module, "__dict__", {}).get(name) is true:
                found.append((module, name))
    return found
