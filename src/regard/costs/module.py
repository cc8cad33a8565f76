"""The cost of what is not a declaration: an nn.Module, a function of tensors, a Hugging Face configuration."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..compat import CAN_DISPATCH
from ..errors import RegardError, ShapeError, SpecError
from .memory import Memory
from .memory.runs import Setting, run
from .memory.step import TrainingStep, training_of
from .sizes import Request
from .subject import Subject, build, is_config
from .trace.nested import tensors_in
from .trace.tracer import Trace
from .tree import Amounts, Cost, Part


def cost_of_module(model: Any, inputs: tuple[Any, ...], request: Request) -> Cost:
    """The cost of running the model on meta tensors: no weight is allocated, no product is computed."""
    if not CAN_DISPATCH:
        raise SpecError(
            "tracing a module needs TorchDispatchMode, which this PyTorch does not have; declare a spec instead"
        )
    if is_config(model):
        model = build(model)
    if not callable(model):
        raise SpecError(
            f"cannot find the cost of {type(model).__name__}; pass a spec, the name of a preset, an nn.Module or a "
            f"Hugging Face configuration"
        )
    training, fitting = training_of(request.train), None
    if not inputs and hasattr(model, "config"):
        subject = Subject(model)
        fitting = partial(subject.fits, request)
        setting = subject.setting(request.size, training, request.dtype, request.device)
        setting = replace(setting, evaluate=False)
    else:
        named = len(inputs) == 1 and isinstance(inputs[0], Mapping)
        given: tuple[tuple, dict] = ((), dict(inputs[0])) if named else (inputs, {})
        module = model if isinstance(model, nn.Module) else _Function(model)
        setting = Setting(module, given, None, request.dtype, training, request.device)
    _check_inputs(model, setting)
    main = run(setting)
    sizes: dict[str, Any] = {
        f"input {k}": "×".join(map(str, x.shape)) for k, x in enumerate(tensors_in(setting.given))
    }
    sizes |= {"dtype": str(request.dtype).removeprefix("torch."), "device": request.device}
    return Cost(
        _name(model),
        sizes
        | {"train": training if training is not None and training != TrainingStep() else bool(training)},
        tree(main.trace, main.module, _name(model)),
        tuple(main.trace.pairs),
        tuple(f"{op} ({times} ×)" for op, times in main.trace.unknown.items()),
        lambda: Memory(setting, main=main),
        tuple(main.trace.notes),
        fitting=fitting,
    )


def built(build: Callable) -> Any:
    """What a function without arguments returns, on meta tensors."""
    needed = _required(build)
    if needed:
        raise SpecError(
            f"{_name(build)} needs {', '.join(needed)}: pass example inputs, rg.cost(f, *inputs), or a function "
            f"without arguments that returns a model"
        )
    try:
        with torch.device("meta"):
            return build()
    except RegardError:
        raise
    except Exception as e:
        raise SpecError(f"{_name(build)}() fails on meta tensors: {type(e).__name__}: {e}") from e


class _Function(nn.Module):
    """A function of tensors as a module."""

    def __init__(self, call: Callable):
        super().__init__()
        self.call, self.__name__ = call, _name(call)

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
        parts = (*terms.pop(path, []), *folded([p for p in children if p is not None]))
        count = sum(p.numel() for p in own)
        return Part(label, Amounts(parameters=count), parts) if count or parts or not path else None

    root = part(module, name, "")
    assert root is not None
    rest = tuple(Part(path, parts=tuple(parts)) for path, parts in terms.items())
    return Part(root.name, root.own, (*root.parts, *rest))


def folded(parts: list[Part]) -> list[Part]:
    """Numbered layers that are equal and follow each other as one part: `0–31` is 32 times the same."""
    runs: list[list[Part]] = []
    for part in parts:
        if runs and part.name.isdigit() and _same(runs[-1][0], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return [
        r[0] if len(r) == 1 else replace(r[0], name=f"{r[0].name}–{r[-1].name}", times=len(r)) for r in runs
    ]


def _same(a: Part, b: Part) -> bool:
    return a.name.isdigit() and replace(a, name=b.name) == b


# -- names and inputs ---------------------------------------------------------------------------------------------


def _name(model: Any) -> str:
    return getattr(model, "__name__", None) or type(model).__name__


def _required(call: Callable) -> list[str]:
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind in kinds]


def _check_inputs(model: Any, setting: Setting) -> None:
    call, (args, kwargs) = model.forward if isinstance(model, nn.Module) else model, setting.given
    missing = [name for name in _required(call)[len(args) :] if name not in kwargs]
    if missing:
        raise ShapeError(
            f"{_name(model)} is missing {', '.join(missing)}; "
            f"pass example inputs: rg.cost(module, {', '.join(_required(call))})"
        )
