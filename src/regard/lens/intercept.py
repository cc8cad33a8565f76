"""Intercepting every attention call of a running model, whichever kernel makes it, without changing the model.

The interception has three parts:
- F.scaled_dot_product_attention and rg.attention are replaced by functions that report the call and then make it;
- a dispatch mode intercepts the operators: PyTorch's fused layers, which call no Python function (the fast path of
  nn.MultiheadAttention and nn.TransformerEncoder), flex_attention, and a softmax whose result weights values;
- global module hooks record the path of the running module. (A hook on a single module, or a TorchFunctionMode,
  would turn off PyTorch's fast path.)

The dispatch mode belongs to one thread. The functions and the hooks are shared by all threads (process_wide.py) and
look up the interceptor of the calling thread: what other threads run is passed on and not recorded.
"""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import handle_torch_function, has_torch_function

from ..compat import (
    DispatchMode,
    aten_operator,
    aten_operators,
    has_kernel,
    transforms_active,
    without_dispatch_modes,
)
from ..engine import attention as engine
from ..errors import RegardError
from ..interop import patterned
from .axes import PRODUCTS, Parts
from .calls import Implementation, Positions, QueryKeyScores, Role, Source, StoredWeights, joined_heads
from .operators import READERS, SdpaArguments, arguments_by_name, from_flex, from_sdpa
from .process_wide import SharedChange, eager_compiled_functions, replaced_functions
from .products import Product, Rows, read_product, sides_of, sides_of_one_key
from .provenance import Provenance, Weights
from .score_mods import RegardArguments

ATTENTION_NAME = re.compile(r"atten|attn", re.IGNORECASE)
COMPILED_PART = re.compile(r"(^|\.)_orig_mod(?=\.|$)")  # torch.compile's name for the module that it compiles
VARIABLE_LENGTH = aten_operators("_flash_attention_forward", "_efficient_attention_forward")
ENCODER_LAYER = aten_operator("_transformer_encoder_layer_fwd")


class InterceptedCall(NamedTuple):
    """One attention call, reported before it runs."""

    name: str
    role: Role
    implementation: Implementation
    source: Source
    positions: Positions = Positions()


OnCall = Callable[[InterceptedCall], None]
ChangeOutput = Callable[[int, Tensor, Any], Tensor]  # (call number, output (b, h, n, d_v), source) → output


class Interceptor(DispatchMode):
    """Calls `on_call` for each attention of the model; `missed` lists what could not be recorded."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled while it is active; the check would cost 1.5 s once, 40 µs per operator

    def __init__(self, model: Any, on_call: OnCall, change_output: ChangeOutput | None = None):
        super().__init__()
        self.missed: list[str] = []
        self.module_calls = 0
        self._on_call, self._change_output, self._provenance = (
            on_call,
            change_output,
            Provenance(_weights(model)),
        )
        self._paths = _module_paths(model)
        self._calls = 0
        self.empty: list[str] = []  # calls without a batch row, a query or a key: there is nothing to show
        self.parts: list[QueryKeyScores] | None = None  # collects the calls of some heads each
        self._paused = 0  # > 0 inside a call that is already reported, and in our own operations
        # The running modules, innermost last, each with what was seen before it (`_seen`), and whether a module
        # inside it has "attention" in its name.
        self._running: list[tuple[nn.Module, tuple[int, int, int], bool]] = []

    # the calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        packet = getattr(func, "overloadpacket", None)
        if packet in READERS:
            implementation, read = READERS[packet]
            source = read(arguments_by_name(func, args, kwargs))
            if source is None:
                self.miss(f"{self.path()}: {packet} with different inputs for q, k and v is not supported")
            else:
                suffix = ".self_attn" if packet is ENCODER_LAYER else ""
                self.report(implementation, source, self.path() + suffix)
                return self.run(source, func, *args, **kwargs)
        elif packet in VARIABLE_LENGTH:
            self.miss(f"{self.path()}: {packet} (variable-length sequences) is not supported")
        elif packet is None and _name(func) == "flex_attention":
            source = from_flex(args)
            self.report("flex", source)
            return self.run(source, func, *args, **kwargs)
        elif packet is torch.ops.aten.mul:
            self._attention_to_one_key(*args[:2])
        elif packet in PRODUCTS:
            eager = self._eager_attention(*(args[i] for i in PRODUCTS[packet]))
            if eager is not None:
                return self.run(eager, func, *args, **kwargs)
        if torch.is_inference_mode_enabled() and _is_composite(func):
            # There it arrives whole; elsewhere, only the operators arrive that it consists of.
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        self._provenance.record(func, args, out)
        return out

    def _eager_attention(self, left: Tensor, right: Tensor) -> StoredWeights | None:
        """The attention that a matrix product ends, if one of its factors came out of a softmax."""
        for weights, values, keys in ((left, right, -1), (right, left, -2)):
            self._provenance.use(weights)
            if not weights.numel() and self._provenance.of(weights).softmax is not None:
                self.empty.append(f"{self.path()} has attention weights of shape {tuple(weights.shape)}")
                return None
            if (taken := self._provenance.take_weights(weights, keys)) is not None:
                return self._stored(weights, values, keys, *taken)
        return None

    def _attention_to_one_key(self, left: Any, right: Any) -> None:
        """Attention over a single key, which einsum computes as an elementwise product."""
        if isinstance(left, Tensor) and isinstance(right, Tensor):
            for weights, values in ((left, right), (right, left)):
                if (taken := self._provenance.take_one_key(weights, values)) is not None:
                    softmax, axes = taken
                    found = read_product(softmax, sides_of_one_key(axes, values), True, (), self._heads())
                    if isinstance(found, Product):
                        self._report_stored(weights, None, softmax, found)

    def _stored(
        self, weights: Tensor, values: Tensor, keys: int, softmax: Weights, axes: Sequence[Parts]
    ) -> StoredWeights | None:
        value_keys = self._provenance.axes.of(values)[-3 - keys]
        found = read_product(softmax, sides_of(axes, keys == -1), keys == -1, value_keys, self._heads())
        if isinstance(found, Product):
            return self._report_stored(weights, values, softmax, found)
        if not self._provenance.axes.constant(values):  # else a linear layer that reads probabilities
            self.miss(f"{self.path()}: {found}")
        return None

    def _report_stored(
        self, weights: Tensor, values: Tensor | None, softmax: Weights, found: Product
    ) -> StoredWeights:
        if found.note:
            self.miss(f"{self.path()}: {found.note}")
        with self._pause(), torch.no_grad(), without_dispatch_modes():
            used = found.arranged(weights.detach())
            plain = found.arranged_softmax(softmax)
            # Signed or rescaled weights are shown as they are used; in training the softmax, without dropout.
            training = bool(self._running) and self._running[-1][0].training
            if plain is not None and (training or torch.equal(plain.to(used.dtype), used)):
                used = plain
            source = (
                StoredWeights(used) if values is None else StoredWeights(used, found.values(values), found)
            )
        pair = softmax.pair
        same = bool(pair[0] & pair[1]) if pair and pair[0] and pair[1] else None
        positions = Positions(Rows.of(found.queries), Rows.of(found.keys))
        if self._provenance.axes.differ(found.queries, found.keys):
            same, positions = False, Positions(None, positions.keys)
        self.report("eager", source, role=_role(same, *used.shape[-2:]), positions=positions)
        return source

    def _heads(self) -> int | None:
        """The number of heads, by the attributes of the running module."""
        module = self._running[-1][0] if self._running else None
        for name in ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads"):
            heads = getattr(module, name, None)
            if isinstance(heads, int) and heads > 0:
                return heads
        return None

    def report(
        self,
        implementation: Implementation,
        source: Source,
        name: str | None = None,
        role: Role | None = None,
        positions: Positions | None = None,
    ) -> None:
        if 0 in source.shape:
            b, _, n, m = source.shape
            self.empty.append(f"{name or self.path()} has {b} batch rows, {n} queries and {m} keys")
            return
        if isinstance(source, QueryKeyScores):
            same: bool | None = True
            if implementation != "fast path":
                same, positions = self._origin(source)
            role = _role(same, source.shape[2], source.shape[3])
        self._calls += 1
        with self._pause(), torch.no_grad(), without_dispatch_modes():
            self._on_call(
                InterceptedCall(
                    name or self.path(), role or "self", implementation, source, positions or Positions()
                )
            )

    def _origin(self, source: QueryKeyScores) -> tuple[bool | None, Positions]:
        """Whether queries and keys are positions of one sequence, and which of them they are."""
        axes = self._provenance.axes
        queries, keys = (axes.of(x)[2] for x in (source.q, source.k))
        both = {f.axis for f in axes.selected(source.k)}
        # the query of q = w_q(x[:, 0])
        one = [f for f in axes.selected(source.q) if f.axis not in both and not f.learned]
        queries = queries or tuple(one)
        if axes.differ(queries, keys):
            return False, Positions(None, Rows.of(keys))
        return self._provenance.same_sequence(source.q, source.k), Positions(Rows.of(queries), Rows.of(keys))

    def run(self, source: Source | None, attend: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a call that is already reported, and apply `change_output` to its output, if given."""
        with self._pause():
            out = attend(*args, **kwargs)
            if self._change_output is not None and source is not None and 0 not in source.shape:
                out = self._changed(self._change_output, source, out)
        self._provenance.start_anew(out)
        return out

    def _changed(self, change: ChangeOutput, source: Source, out: Any) -> Any:
        first, *rest = out if isinstance(out, tuple) else (out,)
        b, h, n, _ = source.shape
        product = source.product if isinstance(source, StoredWeights) else None
        if product is not None:
            changed = product.from_heads(change(self._calls - 1, product.heads_of(first), source), first)
        elif first.numel() // first.shape[-1] != b * h * n:
            raise RegardError(f"{self.path()}: an output of shape {tuple(first.shape)} has no axis for heads")
        else:
            changed = change(self._calls - 1, first.reshape(b, h, n, -1), source).reshape(first.shape)
        return (changed, *rest) if isinstance(out, tuple) else changed

    def miss(self, sentence: str) -> None:
        if sentence not in self.missed:
            self.missed.append(sentence)

    @contextmanager
    def _pause(self) -> Iterator[None]:
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @property
    def softmaxes(self) -> int:
        return self._provenance.softmaxes

    @property
    def paused(self) -> bool:
        return self._paused > 0

    # the running module

    def enter_module(self, module: nn.Module) -> None:
        self.module_calls += 1
        self._running.append((module, self._seen, False))

    def leave_module(self, module: nn.Module) -> None:
        if not self._running or self._running[-1][0] is not module:
            return
        path = self.path()
        _, before, contains_named = self._running.pop()
        # A part without parameters belongs to the module around it, which is checked with what ran in the part.
        named = bool(ATTENTION_NAME.search(type(module).__name__)) and any(True for _ in module.parameters())
        if named and not contains_named:
            calls, unread, empty = (now - then for now, then in zip(self._seen, before, strict=True))
            if calls or not empty:
                self._report_unread(f"{path} ({type(module).__name__})", calls, unread)
        if self._running and (named or contains_named):
            outer, then, _ = self._running[-1]
            self._running[-1] = (outer, then, True)

    @property
    def _seen(self) -> tuple[int, int, int]:
        """The numbers so far of attention calls, of softmaxes that were not read as one, and of empty calls."""
        unread = self._provenance.unread + self._provenance.read_in_part
        return self._calls, unread, len(self.empty)

    def _report_unread(self, name: str, calls: int, unread: int) -> None:
        """Report an attention module that was not recorded completely, or not as one call."""
        if calls == 0:
            self.miss(f"{name}: it ran, but no attention call was found in it")
        elif unread > 0:
            were = "was" if unread == 1 else "were"
            self.miss(
                f"{name}: {unread} of its softmaxes {were} not read; its maps show part of its attention"
            )
        elif calls > 1:
            self.miss(
                f"{name}: its attention is computed in {calls} parts; each is shown as a separate layer"
            )

    def path(self) -> str:
        """The path of the innermost running module that has one in the model."""
        for module, *_ in reversed(self._running):
            if id(module) in self._paths:
                return self._paths[id(module)] or type(module).__name__
        return type(self._running[-1][0]).__name__ if self._running else "attention"


# The interceptors of each thread, innermost last.
_ACTIVE = threading.local()


def _active() -> Interceptor | None:
    """The interceptor that records what the calling thread runs, if there is one."""
    stack = getattr(_ACTIVE, "stack", None)
    return stack[-1] if stack else None


@contextmanager
def intercept(
    model: Any, on_call: OnCall, change_output: ChangeOutput | None = None
) -> Iterator[Interceptor]:
    """Report to `on_call` each attention that this thread runs inside the block."""
    interceptor = Interceptor(model, on_call, change_output)
    if not hasattr(_ACTIVE, "stack"):
        _ACTIVE.stack = []
    with _REPORTING_FUNCTIONS:
        _ACTIVE.stack.append(interceptor)
        try:
            with interceptor:
                yield interceptor
        finally:
            _ACTIVE.stack.remove(interceptor)


@contextmanager
def _reporting_functions() -> Iterator[None]:
    """The process-wide part of the interception."""
    sdpa, attention = torch.nn.functional.scaled_dot_product_attention, engine.attention
    replacements = {sdpa: _reporting_sdpa(sdpa), attention: _reporting_regard(attention)}
    replacements[patterned.by_head] = _reporting_by_head(patterned.by_head)
    with ExitStack() as undo:
        for hook in (register_module_forward_pre_hook(_enter), register_module_forward_hook(_leave)):
            undo.callback(hook.remove)
        undo.enter_context(replaced_functions(replacements))
        undo.enter_context(eager_compiled_functions())
        yield


_REPORTING_FUNCTIONS = SharedChange(_reporting_functions)


def _enter(module: nn.Module, _args: Any) -> None:
    if (interceptor := _active()) is not None:
        interceptor.enter_module(module)


def _leave(module: nn.Module, _args: Any, _out: Any) -> None:
    if (interceptor := _active()) is not None:
        interceptor.leave_module(module)


def _reporting_sdpa(original: Callable[..., Any]) -> Callable[..., Any]:
    def scaled_dot_product_attention(*args, **kwargs):
        interceptor = _active()
        if interceptor is None or interceptor.paused or transforms_active():
            return original(*args, **kwargs)  # inside torch.vmap the operators are intercepted
        if has_torch_function(given := (*args, *kwargs.values())):
            # What handles it may compute something else: a pattern of rg.use, whose own call is then reported.
            return handle_torch_function(scaled_dot_product_attention, given, *args, **kwargs)
        source = None
        if any(isinstance(x, Tensor) and x.is_nested for x in (*args, *kwargs.values())):
            interceptor.miss(f"{interceptor.path()}: attention over nested tensors is not supported")
        else:
            interceptor.report("sdpa", source := from_sdpa(SdpaArguments(*args, **kwargs)))
        return interceptor.run(source, original, *args, **kwargs)

    return scaled_dot_product_attention


def _reporting_regard(original: Callable[..., Any]) -> Callable[..., Any]:
    def attention(*args, **kwargs):
        interceptor = _active()
        if interceptor is None or interceptor.paused or transforms_active():
            return original(*args, **kwargs)
        call = engine.call_of(*args, **kwargs)
        scale = call.factor if call.scale is None else float(call.scale)
        mods = (RegardArguments(call),)
        source = QueryKeyScores(call.q, call.k, call.v, scale, mods, call.ties, call.sink_logits)
        if interceptor.parts is not None:  # of a call by heads, which is reported as a whole
            interceptor.parts.append(source)
            return interceptor.run(None, original, *args, **kwargs)
        interceptor.report("regard", source)
        return interceptor.run(source, original, *args, **kwargs)

    return attention


def _reporting_by_head(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """For `by_head`, which runs the heads of each pattern of rg.use by themselves: they are one layer."""

    def by_head(given, q, k, v, run):
        interceptor = _active()
        if interceptor is None or interceptor.paused or transforms_active():
            return original(given, q, k, v, run)
        parts: list[tuple[list[int], QueryKeyScores]] = []

        def run_part(pattern, q, k, v, heads):
            own: list[QueryKeyScores] = []
            with patch.object(interceptor, "parts", own):
                out = run(pattern, q, k, v, heads)
            parts.extend((heads.tolist(), source) for source in own)
            return out

        out = original(given, q, k, v, run_part)
        if not parts:  # weights were requested: their product was intercepted
            return out
        source = joined_heads(q, k, v, parts)
        interceptor.report("regard", source)
        return interceptor.run(source, lambda: out)

    return by_head


@lru_cache(maxsize=1024)
def _is_composite(operator: Any) -> bool:
    """Whether it is defined by other operators, such as a product of tables with any number of axes."""
    return hasattr(operator, "decompose") and has_kernel(operator.name(), "CompositeImplicitAutograd")


def _name(operator: Any) -> str:
    """The name of a higher-order operator."""
    name = getattr(operator, "name", None)
    return name() if callable(name) else ""


def _module_paths(model: Any) -> dict[int, str]:
    owner = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
    if not isinstance(owner, nn.Module):
        return {}
    return {id(m): COMPILED_PART.sub("", path).lstrip(".") for path, m in owner.named_modules()}


def _weights(model: Any) -> list[Tensor]:
    """The parameters and buffers of a model."""
    owner = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
    return [*owner.parameters(), *owner.buffers()] if isinstance(owner, nn.Module) else []


def _role(same_sequence: bool | None, n: int, m: int) -> Role:
    return "self" if same_sequence or (same_sequence is None and n == m) else "cross"
