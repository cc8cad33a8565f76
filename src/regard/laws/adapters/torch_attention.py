"""torch.nn.MultiheadAttention."""

from dataclasses import dataclass
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
    """PyTorch's multi-head attention; `need_weights=True`, its default, returns the weights."""
    source = None
    if module is None:
        module = seeded(lambda: nn.MultiheadAttention(d_model, heads, batch_first=True, **more))
        rest = "".join(f", {k}={v!r}" for k, v in more.items())
        source = f"adapters.multihead_attention(d_model={d_model}, heads={heads}, need_weights={need_weights}{rest})"
    extra = module.bias_k is not None or module.add_zero_attn
    supported = {"mask", "causal", "lengths", "left padding", "float32", "float64", "grad"}
    if module.kdim == module.vdim:
        supported |= {"context", "context lengths"}
    if module.kdim != module.embed_dim:
        supported -= {"lengths", "left padding", "causal"}
    return Model(
        "torch.nn.MultiheadAttention" + ("" if need_weights else " (need_weights=False)"),
        module,
        lambda module, x, context=None, **options: _call(module, x, context, need_weights, **options),
        architecture="attention",
        d_model=module.embed_dim,
        d_context=module.kdim,
        heads=module.num_heads,
        layers=1,
        projections=None if extra else projections,
        claims={*supported, "weights"} if not extra else supported,
        lacks={"positions", "relative positions"},
        source=source,
        imports="from regard.laws import adapters",
    )


@dataclass(frozen=True, kw_only=True)
class Masks:
    """The masks of a call as the laws pass them, converted to those of torch.nn, where True = masked."""

    allowed: Bool[Tensor, "..."] | None = None
    causal: bool = False
    lengths: Int[Tensor, " b"] | None = None
    context_lengths: Int[Tensor, " b"] | None = None
    left_padding: Int[Tensor, " b"] | None = None

    def attn_mask(
        self, x: Float[Tensor, "b n d"], source: Float[Tensor, "b m e"], heads: int
    ) -> Bool[Tensor, "..."] | None:
        """(n, m), or (b · heads, n, m) if the batch rows differ."""
        b, n, m = len(x), x.shape[1], source.shape[1]
        future = torch.ones(n, m, dtype=torch.bool, device=x.device).triu(1) if self.causal else None
        if self.allowed is None:
            return future
        masked = ~self.allowed if future is None else ~self.allowed | future
        if masked.dim() == 2:
            return masked
        return repeat(masked.expand(b, n, m), "b n m -> (b h) n m", h=heads)

    def padding(self, x: Float[Tensor, "b n d"]) -> Bool[Tensor, "b n"] | None:
        return key_padding_mask(x.shape[1], self.lengths, self.left_padding)

    def context_padding(self, context: Float[Tensor, "b m e"]) -> Bool[Tensor, "b m"] | None:
        return key_padding_mask(context.shape[1], self.context_lengths)


def _call(
    module: nn.MultiheadAttention,
    x: Float[Tensor, "b n d"],
    context: Float[Tensor, "b m e"] | None = None,
    need_weights: bool = True,
    *,
    weights: bool = False,
    **options: Any,
) -> Any:
    masks, source = Masks(**options), x if context is None else context
    arguments: dict[str, Any] = {
        "key_padding_mask": masks.padding(x) if context is None else masks.context_padding(context),
        "attn_mask": masks.attn_mask(x, source, module.num_heads),
        "need_weights": need_weights or weights,
        "average_attn_weights": not weights,
    }
    if module.batch_first:
        o, table = module(x, source, source, **arguments)
    else:
        x, source = (rearrange(t, "b n d -> n b d") for t in (x, source))
        o, table = module(x, source, source, **arguments)
        o = rearrange(o, "n b d -> b n d")
    return (o, table) if weights else o


def key_padding_mask(
    m: int, lengths: Int[Tensor, " b"] | None, left_padding: Int[Tensor, " b"] | None = None
) -> Bool[Tensor, "b m"] | None:
    """PyTorch's key padding mask: True = masked."""
    if lengths is None and left_padding is None:
        return None
    device = lengths.device if lengths is not None else left_padding.device  # type: ignore[union-attr]
    j, hidden = torch.arange(m, device=device), None
    if lengths is not None:
        hidden = j >= lengths[:, None]
    if left_padding is not None:
        hidden = j < left_padding[:, None] if hidden is None else hidden | (j < left_padding[:, None])
    return hidden


def projections(module: nn.Module) -> Projections:
    """Views of the packed or separate projections, per head."""
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
