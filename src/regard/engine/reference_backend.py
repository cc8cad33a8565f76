"""The backend `reference`: the formula itself, a chunk of queries at a time. It runs every call, and is never chosen
while another backend can run: for hard attention, and for a log-sum-exp that nothing else gives."""

from contextlib import nullcontext
from math import inf

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from .. import reference
from .call import Call, CallFacts, Prepared

CHUNK = 1 << 22  # scores of one head held at a time


class Reference:
    name = "reference"
    automatic: tuple[str, ...] = ()

    def refuses(self, f: CallFacts) -> str | None:
        return None

    def estimate(self, f: CallFacts) -> float:
        return inf

    def prepare(self, f: CallFacts) -> Prepared:
        return Prepared(
            self.name, "formula", lambda: f.n * f.m * f.data_rows, lambda call: attend(call.hide())
        )


def attend(call: Call) -> tuple[Float[Tensor, "b h n d_v"], Float[Tensor, "b h n"]]:
    """softmax(scale · q kᵀ + bias) v and ln Σ exp, by operations that PyTorch can differentiate any number of times.

    16-bit inputs are computed in float32, as the log-sum-exp has that dtype in every backend.
    """
    kind = call.q.device.type  # meta has no autocast to switch off
    with nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False):
        return _by_chunks(call, torch.promote_types(call.q.dtype, torch.float32))


def _by_chunks(call: Call, dtype: torch.dtype) -> tuple[Float[Tensor, "b h n d_v"], Float[Tensor, "b h n"]]:
    q = call.q.to(dtype)
    k, v = (reference.repeat_heads(x.to(dtype), q.shape[1]) for x in (call.k, call.v))
    allowed, bias = call.allowed(), call.dense_bias()
    outs, lses = [], []
    rows = max(1, CHUNK // max(1, call.m))
    for first in range(0, max(1, call.n), rows):
        chunk = slice(first, first + rows)
        result = reference.attend(
            q[..., chunk, :],
            k,
            v,
            _rows(allowed, chunk),
            bias=_rows(bias, chunk),
            scale=call.scale,
            ties=call.ties,
        )
        outs.append(F.dropout(result.weights, call.dropout_p) @ v if call.dropout_p else result.o)
        lses.append(result.lse)
    return torch.cat(outs, -2).to(call.q.dtype), torch.cat(lses, -1)


def _rows(x: Tensor | None, chunk: slice) -> Tensor | None:
    return x if x is None or x.dim() < 2 or x.shape[-2] == 1 else x[..., chunk, :]
