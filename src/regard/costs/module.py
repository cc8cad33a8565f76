"""The cost of what regard did not declare: any nn.Module, any function of tensors, a Hugging Face configuration."""

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from ..errors import ShapeError, SpecError
from ..spec import Spec
from .flops.trace import Trace, Unknown, tracing
from .memory.report import WORKSPACE, Memory, training_of
from .memory.step import TrainingStep
from .tree import Amounts, Cost, Part


def cost_of(
    thing: Any,
    inputs: tuple[Any, ...] = (),
    *,
    n: int | None = None,
    m: int | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    train: Any = False,
    device: str = "cpu",
) -> Cost:
    """Counted by running it on tensors without data: no weight is allocated, no product computed."""
    if not isinstance(thing, nn.Module) and not _is_config(thing) and callable(thing) and not inputs:
        thing = _called(thing)
        if isinstance(thing, Spec):
            from .entry import cost

            return cost(thing, n=n, m=m, batch=batch, dtype=dtype, train=train, device=device)
    if _is_config(thing):
        thing = huggingface(thing)
    if not callable(thing):
        raise SpecError(
            f"{type(thing).__name__} has no cost; give a spec, a preset's name, an nn.Module or a configuration"
        )
    if not inputs and hasattr(thing, "config"):
        inputs = ({**dummies(thing.config, n or 128, m, batch)},)
    return _counted(thing, inputs, training_of(train), device, dtype)


def _called(make: Callable) -> Any:
    needed = _required(make)
    if needed:
        raise SpecError(
            f"{_name(make)} needs {', '.join(needed)}: give example inputs, rg.cost(f, *inputs), or name a function "
            f"without arguments that returns a model"
        )
    with torch.device("meta"):
        return make()


def _counted(
    thing: Any, inputs: tuple[Any, ...], training: TrainingStep | None, device: str, dtype: torch.dtype
) -> Cost:
    args, kwargs = ((), dict(inputs[0])) if len(inputs) == 1 and isinstance(inputs[0], dict) else (inputs, {})
    module = thing if isinstance(thing, nn.Module) else _Function(thing)
    _need_inputs(thing, module, args, kwargs)
    trace = Trace(device)
    params, args, kwargs = _prepared(trace, module, args, kwargs, dtype)
    before = trace.storages.held
    out = [_forward(trace, module, params, args, kwargs, grad=training is not None)]
    kept = trace.storages.held - before
    if training is not None:
        _backward(trace, out)
    out.clear()
    memory = _memory(trace, module, training, kept, dtype, before)
    sizes: dict[str, Any] = {
        f"input {k}": "×".join(map(str, x.shape))
        for k, x in enumerate(tree_flatten((args, kwargs))[0])
        if isinstance(x, Tensor)
    }
    return Cost(
        _name(thing),
        sizes | {"dtype": str(dtype).removeprefix("torch."), "train": training is not None},
        tree(trace, module),
        tuple(trace.pairs),
        tuple(f"{what} ({times} ×)" for what, times in trace.unknown.items()),
        memory,
    )


class _Function(nn.Module):
    """A function of tensors, as a module."""

    def __init__(self, call: Callable):
        super().__init__()
        self.call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


def _prepared(trace: Trace, module: nn.Module, args: Any, kwargs: Any, dtype: torch.dtype) -> tuple:
    """Weights and inputs as meta tensors; weights in the dtype asked for."""
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    twins: dict[int, Any] = {}
    for x in held.values():
        if id(x) not in twins:
            twins[id(x)] = _weight(trace, x, dtype)
    params = {name: twins[id(x)] for name, x in held.items()}
    for x in twins.values():
        trace.storages.see(x)

    def ready(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        wide = x.is_floating_point() and x.dtype == torch.float32 and dtype != torch.float32
        twin = trace.to_meta(x.to(dtype) if wide else x)
        trace.storages.see(twin)
        return twin

    args, kwargs = tree_map(ready, (args, kwargs))
    return params, args, kwargs


def _weight(trace: Trace, x: Tensor, dtype: torch.dtype) -> Any:
    if x.is_meta and x.dtype == dtype:
        return x
    if isinstance(x, nn.Parameter) and x.is_floating_point():
        with torch.no_grad():
            twin = torch.empty(x.shape, dtype=dtype if x.dtype == torch.float32 else x.dtype, device="meta")
        return nn.Parameter(twin, requires_grad=x.requires_grad)
    return trace.to_meta(x)


def _forward(trace: Trace, module: nn.Module, params: dict, args: tuple, kwargs: dict, grad: bool) -> Any:
    with ExitStack() as on:
        for place, inner in module.named_modules():
            on.callback(inner.register_forward_pre_hook(trace.entering(place)).remove)
            on.callback(inner.register_forward_hook(trace.leaving, always_call=True).remove)
        on.enter_context(torch.set_grad_enabled(grad))
        on.enter_context(tracing(trace))
        try:
            return torch.func.functional_call(module, params, args, kwargs, tie_weights=False)
        except Unknown as e:
            raise ShapeError(str(e)) from e
        except TypeError as e:
            if "argument" not in str(e):
                raise
            raise ShapeError(f"{_name(module)} does not take these inputs: {e}") from e


def _backward(trace: Trace, out: list[Any]) -> None:
    """Of the mean of squares of all that came out and learns; nobody holds the output meanwhile."""
    flat = [x for x in _tensors(out.pop()) if x.requires_grad and x.is_floating_point()]
    if not flat:
        raise ShapeError("nothing that came out has a gradient: a training step needs weights that learn")
    trace.in_backward = True
    with tracing(trace), trace.at("backward"):
        loss = torch.stack([x.square().mean() for x in flat]).sum()
        flat.clear()
        loss.backward()


def _tensors(out: Any) -> list[Tensor]:
    """All tensors of an output: in tuples, dictionaries, or a model's output class."""
    if isinstance(out, Tensor):
        return [out]
    if isinstance(out, dict):
        out = list(out.values())
    return [x for part in out for x in _tensors(part)] if isinstance(out, tuple | list) else []


def _memory(
    trace: Trace, module: nn.Module, training: TrainingStep | None, kept: int, dtype: torch.dtype, before: int
) -> Memory:
    weights = {id(p): p for p in module.parameters()}
    entries = sum(p.numel() for p in weights.values() if p.requires_grad)
    size = sum(
        p.numel() * (dtype.itemsize if p.is_floating_point() else p.element_size()) for p in weights.values()
    )
    work = WORKSPACE if trace.device == "cuda" else 0
    if training is None:
        return Memory(size, 0, 0, trace.storages.most + work, workspace=work)
    state = entries * (4 if training.master else dtype.itemsize) * training.states
    master = 4 * entries if training.master else 0
    gradients = entries * dtype.itemsize
    foreach = training.states == 2 and training.way_on(trace.device) == "foreach"
    at_step = before + gradients + state + master + (entries * dtype.itemsize if foreach else 0)
    return Memory(
        size,
        0,
        0,
        0,
        workspace=2 * work,
        gradients=gradients,
        optimiser=state,
        master=master,
        kept={"all": kept},
        training=max(trace.storages.most + state + master, at_step) + 2 * work,
        moment="the passes" if trace.storages.most + state + master > at_step else "the optimiser",
        settled=before + state + master,
    )


# -- the tree -----------------------------------------------------------------------------------------------------


def tree(trace: Trace, module: nn.Module) -> Part:
    """The modules as they are nested, each with the operations that it called itself."""
    terms: dict[str, list[Part]] = {}
    for (place, name), amounts in trace.amounts.items():
        terms.setdefault(place, []).append(Part(name, amounts))
    seen: set[int] = set()

    def part(inner: nn.Module, name: str, place: str) -> Part | None:
        own = [p for p in inner.parameters(recurse=False) if id(p) not in seen]
        seen.update(map(id, own))
        below = [
            part(child, child_name, f"{place}.{child_name}" if place else child_name)
            for child_name, child in inner.named_children()
        ]
        parts = (*terms.pop(place, []), *(p for p in below if p is not None))
        count = sum(p.numel() for p in own)
        return Part(name, Amounts(parameters=count), parts) if count or parts or not place else None

    root = part(module, _name(module), "")
    assert root is not None
    rest = tuple(Part(place, parts=tuple(parts)) for place, parts in terms.items())
    return Part(root.name, root.own, (*root.parts, *rest))


# -- what is asked for ----------------------------------------------------------------------------------------------


def _name(thing: Any) -> str:
    if isinstance(thing, _Function):
        return _name(thing.call)
    return getattr(thing, "__name__", None) or type(thing).__name__


def _required(call: Callable) -> list[str]:
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind in kinds]


def _need_inputs(thing: Any, module: nn.Module, args: tuple, kwargs: dict) -> None:
    call = module.forward if isinstance(thing, nn.Module) else thing
    missing = [name for name in _required(call)[len(args) :] if name not in kwargs]
    if missing:
        told = ", ".join(missing)
        raise ShapeError(
            f"{_name(thing)} needs {told}, which {'was' if len(missing) == 1 else 'were'} not given; "
            f"give example inputs: rg.cost(module, {', '.join(_required(call))})"
        )


# -- Hugging Face -----------------------------------------------------------------------------------------------


def _is_config(thing: Any) -> bool:
    return hasattr(thing, "model_type") and hasattr(thing, "to_dict") and not isinstance(thing, nn.Module)


def huggingface(config: Any) -> nn.Module:
    """The model of a configuration, on meta tensors: its own architecture where it names one."""
    import transformers

    named = (getattr(config, "architectures", None) or [None])[0]
    kind = getattr(transformers, named, None) if named else None
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config) if kind is None else kind(config)
    return model.eval()


def dummies(config: Any, n: int, m: int | None, batch: int) -> dict[str, Tensor]:
    """Inputs of the right shapes: pixels, or token ids, for an encoder-decoder both of them."""
    if hasattr(config, "image_size") and not hasattr(config, "vocab_size"):
        side = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
        return {"pixel_values": torch.empty(batch, config.num_channels, side, side, device="meta")}
    ids = {"input_ids": torch.ones(batch, m or n, dtype=torch.long)}
    if getattr(config, "is_encoder_decoder", False):
        return ids | {"decoder_input_ids": torch.ones(batch, n, dtype=torch.long)}
    return {"input_ids": torch.ones(batch, n, dtype=torch.long)}
