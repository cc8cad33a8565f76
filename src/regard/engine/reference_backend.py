"""The backend `reference`: the formula itself, a chunk of queries at a time. It runs every call, and is never chosen
while another backend can run: for hard attention, and for a log-sum-exp that nothing else gives.

It is also what differentiates twice: the backward pass of a fused executor is not differentiable, so under
create_graph=True its gradients come from here, exact, and as expensive in time and memory as this backend.
"""

from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from .. import compat, reference
from ..position import ByDistance
from .call import Call, CallFacts, Prepared, computed_in, replaced, without_autocast
from .merge import merge_sink
from .query_chunks import alias, by_queries, differentiate, gradients_by_queries, rows_of

CHUNK = 1 << 22  # scores of one head held at a time


class Reference:
    name = "reference"
    automatic: tuple[str, ...] = ()

    def refuses(self, f: CallFacts) -> str | None:
        return None

    def estimate(self, f: CallFacts) -> float:
        return inf

    def prepare(self, f: CallFacts) -> Prepared:
        run = lambda call: by_queries(call, formula, formula, holds_scores=True)  # noqa: E731
        return Prepared(self.name, "formula", lambda: f.n * f.m * f.data_rows, run)


def formula(call: Call) -> tuple[Float[Tensor, "b h n d_v"], Float[Tensor, "b h n"]]:
    """`attend`, with hidden keys cleared and the sink merged."""
    results = attend(call.hide())
    return results if call.sink_logits is None else merge_sink(*results, call.sink_logits)


def attend(
    call: Call, dropout: Tensor | None = None
) -> tuple[Float[Tensor, "b h n d_v"], Float[Tensor, "b h n"]]:
    """softmax(scale · q kᵀ + bias) v and ln Σ exp, by operations that PyTorch can differentiate any number of times.

    16-bit inputs are computed in float32, as the log-sum-exp has that dtype in every backend. dropout: factors of the
    weights that were drawn before.
    """
    dtype, outs, lses = computed_in(call.q.dtype), [], []
    terms: dict[str, Any] = {"scale": call.scale, "softcap": call.softcap, "ties": call.ties}
    with without_autocast(call.q):
        q = call.q.to(dtype)
        k, v = (reference.repeat_heads(x.to(dtype), q.shape[1]) for x in (call.k, call.v))
        allowed, bias = call.allowed(), call.dense_bias(dtype)
        symbols = compat.sizes_are_symbols()  # a loop would fix their number
        rows = call.n if symbols else max(1, CHUNK // max(1, call.m))
        for first in (0,) if symbols else range(0, max(1, call.n), rows):
            chunk = slice(first, first + rows)
            inputs = q[..., chunk, :], k, v, rows_of(allowed, chunk)
            result = reference.attend(*inputs, bias=rows_of(bias, chunk), **terms)
            o = result.o if dropout is None else (result.weights * dropout[..., chunk, :]) @ v
            outs.append(F.dropout(result.weights, call.dropout_p) @ v if call.dropout_p else o)
            lses.append(result.lse)
        return torch.cat(outs, -2).to(call.q.dtype), torch.cat(lses, -1)


def gradients(
    grads: tuple[Tensor | None, ...], call: Call, dropout: Tensor | None = None, create_graph: bool = True
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k and v, and of a bias tensor and a sink where there is one, each with a graph of its own.

    grads: those of o and of the log-sum-exp. dropout: factors of the weights.
    """
    once = dropout is not None or not create_graph
    if not once and (chunked := gradients_by_queries(grads, call, formula)) is not None:
        dq, dk, dv, _, _, dsink = chunked
        results = zip((call.q, call.k, call.v, call.bias, call.sink_logits), (dq, dk, dv, None, dsink))
        return tuple(dx if x.requires_grad else None for x, dx in results if isinstance(x, Tensor))
    added = call.bias if call.bias is None or isinstance(call.bias, ByDistance) else alias(call.bias)
    q, k, v, sink = map(alias, (call.q, call.k, call.v, call.sink_logits))
    call = replaced(call, q=q, k=k, v=v, bias=added, sink_logits=sink)
    inputs, outputs = _inputs(call), formula(call) if dropout is None else attend(call.hide(), dropout)
    found = differentiate(outputs, inputs, grads, create_graph=create_graph)
    # Zeros where nothing depends on an input: the log-sum-exp alone does not on v.
    return tuple(
        torch.zeros_like(x) if x.requires_grad and dx is None else dx for x, dx in zip(inputs, found)
    )


def _inputs(call: Call) -> tuple[Tensor, ...]:
    return tuple(x for x in (call.q, call.k, call.v, call.bias, call.sink_logits) if isinstance(x, Tensor))
