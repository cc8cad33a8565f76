"""A target from the parameter names of a function or module that has no adapter, as libraries name them."""

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ...errors import SpecError
from ..target import OPTIONS, Function, Model
from .torch_attention import key_padding_mask

# option → common parameter names. A mask is True where a query may attend, as in scaled_dot_product_attention.
NAMES = {
    "mask": ("allowed", "attn_mask", "attention_mask", "mask", "pattern"),
    "causal": ("causal", "is_causal"),
    "scale": ("scale", "softmax_scale", "sm_scale"),
    "bias": ("bias", "attn_bias", "score_bias"),
    "lengths": ("lengths", "key_lengths", "kv_lengths", "seqlens"),
    "documents": ("documents", "document_ids", "doc_ids", "segment_ids"),
    "window": ("window", "window_size"),
    "lse": ("return_lse", "lse"),
    "weights": ("return_weights", "weights"),
    "dropout": ("dropout_p", "dropout"),
}
GROUPED = "enable_gqa"
PADDING = ("key_padding_mask", "padding_mask")  # of modules; True = padding, as in nn.MultiheadAttention
CONTEXT = ("context", "memory", "encoder_hidden_states")
TOKENS = ("ids", "input_ids", "tokens", "token_ids", "idx")
WIDTHS = ("d_model", "embed_dim", "dim", "hidden_size", "n_embd", "width")
HEADS = ("heads", "num_heads", "n_heads", "n_head", "nhead")


def function_from_signature(function: Callable[..., Any]) -> Function:
    """attention(q, k, v, …) as a target; its options follow from the names of its other parameters."""
    parameters = _parameters(function)
    if parameters is not None and len(parameters) < 3:
        raise SpecError(
            f"{_name(function)}({', '.join(parameters)}): expected attention(q, k, v), an nn.Module, "
            "or an adapter (docs/check.md)"
        )
    others = {} if parameters is None else dict(list(parameters.items())[3:])
    names = _recognized(others)
    required = [
        n
        for n, p in others.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if unknown := set(required) - set(names.values()):
        raise SpecError(
            f"{_name(function)} requires {', '.join(sorted(unknown))}, which the laws do not pass; "
            "write an adapter: regard.laws.Function(name, call, claims={…}), docs/check.md"
        )

    def call(q, k, v, **options):
        arguments = {
            names[option]: options[keyword] for option, (keyword, _) in OPTIONS.items() if keyword in options
        }
        if GROUPED in others and q.shape[1] != k.shape[1]:
            arguments[GROUPED] = True
        return function(q, k, v, **arguments)

    source, imports = _source(function)
    return Function(_name(function), call, claims=set(names), source=source, imports=imports)


def module_from_signature(module: nn.Module) -> Model:
    """A module of x, or of query, key and value, as a target; its options follow from the parameters of `forward`."""
    parameters = _parameters(module.forward) or {}
    first = next(iter(parameters), "")
    tokens = first in TOKENS
    table = next((m for m in module.modules() if isinstance(m, nn.Embedding)), None)
    width = _size(module, WIDTHS)
    if width is None:
        linear = next((m for m in module.modules() if isinstance(m, nn.Linear)), None)
        width = None if linear is None else linear.in_features
    if not first or (tokens and table is None) or (not tokens and width is None):
        raise SpecError(
            f"{_name(module)}: cannot tell the input of forward({', '.join(parameters)}); write an adapter: "
            "regard.laws.Model(name, module, call, d_model=… or vocab=…), docs/check.md"
        )
    names = {
        w: n for w, n in _recognized(parameters).items() if w in ("mask", "causal", "lengths", "documents")
    }
    padding = next((n for n in PADDING if n in parameters), None)
    if padding is not None:
        names.pop("lengths", None)
    order = list(parameters)
    three = len(order) >= 3 and order[1].startswith("k") and order[2].startswith("v")
    context = "key" if three else next((n for n in CONTEXT if n in parameters), None)
    claims = {*names} | ({"lengths"} if padding else set()) | ({"context"} if context else set())
    if _size(module, ("causal", "is_causal"), bool):
        claims |= {"always causal"}

    def call(module, x, other=None, *, lengths=None, **options):
        arguments = {names[w]: options[k] for w, (k, _) in OPTIONS.items() if w in names and k in options}
        if lengths is not None and other is None:
            arguments |= (
                {padding: key_padding_mask(x.shape[1], lengths)} if padding else {names["lengths"]: lengths}
            )
        source = x if other is None else other
        if three:
            return _tensor(module(x, source, source, **arguments))
        return _tensor(
            module(x, **arguments) if other is None else module(x, **{str(context): other}, **arguments)
        )

    return Model(
        _name(module),
        module,
        call,
        architecture="decoder"
        if tokens and "always causal" in claims
        else "encoder"
        if tokens
        else "attention",
        d_model=width,
        vocab=table.num_embeddings if tokens and table is not None else None,
        heads=_size(module, HEADS),
        claims=claims,
    )


def _recognized(parameters: Mapping[str, Any]) -> dict[str, str]:
    """option → the name of its parameter."""
    names = {option: next((n for n in names if n in parameters), None) for option, names in NAMES.items()}
    return {option: name for option, name in names.items() if name is not None}


def _parameters(call: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    """By name, without *args and **kwargs; None if there is no signature (a builtin)."""
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):
        return None
    return {n: p for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def _size(module: nn.Module, names: tuple[str, ...], kind: type = int) -> Any:
    values = (getattr(module, name, None) for name in names)
    return next((value for value in values if isinstance(value, kind)), None)


def _tensor(out: Any) -> Tensor:
    if isinstance(out, tuple):
        return out[0]
    for field in ("logits", "last_hidden_state"):
        if getattr(out, field, None) is not None:
            return getattr(out, field)
    return out


def _name(thing: Any) -> str:
    return getattr(thing, "__name__", None) or type(thing).__name__


def _source(function: Callable[..., Any]) -> tuple[str | None, str]:
    """The expression and the imports with which a snippet gets this function, if it can be imported."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    thing: Any = sys.modules.get(module or "")
    if thing is None or module == "__main__" or "<" in name:
        return None, ""
    for part in name.split("."):
        thing = getattr(thing, part, None)
    if thing is not function:
        return None, ""
    return f"adapters.adapt({module}.{name})", f"import {module}\nfrom regard.laws import adapters"
