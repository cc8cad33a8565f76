"""One layer: self-attention, cross-attention, feed-forward, each in its residual branch."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from .. import spec
from ..errors import ShapeError
from .attention import MultiHeadAttention
from .cache import LayerCache
from .dropout import dropout
from .feed_forward import FeedForward
from .norm import norm


class Block(nn.Module):
    """post: x ← LN(x + F(x)). pre: x ← x + F(LN(x)). Without residual: LN(F(x)), F(LN(x))."""

    def __init__(self, declared: spec.Block):
        super().__init__()
        self.spec = declared

        def new_norm() -> nn.Module:
            return norm(declared.norm, declared.d_model, declared.eps, declared.norm_bias)

        self.attention, self.attention_norm = MultiHeadAttention(declared.attention), new_norm()
        if declared.cross is not None:
            self.cross, self.cross_norm = MultiHeadAttention(declared.cross), new_norm()
        if declared.feed_forward is not None:
            self.feed_forward = FeedForward(declared.feed_forward, declared.d_model)
            self.feed_forward_norm = new_norm()

    def forward(
        self,
        x: Float[Tensor, "b n d_model"],
        context: Float[Tensor, "b m d_context"] | None = None,
        *,
        lengths: Int[Tensor, " b"] | None = None,
        context_lengths: Int[Tensor, " b"] | None = None,
        cache: LayerCache | None = None,
        weights: dict[str, Tensor] | None = None,
        **scores: Any,
    ) -> Float[Tensor, "b n d_model"]:
        """The new states. A dictionary given as `weights` receives the attention weights, "self" and "cross".

        scores: `pattern`, `bias` and `at` of the self-attention, as MultiHeadAttention takes them.
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
        return x

    def _branch(self, x: Tensor, f: Callable[[Tensor], Tensor], norm: nn.Module) -> Tensor:
        pre = self.spec.norm_at == "pre"
        y = dropout(f(norm(x) if pre else x), self.spec.dropout, self.training)
        y = x + y if self.spec.residual else y
        return y if pre else norm(y)


def _attend(
    attention: nn.Module, weights: dict[str, Tensor] | None, name: str, *inputs: Any, **options: Any
) -> Tensor:
    if weights is None:
        return attention(*inputs, **options)
    o, weights[name] = attention(*inputs, return_weights=True, **options)
    return o
