"""One layer: attention, attention to a context, feed-forward, each in its residual branch."""

from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor, nn

from .. import spec
from ..engine.call import Bias
from ..errors import ShapeError
from ..pattern import At, Pattern
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

        def beside() -> nn.Module:
            return norm(declared.norm, declared.d_model, declared.eps, declared.norm_bias)

        self.attention, self.attention_norm = MultiHeadAttention(declared.attention), beside()
        if declared.cross is not None:
            self.cross, self.cross_norm = MultiHeadAttention(declared.cross), beside()
        if declared.feed_forward is not None:
            self.feed_forward = FeedForward(declared.feed_forward, declared.d_model)
            self.feed_forward_norm = beside()

    def forward(
        self,
        x: Float[Tensor, "b n d_model"],
        context: Float[Tensor, "b m d_context"] | None = None,
        *,
        lengths: Int[Tensor, " b"] | None = None,
        context_lengths: Int[Tensor, " b"] | None = None,
        pattern: Pattern | Tensor | None = None,
        bias: Bias = None,
        cache: LayerCache | None = None,
        at: At | Tensor = None,
        keep: dict[str, Tensor] | None = None,
    ) -> Float[Tensor, "b n d_model"]:
        """The new states. A dictionary given as `keep` receives the weights, "self" and "cross"."""
        if (context is None) != (self.spec.cross is None):
            what = "needs a context to look at" if context is None else "has no cross-attention for a context"
            raise ShapeError(f"this block {what}")

        def own(x: Tensor) -> Tensor:
            kept = cache and cache.own
            return _keep(
                keep,
                "self",
                self.attention,
                x,
                lengths=lengths,
                pattern=pattern,
                bias=bias,
                cache=kept,
                at=at,
            )

        def cross(x: Tensor) -> Tensor:
            kept = cache and cache.cross
            return _keep(keep, "cross", self.cross, x, context, lengths=context_lengths, cache=kept)

        x = self._branch(x, own, self.attention_norm)
        if self.spec.cross is not None:
            x = self._branch(x, cross, self.cross_norm)
        if self.spec.feed_forward is not None:
            x = self._branch(x, self.feed_forward, self.feed_forward_norm)
        return x

    def _branch(self, x: Tensor, f: Callable[[Tensor], Tensor], norm: nn.Module) -> Tensor:
        first = self.spec.norm_at == "pre"
        y = dropout(f(norm(x) if first else x), self.spec.dropout, self.training)
        y = x + y if self.spec.residual else y
        return y if first else norm(y)


def _keep(keep: dict[str, Tensor] | None, name: str, attention: nn.Module, *given, **named) -> Tensor:
    if keep is None:
        return attention(*given, **named)
    o, keep[name] = attention(*given, return_weights=True, **named)
    return o
