"""Watching a model run: every attention call is seen, whichever kernel makes it, and the model is left alone.

Three things are in place while a model is watched, and gone afterwards:
- F.scaled_dot_product_attention and rg.attention are replaced, wherever a module holds them, by functions that
  take note and then call them;
- a dispatch mode sees the operations themselves: PyTorch's fused layers, which call no function (the fast path
  of nn.MultiheadAttention and nn.TransformerEncoder), flex_attention, and a softmax that weighs values (eager);
- hooks on all modules, none on one of them, keep the path of the module that is running. (A hook on a module
  itself, or a function mode, would make PyTorch leave its fast path.)
"""

import inspect
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..engine import attention as engine
from ..engine.call import Call, as_pattern_and_table, check
from ..errors import RegardError
from .calls_of_ops import READERS, by_name, from_flex, from_sdpa
from .captured import Compared, Role, Way, Written
from .origins import Origins, aten
from .terms import Declared

NAMED = re.compile(r"atten|attn", re.IGNORECASE)
MIXING = {aten.bmm, aten.mm}
VARIABLE_LENGTH = {aten._flash_attention_forward, aten._efficient_attention_forward}


class Seen(NamedTuple):
    """One call, as soon as it is seen."""

    name: str
    role: Role
    way: Way
    source: Compared | Written


Change = Callable[
    [int, Tensor, Any], Tensor
]  # (number of the call, its output (b, h, n, d_v), source) → output


class Watcher(TorchDispatchMode):
    """Calls `see` for each attention of the model; `missed` says what could not be seen."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled while we watch; the guard costs 1.5 s once and 40 µs an operation

    def __init__(self, model: Any, see: Callable[[Seen], None], change: Change | None = None):
        super().__init__()
        self.missed: list[str] = []
        self.modules = 0
        self._see, self._change, self._origins = see, change, Origins()
        self._paths = _paths(model)
        self._stack: list[nn.Module] = []
        self._inside = 0  # of a call that is already seen
        self._thread = threading.get_ident()
        self._seen = 0
        self._marks: list[
            tuple[int, bool]
        ] = []  # calls seen before each running module; if a named one is in it

    # what runs

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        packet = getattr(func, "overloadpacket", None)
        if packet in READERS:
            way, read = READERS[packet]
            source = read(by_name(func, args, kwargs))
            if source is None:
                self.miss(f"{self._path()}: {packet} over two different inputs is not read")
            else:
                suffix = ".self_attn" if packet is aten._transformer_encoder_layer_fwd else ""
                self.saw(way, source, self._path() + suffix)
                return self.run(source, func, *args, **kwargs)
        elif packet in VARIABLE_LENGTH:
            self.miss(f"{self._path()}: {packet}, sequences of different lengths in one row, is not read")
        elif packet is None and getattr(func, "_name", "") == "flex_attention":
            source = from_flex(args)
            self.saw("flex", source)
            return self.run(source, func, *args, **kwargs)
        elif packet in MIXING:
            written = self._weighed(*args[:2])
            if written is not None:
                return self.run(written, func, *args, **kwargs)
        out = func(*args, **kwargs)
        self._origins.note(func, args, out)
        return out

    def _weighed(self, weights: Tensor, values: Tensor) -> Written | None:
        """A product: if its left side came out of a softmax, an attention was written out by hand."""
        if (found := self._origins.take_weights(weights)) is None:
            return None
        table, pair = found
        heads = _heads(self._stack[-1] if self._stack else None, table)
        if table.dim() == 3 and heads > 1:
            table = rearrange(table, "(b h) n m -> b h n m", h=heads)
        elif table.dim() == 3:
            table = rearrange(table, "b n m -> b 1 n m")
        elif table.dim() == 2:
            table = rearrange(table, "n m -> 1 1 n m")
        if table.dim() != 4:
            self.miss(f"{self._path()}: weights of shape {tuple(table.shape)} are not read")
            return None
        b, h = table.shape[:2]
        v = values[None] if values.dim() == 2 else values
        fits = v.shape[0] == b * h and v.shape[1] == table.shape[-1]
        written = Written(table, rearrange(v, "(b h) m d -> b h m d", b=b) if fits else None)
        alike = bool(pair[0] & pair[1]) if pair and pair[0] and pair[1] else None
        self.saw("eager", written, role=_role(alike, table.shape[-2], table.shape[-1]))
        return written

    def saw(
        self, way: Way, source: Compared | Written, name: str | None = None, role: Role | None = None
    ) -> None:
        if role is None and isinstance(source, Compared):
            alike = True if way == "fast path" else self._origins.alike(source.q, source.k)
            role = _role(alike, source.shape[2], source.shape[3])
        self._seen += 1
        with (
            self.not_again(),
            torch.no_grad(),
            _disable_current_modes(),
        ):  # our own operations need no watching
            self._see(Seen(name or self._path(), role or "self", way, source))

    def run(
        self, source: Compared | Written | None, attend: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """An attention that is already noted; its output is changed on its way, if that was asked."""
        with self.not_again():
            out = attend(*args, **kwargs)
            if self._change is not None and source is not None:
                out = self._changed(source, out)
        self._origins.start_anew(out)
        return out

    def _changed(self, source: Compared | Written, out: Any) -> Any:
        first, *rest = out if isinstance(out, tuple) else (out,)
        b, h, n, _ = source.shape
        if first.numel() // first.shape[-1] != b * h * n:
            raise RegardError(
                f"{self._path()}: an output of {tuple(first.shape)} cannot be told apart by heads"
            )
        changed = self._change(self._seen - 1, first.reshape(b, h, n, -1), source)
        changed = changed.reshape(first.shape)
        return (changed, *rest) if isinstance(out, tuple) else changed

    def miss(self, sentence: str) -> None:
        if sentence not in self.missed:
            self.missed.append(sentence)

    @contextmanager
    def not_again(self) -> Iterator[None]:
        """What runs in here belongs to a call that was seen, or is our own."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def watches(self) -> bool:
        return self._inside == 0 and threading.get_ident() == self._thread

    # where it runs

    def enter(self, module: nn.Module, _args: Any) -> None:
        if threading.get_ident() == self._thread:
            self.modules += 1
            self._stack.append(module)
            self._marks.append((self._seen, False))

    def leave(self, module: nn.Module, _args: Any, _out: Any) -> None:
        if threading.get_ident() != self._thread or not self._stack or self._stack[-1] is not module:
            return
        path = self._path()
        self._stack.pop()
        before, told = self._marks.pop()
        named = bool(NAMED.search(type(module).__name__))
        if named and self._seen == before and not told and any(True for _ in module.parameters()):
            self.miss(f"{path} ({type(module).__name__}): it ran, and no attention could be seen in it")
        if self._marks and (named or told):
            self._marks[-1] = (self._marks[-1][0], True)

    def _path(self) -> str:
        for module in reversed(self._stack):
            if id(module) in self._paths:
                return self._paths[id(module)] or type(module).__name__
        return type(self._stack[-1]).__name__ if self._stack else "attention"


@contextmanager
def watching(model: Any, see: Callable[[Seen], None], change: Change | None = None) -> Iterator[Watcher]:
    """Watch what runs inside, on this thread; `see` is called at each attention of the model."""
    watcher = Watcher(model, see, change)
    with ExitStack() as undo:
        for hook in (
            register_module_forward_pre_hook(watcher.enter),
            register_module_forward_hook(watcher.leave),
        ):
            undo.callback(hook.remove)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        undo.enter_context(
            _replaced((sdpa, _noting_sdpa(watcher)), (engine.attention, _noting_ours(watcher)))
        )
        if "torch._dynamo" in sys.modules or "torch.nn.attention.flex_attention" in sys.modules:
            undo.enter_context(torch.compiler.set_stance("force_eager"))  # a compiled model shows nothing
        undo.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        warnings.filterwarnings(
            "ignore", message=r"Using `torch.compile\(module\)` when there are global hooks"
        )
        undo.enter_context(watcher)
        yield watcher


def _noting_sdpa(watcher: Watcher) -> Callable[..., Any]:
    original = torch.nn.functional.scaled_dot_product_attention

    def scaled_dot_product_attention(*args, **kwargs):
        if not watcher.watches():
            return original(*args, **kwargs)
        source = None
        if any(isinstance(x, Tensor) and x.is_nested for x in (*args, *kwargs.values())):
            watcher.miss(f"{watcher._path()}: attention over nested tensors is not read")
        else:
            watcher.saw("sdpa", source := from_sdpa(*args, **kwargs))
        return watcher.run(source, original, *args, **kwargs)

    return scaled_dot_product_attention


def _noting_ours(watcher: Watcher) -> Callable[..., Any]:
    original, signature = engine.attention, inspect.signature(engine.attention)

    def attention(*args, **kwargs):
        if not watcher.watches():
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        fields = dict(given.arguments)
        fields.pop("backend")
        fields["pattern"], fields["table"] = as_pattern_and_table(fields["pattern"])
        call = check(Call(**fields))
        scale = call.factor if call.scale is None else float(call.scale)
        source = Compared(call.q, call.k, call.v, scale, (Declared(call),), call.ties)
        watcher.saw("regard", source)
        return watcher.run(source, original, *args, **kwargs)

    return attention


@contextmanager
def _replaced(*pairs: tuple[Any, Any]) -> Iterator[None]:
    """The second of each pair in place of the first, under every name by which a loaded module knows it."""
    by = {id(original): (original, new) for original, new in pairs}
    places = [
        (holder, name, *by[id(held)])
        for holder in list(sys.modules.values())
        if isinstance(holder, type(sys)) and not by.keys().isdisjoint(map(id, list(vars(holder).values())))
        for name, held in list(vars(holder).items())
        if id(held) in by
    ]
    for holder, name, _, new in places:
        setattr(holder, name, new)
    try:
        yield
    finally:
        for holder, name, original, _ in places:
            setattr(holder, name, original)


def _paths(model: Any) -> dict[int, str]:
    owner = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
    if not isinstance(owner, nn.Module):
        return {}
    return {id(m): path.removeprefix("_orig_mod").lstrip(".") for path, m in owner.named_modules()}


def _heads(module: nn.Module | None, table: Tensor) -> int:
    """How many heads are folded into the first axis of a table: what its module says of itself, or 1."""
    for name in ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads"):
        heads = getattr(module, name, None)
        if isinstance(heads, int) and heads > 0 and table.dim() == 3 and table.shape[0] % heads == 0:
            return heads
    return 1


def _role(alike: bool | None, n: int, m: int) -> Role:
    return "self" if alike or (alike is None and n == m) else "cross"
