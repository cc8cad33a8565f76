"""The one door to costs: a declaration is priced by arithmetic, anything else by running it without data."""

from typing import TYPE_CHECKING, Any

import torch

from ..engine.choose import BACKENDS
from ..errors import SpecError, nearest
from ..spec import Spec, preset
from .declaration import lengths, need_whole, price
from .sizes import Given
from .tree import Cost

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = {
    str(t).removeprefix("torch."): t for t in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}
DEVICES = ("cpu", "cuda", "mps")


def cost(
    thing: Any,
    *example_inputs: "Tensor | Any",
    n: int | None = None,
    m: int | None = None,
    batch: int = 1,
    dtype: torch.dtype | str = torch.float32,
    train: Any = False,
    backend: str = "auto",
    device: str = "cpu",
) -> Cost:
    """What a thing costs before it runs: parameters, operations and bytes, term by term.

    thing: a declaration, the name of a preset, or any module (then with inputs to run it on, without data).
    n, m: queries and keys; of an encoder-decoder the target and the source. An image knows its own n.
    train: True for a training step; memory then counts gradients, the optimiser and what is kept.
    backend, device: by which way attention runs, and where: they decide the pairs that are computed.

    >>> from regard.spec import Attention
    >>> cost(Attention(512), n=1000).operations
    4145152000
    >>> cost(Attention(512, biases="none"), n=1000).parameters
    1048576
    """
    if isinstance(thing, str):
        thing = preset(thing)
    need_whole("batch", batch)
    dtype = _dtype(dtype)
    if backend not in BACKENDS:
        raise SpecError(f"unknown backend {backend!r}; {nearest(backend, BACKENDS)}")
    if device not in DEVICES:
        raise SpecError(f"unknown device {device!r}; {nearest(device, DEVICES)}")
    if not isinstance(thing, Spec) and not example_inputs:
        thing = getattr(thing, "spec", thing)  # a module that was declared
    if not isinstance(thing, Spec):
        from .module import cost_of

        return cost_of(thing, example_inputs, n=n, m=m, batch=batch, dtype=dtype, train=train, device=device)
    if example_inputs:
        raise SpecError(
            f"{type(thing).__name__} is a declaration, priced by its sizes; "
            f"give n= instead of {len(example_inputs)} example inputs"
        )
    return price(Given(thing, *lengths(thing, n, m), batch, dtype, train, backend, device))


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.")
        if name not in DTYPES:
            raise SpecError(f"unknown dtype {dtype!r}; {nearest(name, DTYPES)}")
        return DTYPES[name]
    if dtype not in DTYPES.values():
        raise SpecError(f"dtype={dtype} is none that a model computes in; use {', '.join(DTYPES)}")
    return dtype
