"""Cross-entropy on CUDA: the losses of a chunk of logits, and their gradient written over the logits in place."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

BLOCK, WARPS = 4096, 8  # logits of a row per step, and the warps that read them
LOG2E = tl.constexpr(1.4426950408889634)  # exp is computed as a power of two


@triton.jit
def _logits(X, BIAS, c, vocab, HAS_BIAS: tl.constexpr):
    x = tl.load(X + c, mask=c < vocab, other=-float("inf")).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(BIAS + c, mask=c < vocab, other=0.0).to(tl.float32)
    return x


@triton.jit
def _whole_block(X, BIAS, c, HAS_BIAS: tl.constexpr):
    x = tl.load(X + c).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(BIAS + c).to(tl.float32)
    return x


@triton.jit
def _store(X, c, vocab, value):
    tl.store(X + c, value.to(X.dtype.element_ty), mask=c < vocab)


@triton.jit
def cross_entropy_kernel(
    X, Y, BIAS, LOSS, NLL, stride, vocab, ignored, smoothing,
    HAS_BIAS: tl.constexpr, SMOOTH: tl.constexpr, GRADIENT: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """One row: its two losses and, if GRADIENT, p − (1−ε)[c = y] − ε / vocab in place of its logits.

    The sums are kept for each column of a block and added up at the end, since a sum over a block makes its warps
    wait for each other. Only the last block, which may be partial, is masked.
    """
    r = tl.program_id(0)
    X += r.to(tl.int64) * stride
    y = tl.load(Y + r)
    c = tl.arange(0, B)
    last = (vocab - 1) // B * B
    if y == ignored:
        tl.store(LOSS + r, 0.0)
        tl.store(NLL + r, 0.0)
        if GRADIENT:
            for a in range(0, vocab, B):
                _store(X, a + c, vocab, tl.zeros((B,), tl.float32))
    else:
        x = _logits(X, BIAS, last + c, vocab, HAS_BIAS)
        top = tl.max(x, 0)
        totals = tl.exp2((x - top) * LOG2E)
        sums = tl.where(last + c < vocab, x, 0.0)
        for a in range(0, last, B):
            x = _whole_block(X, BIAS, a + c, HAS_BIAS)
            higher = tl.maximum(top, tl.max(x, 0))
            totals = totals * tl.exp2((top - higher) * LOG2E) + tl.exp2((x - higher) * LOG2E)
            top = higher
            if SMOOTH:
                sums += x
        lse = top + tl.log(tl.sum(totals, 0))
        at_target = tl.load(X + y).to(tl.float32)
        if HAS_BIAS:
            at_target += tl.load(BIAS + y).to(tl.float32)
        nll = lse - at_target
        loss = nll
        even = 0.0
        if SMOOTH:
            loss = (1.0 - smoothing) * nll + smoothing * (lse - tl.sum(sums, 0) / vocab)
            even = smoothing / vocab
        tl.store(LOSS + r, loss)
        tl.store(NLL + r, nll)
        if GRADIENT:
            for a in range(0, last, B):
                x = _whole_block(X, BIAS, a + c, HAS_BIAS)
                gradient = tl.exp2((x - lse) * LOG2E) - even
                if (y >= a) & (y < a + B):
                    gradient = tl.where(a + c == y, gradient - (1.0 - smoothing), gradient)
                tl.store(X + a + c, gradient.to(X.dtype.element_ty))
            x = _logits(X, BIAS, last + c, vocab, HAS_BIAS)
            gradient = tl.exp2((x - lse) * LOG2E) - even
            gradient = tl.where(last + c == y, gradient - (1.0 - smoothing), gradient)
            _store(X, last + c, vocab, gradient)


def cross_entropy_(
    logits: Float[Tensor, "rows vocab"],
    y: Int[Tensor, " rows"],
    bias: Float[Tensor, " vocab"] | None,
    smoothing: float,
    ignored: int,
    gradient: bool,
) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """The smoothed loss and −log p_y of each row, 0 where y is ignored.

    If `gradient`, the gradient of the first with respect to the logits replaces the logits.
    """
    rows, vocab = logits.shape
    loss, nll = torch.empty(2, rows, device=logits.device, dtype=torch.float32)
    if rows:
        block = min(BLOCK, triton.next_power_of_2(vocab))
        warps = WARPS if block == BLOCK else 4
        cross_entropy_kernel[(rows,)](
            logits, y, bias, loss, nll, logits.stride(0), vocab, ignored, smoothing,
            HAS_BIAS=bias is not None, SMOOTH=smoothing > 0, GRADIENT=gradient, B=block, num_warps=warps,
            enable_fp_fusion=True,
        )  # fmt: skip
    return loss, nll
