"""A declared model, played: its weights made, its passes walked as the modules of `nn` walk them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ... import spec
from ...errors import SpecError
from ...position import learned
from ..sizes import Numbers, Symbols
from .attention import Shape, stored, streaming
from .rules import Linear, Play
from .tape import Bytes, Value, Weight


@dataclass(frozen=True)
class Walk:
    """How a model is walked: sizes by number or by symbol, and what attention and checkpoints do."""

    play: Play
    read: Numbers | Symbols
    batch: Bytes
    kernel: Callable[[spec.Attention, int, int, bool], str]  # streaming, masked or stored
    checkpoint: bool | None = None  # None: as declared

    def size(self, name: str, value: int) -> Bytes:
        return self.read.size(name, value)


class Norm:
    def __init__(self, walk: Walk, kind: str, d: Bytes, bias: bool = True):
        self.play, self.kind, self.d = walk.play, kind, d
        self.weight = None if kind == "none" else walk.play.new_weight(d)
        self.bias = walk.play.new_weight(d) if kind in ("layer", "batch") and bias else None

    def __call__(self, x: Value, rows: Bytes) -> Value:
        if self.weight is None:
            return x
        if self.kind == "rms":
            return self.play.rms_norm(x, rows, self.weight)
        return self.play.layer_norm(x, rows, self.weight, self.bias)


class Attention:
    def __init__(self, walk: Walk, declared: spec.Attention, shared: Any = None):
        play, s = walk.play, walk.read.attention(declared)
        self.walk, self.spec, self.sizes = walk, declared, s
        scores = shared is not None and shared.acts == "score"
        self.asked = replace(declared, position=shared) if scores else declared  # what the engine is given
        every = declared.biases == "all"
        self.w_q = self.w_k = self.w_o = self.v_score = None
        if declared.score != "position":
            self.w_q = play.new_linear(s.d_model, s.heads * s.d_k, every)
        if declared.score in ("dot", "additive"):
            self.w_k = play.new_linear(s.d_context, s.kv_heads * s.d_k, every)
        self.w_v = play.new_linear(s.d_context, s.kv_heads * s.d_v, every)
        if declared.output:
            self.w_o = play.new_linear(s.heads * s.d_v, s.d_out, declared.biases != "none")
        if declared.score == "additive":
            self.v_score = play.new_weight(s.heads * s.d_k)
        if declared.position is not None:
            position_weights(walk, declared.position, s.heads, s.d_k, s.d_v)

    def __call__(self, x: Value, n: "Rows", context: Value | None = None, m: "Rows | None" = None) -> Value:
        play, s = self.walk.play, self.sizes
        source, keys = (x, n) if context is None or m is None else (context, m)
        q = (
            play.linear(x, self.w_q)
            if self.w_q
            else play.value(self.walk.batch * s.heads * n.amount, x.width)
        )
        k = play.linear(source, self.w_k) if self.w_k else source
        v = play.linear(source, self.w_v)
        if getattr(self.spec.position, "acts", None) == "query_key":
            k, q = self._turned(k), self._turned(q)
        o = self._core(q, k, v, n, keys, context is not None)
        return play.linear(o, self.w_o) if self.w_o else o

    def _core(self, q: Value, k: Value, v: Value, n: "Rows", m: "Rows", cross: bool) -> Value:
        s, play = self.sizes, self.walk.play
        at = Shape(self.walk.batch, s.heads, n.amount, m.amount, s.d_k, s.d_v)
        match self.walk.kernel(self.asked, n.value, m.value, cross):
            case "stored":
                return stored(play, q, k, v, at, float(self.spec.dropout))
            case "masked":
                return streaming(play, q, k, v, at, n.amount * m.amount * q.width)
        return streaming(play, q, k, v, at)

    def _turned(self, x: Value) -> Value:
        """A rotation: four products of half the columns, their sum and difference, joined."""
        play, half = self.walk.play, x.entries / 2 if not isinstance(x.entries, int) else x.entries // 2
        size, width = x.bytes, x.width

        def part() -> Value:
            return play.step((x,), half, 4, (), lambda g: (play.new(size),))

        low = play.add(part(), part())
        high = play.add(part(), part())
        return play.step(
            (low, high), x.entries, width, (), lambda g: (play.new(width * half), play.new(width * half))
        )


@dataclass(frozen=True)
class Rows:
    """A number of positions: what it is, and how it is written."""

    value: int
    amount: Bytes


class FeedForward:
    def __init__(self, walk: Walk, declared: spec.FeedForward, d: Bytes):
        play, d_ff = walk.play, walk.size("d_ff", declared.d_ff)
        self.play, self.spec = play, declared
        self.w_in = play.new_linear(d, d_ff, declared.bias)
        self.w_gate = play.new_linear(d, d_ff, declared.bias) if declared.gated else None
        self.w_out = play.new_linear(d_ff, d, declared.bias)

    def __call__(self, x: Value) -> Value:
        play, f = self.play, self.spec.activation
        if f == "relu" and not self.spec.dropout and play.by_hand:
            return play.rectified(x, self.w_in, self.w_out)
        hidden = (
            play.activation(play.linear(x, self.w_in), f)
            if self.w_gate is None
            else play.multiply(
                play.activation(play.linear(x, self.w_gate), "silu"), play.linear(x, self.w_in)
            )
        )
        return play.linear(play.dropout(hidden, float(self.spec.dropout)), self.w_out)


class Block:
    def __init__(self, walk: Walk, declared: spec.Block, shared: Any = None):
        self.walk, self.spec = walk, declared
        d = walk.size("d_model", declared.d_model)

        def beside() -> Norm:
            return Norm(walk, declared.norm, d, declared.norm_bias)

        self.attention, self.attention_norm = Attention(walk, declared.attention, shared), beside()
        if declared.cross is not None:
            self.cross, self.cross_norm = Attention(walk, declared.cross), beside()
        if declared.feed_forward is not None:
            self.feed_forward, self.feed_forward_norm = FeedForward(walk, declared.feed_forward, d), beside()

    def __call__(self, x: Value, n: Rows, context: Value | None = None, m: Rows | None = None) -> Value:
        part = self.walk.play.part
        with part("attention"):
            x = self._branch(x, n, lambda x: self.attention(x, n), self.attention_norm)
        if self.spec.cross is not None:
            with part("cross"):
                x = self._branch(x, n, lambda x: self.cross(x, n, context, m), self.cross_norm)
        if self.spec.feed_forward is not None:
            with part("feed_forward"):
                x = self._branch(x, n, self.feed_forward, self.feed_forward_norm)
        return x

    def _branch(self, x: Value, n: Rows, f: Callable[[Value], Value], norm: Norm) -> Value:
        play, rows = self.walk.play, self.walk.batch * n.amount
        pre = self.spec.norm_at == "pre"
        y = play.dropout(f(norm(x, rows) if pre else x), float(self.spec.dropout))
        if pre:
            return play.add(x, y) if self.spec.residual else y
        return norm(play.add(x, y) if self.spec.residual else y, rows)


class Embedding:
    def __init__(self, walk: Walk, declared: spec.Embedding):
        self.walk, self.spec = walk, declared
        self.d, self.vocab = walk.size("d_model", declared.d_model), walk.size("vocab", declared.vocab)
        self.table = walk.play.new_weight(self.vocab * self.d)
        self.types = walk.play.new_weight(declared.types * self.d) if declared.types else None
        self.where: Weight | None = None
        if isinstance(declared.position, learned):
            self.where = walk.play.new_weight(walk.size("positions", declared.position.entries) * self.d)
        self.norm = Norm(walk, "layer" if declared.norm else "none", self.d)

    def __call__(self, ids: Value, n: Rows) -> Value:
        play, rows = self.walk.play, self.walk.batch * n.amount
        x = play.embedding(rows, self.table, self.d, ids)
        if self.spec.scaled:
            x = play.times(x)
        if self.spec.position is not None:
            x = play.add(x, self._positions(n))
        if self.types is not None:
            x = play.add(x, play.step((self.types,), self.d, x.width, (), lambda g: (self._types_grad(),)))
        return play.dropout(self.norm(x, rows), float(self.spec.dropout))

    def _positions(self, n: Rows) -> Value:
        play = self.walk.play
        if self.where is not None:
            return play.embedding(n.amount, self.where, self.d, play.value(n.amount, 8))
        return play.value(n.amount * self.d, play.rules.width)

    def _types_grad(self) -> Any:
        assert self.types is not None
        return self.walk.play.new(self.types.bytes)


class Stack:
    """An encoder or a decoder."""

    def __init__(self, walk: Walk, declared: spec.Encoder | spec.Decoder):
        play, self.walk, self.spec = walk.play, walk, declared
        size = walk.read.attention(declared.block.attention)
        self.d = walk.size("d_model", declared.d_model)
        with play.part("embedding"):
            if declared.position is not None:
                position_weights(walk, declared.position, size.heads, size.d_k, size.d_v)
            self.embedding = None if declared.embedding is None else Embedding(walk, declared.embedding)
        block, shared = declared.block, declared.position
        if shared is not None and shared.acts == "query_key":
            block = replace(block, attention=replace(block.attention, position=shared))
        with play.part("block"):
            self.blocks = [Block(walk, block, shared) for _ in range(declared.layers)]
        self.norm = Norm(walk, declared.block.norm if declared.has_final_norm else "none", self.d)
        with play.part("head"):
            self.head = Head(walk, declared.head, self.d, self.embedding)

    def __call__(self, x: Value, n: Rows, context: Value | None = None, m: Rows | None = None) -> Value:
        play = self.walk.play
        if self.embedding is not None:
            with play.part("embedding"):
                x = self.embedding(x, n)
        again = self.spec.checkpoint if self.walk.checkpoint is None else self.walk.checkpoint
        with play.part("block"):
            for block in self.blocks:
                x = self._run(block, x, n, context, m, again)
        with play.part("head"):
            return self.head(self.norm(x, self.walk.batch * n.amount), n)

    def _run(
        self, block: Block, x: Value, n: Rows, context: Value | None, m: Rows | None, again: bool
    ) -> Value:
        if not again:
            return block(x, n, context, m)
        if context is None:
            return self.walk.play.checkpoint(lambda x: block(x, n), x)
        return self.walk.play.checkpoint(lambda x, c: block(x, n, c, m), x, context)


class Head:
    """What a stack ends in; without a declared head it gives its states."""

    def __init__(self, walk: Walk, declared: Any, d: Bytes, embedding: Embedding | None = None):
        play, self.walk, self.spec, self.d = walk.play, walk, declared, d
        self.embedding = embedding
        self.table: Weight | None = None if embedding is None else embedding.table
        self.bias: Weight | None = None
        self.layers: list[Linear] = []
        match declared:
            case spec.LanguageHead():
                assert embedding is not None
                if not declared.tied:
                    self.table = play.new_weight(embedding.vocab * d)
                self.bias = play.new_weight(embedding.vocab) if declared.bias else None
            case spec.MaskedHead():
                assert embedding is not None
                self.layers, self.norm = [play.new_linear(d, d, True)], Norm(walk, "layer", d)
                self.bias = play.new_weight(embedding.vocab)
            case spec.ClassifierHead():
                hidden = walk.size("hidden", declared.hidden) if declared.hidden else None
                if hidden is not None:
                    self.layers.append(play.new_linear(d, hidden, True))
                classes = walk.size("classes", declared.classes)
                self.layers.append(play.new_linear(hidden or d, classes, True))
            case spec.Pooler():
                self.layers.append(play.new_linear(d, d, True))

    def __call__(self, x: Value, n: Rows) -> Value:
        play, rows = self.walk.play, self.walk.batch * n.amount
        match self.spec:
            case spec.LanguageHead():
                return self._logits(play.times(x))
            case spec.MaskedHead():
                x = play.activation(play.linear(x, self.layers[0]), self.spec.activation)
                return self._logits(self.norm(x, rows))
            case spec.ClassifierHead():
                x = self._pooled(x)
                if len(self.layers) == 2:
                    x = play.activation(play.linear(x, self.layers[0]), "tanh")
                return play.linear(x, self.layers[-1])
            case spec.Pooler():
                return play.activation(play.linear(self._first(x), self.layers[0]), "tanh")
        return x

    def _logits(self, x: Value) -> Value:
        assert self.table is not None and self.embedding is not None
        return self.walk.play.product(x, self.table, self.bias, self.d, self.embedding.vocab)

    def _pooled(self, x: Value) -> Value:
        if self.spec.pool in ("first", "last"):
            return self._first(x)
        play, size = self.walk.play, x.bytes
        saves = (x.storage,) if self.spec.pool == "max" else ()
        return play.step((x,), self.walk.batch * self.d, x.width, saves, lambda g: (play.new(size),))

    def _first(self, x: Value) -> Value:
        """One state a row: a view of all of them."""
        play, size = self.walk.play, x.bytes
        out = play.step((x,), 0, x.width, (), lambda g: (play.new(size),))
        out.storage, out.entries = x.storage, self.walk.batch * self.d
        return out


class EncoderDecoder:
    def __init__(self, walk: Walk, declared: spec.EncoderDecoder):
        play = walk.play
        with play.part("encoder"):
            self.encoder = Stack(walk, declared.encoder)
        with play.part("decoder"):
            self.decoder = Stack(walk, declared.decoder)
        self.walk = walk
        if declared.share_embedding:
            ours, theirs = self.encoder.embedding, self.decoder.embedding
            assert ours is not None and theirs is not None
            play.weights.remove(theirs.table)
            if self.decoder.head.table is theirs.table:
                self.decoder.head.table = ours.table
            theirs.table = ours.table

    def __call__(self, source: Value, m: Rows, target: Value, n: Rows) -> Value:
        with self.walk.play.part("encoder"):
            states = self.encoder(source, m)
        with self.walk.play.part("decoder"):
            return self.decoder(target, n, states, m)


class Vision:
    def __init__(self, walk: Walk, declared: spec.Vision):
        play, self.walk, self.spec = walk.play, walk, declared
        self.d = walk.size("d_model", declared.d_model)
        self.inside = declared.channels * declared.patch[0] * declared.patch[1]
        with play.part("embedding"):
            self.patches = play.new_linear(self.inside, self.d, True)
            self.token = play.new_weight(self.d) if declared.class_token else None
            where = declared.position or learned(declared.tokens)
            self.where = play.new_weight(where.entries * self.d) if isinstance(where, learned) else None
        with play.part("encoder"):
            self.encoder = Stack(walk, declared.encoder)
        with play.part("head"):
            self.head = Head(walk, declared.head, self.d)

    def __call__(self, images: Value, n: Rows) -> Value:
        play = self.walk.play
        with play.part("embedding"):
            x = self._embed(images, n)
        with play.part("encoder"):
            x = self.encoder(x, n)
        with play.part("head"):
            return self.head(x, n)

    def _embed(self, images: Value, n: Rows) -> Value:
        play, d, b = self.walk.play, self.d, self.walk.batch
        x = play.product(images, self.patches.weight, self.patches.bias, self.inside, d, convolves=True)
        if self.token is not None:
            size, one = x.bytes, self.token.bytes
            x = play.step(
                (x, self.token), b * n.amount * d, x.width, (), lambda g: (play.new(size), play.new(one))
            )
        if self.where is not None:
            where = play.embedding(n.amount, self.where, d, play.value(n.amount, 8))
        else:
            where = play.value(n.amount * d, play.rules.width)
        return play.dropout(play.add(x, where), float(self.spec.dropout))


def position_weights(walk: Walk, position: Any, heads: Bytes, d_k: Bytes, d_v: Bytes) -> None:
    """The learned numbers of a position inside attention."""
    name, new = type(position).__name__, walk.play.new_weight
    if name == "t5_buckets":
        new(heads * position.buckets)
    elif name == "relative_table":
        new(heads * position.entries)
    elif name == "shaw":
        new((2 * position.reach + 1) * d_k)
        if position.values:
            new((2 * position.reach + 1) * d_v)
    elif name == "quadratic":
        new(heads * position.axes)
        new(heads)


MODELS: dict[type, Any] = {
    spec.Attention: Attention,
    spec.Block: Block,
    spec.Encoder: Stack,
    spec.Decoder: Stack,
    spec.EncoderDecoder: EncoderDecoder,
    spec.Vision: Vision,
}


def model_of(walk: Walk, declared: spec.Spec) -> Any:
    if type(declared) not in MODELS:
        raise SpecError(
            f"the memory of {type(declared).__name__} is not declared term by term; give the module it builds"
        )
    return MODELS[type(declared)](walk, declared)
