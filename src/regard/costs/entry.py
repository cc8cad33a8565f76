"""`regard.cost`: a declaration is priced by arithmetic, any other module by tracing it on meta tensors."""

from dataclasses import replace
from functools import lru_cache, partial
from itertools import groupby
from typing import Any

import torch
from torch import nn

from .. import spec as specs
from ..compat import CAN_DISPATCH
from ..engine.backends import BACKENDS
from ..errors import ShapeError, SpecError, nearest
from ..nested import is_named, name_of, required, tensors_in
from ..spec import Spec, preset
from ..spec.base import require_positive
from .flops.models import build_tree
from .memory import Memory, TrainingStep
from .memory.runs import Setting, run
from .memory.step import training_of
from .result import Cost
from .sizes import Request
from .subject import Subject, build, built, class_note, is_config
from .trace.tracer import Trace
from .tree import Amounts, Part

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}
DEVICES = ("cpu", "cuda", "mps")
DEFAULT_N = 128  # for a model of Hugging Face


def cost(
    model: Any,
    *example_inputs: Any,
    n: int | None = None,
    m: int | None = None,
    batch: int = 1,
    dtype: torch.dtype | str = torch.float32,
    train: Any = False,
    backend: str = "auto",
    device: str = "cpu",
) -> Cost:
    """The cost of a model before it runs: parameters, FLOPs and bytes, term by term.

    model: a declaration, the name of a preset, or any module (with example inputs, whose values matter if it branches
    on them).
    n, m: numbers of queries and keys; for an encoder-decoder, target and source length. An image model knows its n.
    train: True or a TrainingStep; memory then includes gradients, optimizer state and saved activations.
    backend, device: which attention backend runs, and where; they determine how many pairs are computed.

    >>> from regard.spec import Attention
    >>> cost(Attention(512), n=1000).flops
    4145152000
    >>> cost(Attention(512, biases="none"), n=1000).parameters
    1048576
    """
    if isinstance(model, str):
        model = preset(model)
    model = getattr(model, "_orig_mod", model)  # of torch.compile(model)
    require_positive("batch", batch)
    training_of(train)  # an error if it is no training step
    kind = str(dtype).removeprefix("torch.")
    choices = {"dtype": (kind, DTYPES), "backend": (backend, BACKENDS), "device": (device, DEVICES)}
    for what, (name, known) in choices.items():
        if name not in known:
            raise SpecError(f"unknown {what} {name!r}; {nearest(name, known)}")
    if not example_inputs:
        model = built(model)
        model = getattr(model, "spec", model)  # a module built from a declaration
    elif isinstance(model, Spec):
        raise SpecError(
            f"{type(model).__name__} is a declaration: its cost follows from its sizes; "
            f"pass n= instead of example inputs"
        )
    elif (n, m, batch) != (None, None, 1):
        raise SpecError(f"n={n}, m={m}, batch={batch}: the example inputs have sizes; pass one of the two")
    request = Request(model, *_lengths(model, n, m), batch, DTYPES[kind], train, backend, device)
    if isinstance(model, Spec):
        return _of_declaration(request)
    return _of_module(request, example_inputs, () if n else (f"n = {DEFAULT_N}, as none was given",))


def _lengths(model: Any, n: int | None, m: int | None) -> tuple[int, int]:
    """(n, m): an image model has its own length, and m is for models that read a second sequence."""
    if isinstance(model, specs.Vision):
        if n not in (None, model.tokens) or m is not None:
            raise SpecError(
                f"n={n}, m={m}: an image of {model.image} in patches of {model.patch} is {model.tokens} tokens; "
                f"leave n and m out, or declare another image size"
            )
        return model.tokens, model.tokens
    declared = isinstance(model, Spec)
    if n is None and declared:
        raise SpecError("n is missing: pass the number of positions, for example n=1000")
    n = DEFAULT_N if n is None else n
    for name, length in (("n", n), ("m", n if m is None else m)):
        require_positive(name, length)
    if m is not None and declared and not has_context(model):
        raise SpecError(f"m={m}: {type(model).__name__} attends to its own {n} positions only; leave m out")
    return n, n if m is None else m


def has_context(spec: Spec) -> bool:
    """Whether the model attends to a second sequence, of length m."""
    crosses = getattr(getattr(spec, "block", spec), "cross", None) is not None
    return crosses or isinstance(spec, specs.Attention | specs.EncoderDecoder | specs.Recurrent)


def _where(request: Request, train: Any) -> dict[str, Any]:
    return {"dtype": str(request.dtype).removeprefix("torch."), "device": request.device, "train": train}


def _of_declaration(request: Request) -> Cost:
    tree, pairs = build_tree(request)
    sizes = {"n": request.n} | ({"m": request.m} if has_context(request.spec) else {})
    sizes |= {"batch": request.batch} | _where(request, request.train)
    memory, fits = partial(memory_of, request), partial(Subject(request.spec).fits, request)
    return Cost(repr(request.spec), sizes, tree, pairs, request=request, remember=memory, fitting=fits)


@lru_cache(maxsize=16)
def memory_of(request: Request) -> Memory | None:
    """The memory of a declared model at these sizes; None for declarations that are no module by themselves."""
    if isinstance(request.spec, specs.Mixing):
        return None
    return Memory(Subject(request.spec).setting_of(request), request)


def _of_module(request: Request, inputs: tuple[Any, ...], length_note: tuple[str, ...]) -> Cost:
    """The cost of running the model on meta tensors: no weight is allocated, no product is computed."""
    if not CAN_DISPATCH:
        raise SpecError(
            "tracing a module needs TorchDispatchMode, which this PyTorch does not have; declare a spec instead"
        )
    model = build(request.spec) if is_config(request.spec) else request.spec
    if not callable(model):
        raise SpecError(
            f"cannot find the cost of {type(model).__name__}; pass a spec, the name of a preset, an nn.Module or a "
            f"Hugging Face configuration"
        )
    training, fitting, notes = training_of(request.train), None, class_note(request.spec, model)
    if not inputs and hasattr(model, "config"):
        fitting = partial(Subject(model).fits, request)
        setting = replace(Subject(model).setting_of(request), evaluate=False)
        notes += length_note if Subject(model).tokens is None else ()
    else:
        named = len(inputs) == 1 and is_named(model, inputs[0])
        given: tuple[tuple, dict] = ((), dict(inputs[0])) if named else (inputs, {})
        module: Any = model if isinstance(model, nn.Module) else nn.Module()
        if module is not model:  # a function of tensors
            module.forward, module.__name__ = model, name_of(model)
        setting = Setting(module, given, None, request.dtype, training, request.device)
    needed = required(model.forward if isinstance(model, nn.Module) else model)
    if missing := [name for name in needed[len(setting.given[0]) :] if name not in setting.given[1]]:
        raise ShapeError(
            f"{name_of(model)} is missing {', '.join(missing)}; "
            f"pass example inputs: rg.cost(module, {', '.join(needed)})"
        )
    main = run(setting)
    trace, name, memory = main.trace, name_of(model), lambda: Memory(setting, main=main)
    sizes = {f"input {k}": "×".join(map(str, x.shape)) for k, x in enumerate(tensors_in(setting.given))}
    sizes |= _where(request, bool(training) if training in (None, TrainingStep()) else training)
    tree, unknown = _tree(trace, main.module, name), (f"{op} ({k} ×)" for op, k in trace.unknown.items())
    found = tuple(trace.pairs), tuple(unknown), (*notes, *trace.notes)
    return Cost(name, sizes, tree, *found, remember=memory, fitting=fitting)


def _tree(trace: Trace, module: nn.Module, name: str) -> Part:
    """The nested modules, each with the operations that it called directly."""
    terms: dict[str, list[Part]] = {}
    for (path, term), amounts in trace.amounts.items():
        terms.setdefault(path, []).append(Part(term, amounts))
    counted: set[int] = set()

    def part(inner: nn.Module, label: str, path: str) -> Part:
        own = [p for p in inner.parameters(recurse=False) if id(p) not in counted]
        counted.update(map(id, own))
        prefix = f"{path}." if path else ""
        children = [part(child, key, prefix + key) for key, child in inner.named_children()]
        parts = (*terms.pop(path, []), *_folded([c for c in children if c.parts or c.own.parameters]))
        return Part(label, Amounts(sum(p.numel() for p in own)), parts)

    root = part(module, name, "")
    rest = tuple(Part(path, parts=tuple(parts)) for path, parts in terms.items())
    return replace(root, parts=(*root.parts, *rest))


def _folded(parts: list[Part]) -> list[Part]:
    """Numbered layers that are equal and follow each other as one part: `0–31` is 32 times the same."""
    folded = []
    for _, same in groupby(parts, lambda part: replace(part, name="0") if part.name.isdigit() else part):
        first, *others = same
        name = f"{first.name}–{others[-1].name}" if others else first.name
        folded.append(replace(first, name=name, times=1 + len(others)))
    return folded
