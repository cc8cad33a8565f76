"""Turns a function, a module, a class with its sizes, a spec or a configuration into a target."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch.nn.functional as F
from torch import nn

from ... import spec
from ...engine.attention import attention
from ...errors import SpecError, nearest
from ..target import Function, Model, Part, Target
from .flex import flex
from .from_module import module_from_signature
from .from_signature import Hints, function_from_signature
from .hugging_face import hugging_face
from .part_kinds import checked_kind, part_of
from .regard import regard_function, regard_model
from .sdpa import sdpa
from .seeded import seeded
from .torch_attention import multihead_attention
from .torch_transformer import (
    transformer,
    transformer_decoder,
    transformer_decoder_layer,
    transformer_encoder,
    transformer_encoder_layer,
)
from .x_transformers import x_transformers

ADAPTER_HINT = (
    "write an adapter: regard.laws.Function(name, call, claims={…}) for attention(q, k, v), "
    "regard.laws.Model(name, module, call, d_model=…) for a module; docs/check.md shows both"
)
HINTS = tuple(f.name for f in fields(Hints))
TORCH: dict[type[nn.Module], Callable[..., Model]] = {
    nn.MultiheadAttention: multihead_attention,
    nn.TransformerEncoder: transformer_encoder,
    nn.TransformerDecoder: transformer_decoder,
    nn.TransformerEncoderLayer: transformer_encoder_layer,
    nn.TransformerDecoderLayer: transformer_decoder_layer,
    nn.Transformer: transformer,
}
LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def adapt(
    thing: Any, *, claims: set[str] | None = None, lacks: set[str] | None = None, **more: Any
) -> Target:
    """The target for `thing`. `claims` and `lacks` are added to those of its adapter.

    more: what probing cannot determine. kind: what it is (layer-norm, schedule, …). layout: the axes of q, k and v
    ("b n h d"). mask: what True means in its mask, "keep" or "hide". device. facts: parameters of a part (lr_max, …).
    If `thing` is a class or a factory, the remaining ones are the arguments it is called with (heads=4, d_model=16,
    …).
    """
    hints = Hints(**{name: more.pop(name) for name in HINTS if name in more})
    if hints.kind is not None:
        checked_kind(hints.kind)
    if hints.mask not in (None, "keep", "hide"):
        raise SpecError(f"mask={hints.mask!r}; {nearest(str(hints.mask), ('keep', 'hide'))}")
    target = _target(thing, more, hints)
    if hints.device is not None and target.device != hints.device:
        target = replace(target, device=hints.device)
    return target.with_claims(*(claims or ()), lacking=tuple(lacks or ())) if claims or lacks else target


def _target(thing: Any, sizes: dict[str, Any], hints: Hints) -> Target:
    if isinstance(thing, Function | Model | Part):
        return thing
    if isinstance(thing, type):
        return _class(thing, sizes, hints)
    if _is_factory(thing, sizes):
        return _target(seeded(lambda: _build(thing, sizes)), {}, hints)
    if sizes:
        raise SpecError(f"{_name(thing)} is already built; {', '.join(sizes)} can only be given for a class")
    if (part := part_of(thing, hints)) is not None:
        return part
    if isinstance(thing, nn.Module):
        if any(x.is_meta for x in (*thing.parameters(), *thing.buffers())):
            raise SpecError(f"{_name(thing)} is on the meta device, without numbers; build it on the CPU")
        return _module(thing, hints)
    if isinstance(thing, spec.Spec):
        return regard_model(thing)
    if _is_from("transformers", "PretrainedConfig", thing):
        return hugging_face(thing)
    if thing is F.scaled_dot_product_attention:
        return sdpa()
    if thing is attention:
        return regard_function()
    if getattr(thing, "__module__", "") == "torch.nn.attention.flex_attention":
        return flex()
    if callable(thing):
        return function_from_signature(thing, hints)
    raise SpecError(f"{_name(thing)}: expected attention(q, k, v), an nn.Module or a spec; or {ADAPTER_HINT}")


def _is_factory(thing: Any, sizes: dict[str, Any]) -> bool:
    """Whether it is a function that returns a module or an attention: its required parameters are sizes, if any."""
    if not inspect.isfunction(thing):
        return False
    parameters = inspect.signature(thing).parameters.values()
    required = [
        p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    known = {*OTHER_NAMES, *(n for names in OTHER_NAMES.values() for n in names)}
    if required and set(required) <= known:
        return True
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return not required and (not positional or {p.name for p in positional} <= known)


def _class(kind: type, sizes: dict[str, Any], hints: Hints) -> Target:
    if kind in TORCH:
        return TORCH[kind](**sizes)
    if issubclass(kind, nn.Module) or issubclass(kind, spec.Spec):
        return _target(seeded(lambda: _build(kind, sizes)), {}, hints)
    if _is_from("transformers", "PretrainedConfig", kind):
        return hugging_face(kind(**sizes))
    raise SpecError(f"{kind.__name__} is a class, but neither an nn.Module nor a spec; {ADAPTER_HINT}")


DEFAULT_SIZES = {"heads": 4, "d_model": 16, "layers": 2, "vocab": 31}


def _build(kind: Any, sizes: dict[str, Any]) -> Any:
    """kind(**sizes), with each size under the name that the class uses: heads may be num_heads or n_head."""
    parameters = inspect.signature(kind).parameters
    for size, default in DEFAULT_SIZES.items():  # required sizes that were not given
        name = _parameter_name(size, parameters)
        if size not in sizes and name in parameters and parameters[name].default is inspect.Parameter.empty:
            sizes = {**sizes, size: default}
    arguments = {_parameter_name(size, parameters): value for size, value in sizes.items()}
    try:
        return kind(**arguments)
    except TypeError as e:
        raise SpecError(
            f"{kind.__name__}({', '.join(arguments)}): {e}; it takes {', '.join(parameters)}"
        ) from e


OTHER_NAMES = {
    "heads": ("num_heads", "n_heads", "n_head", "nhead", "num_attention_heads", "nheads"),
    "d_model": ("embed_dim", "dim", "hidden_size", "n_embd", "width", "embedding_dim"),
    "layers": ("num_layers", "depth", "n_layer", "n_layers", "num_hidden_layers"),
    "vocab": ("vocab_size", "num_tokens", "n_vocab"),
}


def _parameter_name(size: str, parameters: Any) -> str:
    if size in parameters:
        return size
    return next((other for other in OTHER_NAMES.get(size, ()) if other in parameters), size)


def _module(module: nn.Module, hints: Hints) -> Target:
    for kind, adapter in TORCH.items():
        # Subclasses of a layer often have a forward of their own, with other arguments.
        own_forward = kind in LAYERS and type(module).forward is not kind.forward
        if isinstance(module, kind) and not own_forward:
            return adapter(module)
    if isinstance(getattr(module, "spec", None), spec.Spec):
        return regard_model(module)
    if _is_from("transformers", "PreTrainedModel", module):
        return hugging_face(module)
    if type(module).__module__.startswith("x_transformers"):
        return x_transformers(module)
    return module_from_signature(module, hints)


def _is_from(library: str, name: str, thing: Any) -> bool:
    """Whether a thing is an instance or subclass of a library's class; a library not imported has no instances."""
    kind = getattr(sys.modules.get(library), name, None)
    if kind is None:
        return False
    return issubclass(thing, kind) if isinstance(thing, type) else isinstance(thing, kind)


def _name(thing: Any) -> str:
    return getattr(thing, "__name__", None) or type(thing).__name__
