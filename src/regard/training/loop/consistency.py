"""Cross-entropy of two passes with different dropout masks, plus their divergence (R-Drop, Liang et al., 2021).

loss = ½ (CE(p) + CE(q)) + weight · ½ (KL(p ‖ q) + KL(q ‖ p)), with p and q the distributions of the two passes. The
second term makes predictions consistent under dropout, which keeps a model that reads a small corpus many times from
overfitting.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ..data.rows import IGNORED
from . import chunked_loss
from .loss_cuda import CHUNK_LOGITS


def consistent_cross_entropy(
    states: Float[Tensor, "two_b n d"],
    table: Float[Tensor, "vocab d"],
    targets: Int[Tensor, "b n"],
    bias: Float[Tensor, " vocab"] | None = None,
    *,
    weight: float,
    smoothing: float = 0.0,
    chunk: int | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Two sums over the tokens whose target is not IGNORED: the loss above, and the mean −log p_y of both passes.

    states: those of the first pass, then those of the second.
    """
    rows, y = states.reshape(-1, states.shape[-1]), targets.reshape(-1)
    rows, needs = chunked_loss.prepared(rows, table, bias)
    chunk = chunk or max(1, CHUNK_LOGITS // 2 // len(table))
    loss, plain, *_ = pairs(rows, table, bias, y, float(smoothing), float(weight), chunk, needs)
    return loss, plain.detach()


@torch.library.custom_op("regard::consistent_cross_entropy", mutates_args=())
def pairs(
    rows: Tensor,
    table: Tensor,
    bias: Tensor | None,
    y: Tensor,
    smoothing: float,
    weight: float,
    chunk: int,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The two losses, and the required gradients of the first; a gradient that is not required is an empty tensor."""
    with torch.autocast(rows.device.type, enabled=False):
        t, half = table.to(rows.dtype), len(y)
        losses = [rows.new_zeros(2, dtype=torch.float32)]
        d_rows, d_table, d_bias = chunked_loss.gradients(rows, table, bias, needs)
        for i in range(0, half, chunk):
            target = y[i : i + chunk]
            part = torch.cat([rows[i : i + len(target)], rows[half + i : half + i + len(target)]])
            logits = F.linear(part, t)
            losses.append(torch.stack(_losses_and_gradient(logits, target, bias, smoothing, weight)))
            if needs[0]:
                d_part = logits @ t
                d_rows[i : i + len(target)], d_rows[half + i : half + i + len(target)] = d_part.chunk(2)
            chunked_loss.add_shared((d_table, d_bias), logits, part, needs, first=i == 0)
        loss, plain = torch.stack(losses).sum(0).unbind()
    return loss.clone(), plain.clone(), d_rows, d_table, d_bias


def _losses_and_gradient(
    logits: Tensor, y: Tensor, bias: Tensor | None, smoothing: float, weight: float
) -> list[Tensor]:
    """The two sums; the gradient of the first replaces the logits."""
    if logits.is_cuda:
        from .consistency_kernel import consistency_

        return [x.sum() for x in consistency_(logits, y, bias, smoothing, weight, IGNORED)]
    counted = y != IGNORED
    target = y.masked_fill(~counted, 0)[None, :, None].expand(2, -1, 1)
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    x = logits.to(wide).unflatten(0, (2, -1))
    log_p = (x if bias is None else x + bias).log_softmax(-1)
    p = log_p.exp()
    between = log_p - log_p.flip(0)  # log p − log q, and log q − log p
    divergence = (p * between).sum(-1, keepdim=True)  # KL(p ‖ q), and KL(q ‖ p)
    nll = -log_p.gather(-1, target)
    smoothed = (1 - smoothing) * nll - smoothing * log_p.mean(-1, keepdim=True)
    losses = [(smoothed + weight * divergence).mean(0), nll.mean(0)]
    gradient = p - smoothing / x.shape[-1]
    gradient.scatter_add_(-1, target, gradient.new_full(target.shape, smoothing - 1))
    gradient += weight * (p * (between - divergence) + p - p.flip(0))
    logits.copy_((0.5 * gradient.masked_fill(~counted[:, None], 0.0)).flatten(0, 1))
    return [loss[counted].sum() for loss in losses]


chunked_loss.register(pairs)
