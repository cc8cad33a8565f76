"""A module on meta tensors: a forward pass, a prompt and one more token with a cache, or a training step.

Over several ranks each one holds:
fsdp  weights, gradients and optimizer state divided; the weights of the block that runs and of the next one gathered
      whole, and the gradient of a block whole before it is scattered
ddp   everything, and gradients a second time in the buckets that are exchanged
"""

import copy
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ...compat import run_backward
from ...errors import RegardError, ShapeError, SpecError
from ...generation.steps import StackSteps
from ...machine import readable
from ...nested import map_leaves
from ...nn.embedding import LanguageHead
from ...nn.stack import EncoderDecoder, Stack
from ...pattern import causal
from ...pattern.causal_bias import is_causal_bias
from ...spec.base import require_known, require_positive
from ..trace.attention import H200, Gpu
from ..trace.tracer import DataDependent, Trace, tracing
from .allocator import Caching, Events, Usage, replay, rounded, summed
from .step import Optimizer, TrainingStep, autocast_region, loss_of, prepare

UNTRACED = {  # what meta tensors cannot represent, by names that only PyTorch's own messages have
    "NestedIntNode": "nested tensors have no meta form; pass padded ones",
    "NestedTensorImpl": "nested tensors have no meta form; pass padded ones",
    "SparseTensorImpl": "sparse tensors have no meta form; price dense gradients: Embedding(sparse=False)",
    "can't optimize a non-leaf": "TorchScript does not train on meta tensors; pass the module it was made of",
    "'lengths' argument should be a 1D CPU": "packed sequences have no meta form; pass padded ones",
}
STRATEGIES = ("fsdp", "ddp")
DIVIDED = ("weights", "gradients", "optimizer state", "master weights")  # among ranks by FSDP
TABLES = "engine tables"  # tables and buffers of the engine, which later calls use again
CUBLAS = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot")
WORKSPACE, BIAS_WORKSPACE = 32 << 20, 1 << 20  # cuBLAS and cuBLASLt, per thread that multiplies (H100, H200)


@dataclass(frozen=True)
class Setting:
    """What runs: a module with its inputs (positional, named), targets, dtype, training step, device.

    training None is a forward pass without gradients; cached: of a prompt, then of one more token.
    """

    module: nn.Module
    given: tuple[tuple, dict]
    targets: Tensor | None = None
    dtype: torch.dtype = torch.float32
    training: TrainingStep | None = None
    device: str = "cpu"
    gpu: Gpu = H200
    cached: bool = False
    evaluate: bool = False  # whether the module runs in its mode for inference, not in the mode it is in

    @property
    def inference(self) -> "Setting":
        """The same model without a training step: labels are left out, or become the input of a decoder."""
        args, named = self.given[0], dict(self.given[1])
        labels = named.pop("labels", None)
        if labels is not None and getattr(getattr(self.module, "config", None), "is_encoder_decoder", False):
            named.setdefault("decoder_input_ids", labels)
        return replace(self, given=(args, named), targets=None, training=None, evaluate=True)


@dataclass
class Run:
    """A traced call: the kind of each storage, its module, and where the call begins among the meter's events."""

    trace: Trace
    module: nn.Module
    kinds: dict[int, str]  # key of a storage → weights, inputs, gradients, …; what is not listed is temporary
    trains: bool = False
    begin: int = 0
    owners: dict[int, str] = field(default_factory=dict)  # storages of parameters and gradients → module

    @property
    def workspaces(self) -> list[int]:
        """Buffers of cuBLAS, and of cuBLASLt once a product adds a bias, of each thread that multiplies matrices."""
        if self.trace.device != "cuda":
            return []
        # The backward pass has a thread of its own.
        threads = {(r.phase == "backward", r.operation) for r in self.trace.meter.records}
        products, biased = ({t for t, name in threads if name in names} for names in (CUBLAS, ("addmm",)))
        return [WORKSPACE] * len(products) + [BIAS_WORKSPACE] * len(biased)

    def keys(self, kind: str) -> set[int]:
        return {k for k, name in self.kinds.items() if name == kind}

    def bytes(self, kind: str) -> int:
        return sum(self.trace.meter.records[k].bytes for k in self.keys(kind))

    def mark(self, keys: Iterable[int | None], kind: str) -> None:
        self.kinds |= {k: kind for k in keys if k is not None and k not in self.kinds}

    def own(self, name: str, x: Tensor | None, kind: str) -> None:
        """The storage of x is of this kind, and belongs to the module that has the parameter of this name."""
        if x is not None and (key := self.trace.meter.key_of(x)) is not None:
            self.owners[key] = name.rpartition(".")[0]
            self.mark([key], kind)

    def usage(
        self, ranks: int = 1, strategy: str = "fsdp", sizes: list[int] | None = None, expandable: bool = False
    ) -> Usage:
        """Peak and reserved bytes of one rank. sizes: of storages; expandable: segments."""
        require_positive("ranks", ranks)
        require_known("strategy", strategy, STRATEGIES)
        meter, buffers = self.trace.meter, list(self.workspaces)
        sizes = [r.bytes for r in meter.records] if sizes is None else list(sizes)
        if ranks > 1 and strategy == "ddp":
            buffers.append(self.bytes("gradients"))
        elif ranks > 1:
            buffers += [2 * self._largest_block(), self._largest_block()]
            for key in set().union(*map(self.keys, DIVIDED)):
                sizes[key] = -(-sizes[key] // ranks)
        setup = [*meter.events[: self.begin], *((len(sizes) + i, 1) for i in range(len(buffers)))]
        persistent = self.keys("optimizer state") | self.keys("master weights") | self.keys(TABLES)
        phases = [*(r.phase for r in meter.records), *("setup" for _ in buffers)]
        events, sizes = Events(setup, meter.events[self.begin :], persistent, phases), [*sizes, *buffers]
        on_gpu = self.trace.device == "cuda"
        repeats = (2 if on_gpu else 1) if self.trains or self.keys(TABLES) else 0
        if on_gpu and not expandable:
            return replay(Caching(), sizes, events, repeats)
        numbers = torch.tensor(sizes, dtype=torch.long)
        return summed(rounded(numbers) if on_gpu else numbers, events, repeats)

    def _largest_block(self) -> int:
        """Bytes of the weights of the largest repeated block: modules under one number, as in layers.3."""
        blocks: Counter[str] = Counter()
        for key in self.keys("weights"):
            parts = self.owners.get(key, "").split(".")
            at = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
            blocks[".".join(parts[: at + 1])] += self.trace.meter.records[key].bytes
        return max(blocks.values(), default=0)


def run(setting: Setting) -> Run:
    """The call on meta tensors; else what is wrong with it in words, with what is still known."""
    name = getattr(setting.module, "__name__", type(setting.module).__name__)
    count = sum(p.numel() for p in setting.module.parameters())
    known = f"; still known: {count:,} parameters, {readable(4 * count)} in float32"
    try:
        # In inference mode operators arrive whole, and no FLOPs would be counted.
        with torch.inference_mode(False), _as_written():
            return _run(setting)
    except DataDependent as e:
        raise DataDependent(f"{e}{known}") from e
    except RegardError:
        raise
    except Exception as e:
        text = str(e).splitlines()[0] if str(e) else ""
        if isinstance(e, TypeError) and "argument" in text:
            raise ShapeError(f"{name} does not take these inputs: {text}") from e
        if isinstance(e, RuntimeError) and any(word in text for word in ("overflow", "too large", "numel")):
            raise ShapeError(f"{name} at these sizes overflows 64-bit sizes: {text}{known}") from e
        words = text if type(e) is RuntimeError and text else f"{type(e).__name__}: {text}".rstrip(": ")
        words = next((said for key, said in UNTRACED.items() if key in text), words)
        raise ShapeError(f"{name} fails on inputs of these shapes: {words}{known}") from e


@contextmanager
def _as_written() -> Iterator[None]:
    """Parts that torch.compile wraps run as they are written: compiling meta tensors would fail."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.filterwarnings(
            "ignore", message=r"Using `torch.compile\(module\)` when there are global hooks"
        )
        yield


def _run(setting: Setting) -> Run:
    trace, training = Trace(setting.device, setting.gpu), setting.training
    meter = trace.meter
    twin = twin_of(setting.module, trace, setting.dtype)

    def given(x: Any) -> Any:
        """A tensor as a meta tensor in the requested dtype; the values of a real one are known."""
        if isinstance(x, Tensor):
            x = trace.to_meta(x.to(setting.dtype) if x.dtype == torch.float32 else x)
            meter.track(x, "", "input")
        return x

    (args, kwargs), targets = map_leaves(given, (setting.given, setting.targets))
    if setting.evaluate:
        twin.eval()
    if training is not None:
        prepare(twin, training)
        for p in twin.parameters():  # adapters have new parameters
            meter.track(p, "", "weight")
    result = Run(trace, twin, {}, training is not None)
    for name, x in (*twin.named_parameters(), *twin.named_buffers()):
        result.own(name, x, "weights")
    result.mark(meter.alive.values(), "inputs")
    with tracing(trace, twin), torch.set_grad_enabled(training is not None):
        result.begin = len(meter.events)
        if training is not None:
            _train(result, args, kwargs, targets, training)
        elif setting.cached:
            _generate(result, args, kwargs)
        else:
            with meter.during("forward"):
                twin(*args, **kwargs)
        meter.stop()  # tables of the engine outlive the run
    result.mark(trace.kept, TABLES)
    return result


def twin_of(module: nn.Module, trace: Trace, dtype: torch.dtype) -> nn.Module:
    """A copy whose parameters and buffers are metered meta tensors, in `dtype` where they are float32."""
    twins: dict[int, Any] = {}
    for p in module.parameters():
        kind = dtype if p.dtype == torch.float32 else p.dtype
        empty = torch.empty_strided(p.shape, p.stride(), dtype=kind, device="meta")
        twins[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
    # Buffers, and tensors that a module keeps beside them, such as a cache.
    kept = [x for inner in module.modules() for x in vars(inner).values() if isinstance(x, Tensor)]
    masks = {id(x): x for x in kept if is_causal_bias(x)}  # which have no values to copy
    for x in (*module.buffers(), *(x for x in kept if id(x) not in masks)):
        if id(x) not in twins:
            twins[id(x)] = x.clone() if x.is_meta else trace.copied(x)
    for x in twins.values():
        trace.meter.track(x, "", "weight")
    try:
        return copy.deepcopy(module, twins | masks)
    except Exception as e:
        raise SpecError(f"{type(module).__name__} cannot be copied, which tracing it needs: {e}") from e


def _train(result: Run, args: tuple, kwargs: dict, targets: Tensor | None, training: TrainingStep) -> None:
    """Forward, loss, backward, optimizer. The module's parameters and the inputs are known to the meter."""
    trace, module, meter = result.trace, result.module, result.trace.meter
    names = {p: name for name, p in module.named_parameters()}
    if not any(p.requires_grad for p in names):
        raise ShapeError("no output requires a gradient: a training step needs trainable weights")
    optimizer = Optimizer(module, training, trace.device)
    result.mark(map(meter.key_of, optimizer.masters), "master weights")
    result.begin = len(meter.events)
    before, saved = set(meter.alive.values()), set[int]()
    for _ in range(min(training.accumulate, 2)):  # later batches repeat the second
        with meter.during("forward"), autocast_region(training, trace.device):
            loss = [loss_of(module(*args, **kwargs), targets, training)]
        saved = saved or set(meter.alive.values()) - before
        with meter.during("backward"):
            run_backward(loss.pop())
    for p, name in names.items():
        result.own(name, p.grad, "gradients")
    result.mark(trace.kept, TABLES)
    result.mark(saved, "saved for backward")
    with meter.during("optimizer"):
        optimizer.step()
    for p, x in optimizer.tensors():
        result.own(names[p], x, "optimizer state")
    module.zero_grad()
    meter.stop()  # the optimizer's state outlives the step


def _generate(result: Run, args: tuple, kwargs: dict) -> None:
    """All tokens but the last as a prompt, with a cache of keys and values; then the last one with that cache."""
    module, meter = result.module, result.trace.meter
    before = set(meter.alive.values())
    with meter.during("prefill"):
        then = prompt(module, args, kwargs)
    result.mark(set(meter.alive.values()) - before, "key/value cache")
    with meter.during("decode"):
        then()


def generates(module: Any) -> bool:
    """Whether this module decodes with a cache: a causal stack of ours with a language head, or one that says so."""
    if isinstance(module, Stack | EncoderDecoder):
        stack: Any = getattr(module, "decoder", module)
        sees_later = stack.spec.block.attention.pattern - causal()
        return isinstance(stack.head, LanguageHead) and not sees_later.count(8)
    if getattr(module, "_is_stateful", False):  # a state of Mamba and its like: no keys and values
        return False
    config = getattr(module, "config", None)
    return bool(hasattr(module, "can_generate") and module.can_generate() and getattr(config, "use_cache", 1))


def prompt(module: Any, args: tuple, kwargs: dict) -> Any:
    """Run the prompt; () → the next token."""
    if isinstance(module, Stack | EncoderDecoder):
        ids, *context = args
        if isinstance(module, EncoderDecoder):
            ids, context = args[-1], [module.encode(args[0])]
        decoder: Any = getattr(module, "decoder", module)
        steps = StackSteps(decoder, *context)
        steps.next(ids[:, :-1])
        return lambda: steps.next(ids[:, -1:])
    encodes, named = module.config.is_encoder_decoder, dict(kwargs)
    named |= {module.main_input_name: args[0]} if args else {}
    name, masks = "decoder_input_ids" if encodes else "input_ids", ("attention_mask", "token_type_ids")
    ids, known = named.pop(name), signature(module.forward).parameters
    named = {k: x for k, x in named.items() if encodes or k not in masks or not isinstance(x, Tensor)}
    options = {"use_cache": True} | ({"logits_to_keep": 1} if "logits_to_keep" in known else {})
    out = module(**named, **{name: ids[:, :-1]}, **options)
    cache = {"past_key_values": out.past_key_values}
    cache |= {"encoder_outputs": (out.encoder_last_hidden_state,)} if encodes else {}
    return lambda: module(**{name: ids[:, -1:]}, **cache, **options)
