"""Turns a function, a module, a class with its sizes, a spec or a configuration into a target."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import nn

from ... import spec
from ...engine.attention import attention
from ...errors import SpecError
from ..target import Function, Model, Part, Target
from .flex import flex
from .from_signature import function_from_signature, module_from_signature
from .hugging_face import hugging_face
from .regard import regard_function, regard_model
from .sdpa import sdpa
from .seeded import seeded
from .torch_attention import multihead_attention
from .torch_transformer import transformer, transformer_decoder, transformer_encoder
from .x_transformers import x_transformers

HOW = (
    "write an adapter: regard.laws.Function(name, call, claims={…}) for attention(q, k, v), "
    "regard.laws.Model(name, module, call, d_model=…) for a module; docs/check.md shows both"
)
TORCH: dict[type[nn.Module], Callable[..., Model]] = {
    nn.MultiheadAttention: multihead_attention,
    nn.TransformerEncoder: transformer_encoder,
    nn.TransformerDecoder: transformer_decoder,
    nn.Transformer: transformer,
}


def adapt(
    thing: Any, *, claims: set[str] | None = None, lacks: set[str] | None = None, **sizes: Any
) -> Target:
    """The target for `thing`. `claims` and `lacks` are added to those of its adapter.

    sizes: if `thing` is a class, the arguments it is built with (heads=4, d_model=16, layers=2, …).
    """
    target = _target(thing, sizes)
    return target.with_claims(*(claims or ()), lacking=tuple(lacks or ())) if claims or lacks else target


def _target(thing: Any, sizes: dict[str, Any]) -> Target:
    if isinstance(thing, Function | Model | Part):
        return thing
    if isinstance(thing, type):
        return _class(thing, sizes)
    if sizes:
        raise SpecError(f"{_name(thing)} is already built; {', '.join(sizes)} can only be given for a class")
    if isinstance(thing, nn.Module):
        return _module(thing)
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
        return function_from_signature(thing)
    raise SpecError(f"{_name(thing)}: expected attention(q, k, v), an nn.Module or a spec; or {HOW}")


def _class(kind: type, sizes: dict[str, Any]) -> Target:
    if kind in TORCH:
        return TORCH[kind](**sizes)
    if issubclass(kind, nn.Module) or issubclass(kind, spec.Spec):
        return _target(seeded(lambda: _build(kind, sizes)), {})
    if _is_from("transformers", "PretrainedConfig", kind):
        return hugging_face(kind(**sizes))
    raise SpecError(f"{kind.__name__} is a class, but neither an nn.Module nor a spec; {HOW}")


def _build(kind: type, sizes: dict[str, Any]) -> Any:
    """kind(**sizes), with each size under the name that the class uses: heads may be num_heads or n_head."""
    parameters = inspect.signature(kind).parameters
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


def _module(module: nn.Module) -> Target:
    for kind, adapter in TORCH.items():
        if isinstance(module, kind):
            return adapter(module)
    if isinstance(getattr(module, "spec", None), spec.Spec):
        return regard_model(module)
    if _is_from("transformers", "PreTrainedModel", module):
        return hugging_face(module)
    if type(module).__module__.startswith("x_transformers"):
        return x_transformers(module)
    return module_from_signature(module)


def _is_from(library: str, name: str, thing: Any) -> bool:
    """Whether a thing is an instance or subclass of a library's class; a library not imported has no instances."""
    kind = getattr(sys.modules.get(library), name, None)
    if kind is None:
        return False
    return issubclass(thing, kind) if isinstance(thing, type) else isinstance(thing, kind)


def _name(thing: Any) -> str:
    return getattr(thing, "__name__", None) or type(thing).__name__
