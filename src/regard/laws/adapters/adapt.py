"""From whatever is given to a target: a function, a module, a class with its sizes, a spec, a configuration."""

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
from .by_name import function_by_name, module_by_name
from .flex import flex
from .hugging_face import hugging_face
from .ours import regard_function, regard_model
from .sdpa import sdpa
from .seeded import seeded
from .torch_attention import multihead_attention
from .torch_transformer import transformer, transformer_decoder, transformer_encoder
from .x_transformers import x_transformers

HOW = (
    "write its adapter: regard.laws.target.Function(name, call, claims={…}) for an attention of q, k and v, "
    "regard.laws.target.Model(name, module, call, d_model=…) for a module; docs/check.md shows both in ten lines"
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
    """The target that `thing` is. `claims` and `lacks` are said on top of what its adapter says.

    sizes: of a class, what it is built with (heads=4, d_model=16, layers=2, …).
    """
    found = _found(thing, sizes)
    return found.having(*(claims or ()), lacking=tuple(lacks or ())) if claims or lacks else found


def _found(thing: Any, sizes: dict[str, Any]) -> Target:
    if isinstance(thing, Function | Model | Part):
        return thing
    if isinstance(thing, type):
        return _class(thing, sizes)
    if sizes:
        raise SpecError(f"{_name(thing)} is already made; {', '.join(sizes)} would only be read for a class")
    if isinstance(thing, nn.Module):
        return _module(thing)
    if isinstance(thing, spec.Spec):
        return regard_model(thing)
    if _of("transformers", "PretrainedConfig", thing):
        return hugging_face(thing)
    if thing is F.scaled_dot_product_attention:
        return sdpa()
    if thing is attention:
        return regard_function()
    if getattr(thing, "__module__", "") == "torch.nn.attention.flex_attention":
        return flex()
    if callable(thing):
        return function_by_name(thing)
    raise SpecError(f"{_name(thing)} is no attention, no module and no declaration; {HOW}")


def _class(kind: type, sizes: dict[str, Any]) -> Target:
    if kind in TORCH:
        return TORCH[kind](**sizes)
    if issubclass(kind, nn.Module) or issubclass(kind, spec.Spec):
        return _found(seeded(lambda: _made(kind, sizes)), {})
    if _of("transformers", "PretrainedConfig", kind):
        return hugging_face(kind(**sizes))
    raise SpecError(f"{kind.__name__} is a class, but neither a module nor a declaration; {HOW}")


def _made(kind: type, sizes: dict[str, Any]) -> Any:
    """kind(**sizes), a size called as the class calls it: heads may be num_heads or n_head there."""
    takes = inspect.signature(kind).parameters
    given = {_called(size, takes): value for size, value in sizes.items()}
    try:
        return kind(**given)
    except TypeError as e:
        wants = ", ".join(name for name in takes)
        raise SpecError(f"{kind.__name__}({', '.join(given)}): {e}; it takes {wants}") from e


OTHER_NAMES = {
    "heads": ("num_heads", "n_heads", "n_head", "nhead", "num_attention_heads", "nheads"),
    "d_model": ("embed_dim", "dim", "hidden_size", "n_embd", "width", "embedding_dim"),
    "layers": ("num_layers", "depth", "n_layer", "n_layers", "num_hidden_layers"),
    "vocab": ("vocab_size", "num_tokens", "n_vocab"),
}


def _called(size: str, takes: Any) -> str:
    if size in takes:
        return size
    return next((other for other in OTHER_NAMES.get(size, ()) if other in takes), size)


def _module(module: nn.Module) -> Target:
    for kind, adapter in TORCH.items():
        if isinstance(module, kind):
            return adapter(module)
    if isinstance(getattr(module, "spec", None), spec.Spec):
        return regard_model(module)
    if _of("transformers", "PreTrainedModel", module):
        return hugging_face(module)
    if type(module).__module__.startswith("x_transformers"):
        return x_transformers(module)
    return module_by_name(module)


def _of(library: str, name: str, thing: Any) -> bool:
    """Whether a thing is of a class of a library; one that nobody imported has no instances."""
    kind = getattr(sys.modules.get(library), name, None)
    if kind is None:
        return False
    return issubclass(thing, kind) if isinstance(thing, type) else isinstance(thing, kind)


def _name(thing: Any) -> str:
    return getattr(thing, "__name__", None) or type(thing).__name__
