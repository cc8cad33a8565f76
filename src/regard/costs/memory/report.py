"""The memory of a declared model: weights, gradients, optimizer state, saved activations, peaks.

The peaks come from simulating one step without tensors (tape.py), the formulas from the same simulation with symbols
for sizes. On a GPU every storage is rounded up to 512 bytes, and cuBLAS holds workspaces.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from ... import spec
from ...engine.backends import choose
from ...errors import SpecError
from ...pattern import full
from ..flops.pairs import call_facts
from ..sizes import Numbers, Request, Symbols
from .modules import MODELS
from .rules import Rules
from .step import LOW, Setting, Simulation, TrainingStep, optimizer_step, states
from .tape import Bytes, Peak, peak

ALIGNMENT = {"cpu": 1, "cuda": 512}  # bytes to which the allocator rounds a storage up
WORKSPACE = 33 << 20  # cuBLAS 32 MiB and cuBLASLt 1 MiB per thread that multiplies (H100, H200)
STORED = ("reference",)  # backends that store the whole table of weights


@dataclass(frozen=True)
class Memory:
    """Memory in bytes. `rows()` lists everything; `formulas()` has the saved activations as sympy expressions."""

    weights: int
    one_attention: int = 0  # q, k, v, weights and outputs of one attention layer, for one batch row
    kv_cache: int = 0  # keys and values of all layers, for the whole batch
    inference_peak: int = 0  # of a forward pass without gradients
    workspace: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    master_weights: int = 0
    saved: dict[str, int] = field(default_factory=dict)  # for the backward pass, by part
    saved_by_method: dict[str, int] = field(
        default_factory=dict
    )  # the total, for each method of saving memory
    training_peak: int = 0  # of a training step
    peak_part: str = ""  # the part in which the training peak occurs
    between_steps: int = 0
    formulas: Callable[[], dict[str, Any]] | None = field(default=None, repr=False, compare=False)

    @property
    def saved_total(self) -> int:
        return sum(self.saved.values())

    def rows(self) -> list[tuple[str, int]]:
        rows = [
            ("weights", self.weights),
            ("one attention, one batch row: q, k, v, weights, outputs", self.one_attention),
            ("key/value cache", self.kv_cache),
            ("cuBLAS workspaces", self.workspace),
            ("inference peak", self.inference_peak),
        ]
        if self.training_peak:
            rows += [
                ("gradients", self.gradients),
                ("optimizer state", self.optimizer_state),
                ("float32 master weights", self.master_weights),
                *((f"saved for backward: {part}", size) for part, size in self.saved.items()),
                ("saved for backward, total", self.saved_total),
                *((f"saved for backward, {method}", size) for method, size in self.saved_by_method.items()),
                (f"training peak, in {self.peak_part}", self.training_peak),
            ]
        return [(name, size) for name, size in rows if size]

    def plain(self) -> dict[str, Any]:
        plain = {n: getattr(self, n) for n in Memory.__dataclass_fields__ if n != "formulas"}
        return plain | {"saved_total": self.saved_total}


def memory_of(request: Request) -> Memory | None:
    """The memory of a declared model at these sizes; None for declarations that are not simulated."""
    if type(request.spec) not in MODELS:
        return None
    training = training_of(request.train)
    setting = setting_of(request, training)
    weights, inference_peak = _inference(setting)
    memory = Memory(
        weights,
        one_attention(request) * request.itemsize,
        kv_cache(request),
        inference_peak,
        workspace=WORKSPACE if request.device == "cuda" else 0,
        formulas=lambda: formulas(request),
    )
    return memory if training is None else _with_training(memory, setting, training)


def training_of(train: Any) -> TrainingStep | None:
    if train is None or train is False:
        return None
    if train is True:
        return TrainingStep()
    if not isinstance(train, TrainingStep):
        raise SpecError(f"train={train!r}: use True, False or rg.TrainingStep(optimizer='adamw', …)")
    return train


def setting_of(request: Request, training: TrainingStep | None) -> Setting:
    low = LOW[training.autocast] if training is not None and training.autocast else None
    rules = Rules(request.device if request.device == "cuda" else "cpu", request.itemsize, low)
    declared, checkpoint = request.spec, None if training is None else training.checkpointing
    kernel = _kernel(
        replace(request, train=training is not None)
    )  # without autocast: facts in the weight dtype
    return Setting(declared, request.n, request.m, request.batch, rules, kernel, checkpoint)


def _kernel(request: Request) -> Callable[[spec.Attention, int, int, bool], str]:
    """How an attention keeps its scores: streaming, streaming with a mask, or stored."""

    @cache
    def kernel(declared: spec.Attention, n: int, m: int, cross: bool) -> str:
        if declared.score in ("additive", "position"):
            return "stored"
        facts = call_facts(declared, request, n, m, cross=cross, pattern=full() if cross else None)
        chosen = choose(facts, request.backend)
        with_dropout = chosen.backend == "sdpa" and facts.dropout_p > 0 and request.device == "cpu"
        if chosen.backend in STORED or with_dropout:
            return "stored"
        return "masked" if chosen.variant == "masked" else "streaming"

    return kernel


def _inference(setting: Setting) -> tuple[int, int]:
    """Bytes of the weights, and the peak of a forward pass."""
    simulation = Simulation(setting, Numbers(), grad=False)
    weights = sum(w.bytes for w in simulation.tape.weights)
    simulation.tape.casts = None if setting.rules.low is None else {}
    simulation.forward()
    current = peak(simulation.tape.log.events, ALIGNMENT[setting.rules.device]).bytes
    return weights, current + (WORKSPACE if setting.rules.cuda else 0)


def _with_training(memory: Memory, setting: Setting, training: TrainingStep) -> Memory:
    step = simulate_step(setting, training)
    entries = sum(w.entries for w in step.simulation.tape.weights)
    workspace = 2 * WORKSPACE if setting.rules.cuda else 0  # the backward pass runs in a thread of its own
    width = 4 if training.master_weights else setting.rules.width
    return replace(
        memory,
        gradients=entries * setting.rules.width,
        optimizer_state=entries * width * training.states,
        master_weights=4 * entries if training.master_weights else 0,
        workspace=workspace,
        saved=step.saved,
        saved_by_method={name: _saved(s) for name, s in _methods(setting).items()},
        training_peak=step.peak.bytes + workspace,
        peak_part=step.peak.part,
        between_steps=step.between_steps + workspace,
    )


@dataclass
class Step:
    """A simulated training step: what is saved after the forward pass, and its peak."""

    simulation: Simulation
    saved: dict[str, int]
    peak: Peak
    between_steps: int


def simulate_step(setting: Setting, training: TrainingStep) -> Step:
    """The second step: the optimizer state exists, gradients are allocated again."""
    simulation = Simulation(setting, Numbers(), grad=True)
    tape, log = simulation.tape, simulation.tape.log
    with tape.part("optimizer"):
        state = states(tape, tape.weights, training)
    before = log.by_part()
    between_steps = sum(before.values())
    loss = simulation.loss()
    saved = {part: size - before.get(part, 0) for part, size in log.by_part().items()}
    saved = {part: size for part, size in saved.items() if size}
    simulation.backward(loss)
    with tape.part("optimizer"):
        optimizer_step(tape, tape.weights, training)
    highest = peak(log.events, ALIGNMENT[setting.rules.device])
    del state
    return Step(simulation, saved, highest, between_steps)


def _saved(setting: Setting, reader: Numbers | Symbols | None = None) -> Bytes:
    """Bytes that the forward pass leaves behind."""
    simulation = Simulation(setting, reader or Numbers(), grad=True)
    before = simulation.tape.log.by_part()
    loss = simulation.loss()
    saved = sum(size - before.get(part, 0) for part, size in simulation.tape.log.by_part().items())
    del loss
    return saved


def formulas(request: Request) -> dict[str, Any]:
    """Bytes saved for the backward pass by each method, in b, n, m and the widths."""
    setting = setting_of(request, training_of(request.train) or TrainingStep())
    return {name: _formula(s) for name, s in _methods(setting).items()}


def _methods(setting: Setting) -> dict[str, Setting]:
    """Attention that stores its weights, attention that streams them, and checkpointed blocks."""
    return {
        "attention weights stored": replace(setting, kernel=lambda *_: "stored", checkpoint=False),
        "attention weights streamed": replace(setting, kernel=lambda *_: "streaming", checkpoint=False),
        "blocks checkpointed": replace(setting, checkpoint=True),
    }


def _formula(setting: Setting) -> Any:
    """The difference of two layers and one is what each layer saves, so any number of layers is a product."""
    reader = Symbols()
    one, two = (_saved(replace(setting, spec=_with_layers(setting.spec, k)), reader) for k in (1, 2))
    per_layer = (two - one).expand()
    if per_layer == 0:
        return one.expand()
    layers = reader.size("layers", _count_layers(setting.spec))
    return (one - per_layer).expand() + layers * per_layer


def _with_layers(declared: Any, count: int) -> Any:
    """The same model with this number of layers in each stack."""
    match declared:
        case spec.EncoderDecoder():
            return replace(
                declared,
                encoder=_with_layers(declared.encoder, count),
                decoder=_with_layers(declared.decoder, count),
            )
        case spec.Vision():
            return replace(declared, encoder=_with_layers(declared.encoder, count))
        case spec.Encoder() | spec.Decoder():
            return replace(declared, layers=count)
    return declared


def _count_layers(declared: Any) -> int:
    match declared:
        case spec.EncoderDecoder() if declared.encoder.layers != declared.decoder.layers:
            raise SpecError(
                f"{declared.encoder.layers} encoder and {declared.decoder.layers} decoder layers: "
                f"a memory formula has one number of layers; ask for each stack separately"
            )
        case spec.EncoderDecoder() | spec.Vision():
            return declared.encoder.layers
    return getattr(declared, "layers", 1)


def one_attention(request: Request) -> int:
    """Values of one attention layer for one batch row: q, k, v, the weights, the outputs of the heads."""
    inner: Any = request.spec
    while not isinstance(inner, spec.Attention):
        inner = getattr(inner, "decoder", None) or getattr(inner, "encoder", None) or inner
        inner = getattr(inner, "block", inner)
        inner = getattr(inner, "attention", inner)
    s, n = inner.sizes, request.n
    m = request.m if inner is request.spec else n
    return s.heads * n * s.d_k + s.kv_heads * m * (s.d_k + s.d_v) + s.heads * n * m + s.heads * n * s.d_v


def kv_cache(request: Request) -> int:
    """Bytes of keys and values of every layer for n positions; with cross-attention also those of the context."""
    declared: Any = request.spec
    declared = declared.decoder if isinstance(declared, spec.EncoderDecoder) else declared
    declared = declared.encoder if isinstance(declared, spec.Vision) else declared
    block = getattr(declared, "block", declared)

    def one_row(a: spec.Attention, length: int) -> int:
        return a.sizes.kv_heads * length * (a.sizes.d_k + a.sizes.d_v)

    own = block if isinstance(block, spec.Attention) else block.attention
    cross = getattr(block, "cross", None)
    values = one_row(own, request.m if own is request.spec else request.n)
    values += 0 if cross is None else one_row(cross, request.m)
    return values * getattr(declared, "layers", 1) * request.batch * request.itemsize


def peak_memory(request: Request) -> int:
    """Peak bytes: of a training step if `train` is set, else of inference."""
    if type(request.spec) not in MODELS:
        raise SpecError(
            f"memory is not modeled for {type(request.spec).__name__}; use a model, a block or an attention"
        )
    training = training_of(request.train)
    setting = setting_of(request, training)
    if training is None:
        return _inference(setting)[1]
    return simulate_step(setting, training).peak.bytes + (2 * WORKSPACE if setting.rules.cuda else 0)


def fits(request: Request, budget: int, vary: str = "batch") -> int:
    """The largest batch (or n, with `vary="n"`) whose peak memory is at most `budget` bytes; 0 if none fits.

    Found by bisection, since memory grows with both. m follows n if the two are equal.
    """
    if vary not in ("batch", "n"):
        raise SpecError(f"vary={vary!r} is unknown; use 'batch' or 'n'")
    if budget < 1:
        raise SpecError(f"budget={budget} is not a positive number of bytes")
    if vary == "n" and isinstance(request.spec, spec.Vision):
        raise SpecError("vary='n': the image size determines the number of patches; use vary='batch'")
    limit = _max_length(request.spec) if vary == "n" else 1 << 30

    def fits_budget(size: int) -> bool:
        if vary == "batch":
            return peak_memory(replace(request, batch=size)) <= budget
        return (
            peak_memory(replace(request, n=size, m=size if request.m == request.n else request.m)) <= budget
        )

    if not fits_budget(1):
        return 0
    low, high = 1, 2
    while high <= limit and fits_budget(high):
        low, high = high, high * 2
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits_budget(middle) else (low, middle)
    return low


def _max_length(declared: Any) -> int:
    """The number of positions of a learned table, if there is one."""
    declared = declared.decoder if isinstance(declared, spec.EncoderDecoder) else declared
    position = getattr(getattr(declared, "embedding", None), "position", None)
    table = getattr(position, "table", None)
    return table if isinstance(table, int) and getattr(position, "beyond", "") != "resample" else 1 << 30
