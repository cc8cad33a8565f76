"""Shared parts of losses that are computed in chunks, with their gradients, as one operation for torch.compile.

Such an operation takes rows, table, bias, further arguments and, last, which of the first three need gradients. It
returns the loss, the unsmoothed loss, and a gradient of each of the three, empty where none is needed.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def prepared(rows: Tensor, table: Tensor, bias: Tensor | None) -> tuple[Tensor, list[bool]]:
    """The rows in the dtype of their product, and which of rows, table and bias need gradients."""
    kind = rows.device.type
    if torch.is_autocast_enabled(kind):
        rows = rows.to(torch.get_autocast_dtype(kind))
    enabled = torch.is_grad_enabled()
    return rows, [enabled and x is not None and x.requires_grad for x in (rows, table, bias)]


def gradients(rows: Tensor, table: Tensor, bias: Tensor | None, needs: list[bool]) -> tuple[Tensor, ...]:
    """Buffers for the gradients: of the rows in their dtype, of table and bias in float32."""
    d_rows = torch.empty(rows.shape if needs[0] else (0,), dtype=rows.dtype, device=rows.device)
    shared = (
        torch.zeros(x.shape, dtype=torch.float32, device=rows.device)
        if x is not None and need
        else rows.new_empty(0, dtype=torch.float32)
        for x, need in ((table, needs[1]), (bias, needs[2]))
    )
    return d_rows, *shared


def add_shared(
    shared: Sequence[Tensor], d_logits: Tensor, part: Tensor, needs: list[bool], first: bool
) -> None:
    """Add the gradients of table and bias of one chunk, part being its rows."""
    d_table, d_bias = shared
    if needs[1]:
        _add_product(d_table, d_logits, part, first)
    if needs[2]:
        d_bias += d_logits.sum(0, dtype=torch.float32)


def _add_product(d_table: Tensor, d_logits: Tensor, part: Tensor, first: bool) -> None:
    """d_table ← d_table + d_logitsᵀ part, summed in float32 also from 16-bit factors."""
    if part.dtype == torch.float32:
        d_table.addmm_(d_logits.T, part)
    elif not part.is_cuda:  # under the interpreter
        d_table += d_logits.T.float() @ part.float()
    else:
        factors = d_logits.T, part, torch.float32
        torch.ops.aten.addmm.dtype_out(d_table, *factors, beta=0 if first else 1, out=d_table)


def register(operation: Any) -> None:
    """Register shapes and the backward pass of such an operation."""
    operation.register_fake(_shapes)
    operation.register_autograd(_backward, setup_context=_setup)


def _shapes(rows, table, bias, *rest):
    loss, plain = (rows.new_empty((), dtype=torch.float32) for _ in range(2))
    return loss, plain, *gradients(rows, table, bias, rest[-1])


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*output[2:])
    ctx.dtypes = [None if x is None else x.dtype for x in inputs[:3]]
    ctx.needs, ctx.rest = inputs[-1], (None,) * (len(inputs) - 3)
    ctx.set_materialize_grads(False)


def _backward(ctx, d_loss, *_):
    if d_loss is None:
        return None, None, None, *ctx.rest
    saved = zip(ctx.saved_tensors, ctx.dtypes, ctx.needs)
    return *((d.float() * d_loss).to(dtype) if need else None for d, dtype, need in saved), *ctx.rest
