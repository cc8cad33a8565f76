"""The consistency loss on CUDA: losses of a chunk of pairs of logits, and their gradient in place of the logits."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from .cross_entropy_kernel import BLOCK, WARPS, _logits, _store


@triton.jit
def consistency_kernel(
    P, Q, Y, BIAS, LOSS, NLL, stride, vocab, ignored, smoothing, weight, HAS_BIAS: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """One token: the logits of both passes, its two losses, and the gradient of the first in place of the logits."""
    r = tl.program_id(0)
    P += r.to(tl.int64) * stride
    Q += r.to(tl.int64) * stride
    y = tl.load(Y + r)
    c = tl.arange(0, B)
    if y == ignored:
        tl.store(LOSS + r, 0.0)
        tl.store(NLL + r, 0.0)
        for a in range(0, vocab, B):
            _store(P, a + c, vocab, tl.zeros((B,), tl.float32))
            _store(Q, a + c, vocab, tl.zeros((B,), tl.float32))
    else:
        top_p = -float("inf")
        top_q = -float("inf")
        total_p = 0.0
        total_q = 0.0
        logits_sum = 0.0
        for a in range(0, vocab, B):
            p = _logits(P, BIAS, a + c, vocab, HAS_BIAS)
            q = _logits(Q, BIAS, a + c, vocab, HAS_BIAS)
            higher_p = tl.maximum(top_p, tl.max(p, 0))
            higher_q = tl.maximum(top_q, tl.max(q, 0))
            total_p = total_p * tl.exp(top_p - higher_p) + tl.sum(tl.exp(p - higher_p), 0)
            total_q = total_q * tl.exp(top_q - higher_q) + tl.sum(tl.exp(q - higher_q), 0)
            top_p = higher_p
            top_q = higher_q
            logits_sum += tl.sum(tl.where(a + c < vocab, p + q, 0.0), 0)
        lse_p = top_p + tl.log(total_p)
        lse_q = top_q + tl.log(total_q)
        kl_p = 0.0
        kl_q = 0.0
        for a in range(0, vocab, B):
            log_p = _logits(P, BIAS, a + c, vocab, HAS_BIAS) - lse_p
            log_q = _logits(Q, BIAS, a + c, vocab, HAS_BIAS) - lse_q
            between = tl.where(a + c < vocab, log_p - log_q, 0.0)
            kl_p += tl.sum(tl.exp(log_p) * between, 0)
            kl_q -= tl.sum(tl.exp(log_q) * between, 0)
        at_p = tl.load(P + y).to(tl.float32)
        at_q = tl.load(Q + y).to(tl.float32)
        if HAS_BIAS:
            at_bias = tl.load(BIAS + y).to(tl.float32)
            at_p += at_bias
            at_q += at_bias
        nll = 0.5 * (lse_p - at_p + lse_q - at_q)
        uniform = 0.5 * (lse_p + lse_q - logits_sum / vocab)
        tl.store(NLL + r, nll)
        tl.store(LOSS + r, (1.0 - smoothing) * nll + smoothing * uniform + 0.5 * weight * (kl_p + kl_q))
        for a in range(0, vocab, B):
            log_p = _logits(P, BIAS, a + c, vocab, HAS_BIAS) - lse_p
            log_q = _logits(Q, BIAS, a + c, vocab, HAS_BIAS) - lse_q
            p = tl.exp(log_p)
            q = tl.exp(log_q)
            between = tl.where(a + c < vocab, log_p - log_q, 0.0)
            even = smoothing / vocab + tl.where(a + c == y, 1.0 - smoothing, 0.0)
            _store(P, a + c, vocab, 0.5 * (p - even + weight * (p * (between - kl_p) + p - q)))
            _store(Q, a + c, vocab, 0.5 * (q - even + weight * (q * (-between - kl_q) + q - p)))


def consistency_(
    logits: Float[Tensor, "two_rows vocab"],
    y: Int[Tensor, " rows"],
    bias: Float[Tensor, " vocab"] | None,
    smoothing: float,
    weight: float,
    ignored: int,
) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """The loss and the mean −log p_y of each token, 0 where y is ignored; a gradient replaces the logits."""
    vocab, rows = logits.shape[1], len(y)
    loss, nll = torch.empty(2, rows, device=logits.device, dtype=torch.float32)
    if rows:
        block = min(BLOCK, triton.next_power_of_2(vocab))
        consistency_kernel[(rows,)](
            logits, logits[rows:], y, bias, loss, nll, logits.stride(0), vocab, ignored, smoothing, weight,
            HAS_BIAS=bias is not None, B=block, num_warps=WARPS if block == BLOCK else 4,
        )  # fmt: skip
    return loss, nll
