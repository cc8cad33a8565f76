"""Multi-head attention: the module of a spec.Attention."""

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from .. import compat, spec
from ..engine import attention as engine
from ..engine import fused_qkv
from ..engine.backends import named
from ..engine.call import Bias
from ..errors import ShapeError, not_an_argument_of, require_tensors
from ..pattern import At, Pattern, causal, per_head
from ..reference import repeat_heads, tanh_scores
from . import position as positions
from .cache import KeyValues
from .packed import Packed, product


class Projected(NamedTuple):
    """Queries, keys and values as the engine takes them, with lengths and the query offset."""

    q: Float[Tensor, "b h n d_k"]
    k: Float[Tensor, "b h_kv m d_k"]
    v: Float[Tensor, "b h_kv m d_v"]
    lengths: Int[Tensor, " b"] | None
    at: At | Tensor


class Complete(NamedTuple):
    """All pairs that may attend, the declared pattern included: a stack gives it for packed documents."""

    pairs: Pattern | Bool[Tensor, "b #h n n"]


class MultiHeadAttention(nn.Module):
    """concat_h softmax(scale · Q_h K_hᵀ + bias) V_h, times W_O.

    Queries come from x; keys and values from `context`, or from x where there is none.
    """

    def __init__(self, declared: spec.Attention):
        super().__init__()
        self.spec = declared
        size = declared.sizes
        biased = declared.biases == "all"
        self.w_q = self.w_k = self.w_o = None
        if declared.score != "position":
            self.w_q = nn.Linear(size.d_model, size.heads * size.d_k, bias=biased)
        if declared.score in ("dot", "additive"):
            self.w_k = nn.Linear(size.d_context, size.kv_heads * size.d_k, bias=biased)
        self.w_v = nn.Linear(size.d_values, size.kv_heads * size.d_v, bias=biased)
        if declared.output:
            self.w_o = nn.Linear(size.heads * size.d_v, size.d_out, bias=declared.biases != "none")
        if declared.score == "additive":
            self.v_score = nn.Parameter(torch.empty(size.heads, size.d_k).normal_(std=size.d_k**-0.5))
        self.sink_logits = nn.Parameter(torch.zeros(size.heads)) if declared.sink_logits else None
        self.extra_k = self.extra_v = None
        if declared.extra_key:
            self.extra_k = nn.Parameter(torch.empty(size.kv_heads * size.d_k).normal_(std=size.d_k**-0.5))
            self.extra_v = nn.Parameter(torch.empty(size.kv_heads * size.d_v).normal_(std=size.d_v**-0.5))
        self.crosses = False  # set where keys and values come from a context: they are then one product
        self.packed: dict[str, Packed] = {}  # set by the training loop, within an update
        self.position: Any = None  # the arguments of a position module depend on where it acts
        if declared.position is not None:
            self.position = positions.build(declared.position, heads=size.heads, d_k=size.d_k, d_v=size.d_v)

    def forward(
        self,
        x: Float[Tensor, "b n d_model"],
        context: Float[Tensor, "b m d_context"] | None = None,
        *,
        values: Float[Tensor, "b m_values d_values"] | None = None,
        lengths: Int[Tensor, " b"] | None = None,
        pattern: Pattern | Tensor | Sequence[Pattern] | Complete | None = None,
        bias: Bias = None,
        cache: KeyValues | None = None,
        at: At | Tensor = None,
        return_weights: bool = False,
        adds_bias: bool = True,
        **foreign: Any,
    ) -> Float[Tensor, "b n d_out"] | tuple[Float[Tensor, "b n d_out"], Float[Tensor, "b h n m"]]:
        """The new vectors; with return_weights also the attention weights, which do not change the output.

        values: the input of the values, where it is not the context. lengths: the number of real keys per row.
        pattern: restricts the declared one further (documents, …); a list has one per head. bias: added to the
        scores, in addition to the layer's own position. at: the query offset. adds_bias: False leaves the bias of w_o
        to the caller.
        """
        if foreign:
            raise not_an_argument_of(self, foreign)
        require_tensors(x=x, context=context, values=values)
        options = (
            values is not None
            or pattern is not None
            or bias is not None
            or cache is not None
            or at is not None
        )
        if x.is_cuda and not (options or return_weights) and self._can_fuse(x, context, lengths):
            return self._output(self._fused(x, context, lengths), adds_bias)
        p = self._project(x, (context, values), lengths, cache, at)
        q, bias, scale = self._score(p, bias)
        arguments: dict[str, Any] = {
            "pattern": self._pattern(pattern, p.at),
            "lengths": p.lengths,
            "bias": bias,
            "scale": scale,
            "softcap": self.spec.softcap,
            "sink_logits": self.sink_logits,
            "ties": self.spec.ties,
            "at": p.at,
        }
        dropout = self.spec.dropout if self.training else 0.0
        extra = self.extra_k is not None
        o: Any = engine.attention(q, p.k, p.v, dropout_p=dropout, return_lse=extra, **arguments)
        on_values = getattr(
            self.spec.position, "values", False
        )  # Shaw's vectors may be added to the values too
        weights = engine.weights(q, p.k, **arguments) if return_weights or on_values else None
        if extra:
            attended, lse = o
            o, weights = self._with_extra_key(q, attended, lse, weights, scale, dropout)
        if on_values:
            o = o + self.position.values(weights, *self._positions(p))
        out = self._output(rearrange(o, "b h n d -> b n (h d)"), adds_bias)
        return out if weights is None or not return_weights else (out, weights)

    def _with_extra_key(self, q, o, lse, weights, scale, dropout):
        """The output and the weights with one more key in the softmax, which every query sees."""
        assert self.extra_k is not None and self.extra_v is not None
        repeats = self.spec.heads // self.spec.sizes.kv_heads
        k, v = (
            rearrange(x, "(h d) -> h 1 d", h=self.spec.sizes.kv_heads).repeat_interleave(repeats, 0)
            for x in (self.extra_k, self.extra_v)
        )
        scores = (q * k).sum(-1) * (q.shape[-1] ** -0.5 if scale is None else scale)
        share = torch.sigmoid(scores - lse)[..., None].to(
            o.dtype
        )  # of the weight, after the softmax over both
        o = (1 - share) * o + F.dropout(share, dropout) * v
        return o, None if weights is None else (1 - share) * weights

    def _can_fuse(self, x: Tensor, context: Tensor | None, lengths: Tensor | None) -> bool:
        """Whether one product for queries, keys and values and one fused kernel compute this call."""
        declared, size, factor = self.spec, self.spec.sizes, self.spec.factor
        if declared.score != "dot" or declared.position is not None or named() != "auto":
            return False
        if declared.softcap is not None or declared.sink_logits or declared.pattern.differs_by_head:
            return False
        if declared.extra_key or size.d_values != size.d_context:
            return False
        if factor is not None and not 0 < factor < inf:
            return False
        projections: Any = (self.w_q, self.w_k, self.w_v)
        if any(type(w) is not nn.Linear for w in projections) or compat.has_hooks(*projections):
            return False
        if self.w_q.out_features != size.heads * size.d_k:  # type: ignore[union-attr]
            return False
        source = x if context is None else context
        self._check_widths(x, source)
        if lengths is not None and (lengths.shape != x.shape[:1] or lengths.device != x.device):
            return False
        return fused_qkv.fits(x, source, max(size.d_k, size.d_v), declared.pattern)

    def _fused(
        self,
        x: Float[Tensor, "b n d_model"],
        context: Float[Tensor, "b m d_context"] | None,
        lengths: Int[Tensor, " b"] | None,
    ) -> Float[Tensor, "b n h_d_v"]:
        size, factor = self.spec.sizes, self.spec.factor
        options = fused_qkv.Options(
            size.heads,
            size.kv_heads,
            size.d_k,
            size.d_v,
            isinstance(self.spec.pattern, causal),
            size.d_k**-0.5 if factor is None else float(factor),
            float(self.spec.dropout) if self.training else 0.0,
        )
        if context is None:
            projected = product(self.packed.get("qkv"), x, (self.w_q, self.w_k, self.w_v))
            return fused_qkv.attend(projected, None, lengths, options)
        q = product(self.packed.get("q"), x, (self.w_q,))
        return fused_qkv.attend(
            q, product(self.packed.get("kv"), context, (self.w_k, self.w_v)), lengths, options
        )

    def _output(self, o: Float[Tensor, "b n h_d_v"], adds_bias: bool) -> Float[Tensor, "b n d_out"]:
        return o if self.w_o is None else product(self.packed.get("o"), o, (self.w_o,), adds_bias)

    def packs(self) -> dict[str, list[Any]]:
        """The linear layers that are one product each, by name."""
        groups: dict[str, list[Any]] = {} if self.w_o is None else {"o": [self.w_o]}
        size = self.spec.sizes
        if self.spec.score != "dot" or self.spec.position is not None or size.d_values != size.d_context:
            return groups
        if self.crosses:
            return {"q": [self.w_q], "kv": [self.w_k, self.w_v], **groups}
        if size.d_context != size.d_model:
            return groups
        return {"qkv": [self.w_q, self.w_k, self.w_v], **groups}

    def _project(self, x, inputs, lengths, cache, at) -> Projected:
        p = self._projected(x, inputs, lengths, cache, at)
        heads, kv_heads = p.q.shape[1], p.k.shape[1]
        if heads != self.spec.heads or kv_heads != self.spec.sizes.kv_heads:
            self._require_share(heads, kv_heads)
        return p

    def _projected(self, x, inputs, lengths, cache, at) -> Projected:
        context, values = inputs
        source = x if context is None else context
        values = source if values is None else values
        self._check_widths(x, source, values)
        if context is None:
            at = at if cache is None else cache.offset
            q, k, v = (
                self._rotated(self._queries(x), at),
                self._rotated(self._keys(x), at),
                self._values(values),
            )
            if cache is not None:
                k, v, lengths = cache.append(k, v, lengths)
            return Projected(q, k, v, lengths, at)
        q = self._queries(x)
        if cache is not None and cache.filled:
            k, v = cache.k, cache.v  # of the context, computed at the first step
        else:
            k, v = self._rotated(self._keys(context), 0), self._values(values)
            if cache is not None:
                k, v, lengths = cache.append(k, v, lengths)
        if at is None and q.shape[-2] > k.shape[-2]:
            at = 0  # two different sequences: their positions are not compared
        return Projected(self._rotated(q, at, k.shape[-2] - q.shape[-2]), k, v, lengths, at)

    def _rotated(
        self, x: Float[Tensor, "b h n d"], at: At | Tensor, default: int = 0
    ) -> Float[Tensor, "b h n d"]:
        """Queries or keys with rotary positions from the offset `at` on, or from `default` on."""
        if self.spec.position is None or self.spec.position.acts != "query_key":
            return x
        if isinstance(at, Tensor):
            return self.position(x, _offset_positions(at, x.shape[-2], default, x.device))
        return self.position.along(x, *_start_and_step(at, default))

    def _queries(self, x: Float[Tensor, "b n d_model"]) -> Float[Tensor, "b h n d_k"]:
        if self.w_q is None:  # the scores are those of the position alone
            return x.new_zeros(x.shape[0], self.spec.heads, x.shape[1], 1)
        return self._heads("w_q", x, self.spec.sizes.d_k)

    def _keys(self, source: Float[Tensor, "b m d_context"]) -> Float[Tensor, "b h_kv m d_k"]:
        kv_heads = self.spec.sizes.kv_heads
        match self.spec.score:
            case "position":
                return source.new_zeros(source.shape[0], kv_heads, source.shape[1], 1)
            case "bilinear":  # q·W·k: the keys are the input itself
                return rearrange(source, "b m d -> b 1 m d").expand(-1, kv_heads, -1, -1)
        return self._heads("w_k", source, self.spec.sizes.d_k)

    def _values(self, source: Float[Tensor, "b m d_values"]) -> Float[Tensor, "b h_kv m d_v"]:
        return self._heads("w_v", source, self.spec.sizes.d_v)

    def _heads(self, name: str, x: Float[Tensor, "b m d_in"], width: int) -> Float[Tensor, "b h m {width}"]:
        """The product with this projection, by heads: all of them, or those of this process in tensor parallelism."""
        columns = getattr(self, name)(x)
        if columns.shape[-1] % width:
            raise ShapeError(
                f"{name} gives {columns.shape[-1]} columns, which are not heads of {width}: split it by whole heads"
            )
        return rearrange(columns, "b m (h d) -> b h m d", d=width)

    def _require_share(self, heads: int, kv_heads: int) -> None:
        """Refuse projections with other heads than declared, unless they are a share that is complete by itself."""
        size, declared = self.spec.sizes, self.spec
        got = f"w_q gives {heads} of {size.heads} heads and w_k {kv_heads} of {size.kv_heads}"
        if heads * size.kv_heads != kv_heads * size.heads and size.kv_heads != 1:
            raise ShapeError(
                f"{got}: split both in the same proportion, so that a query head finds its key/value head"
            )
        scores = declared.position is not None and declared.position.acts == "score"
        by_head = {
            f"pattern={declared.pattern!r}": declared.pattern.differs_by_head,
            f"score={declared.score!r}": declared.score not in ("dot", "bilinear"),
            repr(declared.position): scores,
            "sink_logits=True": declared.sink_logits,
            "extra_key=True": declared.extra_key,
        }
        if named := [name for name, present in by_head.items() if present]:
            raise ShapeError(
                f"{got}, but {named[0]} is for all {size.heads} heads; split heads between processes without it: "
                "with one pattern, and with position=rope() or no position"
            )

    def _score(self, p: Projected, bias: Bias) -> tuple[Tensor, Bias, int | float | None]:
        """The queries, the bias and the scale: a score that is not a dot product becomes a bias with zero queries."""
        factor = self.spec.factor
        if self.spec.score == "additive":
            scores = tanh_scores(p.q, repeat_heads(p.k, self.spec.heads), self.v_score)
            hard = factor == inf
            finite = 1.0 if factor is None or hard else factor
            return torch.zeros_like(p.q), _add(finite * scores, bias), inf if hard else None
        if self.spec.position is not None and self.spec.position.acts == "score":
            q_at, k_at = self._positions(p)
            own = self.position.by_distance(_max_distance(p), p.q.device) if q_at.dim() == 1 else None
            scale = p.q.shape[-1] ** -0.5 if factor is None else factor
            if own is None or bias is not None:
                own = self.position(q_at, k_at, p.q, scale)
            return p.q, _add(own, bias), factor
        return p.q, bias, factor

    def _positions(self, p: Projected) -> tuple[Int[Tensor, "*b n"], Int[Tensor, " m"]]:
        n, m = p.q.shape[-2], p.k.shape[-2]
        return _offset_positions(p.at, n, m - n, p.q.device), torch.arange(m, device=p.q.device)

    def _pattern(
        self, given: Pattern | Tensor | Sequence[Pattern] | Complete | None, at: At | Tensor
    ) -> Pattern | Tensor | None:
        own = self.spec.pattern
        if given is None:
            return own
        if isinstance(given, Complete):
            return given.pairs
        if isinstance(given, list | tuple):
            given = per_head(given)
        if isinstance(given, Pattern):
            return own & given
        if not isinstance(given, Tensor) or given.dtype != torch.bool:
            refused: Any = given  # by rg.attention
            return refused
        return given & own.allowed(given.shape[-2], given.shape[-1], at, given.device)

    def _check_widths(self, x: Tensor, source: Tensor, values: Tensor | None = None) -> None:
        size = self.spec.sizes
        if x.dim() != 3:
            raise ShapeError(f"x of shape (b, n, d_model) is needed, not {tuple(x.shape)}")
        if x.shape[-1] != size.d_model:
            raise ShapeError(f"x has width {x.shape[-1]}; this attention takes d_model={size.d_model}")
        if source.shape[-1] != size.d_context:
            raise ShapeError(
                f"the context has width {source.shape[-1]}; declared is d_context={size.d_context}"
            )
        if values is not None and values.shape[-1] != size.d_values:
            raise ShapeError(
                f"the values' input has width {values.shape[-1]}; declared is d_values={size.d_values}: pass values=…"
            )
        if values is not None and values.shape[-2] != source.shape[-2]:
            raise ShapeError(f"{source.shape[-2]} keys and {values.shape[-2]} values; each key has one value")


def _start_and_step(at: At, default: int) -> tuple[int, int]:
    """The first position and the step."""
    return at if isinstance(at, tuple) else (default if at is None else at, 1)


def _offset_positions(at: At | Tensor, n: int, default: int, device: torch.device) -> Int[Tensor, "*b n"]:
    """The positions of n vectors: from `at`, or from `default` on."""
    index = torch.arange(n, device=device)
    if isinstance(at, Tensor):
        return at[:, None] + index
    start, step = _start_and_step(at, default)
    return start + step * index


def _max_distance(p: Projected) -> int:
    """The largest distance between a query and a key; `at` is not a tensor."""
    n, m = p.q.shape[-2], p.k.shape[-2]
    assert not isinstance(p.at, Tensor)
    start, step = _start_and_step(p.at, m - n)
    return max(m - 1, abs(start), abs(start + step * (n - 1)), abs(m - 1 - start))


def _add(own: Bias, bias: Bias) -> Bias:
    if bias is None:
        return own
    if isinstance(bias, Tensor) and isinstance(own, Tensor):
        return own + bias
    raise ShapeError(
        "two biases by distance cannot be combined; declare the stack's position or the layer's, not both"
    )
