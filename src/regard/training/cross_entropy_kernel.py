"""Cross-entropy's loss and slope from a chunk of logits, in place: read once from memory, written once."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

BLOCK, WARPS = 4096, 8  # logits of a row at a time, and who reads them


@triton.jit
def _logits(X, BIAS, c, vocab, HAS_BIAS: tl.constexpr):
    x = tl.load(X + c, mask=c < vocab, other=-float("inf")).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(BIAS + c, mask=c < vocab, other=0.0).to(tl.float32)
    return x


@triton.jit
def _fill(X, c, vocab, value):
    tl.store(X + c, value.to(X.dtype.element_ty), mask=c < vocab)


@triton.jit
def slopes_kernel(
    X, Y, BIAS, LOSS, PLAIN, stride, vocab, ignored, smoothing,
    HAS_BIAS: tl.constexpr, SMOOTH: tl.constexpr, SLOPES: tl.constexpr, WHOLE: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    """One row: its two losses and, if SLOPES, p − (1−ε)[c = y] − ε / vocab in place of its logits."""
    r = tl.program_id(0)
    X += r.to(tl.int64) * stride
    y = tl.load(Y + r)
    c = tl.arange(0, B)
    if y == ignored:
        tl.store(LOSS + r, 0.0)
        tl.store(PLAIN + r, 0.0)
        if SLOPES:
            for a in range(0, vocab, B):
                _fill(X, a + c, vocab, tl.zeros((B,), tl.float32))
    else:
        top = -float("inf")
        total = 0.0
        added = 0.0
        x = tl.zeros((B,), tl.float32)
        for a in range(0, vocab, B):
            x = _logits(X, BIAS, a + c, vocab, HAS_BIAS)
            higher = tl.maximum(top, tl.max(x, 0))
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
            top = higher
            if SMOOTH:
                added += tl.sum(tl.where(a + c < vocab, x, 0.0), 0)
        lse = top + tl.log(total)
        at_target = tl.load(X + y).to(tl.float32)
        if HAS_BIAS:
            at_target += tl.load(BIAS + y).to(tl.float32)
        plain = lse - at_target
        loss = plain
        if SMOOTH:
            loss = (1.0 - smoothing) * plain + smoothing * (lse - added / vocab)
        tl.store(LOSS + r, loss)
        tl.store(PLAIN + r, plain)
        if SLOPES:
            for a in range(0, vocab, B):
                if not WHOLE:  # else it is here still
                    x = _logits(X, BIAS, a + c, vocab, HAS_BIAS)
                slope = tl.exp(x - lse)
                if SMOOTH:
                    slope -= smoothing / vocab
                slope = tl.where(a + c == y, slope - (1.0 - smoothing), slope)
                _fill(X, a + c, vocab, slope)


def slopes_(
    logits: Float[Tensor, "rows vocab"],
    y: Int[Tensor, " rows"],
    bias: Float[Tensor, " vocab"] | None,
    smoothing: float,
    ignored: int,
    wanted: bool,
) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """The smoothed loss and −log p_y of each row, 0 where it is ignored; the slopes stand in `logits` if wanted."""
    rows, vocab = logits.shape
    loss, plain = torch.empty(2, rows, device=logits.device, dtype=torch.float32)
    if rows:
        block = min(BLOCK, triton.next_power_of_2(vocab))
        warps = WARPS if block == BLOCK else 4
        slopes_kernel[(rows,)](
            logits, y, bias, loss, plain, logits.stride(0), vocab, ignored, smoothing,
            HAS_BIAS=bias is not None, SMOOTH=smoothing > 0, SLOPES=wanted, WHOLE=block >= vocab,
            B=block, num_warps=warps, enable_fp_fusion=True,
        )  # fmt: skip
    return loss, plain
