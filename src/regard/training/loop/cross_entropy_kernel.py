"""Cross-entropy on CUDA: the losses of a chunk of logits, and their gradient written over the logits in place."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

BLOCK, WARPS = 4096, 8  # logits of a row per step, and the warps that read them


@triton.jit
def _logits(X, BIAS, c, vocab, HAS_BIAS: tl.constexpr):
    x = tl.load(X + c, mask=c < vocab, other=-float("inf")).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(BIAS + c, mask=c < vocab, other=0.0).to(tl.float32)
    return x


@triton.jit
def _store(X, c, vocab, value):
    tl.store(X + c, value.to(X.dtype.element_ty), mask=c < vocab)


@triton.jit
def cross_entropy_kernel(
    X, Y, BIAS, LOSS, NLL, stride, vocab, ignored, smoothing,
    HAS_BIAS: tl.constexpr, SMOOTH: tl.constexpr, GRADIENT: tl.constexpr, ONE_BLOCK: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    """One row: its two losses and, if GRADIENT, p − (1−ε)[c = y] − ε / vocab in place of its logits."""
    r = tl.program_id(0)
    X += r.to(tl.int64) * stride
    y = tl.load(Y + r)
    c = tl.arange(0, B)
    if y == ignored:
        tl.store(LOSS + r, 0.0)
        tl.store(NLL + r, 0.0)
        if GRADIENT:
            for a in range(0, vocab, B):
                _store(X, a + c, vocab, tl.zeros((B,), tl.float32))
    else:
        top = -float("inf")
        total = 0.0
        logits_sum = 0.0
        x = tl.zeros((B,), tl.float32)
        for a in range(0, vocab, B):
            x = _logits(X, BIAS, a + c, vocab, HAS_BIAS)
            higher = tl.maximum(top, tl.max(x, 0))
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
            top = higher
            if SMOOTH:
                logits_sum += tl.sum(tl.where(a + c < vocab, x, 0.0), 0)
        lse = top + tl.log(total)
        at_target = tl.load(X + y).to(tl.float32)
        if HAS_BIAS:
            at_target += tl.load(BIAS + y).to(tl.float32)
        nll = lse - at_target
        loss = nll
        if SMOOTH:
            loss = (1.0 - smoothing) * nll + smoothing * (lse - logits_sum / vocab)
        tl.store(LOSS + r, loss)
        tl.store(NLL + r, nll)
        if GRADIENT:
            for a in range(0, vocab, B):
                if not ONE_BLOCK:  # with one block, x still holds the row
                    x = _logits(X, BIAS, a + c, vocab, HAS_BIAS)
                gradient = tl.exp(x - lse)
                if SMOOTH:
                    gradient -= smoothing / vocab
                gradient = tl.where(a + c == y, gradient - (1.0 - smoothing), gradient)
                _store(X, a + c, vocab, gradient)


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
            HAS_BIAS=bias is not None, SMOOTH=smoothing > 0, GRADIENT=gradient, ONE_BLOCK=block >= vocab,
            B=block, num_warps=warps, enable_fp_fusion=True,
        )  # fmt: skip
    return loss, nll
