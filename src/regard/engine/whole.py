"""PyTorch's attention over a whole table of pairs, with gradients that have gradients.

On the CPU its fused op is run here by hand where a gradient is asked for: the same op and the same numbers as
F.scaled_dot_product_attention, whose backward cannot be differentiated again; this one can (twice.py).
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ..pattern import causal, full
from . import flash_cpu, twice
from .call import eager


def attend(
    q: Float[Tensor, "b h n d_k"],
    k: Float[Tensor, "b h_kv m d_k"],
    v: Float[Tensor, "b h_kv m d_v"],
    mask: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: int | float,
    enable_gqa: bool,
) -> Float[Tensor, "b h n d_v"]:
    """softmax(scale · q kᵀ + mask) v; a mask is added, or True = may look. No row may be empty."""
    drawn = dropout_p > 0 or (mask is not None and mask.requires_grad)  # PyTorch takes the formula for these
    if drawn or not (q.is_cpu and _learns(q, k, v) and eager(q, k, v) and q.numel() and k.numel()):
        more: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, **more)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
    if mask is not None:
        mask = mask.reshape(*(1,) * (4 - mask.dim()), *mask.shape).expand(-1, -1, q.shape[2], k.shape[2])
    return _Whole.apply(q, k, v, mask, is_causal, float(scale))


def _learns(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask, is_causal, scale):
        o, lse = flash_cpu.forward_of_all(q, k, v, mask, is_causal, scale)
        ctx.save_for_backward(q, k, v, mask, o, lse)
        ctx.is_causal, ctx.scale = is_causal, scale
        return o

    @staticmethod
    def backward(ctx, grad):
        q, k, v, mask, o, lse = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: these gradients will be differentiated again
            pattern = causal() if ctx.is_causal else full()
            grads = twice.gradients(grad, None, q, k, v, pattern, 0, 1, ctx.scale, None, mask)
            return *grads[:3], None, None, None
        grads = flash_cpu.backward_of_all(grad, q, k, v, o, lse, mask, ctx.is_causal, ctx.scale)
        return *grads, None, None, None
