"""The quick way through plain stacks on a CPU: a decoder one token at a time, an encoder without its padding.

The products are those of the modules, with less around them: one product for q, k and v, weights laid out for few
rows, positions from a table made once, no plan where one query looks at all that came before. `covers` says where
that is the same.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from .. import spec
from ..nn.attention import MultiHeadAttention
from ..nn.block import Block
from ..nn.cache import KeyValues, LayerCache
from ..nn.embedding import Embedding, LanguageHead
from ..nn.feed_forward import ACTIVATIONS, FeedForward
from ..nn.position import Learned, Sinusoidal
from ..nn.stack import Stack
from ..pattern import Pattern

Map = Callable[[Tensor], Tensor]
PLAIN = {Stack, Block, MultiHeadAttention, FeedForward, Embedding, LanguageHead, Sinusoidal, Learned}
PLAIN |= {nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Identity, nn.ModuleList}


def covers(stack: Stack, pattern: Pattern) -> bool:
    """Whether the quick way says what the modules say.

    They are as they were built (no part exchanged, nobody listening) on a CPU, in float32 or float64; attention is
    softmax(scale · q·k) over `pattern`, and every branch is added to its input.
    """
    declared, block, modules = stack.spec, stack.spec.block, list(stack.modules())
    return (
        all(type(m) in PLAIN and not m._forward_hooks and not m._forward_pre_hooks for m in modules)
        and declared.embedding is not None
        and getattr(declared.embedding.position, "grid", None) is None
        and block.attention.pattern == pattern
        and all(_plain(a) for a in (block.attention, block.cross) if a is not None)
        and block.residual
        and stack.embedding.table.device.type == "cpu"
        and stack.embedding.table.dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled("cpu")
    )


def _plain(a: spec.Attention) -> bool:
    return a.score == "dot" and a.position is None and (a.factor is None or 0 < a.factor < torch.inf)


class Turned:
    """Linear maps side by side, the weight as (d_in, d_out): a product of 64 rows with it is a quarter faster."""

    def __init__(self, *layers: nn.Linear):
        self.weight = torch.cat([layer.weight for layer in layers]).t().contiguous()
        bias = layers[0].bias
        self.bias = None if bias is None else torch.cat([layer.bias for layer in layers])

    def __call__(self, x: Float[Tensor, "b d_in"]) -> Float[Tensor, "b d_out"]:
        y = torch.mm(x, self.weight)
        return y if self.bias is None else y.add_(self.bias)

    def onto(self, x: Float[Tensor, "b d_out"], y: Float[Tensor, "b d_in"]) -> None:
        """x ← x + y W + b."""
        x.addmm_(y, self.weight)
        if self.bias is not None:
            x.add_(self.bias)


class Look:
    """One attention for one query a row, up to its output projection."""

    def __init__(self, module: MultiHeadAttention, own: bool):
        size, parts = module.spec.sizes, _parts(module)
        self.module, self.kv_heads, self.d_k = module, size.kv_heads, size.d_k
        self.scale = _scale(module.spec)
        self.widths = [w.out_features for w in parts]
        self.into = Turned(*parts) if own else Turned(parts[0])
        self.out = None if module.w_o is None else Turned(module.w_o)
        self.unread = self.into.weight.new_empty(1)

    def own(
        self, x: Float[Tensor, "b d"], kept: KeyValues, hidden: Float[Tensor, "bh 1 m"] | None
    ) -> Float[Tensor, "b h_d_v"]:
        """A new position looks at itself and at all that came before."""
        q, k, v = self.into(x).split_with_sizes(self.widths, -1)
        one_more = (x.shape[0], self.kv_heads, 1, -1)
        k, v, _ = kept.append(k.reshape(one_more), v.reshape(one_more))
        return self._at(q, k, v, hidden)

    def cross(
        self, x: Float[Tensor, "b d"], kept: KeyValues, hidden: Float[Tensor, "bh 1 m"] | None
    ) -> Float[Tensor, "b h_d_v"]:
        """It looks at the context."""
        assert kept.k is not None and kept.v is not None
        return self._at(self.into(x), kept.k, kept.v, hidden)

    def read(self, context: Float[Tensor, "t d"], rows: "Rows", kept: KeyValues) -> None:
        """The context's keys and values, once."""
        both = (rows.wide(w(context)) for w in _parts(self.module)[1:])
        k, v = (rearrange(t, "b m (h d) -> b h m d", h=self.kv_heads) for t in both)
        kept.append(k, v)

    def _at(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        """One query needs no axis of its own: the heads that share keys stand there."""
        b = q.shape[0]
        q = q.reshape(b * self.kv_heads, -1, self.d_k)
        beta, start = (0, self.unread) if hidden is None else (1, hidden)
        keys = k.flatten(0, 1).transpose(1, 2)
        weights = torch.baddbmm(start, q, keys, beta=beta, alpha=self.scale).softmax(-1)
        return torch.bmm(weights, v.flatten(0, 1)).reshape(b, -1)


class Layer:
    """One block for one position a row."""

    def __init__(self, block: Block):
        self.pre = block.spec.norm_at == "pre"
        self.own, self.own_norm = Look(block.attention, own=True), _norm(block.attention_norm)
        self.cross: Look | None = None
        if block.spec.cross is not None:
            self.cross, self.cross_norm = Look(block.cross, own=False), _norm(block.cross_norm)
        self.out: Turned | None = None
        if block.spec.feed_forward is not None:
            mlp, self.out_norm = block.feed_forward, _norm(block.feed_forward_norm)
            self.gated, self.out = mlp.w_gate is not None, Turned(mlp.w_out)
            self.into = Turned(mlp.w_in) if mlp.w_gate is None else Turned(mlp.w_gate, mlp.w_in)
            name = mlp.spec.activation
            # What it is given nobody else holds, so it may be written over.
            self.f = torch.relu_ if name == "relu" else ACTIVATIONS[name]

    def step(
        self, x: Float[Tensor, "b d"], kept: LayerCache, hidden: Tensor | None, beyond: Tensor | None
    ) -> Float[Tensor, "b d"]:
        """The new states; x itself is written over."""
        x = self._branch(x, self.own_norm, lambda x: self.own.own(x, kept.own, hidden), self.own.out)
        if (cross := self.cross) is not None:
            x = self._branch(x, self.cross_norm, lambda x: cross.cross(x, kept.cross, beyond), cross.out)
        return x if self.out is None else self._branch(x, self.out_norm, self._inner, self.out)

    def _inner(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.f(self.into(x))
        gate, inner = self.into(x).chunk(2, -1)
        return self.f(gate).mul_(inner)

    def _branch(self, x: Tensor, norm: Map, f: Map, out: Turned | None) -> Tensor:
        y = f(norm(x) if self.pre else x)
        if out is None:
            x.add_(y)
        else:
            out.onto(x, y)
        return x if self.pre else norm(x)


def _norm(module: nn.Module) -> Map:
    """The norm without the calls around it: ten of them are a tenth of what a step costs beside its products."""
    match module:
        case nn.LayerNorm():
            shape, weight, bias, eps = module.normalized_shape, module.weight, module.bias, module.eps
            return lambda x: torch.layer_norm(x, shape, weight, bias, eps)
    return module


class QuickDecoder:
    """A plain decoder: logits for one more token of each row."""

    def __init__(self, stack: Stack):
        assert isinstance(stack.head, LanguageHead)
        self.stack, self.places = stack, Places(stack.embedding)
        self.layers = [Layer(block) for block in _blocks(stack)]
        _, table, self.bias = stack.head.inputs(stack.embedding.table[:1], stack.embedding.table)
        self.table, self.factor = table.t().contiguous(), stack.head.factor

    def read(
        self, context: Float[Tensor, "b m d"], lengths: Int[Tensor, " b"] | None, kept: list[LayerCache]
    ) -> None:
        """The context, before the first token."""
        rows = Rows(len(context), context.shape[1], lengths)
        real = rows.narrow(context)
        for layer, one in zip(self.layers, kept, strict=True):
            if layer.cross is not None:
                layer.cross.read(real, rows, one.cross)

    def beyond(self, lengths: Int[Tensor, " b"], m: int) -> Float[Tensor, "bh 1 m"]:
        """What hides the padding of a context m wide."""
        cross = self.layers[0].cross
        assert cross is not None
        return self._hidden(lengths, m, cross.kv_heads)

    def next(
        self, ids: Int[Tensor, " b"], kept: list[LayerCache], beyond: Float[Tensor, "bh 1 m"] | None
    ) -> Float[Tensor, "b vocab"]:
        """Logits after one more token. beyond: what hides the padding of the context, if any."""
        own = kept[0].own
        where, filled, hidden = own.offset, own.filled + 1, None
        if isinstance(where, Tensor):
            hidden = self._hidden(where + 1, filled, self.layers[0].own.kv_heads)
        x = self.places.embed(ids, where, filled)
        for layer, one in zip(self.layers, kept, strict=True):
            x = layer.step(x, one, hidden, beyond)
        x = self.stack.norm(x)
        logits = torch.mm(x if self.factor == 1 else x * self.factor, self.table)
        return logits if self.bias is None else logits.add_(self.bias)

    def _hidden(self, lengths: Int[Tensor, " b"], m: int, heads: int) -> Float[Tensor, "bh 1 m"]:
        """−∞ at keys past each row's length, once a head."""
        past = torch.arange(m) >= lengths[:, None]
        bias = torch.zeros(past.shape, dtype=self.table.dtype).masked_fill_(past, -torch.inf)
        return bias.repeat_interleave(heads, 0)[:, None]


class Places:
    """An embedding whose positions are made once, for twice as many as were asked for."""

    def __init__(self, embedding: Embedding):
        self.embedding = embedding
        self.table: Float[Tensor, "n d"] | None = None

    def embed(
        self, ids: Int[Tensor, " t"], where: int | Int[Tensor, " t"], upto: int
    ) -> Float[Tensor, "t d"]:
        """What the embedding gives for these ids at these positions, all below `upto`."""
        declared = self.embedding.spec
        x = F.embedding(ids, self.embedding.table)
        if declared.scaled:
            x = x * declared.d_model**0.5
        if self.table is None or len(self.table) < upto:
            self.table = self._made(upto)
        return self.embedding.norm(x + self.table[where])

    def _made(self, upto: int) -> Float[Tensor, "n d"]:
        declared, like = self.embedding.spec, self.embedding.table
        size = min(max(2 * upto, 64), getattr(declared.position, "entries", 2 * upto + 64))
        x = like.new_zeros(1, size, declared.d_model)
        if self.embedding.position is not None:
            x = self.embedding.position(x, torch.arange(size), size)
        return x[0] if self.embedding.types is None else x[0] + self.embedding.types[0]


class Rows:
    """Rows of different lengths: their real positions one after another, or side by side with padding."""

    def __init__(self, b: int, m: int, lengths: Int[Tensor, " b"] | None):
        self.b, self.real, self.slot, self.seen = b, None, None, None
        if lengths is not None:
            inside = torch.arange(m) < lengths[:, None]
            self.real = inside.flatten().nonzero()[:, 0]  # where the real ones stand
            self.slot = (inside.flatten().cumsum(0) - 1).clamp_(min=0)  # which of them stands where
            self.seen = rearrange(inside, "b m -> b 1 1 m")

    def wide(self, x: Float[Tensor, "t d"]) -> Float[Tensor, "b m d"]:
        """Side by side; at padding stands some other token, which nobody may look at."""
        return (x if self.slot is None else x.index_select(0, self.slot)).unflatten(0, (self.b, -1))

    def narrow(self, x: Shaped[Tensor, "b m *d"]) -> Shaped[Tensor, "t *d"]:
        """One after another."""
        return x.flatten(0, 1) if self.real is None else x.flatten(0, 1).index_select(0, self.real)


def encode(
    stack: Stack, ids: Int[Tensor, "b m"], lengths: Int[Tensor, " b"] | None
) -> Float[Tensor, "b m d"]:
    """stack(ids, lengths=lengths) without the work on padding; what stands there is not to be read."""
    b, m = ids.shape
    rows = Rows(b, m, lengths)
    x = Places(stack.embedding).embed(rows.narrow(ids), rows.narrow(torch.arange(m).expand(b, m)), m)
    for block in _blocks(stack):
        x = _branch(block, block.attention_norm, x, lambda x, a=block.attention: _whole(a, x, rows))
        if block.spec.feed_forward is not None:
            x = _branch(block, block.feed_forward_norm, x, block.feed_forward)
    return rows.wide(stack.norm(x))


def _whole(module: MultiHeadAttention, x: Float[Tensor, "t d"], rows: Rows) -> Float[Tensor, "t d_out"]:
    """Every position looks at all of its row."""
    size = module.spec.sizes
    heads = (size.heads, size.kv_heads, size.kv_heads)
    parts = _parts(module)
    weight = torch.cat([w.weight for w in parts])
    bias = None if parts[0].bias is None else torch.cat([w.bias for w in parts])
    wide = rows.wide(F.linear(x, weight, bias)).split([len(w.weight) for w in parts], -1)
    q, k, v = (rearrange(t, "b m (h d) -> b h m d", h=h) for t, h in zip(wide, heads, strict=True))
    grouped, scale = size.heads != size.kv_heads, _scale(module.spec)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=rows.seen, scale=scale, enable_gqa=grouped)
    o = rows.narrow(rearrange(o, "b h m d -> b m (h d)"))
    return o if module.w_o is None else module.w_o(o)


def _branch(block: Block, norm: nn.Module, x: Tensor, f: Map) -> Tensor:
    return x + f(norm(x)) if block.spec.norm_at == "pre" else norm(x + f(x))


def _parts(module: MultiHeadAttention) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    assert module.w_q is not None and module.w_k is not None
    return module.w_q, module.w_k, module.w_v


def _scale(declared: spec.Attention) -> float:
    return declared.sizes.d_k**-0.5 if declared.factor is None else float(declared.factor)


def _blocks(stack: Stack) -> list[Block]:
    return [block for block in stack.blocks if isinstance(block, Block)]
