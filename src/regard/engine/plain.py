"""The formula itself, some queries at a time: for hard attention, and a log-sum-exp that nothing else gives."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from .. import reference
from .call import Call

ROWS = 1 << 22  # scores of one head held at a time


def attend(call: Call) -> tuple[Float[Tensor, "b h n d_v"], Float[Tensor, "b h n"]]:
    """softmax(scale · q kᵀ + bias) v and ln Σ exp, by operations that PyTorch can differentiate any number of times.

    16-bit inputs are computed in float32, as the log-sum-exp is of that dtype on every way.
    """
    kind = call.q.device.type  # meta has no autocast to switch off
    with nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False):
        return _plainly(call, torch.promote_types(call.q.dtype, torch.float32))


def _plainly(call: Call, wide: torch.dtype) -> tuple[Float[Tensor, "b h n d_v"], Float[Tensor, "b h n"]]:
    q = call.q.to(wide)
    k, v = (reference.repeat_heads(x.to(wide), q.shape[1]) for x in (call.k, call.v))
    allowed, bias = call.allowed(), call.dense_bias()
    outs, lses = [], []
    rows = max(1, ROWS // max(1, call.m))
    for a in range(0, max(1, call.n), rows):
        some = slice(a, a + rows)
        got = reference.attend(
            q[..., some, :],
            k,
            v,
            _rows(allowed, some),
            bias=_rows(bias, some),
            scale=call.scale,
            ties=call.ties,
        )
        outs.append(F.dropout(got.weights, call.dropout_p) @ v if call.dropout_p else got.o)
        lses.append(got.lse)
    return torch.cat(outs, -2).to(call.q.dtype), torch.cat(lses, -1)


def _rows(x: Tensor | None, some: slice) -> Tensor | None:
    return x if x is None or x.dim() < 2 or x.shape[-2] == 1 else x[..., some, :]
