"""The backend `sdpa`: PyTorch's scaled_dot_product_attention, without a mask or with one.

The backward of its fused operations cannot be differentiated again. Under create_graph=True a hook on PyTorch's own
node gives the gradients of the formula instead (reference_backend.gradients), where compat.py can read that node. On
the CPU, where it cannot, and for calls that are not prepared, the operation runs inside an autograd function of ours:
in Python it takes 9 % more of a training call at n = 64, 6 % at n = 128 (8 heads of 64, one core).
"""

from functools import cache
from itertools import zip_longest
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import compat, reference
from ..pattern import causal, full
from ..position import ByDistance
from . import reference_backend
from .call import Attend, Call, CallFacts, Prepared, aligned_rows, eager, needs_grad, readable, zero_rows
from .cpu.kernels import PAIR, fused_backward, fused_forward, pair_time
from .gpu_estimates import avoids_plan, sdpa_dense, sdpa_plan
from .query_chunks import PAIRS, by_queries

# On two cores (bench/auto_choice.py), forward, and with backward: seconds per call; what a mask of lengths, of
# offsets by row or of a bias by distance adds, and per pair of such offsets; per pair of a head of that bias, and of
# all heads for its gradient or with dropout.
CALL, MASK_CALL, OFFSET_PAIR = (20e-6, 65e-6), (150e-6, 220e-6), 6e-9
GATHER, GATHER_GRAD, DROPPED = (4.5e-9, 2.6e-9), 5e-9, (4e-9, 5e-9)
# Queries from which on the fused operation has larger blocks; under causal() a query has about (n + 400) / 2 keys.
LARGE_BLOCKS, NOT_SKIPPED = 192, 400
# Seconds per number of k and v that one query of a head reads: where they are, and where lengths or a bias copy them.
READ, COPIED = 0.045e-9, 0.2e-9
# On a GPU, where a dense pair takes 0.5 ps: per masked pair, in 64 bits and in 16 (1.6 and 1.7 ps forward, 4.9 and
# 6.0 with backward, for heads of 64 and 128; bench/gpu_terms.py, lengths), so many times as long in wider heads; in
# float32 per pair and width (bench/gpu_float32.py); and what the CPU needs for the call (bench/gpu_entry_point.py).
GPU_MASKED, GPU_MASKED_16, GPU_WIDE = (1e-12, 3.5e-12), (1.5e-12, 4.8e-12), (1.3, 1.9)
GPU_SINGLE, GPU_CALL = (1.2e-13, 4.3e-13), (25e-6, 40e-6)
GPU_LENGTHS = 100e-6  # to hide keys and make their mask, a dozen operations; by estimate
GPU_GATHER, GPU_GATHER_CALL = 4e-12, 130e-6
REPEATED = 1.3  # forward and backward, where the backward pass computes each chunk again; by the times above
# How far off a weight may be by the rounding of a log-sum-exp; beyond that, gradients are the formula's.
MAX_ROUNDING = 1e-4
MAX_CACHED_MASK = {"cpu": 1 << 20, "cuda": 1 << 22}  # pairs: 4 MiB in float32, 8 MiB in bfloat16

# Kernels of PyTorch on CUDA that build no plan for a new shape: name, operator, and its arguments after q, k and v.
FLASH = (
    "FlashAttention-2",
    "_scaled_dot_product_flash_attention",
    "float dropout_p=0., bool is_causal=False, bool return_debug_mask=False",
)
EFFICIENT = (
    "the memory-efficient kernel",
    "_scaled_dot_product_efficient_attention",
    "Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0., bool is_causal=False",
)
NO_PLAN = "{}, as cuDNN would build a plan for each new shape"

_sdpa = compat.sdpa
Grads = tuple[Tensor | None, ...]


class Sdpa:
    name = "sdpa"
    automatic = ("cpu", "cuda", "other")

    def refuses(self, f: CallFacts) -> str | None:
        if f.hard:
            return "scale=inf has no softmax"
        if f.softcap is not None:
            return "it has no softcap"
        return "it gives no log-sum-exp" if f.needs_lse else None

    def estimate(self, f: CallFacts) -> float:
        """The time of a call that computes every pair, or without a mask every past one."""
        if f.device_type == "cpu":
            return _on_two_cores(f)
        call = GPU_CALL[f.grad] + (GPU_LENGTHS if f.lengths else 0.0)
        if f.unmasked:
            return sdpa_dense(f) + call
        pair = _masked_pair(f)
        if f.bias == "distance":
            pair, call = pair + GPU_GATHER, call + GPU_GATHER_CALL
        repeated = f.grad and f.n * f.m > PAIRS and f.bias != "tensor" and not f.table
        return f.pairs * pair * (REPEATED if repeated else 1.0) + sdpa_plan(f) + call

    def prepare(self, f: CallFacts) -> Prepared:
        no_plan = not compat.sizes_are_symbols() and avoids_plan(f)  # a graph leaves the choice to PyTorch
        if f.unmasked:
            square = f.n == f.m and isinstance(f.pattern, causal)  # there the future is skipped
            count = (lambda: f.pattern.count(f.n)) if square else (lambda: f.n * f.m)
            is_causal = True if isinstance(f.pattern, causal) and f.n > 1 else False  # noqa: SIM210 — no symbol
            build = (lambda: _direct_function(f, None, is_causal)) if _is_direct(f) else None
            run = lambda call: (_attend(call, None, is_causal, no_plan), None)  # noqa: E731
            return Prepared(
                self.name, "dense", count, run, build, NO_PLAN.format(FLASH[0]) if no_plan else ""
            )
        direct = _is_direct(f) and not isinstance(f.pattern, full)  # else the sizes may be symbols
        cached = direct and f.n * f.m <= MAX_CACHED_MASK[f.device_type]
        build = (lambda: _direct_masked_function(f)) if cached else None
        attend = lambda call: _masked(call, no_plan)  # noqa: E731
        chunked = lambda call: by_queries(call, attend, reference_backend.formula, _holds_scores(f))  # noqa: E731
        note = NO_PLAN.format(EFFICIENT[0]) if no_plan else ""
        return Prepared(self.name, "masked", lambda: f.n * f.m * f.data_rows, chunked, build, note)


def _on_two_cores(f: CallFacts) -> float:
    makes_mask = f.lengths or f.row_offsets or f.bias == "distance"
    call = CALL[f.grad] + (MASK_CALL[f.grad] if makes_mask else 0.0)
    call += f.batch * f.n * f.m * OFFSET_PAIR if f.row_offsets else 0.0
    if f.n == 1:  # the time that it takes to read k and v
        numbers = f.flat_heads * f.m * (f.d_k + f.d_v) * f.dtype.itemsize / 4
        return numbers * (COPIED if makes_mask else READ) * (3 if f.grad else 1) + call / 2
    if f.bias == "distance":
        call += f.heads * f.n * f.m * GATHER[f.grad] + (f.pairs * GATHER_GRAD if f.bias_grad else 0.0)
    keys = min(f.m, (f.m + NOT_SKIPPED) / 2) if f.unmasked and isinstance(f.pattern, causal) else f.m
    pairs = f.flat_heads * f.n * keys * (1.15 if f.n < LARGE_BLOCKS else 1.0)
    tables = (1 if f.pairs <= 1 << 20 else 2) - f.bias_grad  # of the formula, in the caches or not
    dropped = tables * DROPPED[f.grad] if f.dropout_p else 0.0
    return pairs * (PAIR[f.grad] * pair_time(f.d_k, f.d_v, f.dtype) + dropped) + call


def _holds_scores(f: CallFacts) -> bool:
    """Whether PyTorch computes a masked call by its formula, which stores the scores of every head."""
    if f.device_type != "cuda":
        return f.bias_grad
    grouped = f.kv_heads != f.heads and not _repeats("cuda", f.dtype, f.grad)
    return f.bias_grad or f.dtype == torch.float64 or (f.dtype == torch.float32 and grouped)


def _masked_pair(f: CallFacts) -> float:
    """Seconds of a pair on a GPU, with the backward pass if there is one."""
    if f.dtype == torch.float32:
        return GPU_SINGLE[f.grad] * f.d_k
    pair = (GPU_MASKED_16 if f.dtype.itemsize == 2 else GPU_MASKED)[f.grad]
    return pair * (1.0 if f.d_k <= 128 else GPU_WIDE[f.grad])


def _is_direct(f: CallFacts) -> bool:
    return f.only_pattern and not f.observed and f.device_type in MAX_CACHED_MASK


def _direct_function(f: CallFacts, mask: Tensor | None, is_causal: bool) -> Attend:
    """With a mask that is added."""
    scale, on_cpu, groups = f.factor, f.device_type == "cpu", f.heads != f.kv_heads
    if f.grad and on_cpu and f.pairs and (f.d_k != f.d_v or not compat.can_read_flash_node()):
        return lambda q, k, v: _Fused.apply(q, k, v, mask, is_causal, scale)
    if avoids_plan(f):
        return lambda q, k, v: _without_plan(q, k, v, mask, is_causal, scale)
    repeats = groups and _repeats(f.device_type, f.dtype, mask is not None and f.grad)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if repeats:
            k, v = (reference.repeat_heads(x, f.heads) for x in (k, v))
        return _sdpa(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=groups and not repeats)

    return (lambda q, k, v: _differentiable(attend(q, k, v))) if f.grad else attend


def _without_plan(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """In 16 bits without gradients, not by cuDNN: by FlashAttention-2, or the memory-efficient kernel for a mask."""
    kernel = _kernel(FLASH if mask is None else EFFICIENT)
    flags = torch.backends.cuda
    allowed = flags.flash_sdp_enabled() if mask is None else flags.mem_efficient_sdp_enabled()
    if kernel is None or not allowed:  # as by torch.nn.attention.sdpa_kernel
        return _sdpa(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    q, k, v = map(aligned_rows, (q, k, v))
    if mask is None:
        return kernel(q, k, v, 0.0, is_causal, False, scale=scale)[0]
    if q.shape[1] != k.shape[1]:
        k, v = (reference.repeat_heads(x, q.shape[1]) for x in (k, v))
    mask = _with_aligned_rows(_added(mask, q)).expand(*q.shape[:-1], k.shape[2])
    return kernel(q, k, v, mask, False, 0.0, is_causal, scale=scale)[0]


@cache
def _kernel(kernel: tuple[str, str, str]) -> Any:
    """The operator; None where it is missing, takes other arguments or is not part of this PyTorch."""
    _, name, arguments = kernel
    schema = f"aten::{name}(Tensor query, Tensor key, Tensor value, {arguments}, *, float? scale=None)"
    known = compat.flash_schema(name).startswith(schema)
    built = kernel is not FLASH or torch.backends.cuda.is_flash_attention_available()
    return compat.aten_operator(name).default if known and built else None


def _added(mask: Tensor, q: Tensor) -> Tensor:
    """The mask as it is added to scores."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -inf)


def _with_aligned_rows(mask: Tensor) -> Tensor:
    """The mask, or a copy whose rows begin at multiples of 32 bytes and can be read up to the next one."""
    m, (*strides, last) = mask.shape[-1], mask.stride()
    width = m + -m % 16
    end = mask.storage_offset() + sum(s * (size - 1) for s, size in zip(strides, mask.shape)) + width
    readable = end * mask.itemsize <= mask.untyped_storage().nbytes()
    if readable and last == 1 and not mask.data_ptr() & 31 and not any(s % 16 for s in strides):
        return mask
    return F.pad(mask, (0, width - m)).contiguous()[..., :m]


def _repeats(device_type: str, dtype: torch.dtype, trains_with_mask: bool) -> bool:
    """Whether key heads are copied for the query heads of their group: on CUDA, of SDPA's fused kernels only those
    for 16 bits take groups, and its formula would store n × m scores. Beside a mask, which is as large, the formula
    has the more exact gradients."""
    return device_type == "cuda" and dtype == torch.float32 and not trains_with_mask


def _differentiable(o: Tensor) -> Tensor:
    """o of a fused operation, whose gradients can be differentiated again."""
    if o.grad_fn is not None and o.grad_fn.name().startswith(compat.FUSED_NODE):
        o.grad_fn.register_hook(_double_backward)
    return o


def _direct_masked_function(f: CallFacts) -> Attend:
    """The same with the mask of a pattern, created once: to make it at every call would take a tenth of the time."""
    device = torch.device(f.device)
    allowed = f.pattern.allowed(f.n, f.m, f.offset, device)
    empty = ~allowed.any(-1, keepdim=True)
    padding = -f.m % 16  # rows that begin at a multiple of 32 bytes: the CUDA kernels would copy others
    mask = torch.zeros(1, 1, f.n, f.m + padding, dtype=f.dtype, device=device)
    mask = mask[..., : f.m].masked_fill_(~(allowed | empty), -inf)
    return zero_rows(_direct_function(f, mask, False), empty)


def _masked(call: Call, no_plan: bool = False) -> tuple[Float[Tensor, "b h n d_v"], None]:
    """softmax(scale · q kᵀ + bias) v over the allowed pairs."""
    call = call.hide()
    rounds = isinstance(call.bias, ByDistance) and call.q.dtype.itemsize == 2  # which hold no large distance
    rounds = rounds and (compat.sizes_are_symbols() or call.m > 0)
    allowed, bias = call.allowed(), call.dense_bias(torch.float32 if rounds else None)
    mask, empty = allowed, None
    # What SDPA gives for a row of −∞ differs by kernel: let such a row attend to all keys, then clear it.
    if bias is not None:
        mask = bias if allowed is None else bias.masked_fill(~allowed, -inf)
        empty = (mask == -inf).all(-1, keepdim=True)  # a bias may forbid by itself, as an additive mask
        mask = mask.masked_fill(empty, 0.0)
        if rounds:  # the weights depend on differences alone: exact where they are large
            mask = (mask - mask.amax(-1, keepdim=True)).to(call.q.dtype)
    elif allowed is not None and call.may_be_empty():
        empty = ~allowed.any(-1, keepdim=True)
        mask = allowed | empty
    if empty is not None and readable(empty) and not bool(empty.any()):
        empty = None
    if mask is not None and mask.dim() < 2:
        mask = mask.expand(1, call.m)  # SDPA reads the last two axes
    o = _attend(call, mask, False, no_plan)
    return o if empty is None else o.masked_fill(empty, 0.0), None


def _attend(
    call: Call, mask: Tensor | None, is_causal: bool, no_plan: bool = False
) -> Float[Tensor, "b h n d_v"]:
    """A mask is added, or bool with True = may attend. No row may be empty. no_plan: of cuDNN, if nothing has to see
    PyTorch's operation."""
    q, k, v = call.q, call.k, call.v
    if no_plan and eager(q, k, v):
        return _without_plan(q, k, v, mask, is_causal, call.factor)
    formula = call.dropout_p > 0 or (mask is not None and mask.requires_grad)  # PyTorch takes the formula
    fused = q.is_cpu and needs_grad(q, k, v) and not formula
    if not (fused and eager(q, k, v) and q.numel() and k.numel()):  # data may decide a size in an export
        options: dict[str, Any] = {"is_causal": is_causal, "scale": call.factor, "enable_gqa": call.grouped}
        if call.grouped and _repeats(q.device.type, q.dtype, mask is not None and needs_grad(q, k, v)):
            k, v = (reference.repeat_heads(x, q.shape[1]) for x in (k, v))
            options["enable_gqa"] = False
        if (fused and isinstance(call.bias, Tensor)) or compat.needs_formula(mask):  # see _Fused.backward
            with sdpa_kernel(SDPBackend.MATH):
                return _sdpa(q, k, v, mask, call.dropout_p, **options)
        o = _sdpa(q, k, v, mask, call.dropout_p, **options)
        return _differentiable(o) if q.is_cuda and not call.dropout_p and eager(q, k, v) else o
    if mask is not None:
        mask = _added(mask, q)
        mask = mask.reshape(*(1,) * (4 - mask.dim()), *mask.shape).expand(-1, -1, call.n, call.m)
    return _Fused.apply(q, k, v, mask, is_causal, call.factor, isinstance(call.bias, Tensor))


def _double_backward(grads: Grads, output_grads: Grads) -> Grads | None:
    """A hook after PyTorch's own backward: its gradients as they are, or under create_graph=True by the formula."""
    grad = output_grads[0]
    if grad is None or not torch.is_grad_enabled() or (saved := compat.saved_by_fused_node()) is None:
        return None
    results = reference_backend.gradients((grad, None), _as_call(*saved))
    return tuple(None if old is None else new for old, new in zip_longest(grads, results[: len(grads)]))


def _as_call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Call:
    return Call(q, k, v, causal() if is_causal else full(), bias=mask, scale=scale, at=0)


class _Fused(torch.autograd.Function):
    """The fused CPU operation; its gradients can be differentiated again."""

    @staticmethod
    def forward(ctx, q, k, v, mask, is_causal, scale, biased=False):
        o, lse = fused_forward(q, k, v, scale, mask, is_causal)
        ctx.save_for_backward(q, k, v, mask, o, lse)
        ctx.options = is_causal, scale, biased
        return o

    @staticmethod
    def backward(ctx, grad):
        q, k, v, mask, o, lse = ctx.saved_tensors
        is_causal, scale, biased = ctx.options
        create_graph = torch.is_grad_enabled()  # these gradients will be differentiated again
        # Beside a bias of −1e9 in all of a row, ln Σ exp loses the logarithm of their number: exp(score − lse) is
        # then 1 for each of m keys, not the weight 1/m.
        rounds = biased and lse.abs().amax() * torch.finfo(lse.dtype).eps > MAX_ROUNDING
        batched = compat.is_batched(grad)  # PyTorch has no rule for a batch in the fused operation
        if not (create_graph or rounds or batched):
            return *fused_backward(grad, (q, k, v, o, lse), scale, mask, is_causal), None, None, None, None
        with torch.enable_grad():
            call, graph = _as_call(q, k, v, mask, is_causal, scale), create_graph or not batched
            grads = reference_backend.gradients((grad, None), call, create_graph=graph)[:3]
        with_graph = create_graph or batched  # a batch cannot be detached, and has no graph here
        return *(g if g is None or with_graph else g.detach() for g in grads), None, None, None, None
