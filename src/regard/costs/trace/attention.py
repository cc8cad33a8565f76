"""Fused attention calls of a traced module: their pairs and FLOPs, the kernel that runs, what it saves and needs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ... import compat
from ...compat import without_function_modes
from ...pattern import causal
from ...pattern.causal_bias import causal_and_offset, is_causal_bias
from ..tree import Amounts, Pairs
from . import autocast

FUSED = "scaled_dot_product_attention"
SAFE_SOFTMAX = compat.aten_operator("_safe_softmax")
MAX_MASK_PAIRS = 1 << 24  # a mask_mod is evaluated up to this size
HALF = (torch.float16, torch.bfloat16)
PADDED = "flash, padded"  # the width is padded to a multiple of 8; cuDNN's kernel does not pad


class Gpu(NamedTuple):
    """What the choice of a kernel and its workspace depend on; an H100 or H200 unless stated."""

    capability: tuple[int, int] = (9, 0)
    multiprocessors: int = 132


H200, A100 = Gpu(), Gpu((8, 0), 108)
CallPairs = tuple[int, int, str]  # `needed`, `computed` and `masked_by` of a Call


class Need(NamedTuple):
    """A workspace that is no line in the batch, or differs by GPU: a formula of sizes that are lines, and the GPU."""

    formula: Callable[..., int]
    sizes: tuple[int, ...]

    def bytes(self, gpu: Gpu) -> int:
        return self.formula(*self.sizes, gpu)


class Call(NamedTuple):
    """One fused attention call: what PyTorch chooses a kernel by, and its pairs."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    dropout_p: float
    is_causal: bool
    needed: int  # pairs over all heads and batch rows that the mask allows
    computed: int  # pairs that the kernel computes
    masked_by: str
    broadcast: bool = False  # heads or batch rows of keys are broadcast, which no fused kernel does
    backend: str = "fused"  # or that of a call of this library; "flex" for FlexAttention
    no_plan: bool = False  # the call takes a kernel that builds no plan for a new shape, which cuDNN's does

    @property
    def widths(self) -> tuple[int, int]:
        """d_k and d_v."""
        return self.q.shape[-1], self.v.shape[-1]

    def forward(self) -> Amounts:
        """Two products: 2 d_k per score, 2 d_v per weighted value."""
        heads, n, both = self.q.shape[:-2].numel(), self.q.shape[-2], sum(self.widths)
        return Amounts(
            flops=2 * both * self.needed,
            elementwise_flops=6 * self.needed - 2 * heads * n,  # scale 1, softmax 5m − 2 per row
            executed_flops=2 * both * self.computed,
            bytes=self.q.element_size() * heads * both * (n + self.k.shape[-2]),
        )

    def backward(self) -> Amounts:
        """Four products, and the scores once more, which a fused kernel does not save."""
        gradients, scores = 4 * sum(self.widths), 2 * self.widths[0] * (self.backend != "reference")
        executed = (gradients + scores) * self.computed
        return Amounts(backward_flops=gradients * self.needed, executed_backward_flops=executed)


def call_pairs(q: Tensor, k: Tensor, mask: Tensor | None, real: Tensor | None, is_causal: bool) -> CallPairs:
    """`real`: the values of the mask if they are known. In a bool mask True is allowed; in a float mask −∞ is not."""
    heads, n, m = q.shape[:-2].numel(), q.shape[-2], k.shape[-2]
    full = heads * n * m
    if is_causal:  # aligned to the first key: query i may attend to keys 0 … i
        pairs = heads * causal().count(n, m, 0)
        return pairs, pairs, "causal"
    if mask is None:
        return full, full, "none"
    if real is None:
        return full, full, "a mask with unknown values: all pairs are counted"
    allowed = real if real.dtype == torch.bool else real > torch.finfo(torch.float32).min / 2
    repeats = full // max(1, allowed.numel())  # the mask is broadcast over heads and batch rows
    return int(allowed.sum()) * repeats, full, "mask"


def kernel_of(call: Call, device: str, gpu: Gpu) -> str:
    """The kernel that runs: cpu, cudnn, flash, efficient or math, as PyTorch chooses, or that of FlexAttention."""
    if call.backend == "flex":
        return "flex"
    empty = not call.q.numel() or not call.k.numel()
    if device not in ("cpu", "cuda") or call.q.dim() != 4 or empty or call.broadcast:
        return "math"
    if device == "cpu":
        refused = call.mask is not None and (call.mask.requires_grad or call.mask.dim() not in (2, 4))
        return "math" if call.dropout_p or refused or call.widths[0] != call.widths[1] else "cpu"
    if call.no_plan:
        return "flash" if call.mask is None else "efficient"
    half, (d_k, d_v), grouped = call.q.dtype in HALF, call.widths, call.q.shape[-3] != call.k.shape[-3]
    square = call.q.shape[-2] == call.k.shape[-2]
    trained = call.mask is not None and call.mask.requires_grad
    if half and gpu.capability[0] >= 9 and d_k % 8 == d_v % 8 == 0 and max(d_k, d_v) <= 256 and not trained:
        return "cudnn"
    if half and call.mask is None and d_k == d_v <= 256 and not (call.is_causal and not square):
        return "flash"
    whole, dense = 8 if half else 4, call.mask is None or call.mask.stride(-1) == 1
    known = call.q.dtype in (*HALF, torch.float32) and not grouped and d_k % whole == d_v % whole == 0
    return "efficient" if dense and known else "math"


def _up(size: int, to: int) -> int:
    return -(-size // to) * to


def heads_within(q: Tensor) -> bool:
    """Whether the heads of a position are together in memory: the outputs of cuDNN and ours are as q is."""
    return q.stride(1) < q.stride(2)


def cpu_workspace(q: Tensor, k: Tensor, v: Tensor) -> Need:
    """Bytes that the forward kernel of the CPU needs beside its outputs."""
    return Need(_cpu_tiles, (q.shape[2], k.shape[2], q.element_size(), 1, v.shape[-1] + 2))


def backward_workspace(kernel: str, q: Tensor, k: Tensor, v: Tensor) -> int | Need:
    """Bytes that the backward kernel needs beside the gradients (bench/cost_kernels_gpu.py).

    On a GPU: Σ o·do of each query, ∂q in float32; of shared key/value heads, gradients for every query head.
    """
    (b, h, n, d), (h_kv, m), d_v = q.shape, k.shape[1:3], v.shape[-1]
    if kernel == "cpu":
        return Need(_cpu_tiles, (n, m, q.element_size(), 2, 1))
    if kernel in ("flex", "efficient"):
        return 4 * b * h * (n if kernel == "flex" else _up(n, 64) * _up(d, 64) + _up(n, 32))
    expanded = 0 if h == h_kv else b * m * h * (d + d_v) * q.element_size()
    return Need(_cudnn_or_flash, (b * h, n, d, expanded, int(kernel == PADDED)))


def _cudnn_or_flash(heads: int, n: int, d: int, expanded: int, padded: int, gpu: Gpu) -> int:
    if gpu.capability[0] >= 9 and not padded:
        return 4 * heads * n * (d + 1) + expanded
    return 4 * heads * _up(n, 128) * (_up(d, 32) + 1) + expanded


def _cpu_tiles(n: int, m: int, size: int, tables: int, beside: int, _: Gpu) -> int:
    """Each thread has tables of one tile of scores, 16-bit ones also in float32, and numbers beside each row."""
    rows, wide = min(n, 256 if n >= 768 else 64 if n >= 192 else 32), max(size, 4)
    tile = min(m, 512) * (wide if size == wide else wide + size)
    return torch.get_num_threads() * rows * (tables * tile + beside * wide)


class FusedKernel(torch.autograd.Function):
    """Fused attention without arithmetic: allocates the result, what is saved, and gradients of the right sizes."""

    @staticmethod
    def forward(ctx, q, k, v, mask, trace, kernel):
        (b, h, n), d_v = q.shape[:3], v.shape[-1]
        rows = _up(n, 32) if kernel == "efficient" else n  # rows of the log-sum-exp
        lse = q.new_empty(b, h, rows, dtype=torch.promote_types(q.dtype, torch.float32))
        if kernel == "cpu":
            out = torch.empty_like(q)  # its axes are in the order of those of q
            trace.workspace(cpu_workspace(q, k, v), FUSED)
        else:
            within = kernel not in ("cudnn", "flex") or heads_within(q)
            out = q.new_empty(b, n, h, d_v).transpose(1, 2) if within else q.new_empty(b, h, n, d_v)
        ctx.save_for_backward(q, k, v, out, lse, mask)
        ctx.trace, ctx.kernel = trace, kernel
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, *held, mask = ctx.saved_tensors
        # To the end, also after a checkpoint; the CPU copies a gradient whose heads are not together in memory.
        held = [*held, grad.transpose(1, 2).contiguous()] if ctx.kernel == "cpu" else []
        grads, of_mask = [torch.empty_like(x) for x in (q, k, v)], None
        ctx.trace.workspace(backward_workspace(ctx.kernel, q, k, v), f"{FUSED} ({ctx.kernel})")
        products = 2 * 2.5 * q.shape[:3].numel() * k.shape[2] * (q.shape[-1] + v.shape[-1])
        ctx.trace.note_work("attention", products, 4 * (q.nbytes + k.nbytes + v.nbytes), str(q.dtype))
        if ctx.needs_input_grad[3]:
            *rows, m = mask.shape
            of_mask = mask.new_empty(*rows, _up(m, 8))[..., :m]
        return (*grads, of_mask, None, None)


class CountBackward(torch.autograd.Function):
    """The identity; its backward pass adds the amounts of a call that was counted as a whole."""

    @staticmethod
    def forward(ctx, out, trace, *counted):
        ctx.trace, ctx.counted = trace, counted
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad):
        ctx.trace.add(*ctx.counted)
        return grad, None, None, None, None


def count_attention(trace: Any, call: Call) -> Float[Tensor, "*h n d_v"]:
    """One attention call of PyTorch, run by the kernel that the device would take."""
    kernels = {kernel_of(call, trace.device, gpu) for gpu in (H200, A100)}
    if len(kernels) > 1 and not (kernels == {"cudnn", "flash"} and heads_within(call.q)):
        trace.by_card = True  # otherwise the two differ in their workspace only
    kernel, amounts = kernel_of(call, trace.device, trace.gpu), call.forward()
    if kernel != "math":
        trace.note_work("attention", amounts.executed_flops, amounts.bytes, str(call.q.dtype))
    return counted(trace, FUSED, call, lambda: (_run(trace, call, kernel), None))[0]


def counted(trace: Any, name: str, call: Call, run: Callable[[], Any]) -> tuple[Tensor, Tensor | None]:
    """The output and log-sum-exp of an attention call that is counted as a whole, by its pairs."""
    if not trace.counts:
        return run()
    amounts = call.forward()
    if trace.in_backward:  # computed again by a checkpoint
        trace.add(name, Amounts(executed_backward_flops=amounts.executed_flops))
    else:
        trace.add(name, amounts)
        heads, full = max(1, call.q.shape[:-2].numel()), call.q.shape[-2] * call.k.shape[-2]
        each = call.needed // heads, call.computed // heads  # of one head and batch row
        trace.pairs.append(Pairs(trace.path, call.masked_by, *each, full, call.backend))
    path = trace.path
    with trace.uncounted():
        out, lse = run()
    if torch.is_grad_enabled() and out.requires_grad:
        out = CountBackward.apply(out, trace, name, call.backward(), path)
    return out, lse


def _run(trace: Any, call: Call, kernel: str) -> Tensor:
    q, k, v, mask = call[:4]
    if kernel == "math":
        with compat.below_autocast():
            return _math(call)
    mask = _added(mask, q)
    if mask is not None and kernel == "efficient":
        if mask.shape[-1] % 16:
            mask = F.pad(mask, (0, -mask.shape[-1] % 16))[..., : mask.shape[-1]]
        mask = mask.expand(*q.shape[:-1], k.shape[-2])
    if kernel == "flash" and q.shape[-1] % 8:
        padded = (F.pad(x, (0, -x.shape[-1] % 8)) for x in (q, k, v))
        return FusedKernel.apply(*padded, None, trace, PADDED)[..., : q.shape[-1]]
    return FusedKernel.apply(q, k, v, mask, trace, kernel)


def _added(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """A mask of bools as PyTorch adds it to the scores: 0 or −∞."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)


def _math(call: Call) -> Tensor:
    """PyTorch's formula as it allocates."""
    q, k, v, mask = call[:4]
    dtype, factor = q.dtype, q.shape[-1] ** -0.25
    if dtype in HALF:
        q, k, v = q.float(), k.float(), v.float()
    first = q, k, v  # PyTorch does not release these before it returns
    q = q * factor
    if call.is_causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    mask = _added(mask, q)
    if q.dim() == 4 and q.shape[1] != k.shape[1] and not call.broadcast:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    attn = q @ (k.mT * factor)
    if mask is not None:
        attn = attn.add_(mask)
    attn = SAFE_SOFTMAX(attn, -1)
    if call.dropout_p:
        attn = F.dropout(attn, call.dropout_p)  # on a GPU one kernel: device.dropout
    returned = attn.to(dtype), (attn @ v).to(dtype)  # PyTorch returns the weights too, and drops them
    del first
    return returned[1]


def sdpa(trace, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options) -> Tensor:
    """In place of F.scaled_dot_product_attention; its scale does not change the cost."""
    if is_causal_bias(attn_mask):
        (_, at), sizes = causal_and_offset(attn_mask, query, key), (query.shape[-2], key.shape[-2])
        is_causal, attn_mask = at == 0, None  # as PyTorch, which makes a table of what is not is_causal
        if not is_causal:
            attn_mask = torch.ones(sizes, dtype=torch.bool, device=query.device).tril(at)
    real = trace.value_of(attn_mask)
    with without_function_modes():
        tensors = [trace.joined(x) for x in (query, key, value, attn_mask)]
    query, key, value, attn_mask = autocast.lowered(trace.device, tensors)
    pairs = call_pairs(query, key, attn_mask, real, is_causal)
    same = slice(1) if options.get("enable_gqa") else slice(-2)  # grouped heads are no broadcast
    broadcast = not query.shape[same] == key.shape[same] == value.shape[same]
    call = Call(query, key, value, attn_mask, dropout_p, is_causal, *pairs, broadcast)
    call = call._replace(no_plan=options.get("no_plan", False))
    return count_attention(trace, call)


def flex(trace, query, key, value, score_mod=None, block_mask=None, *_, return_lse=False, **more) -> Any:
    """In place of flex_attention: the pairs that its block mask computes, and that its mask_mod allows."""
    pairs = _block_pairs(block_mask, query.shape[:-2].numel(), query.shape[-2], key.shape[-2])
    out = count_attention(trace, Call(query, key, value, None, 0.0, False, *pairs, False, "flex"))
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)  # which PyTorch computes in any case
    beside = lse if return_lse else torch.nn.attention.flex_attention.AuxOutput(lse=lse)
    return (out, beside) if return_lse or more.get("return_aux") else out


def _block_pairs(mask: Any, heads: int, n: int, m: int) -> CallPairs:
    """Pairs in the blocks that a block mask visits, and that its mask_mod allows, if few enough to evaluate."""
    if mask is None or isinstance(mask, tuple):  # the pairs of a call of this library
        return mask or (heads * n * m, heads * n * m, "none")
    (b, h), name = mask.kv_num_blocks.shape[:2], getattr(mask.mask_mod, "__name__", "mask_mod")
    (height, width), repeats = mask.BLOCK_SIZE, heads // max(1, b * h)  # broadcast over heads and rows
    counts = mask.kv_num_blocks, mask.full_kv_num_blocks
    blocks = sum(int(count.sum()) for count in counts if count is not None)
    computed = min(blocks * height * width * repeats, heads * n * m)
    if n * m > MAX_MASK_PAIRS:
        return computed, computed, f"{name}: too many pairs to evaluate, counted by blocks"
    with torch.device(mask.kv_num_blocks.device):
        i, j, zero = torch.arange(n)[:, None], torch.arange(m)[None, :], torch.zeros((), dtype=torch.long)
        tables = [mask.mask_mod(zero + row, zero + head, i, j) for row in range(b) for head in range(h)]
    return sum(int(table.sum()) for table in tables) * repeats, computed, name
