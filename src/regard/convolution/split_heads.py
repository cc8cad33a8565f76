"""The weights of an attention, head by head."""

import copy
import warnings
from dataclasses import replace

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from .. import spec
from ..nn.attention import MultiHeadAttention
from ..pattern.heads import of_heads
from ..position import alibi, quadratic, relative_table, shaw, t5_buckets
from .geometry import Offset


class SplitHeads:
    """An attention, head by head: values `into`, outputs `out`, and their products `taps`."""

    def __init__(self, attention: MultiHeadAttention):
        self.attention, self.spec, self.size = attention, attention.spec, attention.spec.sizes
        size = self.size
        group = [h // (size.heads // size.kv_heads) for h in range(size.heads)]
        values = rearrange(attention.w_v.weight.detach(), "(h d) c -> h d c", h=size.kv_heads)
        self.into = values[group]
        self.value_bias: Tensor | None = None
        if attention.w_v.bias is not None:
            self.value_bias = rearrange(attention.w_v.bias.detach(), "(h d) -> h d", h=size.kv_heads)[group]
        self.group = group
        if attention.w_o is None:
            out = torch.eye(size.d_out, dtype=values.dtype, device=values.device)
        else:
            out = attention.w_o.weight.detach()
        self.out = rearrange(out, "o (h d) -> h o d", h=size.heads)
        self.taps = einsum(self.out, self.into, "h o d, h d c -> h o c")

    @property
    def has_value_bias(self) -> bool:
        return self.value_bias is not None and bool(self.value_bias.any())

    def bias(self, shifts: list[int]) -> Float[Tensor, " d_out"] | None:
        """The bias of W_O, plus that of W_V passed through these heads, whose weights sum to 1."""
        own = None if self.attention.w_o is None else self.attention.w_o.bias
        total = None if own is None else own.detach().clone()
        if self.value_bias is not None and shifts:
            through = einsum(self.out[shifts], self.value_bias[shifts], "h o d, h d -> o")
            total = through if total is None else total + through
        return total

    def keep(self, heads: list[int], grid: Offset, keep_bias: bool) -> MultiHeadAttention:
        """The attention of these heads."""
        if len(heads) == self.size.heads:
            return copy.deepcopy(self.attention)
        rest = self._declare(heads, grid)
        assert rest.w_o is not None  # declared so
        old, size = self.attention, self.size
        with torch.no_grad():
            for name, count in (("w_q", size.heads), ("w_k", size.kv_heads), ("w_v", size.kv_heads)):
                new_linear, old_linear = getattr(rest, name), getattr(old, name)
                if old_linear is None:
                    continue
                chosen = heads if name == "w_q" else [self.group[h] for h in heads]
                for kind in ("weight", "bias"):
                    if (tensor := getattr(old_linear, kind)) is not None:
                        selected = rearrange(tensor, "(h d) ... -> h d ...", h=count)[chosen]
                        getattr(new_linear, kind).copy_(rearrange(selected, "h d ... -> (h d) ..."))
            rest.w_o.weight.copy_(rearrange(self.out[heads], "h o d -> o (h d)"))
            if rest.w_o.bias is not None:
                own = None if old.w_o is None or not keep_bias else old.w_o.bias
                rest.w_o.bias.copy_(torch.zeros_like(rest.w_o.bias) if own is None else own)
            if self.spec.score == "additive":
                rest.v_score.copy_(old.v_score[heads])
            _copy_position(old, rest, heads, grid)
        return rest.train(old.training)

    def _declare(self, heads: list[int], grid: Offset) -> MultiHeadAttention:
        size, own = self.size, self.spec
        position = relative_table(grid[0] - 1) if isinstance(own.position, alibi) else own.position
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", spec.EmptyRowWarning)  # warned when the original was declared
            declared = replace(
                own,
                heads=len(heads),
                pattern=of_heads(own.pattern, heads),
                kv_heads=None,
                d_k=None if own.score == "bilinear" else size.d_k,
                d_v=size.d_v,
                d_out=size.d_out,
                output=True,
                position=position,
            )
        like = self.into
        return MultiHeadAttention(declared).to(like.device, like.dtype)


def _copy_position(old: MultiHeadAttention, rest: MultiHeadAttention, heads: list[int], grid: Offset) -> None:
    match old.spec.position:
        case quadratic():
            rest.position.center.copy_(old.position.center[heads])
            rest.position.alpha.copy_(old.position.alpha[heads])
        case relative_table() | t5_buckets():
            rest.position.table.copy_(old.position.table[heads])
        case alibi():  # slopes depend on the number of heads, so fewer heads store theirs as a table
            distances = torch.arange(1 - grid[0], grid[0], device=rest.position.table.device)
            rest.position.table.copy_(old.position.by_distance().at(distances)[heads])
        case shaw():
            rest.position.keys.copy_(old.position.keys)
