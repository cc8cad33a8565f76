"""The memory of a model as one value: weights, gradients, saved activations, peaks; where it is, in words."""

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from ... import spec
from ...errors import ShapeError, SpecError
from ...machine import readable
from ...nested import tensors_in
from ..sizes import Request, Scope, Symbols
from ..trace.tracer import merged
from .allocator import Usage
from .runs import TABLES, Run, Setting, generates, run

# In the order of the pictures: what is alive longest is at the bottom.
KINDS = (
    "weights", "master weights", "optimizer state", "gradients", "key/value cache", "saved for backward", "inputs",
    "temporary", "workspace", TABLES,
)  # fmt: skip
ADVICE = {
    "saved for backward": "A smaller batch lowers it in proportion.",
    "weights": "Weights in fewer bits, or more ranks, lower it; a smaller batch hardly does.",  # of inference
    **dict.fromkeys(
        ("optimizer state", "gradients", "master weights"),
        "8-bit states (optimizer='adamw8bit'), frozen weights (lora=16) or more ranks lower weights, gradients and "
        "optimizer state; a smaller batch hardly does.",
    ),
    "key/value cache": "Fewer key/value heads, a window or a smaller batch lowers it.",
    "temporary": "A smaller batch, or logits and loss in chunks, lowers it.",
}
OUTSIDE = "outside modules (loss, optimizer)"
PHASES = {"optimizer": "optimizer step", "decode": "decoding of a token", "prefill": "prompt"}
BETWEEN_STEPS = ("weights", "inputs", "optimizer state", "master weights")
NO_CACHE = "none: this model does not decode with a cache of keys and values"


class Alive(NamedTuple):
    """Bytes of one kind in one module at the peak; modules that differ by a number only are merged."""

    bytes: int
    kind: str
    path: str


class Peak(NamedTuple):
    """The moment at which most memory is allocated."""

    bytes: int
    phase: str  # forward, backward, optimizer, prefill or decode
    path: str  # the module whose operation runs
    operation: str
    alive: tuple[Alive, ...]  # largest first
    timeline: tuple[tuple[str, dict[str, int]], ...]  # (phase, bytes by kind) at moments of the run, in order

    def by_kind(self) -> dict[str, int]:
        sums = {kind: sum(a.bytes for a in self.alive if a.kind == kind) for kind in KINDS}
        return {kind: size for kind, size in sums.items() if size}

    @property
    def moment(self) -> str:
        where = f" of {self.path}" if self.path else ""
        return f"in the {PHASES.get(self.phase, f'{self.phase} pass')}{where} ({self.operation})"

    def explain(self) -> str:
        """In words: when the peak is, what it consists of, and what would lower it."""
        total = max(sum(a.bytes for a in self.alive), 1)
        largest = sorted(self.by_kind().items(), key=lambda kv: -kv[1])
        parts = ", ".join(f"{size / total:.0%} are {kind}" for kind, size in largest if size / total >= 0.01)
        top = ", ".join(f"{a.path or OUTSIDE} {a.kind} {readable(a.bytes)}" for a in self.alive[:3])
        words = f"The peak of {readable(self.bytes)} is {self.moment}; {parts}. Most of it: {top}."
        kind, trains = largest[0][0], any(phase == "backward" for phase, _ in self.timeline)
        return f"{words} {ADVICE.get('gradients' if trains and kind == 'weights' else kind, '')}".rstrip()

    def table(self, rows: int = 20) -> str:
        """Modules and kinds at the peak, largest first, with their share."""
        total, rest = max(sum(a.bytes for a in self.alive), 1), sum(a.bytes for a in self.alive[rows:])
        lines = [(a.bytes, f"{a.kind:<18}  {a.path or OUTSIDE}") for a in self.alive[:rows]]
        lines += [(rest, f"in {len(self.alive) - rows} smaller ones")] if rest else []
        return "\n".join(f"{readable(size):>14}  {size / total:>6.1%}  {text}" for size, text in lines)

    def plain(self) -> dict[str, Any]:
        plain = self._asdict() | {"alive": [a._asdict() for a in self.alive], "by_kind": self.by_kind()}
        return {name: value for name, value in plain.items() if name != "timeline"}


def peak_of(run: Run, usage: Usage) -> Peak:
    """The peak of a run, and the course of the memory around it."""
    records, events = run.trace.meter.records, run.trace.meter.events
    setup, step = events[: run.begin], events[run.begin :]
    kinds = [run.kinds.get(k, "workspace" if r.workspace else "temporary") for k, r in enumerate(records)]
    # These are alive from the first event on, unless they were replaced later.
    stays = run.keys("optimizer state") | run.keys(TABLES)
    alive = Counter(stays - {key for key, change in events if change < 0})
    current = Counter({"workspace": sum(run.workspaces)})
    for key, change in setup:
        alive[key] = max(change, 0)
    for key in +alive:
        current[kinds[key]] += records[key].bytes
    timeline, at_peak, stride = [], +alive, max(1, len(step) // 400)
    for index, (key, change) in enumerate(step):
        if key not in stays:
            alive[key] = max(change, 0)
            current[kinds[key]] += change * records[key].bytes
        if index == usage.at:
            at_peak = +alive
        if index % stride == 0 or index == usage.at:
            timeline.append((records[key].phase, dict(current)))
    sums = Counter({("workspace", "cuBLAS"): sum(run.workspaces)})
    for key in at_peak:
        sums[kinds[key], merged(run.owners.get(key, records[key].path))] += records[key].bytes
    entries = sorted((Alive(size, *where) for where, size in sums.items() if size), reverse=True)
    record = records[step[usage.at][0]]
    return Peak(usage.peak, record.phase, record.path, record.operation, tuple(entries), tuple(timeline))


_number: Any = property  # of Memory, in bytes unless stated; None where a model has none


class Memory:
    """Memory in bytes. `rows()` lists everything; `explain_peak()` says where the peak is, in words.

    Each run on meta tensors takes place when one of its numbers is first read. request: of a declared model, whose
    attention has formulas.
    """

    def __init__(self, setting: Setting, request: Request | None = None, main: Run | None = None):
        self.setting, self.trains = setting, setting.training is not None
        self._declared = request if request and attention_of(request.spec) is not None else None
        if main is not None:
            self.main = main

    @cached_property
    def main(self) -> Run:
        """The training step if there is one, else the forward pass."""
        return run(self.setting)

    @cached_property
    def usage(self) -> Usage:
        return self.main.usage()

    @cached_property
    def _generation(self) -> tuple[Run | None, str]:
        """A prompt and one more token with a cache; or None, and why there is none."""
        setting = replace(self.setting.inference, cached=True)
        long = any(x.dim() > 1 and x.shape[1] > 1 for x in tensors_in(setting.given))
        if not long or not generates(setting.module):
            return None, NO_CACHE
        try:
            return run(setting), ""
        except ShapeError as e:  # the rest of the report does not depend on it
            return None, f"not known: {str(e).partition('; still known')[0]}"

    @cached_property
    def _generated(self) -> dict[str, int]:
        return {} if self.generation is None else self.generation.usage().by_phase

    @cached_property
    def inference_peak(self) -> int:
        """Of a forward pass without gradients."""
        return run(self.setting.inference).usage().peak if self.trains else self.usage.peak

    @property
    def one_attention(self) -> int:
        """Of a declaration by formula: q, k, v, weights and outputs of one attention layer, for one batch row."""
        declared = self._declared
        return 0 if declared is None else one_attention(declared) * declared.dtype.itemsize

    @property
    def kv_cache(self) -> int | None:
        """Keys and values of all layers for the whole batch: by formula of a declaration, else as traced."""
        if self._declared is not None:
            return kv_cache(self._declared)
        return None if self.generation is None else self.generation.bytes("key/value cache")

    @property
    def saved_by_method(self) -> dict[str, int]:
        """Of a declaration by formula: saved by attention cores in a training step, for each kind of kernel."""
        return saved_by_cores(self._declared) if self.trains and self._declared else {}

    def formulas(self) -> dict[str, Any]:
        """The same as sympy expressions."""
        return saved_by_cores(self._declared, Symbols()) if self._declared else {}

    @cached_property
    def saved(self) -> dict[str, int]:
        """Saved for the backward pass, by module, largest first."""
        records, saved = self.main.trace.meter.records, Counter[str]()
        for k in self.main.keys("saved for backward"):
            saved[merged(records[k].path)] += records[k].bytes
        return dict(saved.most_common())

    generation = _number(lambda m: m._generation[0], doc="the run of a prompt and one more token, or None")
    without_cache = _number(lambda m: m._generation[1], doc="why there is no such run; empty if there is")
    weights = _number(lambda m: sum(p.nbytes for p in m.main.module.parameters()), doc="all parameters")
    gradients = _number(lambda m: m.main.bytes("gradients"), doc="of trained parameters")
    optimizer_state = _number(lambda m: m.main.bytes("optimizer state"), doc="after the first step")
    master_weights = _number(lambda m: m.main.bytes("master weights"), doc="float32 copies of 16-bit weights")
    workspace = _number(lambda m: sum(m.main.workspaces), doc="buffers of cuBLAS")
    saved_total = _number(lambda m: sum(m.saved.values()), doc="saved for the backward pass")
    between_steps = _number(lambda m: sum(map(m.main.bytes, BETWEEN_STEPS)) + m.workspace, doc="what stays")
    training_peak = _number(lambda m: m.usage.peak if m.trains else None, doc="of a step; None without one")
    prefill_peak = _number(lambda m: m._generated.get("prefill"), doc="of a prompt of n − 1 tokens")
    decode_peak = _number(lambda m: m._generated.get("decode"), doc="of the next token with that cache")
    reserved = _number(lambda m: m.usage.reserved, doc="taken from the device, with the gaps between blocks")
    peak_part = _number(lambda m: m.peak.phase, doc="the phase in which the peak occurs")

    def per_rank(self, ranks: int, strategy: str = "fsdp") -> Usage:
        """Of one of several ranks: "fsdp" divides weights, gradients and optimizer state; "ddp" repeats them."""
        return self.main.usage(ranks=ranks, strategy=strategy)

    @cached_property
    def peak(self) -> Peak:
        """The moment of the peak of the training step, else of inference, and what is alive there."""
        return peak_of(self.main, self.usage)

    def explain_peak(self) -> str:
        """The moment of the peak, what is alive there, and what would lower it, in words."""
        words, training, kinds = self.peak.explain(), self.setting.training, self.peak.by_kind()
        largest = max(kinds, key=lambda k: kinds[k])
        if training is None or training.checkpointing or largest != "saved for backward":
            return words
        with suppress(SpecError):  # a module that has no checkpointing
            training = replace(training, checkpointing=True)
            less = run(replace(self.setting, training=training)).usage().peak
            if less < self.usage.peak:
                words += f" Checkpointing each block would lower the peak to {readable(less)}, for a second forward."
        return words

    def rows(self) -> list[tuple[str, int | str]]:
        rows: list[tuple[str, int | str | None]] = [
            ("weights", self.weights),
            ("one attention, one batch row: q, k, v, weights, outputs", self.one_attention),
            ("key/value cache", self.kv_cache or self.without_cache),
            ("cuBLAS workspaces", self.workspace),
            ("inference peak", self.inference_peak),
            ("prefill peak, a prompt of n − 1 tokens", self.prefill_peak),
            ("decode peak, the next token", self.decode_peak),
        ]
        if self.trains:
            cores = self.saved_by_method.items()
            rows += [
                ("gradients", self.gradients),
                ("optimizer state", self.optimizer_state),
                ("float32 master weights", self.master_weights),
                *((f"saved for backward: {part or OUTSIDE}", size) for part, size in self.saved.items()),
                ("saved for backward, total", self.saved_total),
                *((f"saved by attention cores, {method}", size) for method, size in cores),
                (f"training peak, in {self.peak_part}", self.training_peak),
            ]
        rows.append(("taken from the device", self.reserved if self.reserved != self.usage.peak else 0))
        return [(name, size) for name, size in rows if size]

    def plain(self) -> dict[str, Any]:
        names = (
            "weights", "one_attention", "kv_cache", "inference_peak", "prefill_peak", "decode_peak", "workspace",
            "gradients", "optimizer_state", "master_weights", "saved", "saved_by_method", "training_peak", "reserved",
            "peak_part", "between_steps", "saved_total",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names} | {"peak": self.peak.plain()}

    def __repr__(self) -> str:
        name = "training_peak" if self.trains else "inference_peak"
        return f"Memory(weights={self.weights:,}, {name}={self.usage.peak:,})"


def _last_block(declared: Any) -> tuple[Any, int]:
    """The block of a model's (last) stack, and how many there are; for what is no stack, itself."""
    stack = getattr(declared, "decoder", getattr(declared, "encoder", declared))
    return getattr(stack, "block", stack), getattr(stack, "layers", 1)


def attention_of(declared: Any) -> Any:
    """The self-attention of a model's (last) stack; None if it has none."""
    block, _ = _last_block(declared)
    inner = getattr(block, "attention", block)
    return inner if isinstance(inner, spec.Attention) else None


def _scope(request: Request, symbols: Symbols | None = None) -> Scope:
    alone = attention_of(request.spec) is request.spec
    return Scope(request, symbols, request.n, request.m if alone else request.n)


def one_attention(request: Request) -> int:
    """Values of one attention layer for one batch row: q, k, v, the weights, the outputs of the heads."""
    s, n, m = attention_of(request.spec).sizes, request.n, _scope(request).m
    return s.heads * n * s.d_k + s.kv_heads * m * (s.d_k + s.d_v) + s.heads * n * m + s.heads * n * s.d_v


def kv_cache(request: Request) -> int:
    """Bytes of keys and values of every layer for n positions; with cross-attention also those of the context."""
    block, layers = _last_block(request.spec)
    read = [(attention_of(request.spec).sizes, _scope(request).m)]
    if getattr(block, "cross", None) is not None:
        read.append((block.cross.sizes, request.m))
    values = sum(s.kv_heads * length * (s.d_k + s.d_v) for s, length in read)
    return values * layers * request.batch * request.dtype.itemsize


def saved_by_cores(request: Request, symbols: Symbols | None = None) -> dict[str, Any]:
    """Bytes that the self-attention cores of the (last) stack save for the backward pass, as numbers or formulas.

    q, k and v, and the weights, or, where a kernel does not store them, the output and a log-sum-exp.
    """
    scope, (_, layers) = _scope(request, symbols), _last_block(request.spec)
    s, n, m, size = scope.sizes(attention_of(request.spec)), scope.n, scope.m, scope.itemsize
    count = scope.b * (scope.size("layers", layers) if layers > 1 else 1)
    projected = s.heads * n * s.d_k + s.kv_heads * m * (s.d_k + s.d_v)
    stored = count * size * (projected + s.heads * n * m)
    streamed = count * (size * (projected + s.heads * n * s.d_v) + max(size, 4) * s.heads * n)
    kinds = {"weights stored": stored, "weights streamed": streamed}
    return kinds if symbols is None else {kind: formula.expand() for kind, formula in kinds.items()}
