"""The backend `flash4`: FlashAttention-4's kernels, where the package flash-attn-4 is installed (`regard[flash]`).

It takes 16-bit heads on Hopper and Blackwell GPUs and patterns that are one band of i − j: every pair, causal, a
window, and both. Its backward pass adds up in a fixed order only by `deterministic=True`, so that is what runs here.
Nothing here imports the package before a call runs.
"""

from collections.abc import Callable
from functools import cache, partial
from importlib import metadata
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..pattern import Pattern, Relation
from ..progression import FAR
from . import reference_backend
from .call import Call, CallFacts, Outputs, Prepared, has_empty_row, replaced

PACKAGE = "flash-attn-4"
CAPABILITIES = (9, 10)  # Hopper, Blackwell: others have no backward pass, or none in a fixed order
MAX_HEAD_DIM = 256
TILE = 128  # queries and keys of a tile of its kernels
PROGRAMS = 132  # tiles that an H200 computes at a time
# Seconds, H200, bf16 (bench/gpu_peers.py): per pair of a tile for heads of 64 and of 128, per tile of queries, and
# what the CPU needs for a call; forward, and with backward.
PAIR, PAIR_GRAD = {64: 4.6e-13, 128: 7.4e-13}, {64: 1.8e-12, 128: 3.05e-12}
QUERY_TILE, QUERY_TILE_GRAD = 16e-9, 66e-9
CALL, CALL_GRAD = 60e-6, 200e-6
WINDOW = 1.25  # the estimates of `triton` for windows are 14 to 24 % above its times; so these are, too


class Flash4:
    name = "flash4"

    @property
    def automatic(self) -> tuple[str, ...]:
        return ("cuda",) if version() else ()

    def refuses(self, f: CallFacts) -> str | None:
        if f.device_type != "cuda":
            return f"it runs on CUDA, not on {f.device_type}"
        if version() is None:
            return f"the package {PACKAGE} is not installed; pip install 'regard[flash]' brings it"
        major = capability(f.device)
        if major not in CAPABILITIES:
            return f"its backward pass has a fixed order on GPUs of capability 9 and 10 only, here {major}"
        terms = _terms(f) or _shapes(f)
        if terms:
            return terms
        if band(f.pattern) is None:
            return f"{f.pattern!r} is no band of i − j (every pair, causal, a window, or these joined by &)"
        if f.offset[1] != 1:
            return f"queries {f.offset[1]} positions apart are not supported"
        if has_empty_row(*f.place):
            return "some queries have no allowed key"
        return None

    def estimate(self, f: CallFacts) -> float:
        wide = 64 if f.d_k <= 64 else 128
        tiles = f.flat_heads * ceil(f.n / TILE)
        pair, tile = (PAIR_GRAD, QUERY_TILE_GRAD) if f.grad else (PAIR, QUERY_TILE)
        busy = f.flat_heads * _computed(f) * pair[wide] * max(1.0, f.d_k / 128) + tiles * tile
        busy *= 1.0 if options_of(f).left is None else WINDOW
        return max(busy * max(1.0, PROGRAMS / tiles), CALL_GRAD if f.grad else CALL)

    def prepare(self, f: CallFacts) -> Prepared:
        options = options_of(f)
        build = (lambda: _function(f, options)) if f.only_pattern else None
        variant = f"{PACKAGE} {version()}, {options}" + (", deterministic backward" if f.grad else "")
        return Prepared(self.name, variant, lambda: _computed(f), lambda call: _run(call, f, options), build)


@cache
def version() -> str | None:
    """Of the installed package, which is not imported for it; None: there is none."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return None


def capability(device: str) -> int | None:
    """The first number of the compute capability; None: there is no GPU here."""
    return torch.cuda.get_device_capability(device)[0] if torch.cuda.is_available() else None


def _terms(f: CallFacts) -> str | None:
    """What is not in its softmax, or not as exact as here."""
    refused = (
        (f.hard, "scale=inf has no softmax"),
        (f.observed, "a compiler or transform must see the operations, and its kernels are none"),
        (f.bias != "none", "a bias is added to the scores"),
        (f.softcap is not None, "its softcap is computed with an approximate tanh (11 bits)"),
        (f.table, "a bool tensor is no pattern; declare one"),
        (f.hides_keys, "keys that are hidden per batch row (lengths) are not supported here"),
        (f.row_offsets, "per-row query offsets (`at` as a tensor) are not supported"),
        (f.dropout_p > 0, "it has no dropout"),
    )
    return next((reason for holds, reason in refused if holds), None)


def _shapes(f: CallFacts) -> str | None:
    if f.dtype not in (torch.float16, torch.bfloat16):
        return f"its kernels take float16 or bfloat16, not {str(f.dtype).removeprefix('torch.')}"
    if f.d_k != f.d_v:
        return f"queries {f.d_k} and values {f.d_v} wide: its kernels for two widths are for other shapes"
    if f.d_k % 8 or not 8 <= f.d_k <= MAX_HEAD_DIM:
        return f"heads {f.d_k} wide; a multiple of 8 up to {MAX_HEAD_DIM} is needed"
    return "there are no pairs" if f.pairs == 0 else None


# Bands: its windows are counted from the last key, which belongs to the last query.


def band(pattern: Pattern) -> Relation | None:
    """near ≤ i − j ≤ far, if that is all that the pattern asks."""
    found = pattern.fold(
        lambda word: None if word.has_data else word.relation,
        lambda a, b: None if a is None or b is None else a & b,
        lambda a, b: None,
        lambda a: None,
    )
    return found if found is not None and found == Relation(near=found.near, far=found.far) else None


class Options(NamedTuple):
    """Its window: `left` keys before and `right` after the key of a query; None: all. The last query has the last of
    the first `keys` keys."""

    keys: int
    left: int | None
    right: int | None
    scale: float
    return_lse: bool

    def __str__(self) -> str:
        if self.left is None:
            return {None: "every pair", 0: "causal"}.get(self.right, f"up to {self.right} keys after a query")
        return f"window of {self.left} and {'all' if self.right is None else self.right}"


def options_of(f: CallFacts) -> Options:
    """Keys past the last that any query sees are left out, so that a causal band stays causal at any query offset."""
    relation = band(f.pattern)
    assert relation is not None
    last = f.offset[0] + f.n - 1  # the position of the last query
    bounded = relation.near > -FAR
    keys = min(f.m, last - relation.near + 1) if bounded else f.m
    ahead = last - (keys - 1)  # of the position that its kernels count by
    left = None if relation.far >= FAR or relation.far - ahead >= keys - 1 else relation.far - ahead
    right = ahead - relation.near if bounded else None
    if right is not None and right >= f.n - 1:  # the first query sees the last key
        right = None
    return Options(keys, left, right, f.factor, f.return_lse)


def _computed(f: CallFacts) -> int:
    """Pairs in its tiles, for one head: about half a tile more at each end of a band."""
    o = options_of(f)
    if o.left is not None:
        width = o.left + TILE + (o.keys if o.right is None else o.right) + TILE
        return f.n * min(o.keys, width)
    if o.right is None:
        return f.n * o.keys
    return f.n * min(o.keys, o.keys - f.n // 2 + o.right + TILE // 2)


# Running.


def _function(f: CallFacts, options: Options) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    kernel = _kernel()
    return lambda q, k, v: attend(kernel, Call(q, k, v, f.pattern, at=f.offset[0]), options)[0]


def _run(call: Call, f: CallFacts, options: Options) -> Outputs:
    o, lse = attend(_kernel(), Call(call.q, call.k, call.v, f.pattern, at=f.offset[0]), options)
    return o, lse if options.return_lse else None


def _kernel() -> Callable[..., Any]:
    from flash_attn.cute import flash_attn_func

    return flash_attn_func


def attend(kernel: Callable[..., Any], call: Call, options: Options) -> Outputs:
    """o and lse by `flash_attn_func`, which has the heads behind the positions."""
    q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
    if options.keys < k.shape[1]:
        k, v = k[:, : options.keys], v[:, : options.keys]
    window = {"window_size": (options.left, options.right), "return_lse": options.return_lse}
    o, lse = kernel(q, k, v, softmax_scale=options.scale, deterministic=True, **window)
    if o.grad_fn is not None:
        o.grad_fn.register_hook(partial(_double_backward, replaced(call, q=q, k=k, v=v, scale=options.scale)))
    return o.transpose(1, 2), lse


def _double_backward(
    call: Call, grads: tuple[Tensor | None, ...], given: tuple[Tensor | None, Tensor | None]
) -> tuple[Tensor | None, ...] | None:
    """A hook after its backward pass: the gradients as they are, or under create_graph=True by the formula.

    call: q, k and v with the heads behind the positions.
    """
    if not torch.is_grad_enabled() or given[0] is given[1] is None:
        return None
    q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
    grad = None if given[0] is None else given[0].transpose(1, 2)
    results = reference_backend.gradients((grad, given[1]), replaced(call, q=q, k=k, v=v))
    return *(None if x is None else x.transpose(1, 2) for x in results), *grads[3:]
