"""What fits? The largest batch of each kind of training step within a card's memory, its time, and code to run it."""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SpecError
from ..pattern import Pattern
from ..spec import Spec, preset
from ..spec.base import require_positive
from . import huggingface
from .gpus import CARDS, Card, card
from .memory.allocator import OutOfMemory, Usage
from .memory.declared import example_inputs, largest, module_of, targets_of
from .memory.report import Setting, traced, usage
from .memory.sharding import per_rank
from .memory.step import TrainingStep
from .sizes import Request
from .time import load_roofline, step_time

SHARE = 0.9  # of the memory that a plan uses; the rest is for fragments, the CUDA context and other libraries
DEFAULT_N = 1024
GB = 10**9


@dataclass(frozen=True)
class Choice:
    """One way to train or run the model on one card, with its predicted peak and time."""

    gpu: str
    memory: int  # of the card, in bytes
    label: str
    n: int
    batch: int  # per rank; 0 if nothing fits
    ranks: int
    strategy: str
    training: TrainingStep | None
    peak: int
    reserved: int
    seconds: float
    code: str

    @property
    def tokens_per_second(self) -> float:
        return self.ranks * self.batch * self.n / self.seconds if self.batch else 0.0

    def plain(self) -> dict[str, Any]:
        training = None if self.training is None else dataclasses.asdict(self.training)
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "training"}
        return {**fields, "training": training, "tokens_per_second": self.tokens_per_second}


@dataclass(frozen=True)
class Plan:
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

    def json(self, indent: int | None = None) -> str:
        return json.dumps(self.plain(), indent=indent, ensure_ascii=False)

    def __str__(self) -> str:
        titles = ("GPU", "ranks", "how", "n", "batch", "peak, GB", "of", "step, ms", "tokens/s")
        rows = [titles]
        for c in self.choices:
            fit = bool(c.batch)
            rows.append(
                (c.gpu, f"{c.ranks}", c.label, f"{c.n:,}", f"{c.batch:,}" if fit else "none fits",
                 f"{c.peak / GB:,.2f}", f"{c.memory / GB:,.0f}", f"{c.seconds * 1e3:,.1f}" if fit else "",
                 f"{c.tokens_per_second:,.0f}" if fit else "")
            )  # fmt: skip
        widths = [max(len(r[k]) for r in rows) for k in range(len(titles))]
        lines = []
        for r in rows:
            cells = [x.ljust(w) if k in (0, 2) else x.rjust(w) for k, (x, w) in enumerate(zip(r, widths))]
            lines.append("  ".join(cells).rstrip())
        best = (
            ["", f"the fastest, batch {self.choices[0].batch}:", self.choices[0].code]
            if self.choices[0].batch
            else []
        )
        return "\n".join([self.model, "", *lines, "", *self.notes, *best])


def plan(
    model: Any,
    *,
    memory: int | None = None,
    gpu: str | None = None,
    n: int | None = None,
    train: bool = True,
    ranks: int = 1,
    pattern: Pattern | None = None,
) -> Plan:
    """The largest batch that fits, for each kind of step, with its time: sorted by tokens per second.

    model: a declaration, the name of a preset, a Hugging Face configuration or model. gpu: names of cards, separated
    by commas (h200, h100, a100-80, a100-40, l40s, l4, 4090, …); memory: bytes of a card, in place of its own.
    train: compare bfloat16, checkpointing, 8-bit states and LoRA; False plans a forward pass. ranks: cards that share
    the work (FSDP2). pattern: replaces the pattern of a declared attention.
    """
    subject = _Subject.of(model, n, pattern)
    require_positive("ranks", ranks)
    names = [g.strip() for g in (gpu or "h100").split(",")]
    choices = []
    for name in names:
        chosen = card(name) if gpu else CARDS["h100"]
        chosen = chosen if memory is None else chosen._replace(memory=memory)
        label = name if gpu else f"{chosen.memory / GB:,.0f} GB"
        for how, training in _options(train):
            choices.append(_choice(subject, label, chosen, how, training, ranks))
    choices.sort(key=lambda c: -c.tokens_per_second)
    notes = [
        f"a batch is per rank; its predicted peak is at most {SHARE:.0%} of the memory",
        "times are estimates from the rates of data sheets, or of `regard bench machine`"
        + ("; the exchange between ranks is not counted" if ranks > 1 else ""),
    ]
    return Plan(subject.name, tuple(choices), tuple(notes))


def _options(train: bool) -> Iterator[tuple[str, TrainingStep | None]]:
    if not train:
        yield "forward, bfloat16", None
        return
    low = TrainingStep(autocast="bfloat16")
    yield "float32", TrainingStep()
    yield "bfloat16", low
    yield "bfloat16, checkpointing", replace(low, checkpointing=True)
    yield "bfloat16, checkpointing, 8-bit AdamW", replace(low, checkpointing=True, optimizer="adamw8bit")
    yield "bfloat16, LoRA 16", replace(low, lora=16)
    yield "bfloat16, LoRA 16, checkpointing", replace(low, lora=16, checkpointing=True)


def _choice(
    subject: "_Subject", label: str, on: Card, how: str, training: TrainingStep | None, ranks: int
) -> Choice:
    traces: dict[int, tuple[Any, Usage]] = {}

    def peak(batch: int) -> int:
        trace, step = subject.run(batch, training, on)
        try:
            if step is None:
                used = usage(trace, subject.begin(trace), set(), training=False, limit=on.memory)
            else:
                used = per_rank(step, ranks, "fsdp", limit=on.memory)
        except OutOfMemory:
            return 2 * on.memory
        traces[batch] = trace, used
        return used.peak

    batch = largest(peak, int(SHARE * on.memory), 1 << 20)
    at = traces.get(max(batch, 1))
    if not batch or at is None:
        least = at[1].peak if at is not None else 2 * on.memory
        return Choice(label, on.memory, how, subject.n, 0, ranks, "fsdp", training, least, 0, 0.0, "")
    trace, used = at
    stored = load_roofline()
    roofline = stored if stored is not None and label in stored.machine.lower() else on.roofline(label)
    seconds = step_time(trace.work, roofline).seconds
    code = subject.code(batch, training)
    return Choice(
        label, on.memory, how, subject.n, batch, ranks, "fsdp", training, used.peak, used.reserved, seconds, code
    )  # fmt: skip


@dataclass(frozen=True)
class _Subject:
    """What is planned: how to run it at a batch size, and how to write that as code."""

    name: str
    n: int
    spec: Any  # a declaration, or None
    module: nn.Module | None

    @staticmethod
    def of(model: Any, n: int | None, pattern: Pattern | None) -> "_Subject":
        name = model if isinstance(model, str) else ""
        model = preset(model) if isinstance(model, str) else model
        if not isinstance(model, Spec) and hasattr(model, "spec"):
            model = model.spec
        if isinstance(model, Spec):
            declared: Any = model if pattern is None else _with_pattern(model, pattern)
            length = declared.tokens if hasattr(declared, "tokens") else n or _default_n(declared)
            return _Subject(name if pattern is None and name else repr(declared), length, declared, None)
        if pattern is not None:
            raise SpecError("pattern= replaces the pattern of a declaration; this model has none of ours")
        if huggingface.is_config(model):
            model = huggingface.build(model)
        if not isinstance(model, nn.Module) or not hasattr(model, "config"):
            raise SpecError(
                f"cannot plan {type(model).__name__}: pass a declaration, the name of a preset, or a Hugging Face "
                f"configuration or model, whose inputs are known at any batch size"
            )
        limit = getattr(model.config, "max_position_embeddings", None)
        return _Subject(type(model).__name__, n or min(limit or DEFAULT_N, DEFAULT_N), None, model)

    def run(self, batch: int, training: TrainingStep | None, on: Card) -> tuple[Any, Any]:
        """The trace of one step at this batch size, and the step if it trains."""
        targets: Tensor | None = None
        if self.spec is not None:
            request = Request(self.spec, self.n, self.n, batch, train=bool(training))
            module = module_of(self.spec, None if training is None else training.checkpointing)
            given: tuple[tuple, dict] = (example_inputs(request), {})
            targets = targets_of(request) if training else None
        else:
            assert self.module is not None
            module = self.module
            given = ((), huggingface.generated_inputs(module, self.n, None, batch, training is not None))
        dtype = torch.float32 if training is not None else torch.bfloat16
        setting = Setting(given, targets, dtype, training, "cuda", on.gpu)
        trace, _, memory = traced(module, setting)
        return trace, memory.step

    @staticmethod
    def begin(trace: Any) -> int:
        records = trace.meter.records
        return next((i for i, (k, _) in enumerate(trace.meter.events) if records[k].phase != "setup"), 0)

    def code(self, batch: int, training: TrainingStep | None) -> str:
        """A program that runs one step of this choice."""
        t = training
        if self.spec is not None:
            build = [
                f"declared = rg.spec.from_json({self.spec.json()!r})"
                if self.name.startswith(type(self.spec).__name__)
                else f"declared = rg.preset({self.name!r})"
            ]
            build += [
                f"model = rg.costs.runnable(declared, checkpointing={bool(t and t.checkpointing)}).cuda()"
            ]
            inputs = [f"inputs, targets = rg.costs.example(declared, n={self.n}, batch={batch})"]
        else:
            assert self.module is not None
            config: Any = self.module.config
            build = [
                f"config = transformers.AutoConfig.for_model({config.model_type!r}, **{config.to_diff_dict()!r})",
                f"model = transformers.{type(self.module).__name__}(config).cuda()",
                *(["model.gradient_checkpointing_enable()"] if t and t.checkpointing else []),
            ]
            inputs = [f"inputs, targets = rg.costs.example(model, n={self.n}, batch={batch})"]
        head = ["import torch, regard as rg", *(["import transformers"] if self.spec is None else [])]
        if t is None:
            return "\n".join([*head, *build, "model = model.bfloat16().eval()", *inputs, "with torch.no_grad():",
                              "    rg.costs.call(model, inputs)"])  # fmt: skip
        return "\n".join(
            [*head, *build, *inputs, f"step = rg.costs.stepping(model, inputs, targets, rg.{t!r})", "step()"]
        )


def _with_pattern(declared: Any, pattern: Pattern) -> Any:
    """The same declaration with this pattern in its self-attention."""
    if hasattr(declared, "pattern"):
        return replace(declared, pattern=pattern)
    for name in ("attention", "block", "decoder", "encoder"):
        if getattr(declared, name, None) is not None:
            return replace(declared, **{name: _with_pattern(getattr(declared, name), pattern)})
    raise SpecError(f"{type(declared).__name__} has no attention whose pattern could be replaced")


def _default_n(declared: Any) -> int:
    inner = getattr(declared, "decoder", declared)
    position = getattr(getattr(inner, "embedding", None), "position", None)
    table = getattr(position, "table", None)
    return min(table, DEFAULT_N) if isinstance(table, int) else DEFAULT_N
