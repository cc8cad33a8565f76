"""A training step and an inference, played: forward, loss, backward, optimiser; and what is held at each moment."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ... import spec
from ...errors import SpecError, nearest
from ..sizes import Numbers, Symbols
from .modules import Rows, Walk, model_of
from .rules import Play, Rules
from .tape import Bytes, Value, Weight

OPTIMISERS = ("sgd", "momentum", "adam", "adamw")
WAYS = ("auto", "plain", "foreach", "fused")
STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
LOW = {"bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """How a model is trained, as far as memory goes.

    way: plain steps one weight after the other, foreach all at once (PyTorch's default on a GPU), fused in one
    kernel. autocast: "bfloat16" or "float16" for products in that dtype. checkpointing: None is as declared.
    master: float32 copies of 16-bit weights, on which the optimiser works.
    """

    optimiser: str = "adamw"
    way: str = "auto"
    autocast: str | None = None
    checkpointing: bool | None = None
    master: bool = False

    def __post_init__(self):
        for name, given, known in (("optimiser", self.optimiser, OPTIMISERS), ("way", self.way, WAYS)):
            if given not in known:
                raise SpecError(f"{name}={given!r} is unknown; {nearest(given, known)}")
        if self.autocast is not None and self.autocast not in LOW:
            raise SpecError(f"autocast={self.autocast!r} is unknown; {nearest(self.autocast, LOW)}")

    @property
    def states(self) -> int:
        """Numbers the optimiser keeps for each parameter."""
        return STATES[self.optimiser]

    def way_on(self, device: str) -> str:
        return self.way if self.way != "auto" else "foreach" if device == "cuda" else "plain"


@dataclass(frozen=True)
class Setting:
    """A declaration at its sizes, ready to be played by number or by symbol."""

    spec: spec.Spec
    n: int
    m: int
    batch: int
    rules: Rules
    kernel: Callable[[spec.Attention, int, int, bool], str]
    checkpoint: bool | None = None

    def walk(self, play: Play, read: Numbers | Symbols) -> Walk:
        return Walk(play, read, read.size("b", self.batch), self.kernel, self.checkpoint)

    def rows(self, read: Numbers | Symbols) -> tuple[Rows, Rows]:
        n = Rows(self.n, read.size("n", self.n))
        return n, n if self.n == self.m else Rows(self.m, read.size("m", self.m))


class Played:
    """A model with its weights made, and its inputs; each pass adds to the log."""

    def __init__(self, setting: Setting, read: Numbers | Symbols, grad: bool):
        self.setting, self.play = setting, Play(setting.rules, grad)
        self.play.training = grad
        walk = setting.walk(self.play, read)
        self.n, self.m = setting.rows(read)
        with self.play.part("weights"):
            self.model = model_of(walk, setting.spec)
        with self.play.part("inputs"):
            self.inputs = self._inputs(walk)
            self.targets = self._targets(walk.batch) if grad else None

    def _inputs(self, walk: Walk) -> list[Value]:
        play, declared, b = self.play, self.setting.spec, walk.batch
        width = self.setting.rules.width
        if isinstance(declared, spec.Vision):
            size = declared.channels * declared.image[0] * declared.image[1]
            return [play.value(b * size, width)]
        if isinstance(declared, spec.EncoderDecoder):
            return [self._one(declared.encoder, b, self.m), self._one(declared.decoder, b, self.n)]
        given = [self._one(declared, b, self.n)]
        cross = getattr(getattr(declared, "block", declared), "cross", None)
        if cross is not None:
            given.append(play.value(b * self.m.amount * cross.sizes.d_context, width))
        return given

    def _one(self, declared: Any, b: Bytes, n: Rows) -> Value:
        if getattr(declared, "embedding", None) is not None:
            return self.play.value(b * n.amount, 8)
        return self.play.value(b * n.amount * declared.d_model, self.setting.rules.width)

    def forward(self) -> Value:
        match self.setting.spec, self.inputs:
            case spec.EncoderDecoder(), [source, target]:
                return self.model(source, self.m, target, self.n)
            case _, [x, context]:
                return self.model(x, self.n, context, self.m)
        return self.model(self.inputs[0], self.n)

    def loss(self) -> Value:
        """One number from the model's output: cross-entropy of logits and class scores, else the mean of squares."""
        low = self.setting.rules.low
        self.play.casts = None if low is None else {}
        try:
            out = self.forward()
            with self.play.part("loss"):
                if self.targets is None:
                    return self.play.mean_square(out)
                return self.play.cross_entropy(out, self.targets)
        finally:
            self.play.casts = None

    def _targets(self, b: Bytes) -> Value | None:
        """Numbers of classes or tokens, where the model scores such."""
        declared = self.setting.spec
        declared = declared.decoder if isinstance(declared, spec.EncoderDecoder) else declared
        match getattr(declared, "head", None):
            case spec.ClassifierHead():
                return self.play.value(b, 8)
            case spec.LanguageHead() | spec.MaskedHead():
                return self.play.value(b * self.n.amount, 8)
        return None

    def backward(self, loss: Value) -> None:
        with self.play.part("backward"):
            self.play.backward(loss, {w.node: w for w in self.play.weights if w.node is not None})


def optimise(play: Play, weights: list[Weight], training: TrainingStep) -> None:
    """The moments of an optimiser's step: foreach holds a copy of a state for all weights at once."""
    way, bytes_of = training.way_on(play.rules.device), [w.bytes for w in weights]
    if training.master:
        bytes_of = [w.entries * 4 for w in weights]
        copies = [play.new(size) for size in bytes_of]  # gradients in float32
    if training.states == 2 and way == "foreach":
        roots = [play.new(size) for size in bytes_of]
        del roots
    elif training.states == 2 and way == "plain":
        for size in bytes_of:
            root = play.new(size)
            divided = play.new(size)
            del root, divided
    if training.master:
        del copies


def states(play: Play, weights: list[Weight], training: TrainingStep) -> list[Any]:
    """What the optimiser keeps; with master copies, those too."""
    width = [4 if training.master else w.width for w in weights]
    kept = [play.new(w.entries * size) for w, size in zip(weights, width) for _ in range(training.states)]
    if training.states == 2 and training.way_on(play.rules.device) == "fused":
        kept += [play.new(4) for _ in weights]  # how many steps were made
    return kept + ([play.new(4 * w.entries) for w in weights] if training.master else [])
