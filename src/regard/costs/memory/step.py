"""Simulated training steps and forward passes: forward, loss, backward, optimizer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ... import spec
from ...spec.base import require_known
from ..sizes import Length, Numbers, Symbols
from .modules import Environment, model_of
from .rules import ModelTape, Rules
from .tape import Bytes, Value, Weight

OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")
IMPLEMENTATIONS = ("auto", "for_loop", "foreach", "fused")
STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
LOW = {"bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """The options of a training step that its memory depends on.

    implementation: of the optimizer, as in PyTorch: for_loop (one weight after the other), foreach (the default on a
    GPU), fused (one kernel). autocast: "bfloat16" or "float16" for matrix products in that dtype. checkpointing:
    None follows the declaration. master_weights: the optimizer updates float32 copies of 16-bit weights.
    """

    optimizer: str = "adamw"
    implementation: str = "auto"
    autocast: str | None = None
    checkpointing: bool | None = None
    master_weights: bool = False

    def __post_init__(self):
        require_known("optimizer", self.optimizer, OPTIMIZERS)
        require_known("implementation", self.implementation, IMPLEMENTATIONS)
        if self.autocast is not None:
            require_known("autocast", self.autocast, tuple(LOW))

    @property
    def states(self) -> int:
        """Values that the optimizer stores per parameter."""
        return STATES[self.optimizer]

    def implementation_on(self, device: str) -> str:
        if self.implementation != "auto":
            return self.implementation
        return "foreach" if device == "cuda" else "for_loop"


@dataclass(frozen=True)
class Setting:
    """A declaration with its sizes, ready to be simulated with numbers or with symbols."""

    spec: spec.Spec
    n: int
    m: int
    batch: int
    rules: Rules
    kernel: Callable[[spec.Attention, int, int, bool], str]
    checkpoint: bool | None = None

    def env(self, tape: ModelTape, reader: Numbers | Symbols) -> Environment:
        return Environment(tape, reader, reader.size("b", self.batch), self.kernel, self.checkpoint)

    def rows(self, reader: Numbers | Symbols) -> tuple[Length, Length]:
        n = Length(self.n, reader.size("n", self.n))
        return n, n if self.n == self.m else Length(self.m, reader.size("m", self.m))


class Simulation:
    """A model with its weights and inputs allocated; each pass adds to the log."""

    def __init__(self, setting: Setting, reader: Numbers | Symbols, grad: bool):
        self.setting, self.tape = setting, ModelTape(setting.rules, grad)
        self.tape.training = grad
        env = setting.env(self.tape, reader)
        self.n, self.m = setting.rows(reader)
        with self.tape.part("weights"):
            self.model = model_of(env, setting.spec)
        with self.tape.part("inputs"):
            self.inputs = self._inputs(env)
            self.targets = self._targets(env.batch) if grad else None

    def _inputs(self, env: Environment) -> list[Value]:
        tape, declared, b = self.tape, self.setting.spec, env.batch
        width = self.setting.rules.width
        if isinstance(declared, spec.Vision):
            size = declared.channels * declared.image[0] * declared.image[1]
            return [tape.value(b * size, width)]
        if isinstance(declared, spec.EncoderDecoder):
            return [self._one(declared.encoder, b, self.m), self._one(declared.decoder, b, self.n)]
        given = [self._one(declared, b, self.n)]
        cross = getattr(getattr(declared, "block", declared), "cross", None)
        if cross is not None:
            given.append(tape.value(b * self.m.amount * cross.sizes.d_context, width))
        return given

    def _one(self, declared: Any, b: Bytes, n: Length) -> Value:
        if getattr(declared, "embedding", None) is not None:
            return self.tape.value(b * n.amount, 8)
        return self.tape.value(b * n.amount * declared.d_model, self.setting.rules.width)

    def forward(self) -> Value:
        match self.setting.spec, self.inputs:
            case spec.EncoderDecoder(), [source, target]:
                return self.model(source, self.m, target, self.n)
            case _, [x, context]:
                return self.model(x, self.n, context, self.m)
        return self.model(self.inputs[0], self.n)

    def loss(self) -> Value:
        """Cross-entropy if the model returns logits, else the mean square of its output."""
        low = self.setting.rules.low
        self.tape.casts = None if low is None else {}
        try:
            out = self.forward()
            with self.tape.part("loss"):
                if self.targets is None:
                    return self.tape.mean_square(out)
                return self.tape.cross_entropy(out, self.targets)
        finally:
            self.tape.casts = None

    def _targets(self, b: Bytes) -> Value | None:
        """Class or token ids, if the model has a head that scores them."""
        declared = self.setting.spec
        declared = declared.decoder if isinstance(declared, spec.EncoderDecoder) else declared
        match getattr(declared, "head", None):
            case spec.ClassifierHead():
                return self.tape.value(b, 8)
            case spec.LanguageHead() | spec.MaskedHead():
                return self.tape.value(b * self.n.amount, 8)
        return None

    def backward(self, loss: Value) -> None:
        with self.tape.part("backward"):
            self.tape.backward(loss, {w.node: w for w in self.tape.weights if w.node is not None})


def optimizer_step(tape: ModelTape, weights: list[Weight], training: TrainingStep) -> None:
    """Temporary storages of an optimizer step: foreach holds a copy of one state for all weights at once."""
    implementation, bytes_of = training.implementation_on(tape.rules.device), [w.bytes for w in weights]
    if training.master_weights:
        bytes_of = [w.entries * 4 for w in weights]
        copies = [tape.new(size) for size in bytes_of]  # gradients in float32
    if training.states == 2 and implementation == "foreach":
        roots = [tape.new(size) for size in bytes_of]
        del roots
    elif training.states == 2 and implementation == "for_loop":
        for size in bytes_of:
            root = tape.new(size)
            divided = tape.new(size)
            del root, divided
    if training.master_weights:
        del copies


def states(tape: ModelTape, weights: list[Weight], training: TrainingStep) -> list[Any]:
    """The storages of the optimizer state, and of master weights."""
    width = [4 if training.master_weights else w.width for w in weights]
    stored = [tape.new(w.entries * size) for w, size in zip(weights, width) for _ in range(training.states)]
    if training.states == 2 and training.implementation_on(tape.rules.device) == "fused":
        stored += [tape.new(4) for _ in weights]  # the step counters
    return stored + ([tape.new(4 * w.entries) for w in weights] if training.master_weights else [])
