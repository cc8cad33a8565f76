"""Cross-entropy computed from states in chunks of tokens, so that not all logits are in memory at once."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ...compat import not_compiled
from ..data.rows import IGNORED
from . import loss_cuda

# Logits per chunk. On a CPU they should fit the caches, and past 32 MiB the allocator returns new pages each time.
CPU_CHUNK_LOGITS, OTHER_CHUNK_LOGITS = 1 << 22, 1 << 27


def cross_entropy(
    states: Float[Tensor, "*b d"],
    table: Float[Tensor, "vocab d"],
    targets: Int[Tensor, "*b"],
    bias: Float[Tensor, " vocab"] | None = None,
    *,
    smoothing: float = 0.0,
    chunk: int | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Two sums over the tokens whose target is not IGNORED: the smoothed loss −Σ_c q_c log p_c, and −log p_y.

    p = softmax(states·tableᵀ + bias); q is 1 − smoothing at the target, plus smoothing / vocab everywhere. The
    first sum is differentiable: its gradients are computed together with it, while the logits of a chunk are in
    memory, so the backward pass only scales them. Memory: 2 · chunk · vocab; chunk=None chooses a fast size.
    """
    rows, y = states.reshape(-1, states.shape[-1]), targets.reshape(-1)
    if loss_cuda.supports(rows):
        return loss_cuda.cross_entropy(rows, table, y, bias, smoothing, chunk)
    rows, y = _counted(rows, y)
    if chunk is None:
        chunk = max(1, (CPU_CHUNK_LOGITS if rows.is_cpu else OTHER_CHUNK_LOGITS) // len(table))
    return ChunkedCrossEntropy.apply(rows, table, bias, y, smoothing, chunk, torch.is_grad_enabled())


@not_compiled
def _counted(
    rows: Float[Tensor, "n d"], y: Int[Tensor, " n"]
) -> tuple[Float[Tensor, "counted d"], Int[Tensor, " counted"]]:
    """The tokens whose target is not IGNORED. It reads values, which no compiled graph does."""
    counted = y != IGNORED
    return (rows, y) if bool(counted.all()) else (rows[counted], y[counted])


class ChunkedCrossEntropy(torch.autograd.Function):
    """loss = Σ_i lse_i − (1−ε) x_iy − ε mean_c x_ic;  ∂loss/∂x_ic = p_ic − (1−ε)[c = y] − ε / vocab."""

    @staticmethod
    def forward(ctx: Any, rows, table, bias, y, smoothing: float, chunk: int, with_gradients: bool):
        matrix = _matmul_dtype(rows)
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        r, t = rows.to(matrix), table.to(matrix)
        loss, plain = rows.new_zeros((), dtype=wide), rows.new_zeros((), dtype=wide)
        # needs_input_grad ignores no_grad, so the caller passes whether gradients are needed at all.
        needs = [with_gradients and needed for needed in ctx.needs_input_grad]
        d_rows = torch.empty_like(rows) if needs[0] else None
        d_table = torch.zeros_like(table, dtype=wide) if needs[1] else None
        d_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needs[2] else None
        # The uniform part of the smoothed target is computed from sums: Σ_c x_ic = row_i · Σ_c table_c + Σ_c bias_c.
        even = smoothing / len(table)
        table_sum = t.to(wide).sum(0) if smoothing else None
        shift = -even * table_sum.to(matrix) if table_sum is not None else t.new_zeros(t.shape[1])
        for i in range(0, len(rows), chunk):
            part, target = r[i : i + chunk], y[i : i + chunk, None]
            logits = F.linear(part, t).to(wide)
            if bias is not None:
                logits += bias
            p = logits.softmax(-1)
            # The largest p is 1 / Σ exp(x − max x), at least 1 / vocab, so its logarithm is finite.
            lse = logits.amax(-1, keepdim=True) - p.amax(-1, keepdim=True).log()
            nll = (lse - logits.gather(-1, target)).sum()
            plain += nll
            loss += (1 - smoothing) * nll
            if table_sum is not None:
                loss += smoothing * lse.sum() - even * (part.to(wide) @ table_sum).sum()
            if any(needs):
                p.scatter_add_(-1, target, p.new_full(target.shape, smoothing - 1))
                s = p.to(matrix)
                if d_rows is not None:
                    d_rows[i : i + chunk] = torch.addmm(shift, s, t)
                if d_table is not None and s.dtype == wide:
                    d_table.addmm_(s.T, part)
                elif d_table is not None:
                    d_table += s.T @ part
                if d_bias is not None:
                    d_bias += p.sum(0)
        if smoothing:
            if bias is not None:
                loss -= even * len(rows) * bias.to(wide).sum()
            if d_table is not None:
                d_table -= even * r.to(wide).sum(0)
            if d_bias is not None:
                d_bias -= even * len(rows)
        ctx.save_for_backward(
            d_rows,
            None if d_table is None else d_table.to(table.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
        )
        ctx.mark_non_differentiable(plain)
        return loss, plain

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_loss, _):
        return (
            *(None if d is None else d * d_loss.to(d.dtype) for d in ctx.saved_tensors),
            None,
            None,
            None,
            None,
        )


def _matmul_dtype(rows: Tensor) -> torch.dtype:
    kind = rows.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype
