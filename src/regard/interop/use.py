"""`rg.use(model, pattern)`: a pattern of the user's in the attention layers of a model that somebody else wrote."""

import fnmatch
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import compat
from ..errors import SpecError, nearest, not_a_pattern
from ..pattern import Pattern, causal, neighborhood, per_head
from .patterned import Intercepted, Patterns, check_multihead, multihead

SDPA = "scaled_dot_product_attention"
CHECKED_QUERIES = 1024  # queries for which a declared pattern must leave at least one key


class Applied:
    """Patterns in use. `remove()` puts the model back as it was; also at the end of a `with` block."""

    def __init__(self, patterns: dict[str, Patterns], undo: Callable[[], None]):
        self.patterns = patterns
        self._undo: Callable[[], None] | None = undo

    def remove(self) -> None:
        """Put the model back as it was. A second call does nothing."""
        if self._undo is not None:
            self._undo()
            self._undo = None

    def __enter__(self) -> "Applied":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        lines = [f"  {name}: {given!r}" for name, given in self.patterns.items()]
        return "\n".join([f"Applied to {len(lines)} attention layers", *lines])


def use(model: Any, pattern: Any = None) -> Applied:
    """Restrict every self-attention of the model to the pairs of a pattern, in addition to its own mask.

    pattern: one for all layers; a sequence with one per query head; or a mapping from a layer (its number, or its
    module name, * allowed) to one of these. None: Hugging Face models run by regard, with the patterns saved in their
    configuration, if any. Positions count from the first key; in a left-padded row without holes from its first
    real token.
    Cross-attention keeps all its keys, unless a mapping names it; in Hugging Face models always. A second call on the
    same layers replaces the first until it is removed; handles may be removed in any order.
    Works for Hugging Face models whose attention goes through their registry, alone or inside another module (PEFT,
    torch.compile), for nn.MultiheadAttention and modules built from it, for timm, and for any module that calls
    F.scaled_dot_product_attention.
    """
    if not isinstance(model, nn.Module):
        raise SpecError(f"rg.use takes a torch.nn.Module, not a {type(model).__name__}")
    if is_hugging_face(model):
        from .huggingface.patterns import use_in_hugging_face

        return use_in_hugging_face(model, pattern)
    parts = hugging_face_parts(model)
    if parts:
        return _use_in_wrapped(model, parts, pattern)
    if pattern is None:
        raise SpecError(
            "rg.use(model) without a pattern is for Hugging Face models; give a pattern: rg.use(model, rg.causal())"
        )
    named = isinstance(pattern, Mapping)
    found = {name: m for name, m in model.named_modules() if _replaceable(m)}
    if not named:
        cross = _cross_attention(model)
        found = {name: m for name, m in found.items() if name not in cross}
    if not found:
        raise SpecError(
            f"{type(model).__name__} has no attention that can be replaced: no nn.MultiheadAttention, and no module "
            f"whose forward calls F.{SDPA}"
        )
    return _use_in_modules(model, found, assign(pattern, found), named)


def _use_in_modules(
    model: nn.Module, found: Mapping[str, nn.Module], chosen: dict[str, Patterns], named: bool
) -> Applied:
    """named: the layers were chosen by name, so that cross-attention takes its pattern too."""
    for name, given in chosen.items():
        check_patterns(given, getattr(found[name], "num_heads", None), name, False)
    undo = [_install(found[name], given, named) for name, given in chosen.items()]
    undo += [_without_nested_tensors(m) for m in model.modules() if isinstance(m, nn.TransformerEncoder)]

    def back() -> None:
        for step in reversed(undo):
            step()

    return Applied(chosen, back)


def _use_in_wrapped(model: nn.Module, parts: Mapping[str, nn.Module], pattern: Any) -> Applied:
    """A module around Hugging Face models (PEFT, DDP, torch.compile, one of yours): layers by their names in it."""
    from .huggingface.patterns import attention_modules, registry_modules, use_in_hugging_face

    def within(name: str) -> str | None:
        return next((part for part in parts if name.startswith(f"{part}.")), None)

    registered = {
        f"{part}.{name}": m for part, inner in parts.items() for name, m in attention_modules(inner).items()
    }
    every = {f"{part}.{name}" for part, inner in parts.items() for name in registry_modules(inner)}
    cross = set() if isinstance(pattern, Mapping) else _cross_attention(model)
    own = {  # next to the Hugging Face models
        name: m
        for name, m in model.named_modules()
        if within(name) is None and name not in cross and _replaceable(m)
    }
    with ExitStack() as undo:  # an error in the second model puts the first one back
        if pattern is None:
            applied = [undo.enter_context(use_in_hugging_face(inner, None)) for inner in parts.values()]
            names = [f"{part}.{name}" for part, one in zip(parts, applied) for name in one.patterns]
            chosen = dict(zip(names, (given for one in applied for given in one.patterns.values())))
        else:
            for part, inner in parts.items():
                if not isinstance(pattern, Mapping) and not attention_modules(inner):
                    warnings.warn(
                        f"{part} ({type(inner).__name__}) keeps its own attention, without the pattern: it does not "
                        f"go through transformers' registry",
                        stacklevel=3,
                    )
            chosen = assign(pattern, {**registered, **own}, cross=every - registered.keys())
            for part, inner in parts.items():
                here = {name[len(part) + 1 :]: p for name, p in chosen.items() if within(name) == part}
                if here:
                    undo.enter_context(use_in_hugging_face(inner, here))
            here = {name: p for name, p in chosen.items() if name in own}
            undo.enter_context(_use_in_modules(model, own, here, isinstance(pattern, Mapping)))
        return Applied(chosen, undo.pop_all().close)


def hugging_face_parts(model: nn.Module) -> dict[str, Any]:
    """The Hugging Face models in a module, by name; not the models that are parts of these."""
    parts: dict[str, Any] = {}
    for name, module in model.named_modules():
        if is_hugging_face(module) and not any(not p or name.startswith(f"{p}.") for p in parts):
            parts[name] = module
    return parts


def is_hugging_face(model: nn.Module) -> bool:
    """Whether transformers is loaded and the model is one of its classes."""
    loaded = sys.modules.get("transformers")
    return loaded is not None and isinstance(model, loaded.PreTrainedModel)


def assign(pattern: Any, modules: Mapping[str, nn.Module], cross: Iterable[str] = ()) -> dict[str, Patterns]:
    """Which of the attention modules gets which pattern. cross: modules that keep all their keys."""
    if not isinstance(pattern, Mapping):
        return {name: _declared(pattern) for name in modules}
    names, chosen = list(modules), {}
    for key, given in pattern.items():
        if isinstance(key, int):
            if not -len(names) <= key < len(names):
                raise SpecError(
                    f"layer {key}: the model has {len(names)} attention layers, 0 … {len(names) - 1}"
                )
            here = [names[key]]
        else:
            here = [name for name in names if fnmatch.fnmatchcase(name, str(key))]
            if not here and any(fnmatch.fnmatchcase(name, str(key)) for name in cross):
                raise SpecError(
                    f"{key!r} is cross-attention, which keeps all its keys in Hugging Face models: their calls do "
                    f"not say at which position a query is while generating"
                )
            if not here:
                raise SpecError(f"no attention layer is named {key!r}; {nearest(str(key), names)}")
        chosen.update(dict.fromkeys(here, _declared(given)))
    return {name: chosen[name] for name in names if name in chosen}


def _declared(given: Any) -> Patterns:
    """A pattern, or a tuple of them; without data, which belongs to one input and not to a model."""
    given = given.patterns if isinstance(given, per_head) else given
    if isinstance(given, Sequence) and not isinstance(given, str):
        return tuple(_one(x) for x in given)
    return _one(given)


def _one(given: Any) -> Pattern:
    if not isinstance(given, Pattern):
        raise not_a_pattern(given, ", or one per head in a list")
    if any(leaf.has_data and not isinstance(leaf, neighborhood) for leaf in given.leaves()):
        raise SpecError(f"{given!r} carries data of one input, so it cannot be declared for a model")
    return given


def check_patterns(given: Patterns, heads: int | None, name: str, past_only: bool) -> None:
    """Refuse a wrong number of heads, and a pattern that leaves some query without any key."""
    each = given if isinstance(given, tuple) else (given,)
    if isinstance(given, tuple) and heads is not None and len(given) != heads:
        raise SpecError(f"{name}: {len(given)} patterns for {heads} query heads; give one for each head")
    for one in dict.fromkeys(each):
        assert isinstance(one, Pattern)
        seen = causal() & one if past_only else one
        grids = [leaf.size for leaf in one.leaves() if isinstance(leaf, neighborhood)]
        counts = seen.row_counts(min(grids, default=CHECKED_QUERIES))
        if (counts == 0).any():
            first = int((counts == 0).argmax())
            raise SpecError(
                f"{name}: {seen!r} leaves query {first} without any key; add the query itself, for example "
                f"{one!r} | rg.window(0)"
            )


# Modules of PyTorch


def forward_names(module: nn.Module) -> tuple[str, ...]:
    """The names that the forward method of a module's class uses."""
    function = inspect.unwrap(type(module).forward)
    code = getattr(function, "__code__", None)
    return code.co_names if code is not None else ()


def _replaceable(module: nn.Module) -> bool:
    return isinstance(module, nn.MultiheadAttention) or _calls_sdpa(type(module))


def _calls_sdpa(kind: type[nn.Module]) -> bool:
    """Whether the forward method of a class calls SDPA, under any name."""
    return any(name == SDPA or meant is F.scaled_dot_product_attention for name, meant in reached_names(kind))


def reached_names(kind: type[nn.Module]) -> Iterator[tuple[str, Any]]:
    """The names that the forward method of a class uses, itself, in another method of the class, or in a function of
    the same file; each with the global that it is there, if any."""
    waiting, seen = [inspect.unwrap(kind.forward)], set()
    while waiting:
        function = waiting.pop()
        code, names = getattr(function, "__code__", None), getattr(function, "__globals__", {})
        if code is None or code in seen:
            continue
        seen.add(code)
        for name in code.co_names:
            yield name, names.get(name)
            for other in (getattr(kind, name, None), names.get(name)):
                if inspect.isfunction(other) and other.__module__ == function.__module__:
                    waiting.append(inspect.unwrap(other))


# Cross-attention, by how it is called, and by the names under which modules have it.

CROSS = re.compile(r"cross|encoder_attn|encdec", re.IGNORECASE)
CONTEXT = re.compile(r"context|ctx|memory|encoder|^cond|^kv$", re.IGNORECASE)  # arguments


def is_named_cross(name: str, module: nn.Module) -> bool:
    last = name.rsplit(".", 2)[-2:]
    return bool(getattr(module, "is_cross_attention", False)) or any(CROSS.search(part) for part in last)


def _cross_attention(model: nn.Module) -> set[str]:
    """The names of the modules that are known to be cross-attention before they are called."""
    found = {name for name, module in model.named_modules() if is_named_cross(name, module)}
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerDecoderLayer):
            found.add(f"{name}.multihead_attn" if name else "multihead_attn")
    return found


def _is_cross(module: nn.Module, contexts: Sequence[bool], args: tuple, kwargs: Mapping[str, Any]) -> bool:
    """Whether this call attends to something else than its own input. contexts: as in Patterned."""
    if isinstance(module, nn.MultiheadAttention):
        query, key, value = [*args, *(kwargs[x] for x in ("query", "key", "value") if x in kwargs)][:3]
        axis = 1 if module.batch_first and query.dim() == 3 else 0
        return not _same(query, key) and (_same(key, value) or query.shape[axis] != key.shape[axis])
    given = [*zip(contexts, args), *((_is_context(name), x) for name, x in kwargs.items())]
    tensors = [(context, x) for context, x in given if isinstance(x, Tensor)]
    return any(context and not _same(x, tensors[0][1]) for context, x in tensors)


def _same(x: Tensor, y: Tensor) -> bool:
    """Whether these are one tensor, or equal views of one: x.transpose(0, 1) written twice."""
    if x is y or torch.compiler.is_compiling():
        return x is y
    if x.storage_offset() != y.storage_offset() or x.shape != y.shape or x.stride() != y.stride():
        return False
    if x.is_inference():  # there views do not know their base
        return x.data_ptr() == y.data_ptr() != 0
    base = compat.view_base(x)
    return base is not None and base is compat.view_base(y)


def _is_context(argument: str) -> bool:
    return CONTEXT.search(argument) is not None and "mask" not in argument


def _without_nested_tensors(encoder: nn.TransformerEncoder) -> Callable[[], None]:
    """nn.TransformerEncoder packs padded inputs into nested tensors in eval mode, past its attention modules."""
    before = encoder.use_nested_tensor
    encoder.use_nested_tensor = False

    def undo() -> None:
        encoder.use_nested_tensor = before

    return undo


PATTERNED = "_regard_patterned"


@dataclass
class Patterned:
    """What a module has while patterns are in use: its own forward, and the patterns, the newest last.

    An attribute of the module and not a closure, so that a copy of the module reads its own.
    """

    before: Callable[..., Any]
    had_own: bool  # the forward was an attribute of the module, not of its class
    hook: Any
    contexts: list[bool]  # which arguments of the forward are named as a context, in order
    patterns: list[tuple[Patterns, bool]]  # and whether the module was chosen by name


def _install(module: nn.Module, given: Patterns, named: bool) -> Callable[[], None]:
    """Give one attention module a pattern, in place of an earlier one until this is undone. A hook makes
    nn.TransformerEncoderLayer leave its fast path."""
    if isinstance(module, nn.MultiheadAttention):
        check_multihead(module)
    state: Patterned | None = module.__dict__.get(PATTERNED)
    if state is None:
        before, had_own = module.forward, "forward" in module.__dict__
        contexts = [_is_context(name) for name in inspect.signature(before).parameters]
        state = Patterned(before, had_own, module.register_forward_pre_hook(_nothing), contexts, [])
        module.__dict__[PATTERNED] = state
        module.forward = update_wrapper(partial(_patterned_forward, module), before)
    entry, active = (given, named), state
    active.patterns.append(entry)

    def undo() -> None:
        active.patterns[:] = [x for x in active.patterns if x is not entry]
        if active.patterns:
            return
        del module.__dict__[PATTERNED]
        active.hook.remove()
        if active.had_own:
            module.forward = active.before
        else:
            del module.forward

    return undo


def _patterned_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    state: Patterned = module.__dict__[PATTERNED]
    given, named = state.patterns[-1]
    if not named and _is_cross(module, state.contexts, args, kwargs):
        return state.before(*args, **kwargs)
    if isinstance(module, nn.MultiheadAttention):
        return multihead(module, given, *args, **kwargs)
    mode = Intercepted(type(module).__name__, given)
    with mode:  # not `as mode`, which is None where Dynamo traces
        out = state.before(*args, **kwargs)
    if not mode.calls:
        raise SpecError(
            f"{type(module).__name__} did not call F.{SDPA}, so its pattern was not used; "
            f"switch its fused attention on"
        )
    return out


def _nothing(module: nn.Module, args: Any) -> None:
    return None
