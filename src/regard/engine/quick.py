"""Short calls made before: what was checked, chosen and masked for these shapes is looked up, not made again.

A call of 128 positions takes as long as its checks; here it costs one look into a table.
"""

from collections.abc import Callable
from math import inf

import torch
from torch import Tensor

from ..pattern import Pattern, causal, query_offset
from . import choose, walk, whole
from .call import Call
from .cpu import abreast, gathered, short

MOST = 64  # calls remembered
PAIRS = {"cpu": 1 << 20, "cuda": 1 << 22}  # of a mask that is kept: 4 MiB in float32, 8 MiB in bfloat16

Way = Callable[[Tensor, Tensor, Tensor], Tensor]
known: dict[tuple, Way] = {}

# Looked up once: a name behind three dots costs as much as what it reads.
_compiling, _learning = torch.compiler.is_compiling, torch.is_grad_enabled
_transformed, _modes = torch._C._are_functorch_transforms_active, torch._C._len_torch_dispatch_stack
_autocast = torch._C._is_any_autocast_enabled
_sdpa = torch.nn.functional.scaled_dot_product_attention


def key(
    q: Tensor, k: Tensor, v: Tensor, pattern: object, scale: int | float | None, backend: str = "auto"
) -> tuple | None:
    """All that decides how a call with only these arguments runs, by which `known` holds the way it ran.

    None if data decide, or something looks on that must see PyTorch's operations.
    """
    if _compiling() or type(q) is not Tensor or _transformed() or _modes() or _autocast():
        return None
    if pattern is None:
        text: str | None = ""
    elif not isinstance(pattern, Pattern) or (text := pattern.text) is None:
        return None
    learns = _learning() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return (
        text, scale, learns, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
        type(k), type(v), backend,
    )  # fmt: skip


def remember(key: tuple | None, call: Call, facts: choose.Facts, backend: str) -> Way | None:
    """Keep how this call runs, and give it: one call of PyTorch's attention, of products or of the walk."""
    if key is None or facts.device not in PAIRS or not (key[1] is None or 0 < key[1] < inf):
        return None
    with torch.inference_mode(False):  # a mask made in inference could not train later
        lay = choose.short(facts, backend) if key[-1] == "auto" else None
        if lay is not None:
            way = _short(call, facts, lay)
        else:
            made = {"dense": _dense, "masked": _masked, "progressions": _walked}.get(backend)
            way = None if made is None else made(call, facts)
    if way is not None:
        known[key] = way
        if len(known) > MOST:
            del known[next(iter(known))]
    return way


def _attend(call: Call, facts: choose.Facts, mask: Tensor | None, is_causal: bool) -> Way:
    """PyTorch's attention; on the CPU with gradients of gradients (whole.py), which on CUDA it has not."""
    scale, grouped = call.factor, call.grouped
    hook = whole.again if facts.grad and call.q.is_cpu else None
    if hook and facts.d_k != facts.d_v and call.q.numel() and call.k.numel():
        return lambda q, k, v: whole.learnt(q, k, v, mask, is_causal, scale)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = _sdpa(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=grouped)
        if hook:
            o.grad_fn.register_hook(hook)  # type: ignore[union-attr]  # it learns
        return o

    return attend


def _dense(call: Call, facts: choose.Facts) -> Way:
    return _attend(call, facts, None, isinstance(call.pattern, causal) and call.n > 1)


def _walked(call: Call, facts: choose.Facts) -> Way:
    place = call.pattern, *query_offset(call.pattern, call.n, call.m, None), call.factor
    if _plain(call) and (lay := choose.abreast(facts, "progressions")) is not None:
        return abreast.Abreast(lay, place, facts.grad)
    if call.q.is_cuda and _plain(call):
        from . import cuda as kernels

        return kernels.Again(kernels.task(call.q, call.v, *place), facts.grad)
    return lambda q, k, v: walk.attend(q, k, v, *place, None)[0]


def _masked(call: Call, facts: choose.Facts) -> Way | None:
    """With the mask as SDPA adds it: made from a table of allowed pairs it costs a tenth of the call, each time."""
    if call.n * call.m > PAIRS[facts.device]:
        return None
    allowed = call.allowed()
    if allowed is None or type(allowed) is not Tensor or allowed.device != call.q.device:
        return None
    empty = ~allowed.any(-1, keepdim=True)
    wide = -call.m % 8  # rows that begin at a multiple of 16 bytes: the CUDA kernels would copy others
    mask = torch.zeros(1, 1, call.n, call.m + wide, dtype=call.q.dtype, device=call.q.device)
    mask = mask[..., : call.m].masked_fill_(~(allowed | empty), -inf)
    if type(mask) is not Tensor:  # some mode makes tensors without data
        return None
    return _cleared(_attend(call, facts, mask, False), empty)


def _short(call: Call, facts: choose.Facts, lay: gathered.Lay) -> Way | None:
    allowed = call.allowed()
    if allowed is None or type(allowed) is not Tensor or not allowed.is_cpu or not _plain(call):
        return None
    place = call.pattern, *query_offset(call.pattern, call.n, call.m, None), call.factor
    way = short.Short(allowed, lay, call.q, call.k, call.v, place, facts.grad)
    return _cleared(way, ~allowed.any(-1, keepdim=True))


def _plain(call: Call) -> bool:
    return type(call.k) is Tensor and type(call.v) is Tensor


def _cleared(way: Way, empty: Tensor) -> Way:
    """Zeros in the rows that see nothing."""
    return (lambda q, k, v: way(q, k, v).masked_fill(empty, 0.0)) if bool(empty.any()) else way
