"""The cost of what is not a declaration: an nn.Module, a function of tensors, a Hugging Face configuration."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..compat import CAN_DISPATCH
from ..errors import ShapeError, SpecError
from ..spec import Spec
from . import huggingface
from .memory.report import Setting, traced
from .memory.step import training_of
from .trace.nested import leaves
from .trace.tracer import Trace
from .tree import Amounts, Cost, Part


class TraceOptions(NamedTuple):
    """How a module is traced: sizes of generated inputs, dtype, training step, device."""

    n: int | None
    m: int | None
    batch: int
    dtype: torch.dtype
    train: Any
    device: str


def cost_of_module(model: Any, inputs: tuple[Any, ...], options: TraceOptions) -> Cost:
    """The cost of running the model on meta tensors: no weight is allocated, no product is computed."""
    if not CAN_DISPATCH:
        raise SpecError(
            "tracing a module needs TorchDispatchMode, which this PyTorch does not have; declare a spec instead"
        )
    if (
        not isinstance(model, nn.Module)
        and not huggingface.is_config(model)
        and callable(model)
        and not inputs
    ):
        model = _call(model)
        if isinstance(model, Spec):
            from .entry import cost

            return cost(model, **options._asdict())
    if huggingface.is_config(model):
        model = huggingface.build(model)
    if not callable(model):
        raise SpecError(
            f"cannot find the cost of {type(model).__name__}; pass a spec, the name of a preset, an nn.Module or a "
            f"Hugging Face configuration"
        )
    if not inputs and hasattr(model, "config"):
        labels = bool(options.train) and getattr(options.train, "loss", None) is None
        inputs = (huggingface.generated_inputs(model, options.n or 128, options.m, options.batch, labels),)
    return _traced_cost(model, inputs, options)


def _call(build: Callable) -> Any:
    needed = _required(build)
    if needed:
        raise SpecError(
            f"{_name(build)} needs {', '.join(needed)}: pass example inputs, rg.cost(f, *inputs), or a function "
            f"without arguments that returns a model"
        )
    with torch.device("meta"):
        return build()


def _traced_cost(model: Any, inputs: tuple[Any, ...], options: TraceOptions) -> Cost:
    dtype, training = options.dtype, training_of(options.train)
    args, kwargs = ((), dict(inputs[0])) if len(inputs) == 1 and isinstance(inputs[0], dict) else (inputs, {})
    module = model if isinstance(model, nn.Module) else _Function(model)
    _check_inputs(model, module, args, kwargs)
    setting = Setting((args, kwargs), None, dtype, training, options.device)
    try:
        trace, twin, memory = traced(module, setting)
    except TypeError as e:
        if "argument" not in str(e):
            raise
        raise ShapeError(f"{_name(module)} does not take these inputs: {e}") from e
    except NotImplementedError as e:
        raise ShapeError(f"{_name(module)} cannot be traced: {str(e).splitlines()[0]}") from e
    sizes: dict[str, Any] = {
        f"input {k}": "×".join(map(str, x.shape))
        for k, x in enumerate(leaves((args, kwargs)))
        if isinstance(x, Tensor)
    }
    return Cost(
        _name(model),
        sizes | {"dtype": str(dtype).removeprefix("torch."), "train": training is not None},
        tree(trace, twin, _name(module)),
        tuple(trace.pairs),
        tuple(f"{op} ({times} ×)" for op, times in trace.unknown.items()),
        lambda: memory,
        tuple(trace.notes),
    )


class _Function(nn.Module):
    """A function of tensors as a module."""

    def __init__(self, call: Callable):
        super().__init__()
        self.call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


# -- the tree -----------------------------------------------------------------------------------------------------


def tree(trace: Trace, module: nn.Module, name: str) -> Part:
    """The nested modules, each with the operations that it called directly."""
    terms: dict[str, list[Part]] = {}
    for (path, term), amounts in trace.amounts.items():
        terms.setdefault(path, []).append(Part(term, amounts))
    counted: set[int] = set()

    def part(inner: nn.Module, label: str, path: str) -> Part | None:
        own = [p for p in inner.parameters(recurse=False) if id(p) not in counted]
        counted.update(map(id, own))
        children = [
            part(child, child_name, f"{path}.{child_name}" if path else child_name)
            for child_name, child in inner.named_children()
        ]
        parts = (*terms.pop(path, []), *(p for p in children if p is not None))
        count = sum(p.numel() for p in own)
        return Part(label, Amounts(parameters=count), parts) if count or parts or not path else None

    root = part(module, name, "")
    assert root is not None
    rest = tuple(Part(path, parts=tuple(parts)) for path, parts in terms.items())
    return Part(root.name, root.own, (*root.parts, *rest))


# -- names and inputs ---------------------------------------------------------------------------------------------


def _name(model: Any) -> str:
    if isinstance(model, _Function):
        return _name(model.call)
    return getattr(model, "__name__", None) or type(model).__name__


def _required(call: Callable) -> list[str]:
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind in kinds]


def _check_inputs(model: Any, module: nn.Module, args: tuple, kwargs: dict) -> None:
    call = module.forward if isinstance(model, nn.Module) else model
    missing = [name for name in _required(call)[len(args) :] if name not in kwargs]
    if missing:
        raise ShapeError(
            f"{_name(model)} is missing {', '.join(missing)}; "
            f"pass example inputs: rg.cost(module, {', '.join(_required(call))})"
        )
