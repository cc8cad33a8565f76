"""Checks before the first update: cost, memory and time of a run, and laws that its model has to satisfy."""

import copy
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ... import files, spec
from ...costs.entry import cost
from ...costs.memory.step import TrainingStep
from ...costs.result import Cost
from ...costs.time import estimate
from ...errors import FormatError, RegardError, SpecError
from ...laws import Budget, check
from ...machine import Roofline, load_roofline, measure, readable
from ..data.batches import by_tokens
from ..data.datasets import ContinuousText, SentencePairs
from ..loop import meter
from .base import Recipe
from .trial_run import Speed, measure_speed, random_state_kept

FILE = "preflight.json"
BEFORE_TRAINING = ("L29", "L31")  # causality, padding: a model that violates them can read its targets
AFTER_TRAINING = ("L29", "L31", "L32", "L33", "L48", "L52", "L56")
MAX_CHECKED_PARAMETERS = 50_000_000  # a larger model is checked with one layer per stack
BUDGET = Budget(cases=2, seconds=10.0)  # per law; two cases usually take less
WEIGHT_PASSES = {"norm": 2, "average": 3}  # how often an update reads or writes each weight


@dataclass(frozen=True)
class MeanBatch:
    """The mean of the batches of an epoch."""

    rows: int
    n: int  # tokens per row; of a pair those of the target
    m: int  # of a pair those of the source, otherwise n
    predicted: int | float  # per row
    padding_share: int | float
    batches_per_epoch: int


@dataclass(frozen=True)
class LawResult:
    """The result of checking one law."""

    number: str
    name: str
    formula: str
    status: str
    message: str = ""
    cases: int = 0


@dataclass(frozen=True)
class Preflight:
    """Cost, memory and time of a run, and the checked laws; `print` it, or call `json()`."""

    recipe: str
    parameters: int
    batch: MeanBatch
    flops: int | float  # of matrix products, both passes, per prediction
    memory: int | None  # bytes at the peak of an update
    free: int | None  # bytes of memory
    fits: int | None  # the largest number of tokens per batch that fits, where it was computed
    updates: int
    seconds: int | float  # of the whole run
    tokens_per_second: int | float
    method: str  # how the time was estimated
    machine: dict[str, Any]
    laws: tuple[LawResult, ...] = ()

    def json(self, indent: int | None = 1) -> str:
        return json.dumps(asdict(self), indent=indent, ensure_ascii=False)

    @staticmethod
    def from_json(text: str) -> "Preflight":
        plain = json.loads(text)
        laws = tuple(LawResult(**law) for law in plain["laws"])
        return Preflight(**plain | {"batch": MeanBatch(**plain["batch"]), "laws": laws})

    def require_laws(self) -> None:
        """Raise an error if the model violates a law."""
        for law in self.laws:
            if law.status in ("broken", "raised"):
                raise RegardError(
                    f"the model violates law {law.number}, {law.name} ({law.formula}): {law.message}; its training "
                    f"loss would be meaningless"
                )

    def __str__(self) -> str:
        b = self.batch
        lines = [
            f"{self.recipe}: {self.parameters:,} parameters",
            f"  batch        {b.rows:,} rows of {_sides(b)} tokens on average; {b.padding_share:.1%} padding; "
            f"{b.batches_per_epoch:,} batches per epoch",
            f"  compute      {self.flops / 1e6:,.2f} MFLOP per predicted token, both passes",
        ]
        if self.memory is not None:
            lines.append(f"  memory       {readable(self.memory)} at the peak of an update, {self._room()}")
        lines += [
            f"  time         {format_duration(self.seconds)} for {self.updates:,} updates, "
            f"{self.tokens_per_second:,.0f} tokens/s; estimated {self.method}",
        ]
        lines += [f"  {law.number} {law.name}: {law.status}{_reason(law)}" for law in self.laws]
        return "\n".join(lines)

    def _room(self) -> str:
        if self.free is None or self.memory is None:
            return "free memory unknown"
        if self.memory <= self.free:
            return f"{readable(self.free)} are free: it fits"
        return f"{readable(self.free)} are free: it does not fit; {what_fits(self.fits)}"


def _sides(b: MeanBatch) -> str:
    return f"{b.n}" if b.n == b.m else f"{b.m} + {b.n}"


def _reason(law: LawResult) -> str:
    return "" if law.status == "holds" or not law.message else f" ({law.message})"


def what_fits(tokens: int | None) -> str:
    """What to change so that a batch fits, by the estimated cost."""
    if not tokens:
        return "not even one row fits: make the model smaller, or set checkpoint=True in it"
    return f"tokens={tokens:,} fits: raise accumulate to keep the effective batch size"


def preflight(
    recipe: Recipe,
    rows: Any,
    model: nn.Module,
    device: torch.device,
    world: int = 1,
    laws: Sequence[str] = BEFORE_TRAINING,
) -> Preflight:
    """Estimates for this recipe on these training rows, on `world` of these devices."""
    s = recipe.settings
    batch = mean_batch(rows, s.tokens, s.seed, s.packed, s.bucketed)
    costs = step_cost(recipe, batch, device)
    free = meter.memory_free(device)
    peak = None if costs.memory is None else costs.memory.training_peak
    too_large = peak is not None and free is not None and peak > free
    parameters = sum(p.numel() for p in model.parameters())
    speed = None if too_large else measure_speed(recipe, rows, model, device)
    speed = speed or _estimated_speed(costs, recipe, batch, parameters, device)
    per_update = speed.seconds / speed.updates / world
    seconds = s.steps * per_update if s.minutes is None else 60.0 * s.minutes
    return Preflight(
        recipe.name,
        parameters,
        batch,
        flops_per_prediction(costs, batch),
        peak,
        free,
        _fitting_tokens(costs, batch, free) if too_large and free else None,
        max(round(seconds / per_update), 1),
        round(seconds, 3),
        round(world * speed.predicted / speed.seconds, 1),
        speed.method if world == 1 else f"{speed.method}, assuming a perfect speedup on {world} ranks",
        meter.machine(device),
        check_laws(model, laws, autoregressive=isinstance(recipe.data, SentencePairs | ContinuousText)),
    )


def require_memory(recipe: Recipe, device: torch.device) -> None:
    """Refuse, before it is built, a model whose weights, gradients and optimizer state exceed the free memory."""
    free = meter.memory_free(device)
    n = None if isinstance(recipe.model, spec.Vision) else 1
    parameters = cost(recipe.model, n=n).total.parameters
    copies = 4 + (
        recipe.settings.average is not None
    )  # weights, gradients, two moments, the averaged weights
    needed = 4 * copies * parameters
    if free is not None and needed > free:
        raise SpecError(
            f"the model of {recipe.name} has {parameters:,} parameters: its weights, gradients and optimizer state "
            f"need {readable(needed)}, and {readable(free)} are free on {device}; make it smaller, with "
            "fewer layers or a smaller d_model"
        )


def max_tokens(recipe: Recipe, rows: Any, device: torch.device) -> int:
    """How many tokens a batch may have in the memory that is free now, by its estimated cost."""
    s = recipe.settings
    batch = mean_batch(rows, s.tokens, s.seed, s.packed, s.bucketed)
    return _fitting_tokens(step_cost(recipe, batch, device), batch, meter.memory_free(device) or 0)


def _fitting_tokens(costs: Cost, batch: MeanBatch, free: int) -> int:
    sides = batch.n if batch.n == batch.m else batch.n + batch.m
    return costs.fits(free) * sides if free else 0


def mean_batch(
    rows: Any, tokens: int, seed: int = 0, packed: bool = False, bucketed: bool = False
) -> MeanBatch:
    """The mean batch of an epoch; predictions are counted in eight of the batches."""
    plan = by_tokens(rows.sizes, tokens, packed=packed, bucketed=bucketed, seed=seed)
    lengths = [max(round(x), 1) for x in rows.sizes.double().mean(0).tolist()]
    batches = [plan[i] for i in range(0, len(plan), max(len(plan) // 8, 1))]
    with random_state_kept(torch.device("cpu")):  # rows may mask tokens at random
        predicted = sum(rows.batch(one).predicted for one in batches) / sum(map(len, batches))
    count = max(round(len(rows) / len(plan)), 1)
    share = round(plan.padding_share, 4)
    return MeanBatch(count, lengths[-1], lengths[0], round(predicted, 2), share, len(plan))


def step_cost(recipe: Recipe, batch: MeanBatch, device: torch.device) -> Cost:
    """The cost of one training step on a mean batch."""
    n = None if isinstance(recipe.model, spec.Vision) else batch.n  # an image has its own number of tokens
    m = batch.m if isinstance(recipe.model, spec.EncoderDecoder) else None
    training = TrainingStep(implementation="fused", autocast=recipe.settings.autocast)
    return cost(recipe.model, n=n, m=m, batch=batch.rows, train=training, device=device.type)


def flops_per_prediction(costs: Cost, batch: MeanBatch) -> float:
    """FLOPs of the matrix products of both passes per prediction."""
    return (costs.total.flops + costs.total.backward_flops) / (batch.rows * batch.predicted)


def meter_of(recipe: Recipe, rows: Any, device: torch.device, world: int = 1) -> meter.Meter:
    """The meter of a run on `world` devices."""
    s = recipe.settings
    batch = mean_batch(rows, s.tokens, s.seed, s.packed, s.bucketed)
    with random_state_kept(device):
        peak = meter.peak(device.type, s.autocast or "float32", torch.get_num_threads())
    flops = flops_per_prediction(step_cost(recipe, batch, device), batch)
    return meter.Meter(flops, world * peak, device)


def _roofline(device: torch.device) -> tuple[Roofline, str]:
    """The stored or measured peak rates of this machine, and where they come from."""
    known, kind = load_roofline(), "CPU" if device.type == "cpu" else meter.machine(device)["device"]
    if known is not None and kind in known.machine:
        return known, f"from the rates of `regard bench machine` ({known.machine})"
    with random_state_kept(device):
        measured = measure(device.type)
    rate, bandwidth = measured.flops_per_s["float32"] / 1e9, measured.bytes_per_s / 1e9
    return measured, f"from rates measured now: {rate:,.0f} GFLOP/s, {bandwidth:,.0f} GB/s"


def _estimated_speed(
    costs: Cost, recipe: Recipe, batch: MeanBatch, parameters: int, device: torch.device
) -> Speed:
    """The time of an update from its FLOPs and bytes and the machine's peak rates, without Python's overhead."""
    roofline, method = _roofline(device)
    s, per = recipe.settings, WEIGHT_PASSES
    phases = estimate(costs, roofline).phases
    passes, update = phases["forward"] + phases["backward"], phases["optimizer"]
    times = (per["norm"] if s.clip else 0) + (per["average"] if s.average else 0)
    seconds = s.accumulate * passes + update + times * 4 * parameters / roofline.bytes_per_s
    return Speed(1, seconds, s.accumulate * batch.rows * batch.predicted, method)


def check_laws(model: nn.Module, laws: Sequence[str], autoregressive: bool = False) -> tuple[LawResult, ...]:
    """Check these laws on the model, in float64 on the CPU; the random state of the run is not changed.

    A law that does not apply is omitted, except that an autoregressive model has to be causal.
    """
    declared = getattr(model, "spec", None)
    with torch.random.fork_rng(devices=[]):
        large = sum(p.numel() for p in model.parameters()) > MAX_CHECKED_PARAMETERS
        copied = shallow(declared).build() if large and declared is not None else copy.deepcopy(model).cpu()
        try:
            report = check(copied.eval(), laws, BUDGET)
        except RegardError as e:  # no adapter supports this model
            return (LawResult("", "laws", "", "not checked", str(e)),)
    results = [
        LawResult(o.law.number, o.law.name, o.law.formula, o.status, o.message, o.cases)
        for o in report.outcomes
    ]
    if autoregressive:
        message = "it predicts the next token and may attend to it; declare pattern=causal()"
        results = [
            replace(law, status="broken", message=message) if _is_not_causal(law) else law for law in results
        ]
    return tuple(law for law in results if law.status != "not applicable")


def _is_not_causal(law: LawResult) -> bool:
    return law.number == "L29" and law.status == "not applicable"


def shallow(declared: Any) -> Any:
    """The same declaration with one layer per stack."""
    match declared:
        case spec.EncoderDecoder():
            return replace(declared, encoder=shallow(declared.encoder), decoder=shallow(declared.decoder))
        case spec.Vision():
            return replace(declared, encoder=shallow(declared.encoder))
        case spec.Encoder() | spec.Decoder():
            return replace(declared, layers=1)
    return declared


def stored(folder: Path) -> Preflight | None:
    """The stored checks of a run; None where there are none."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        return Preflight.from_json(files.read_checked(folder, FILE))
    except (json.JSONDecodeError, TypeError, KeyError, RecursionError) as e:
        raise FormatError(f"{path} is damaged: {e}; delete it, and `regard train` writes it again") from e


def format_duration(seconds: int | float) -> str:
    """
    >>> format_duration(372), format_duration(59.4), format_duration(7300)
    ('6 min 12 s', '59 s', '2 h 1 min')
    """
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60} s" if total % 60 else f"{total // 60} min"
    return f"{total // 3600} h {total % 3600 // 60} min"
