"""A target by the names of its parameters: for what no adapter knows. The names are those that libraries use."""

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ...errors import SpecError
from ..target import OPTIONS, Function, Model
from .torch_attention import hidden_keys

# option → the names it goes by. A mask is True where a query may look, as in F.scaled_dot_product_attention.
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
PADDING = ("key_padding_mask", "padding_mask")  # of modules; True = padding, as nn.MultiheadAttention has it
CONTEXT = ("context", "memory", "encoder_hidden_states")
TOKENS = ("ids", "input_ids", "tokens", "token_ids", "idx")
WIDTHS = ("d_model", "embed_dim", "dim", "hidden_size", "n_embd", "width")
HEADS = ("heads", "num_heads", "n_heads", "n_head", "nhead")


def function_by_name(function: Callable[..., Any]) -> Function:
    """call(q, k, v, …): what it can be asked for is read off the names of its other parameters."""
    takes = _parameters(function)
    if takes is not None and len(takes) < 3:
        raise SpecError(
            f"{_name(function)}({', '.join(takes)}) takes no q, k and v; "
            "give an attention function, a module, or an adapter (docs/check.md)"
        )
    others = {} if takes is None else dict(list(takes.items())[3:])
    names = _known(others)
    needed = [
        n
        for n, p in others.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if unknown := set(needed) - set(names.values()):
        raise SpecError(
            f"{_name(function)} needs {', '.join(sorted(unknown))}, which no law knows how to give; "
            "write its adapter: regard.laws.target.Function(name, call, claims={…}), docs/check.md"
        )

    def call(q, k, v, **asked):
        given = {names[word]: asked[keyword] for word, (keyword, _) in OPTIONS.items() if keyword in asked}
        if GROUPED in others and q.shape[1] != k.shape[1]:
            given[GROUPED] = True
        return function(q, k, v, **given)

    source, imports = _again(function)
    return Function(_name(function), call, claims=set(names), source=source, imports=imports)


def module_by_name(module: nn.Module) -> Model:
    """A module of one sequence, or of query, key and value; its options read off the names of `forward`."""
    takes = _parameters(module.forward) or {}
    first = next(iter(takes), "")
    tokens = first in TOKENS
    table = next((m for m in module.modules() if isinstance(m, nn.Embedding)), None)
    width = _size(module, WIDTHS)
    if width is None:
        linear = next((m for m in module.modules() if isinstance(m, nn.Linear)), None)
        width = None if linear is None else linear.in_features
    if not first or (tokens and table is None) or (not tokens and width is None):
        raise SpecError(
            f"{_name(module)}: forward({', '.join(takes)}) does not say what it takes; write its adapter: "
            "regard.laws.target.Model(name, module, call, d_model=… or vocab=…), docs/check.md"
        )
    names = {w: n for w, n in _known(takes).items() if w in ("mask", "causal", "lengths", "documents")}
    padding = next((n for n in PADDING if n in takes), None)
    if padding is not None:
        names.pop("lengths", None)
    three = len(takes) >= 3 and list(takes)[1].startswith("k") and list(takes)[2].startswith("v")
    context = "key" if three else next((n for n in CONTEXT if n in takes), None)
    claims = {*names} | ({"lengths"} if padding else set()) | ({"context"} if context else set())
    if _size(module, ("causal", "is_causal"), bool):
        claims |= {"always causal"}

    def call(module, x, other=None, *, lengths=None, **asked):
        given = {names[w]: asked[k] for w, (k, _) in OPTIONS.items() if w in names and k in asked}
        if lengths is not None and other is None:
            given |= {padding: hidden_keys(x.shape[1], lengths)} if padding else {names["lengths"]: lengths}
        source = x if other is None else other
        if three:
            return _tensor(module(x, source, source, **given))
        return _tensor(module(x, **given) if other is None else module(x, **{str(context): other}, **given))

    return Model(
        _name(module),
        module,
        call,
        of="decoder" if tokens and "always causal" in claims else "encoder" if tokens else "attention",
        d_model=width,
        vocab=table.num_embeddings if tokens and table is not None else None,
        heads=_size(module, HEADS),
        claims=claims,
    )


def _known(takes: Mapping[str, Any]) -> dict[str, str]:
    """option → the parameter that is it."""
    found = {word: next((n for n in names if n in takes), None) for word, names in NAMES.items()}
    return {word: name for word, name in found.items() if name is not None}


def _parameters(call: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    """By name, without *args and **kwargs; None where nobody knows (a builtin)."""
    try:
        found = inspect.signature(call).parameters
    except (TypeError, ValueError):
        return None
    return {n: p for n, p in found.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def _size(module: nn.Module, names: tuple[str, ...], kind: type = int) -> Any:
    held = (getattr(module, name, None) for name in names)
    return next((value for value in held if isinstance(value, kind)), None)


def _tensor(out: Any) -> Tensor:
    if isinstance(out, tuple):
        return out[0]
    for field in ("logits", "last_hidden_state"):
        if getattr(out, field, None) is not None:
            return getattr(out, field)
    return out


def _name(thing: Any) -> str:
    return getattr(thing, "__name__", None) or type(thing).__name__


def _again(function: Callable[..., Any]) -> tuple[str | None, str]:
    """How a snippet gets this function: by its module, where it can be imported from there."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    found: Any = sys.modules.get(module or "")
    if found is None or module == "__main__" or "<" in name:
        return None, ""
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not function:
        return None, ""
    return f"adapters.adapt({module}.{name})", f"import {module}\nfrom regard.laws import adapters"
