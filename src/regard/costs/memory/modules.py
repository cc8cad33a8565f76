"""A declared model, simulated: its weights are allocated, its passes run as those of the modules in `nn`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ... import spec
from ...errors import SpecError
from ...position import learned
from ..sizes import Length, Numbers, Symbols
from .attention import Shape, stored, streaming
from .rules import Linear, ModelTape
from .tape import Bytes, Value, Weight


@dataclass(frozen=True)
class Environment:
    """What the simulated modules share: the tape, how sizes are read, and what attention and checkpoints do."""

    tape: ModelTape
    reader: Numbers | Symbols
    batch: Bytes
    kernel: Callable[[spec.Attention, int, int, bool], str]  # streaming, masked or stored
    checkpoint: bool | None = None  # None: as declared

    def size(self, name: str, value: int) -> Bytes:
        return self.reader.size(name, value)


class Norm:
    def __init__(self, env: Environment, kind: str, d: Bytes, bias: bool = True):
        self.tape, self.kind, self.d = env.tape, kind, d
        self.weight = None if kind == "none" else env.tape.new_weight(d)
        self.bias = env.tape.new_weight(d) if kind in ("layer", "batch") and bias else None

    def __call__(self, x: Value, rows: Bytes) -> Value:
        if self.weight is None:
            return x
        if self.kind == "rms":
            return self.tape.rms_norm(x, rows, self.weight)
        return self.tape.layer_norm(x, rows, self.weight, self.bias)


class Attention:
    def __init__(self, env: Environment, declared: spec.Attention, shared: Any = None):
        tape, s = env.tape, env.reader.attention(declared)
        self.env, self.spec, self.sizes = env, declared, s
        scores = shared is not None and shared.acts == "score"
        self.engine_spec = (
            replace(declared, position=shared) if scores else declared
        )  # as the engine receives it
        every = declared.biases == "all"
        self.w_q = self.w_k = self.w_o = self.v_score = None
        if declared.score != "position":
            self.w_q = tape.new_linear(s.d_model, s.heads * s.d_k, every)
        if declared.score in ("dot", "additive"):
            self.w_k = tape.new_linear(s.d_context, s.kv_heads * s.d_k, every)
        self.w_v = tape.new_linear(s.d_context, s.kv_heads * s.d_v, every)
        if declared.output:
            self.w_o = tape.new_linear(s.heads * s.d_v, s.d_out, declared.biases != "none")
        if declared.score == "additive":
            self.v_score = tape.new_weight(s.heads * s.d_k)
        if declared.position is not None:
            position_weights(env, declared.position, s.heads, s.d_k, s.d_v)

    def __call__(self, x: Value, n: Length, context: Value | None = None, m: Length | None = None) -> Value:
        tape, s = self.env.tape, self.sizes
        source, keys = (x, n) if context is None or m is None else (context, m)
        q = tape.linear(x, self.w_q) if self.w_q else tape.value(self.env.batch * s.heads * n.amount, x.width)
        k = tape.linear(source, self.w_k) if self.w_k else source
        v = tape.linear(source, self.w_v)
        if getattr(self.spec.position, "acts", None) == "query_key":
            k, q = self._rotated(k), self._rotated(q)
        o = self._core(q, k, v, n, keys, context is not None)
        return tape.linear(o, self.w_o) if self.w_o else o

    def _core(self, q: Value, k: Value, v: Value, n: Length, m: Length, cross: bool) -> Value:
        s, tape = self.sizes, self.env.tape
        at = Shape(self.env.batch, s.heads, n.amount, m.amount, s.d_k, s.d_v)
        match self.env.kernel(self.engine_spec, n.value, m.value, cross):
            case "stored":
                return stored(tape, q, k, v, at, float(self.spec.dropout))
            case "masked":
                return streaming(tape, q, k, v, at, n.amount * m.amount * q.width)
        return streaming(tape, q, k, v, at)

    def _rotated(self, x: Value) -> Value:
        """A rotation: four products of half the columns, their sum and difference, concatenated."""
        tape, half = self.env.tape, x.entries / 2 if not isinstance(x.entries, int) else x.entries // 2
        size, width = x.bytes, x.width

        def part() -> Value:
            return tape.step((x,), half, 4, (), lambda g: (tape.new(size),))

        low = tape.add(part(), part())
        high = tape.add(part(), part())
        return tape.step(
            (low, high), x.entries, width, (), lambda g: (tape.new(width * half), tape.new(width * half))
        )


class FeedForward:
    def __init__(self, env: Environment, declared: spec.FeedForward, d: Bytes):
        tape, d_ff = env.tape, env.size("d_ff", declared.d_ff)
        self.tape, self.spec = tape, declared
        self.w_in = tape.new_linear(d, d_ff, declared.bias)
        self.w_gate = tape.new_linear(d, d_ff, declared.bias) if declared.gated else None
        self.w_out = tape.new_linear(d_ff, d, declared.bias)

    def __call__(self, x: Value) -> Value:
        tape, f = self.tape, self.spec.activation
        hidden = (
            tape.activation(tape.linear(x, self.w_in), f)
            if self.w_gate is None
            else tape.multiply(
                tape.activation(tape.linear(x, self.w_gate), "silu"), tape.linear(x, self.w_in)
            )
        )
        return tape.linear(tape.dropout(hidden, float(self.spec.dropout)), self.w_out)


class Block:
    def __init__(self, env: Environment, declared: spec.Block, shared: Any = None):
        self.env, self.spec = env, declared
        d = env.size("d_model", declared.d_model)

        def norm() -> Norm:
            return Norm(env, declared.norm, d, declared.norm_bias)

        self.attention, self.attention_norm = Attention(env, declared.attention, shared), norm()
        if declared.cross is not None:
            self.cross, self.cross_norm = Attention(env, declared.cross), norm()
        if declared.feed_forward is not None:
            self.feed_forward, self.feed_forward_norm = FeedForward(env, declared.feed_forward, d), norm()

    def __call__(self, x: Value, n: Length, context: Value | None = None, m: Length | None = None) -> Value:
        part = self.env.tape.part
        with part("attention"):
            x = self._branch(x, n, lambda x: self.attention(x, n), self.attention_norm)
        if self.spec.cross is not None:
            with part("cross"):
                x = self._branch(x, n, lambda x: self.cross(x, n, context, m), self.cross_norm)
        if self.spec.feed_forward is not None:
            with part("feed_forward"):
                x = self._branch(x, n, self.feed_forward, self.feed_forward_norm)
        return x

    def _branch(self, x: Value, n: Length, f: Callable[[Value], Value], norm: Norm) -> Value:
        tape, rows = self.env.tape, self.env.batch * n.amount
        pre = self.spec.norm_at == "pre"
        y = tape.dropout(f(norm(x, rows) if pre else x), float(self.spec.dropout))
        if pre:
            return tape.add(x, y) if self.spec.residual else y
        return norm(tape.add(x, y) if self.spec.residual else y, rows)


class Embedding:
    def __init__(self, env: Environment, declared: spec.Embedding):
        self.env, self.spec = env, declared
        self.d, self.vocab = env.size("d_model", declared.d_model), env.size("vocab", declared.vocab)
        self.table = env.tape.new_weight(self.vocab * self.d)
        self.types = env.tape.new_weight(declared.types * self.d) if declared.types else None
        self.where: Weight | None = None
        if isinstance(declared.position, learned):
            self.where = env.tape.new_weight(env.size("positions", declared.position.entries) * self.d)
        self.norm = Norm(env, "layer" if declared.norm else "none", self.d)

    def __call__(self, ids: Value, n: Length) -> Value:
        tape, rows = self.env.tape, self.env.batch * n.amount
        x = tape.embedding(rows, self.table, self.d, ids)
        if self.spec.scaled:
            x = tape.times(x)
        if self.spec.position is not None:
            x = tape.add(x, self._positions(n))
        if self.types is not None:
            x = tape.add(x, tape.step((self.types,), self.d, x.width, (), lambda g: (self._types_grad(),)))
        return tape.dropout(self.norm(x, rows), float(self.spec.dropout))

    def _positions(self, n: Length) -> Value:
        tape = self.env.tape
        if self.where is not None:
            return tape.embedding(n.amount, self.where, self.d, tape.value(n.amount, 8))
        return tape.value(n.amount * self.d, tape.rules.width)

    def _types_grad(self) -> Any:
        assert self.types is not None
        return self.env.tape.new(self.types.bytes)


class Stack:
    """An encoder or a decoder."""

    def __init__(self, env: Environment, declared: spec.Encoder | spec.Decoder):
        tape, self.env, self.spec = env.tape, env, declared
        size = env.reader.attention(declared.block.attention)
        self.d = env.size("d_model", declared.d_model)
        with tape.part("embedding"):
            if declared.position is not None:
                position_weights(env, declared.position, size.heads, size.d_k, size.d_v)
            self.embedding = None if declared.embedding is None else Embedding(env, declared.embedding)
        block, shared = declared.block, declared.position
        if shared is not None and shared.acts == "query_key":
            block = replace(block, attention=replace(block.attention, position=shared))
        with tape.part("block"):
            self.blocks = [Block(env, block, shared) for _ in range(declared.layers)]
        self.norm = Norm(env, declared.block.norm if declared.has_final_norm else "none", self.d)
        with tape.part("head"):
            self.head = Head(env, declared.head, self.d, self.embedding)

    def __call__(self, x: Value, n: Length, context: Value | None = None, m: Length | None = None) -> Value:
        tape = self.env.tape
        if self.embedding is not None:
            with tape.part("embedding"):
                x = self.embedding(x, n)
        recompute = self.spec.checkpoint if self.env.checkpoint is None else self.env.checkpoint
        with tape.part("block"):
            for block in self.blocks:
                x = self._run(block, x, n, context, m, recompute)
        with tape.part("head"):
            return self.head(self.norm(x, self.env.batch * n.amount), n)

    def _run(
        self, block: Block, x: Value, n: Length, context: Value | None, m: Length | None, recompute: bool
    ) -> Value:
        if not recompute:
            return block(x, n, context, m)
        if context is None:
            return self.env.tape.checkpoint(lambda x: block(x, n), x)
        return self.env.tape.checkpoint(lambda x, c: block(x, n, c, m), x, context)


class Head:
    """The head of a stack; without one the stack returns its states."""

    def __init__(self, env: Environment, declared: Any, d: Bytes, embedding: Embedding | None = None):
        tape, self.env, self.spec, self.d = env.tape, env, declared, d
        self.embedding = embedding
        self.table: Weight | None = None if embedding is None else embedding.table
        self.bias: Weight | None = None
        self.layers: list[Linear] = []
        match declared:
            case spec.LanguageHead():
                assert embedding is not None
                if not declared.tied:
                    self.table = tape.new_weight(embedding.vocab * d)
                self.bias = tape.new_weight(embedding.vocab) if declared.bias else None
            case spec.MaskedHead():
                assert embedding is not None
                self.layers, self.norm = [tape.new_linear(d, d, True)], Norm(env, "layer", d)
                self.bias = tape.new_weight(embedding.vocab)
            case spec.ClassifierHead():
                hidden = env.size("hidden", declared.hidden) if declared.hidden else None
                if hidden is not None:
                    self.layers.append(tape.new_linear(d, hidden, True))
                classes = env.size("classes", declared.classes)
                self.layers.append(tape.new_linear(hidden or d, classes, True))
            case spec.Pooler():
                self.layers.append(tape.new_linear(d, d, True))

    def __call__(self, x: Value, n: Length) -> Value:
        tape, rows = self.env.tape, self.env.batch * n.amount
        match self.spec:
            case spec.LanguageHead():
                return self._logits(tape.times(x))
            case spec.MaskedHead():
                x = tape.activation(tape.linear(x, self.layers[0]), self.spec.activation)
                return self._logits(self.norm(x, rows))
            case spec.ClassifierHead():
                x = self._pooled(x)
                if len(self.layers) == 2:
                    x = tape.activation(tape.linear(x, self.layers[0]), "tanh")
                return tape.linear(x, self.layers[-1])
            case spec.Pooler():
                return tape.activation(tape.linear(self._first(x), self.layers[0]), "tanh")
        return x

    def _logits(self, x: Value) -> Value:
        assert self.table is not None and self.embedding is not None
        return self.env.tape.product(x, self.table, self.bias, self.d, self.embedding.vocab)

    def _pooled(self, x: Value) -> Value:
        if self.spec.pool in ("first", "last"):
            return self._first(x)
        tape, size = self.env.tape, x.bytes
        saves = (x.storage,) if self.spec.pool == "max" else ()
        return tape.step((x,), self.env.batch * self.d, x.width, saves, lambda g: (tape.new(size),))

    def _first(self, x: Value) -> Value:
        """One state per batch row: a view of all states."""
        tape, size = self.env.tape, x.bytes
        out = tape.step((x,), 0, x.width, (), lambda g: (tape.new(size),))
        out.storage, out.entries = x.storage, self.env.batch * self.d
        return out


class EncoderDecoder:
    def __init__(self, env: Environment, declared: spec.EncoderDecoder):
        tape = env.tape
        with tape.part("encoder"):
            self.encoder = Stack(env, declared.encoder)
        with tape.part("decoder"):
            self.decoder = Stack(env, declared.decoder)
        self.env = env
        if declared.share_embedding:
            ours, theirs = self.encoder.embedding, self.decoder.embedding
            assert ours is not None and theirs is not None
            tape.weights.remove(theirs.table)
            if self.decoder.head.table is theirs.table:
                self.decoder.head.table = ours.table
            theirs.table = ours.table

    def __call__(self, source: Value, m: Length, target: Value, n: Length) -> Value:
        with self.env.tape.part("encoder"):
            states = self.encoder(source, m)
        with self.env.tape.part("decoder"):
            return self.decoder(target, n, states, m)


class Vision:
    def __init__(self, env: Environment, declared: spec.Vision):
        tape, self.env, self.spec = env.tape, env, declared
        self.d = env.size("d_model", declared.d_model)
        self.inside = declared.channels * declared.patch[0] * declared.patch[1]
        with tape.part("embedding"):
            self.patches = tape.new_linear(self.inside, self.d, True)
            self.token = tape.new_weight(self.d) if declared.class_token else None
            where = declared.position or learned(declared.tokens)
            self.where = tape.new_weight(where.entries * self.d) if isinstance(where, learned) else None
        with tape.part("encoder"):
            self.encoder = Stack(env, declared.encoder)
        with tape.part("head"):
            self.head = Head(env, declared.head, self.d)

    def __call__(self, images: Value, n: Length) -> Value:
        tape = self.env.tape
        with tape.part("embedding"):
            x = self._embed(images, n)
        with tape.part("encoder"):
            x = self.encoder(x, n)
        with tape.part("head"):
            return self.head(x, n)

    def _embed(self, images: Value, n: Length) -> Value:
        tape, d, b = self.env.tape, self.d, self.env.batch
        x = tape.product(images, self.patches.weight, self.patches.bias, self.inside, d, convolves=True)
        if self.token is not None:
            size, one = x.bytes, self.token.bytes
            x = tape.step(
                (x, self.token), b * n.amount * d, x.width, (), lambda g: (tape.new(size), tape.new(one))
            )
        if self.where is not None:
            where = tape.embedding(n.amount, self.where, d, tape.value(n.amount, 8))
        else:
            where = tape.value(n.amount * d, tape.rules.width)
        return tape.dropout(tape.add(x, where), float(self.spec.dropout))


def position_weights(env: Environment, position: Any, heads: Bytes, d_k: Bytes, d_v: Bytes) -> None:
    """The parameters of a position encoding inside attention."""
    name, new = type(position).__name__, env.tape.new_weight
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


def model_of(env: Environment, declared: spec.Spec) -> Any:
    if type(declared) not in MODELS:
        raise SpecError(
            f"memory is not modeled for {type(declared).__name__}; pass the module that it builds"
        )
    return MODELS[type(declared)](env, declared)
