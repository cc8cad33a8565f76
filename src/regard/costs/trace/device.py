"""Meta tensors that say they are on a device, and calls that run differently there than on meta tensors."""

from collections.abc import Callable
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...compat import has_kernel, without_function_modes
from ...nested import map_leaves
from .data_dependent import CHECKED, FINITE

CREATORS = """
    empty ones zeros full arange linspace logspace rand randn randint randperm eye tril_indices triu_indices
    scalar_tensor empty_strided empty_permuted hann_window hamming_window blackman_window bartlett_window
    kaiser_window range
"""
CONVOLUTIONS = "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"
FACTORIZATIONS = "cholesky eig eigh eigvals eigvalsh inv lstsq matrix_exp pinv qr svd svdvals"
UNKNOWN_WORKSPACE = [getattr(torch, name) for name in f"{CONVOLUTIONS} lstm gru rnn_tanh rnn_relu".split()]
UNKNOWN_WORKSPACE += [torch.matrix_exp, *(getattr(torch.linalg, name) for name in FACTORIZATIONS.split())]
WORKSPACE = "memory inside a convolution, a recurrent layer or a factorization of a matrix is not counted"
NONZERO = "factors of products (prod, cumprod) are taken not to be 0: otherwise gradients need more memory"
CUMULATIVE = (torch.cumprod, Tensor.cumprod)
# The index of the simulated device. No machine has so many, so no cache takes it for a real device.
INDEX = 111
MAKERS = [getattr(torch, name) for name in CREATORS.split()]
READERS = (Tensor.numpy, Tensor.tolist, Tensor.__format__, Tensor.__dlpack__, Tensor.__dlpack_device__)
# The functions that read these attributes of a tensor, as a TorchFunctionMode receives them.
ATTRIBUTES = ("device", "is_cuda", "is_cpu", "is_meta")
DEVICE, IS_CUDA, IS_CPU, IS_META = (getattr(Tensor, name).__get__ for name in ATTRIBUTES)


class OnDevice(TorchFunctionMode):
    """Meta tensors report this device; what would be created there becomes a meta tensor."""

    def __init__(self, trace: Any, replaced: dict[Any, Callable]):
        super().__init__()
        self.trace, self.device = trace, torch.device(trace.device, INDEX)
        on_gpu = trace.device == "cuda"
        self.attributes: dict[Any, Callable] = {  # read without modes
            DEVICE: lambda x: self.device if x.is_meta else x.device,
            IS_CUDA: lambda x: on_gpu if x.is_meta else x.is_cuda,
            IS_CPU: lambda x: trace.device == "cpu" if x.is_meta else x.is_cpu,
            IS_META: lambda x: False,
            Tensor.get_device: lambda x: INDEX if on_gpu and x.is_meta else -1,
            Tensor.data_ptr: lambda x: 0 if x.is_meta else x.data_ptr(),
            Tensor.__reduce_ex__: lambda x, *a: x.__reduce_ex__(*a),
        }
        self.handlers: dict[Any, Callable] = {
            Tensor.to: self._to,
            Tensor.cuda: lambda x, *_, **__: self._to(x, self.device),
            Tensor.cpu: lambda x, *_, **__: self._to(x, "cpu"),
            Tensor.__getitem__: lambda x, index: x[self._index(index)],
            Tensor.__setitem__: lambda x, index, value: x.__setitem__(self._index(index), value),
            **{f: lambda x, *a, f=f, **k: f(self._read(x), *a, **k) for f in READERS},
            **dict.fromkeys((torch.isfinite, Tensor.isfinite), self._is_finite),
            torch.tensor: self._tensor,
            torch.as_tensor: lambda x, **k: (self._to if isinstance(x, Tensor) else self._tensor)(x, **k),
            **{f: lambda *a, f=f, device=None, **k: f(*a, **k, device=self._where(device)) for f in MAKERS},
            **{function: partial(self._with_note, function) for function in UNKNOWN_WORKSPACE},
            F.mish: F.silu,  # as many tensors; its gradient is one kernel on meta tensors too
            **{f: partial(self._product, f) for f in (torch.prod, Tensor.prod, *CUMULATIVE)},
            torch.linalg.vander: self._vander,
            **{f: partial(self._max_pool1d, f) for f in (F.max_pool1d, torch.max_pool1d)},
            **({torch.dropout: dropout, torch.rms_norm: rms_norm} if on_gpu else {}),
            **replaced,
        }

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in self.attributes:
            with without_function_modes():
                return self.attributes[func](*args, **kwargs)
        if func not in self.handlers and kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": self._where(kwargs["device"])}
        if func in self.handlers and "input" in kwargs:  # the first argument by its name
            args, kwargs = (kwargs["input"], *args), {k: x for k, x in kwargs.items() if k != "input"}
        return self.handlers.get(func, func)(*args, **kwargs)

    def _where(self, device: Any) -> torch.device:
        """The device on which a tensor for `device` is created here: meta, if that is the simulated one."""
        device = torch.device("cpu" if device is None else device)
        return torch.device("meta") if device.type == self.device.type else device

    def _with_note(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        self.trace.notes[WORKSPACE] = None
        return function(*args, **kwargs)

    def _product(self, function: Callable, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.trace.notes |= {NONZERO: None} if x.requires_grad and torch.is_grad_enabled() else {}
        return Product.apply(x, function, args, kwargs)

    def _vander(self, x: Tensor, *, N: int | None = None) -> Tensor:
        """As PyTorch computes it, by a cumprod that no mode sees."""
        n = x.shape[-1] if N is None else N
        if n < 2 or not x.is_floating_point():
            return torch.linalg.vander(x, N=N)
        powers = self._product(torch.cumprod, x.unsqueeze(-1).expand(*x.shape, n - 1), -1)
        return torch.cat((torch.ones_like(powers[..., :1]), powers), -1)

    def _max_pool1d(self, function: Callable, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The CPU stores the positions of the maxima only if a gradient or the model needs them."""
        needed = (x.requires_grad and torch.is_grad_enabled()) or kwargs.get("return_indices")
        if needed or self.device.type != "cpu":
            return function(x, *args, **kwargs)
        meter, track = self.trace.meter, self.trace.meter.track
        with patch.object(meter, "track", lambda y, *a: None if y.dtype == torch.int64 else track(y, *a)):
            return function(x.contiguous(), *args, **kwargs)

    def _tensor(self, data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if isinstance(data, Tensor):
            return self._to(data, device, **kwargs).detach().clone()
        data = map_leaves(lambda x: self._read(x) if isinstance(x, Tensor) else x, data)
        with without_function_modes():
            real = torch.tensor(data, *args, **kwargs)
        counter = self.device.type == "cpu" and not real.dim()  # such as the steps of an optimizer
        return self.trace.placed(real) if self._where(device).type == "meta" and not counter else real

    def _index(self, index: Any) -> Any:
        """Lists of positions as tensors whose values are known: PyTorch would make them where no mode sees it."""
        if isinstance(index, tuple):
            return tuple(map(self._index, index))
        return self._tensor(index) if isinstance(index, list) else index

    def _to(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x.to(device, dtype, …) with the device as it is here."""
        given = [*args, kwargs.get("device"), kwargs.get("dtype"), kwargs.get("other")]
        given = [a.dtype if isinstance(a, Tensor) else a for a in given]
        dtype = next((a for a in given if isinstance(a, torch.dtype)), None)
        for device in given:
            if isinstance(device, str | torch.device | int) and not isinstance(device, bool):
                there = self._where("cuda" if isinstance(device, int) else device).type == "meta"
                with without_function_modes():
                    x = self._read(x) if not there else x if x.is_meta else self.trace.placed(x)
        options = {k: v for k, v in kwargs.items() if k in ("copy", "memory_format")}
        with without_function_modes():
            return x.to(x.dtype if dtype is None else dtype, **options)

    def _is_finite(self, x: Tensor) -> Tensor:
        """Unknown values are taken to be finite."""
        out = torch.isfinite(x)
        with without_function_modes():
            if out.is_meta and not self.trace.all_known(out):
                self.trace.notes[FINITE] = None
                self.trace.values[out] = torch.ones((), dtype=torch.bool).expand(out.shape)
        return out

    def _read(self, x: Tensor) -> Tensor:
        with without_function_modes():
            return self.trace.known(x) if x.is_meta else x


def unchecked(trace: Any, function: Any) -> Callable:
    """A function whose checks of values pass; no mode holds its arguments while it replaces them."""
    passing = SimpleNamespace(**{**vars(torch), "any": lambda x: trace.notes.update({CHECKED: None})})
    names = {**function.__globals__, "torch": passing, "has_torch_function_variadic": lambda *_: False}
    same = FunctionType(function.__code__, names, None, function.__defaults__)
    same.__kwdefaults__ = function.__kwdefaults__
    return same


def simulated_facts(trace: Any, of: Callable, device: Any = None) -> Any:
    """torch.cuda.get_device_capability or get_device_properties, which answer for the simulated device too."""
    if getattr(device, "index", device) != INDEX:
        return of(device)
    trace.by_card, (major, minor) = True, trace.gpu.capability
    if of.__name__ == "get_device_capability":
        return major, minor
    return SimpleNamespace(major=major, minor=minor, multi_processor_count=trace.gpu.multiprocessors)


def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **_: Any) -> Tensor:
    """On a GPU dropout is one kernel that saves a mask of one byte per entry."""
    return torch.native_dropout(x, p, True)[0] if _.get("train", training) and 0 < p < 1 else x


def rms_norm(x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: Any = None) -> Tensor:
    """On a GPU x / rms is one kernel, which saves x and one number per row."""
    if has_kernel("aten::rms_norm", "AutocastCUDA") and torch.is_autocast_enabled("cuda"):
        x, weight = x.float(), None if weight is None else weight.float()
    return FusedRmsNorm.apply(x, weight, len(normalized_shape))


class Product(torch.autograd.Function):
    """x.prod(axis) or x.cumprod(axis): if no factor is 0, which only real tensors show, the gradient divides by x."""

    @staticmethod
    def forward(ctx, x, function, args, kwargs):
        out, ctx.cumulative = function(x, *args, **kwargs), function in CUMULATIVE
        ctx.axes = [a for a in (*args[:1], kwargs.get("dim")) if type(a) is int]
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, out = ctx.saved_tensors
        if ctx.axes:  # where a factor is 0, which PyTorch keeps to the end
            zeros = x == 0
        if ctx.cumulative:  # the sums of out · grad from each factor on
            out = out * grad
            last_first = out.flip(ctx.axes)
            sums = last_first.cumsum(ctx.axes[0])
            grad = sums.flip(ctx.axes)
            del last_first, sums
            return grad / x, None, None, None
        if ctx.axes:
            counts = zeros.sum(ctx.axes[0], keepdim=True)
            grad, out = grad.reshape(counts.shape), out.reshape(counts.shape)
        return grad * (out / x), None, None, None


class FusedRmsNorm(torch.autograd.Function):
    """PyTorch's fused RMS norm without arithmetic."""

    @staticmethod
    def forward(ctx, x, weight, axes):
        rows = x.shape[: x.dim() - axes]
        wide = torch.promote_types(x.dtype, torch.float32)
        ctx.save_for_backward(x, weight, x.new_empty((*rows, *(1,) * axes), dtype=wide))
        dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
        return torch.empty_like(x, dtype=dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None
