"""The backend `triton`: our Triton kernels on CUDA, which visit only the keys of the pattern, with bias and dropout.

Nothing here imports Triton before a call runs: the choice of a backend is the same on a machine without a GPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...pattern import Pattern, full, neighborhood
from ...pattern.one_query import keys_visited
from ...position import ByDistance
from ..call import NO_SEED, Call, CallFacts, Extras, Options, Outputs, Prepared, needs_grad
from ..compiled_ops import sample_seed, sparse_attention
from ..gpu_estimates import triton_dense, triton_documents
from ..plan import plan, why_masked
from .call import CallLayout, Task, contiguous, has_few_queries, one_launch, task
from .documents import Packed, for_hopper

MAX_HEAD_DIM = 256  # what the kernels hold
# A dense pair takes half a picosecond on an H200. What the CPU needs for a call, in seconds (the group `short` of
# bench/gpu_entry_point.py): forward; with backward by one launch, which is the least there is, by three of a prepared
# call, which is as much as SDPA's (gpu_rows.py, host), and with lengths, a bias or other terms.
PAIR, PAIR_GRAD, QUERY = 2.0 * 5e-13, 8.0 * 5e-13, 64 * 5e-13
# In float32, per pair and width of a head: up to 128, and of wider ones (bench/gpu_float32.py).
SINGLE, SINGLE_GRAD, SINGLE_WIDE, SINGLE_WIDE_GRAD = 1.2e-13, 6.5e-13, 2.3e-13, 15e-13
CALL, CALL_ONE_LAUNCH, CALL_GRAD, CALL_TERMS_GRAD = 20e-6, 0.0, 40e-6, 130e-6


class Triton:
    name = "triton"
    automatic = ("cuda",)

    def refuses(self, f: CallFacts) -> str | None:
        if refused := _without_positions(f).no_tiles:
            return refused
        if f.device_type != "cuda":
            return f"it runs on CUDA, not on {f.device_type}"
        if f.pattern.has_data and (f.observed or not isinstance(f.pattern, neighborhood)):
            result = for_hopper(f)
            return result if isinstance(result, str) else None
        if f.dtype == torch.float64:
            return "the Triton kernels take float32, float16 or bfloat16, not float64"
        if max(f.d_k, f.d_v) > MAX_HEAD_DIM:
            return f"heads {max(f.d_k, f.d_v)} wide do not fit the Triton kernels, which hold {MAX_HEAD_DIM}"
        if _has_few_queries(f):
            return None
        if torch.compiler.is_compiling() or f.unmasked:  # sizes may be symbols; every pair has a plan
            return None
        return why_masked(*f.place)

    def estimate(self, f: CallFacts) -> float:
        if f.unmasked:
            return triton_dense(f) + _call(f)
        if isinstance(packed := _pattern(f), Packed):
            computed = f.flat_heads * packed.pairs(f.n, f.offset[0]) / packed.rows
            return triton_documents(f, computed) + (CALL_GRAD if f.grad else CALL)
        rows = 0.0 if f.grad else f.flat_heads * f.n * QUERY
        return f.flat_heads * _computed(f) * _pair(f) + rows + _call(f)

    def prepare(self, f: CallFacts) -> Prepared:
        f = replace(f, pattern=_pattern(f))

        def build() -> Callable[..., Tensor]:
            from .host import PreparedAttention

            return PreparedAttention(_task_of(f), f.grad)

        fields = variant(f), lambda: _visited(f), lambda call: _run(call, f)
        is_direct = _is_direct(f) and not f.observed
        return Prepared(self.name, *fields, build if is_direct else None, joins_sink=not f.observed)


def _pair(f: CallFacts) -> float:
    """Seconds of a pair, with the backward pass if there is one."""
    if f.dtype == torch.float32:
        wide, width = (SINGLE_WIDE, SINGLE_WIDE_GRAD), max(f.d_k, f.d_v)
        return width * (wide if width > 128 else (SINGLE, SINGLE_GRAD))[f.grad]
    return PAIR_GRAD if f.grad else PAIR


def _call(f: CallFacts) -> float:
    """What the CPU needs for a call."""
    if not f.grad:
        return CALL
    if _backward_in_one_launch(f):
        return CALL_ONE_LAUNCH
    return CALL_GRAD if _is_direct(f) else CALL_TERMS_GRAD


def _is_direct(f: CallFacts) -> bool:
    """Whether nothing but numbers and the tensors of `Call.row_extras` is given beside q, k, v and the pattern."""
    bare = replace(f, lengths=False, left_padding=False, row_offsets=False, sink_logits=False, softcap=None)
    return (replace(bare, pattern=full()) if isinstance(f.pattern, Packed) else bare).only_pattern


def _pattern(f: CallFacts) -> Pattern:
    """The pattern; of documents, with the ids as they were read."""
    if not f.pattern.has_data or isinstance(f.pattern, neighborhood):
        return f.pattern
    result = for_hopper(f)
    return f.pattern if isinstance(result, str) else result


def _computed(f: CallFacts) -> int:
    """The pairs of one head; of documents, of one head of all batch rows whose ids may differ."""
    if isinstance(f.pattern, Packed):
        return f.pattern.pairs(f.n, f.offset[0]) * f.data_rows // f.pattern.rows
    if not _has_few_queries(f):
        return plan(*f.place).computed
    start, step = f.offset
    return f.n * keys_visited(f.pattern, start + step * (f.n - 1), f.m)


def _visited(f: CallFacts) -> int:
    """As `_computed`; for a grid whose tiles are boxes, the pairs of these boxes, which depend on the GPU."""
    boxes = isinstance(f.pattern, neighborhood) and sum(x.work.masks.pairs for x in _hopper_passes(f))
    return boxes or _computed(f)


def _without_positions(f: CallFacts) -> CallFacts:
    """The same call without per-row query positions, if the kernels support those: not under a compiler."""
    supported = f.row_offsets and _has_few_queries(f) and not f.observed
    return replace(f, row_offsets=False) if supported else f


def _has_few_queries(f: CallFacts) -> bool:
    if torch.compiler.is_compiling() or f.bias != "none" or f.dropout_p:
        return False
    return has_few_queries(f.pattern, f.n, f.m, f.heads // f.kv_heads, f.row_offsets)


def variant(f: CallFacts) -> str:
    """Which kernels run, for contiguous tensors: those for Hopper, one launch for the whole backward pass."""
    if torch.compiler.is_compiling() or isinstance(f.pattern, Packed):
        return "Hopper" if isinstance(f.pattern, Packed) else "general kernels"
    if _has_few_queries(f):
        name = "one query" if f.n == 1 else "few queries"
    else:
        name = "Hopper" if _hopper_passes(f) else "general kernels"
    return f"{name}, one-launch backward" if f.grad and _backward_in_one_launch(f) else name


def _backward_in_one_launch(f: CallFacts) -> bool:
    terms = f.lengths or f.bias != "none" or f.softcap is not None or f.dropout_p > 0 or f.row_offsets
    return not terms and one_launch(f.place, f.flat_heads, max(f.d_k, f.d_v), f.dtype)


def _hopper_passes(f: CallFacts) -> tuple[Any, ...]:
    """The passes of the Hopper forward kernel; none if another kernel runs the call."""
    if f.device_type != "cuda" or not torch.cuda.is_available() or f.bias != "none" or f.dropout_p:
        return ()
    from .launches import takes_hopper

    layouts = tuple(contiguous(*x.shape) for x in f.like())
    of_rows = f.lengths + f.left_padding
    call = CallLayout(_task_of(f), layouts, f.dtype, torch.device(f.device), of_rows)
    if not takes_hopper(call):
        return ()
    from .hopper.launches import config_of, hopper_passes  # it imports Gluon

    return hopper_passes(call, config_of(call, "hopper_forward"), False).steps


def _task_of(f: CallFacts) -> Task:
    """Of a call without bias and dropout."""
    q, _, v = f.like()
    return task(q, v, Options(f.pattern, *f.offset, f.factor, softcap=f.softcap))


def _run(call: Call, f: CallFacts) -> Outputs:
    if f.observed:
        return sparse_attention(call)
    bias = call.bias if isinstance(call.bias, ByDistance) else None
    table, slopes = (None, None) if bias is None else (bias.table, bias.slopes)
    seed = int(sample_seed()) if call.dropout_p else NO_SEED
    at = call.at if isinstance(call.at, Tensor) else None
    options = Options(f.pattern, *f.offset, f.factor, call.dropout_p, call.softcap)
    extras = Extras(table, slopes, call.lengths, seed, at, sink=call.sink_logits)
    if not (f.grad or f.bias_grad or needs_grad(call.sink_logits)):
        return forward((call.q, call.k, call.v), extras, options)
    from .host import attend

    return attend(task(call.q, call.v, options, extras), call.q, call.k, call.v, extras)


def forward(qkv: Sequence[Tensor], extras: Extras, options: Options) -> tuple[Tensor, Tensor]:
    """o and lse. qkv: q, k, v."""
    from . import host

    q, k, v = qkv
    return host.forward(q, k, v, task(q, v, options, extras), extras)


def backward(
    grads: tuple[Tensor | None, Tensor | None], saved: Any, extras: Extras, options: Options, of_bias: bool
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, table and slopes, of the last two only if `of_bias`. saved: q, k, v, o, lse."""
    from . import host

    q, _, v, *_ = saved
    return host.backward(saved, grads, task(q, v, options, extras), extras, of_bias)[:5]
