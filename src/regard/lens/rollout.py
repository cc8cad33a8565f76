"""Attention rollout: how much of each input token reaches the top of a stack of self-attentions."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import ShapeError, SpecError
from .calls import AttentionCall

ROWS = 256  # queries whose weights are in memory at a time


def rollout(
    calls: Sequence[AttentionCall], rows: list[int] | None = None, batch: int = 0, residual: float = 0.5
) -> Float[Tensor, "r n"]:
    """Π over the layers of (residual · I + (1 − residual) · mean over heads of the weights), for these queries.

    Computed from the top layer down, so that a few rows need no n × n table.
    """
    if not calls:
        raise ShapeError("rollout needs at least one self-attention")
    n = calls[0].n
    if any(c.role != "self" or c.n != n or c.m != n for c in calls):
        raise ShapeError(
            "rollout multiplies the layers of one stack of self-attentions, "
            f"not {', '.join(f'{c.name} ({c.n} × {c.m})' for c in calls)}"
        )
    if not 0 <= residual <= 1:
        raise SpecError(f"residual={residual}: it is the share of the residual connection, from 0 to 1")
    calls[-1].region(None, rows, batch)
    first = calls[-1].weights([0], [0], batch)
    reached = torch.eye(n, dtype=first.dtype, device=first.device)[slice(None) if rows is None else rows]
    for call in reversed(calls):
        through = torch.zeros_like(reached)
        for start in range(0, n, ROWS):
            middle = list(range(start, min(start + ROWS, n)))
            through += reached[:, middle] @ call.weights(None, middle, batch).mean(0)
        reached = residual * reached + (1 - residual) * through
    return reached
