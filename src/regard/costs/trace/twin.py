"""The twin of a module on meta tensors: the same structure, hooks and shared weights, without the numbers."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import SpecError
from .nested import map_leaves
from .tracer import Trace


def twin_of(module: nn.Module, trace: Trace, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy whose parameters and buffers are metered meta tensors, in `dtype` where they are float32."""
    memo: dict[int, Any] = {}
    for x in module.parameters():
        if id(x) not in memo:
            memo[id(x)] = _parameter(x, dtype)
    for buffer in module.buffers():
        if id(buffer) not in memo:
            memo[id(buffer)] = trace.to_meta(buffer) if not buffer.is_meta else buffer.clone()
    for inner in module.modules():  # tensors that a module keeps beside its buffers, such as a cache
        for x in vars(inner).values():
            if isinstance(x, Tensor) and id(x) not in memo:
                memo[id(x)] = trace.to_meta(x) if not x.is_meta else x.clone()
    tensors = list(memo.values())
    try:
        twin = copy.deepcopy(module, memo)
    except Exception as e:
        raise SpecError(f"{type(module).__name__} cannot be copied, which tracing it needs: {e}") from e
    for x in tensors:
        trace.meter.track(x, "", "weight")
    return twin


def _parameter(x: Tensor, dtype: torch.dtype | None) -> nn.Parameter:
    kind = dtype if dtype is not None and x.dtype == torch.float32 else x.dtype
    with torch.no_grad():
        empty = torch.empty_strided(x.shape, x.stride(), dtype=kind, device="meta")
    return nn.Parameter(empty, requires_grad=x.requires_grad)


def inputs_of(trace: Trace, given: Any, dtype: torch.dtype) -> Any:
    """Inputs as meta tensors in the requested dtype; the values of real ones are known."""

    def one(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        converts = x.is_floating_point() and x.dtype == torch.float32 and dtype != torch.float32
        twin = trace.to_meta(x.to(dtype) if converts else x)
        trace.meter.track(twin, "", "input")
        return twin

    return map_leaves(one, given)
