"""How much memory a declared model needs: weights, gradients, optimiser, what is kept for the backward pass, peaks.

The peaks come from playing one step without tensors (memory_tape.py), the formulas from the same play with symbols
for sizes. On a GPU every storage is rounded up to 512 bytes, and cuBLAS keeps workspaces.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from ... import spec
from ...engine import choose
from ...errors import SpecError
from ...pattern import full
from ...position import shaw
from ..sizes import Given, Numbers, Symbols
from .modules import MODELS
from .rules import Rules
from .step import LOW, Played, Setting, TrainingStep, optimise, states
from .tape import Bytes, Peak, peak

ROUNDED = {"cpu": 1, "cuda": 512}
WORKSPACE = 33 << 20  # cuBLAS 32 MiB, cuBLASLt 1, for each thread that multiplies (H100, H200)
STORED = ("plain",)  # ways that hold all weights at once


@dataclass(frozen=True)
class Memory:
    """Bytes, line by line. `rows()` has all of them; `formulas()` what is kept, as sympy expressions."""

    weights: int
    scope: (
        int  # q, k, v, weights and outputs of one attention layer, of one batch row (D8): 8n² + 2048n values
    )
    cache: int  # keys and values of all layers, for the whole batch
    inference: int  # peak of a forward pass without gradients
    workspace: int = 0
    gradients: int = 0
    optimiser: int = 0
    master: int = 0
    kept: dict[str, int] = field(default_factory=dict)  # for the backward pass, by part
    ways: dict[str, int] = field(
        default_factory=dict
    )  # kept, were weights stored, streamed, or blocks recomputed
    training: int = 0  # peak of a training step
    moment: str = ""  # the part that the peak falls into
    settled: int = 0  # between two steps
    formulas: Callable[[], dict[str, Any]] | None = field(default=None, repr=False, compare=False)

    @property
    def kept_total(self) -> int:
        return sum(self.kept.values())

    def rows(self) -> list[tuple[str, int]]:
        told = [
            ("weights", self.weights),
            ("one attention, one row: q, k, v, weights, outputs", self.scope),
            ("key/value cache", self.cache),
            ("workspaces of the device", self.workspace),
            ("peak of inference", self.inference),
        ]
        if self.training:
            told += [
                ("gradients", self.gradients),
                ("optimiser state", self.optimiser),
                ("float32 master copies", self.master),
                *((f"kept for the backward pass: {part}", size) for part, size in self.kept.items()),
                ("kept for the backward pass", self.kept_total),
                *((f"kept, {way}", size) for way, size in self.ways.items()),
                (f"peak of a training step, in {self.moment}", self.training),
            ]
        return [(name, size) for name, size in told if size]

    def plain(self) -> dict[str, Any]:
        told = {n: getattr(self, n) for n in Memory.__dataclass_fields__ if n != "formulas"}
        return told | {"kept_total": self.kept_total}


def memory_of(given: Given) -> Memory | None:
    """The memory of a declared model at these sizes; None for kinds that are not walked term by term."""
    if type(given.spec) not in MODELS:
        return None
    training = training_of(given.train)
    setting = setting_of(given, training)
    weights, inference = _inference(setting)
    memory = Memory(
        weights,
        scope(given) * given.itemsize,
        cache_bytes(given),
        inference,
        workspace=WORKSPACE if given.device == "cuda" else 0,
        formulas=lambda: formulas(given),
    )
    return memory if training is None else _trained(memory, setting, training)


def training_of(asked: Any) -> TrainingStep | None:
    if asked is None or asked is False:
        return None
    if asked is True:
        return TrainingStep()
    if not isinstance(asked, TrainingStep):
        raise SpecError(f"train={asked!r}: use True, False or rg.TrainingStep(optimiser='adamw', …)")
    return asked


def setting_of(given: Given, training: TrainingStep | None) -> Setting:
    low = LOW[training.autocast] if training is not None and training.autocast else None
    rules = Rules(given.device if given.device == "cuda" else "cpu", given.itemsize, low)
    declared, checkpoint = given.spec, None if training is None else training.checkpointing
    kernel = _kernel(replace(given, train=training is not None))
    return Setting(declared, given.n, given.m, given.batch, rules, kernel, checkpoint)


def _kernel(given: Given) -> Callable[[spec.Attention, int, int, bool], str]:
    """By which way an attention holds its scores: streaming, with a mask, or all at once."""

    @cache
    def kernel(declared: spec.Attention, n: int, m: int, cross: bool) -> str:
        if declared.score in ("additive", "position"):
            return "stored"
        learns, s = bool(given.train), declared.sizes
        bias = "none"
        if getattr(declared.position, "acts", None) == "score":
            line = getattr(declared.position, "grid", None) is None
            bias = "distance" if line and not isinstance(declared.position, shaw) else "tensor"
        facts = choose.Facts(
            full() if cross else declared.pattern,
            n,
            m,
            s.d_k,
            s.d_v,
            given.batch * s.heads,
            given.dtype,
            given.device,
            at=0 if cross and n > m else None,
            bias=bias,
            bias_grad=learns and bias != "none",
            hard=declared.factor == float("inf"),
            dropout=learns and declared.dropout > 0,
            grad=learns,
        )
        way = choose.choose(facts, given.backend).backend
        if way in STORED or (way in ("dense", "masked") and facts.dropout and given.device == "cpu"):
            return "stored"
        return "masked" if way == "masked" else "streaming"

    return kernel


def _inference(setting: Setting) -> tuple[int, int]:
    """Weights, and the peak of a forward pass."""
    played = Played(setting, Numbers(), grad=False)
    weights = sum(w.bytes for w in played.play.weights)
    played.play.casts = None if setting.rules.low is None else {}
    played.forward()
    held = peak(played.play.log.events, ROUNDED[setting.rules.device]).bytes
    return weights, held + (WORKSPACE if setting.rules.cuda else 0)


def _trained(memory: Memory, setting: Setting, training: TrainingStep) -> Memory:
    step = play_step(setting, training)
    entries = sum(w.entries for w in step.played.play.weights)
    work = 2 * WORKSPACE if setting.rules.cuda else 0  # the backward pass multiplies in a thread of its own
    width = 4 if training.master else setting.rules.width
    return replace(
        memory,
        gradients=entries * setting.rules.width,
        optimiser=entries * width * training.states,
        master=4 * entries if training.master else 0,
        workspace=work,
        kept=step.kept,
        ways={
            "weights stored": _kept(replace(setting, kernel=lambda *_: "stored", checkpoint=False)),
            "weights streamed": _kept(replace(setting, kernel=lambda *_: "streaming", checkpoint=False)),
            "blocks recomputed": _kept(replace(setting, checkpoint=True)),
        },
        training=step.peak.bytes + work,
        moment=step.peak.part,
        settled=step.settled + work,
    )


@dataclass
class Step:
    """A training step that was played: what it kept after the forward pass, and its peak."""

    played: Played
    kept: dict[str, int]
    peak: Peak
    settled: int


def play_step(setting: Setting, training: TrainingStep) -> Step:
    """The second step: the optimiser has its state, gradients are made anew."""
    played = Played(setting, Numbers(), grad=True)
    play, log = played.play, played.play.log
    with play.part("optimiser"):
        state = states(play, play.weights, training)
    before = log.by_part()
    settled = sum(before.values())
    loss = played.loss()
    kept = {part: size - before.get(part, 0) for part, size in log.by_part().items()}
    kept = {part: size for part, size in kept.items() if size}
    played.backward(loss)
    with play.part("optimiser"):
        optimise(play, play.weights, training)
    most = peak(log.events, ROUNDED[setting.rules.device])
    del state
    return Step(played, kept, most, settled)


def _kept(setting: Setting, read: Numbers | Symbols | None = None) -> Bytes:
    return sum(_kept_parts(setting, read or Numbers()).values())


def _kept_parts(setting: Setting, read: Numbers | Symbols) -> dict[str, Bytes]:
    """What is held after the forward pass that was not before, by part."""
    played = Played(setting, read, grad=True)
    before = played.play.log.by_part()
    loss = played.loss()
    kept = {part: size - before.get(part, 0) for part, size in played.play.log.by_part().items()}
    del loss
    return kept


def formulas(given: Given) -> dict[str, Any]:
    """Bytes kept for the backward pass, by way, in b, n, m and the widths; of a stack also one layer's."""
    setting = setting_of(given, training_of(given.train) or TrainingStep())
    ways = {
        "weights stored": replace(setting, kernel=lambda *_: "stored", checkpoint=False),
        "weights streamed": replace(setting, kernel=lambda *_: "streaming", checkpoint=False),
        "blocks recomputed": replace(setting, checkpoint=True),
    }
    return {name: _formula(way) for name, way in ways.items()}


def _formula(setting: Setting) -> Any:
    """Two layers keep twice what one keeps beside the rest, so any number of layers is one multiplication."""
    read = Symbols()
    one, two = (_kept(replace(setting, spec=_layers(setting.spec, k)), read) for k in (1, 2))
    a_layer = (two - one).expand()
    if a_layer == 0:
        return one.expand()
    layers = read.size("layers", _count_layers(setting.spec))
    return (one - a_layer).expand() + layers * a_layer


def _layers(declared: Any, count: int) -> Any:
    """The same model with so many layers in each stack."""
    match declared:
        case spec.EncoderDecoder():
            return replace(
                declared, encoder=_layers(declared.encoder, count), decoder=_layers(declared.decoder, count)
            )
        case spec.Vision():
            return replace(declared, encoder=_layers(declared.encoder, count))
        case spec.Encoder() | spec.Decoder():
            return replace(declared, layers=count)
    return declared


def _count_layers(declared: Any) -> int:
    match declared:
        case spec.EncoderDecoder() if declared.encoder.layers != declared.decoder.layers:
            raise SpecError(
                f"{declared.encoder.layers} encoder and {declared.decoder.layers} decoder layers: "
                f"a formula of memory has one number of layers; ask for each stack"
            )
        case spec.EncoderDecoder() | spec.Vision():
            return declared.encoder.layers
    return getattr(declared, "layers", 1)


def scope(given: Given) -> int:
    """Values that one attention layer holds for one row (D8): q, k, v, the weights, the outputs of the heads."""
    inner: Any = given.spec
    while not isinstance(inner, spec.Attention):
        inner = getattr(inner, "decoder", None) or getattr(inner, "encoder", None) or inner
        inner = getattr(inner, "block", inner)
        inner = getattr(inner, "attention", inner)
    s, n = inner.sizes, given.n
    m = given.m if inner is given.spec else n
    return s.heads * n * s.d_k + s.kv_heads * m * (s.d_k + s.d_v) + s.heads * n * m + s.heads * n * s.d_v


def cache_bytes(given: Given) -> int:
    """Keys and values of every layer, n positions long; a decoder with a context keeps the context's too."""
    declared: Any = given.spec
    declared = declared.decoder if isinstance(declared, spec.EncoderDecoder) else declared
    declared = declared.encoder if isinstance(declared, spec.Vision) else declared
    block = getattr(declared, "block", declared)

    def a_row(a: spec.Attention, length: int) -> int:
        return a.sizes.kv_heads * length * (a.sizes.d_k + a.sizes.d_v)

    own = block if isinstance(block, spec.Attention) else block.attention
    cross = getattr(block, "cross", None)
    values = a_row(own, given.m if own is given.spec else given.n)
    values += 0 if cross is None else a_row(cross, given.m)
    return values * getattr(declared, "layers", 1) * given.batch * given.itemsize


def need_memory(given: Given) -> int:
    """Peak bytes: of a training step where one is asked for, else of inference."""
    if type(given.spec) not in MODELS:
        raise SpecError(
            f"the memory of {type(given.spec).__name__} is not told; give a model or an attention"
        )
    training = training_of(given.train)
    setting = setting_of(given, training)
    if training is None:
        return _inference(setting)[1]
    return play_step(setting, training).peak.bytes + (2 * WORKSPACE if setting.rules.cuda else 0)


def fits(given: Given, budget: int, vary: str = "batch") -> int:
    """The largest batch (or n, with `vary="n"`) whose peak stays within `budget` bytes; 0 if not even 1 does.

    Memory grows with both, so doubling and halving find it. m follows n where the two were alike.
    """
    if vary not in ("batch", "n"):
        raise SpecError(f"vary={vary!r} is unknown; use 'batch' or 'n'")
    if budget < 1:
        raise SpecError(f"a budget of {budget} bytes holds nothing; give a positive number")
    if vary == "n" and isinstance(given.spec, spec.Vision):
        raise SpecError("an image has its own number of patches; ask for the largest batch")
    most = _longest(given.spec) if vary == "n" else 1 << 30

    def good(size: int) -> bool:
        if vary == "batch":
            return need_memory(replace(given, batch=size)) <= budget
        return need_memory(replace(given, n=size, m=size if given.m == given.n else given.m)) <= budget

    if not good(1):
        return 0
    low, high = 1, 2
    while high <= most and good(high):
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def _longest(declared: Any) -> int:
    """How many positions a learned table has, where there is one."""
    declared = declared.decoder if isinstance(declared, spec.EncoderDecoder) else declared
    position = getattr(getattr(declared, "embedding", None), "position", None)
    table = getattr(position, "table", None)
    return table if isinstance(table, int) and getattr(position, "beyond", "") != "resample" else 1 << 30
