"""Short calls made before: what was checked, chosen and masked for these shapes is looked up, not made again.

A call of 128 positions takes as long as its checks; here it costs one look into a table.
"""

from collections import OrderedDict
from collections.abc import Callable
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from ..pattern import Pattern, causal, standing
from . import short, walk, whole
from .call import Call, eager

MOST = 64  # calls remembered
PAIRS = {"cpu": 1 << 20, "cuda": 1 << 22}  # of a mask that is kept: 4 MiB in float32, 8 MiB in bfloat16

Way = Callable[[Tensor, Tensor, Tensor], Tensor]
_known: OrderedDict[tuple, Way] = OrderedDict()


def recall(q: Tensor, k: Tensor, v: Tensor, pattern: object, scale: int | float | None) -> Way | None:
    """How a call with only these arguments ran; None if it is not remembered, or is no plain eager call."""
    text = _text(q, pattern)
    return None if text is None else _known.get(_key(q, k, v, text, scale))


def remember(
    call: Call,
    backend: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    pattern: object,
    scale: int | float | None,
) -> Way | None:
    """Keep how this call runs, if no data decide: one call of PyTorch's attention, or of the walk; and give it."""
    text = _text(tensors[0], pattern)
    if text is None or not (scale is None or 0 < scale < inf):
        return None
    with torch.inference_mode(False):  # a mask made in inference could not train later
        made = {"dense": _dense, "masked": _masked, "progressions": _walked}.get(backend)
        way = None if made is None else made(call)
    if way is not None:
        _known[_key(*tensors, text, scale)] = way
        if len(_known) > MOST:
            _known.popitem(last=False)
    return way


def _text(q: Tensor, pattern: object) -> str | None:
    """The pattern as it is written; None if data decide, or the call is not a plain eager one."""
    kind = q.device.type
    ordinary = type(q) is Tensor and not torch.compiler.is_compiling()
    if not ordinary or kind not in ("cpu", "cuda") or torch.is_autocast_enabled(kind):
        return None
    return "" if pattern is None else pattern.text if isinstance(pattern, Pattern) else None


def _key(q: Tensor, k: Tensor, v: Tensor, text: str, scale: int | float | None) -> tuple:
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    kinds = (q.dtype, k.dtype, v.dtype, q.device, k.device, v.device)
    return text, q.shape, k.shape, v.shape, kinds, scale, grad


def _sdpa(call: Call) -> Callable[..., Tensor]:
    """PyTorch's attention; on the CPU with gradients of gradients (whole.py), which on CUDA it has not."""
    return F.scaled_dot_product_attention if call.q.is_cuda or not _learns(call) else whole.attend


def _learns(call: Call) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in (call.q, call.k, call.v))


def _dense(call: Call) -> Way:
    is_causal, scale, grouped = isinstance(call.pattern, causal) and call.n > 1, call.factor, call.grouped
    attend = _sdpa(call)
    return lambda q, k, v: attend(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=grouped)


def _walked(call: Call) -> Way:
    place = call.pattern, *standing(call.pattern, call.n, call.m, None), call.factor

    def walked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return walk.attend(q, k, v, *place, None)[0]

    if not call.q.is_cuda or not eager(call.q, call.k, call.v):
        return walked
    from . import kernels

    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (call.q, call.k, call.v))
    again = kernels.Again(kernels.task(call.q, call.v, *place), learns)
    return lambda q, k, v: again(q, k, v) if eager(q, k, v) else walked(q, k, v)


def _masked(call: Call) -> Way | None:
    """With the mask as SDPA adds it: made from a table of allowed pairs it costs a tenth of the call, each time."""
    if call.n * call.m > PAIRS[call.q.device.type]:
        return None
    allowed, scale, grouped = call.allowed(), call.factor, call.grouped
    if allowed is None or type(allowed) is not Tensor or allowed.device != call.q.device:
        return None
    empty = ~allowed.any(-1, keepdim=True)
    wide = -call.m % 8  # rows that begin at a multiple of 16 bytes: the CUDA kernels would copy others
    mask = torch.zeros(1, 1, call.n, call.m + wide, dtype=call.q.dtype, device=call.q.device)
    mask = mask[..., : call.m].masked_fill_(~(allowed | empty), -inf)
    if type(mask) is not Tensor:  # some mode makes tensors without data
        return None

    attend, few = _sdpa(call), mask[0, 0] if _few(call) else None

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if few is not None and eager(q, k, v):
            return short.attend(q, k, v, few, scale)
        return attend(q, k, v, mask, scale=scale, enable_gqa=grouped)

    return (lambda q, k, v: run(q, k, v).masked_fill(empty, 0.0)) if bool(empty.any()) else run


def _few(call: Call) -> bool:
    """Whether the call is short enough for short.py."""
    scores = call.q.shape[0] * call.q.shape[1] * call.n * call.m
    most = short.LEARNED if _learns(call) else short.SEEN
    wide = call.q.dtype in (torch.float32, torch.float64)  # half types are rounded between the products
    return call.q.is_cpu and wide and not call.grouped and 0 < scores <= most
