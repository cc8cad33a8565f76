"""Inference of unmodified stacks on a CPU with little overhead: decoding token by token, encoding without padding.

The matrix products are those of the modules, with less around them: one product for q, k and v, packed weights,
positions from a cached table, no plan where one query attends to all earlier keys. `supports`
says for which stacks the results are the same.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import groupby, pairwise
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from .. import compat, spec
from ..nn.attention import MultiHeadAttention
from ..nn.block import Block
from ..nn.cache import KeyValues, LayerCache
from ..nn.embedding import Embedding, LanguageHead
from ..nn.feed_forward import ACTIVATIONS, FeedForward
from ..nn.position import Learned, Sinusoidal
from ..nn.stack import Stack
from ..pattern import Pattern
from .products import ConstantLinear

Map = Callable[[Tensor], Tensor]
MIN_GROUP = 8  # rows of similar length that attention takes at once, where there are as many
MAX_PARTS = 4  # of the rows in cross-attention
MIN_KEYS = (
    16  # of a part, where there are as many: softmax over fewer is not vectorized and takes up to 8 × as long
)
SLOTS_BETWEEN = 24  # slots that beams add to a row before those that no beam attends to are removed
SUPPORTED = {Stack, Block, MultiHeadAttention, FeedForward, Embedding, LanguageHead, Sinusoidal, Learned}
SUPPORTED |= {nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Identity, nn.ModuleList}


def supports(stack: Stack, pattern: Pattern) -> bool:
    """Whether this file gives what the modules give.

    The modules are as they were built (no part replaced, no hooks) on a CPU, in float32 or float64; attention is
    softmax(scale · q·k) over `pattern`, and every branch has its residual connection.
    """
    declared, block, modules = stack.spec, stack.spec.block, list(stack.modules())
    return (
        all(type(m) in SUPPORTED for m in modules)
        and not compat.has_hooks(*modules)
        and declared.embedding is not None
        and getattr(declared.embedding.position, "grid", None) is None
        and block.attention.pattern == pattern
        and all(_is_dot_product(a) for a in (block.attention, block.cross) if a is not None)
        and block.residual
        and stack.embedding.table.device.type == "cpu"
        and stack.embedding.table.dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled("cpu")
    )


def _is_dot_product(a: spec.Attention) -> bool:
    """Whether the weights are softmax(scale · q·k), without anything else in the scores or in the softmax."""
    alone = a.score == "dot" and a.position is None and a.softcap is None
    alone = alone and not (a.sink_logits or a.extra_key)
    return alone and (a.factor is None or 0 < a.factor < torch.inf)


class SingleQueryAttention:
    """Attention of one query per batch row, without the output projection."""

    def __init__(self, module: MultiHeadAttention, own: bool):
        size, parts = module.spec.sizes, _projections(module)
        self.kv_heads, self.d_k = size.kv_heads, size.d_k
        self.scale = _scale(module.spec)
        self.widths = [w.out_features for w in parts]
        self.into = ConstantLinear.of(*parts) if own else ConstantLinear.of(parts[0])
        self.context = None if own else ConstantLinear.of(*parts[1:])
        self.out = None if module.w_o is None else ConstantLinear.of(module.w_o)
        self.no_bias = parts[0].weight.new_empty(1)  # not read: beta is 0

    def own(
        self, x: Float[Tensor, "b d"], cache: KeyValues, bias: Float[Tensor, "bh w m"] | None
    ) -> Float[Tensor, "b h_d_v"]:
        """Self-attention: a new position attends to itself and to all earlier ones.

        Where x has several rows per row of the cache, those of one row share its slots, and bias hides the others'.
        """
        q, k, v = self.into(x).split_with_sizes(self.widths, -1)
        rows = cache.rows or x.shape[0]
        shape = (rows, x.shape[0] // rows, self.kv_heads, -1)
        k, v, _ = cache.append(k.view(shape).transpose(1, 2), v.view(shape).transpose(1, 2))
        return self._attend(q, k.flatten(0, 1).transpose(1, 2), v.flatten(0, 1), bias)

    def cross(self, x: Float[Tensor, "b d"], parts: "list[ContextPart]") -> Float[Tensor, "b h_d_v"]:
        """Cross-attention to the context, whose keys and values the parts hold.

        x may have several times as many rows as there are contexts: those of one context follow each other.
        """
        q = self.into(x)
        if len(parts) == 1:
            return self._attend(q, parts[0].k, parts[0].v, parts[0].bias)
        split = q.split_with_sizes([part.rows * len(x) // parts[0].of for part in parts])
        return torch.cat(
            [self._attend(q, part.k, part.v, part.bias) for q, part in zip(split, parts, strict=True)]
        )

    def read(self, context: Float[Tensor, "t d"], rows: "Rows", cache: KeyValues) -> None:
        """Write the context's keys and values into the cache."""
        assert self.context is not None
        k, v = rows.pad(self.context(context)).split(self.widths[1:], -1)
        cache.k, cache.v = (
            rearrange(t, "b m (h d) -> b h m d", h=self.kv_heads).contiguous() for t in (k, v)
        )
        cache.filled = cache.k.shape[2]

    def _attend(
        self,
        q: Float[Tensor, "b h_d_k"],
        keys: Float[Tensor, "ch d_k m"],
        v: Float[Tensor, "ch m d_v"],
        bias: Float[Tensor, "ch w m"] | None,
    ) -> Float[Tensor, "b h_d_v"]:
        """With one query per row its axis is free for the heads that share keys and values, and for the rows that
        share a context.
        """
        rows, contexts = q.shape[0], keys.shape[0] // self.kv_heads
        beams = rows // contexts
        if beams > 1:
            bias = bias if bias is None else self._for_groups(bias)
            q = q.view(contexts, beams, self.kv_heads, -1).transpose(1, 2)
        q = q.reshape(contexts * self.kv_heads, -1, self.d_k)
        beta, bias = (0, self.no_bias) if bias is None else (1, bias)
        weights = torch.baddbmm(bias, q, keys, beta=beta, alpha=self.scale).softmax(-1)
        o = torch.bmm(weights, v)
        if beams > 1:
            o = o.view(contexts, self.kv_heads, beams, -1).transpose(1, 2)
        return o.reshape(rows, -1)

    def _for_groups(self, bias: Float[Tensor, "bh w m"]) -> Float[Tensor, "bh w_g m"]:
        """The bias of each beam for the query heads that share keys and values."""
        groups = self.widths[0] // (self.kv_heads * self.d_k)
        return bias if groups == 1 or bias.shape[1] == 1 else bias.repeat_interleave(groups, 1)


class FeedForwardLayer:
    """The feed-forward network of a block, and how its branches are added."""

    def __init__(self, block: Block):
        self.pre = block.spec.norm_at == "pre"
        self.out: ConstantLinear | None = None
        if block.spec.feed_forward is not None:
            mlp, self.out_norm = block.feed_forward, _norm(block.feed_forward_norm)
            self.gated, self.out = mlp.w_gate is not None, ConstantLinear.of(mlp.w_out)
            self.into = (
                ConstantLinear.of(mlp.w_in) if mlp.w_gate is None else ConstantLinear.of(mlp.w_gate, mlp.w_in)
            )
            name = mlp.spec.activation
            # Its input is a temporary, so it may be overwritten.
            self.f = torch.relu_ if name == "relu" else ACTIVATIONS[name]

    def feed_forward(self, x: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        return x if self.out is None else self._branch(x, self.out_norm, self._inner, self.out)

    def _inner(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.f(self.into(x))
        gate, inner = self.into(x).chunk(2, -1)
        return self.f(gate).mul_(inner)

    def _branch(self, x: Tensor, norm: Map, f: Map, out: ConstantLinear | None) -> Tensor:
        y = f(norm(x) if self.pre else x)
        x.add_(y) if out is None else out.add_to(x, y)
        return x if self.pre else norm(x)


class Layer(FeedForwardLayer):
    """One block for one position per batch row."""

    def __init__(self, block: Block):
        super().__init__(block)
        self.own, self.own_norm = SingleQueryAttention(block.attention, own=True), _norm(block.attention_norm)
        self.cross: SingleQueryAttention | None = None
        if block.spec.cross is not None:
            self.cross, self.cross_norm = (
                SingleQueryAttention(block.cross, own=False),
                _norm(block.cross_norm),
            )

    def step(
        self,
        x: Float[Tensor, "b d"],
        cache: LayerCache,
        bias: Tensor | None,
        parts: "list[ContextPart]",
    ) -> Float[Tensor, "b d"]:
        """The new states; x is overwritten. parts: of the context, empty where there is none."""
        x = self._branch(x, self.own_norm, lambda x: self.own.own(x, cache.own, bias), self.own.out)
        if (cross := self.cross) is not None:
            x = self._branch(x, self.cross_norm, lambda x: cross.cross(x, parts), cross.out)
        return self.feed_forward(x)


def _norm(module: nn.Module) -> Map:
    """The norm without nn.Module's overhead: ten such calls are a tenth of a step's time outside products."""
    match module:
        case nn.LayerNorm():
            shape, weight, bias, eps = module.normalized_shape, module.weight, module.bias, module.eps
            return lambda x: torch.layer_norm(x, shape, weight, bias, eps)
        case nn.Identity():
            return lambda x: x
    return module


T = TypeVar("T")
_prepared: ContextVar[dict[Stack, Any] | None] = ContextVar("prepared", default=None)


@contextmanager
def weights_unchanged() -> Iterator[None]:
    """A context in which no weight changes, so that weights are prepared once for all calls in it."""
    token = _prepared.set({})
    try:
        yield
    finally:
        _prepared.reset(token)


def _prepared_once(stack: Stack, make: Callable[[], T]) -> T:
    """What `make` returns for a stack; inside `weights_unchanged` it is made once."""
    prepared = _prepared.get()
    if prepared is None:
        return make()
    if stack not in prepared:
        prepared[stack] = make()
    return prepared[stack]


def token_decoder(stack: Stack) -> "TokenDecoder":
    """The decoder of a stack."""
    return _prepared_once(stack, lambda: TokenDecoder(stack))


class ContextPart(NamedTuple):
    """The keys and values of some rows' contexts, as long as the longest, and −∞ at the padding of shorter ones."""

    rows: int
    of: int  # rows in all parts
    k: Float[Tensor, "rh d_k m"]
    v: Float[Tensor, "rh m d_v"]
    bias: Float[Tensor, "rh 1 m"] | None


def _cut(cache: KeyValues, spans: list[tuple[int, int, int, Tensor | None]]) -> list[ContextPart]:
    """Views of a cache: for each part the first row and the end, its number of keys, and its bias."""
    assert cache.k is not None and cache.v is not None
    rows, heads = cache.k.shape[:2]
    keys, values = cache.k.flatten(0, 1).transpose(1, 2), cache.v.flatten(0, 1)
    return [
        ContextPart(
            end - first,
            rows,
            keys.narrow(0, first * heads, (end - first) * heads).narrow(2, 0, m),
            values.narrow(0, first * heads, (end - first) * heads).narrow(1, 0, m),
            bias,
        )
        for first, end, m, bias in spans
    ]


class TokenDecoder:
    """A decoder stack that gives logits after one more token of each row."""

    def __init__(self, stack: Stack):
        assert isinstance(stack.head, LanguageHead)
        self.embedding, self.norm = CachedEmbedding(stack.embedding), _norm(stack.norm)
        self.layers = [Layer(block) for block in _blocks(stack)]
        _, table, bias = stack.head.inputs(stack.embedding.table[:1], stack.embedding.table)
        self.dtype, self.logits = table.dtype, ConstantLinear([table], bias)
        self.factor = stack.head.factor

    def read(
        self, context: Float[Tensor, "b m d"], lengths: Int[Tensor, " b"] | None, caches: list[LayerCache]
    ) -> None:
        """Write the context's keys and values into the caches, before the first token."""
        rows = Rows(len(context), context.shape[1], lengths)
        real = rows.concatenate(context)
        for layer, cache in zip(self.layers, caches, strict=True):
            if layer.cross is not None:
                layer.cross.read(real, rows, cache.cross)

    def context_parts(
        self, lengths: Int[Tensor, " b"] | None, caches: list[LayerCache]
    ) -> list[list[ContextPart]]:
        """For each layer the rows' contexts in parts; few where the rows are sorted by length."""
        if self.layers[0].cross is None:
            return [[] for _ in caches]
        heads, rows, most = self.layers[0].cross.kv_heads, caches[0].cross.rows, caches[0].cross.filled
        spans: list[tuple[int, int, int, Tensor | None]] = [(0, rows, most, None)]  # rows, keys, bias
        if lengths is not None:
            bias, real = self._padding_bias(lengths, most, heads), lengths.tolist()
            count = max(1, min(MAX_PARTS, rows // MIN_GROUP))
            ends = [i * rows // count for i in range(count + 1)]
            spans = []
            for first, end in pairwise(ends):
                part = real[first:end]
                keys = max(max(part), min(MIN_KEYS, most))
                of_part = None if min(part) == keys else bias[first * heads : end * heads, :, :keys]
                spans.append((first, end, keys, of_part))
        return [_cut(cache.cross, spans) for cache in caches]

    def next(
        self,
        ids: Int[Tensor, " b"],
        caches: list[LayerCache],
        parts: list[list[ContextPart]],
        beams: "Beams | None" = None,
    ) -> Float[Tensor, "b vocab"]:
        """Logits after one more token. parts: of the context, for each layer."""
        own, heads = caches[0].own, self.layers[0].own.kv_heads
        position, bias = own.offset, None
        if beams is not None:
            position, bias = beams.position, beams.append(heads, self.dtype)
        elif isinstance(position, Tensor):
            bias = self._padding_bias(position + 1, own.filled + 1, heads)
        x = self.embedding(ids, position, own.filled + 1)
        for layer, cache, of_layer in zip(self.layers, caches, parts, strict=True):
            x = layer.step(x, cache, bias, of_layer)
        x = self.norm(x)
        return self.logits(x if self.factor == 1 else x * self.factor)

    def _padding_bias(self, lengths: Int[Tensor, " b"], m: int, heads: int) -> Float[Tensor, "bh 1 m"]:
        """−∞ at keys past each row's length, repeated for each head."""
        past = torch.arange(m) >= lengths[:, None]
        bias = torch.zeros(past.shape, dtype=self.dtype).masked_fill_(past, -torch.inf)
        return bias.repeat_interleave(heads, 0)[:, None]


class Beams:
    """Beams whose keys and values share the slots of their row: nothing is copied when beams are selected.

    Each step adds one slot per beam to a row. A beam attends to the slots of its own past, which are a path in the
    tree of all tokens that the beams of the row have written. Slots of abandoned branches are removed now and then.
    """

    def __init__(self, rows: int, width: int, filled: int):
        self.position = filled  # of the next token
        self.removed_at = filled  # the number of slots when unused ones were last removed
        self.past = torch.ones(rows, width, filled, dtype=torch.bool)  # whether a slot belongs to a beam
        self.own = torch.eye(width, dtype=torch.bool)

    def append(self, heads: int, dtype: torch.dtype) -> Float[Tensor, "bh w m"]:
        """Add a slot for each beam; returns 0 at the slots of a beam's past and −∞ elsewhere, for each head."""
        rows, width, _ = self.past.shape
        self.past = torch.cat([self.past, self.own.expand(rows, width, width)], 2)
        self.position += 1
        bias = torch.zeros(self.past.shape, dtype=dtype).masked_fill_(~self.past, -torch.inf)
        return bias[:, None].expand(-1, heads, -1, -1).reshape(rows * heads, width, -1)

    def select(self, beams: Int[Tensor, " r"]) -> None:
        """Keep the past of these beams, as many for each row as before."""
        width = self.past.shape[1]
        self.past = self.past.flatten(0, 1)[beams].unflatten(0, (-1, width))

    def remove_unused(self, caches: list[LayerCache]) -> None:
        """Remove slots that belong to no beam, as many from each row, where enough were added since the last time."""
        if self.past.shape[2] < self.removed_at + SLOTS_BETWEEN:
            return
        used = self.past.any(1)
        self.removed_at = int(used.sum(1).max())
        slots = used.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, : self.removed_at]
        self.past = self.past.gather(2, slots[:, None].expand(-1, self.past.shape[1], -1))
        for cache in caches:
            cache.own.keep_slots(slots)


class CachedEmbedding:
    """An embedding with a cached table of positions, twice as long as was needed so far."""

    def __init__(self, embedding: Embedding):
        self.embedding, self.norm = embedding, _norm(embedding.norm)
        self.factor = embedding.spec.d_model**0.5 if embedding.spec.scaled else 1.0
        self.table: Float[Tensor, "n d"] | None = None

    def __call__(
        self, ids: Int[Tensor, " t"], positions: int | Int[Tensor, " t"], length: int
    ) -> Float[Tensor, "t d"]:
        """The embedding of these ids at these positions, all below `length`."""
        if self.table is None or len(self.table) < length:
            self.table = self._position_table(length)
        x = torch.embedding(self.embedding.table, ids)
        return self.norm(torch.add(self.table[positions], x, alpha=self.factor))

    def _position_table(self, length: int) -> Float[Tensor, "n d"]:
        declared, like = self.embedding.spec, self.embedding.table
        size = min(max(2 * length, 64), getattr(declared.position, "entries", 2 * length + 64))
        x = like.new_zeros(1, size, declared.d_model)
        if self.embedding.position is not None:
            x = self.embedding.position(x, torch.arange(size), size)
        return x[0] if self.embedding.types is None else x[0] + self.embedding.types[0]


class Rows:
    """Rows of different lengths: their real positions concatenated, or padded to (b, m)."""

    def __init__(self, b: int, m: int, lengths: Int[Tensor, " b"] | None):
        self.b, self.real, self.slot = b, None, None
        if lengths is not None:
            inside = torch.arange(m) < lengths[:, None]
            self.real = inside.flatten().nonzero()[:, 0]  # flat indices of the real positions
            self.slot = (inside.flatten().cumsum(0) - 1).clamp_(
                min=0
            )  # for each flat index, the real position to read

    def pad(self, x: Float[Tensor, "t d"]) -> Float[Tensor, "b m d"]:
        """(b, m, d); padding holds a copy of another position and must not be attended to."""
        return (x if self.slot is None else x.index_select(0, self.slot)).unflatten(0, (self.b, -1))

    def concatenate(self, x: Shaped[Tensor, "b m *d"]) -> Shaped[Tensor, "t *d"]:
        """The real positions of all rows, one after another."""
        return x.flatten(0, 1) if self.real is None else x.flatten(0, 1).index_select(0, self.real)


def encode(
    stack: Stack, ids: Int[Tensor, "b m"], lengths: Int[Tensor, " b"] | None
) -> Float[Tensor, "b m d"]:
    """stack(ids, lengths=lengths) without work on padding; the states there are undefined."""
    (b, m), order = ids.shape, None
    groups = [(b, m)]  # rows, and the length of each
    if lengths is not None:  # rows of equal length follow each other, and attend without padding
        lengths, order = lengths.sort()
        ids = ids[order]
        groups = [(len(list(same)), n) for n, same in groupby(lengths.tolist()) if n]
    rows = Rows(b, m, lengths)
    positions = rows.concatenate(torch.arange(m).expand(b, m))
    x = CachedEmbedding(stack.embedding)(rows.concatenate(ids), positions, m)
    for layer in _prepared_once(stack, lambda: [EncoderLayer(block) for block in _blocks(stack)]):
        x = layer(x, groups)
    states = rows.pad(stack.norm(x))
    return states if order is None else states[order.argsort()]


class EncoderLayer(FeedForwardLayer):
    """One block for the concatenated positions of all rows."""

    def __init__(self, block: Block):
        super().__init__(block)
        self.norm, module = _norm(block.attention_norm), block.attention
        size, parts = module.spec.sizes, _projections(module)
        self.heads, self.scale = (size.heads, size.kv_heads, size.kv_heads), _scale(module.spec)
        self.widths, self.project = [w.out_features for w in parts], ConstantLinear.of(*parts)
        self.project_out = None if module.w_o is None else ConstantLinear.of(module.w_o)

    def __call__(self, x: Float[Tensor, "t d"], groups: list[tuple[int, int]]) -> Float[Tensor, "t d"]:
        """The new states; x is overwritten. groups: how many rows of which length follow each other."""
        x = self._branch(x, self.norm, lambda x: self._attend(x, groups), self.project_out)
        return self.feed_forward(x)

    def _attend(self, x: Float[Tensor, "t d"], groups: list[tuple[int, int]]) -> Float[Tensor, "t h_d_v"]:
        """Every position attends to all positions of its row."""
        parts = self.project(x).split([rows * n for rows, n in groups])
        found = [self._attend_in(part, rows) for part, (rows, _) in zip(parts, groups, strict=True)]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _attend_in(self, projected: Float[Tensor, "t w"], rows: int) -> Float[Tensor, "t h_d_v"]:
        # Views, since einops costs as much as a short product, a hundred times in an encoder.
        split = zip(projected.split_with_sizes(self.widths, -1), self.heads, strict=True)
        q, k, v = (t.view(rows, -1, h, t.shape[1] // h).transpose(1, 2) for t, h in split)
        grouped = self.heads[0] != self.heads[1]
        o = F.scaled_dot_product_attention(q, k, v, scale=self.scale, enable_gqa=grouped)
        return o.transpose(1, 2).reshape(len(projected), -1)


def _projections(module: MultiHeadAttention) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    assert module.w_q is not None and module.w_k is not None
    return module.w_q, module.w_k, module.w_v


def _scale(declared: spec.Attention) -> float:
    return declared.sizes.d_k**-0.5 if declared.factor is None else float(declared.factor)


def _blocks(stack: Stack) -> list[Block]:
    return [block for block in stack.blocks if isinstance(block, Block)]
