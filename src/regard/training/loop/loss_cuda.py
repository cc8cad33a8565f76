"""The chunked cross-entropy on CUDA: the same sums, by one kernel per chunk, as one custom op for torch.compile.

Tokens whose target is IGNORED are not removed but get a loss and a gradient of 0: removing them would synchronize
with the GPU, since their number decides the shapes.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ..data.rows import IGNORED
from . import chunked_loss

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
    rows, needs = chunked_loss.prepared(rows, table, bias)
    chunk = chunk or max(1, CHUNK_LOGITS // len(table))
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
        d_rows, d_table, d_bias = chunked_loss.gradients(rows, table, bias, needs)
        for i in range(0, len(rows), chunk):
            part = rows[i : i + chunk]
            logits = F.linear(part, t)
            per_row = cross_entropy_(logits, y[i : i + chunk], bias, smoothing, IGNORED, any(needs))
            losses.append(torch.stack([x.sum() for x in per_row]))
            if needs[0]:
                torch.mm(logits, t, out=d_rows[i : i + chunk])
            chunked_loss.add_shared((d_table, d_bias), logits, part, needs, first=i == 0)
        loss, plain = torch.stack(losses).sum(0).unbind()
    return loss.clone(), plain.clone(), d_rows, d_table, d_bias


chunked_loss.register(chunks)
