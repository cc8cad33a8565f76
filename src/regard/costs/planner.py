"""What fits? The largest batch of each kind of step within a card's memory, its time, and code to run it."""

import dataclasses
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, partial
from html import escape
from typing import Any

import torch

from ..errors import SpecError
from ..machine import bytes_of, load_roofline, readable
from ..pattern import Pattern
from ..spec.base import require_positive
from ..spec.model import with_pattern
from ..table import ShownAsTables, Table
from .gpus import Card, card
from .memory.runs import Run, generates, run
from .memory.step import TrainingStep
from .sizes import Size
from .subject import MAX_BATCH, Runs, Subject, built, class_note
from .time import time_of
from .trace.attention import A100, H200, Gpu

SHARE = 0.9  # a plan uses this much of the memory; the rest is for the CUDA context and other libraries
DEFAULT_N = 1024
MAX_N, STEP_N = 1 << 20, 64
# Called with the choice that is searched for, how many are done, and how many there are.
PROGRESS: ContextVar[Callable[[str, int, int], None]] = ContextVar("progress", default=lambda *_: None)


@dataclass(frozen=True)
class Option:
    """One kind of step: a training step, a forward pass, or generation with a cache."""

    label: str
    training: TrainingStep | None = None
    cached: bool = False


@dataclass(frozen=True)
class Choice:
    """One kind of step on one card, with its predicted peak and time."""

    gpu: str
    memory: int  # of the card, in bytes
    option: Option
    n: int
    batch: int  # per rank; 0 if nothing fits
    ranks: int
    peak: int  # of one row, if nothing fits
    seconds: float
    code: str
    longest_n: int | None = None  # with a batch of 1; computed for the fastest choice of a card

    @property
    def tokens_per_second(self) -> float:
        tokens = 1 if self.option.cached else self.n  # a step of generation is one token of each row
        return self.ranks * self.batch * tokens / self.seconds if self.batch else 0.0

    def plain(self) -> dict[str, Any]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "option"}
        return fields | dataclasses.asdict(self.option) | {"tokens_per_second": self.tokens_per_second}


@dataclass(frozen=True, repr=False)
class Plan(ShownAsTables):
    """Choices by tokens per second, best first. `print` it for a table; `best.code` runs the first."""

    model: str
    choices: tuple[Choice, ...]
    notes: tuple[str, ...]

    @property
    def best(self) -> Choice:
        if not self.choices or not self.choices[0].batch:
            raise SpecError(f"{self.model} fits none of these cards, not even a batch of 1")
        return self.choices[0]

    def plain(self) -> dict[str, Any]:
        return {"model": self.model, "choices": [c.plain() for c in self.choices], "notes": list(self.notes)}

    def table(self) -> Table:
        heading = ("GPU", "ranks", "how", "n", "batch", "peak", "of", "step, ms", "tokens/s", "longest n")
        lines = []
        for c in self.choices:
            sizes = (f"{c.n:,}", f"{c.batch:,}", readable(c.peak), readable(c.memory))
            longest = "" if c.longest_n is None else f"{c.longest_n:,}"
            times = (f"{c.seconds * 1e3:,.1f}", f"{c.tokens_per_second:,.0f}", longest)
            times = times if c.batch else ("", "does not fit", "")
            lines.append((c.gpu, f"{c.ranks}", c.option.label, *sizes, *times))
        first = self.choices[0]
        best = ("", f"the fastest, batch {first.batch}:", first.code) if first.batch else ()
        return Table(self.model, heading, lines, (*self.notes, *best))

    def __repr__(self) -> str:
        first = self.choices[0]
        return f"<Plan for {self.model[:60]}: {first.option.label}, batch {first.batch}, {first.gpu}>"

    def _repr_html_(self) -> str:
        table, code = self.table(), self.choices[0].code  # none if nothing fits
        below = table.below[:-1] if code else table.below
        return f"{table._replace(below=below).html()}<pre>{escape(code)}</pre>"


def plan(
    model: Any,
    *,
    memory: float | str | None = None,
    gpu: str | None = None,
    n: int | None = None,
    train: bool = True,
    ranks: int = 1,
    pattern: Pattern | None = None,
) -> Plan:
    """The largest batch that fits, for each kind of step, with its time: sorted by tokens per second.

    model: a declaration, the name of a preset, a Hugging Face configuration or model, or a function that returns one.
    gpu: names of cards, separated by commas (h200, h100, a100-40, l40s, l4, 4090, …). memory: bytes, or "80GB",
    instead of the card's own. train: compare bfloat16, checkpointing, 8-bit states and LoRA; False plans a forward
    pass and generation. ranks: cards that share the work (FSDP2). pattern: replaces that of a declared attention.
    """
    model = built(model)
    subject = Subject.of(model)
    memory = None if memory is None else bytes_of(str(memory))
    for name, given in {"ranks": ranks, "n": n, "memory": memory}.items():
        require_positive(name, 1 if given is None else given)
    if pattern is not None:
        if not subject.declared:
            raise SpecError("pattern= replaces the pattern of a declaration; this model has none of ours")
        subject = Subject(with_pattern(subject.model, pattern))
    preset = model if isinstance(model, str) and pattern is None else ""
    search = _Search(subject, preset, subject.tokens or n or min(subject.max_n, DEFAULT_N), ranks)
    options, choices = list(_options(subject, train)), list[Choice]()
    chosen = {label: card(label) for label in map(str.strip, (gpu or "h100").split(","))}
    # The card with the most memory first: smaller batches lie between its traced runs.
    for label, own in sorted(chosen.items(), key=lambda pair: -pair[1].memory):
        on = own if memory is None else own._replace(memory=memory)
        title, each = label if gpu else readable(on.memory), list[Choice]()
        for option in options:
            done = len(choices) + len(each)
            PROGRESS.get()(f"{title}: {option.label}", done, len(chosen) * len(options))
            each.append(search.choice(title, on, option))
        best = max(each, key=lambda c: c.tokens_per_second)
        longest = search.longest(on, best)
        choices += [replace(c, longest_n=longest) if c is best else c for c in each]
    choices.sort(key=lambda c: -c.tokens_per_second)
    exchange = "; the exchange between ranks is not counted" if ranks > 1 else ""
    notes = (
        *class_note(model, subject.module),
        f"a batch is per rank; its predicted peak is at most {SHARE:.0%} of the memory; longest n: with a batch of 1",
        f"times are estimates from the rates of data sheets, or of `regard bench machine`{exchange}",
        *(f"{g}: {card(g).described}" for g in dict.fromkeys(c.gpu for c in choices) if gpu),
    )
    described = preset or (repr(subject.model) if subject.declared else type(subject.module).__name__)
    return Plan(described, tuple(choices), notes)


def _options(subject: Subject, train: bool) -> Iterator[Option]:
    if not train:
        yield Option("forward, bfloat16")
        if generates(subject.module):
            yield Option("generation, bfloat16", cached=True)
        return
    yield Option("full, float32", TrainingStep())
    for label, more in (
        ("full, bfloat16", {}),
        ("full, bfloat16, checkpointing", {"checkpointing": True}),
        ("full, bfloat16, checkpointing, 8-bit AdamW", {"checkpointing": True, "optimizer": "adamw8bit"}),
        ("LoRA 16, bfloat16", {"lora": 16}),
        ("LoRA 16, bfloat16, checkpointing", {"lora": 16, "checkpointing": True}),
    ):
        yield Option(label, TrainingStep(autocast="bfloat16", **more))


class _Search:
    """Batches and lengths of one model that fit. Cards that run the same kernels share their traced runs."""

    def __init__(self, subject: Subject, name: str, n: int, ranks: int):
        self.subject, self.name, self.n, self.ranks = subject, name, n, ranks
        self.made: dict[tuple, Runs] = {}
        self.traced = cache(self._traced)

    def _traced(self, n: int, batch: int, option: Option, gpu: Gpu) -> Run:
        dtype = torch.bfloat16 if option.training is None else torch.float32
        where = {"dtype": dtype, "device": "cuda", "gpu": gpu, "cached": option.cached}
        return run(self.subject.setting(Size(n, n, batch), option.training, **where))

    def runs(self, vary: str, option: Option, on: Card) -> Runs:
        """By batch, or by length in steps of 64 with a batch of 1."""
        own, other = (H200, A100) if on.gpu.capability >= (9, 0) else (A100, H200)
        for gpu in (own, other):
            runs = self.made.get((vary, option, gpu))
            if runs is not None and (gpu is own or not any(r.trace.by_card for r in runs.known.values())):
                return runs

        def at(x: int) -> Run:
            return self.traced(*((self.n, x) if vary == "batch" else (x * STEP_N, 1)), option, own)

        return self.made.setdefault((vary, option, own), Runs(at, 1 if vary == "batch" else 2))

    def choice(self, label: str, on: Card, option: Option) -> Choice:
        runs = self.runs("batch", option, on)
        peak = partial(runs.peak, gpu=on.gpu, ranks=self.ranks, expandable=True)
        batch, seconds, code = runs.largest(peak, int(SHARE * on.memory), MAX_BATCH), 0.0, ""
        if batch:
            stored = load_roofline()
            measured = stored is not None and label in stored.machine.lower()
            phases = time_of(runs.work(batch), stored if stored and measured else on.roofline(label)).phases
            seconds = phases["decode"] if option.cached else sum(phases.values())
            code = code_of(self.subject, self.name, self.n, batch, option, self.ranks)
        used = peak(max(batch, 1))
        return Choice(label, on.memory, option, self.n, batch, self.ranks, used, seconds, code)

    def longest(self, on: Card, choice: Choice) -> int | None:
        """The longest n that fits with a batch of 1, in steps of 64; None where the model determines it."""
        if self.subject.tokens is not None or not choice.batch:
            return None
        limit = min(self.subject.max_n, MAX_N) // STEP_N
        runs = self.runs("n", choice.option, on)
        start = max(1, min(self.n // STEP_N, limit // 4))
        for steps in {min(k * start, limit) for k in (1, 2, 4)} if limit else ():
            runs.at(steps)
        peak = partial(runs.peak, gpu=on.gpu, ranks=self.ranks, expandable=True)
        return STEP_N * runs.largest(peak, int(SHARE * on.memory), limit, check=True) or None


def code_of(subject: Subject, name: str, n: int, batch: int, option: Option, ranks: int = 1) -> str:
    """A program that runs one step of this choice."""
    lines = [f"# torchrun --nproc-per-node {ranks} plan.py"] if ranks > 1 else []
    lines.append('import os; os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"')
    lines.append(f"import torch, {'' if subject.declared else 'transformers, '}regard as rg")
    lines += ["rg.costs.join_ranks()"] if ranks > 1 else []
    if subject.declared:
        source = f"rg.preset({name!r})" if name else f"rg.spec.from_json({subject.model.json()!r})"
        lines += [f"declared = {source}", "model = declared.build().cuda()"]
    else:
        config: Any = subject.module.config
        lines.append(f"config = transformers.{type(config).__name__}.from_dict({config.to_diff_dict()!r})")
        lines.append(f"model = transformers.{type(subject.module).__name__}(config).cuda()")
    lines += ["rg.costs.shard(model)"] if ranks > 1 else []
    model = "declared" if subject.declared else "model"
    lines.append(f"inputs, targets = rg.costs.example({model}, n={n}, batch={batch})")
    if option.training is not None:
        step = f"step = rg.costs.stepping(model, inputs, targets, rg.{option.training!r})\nstep()"
    elif option.cached:
        step = "model = model.bfloat16().eval()\nrg.costs.generate_one(model, inputs)"
    else:
        step = "model = model.bfloat16().eval()\nwith torch.no_grad():\n    rg.costs.call(model, inputs)"
    return "\n".join([*lines, step])
