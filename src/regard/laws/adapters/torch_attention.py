"""torch.nn.MultiheadAttention."""

from typing import Any

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..target import Model, Projections
from .seeded import seeded


def multihead_attention(
    module: nn.MultiheadAttention | None = None,
    *,
    d_model: int = 16,
    heads: int = 4,
    need_weights: bool = True,
    **more: Any,
) -> Model:
    """PyTorch's multi-head attention; `need_weights=True`, its default, computes the table of weights."""
    source = None
    if module is None:
        module = seeded(lambda: nn.MultiheadAttention(d_model, heads, batch_first=True, **more))
        named = "".join(f", {k}={v!r}" for k, v in more.items())
        source = f"adapters.multihead_attention(d_model={d_model}, heads={heads}, need_weights={need_weights}{named})"
    extra = module.bias_k is not None or module.add_zero_attn
    able = {"mask", "causal", "lengths", "left padding", "float32", "float64", "grad"}
    if module.kdim == module.vdim:
        able |= {"context", "context lengths"}
    if module.kdim != module.embed_dim:
        able -= {"lengths", "left padding", "causal"}
    return Model(
        "torch.nn.MultiheadAttention" + ("" if need_weights else " (need_weights=False)"),
        module,
        lambda module, x, context=None, **asked: _call(module, x, context, need_weights, **asked),
        of="attention",
        d_model=module.embed_dim,
        d_context=module.kdim,
        heads=module.num_heads,
        layers=1,
        projections=None if extra else projections,
        claims={*able, "weights"} if not extra else able,
        lacks={"positions", "relative positions"},
        source=source,
        imports="from regard.laws import adapters",
    )


def _call(
    module: nn.MultiheadAttention,
    x: Float[Tensor, "b n d"],
    context: Float[Tensor, "b m e"] | None = None,
    need_weights: bool = True,
    *,
    allowed: Bool[Tensor, "..."] | None = None,
    causal: bool = False,
    lengths: Int[Tensor, " b"] | None = None,
    context_lengths: Int[Tensor, " b"] | None = None,
    pads: Int[Tensor, " b"] | None = None,
    weights: bool = False,
) -> Any:
    source = x if context is None else context
    b, n, m = len(x), x.shape[1], source.shape[1]
    given: dict[str, Any] = {
        "key_padding_mask": hidden_keys(m, lengths if context is None else context_lengths, pads),
        "attn_mask": hidden_pairs(b, module.num_heads, n, m, allowed, causal, x.device),
        "need_weights": need_weights or weights,
        "average_attn_weights": not weights,
    }
    if module.batch_first:
        o, table = module(x, source, source, **given)
    else:
        x, source = (rearrange(t, "b n d -> n b d") for t in (x, source))
        o, table = module(x, source, source, **given)
        o = rearrange(o, "n b d -> b n d")
    return (o, table) if weights else o


def hidden_keys(
    m: int, lengths: Int[Tensor, " b"] | None, pads: Int[Tensor, " b"] | None = None
) -> Bool[Tensor, "b m"] | None:
    """PyTorch's key padding mask: True = leave out."""
    if lengths is None and pads is None:
        return None
    device = lengths.device if lengths is not None else pads.device  # type: ignore[union-attr]
    j, hidden = torch.arange(m, device=device), None
    if lengths is not None:
        hidden = j >= lengths[:, None]
    if pads is not None:
        hidden = j < pads[:, None] if hidden is None else hidden | (j < pads[:, None])
    return hidden


def hidden_pairs(b, heads, n, m, allowed, causal, device) -> Bool[Tensor, "..."] | None:
    """PyTorch's attention mask, True = leave out: (n, m), or (b · heads, n, m) where rows of the batch differ."""
    future = torch.ones(n, m, dtype=torch.bool, device=device).triu(1) if causal else None
    if allowed is None:
        return future
    hidden = ~allowed if future is None else ~allowed | future
    if hidden.dim() == 2:
        return hidden
    return repeat(hidden.expand(b, n, m), "b n m -> (b h) n m", h=heads)


def projections(module: nn.Module) -> Projections:
    """Views, head by head, of the packed or separate projections."""
    assert isinstance(module, nn.MultiheadAttention)
    h, e = module.num_heads, module.embed_dim
    if module.in_proj_weight is not None:
        matrices = module.in_proj_weight.chunk(3)
    else:
        matrices = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    w_q, w_k, w_v = (w.view(h, e // h, -1).mT for w in matrices)
    w_o = module.out_proj.weight.view(e, h, e // h).permute(1, 2, 0)
    views = Projections(w_q, w_k, w_v, w_o, b_o=module.out_proj.bias)
    if module.in_proj_bias is None:
        return views
    b_q, b_k, b_v = (b.view(h, e // h) for b in module.in_proj_bias.chunk(3))
    return views._replace(b_q=b_q, b_k=b_k, b_v=b_v)
