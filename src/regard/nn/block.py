"""One layer: self-attention, cross-attention, feed-forward, each in its residual branch."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from .. import spec
from ..errors import ShapeError
from . import branch_end
from .attention import MultiHeadAttention
from .cache import LayerCache
from .dropout import dropout
from .feed_forward import FeedForward
from .norm import norm


class Residual:
    """The residual connection x + dropout(y) of a branch's output y, added together with the next norm.

    A training step on a GPU hands it from block to block, so that the sum and the norm are one pass over memory.
    """

    def __init__(self, x: Float[Tensor, "b n d_model"], y: Float[Tensor, "b n d_model"], p: int | float):
        self.x, self.y, self.p = x, y, p

    def normed(self, norm: nn.Module, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """The sum, and its norm in this dtype, by default that of the sum."""
        if branch_end.supports(norm, self.x, self.p):
            return branch_end.branch_end(self.x, self.y, norm, self.p, dtype or self.x.dtype)
        x = self.sum()
        return x, norm(x)

    def sum(self) -> Float[Tensor, "b n d_model"]:
        return self.x + dropout(self.y, self.p, True)


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

        options = {"lengths": lengths, "cache": cache and cache.own, **scores}
        x = self._branch(
            x, lambda y: _attend(self.attention, weights, "self", y, **options), self.attention_norm
        )
        if self.spec.cross is not None:
            of_context = {"lengths": context_lengths, "cache": cache and cache.cross}
            x = self._branch(
                x, lambda y: _attend(self.cross, weights, "cross", y, context, **of_context), self.cross_norm
            )
        if self.spec.feed_forward is not None:
            x = self._branch(x, self.feed_forward, self.feed_forward_norm)
        return x.sum() if isinstance(x, Residual) and not continues else x

    def _branch(
        self, x: Tensor | Residual, f: Callable[[Tensor], Tensor], norm: nn.Module
    ) -> Tensor | Residual:
        pre, p = self.spec.norm_at == "pre", self.spec.dropout
        if isinstance(x, Residual):
            # Products take the norm in the dtype of autocast, so it is written in that.
            x, normed = x.normed(norm, branch_end.computed_in(x.x))
            return Residual(x, f(normed), p)
        y = f(norm(x) if pre else x)
        fuses = self.fuses_ends and self.training and self.spec.residual
        if fuses and branch_end.supports(norm, x, p) and torch.promote_types(x.dtype, y.dtype) == x.dtype:
            return Residual(x, y, p) if pre else Residual(x, y, p).normed(norm)[1]
        y = dropout(y, p, self.training)
        y = x + y if self.spec.residual else y
        return y if pre else norm(y)


def _attend(
    attention: nn.Module, weights: dict[str, Tensor] | None, name: str, *inputs: Any, **options: Any
) -> Tensor:
    if weights is None:
        return attention(*inputs, **options)
    o, weights[name] = attention(*inputs, return_weights=True, **options)
    return o
