"""The chunked cross-entropy on CUDA: the same sums, by one kernel per chunk, as one custom op for torch.compile.

Tokens whose target is IGNORED are not removed but get a loss and a gradient of 0: removing them would synchronize
with the GPU, since their number decides the shapes.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ..data.rows import IGNORED

CHUNK_LOGITS = 1 << 28


def supports(states: Tensor) -> bool:
    """Whether this file handles such states; float64 is not supported."""
    return states.is_cuda and states.dtype != torch.float64


def cross_entropy(
    rows: Float[Tensor, "tokens d"],
    table: Float[Tensor, "vocab d"],
    y: Int[Tensor, " tokens"],
    bias: Float[Tensor, " vocab"] | None,
    smoothing: float,
    chunk: int | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """As loss.cross_entropy, for a list of tokens."""
    kind = rows.device.type
    if torch.is_autocast_enabled(kind):
        rows = rows.to(torch.get_autocast_dtype(kind))
    chunk = chunk or max(1, CHUNK_LOGITS // len(table))
    enabled = torch.is_grad_enabled()
    needs = [enabled and x is not None and x.requires_grad for x in (rows, table, bias)]
    loss, plain, *_ = chunks(rows, table, bias, y, float(smoothing), chunk, needs)
    return loss, plain.detach()


@torch.library.custom_op("regard::cross_entropy", mutates_args=())
def chunks(
    rows: Tensor,
    table: Tensor,
    bias: Tensor | None,
    y: Tensor,
    smoothing: float,
    chunk: int,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The two losses, and the required gradients of the first; a gradient that is not required is an empty tensor."""
    from .cross_entropy_kernel import cross_entropy_

    with torch.autocast(rows.device.type, enabled=False):
        t = table.to(rows.dtype)
        losses = [rows.new_zeros(2, dtype=torch.float32)]
        d_rows, d_table, d_bias = _gradients(rows, table, bias, needs)
        for i in range(0, len(rows), chunk):
            part = rows[i : i + chunk]
            logits = F.linear(part, t)
            per_row = cross_entropy_(logits, y[i : i + chunk], bias, smoothing, IGNORED, any(needs))
            losses.append(torch.stack([x.sum() for x in per_row]))
            if needs[0]:
                torch.mm(logits, t, out=d_rows[i : i + chunk])
            if needs[1]:
                _add_product(d_table, logits, part, first=i == 0)
            if needs[2]:
                d_bias += logits.sum(0, dtype=torch.float32)
        loss, plain = torch.stack(losses).sum(0).unbind()
    return loss.clone(), plain.clone(), d_rows, d_table, d_bias


def _gradients(rows: Tensor, table: Tensor, bias: Tensor | None, needs: list[bool]) -> tuple[Tensor, ...]:
    """Buffers for the gradients: of the rows in their dtype, of table and bias in float32."""
    d_rows = torch.empty(rows.shape if needs[0] else (0,), dtype=rows.dtype, device=rows.device)
    shared = (
        torch.zeros(x.shape, dtype=torch.float32, device=rows.device)
        if x is not None and need
        else rows.new_empty(0, dtype=torch.float32)
        for x, need in ((table, needs[1]), (bias, needs[2]))
    )
    return d_rows, *shared


def _add_product(d_table: Tensor, d_logits: Tensor, part: Tensor, first: bool) -> None:
    """d_table ← d_table + d_logitsᵀ part, summed in float32 also from 16-bit factors."""
    if part.dtype == torch.float32:
        d_table.addmm_(d_logits.T, part)
    elif not part.is_cuda:  # under the interpreter
        d_table += d_logits.T.float() @ part.float()
    else:
        factors = d_logits.T, part, torch.float32
        torch.ops.aten.addmm.dtype_out(d_table, *factors, beta=0 if first else 1, out=d_table)


@chunks.register_fake
def _(rows, table, bias, y, smoothing, chunk, needs):
    loss, plain = (rows.new_empty((), dtype=torch.float32) for _ in range(2))
    return loss, plain, *_gradients(rows, table, bias, needs)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*output[2:])
    ctx.dtypes = [None if x is None else x.dtype for x in inputs[:3]]
    ctx.needs = inputs[6]
    ctx.set_materialize_grads(False)


def _backward(ctx, d_loss, *_):
    if d_loss is None:
        return (None,) * 7
    saved = zip(ctx.saved_tensors, ctx.dtypes, ctx.needs)
    grads = ((d.float() * d_loss).to(dtype) if need else None for d, dtype, need in saved)
    return *grads, *(None,) * 4


chunks.register_autograd(_backward, setup_context=_setup)
