"""PyTorch's attention, F.scaled_dot_product_attention and nn.MultiheadAttention, over the pairs of a pattern."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..engine.attention import attention
from ..errors import SpecError
from ..pattern import Both, Pattern, causal
from ..pattern.causal_bias import causal_and_offset, is_causal_bias

Patterns = Pattern | Sequence[Pattern]


class Intercepted(TorchFunctionMode):
    """While active, F.scaled_dot_product_attention of this thread attends to the pattern's pairs only."""

    def __init__(self, name: str, given: Patterns):
        super().__init__()
        self.name, self.given, self.calls = name, given, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        self.calls += 1
        return sdpa_with_pattern(self.given, *args, **kwargs)


def sdpa_with_pattern(
    given: Patterns,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *flags: Any,
    **named: Any,
) -> Tensor:
    """F.scaled_dot_product_attention over the pairs that its mask and the pattern allow."""
    options = {**dict(zip(("dropout_p", "is_causal"), flags)), **named}
    is_causal, scale = options.get("is_causal", False), options.get("scale")
    dropout_p = options.get("dropout_p", 0.0)
    lead = query.shape[:-3]
    q, k, v = (x.reshape(-1, *x.shape[-3:]) if x.dim() != 4 else x for x in (query, key, value))
    n, m = q.shape[2], k.shape[2]
    table, bias = None, None
    at = 0 if is_causal else m - n  # PyTorch aligns its causal mask at the first key
    if is_causal_bias(attn_mask):
        (_, at), attn_mask, is_causal = causal_and_offset(attn_mask, q, k), None, True
    if attn_mask is not None:
        attn_mask = attn_mask.reshape((1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape))
        table, bias = (attn_mask, None) if attn_mask.dtype == torch.bool else (None, attn_mask)

    def one(pattern, q, k, v, table, bias):
        meant = Both(causal(), pattern) if is_causal and pattern != causal() else pattern
        if table is None:
            return attention(q, k, v, meant, at=at, bias=bias, scale=scale, dropout_p=dropout_p)
        both = table & meant.allowed(n, m, at, q.device)
        return attention(q, k, v, both, bias=bias, scale=scale, dropout_p=dropout_p)

    if isinstance(given, Pattern):
        o = one(given, q, k, v, table, bias)
    else:
        o = by_head(tuple(given), q, k, v, lambda p, q, k, v, heads: one(
            p, q, k, v, _of_heads(table, heads), _of_heads(bias, heads)))  # fmt: skip
    return o.reshape(*lead, *o.shape[-3:]) if query.dim() != 4 else o


def _of_heads(x: Tensor | None, heads: Tensor) -> Tensor | None:
    return x if x is None or x.shape[1] == 1 else x[:, heads]


def by_head(
    given: tuple[Pattern, ...], q: Tensor, k: Tensor, v: Tensor, run: Callable[..., Tensor]
) -> Tensor:
    """run(pattern, q, k, v, heads) for each set of query heads that have one pattern, together in their order."""
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    if len(given) != heads:
        raise SpecError(f"{len(given)} patterns for {heads} query heads; give one for each head")
    sets: dict[Pattern, list[int]] = {}
    for head, pattern in enumerate(given):
        sets.setdefault(pattern, []).append(head)
    outs, order = [], []
    for pattern, chosen in sets.items():
        index = torch.tensor(chosen, device=q.device)
        shared = sorted({h // group for h in chosen})
        whole = chosen == [h for s in shared for h in range(s * group, (s + 1) * group)]
        kv = torch.tensor(shared if whole else [h // group for h in chosen], device=q.device)
        outs.append(run(pattern, q[:, index], k[:, kv], v[:, kv], index))
        order.extend(chosen)
    back = torch.tensor(sorted(range(heads), key=order.__getitem__), device=q.device)
    return torch.cat(outs, 1).index_select(1, back)


# nn.MultiheadAttention


def check_multihead(module: nn.MultiheadAttention) -> None:
    if module.bias_k is not None or module.add_zero_attn:
        raise SpecError(
            "nn.MultiheadAttention with add_bias_kv or add_zero_attn has one more key than positions, which no "
            "pattern names; use neither"
        )


MULTIHEAD_OPTIONS = ("key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")


def multihead(
    module: nn.MultiheadAttention,
    given: Patterns,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *flags: Any,
    **named: Any,
) -> tuple[Tensor, Tensor | None]:
    """nn.MultiheadAttention.forward, its scores restricted to the pattern; in PyTorch's masks True = hidden."""
    options = {**dict(zip(MULTIHEAD_OPTIONS, flags)), **named}
    key_padding_mask, attn_mask = options.get("key_padding_mask"), options.get("attn_mask")
    need_weights, average = options.get("need_weights", True), options.get("average_attn_weights", True)
    batched = query.dim() == 3
    if not batched:
        query, key, value = (x.unsqueeze(0 if module.batch_first else 1) for x in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    if not module.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    heads = module.num_heads
    projections = _input_weights(module)
    q, k, v = (
        F.linear(x, w, b).unflatten(-1, (heads, -1)).transpose(1, 2)
        for x, (w, b) in zip((query, key, value), projections)
    )
    mask = _joined_masks(attn_mask, key_padding_mask, q.shape[0], heads, q.dtype)
    if options.get("is_causal") and attn_mask is None:
        raise SpecError(
            "is_causal=True without attn_mask: PyTorch refuses this too; give the mask or a causal pattern"
        )
    dropout = module.dropout if module.training else 0.0
    o = sdpa_with_pattern(given, q, k, v, attn_mask=mask, dropout_p=dropout)
    weights = None
    if need_weights:
        identity = torch.eye(k.shape[2], dtype=q.dtype, device=q.device).expand(*k.shape[:2], -1, -1)
        weights = sdpa_with_pattern(given, q, k, identity, attn_mask=mask)
        weights = weights.mean(1) if average else weights
    o = module.out_proj(o.transpose(1, 2).flatten(-2))
    if not module.batch_first:
        o = o.transpose(0, 1)
    if not batched:
        o = o.squeeze(0 if module.batch_first else 1)
        weights = None if weights is None else weights.squeeze(0)
    return o, weights


def _input_weights(module: nn.MultiheadAttention) -> list[tuple[Tensor, Tensor | None]]:
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    return list(zip(weights, biases))


def _joined_masks(
    attn_mask: Tensor | None, padding: Tensor | None, batch: int, heads: int, dtype: torch.dtype
) -> Tensor | None:
    """PyTorch's masks (bool: True = may not; float: added) as one of F.scaled_dot_product_attention."""
    parts = []
    if attn_mask is not None:
        parts.append(
            attn_mask.reshape(-1, heads, *attn_mask.shape[-2:])
            if attn_mask.dim() == 3
            else attn_mask[None, None]
        )
    if padding is not None:
        parts.append(padding[:, None, None, :])
    if not parts:
        return None
    if all(x.dtype == torch.bool for x in parts):
        hidden = parts[0] if len(parts) == 1 else parts[0] | parts[1]
        return ~hidden
    added = [
        torch.zeros_like(x, dtype=dtype).masked_fill(x, -torch.inf) if x.dtype == torch.bool else x
        for x in parts
    ]
    return sum(added[1:], added[0])
