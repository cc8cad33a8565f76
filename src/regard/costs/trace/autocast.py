"""Autocast as a device has it, for meta tensors: PyTorch's own autocast does not act on them.

Which operators autocast treats is read from PyTorch; how, is one of four policies:
low      arguments in the low dtype; copies of leaf weights are cached until the region ends
float32  arguments in float32
sum      float32 as the dtype of the result, unless the call gives one
promote  all arguments in the widest dtype among them
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ... import compat
from .nested import map_leaves, tensors_in

LOW_NAMES = """
_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution
cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul einsum mm mv linalg_vecdot
linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell
gru_cell rnn_tanh_cell rnn_relu_cell scaled_dot_product_attention _scaled_dot_product_flash_attention
_addmm_activation _native_multi_head_attention mkldnn_rnn_layer
"""
SUM_NAMES = """
prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum
"""
PROMOTE_NAMES = """
addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add stack cat
index_copy
"""
LOW, SUM, PROMOTE = (set(names.split()) for names in (LOW_NAMES, SUM_NAMES, PROMOTE_NAMES))

_caches: list[dict[int, tuple[Tensor, Tensor]]] = []  # of the traces that run, innermost last
_devices: list[str] = []


def policy(name: str, device: str) -> str:
    if name in LOW:
        return "low"
    if name in PROMOTE:
        return "promote"
    return "sum" if name in SUM and device == "cuda" else "float32"


@contextmanager
def simulated(device: str) -> Iterator[None]:
    """torch.autocast(device) acts on meta tensors inside."""
    _register()
    common, available = compat.amp_availability()
    cache_of_casts: dict[int, tuple[Tensor, Tensor]] = {}
    clear, unavailable = torch.clear_autocast_cache, getattr(common, available)
    _caches.append(cache_of_casts)
    _devices.append(device)

    def clear_both() -> None:
        cache_of_casts.clear()
        clear()

    supported = torch.cuda.is_bf16_supported
    torch.clear_autocast_cache = clear_both
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    setattr(common, available, lambda: False)
    try:
        with compat.autocast_simulated():
            yield
    finally:
        torch.clear_autocast_cache = clear
        torch.cuda.is_bf16_supported = supported
        setattr(common, available, unavailable)
        _caches.pop().clear()
        _devices.pop()


@cache
def _register() -> Any:
    treated = {d: set(compat.autocast_operators(d.upper())) for d in ("cpu", "cuda")}
    names = sorted(treated["cpu"] | treated["cuda"])
    return compat.register_autocast(
        {name: _kernel(name, {d for d, ops in treated.items() if name in ops}) for name in names}
    )


def _kernel(full_name: str, devices: set[str]) -> Callable[..., Any]:
    name, _, overload = full_name.removeprefix("aten::").partition(".")
    operator = getattr(getattr(torch.ops.aten, name), overload or "default")

    def run(*args: Any, **kwargs: Any) -> Any:
        device = _devices[-1]
        if device not in devices:  # autocast acts on what it consists of
            out = operator.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        with compat.below_autocast():
            if device in devices and torch.is_autocast_enabled(device):
                args, kwargs = _converted(operator, policy(name, device), device, args, kwargs)
            return operator(*args, **kwargs)

    return run


def _converted(operator: Any, how: str, device: str, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    if how == "low":
        low = torch.get_autocast_dtype(device)
        return map_leaves(lambda x: _lowered(x, low), (args, kwargs))
    if how == "float32":
        return map_leaves(lambda x: _cast(x, torch.float32), (args, kwargs))
    if how == "sum":
        if _eligible(args[0]) and kwargs.get("dtype") is None and _dtype_given(operator, args) is None:
            return args, {**kwargs, "dtype": torch.float32}
        return args, kwargs
    dtypes = [x.dtype for x in tensors_in((args, kwargs)) if _eligible(x)]
    widest = torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype(device)
    return map_leaves(lambda x: _cast(x, widest), (args, kwargs))


def _dtype_given(operator: Any, args: tuple) -> Any:
    names = [name for name, _ in compat.operator_arguments(operator)]
    at = names.index("dtype") if "dtype" in names else len(args)
    return args[at] if at < len(args) else None


def _eligible(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if _eligible(x) and x.dtype != dtype else x


def _lowered(x: Any, low: torch.dtype) -> Any:
    if not _eligible(x) or x.dtype == low:
        return x
    cached = (
        x.dtype == torch.float32
        and x.requires_grad
        and x.is_leaf
        and compat.view_base(x) is None
        and torch.is_autocast_cache_enabled()
    )
    if not cached:
        return x.to(low)
    copies = _caches[-1]
    if id(x) not in copies:
        copies[id(x)] = x, x.to(low)
    return copies[id(x)][1]


def lowered(device: str, tensors: list[Tensor | None]) -> list[Any]:
    """The arguments of a fused attention in the low dtype, where autocast is on."""
    kind = "cuda" if device == "cuda" else "cpu"
    if not torch.is_autocast_enabled(kind):
        return tensors
    low = torch.get_autocast_dtype(kind)
    with compat.below_autocast():
        return [_lowered(x, low) for x in tensors]
