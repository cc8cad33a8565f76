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
from unittest.mock import patch

import torch
from torch import Tensor

from ... import compat
from ...nested import map_leaves, tensors_in

NAMES = {
    "low": """
    _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution
    cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul einsum mm mv linalg_vecdot
    linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell
    gru_cell rnn_tanh_cell rnn_relu_cell scaled_dot_product_attention _scaled_dot_product_flash_attention
    _addmm_activation _native_multi_head_attention mkldnn_rnn_layer
    """,
    "sum": "prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum",  # on a GPU
    "promote": """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add stack cat index_copy
    """,
}
POLICIES = {name: how for how, names in NAMES.items() for name in names.split()}

# For each trace that runs, innermost last: the device, and the copies of weights in the low dtype.
_active: list[tuple[str, dict[int, tuple[Tensor, Tensor]]]] = []


@contextmanager
def simulated(device: str) -> Iterator[None]:
    """torch.autocast(device) acts on meta tensors inside."""
    _register()
    copies = dict[int, tuple[Tensor, Tensor]]()
    _active.append((device, copies))
    try:
        with (
            patch.object(torch, "clear_autocast_cache", copies.clear),
            patch.object(torch.cuda, "is_bf16_supported", lambda *_, **__: True),
            patch.object(*compat.amp_availability(), lambda: False),
            compat.autocast_simulated(),
        ):
            yield
    finally:
        _active.pop()
        copies.clear()


@cache
def _register() -> Any:
    treated = {d: set(compat.autocast_operators(d.upper())) for d in ("cpu", "cuda")}
    names = sorted(treated["cpu"] | treated["cuda"])
    kernels = {name: _kernel(name, {d for d in treated if name in treated[d]}) for name in names}
    return compat.register_autocast(kernels)


def _kernel(full_name: str, devices: set[str]) -> Callable[..., Any]:
    name, _, overload = full_name.removeprefix("aten::").partition(".")
    operator = getattr(getattr(torch.ops.aten, name), overload or "default")
    composite = compat.has_kernel(full_name, "CompositeImplicitAutograd")  # others may have one in Python

    def run(*args: Any, **kwargs: Any) -> Any:
        device = _active[-1][0]
        if device not in devices and composite:  # autocast treats the operators that it consists of
            return operator.decompose(*args, **kwargs)
        how = POLICIES.get(name, "float32")
        how = "float32" if how == "sum" and device != "cuda" else how
        with compat.below_autocast():
            if device in devices and torch.is_autocast_enabled(device):
                args, kwargs = _converted(operator, how, device, args, kwargs)
            return operator(*args, **kwargs)

    return run


def _converted(operator: Any, how: str, device: str, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    low = torch.get_autocast_dtype(device)
    if how == "low":
        return map_leaves(lambda x: _lowered(x, low), (args, kwargs))
    if how == "sum":
        names = [name for name, _ in compat.operator_arguments(operator)]
        dtype = dict(zip(names, args), **kwargs).get("dtype")
        return args, {**kwargs, "dtype": torch.float32} if _eligible(args[0]) and dtype is None else kwargs
    dtypes = [x.dtype for x in tensors_in((args, kwargs)) if _eligible(x)]
    wide = torch.float32 if how == "float32" or torch.float32 in dtypes else low
    return map_leaves(lambda x: x.to(wide) if _eligible(x) and x.dtype != wide else x, (args, kwargs))


def _eligible(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64


def _lowered(x: Any, low: torch.dtype) -> Any:
    if not _eligible(x) or x.dtype == low:
        return x
    weight = x.dtype == torch.float32 and x.requires_grad and x.is_leaf and compat.view_base(x) is None
    if not weight or not torch.is_autocast_cache_enabled():
        return x.to(low)
    copies = _active[-1][1]
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
