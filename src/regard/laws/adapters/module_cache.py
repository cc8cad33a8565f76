"""Decoding step by step with a module's cache, which is passed as an argument or kept in the module's buffers."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def read_cache(reader: Any) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    """make_cache and decode for a module with a cache argument, or with its own buffers and a start position."""
    if reader.cache is not None:
        return _argument_cache(reader)
    if reader.start is not None and reader.context is None:
        return _buffer_cache(reader)
    return None, None


def _argument_cache(reader: Any) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    name = str(reader.cache)
    flag = next((n for n in ("use_cache", "return_cache", "return_kv") if n in reader.parameters), None)
    more: dict[str, Any] = {flag: True} if flag else {}

    def step(module: nn.Module, x: Tensor, cache: Any, position: int) -> Any:
        arguments = reader.arguments(x, None, {})
        if "causal" in reader.names:
            arguments[reader.names["causal"]] = True
        if reader.start is not None:
            arguments[reader.start] = position
        arguments = {**arguments, name: cache, **more}
        inputs = (x, x, x) if reader.three else (x,)
        return module(*inputs, **arguments)

    empty: Any = None
    starts: tuple[Any, ...] = (None, {}, [])
    for first in starts:
        try:
            with torch.no_grad():
                module = copy.deepcopy(reader.module).eval()
                start = copy.copy(first)
                out = step(module, reader.sample(1, 1), start, 0)
                following = _next_cache(out, start)
                if following is None:
                    continue
                step(module, reader.sample(1, 1), following, 1)
        except Exception:  # it does not start from this empty cache
            continue
        empty = (first,)
        break
    if empty is None:
        reader.notes.append(
            f"{name}: how to create an empty cache could not be determined; cache laws are not run"
        )
        return None, None

    def make_cache(module: nn.Module, b: int, context: Tensor | None = None) -> dict[str, Any]:
        return {"cache": copy.copy(empty[0]), "position": 0}

    def decode(module: nn.Module, x: Tensor, state: dict[str, Any]) -> Tensor:
        out = step(module, x, state["cache"], state["position"])
        state["cache"], state["position"] = _next_cache(out, state["cache"]), state["position"] + x.shape[1]
        return tensor_of(out)

    reader.notes.append(f"{name}: a cache; cached decoding is compared with the full pass")
    return make_cache, decode


def _next_cache(out: Any, given: Any) -> Any:
    """The cache after a call: a later element of the output, or the object that was passed and changed in place."""
    if isinstance(out, tuple):
        for each in out[1:]:
            if isinstance(each, tuple | list | dict) and each:
                return each
        for each in out[1:]:
            if each is not None and not isinstance(each, Tensor):
                return each
    for field in ("past_key_values", "past_key_value"):
        if getattr(out, field, None) is not None:
            return getattr(out, field)
    return given if given else None


def _buffer_cache(reader: Any) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    """A module that stores keys and values in its own buffers and takes the position of its input."""
    name = str(reader.start)

    def decode(module: nn.Module, x: Tensor, state: dict[str, Any]) -> Tensor:
        arguments = {**reader.arguments(x, None, {}), name: state["position"]}
        if "causal" in reader.names:
            arguments[reader.names["causal"]] = True
        inputs = (x, x, x) if reader.three else (x,)
        out = tensor_of(module(*inputs, **arguments))
        state["position"] += x.shape[1]
        return out

    if not any(b.dim() >= 3 for b in reader.module.buffers()) and not any(
        isinstance(v, Tensor) and v.dim() >= 3 for v in vars(reader.module).values()
    ):
        return None, None
    reader.notes.append(f"{name}: decoding with the module's own cache is compared with the full pass")
    return (lambda module, b, context=None: {"position": 0}), decode


def tensor_of(out: Any) -> Tensor:
    """The output tensor of a call that may return more."""
    if isinstance(out, tuple | list):
        return out[0]
    if isinstance(out, dict):
        return out.get("logits", out.get("last_hidden_state", next(iter(out.values()))))
    for field in ("logits", "last_hidden_state"):
        if getattr(out, field, None) is not None:
            return getattr(out, field)
    return out
