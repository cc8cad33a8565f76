"""Operations whose result has a shape or a choice that depends on values.

Known values decide. A router's choice of unknown values (top-k, argmax, sort) is taken to be balanced: query i takes
experts i·k, i·k + 1, … modulo their number, so that each gets the same share.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...compat import aten_operator, aten_operators, is_held_once

BALANCED = (
    "a choice by unknown values (top-k, argmax) is taken to be balanced: experts count at the routed number"
)
FINITE = "values are taken to be finite: a branch for infinities and NaN is not taken"
HIDES = "a mask of unknown values is taken to hide something: no shortcut for full masks is taken"
DRAWN = "positions drawn at random are drawn once"
CHECKED = "checks of values are taken to pass"


def _by_value(trace: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """The result on known values; the arguments must be known."""
    outs = [trace.copied(x) for x in trace.computed(func, args, kwargs)]
    return outs[0] if len(outs) == 1 else tuple(outs)


def _index(trace: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """x[mask] with a bool mask becomes x[positions]."""
    x, positions = args[0], list[Tensor | None]()
    masks = [isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]]
    if not any(masks):
        return NotImplemented
    for i, is_mask in zip(args[1], masks):
        positions += map(trace.copied, trace.known(i).nonzero(as_tuple=True)) if is_mask else [i]
    out = func(x, positions, *args[2:], **kwargs)
    if trace.all_known(x, *(p for p in positions if p is not None)):
        trace.values[out] = trace.computed(func, (x, positions), {})[0]
    return out


def _histc(trace: Any, func: Any, args: tuple, kwargs: dict) -> Tensor:
    """A GPU also counts integers; the CPU counts them as float32."""
    counts = trace.computed(func, (trace.known(args[0]).float(), *args[1:]), kwargs)[0]
    return trace.copied(counts.to(args[0].dtype))


def _equal(trace: Any, func: Any, args: tuple, kwargs: dict) -> bool:
    a, b = args[:2]
    return a.shape == b.shape and torch.equal(trace.known(a), trace.known(b))


def _assumed(note: str, value: Callable[[Tensor, tuple], Tensor | None]) -> Callable[..., Any]:
    """Of known values, as any operation; of unknown ones, the value that is assumed for the last result, if any."""

    def run(trace: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        if trace.all_known(args[0]):
            return NotImplemented
        out = func(*args, **kwargs)
        last = out[-1] if isinstance(out, tuple) else out
        if (assumed := value(last, args)) is not None:
            trace.notes[note] = None
            trace.values[last] = assumed.expand(last.shape)
        return out

    return run


def _balanced(indices: Tensor, args: tuple) -> Tensor:
    """The experts i·k, i·k + 1, … of query i."""
    x, axis = args[0], args[2] if len(args) > 2 else -1
    order = torch.arange(indices.numel()) % max(x.shape[axis] if x.dim() else 1, 1)
    if not indices.dim():
        return order.reshape(())
    moved = [*indices.shape]
    width = moved.pop(axis)
    return order.reshape(*moved, width).movedim(-1, axis)


def _balanced_largest(index: Tensor, args: tuple) -> Tensor | None:
    if len(args) < 2 or args[1] is None:
        return None
    return torch.arange(index.numel()).reshape(index.shape) % args[0].shape[args[1]]


def _hides(out: Tensor, args: tuple) -> Tensor | None:
    """Whether nothing is hidden by a mask: taken not to be so, the case that costs more."""
    return None if args[0].dtype != torch.bool or len(args) > 1 else torch.tensor(False)


def _grouped_mm(trace: Any, func: Any, args: tuple, kwargs: dict) -> Tensor:
    """Products of groups of rows, each with its own matrix."""
    a, b = args[:2]
    rows = [*a.shape[:-1]]
    if a.dim() == b.dim() == 2:
        rows.insert(0, (args[2] if len(args) > 2 else kwargs["offs"]).shape[0])
    return torch.empty(*rows, b.shape[-1], dtype=kwargs.get("out_dtype") or a.dtype, device="meta")


def _drawn(trace: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Positions drawn at random with known probabilities: they are drawn once."""
    out = func(*args, **kwargs)
    if trace.all_known(args[0]):
        trace.notes[DRAWN] = None
        trace.values[out] = trace.computed(func, args, {"generator": torch.Generator().manual_seed(0)})[0]
    return out


def _in_place(trace: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """A gradient is written into zeros; PyTorch does so out of place only where a mode watches."""
    key, added = trace.meter.key_of(args[0]), func.__name__.startswith("add.")
    zeros = added or (key is not None and "zero" in trace.meter.records[key].operation)
    if not trace.in_backward or trace.paths or not zeros:
        return NotImplemented
    name, overload = func.__name__.split(".")
    return getattr(getattr(torch.ops.aten, f"{name}_"), overload)(*args, **kwargs)


def _accumulated(trace: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Gradients of one tensor are added in the memory of the first, unless something else refers to it."""
    added = trace.in_backward and isinstance(args[1], Tensor) and args[0].shape == args[1].shape
    return _in_place(trace, func, args, kwargs) if added and is_held_once(args[0]) else NotImplemented


def _oversized(trace: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """The CPU resizes a tensor like the input: the result keeps its memory."""
    out = func(*args, **kwargs)
    shrinks = trace.device == "cpu" and out.numel() < args[0].numel()
    return torch.empty_like(args[0]).resize_(out.shape) if shrinks else out


VALUED = "nonzero masked_select bincount repeat_interleave _unique _unique2 unique_dim unique_consecutive"
HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(aten_operators(*VALUED.split()), _by_value),
    aten_operator("index"): _index,
    **dict.fromkeys(aten_operators("scatter", "scatter_add", "index_put", "index_add", "put"), _in_place),
    aten_operator("add"): _accumulated,
    **dict.fromkeys(aten_operators("col2im", "binary_cross_entropy", "soft_margin_loss"), _oversized),
    aten_operator("histc"): _histc,
    aten_operator("equal"): _equal,
    aten_operator("topk"): _assumed(BALANCED, _balanced),
    **dict.fromkeys(aten_operators("argmax", "argmin"), _assumed(BALANCED, _balanced_largest)),
    **dict.fromkeys(aten_operators("isinf", "isnan"), _assumed(FINITE, lambda *_: torch.tensor(False))),
    aten_operator("_is_all_true"): _assumed(CHECKED, lambda *_: torch.tensor(True)),
    aten_operator("all"): _assumed(HIDES, _hides),
    aten_operator("multinomial"): _drawn,
    aten_operator("_grouped_mm"): _grouped_mm,
    # A fused optimizer writes its tensors in place and allocates nothing.
    **dict.fromkeys(aten_operators("_fused_adamw_", "_fused_adam_", "_fused_sgd_"), lambda *_: None),
}
