"""The chunked cross-entropy on CUDA: the same sums, by one kernel a chunk, and one operation to a compiler.

Tokens whose target is IGNORED stay where they are, with a loss and a slope of 0: to leave them out, the CPU would
have to wait for the GPU to say how many there are.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

LOGITS = 1 << 28  # at a time


def fits(states: Tensor) -> bool:
    """Whether this way takes such states; it does not hold float64."""
    return states.is_cuda and states.dtype != torch.float64


def cross_entropy(
    rows: Float[Tensor, "tokens d"],
    table: Float[Tensor, "vocab d"],
    y: Int[Tensor, " tokens"],
    bias: Float[Tensor, " vocab"] | None,
    smoothing: float,
    ignored: int,
    chunk: int | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """As loss.cross_entropy, for a list of tokens."""
    kind = rows.device.type
    if torch.is_autocast_enabled(kind):
        rows = rows.to(torch.get_autocast_dtype(kind))
    chunk = chunk or max(1, LOGITS // len(table))
    some = torch.is_grad_enabled()
    needs = [some and x is not None and x.requires_grad for x in (rows, table, bias)]
    loss, plain, *_ = chunks(rows, table, bias, y, float(smoothing), ignored, chunk, needs)
    return loss, plain.detach()


@torch.library.custom_op("regard::cross_entropy", mutates_args=())
def chunks(
    rows: Tensor,
    table: Tensor,
    bias: Tensor | None,
    y: Tensor,
    smoothing: float,
    ignored: int,
    chunk: int,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The two losses, and the gradients that are needed of the first; an empty tensor stands for one that is not."""
    from .cross_entropy_kernel import cross_entropy_

    with torch.autocast(rows.device.type, enabled=False):
        t = table.to(rows.dtype)
        losses = [rows.new_zeros(2, dtype=torch.float32)]
        d_rows, d_table, d_bias = _gradients(rows, table, bias, needs)
        for i in range(0, len(rows), chunk):
            part = rows[i : i + chunk]
            logits = F.linear(part, t)
            per_row = cross_entropy_(logits, y[i : i + chunk], bias, smoothing, ignored, any(needs))
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
    """Room for them: of the rows in their dtype, of what all rows share in float32."""
    d_rows = torch.empty(rows.shape if needs[0] else (0,), dtype=rows.dtype, device=rows.device)
    shared = (
        torch.zeros(x.shape, dtype=torch.float32, device=rows.device)
        if x is not None and need
        else rows.new_empty(0, dtype=torch.float32)
        for x, need in ((table, needs[1]), (bias, needs[2]))
    )
    return d_rows, *shared


def _add_product(d_table: Tensor, slopes: Tensor, part: Tensor, first: bool) -> None:
    """d_table ← d_table + slopesᵀ part, summed in float32 from factors of 16 bits too."""
    if part.dtype == torch.float32:
        d_table.addmm_(slopes.T, part)
    elif not part.is_cuda:  # under the interpreter
        d_table += slopes.T.float() @ part.float()
    else:
        given = slopes.T, part, torch.float32
        torch.ops.aten.addmm.dtype_out(d_table, *given, beta=0 if first else 1, out=d_table)


@chunks.register_fake
def _(rows, table, bias, y, smoothing, ignored, chunk, needs):
    loss, plain = (rows.new_empty((), dtype=torch.float32) for _ in range(2))
    return loss, plain, *_gradients(rows, table, bias, needs)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*output[2:])
    ctx.dtypes = [None if x is None else x.dtype for x in inputs[:3]]
    ctx.needs = inputs[7]
    ctx.set_materialize_grads(False)


def _backward(ctx, d_loss, *_):
    if d_loss is None:
        return (None,) * 8
    made = zip(ctx.saved_tensors, ctx.dtypes, ctx.needs)
    grads = ((d.float() * d_loss).to(dtype) if need else None for d, dtype, need in made)
    return *grads, *(None,) * 5


chunks.register_autograd(_backward, setup_context=_setup)
