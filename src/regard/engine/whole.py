"""PyTorch's attention over a whole table of pairs, with gradients that have gradients.

On the CPU the backward of its fused op cannot be differentiated again. Where that is asked for, and only there, a
hook gives the gradients by the formula instead, which can (twice.py).
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ..pattern import causal, full
from . import twice
from .call import eager
from .cpu import flash_op as flash_cpu

NODE = "ScaledDotProductFlashAttentionForCpuBackward0"  # what PyTorch differentiates otherwise has gradients itself


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
    return learnt(q, k, v, mask, is_causal, float(scale))


def _learns(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def learnt(
    q: Float[Tensor, "b h n d_k"],
    k: Float[Tensor, "b h_kv m d_k"],
    v: Float[Tensor, "b h_kv m d_v"],
    mask: Float[Tensor, "#b #h n m"] | None,
    is_causal: bool,
    scale: float,
) -> Float[Tensor, "b h n d_v"]:
    """The same by the fused op, where something learns: a mask is added, and has q's dtype."""
    o = flash_cpu.of_all(q, k, v, mask, is_causal, scale)
    o.grad_fn.register_hook(again)  # type: ignore[union-attr]  # something learns
    return o if o.shape[-1] == v.shape[-1] else o[..., : v.shape[-1]]


def again(
    grads: tuple[Tensor | None, ...], given: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...] | None:
    """After the op's backward: its gradients as they are, or under create_graph=True by the formula.

    The tensors are those that the op's own node keeps, so that nothing is kept twice or longer.
    """
    if not torch.is_grad_enabled() or given[0] is None:
        return None
    node: Any = torch._C._current_autograd_node()
    if node.name() != NODE:
        return None
    q, k, v, mask = node._saved_query, node._saved_key, node._saved_value, node._saved_attn_mask
    pattern = causal() if node._saved_is_causal else full()
    found = twice.gradients(given[0], None, q, k, v, pattern, 0, 1, node._saved_scale, None, mask)
    return tuple(None if old is None else new for old, new in zip(grads, found))  # None: nobody asked
