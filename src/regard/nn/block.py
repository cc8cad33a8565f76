"""One layer: self-attention, cross-attention, feed-forward, each in its residual branch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from .. import compat, spec
from ..errors import ShapeError
from . import branch_end
from .attention import MultiHeadAttention
from .cache import LayerCache
from .dropout import dropout
from .feed_forward import FeedForward
from .norm import norm


class Residual:
    """The residual connection x + dropout(y + bias) of a branch, added together with the next norm.

    A training step on a GPU hands it from block to block, so that the sum and the norm are one pass over memory.
    bias: that of the branch's last product, where y is without it. The embedding, which begins a stack, is a y
    without an x.
    """

    def __init__(
        self,
        x: Float[Tensor, "b n d_model"] | None,
        y: Float[Tensor, "b n d_model"],
        p: int | float,
        bias: Float[Tensor, " d_model"] | None = None,
    ):
        self.x, self.y, self.p, self.bias = x, y, p, bias

    def normed(self, norm: nn.Module, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """The sum, and its norm in this dtype, by default that of the sum."""
        if branch_end.supports(norm, self.like, self.p):
            return branch_end.branch_end(self.x, self.y, norm, self.p, dtype or self.like.dtype, self.bias)
        x = self.sum()
        return x, norm(x)

    @property
    def like(self) -> Float[Tensor, "b n d_model"]:
        """A tensor with the shape and the dtype of the sum."""
        return self.y if self.x is None else self.x

    def sum(self) -> Float[Tensor, "b n d_model"]:
        y = dropout(self.y if self.bias is None else self.y + self.bias, self.p, True)
        return y if self.x is None else self.x + y


class Block(nn.Module):
    """post: x ← LN(x + F(x)). pre: x ← x + F(LN(x)). Without residual: LN(F(x)), F(LN(x))."""

    def __init__(self, declared: spec.Block):
        super().__init__()
        self.spec = declared
        self.fuses_ends = False  # set where a whole training step is known: the loop of `regard train` does

        epsilons = iter(declared.epsilons)

        def new_norm() -> nn.Module:
            return norm(declared.norm, declared.d_model, next(epsilons), declared.norm_bias)

        self.attention, self.attention_norm = MultiHeadAttention(declared.attention), new_norm()
        if declared.cross is not None:
            self.cross, self.cross_norm = MultiHeadAttention(declared.cross), new_norm()
            self.cross.crosses = True
        if declared.feed_forward is not None:
            self.feed_forward = FeedForward(declared.feed_forward, declared.d_model)
            self.feed_forward_norm = new_norm()

    def forward(
        self,
        x: Float[Tensor, "b n d_model"] | Residual,
        context: Float[Tensor, "b m d_context"] | None = None,
        *,
        lengths: Int[Tensor, " b"] | None = None,
        context_lengths: Int[Tensor, " b"] | None = None,
        cache: LayerCache | None = None,
        weights: dict[str, Tensor] | None = None,
        continues: bool = False,
        **scores: Any,
    ) -> Float[Tensor, "b n d_model"] | Residual:
        """The new states. A dictionary given as `weights` receives the attention weights, "self" and "cross".

        scores: `pattern`, `bias` and `at` of the self-attention, as MultiHeadAttention takes them. continues: the
        last sum may be left to the next block, as a `Residual`.
        """
        if (context is None) != (self.spec.cross is None):
            what = "needs a context" if context is None else "has no cross-attention for a context"
            raise ShapeError(f"this block {what}")

        options: dict[str, Any] = {"lengths": lengths, "cache": cache and cache.own, **scores}
        x = self._branch(
            x,
            self.attention,
            self.attention_norm,
            partial(_attend, self.attention, weights, "self", None, **options),
        )
        if self.spec.cross is not None:
            of_context: dict[str, Any] = {"lengths": context_lengths, "cache": cache and cache.cross}
            x = self._branch(
                x,
                self.cross,
                self.cross_norm,
                partial(_attend, self.cross, weights, "cross", context, **of_context),
            )
        if self.spec.feed_forward is not None:
            x = self._branch(x, self.feed_forward, self.feed_forward_norm, self.feed_forward)
        return x.sum() if isinstance(x, Residual) and not continues else x

    def _branch(
        self, x: Tensor | Residual, module: nn.Module, norm: nn.Module, f: Callable[..., Tensor]
    ) -> Tensor | Residual:
        """The branch of this module, which f calls."""
        pre, p = self.spec.norm_at == "pre", self.spec.dropout
        if isinstance(x, Residual):
            # Products take the norm in the dtype of autocast, so it is written in that.
            x, normed = x.normed(norm, branch_end.computed_in(x.like))
            y, bias = _without_bias(module, f, normed)
            return Residual(x, y, p, bias)
        fuses = self.fuses_ends and self.training and self.spec.residual and branch_end.supports(norm, x, p)
        if fuses and torch.promote_types(x.dtype, branch_end.computed_in(x)) == x.dtype:
            y, bias = _without_bias(module, f, norm(x) if pre else x)
            end = Residual(x, y, p, bias)
            return end if pre else end.normed(norm)[1]
        y = dropout(f(norm(x) if pre else x), p, self.training)
        y = x + y if self.spec.residual else y
        return y if pre else norm(y)


def _without_bias(
    module: nn.Module, f: Callable[..., Tensor], x: Float[Tensor, "b n d_model"]
) -> tuple[Float[Tensor, "b n d_model"], Float[Tensor, " d_model"] | None]:
    """f(x) without the bias of its last product, and that bias; the sum of both where it cannot be left out."""
    last: Any = getattr(module, "w_o" if type(module) is MultiHeadAttention else "w_out", None)
    whole = type(module) not in (MultiHeadAttention, FeedForward) or type(last) is not nn.Linear
    if whole or compat.has_hooks(module, last) or last.bias is None:
        return f(x), None
    return f(x, adds_bias=False), last.bias


def _attend(
    attention: nn.Module,
    weights: dict[str, Tensor] | None,
    name: str,
    context: Tensor | None,
    x: Tensor,
    **options: Any,
) -> Tensor:
    inputs = (x,) if context is None else (x, context)
    if weights is None:
        return attention(*inputs, **options)
    o, weights[name] = attention(*inputs, return_weights=True, **options)
    return o
