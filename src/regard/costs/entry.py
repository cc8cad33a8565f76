"""`regard.cost`: a declaration is priced by arithmetic, any other module by tracing it on meta tensors."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..engine.backends import BACKENDS
from ..errors import SpecError, nearest
from ..spec import Spec, preset
from ..spec.base import require_positive
from .declaration import check_lengths, price
from .module import built, cost_of_module
from .sizes import Request
from .subject import is_config
from .tree import Cost

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = {
    str(t).removeprefix("torch."): t for t in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}
DEVICES = ("cpu", "cuda", "mps")
DEFAULT_N = 128  # for a model of Hugging Face


def cost(
    model: Any,
    *example_inputs: "Tensor | Any",
    n: int | None = None,
    m: int | None = None,
    batch: int = 1,
    dtype: torch.dtype | str = torch.float32,
    train: Any = False,
    backend: str = "auto",
    device: str = "cpu",
) -> Cost:
    """The cost of a model before it runs: parameters, FLOPs and bytes, term by term.

    model: a declaration, the name of a preset, or any module (with example inputs, of which only shapes matter).
    n, m: number of queries and keys; for an encoder-decoder target and source length. An image model knows its n.
    train: True or a TrainingStep; memory then includes gradients, optimizer state and saved activations.
    backend, device: which attention backend runs, and where; they decide how many pairs are evaluated.

    >>> from regard.spec import Attention
    >>> cost(Attention(512), n=1000).flops
    4145152000
    >>> cost(Attention(512, biases="none"), n=1000).parameters
    1048576
    """
    if isinstance(model, str):
        model = preset(model)
    require_positive("batch", batch)
    dtype = _dtype(dtype)
    if backend not in BACKENDS:
        raise SpecError(f"unknown backend {backend!r}; {nearest(backend, BACKENDS)}")
    if device not in DEVICES:
        raise SpecError(f"unknown device {device!r}; {nearest(device, DEVICES)}")
    if not example_inputs:
        if not isinstance(model, Spec | nn.Module) and not is_config(model) and callable(model):
            model = built(model)
        model = getattr(model, "spec", model)  # a module built from a declaration
    if not isinstance(model, Spec):
        n = DEFAULT_N if n is None else n
        require_positive("n", n)
        request = Request(model, n, n if m is None else m, batch, dtype, train, backend, device)
        return cost_of_module(model, example_inputs, request)
    if example_inputs:
        raise SpecError(
            f"{type(model).__name__} is a declaration: its cost follows from its sizes; "
            f"pass n= instead of example inputs"
        )
    return price(Request(model, *check_lengths(model, n, m), batch, dtype, train, backend, device))


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.")
        if name not in DTYPES:
            raise SpecError(f"unknown dtype {dtype!r}; {nearest(name, DTYPES)}")
        return DTYPES[name]
    if dtype not in DTYPES.values():
        raise SpecError(f"dtype={dtype} is not supported; use one of {', '.join(DTYPES)}")
    return dtype
