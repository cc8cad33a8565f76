"""Before the first update: what a run costs, whether it fits, how long it takes, whether the model is lawful."""

import copy
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ... import spec
from ...costs import time as machines
from ...costs.entry import cost
from ...costs.memory.step import TrainingStep
from ...costs.tree import Cost
from ...errors import RegardError
from ...laws import Budget, check
from ..data.batches import by_tokens
from ..data.sources import Running, Sentences
from ..loop import meter
from .base import Recipe
from .trial_run import Pace, dice_kept, rehearse

FILE = "before.json"
FIRST = ("L29", "L31")  # causality, padding: a model without them learns to cheat
AFTERWARDS = ("L29", "L31", "L32", "L33", "L48", "L52", "L56")
SHALLOW = 50_000_000  # parameters; of a larger model the laws are tried on one layer a stack
BUDGET = Budget(cases=2, seconds=10.0)  # a law; two cases take less unless the machine is busy
UPDATE = {"norm": 2, "AdamW": 7, "average": 3}  # times that each weight is read or written


@dataclass(frozen=True)
class Batch:
    """A mean batch of the training rows."""

    rows: int
    n: int  # tokens of a row; of a pair the target's
    m: int  # of a pair the source's, else as n
    predicted: int | float  # of a row
    waste: int | float  # the share of padding
    an_epoch: int  # batches


@dataclass(frozen=True)
class LawTold:
    """What came of one law."""

    number: str
    name: str
    formula: str
    status: str
    said: str = ""
    cases: int = 0


@dataclass(frozen=True)
class Before:
    """All of it. `print` it, or `json()`."""

    recipe: str
    parameters: int
    batch: Batch
    operations: int | float  # matrix products of both passes, a prediction
    memory: int | None  # bytes at the peak of an update
    there: int | None  # bytes that are free
    fits: int | None  # the most tokens a batch that would
    updates: int
    seconds: int | float  # of the whole run
    tokens_per_second: int | float
    how: str  # it was estimated
    machine: dict[str, Any]
    laws: tuple[LawTold, ...] = ()

    def json(self, indent: int | None = 1) -> str:
        return json.dumps(asdict(self), indent=indent, ensure_ascii=False)

    @staticmethod
    def from_json(text: str) -> "Before":
        plain = json.loads(text)
        laws = tuple(LawTold(**one) for one in plain["laws"])
        return Before(**plain | {"batch": Batch(**plain["batch"]), "laws": laws})

    def need_lawful(self) -> None:
        """Refuse a model that breaks a law."""
        for one in self.laws:
            if one.status in ("broken", "raised"):
                raise RegardError(
                    f"the model breaks {one.number}, {one.name} ({one.formula}): {one.said}; training it would "
                    f"mean nothing"
                )

    def __str__(self) -> str:
        b = self.batch
        lines = [
            f"{self.recipe}: {self.parameters:,} parameters",
            f"  a batch      {b.rows:,} rows, {_sides(b)} tokens on the mean; {b.waste:.1%} is padding; "
            f"{b.an_epoch:,} batches an epoch",
            f"  operations   {self.operations / 1e6:,.2f} MFLOP a predicted token, both passes",
        ]
        if self.memory is not None:
            lines.append(f"  memory       {written(self.memory)} at the peak of an update, {self._room()}")
        lines += [
            f"  time         {duration(self.seconds)} for {self.updates:,} updates, "
            f"{self.tokens_per_second:,.0f} tokens/s; estimated {self.how}",
        ]
        lines += [f"  {one.number} {one.name}: {one.status}" + _why(one) for one in self.laws]
        return "\n".join(lines)

    def _room(self) -> str:
        if self.there is None or self.memory is None:
            return "of an unknown amount"
        if self.memory <= self.there:
            return f"of {written(self.there)} that are free: it fits"
        return f"of {written(self.there)} that are free: it does not fit; {what_fits(self.fits)}"


def _sides(b: Batch) -> str:
    return f"{b.n}" if b.n == b.m else f"{b.m} + {b.n}"


def _why(one: LawTold) -> str:
    return "" if one.status == "holds" or not one.said else f" ({one.said})"


def what_fits(tokens: int | None) -> str:
    """A way out, from `cost`."""
    if not tokens:
        return "not even one row would: make the model smaller, or set checkpoint=True in it"
    return f"tokens={tokens:,} would: raise accumulate to keep the batch"


def before(
    recipe: Recipe,
    rows: Any,
    model: nn.Module,
    device: torch.device,
    world: int = 1,
    laws: Sequence[str] = FIRST,
) -> Before:
    """What can be said of this recipe on these training rows, on so many of these devices."""
    s = recipe.settings
    batch = mean_batch(rows, s.tokens, s.seed, s.packed)
    priced = price(recipe, batch, device)
    there = meter.memory_there(device)
    peak = None if priced.memory is None else priced.memory.training_peak
    short = peak is not None and there is not None and peak > there
    parameters = sum(p.numel() for p in model.parameters())
    pace = None if short else rehearse(recipe, rows, model, device)
    pace = pace or _by_rates(priced, recipe, batch, parameters, device)
    an_update = pace.seconds / pace.updates / world
    seconds = s.steps * an_update if s.minutes is None else 60.0 * s.minutes
    return Before(
        recipe.name,
        parameters,
        batch,
        operations(priced, batch),
        peak,
        there,
        _fitting(priced, batch, there) if short and there else None,
        max(round(seconds / an_update), 1),
        round(seconds, 3),
        round(world * pace.predicted / pace.seconds, 1),
        pace.how if world == 1 else f"{pace.how}, shared by {world} ranks without a loss",
        meter.machine(device),
        tried(model, laws, foresees=isinstance(recipe.data, Sentences | Running)),
    )


def most_tokens(recipe: Recipe, rows: Any, device: torch.device) -> int:
    """How many tokens a batch may have in the memory that is free now, by its cost."""
    s = recipe.settings
    batch = mean_batch(rows, s.tokens, s.seed, s.packed)
    return _fitting(price(recipe, batch, device), batch, meter.memory_there(device) or 0)


def _fitting(priced: Cost, batch: Batch, there: int) -> int:
    sides = batch.n if batch.n == batch.m else batch.n + batch.m
    return priced.fits(there) * sides if there else 0


def mean_batch(rows: Any, tokens: int, seed: int = 0, packed: bool = False) -> Batch:
    plan = by_tokens(rows.sizes, tokens, packed=packed, seed=seed)
    lengths = [max(round(x), 1) for x in rows.sizes.double().mean(0).tolist()]
    some = [plan[i] for i in range(0, len(plan), max(len(plan) // 8, 1))]
    with dice_kept(torch.device("cpu")):  # rows may hide tokens at random
        predicted = sum(rows.batch(one).predicted for one in some) / sum(map(len, some))
    mean = max(round(len(rows) / len(plan)), 1)
    return Batch(mean, lengths[-1], lengths[0], round(predicted, 2), round(plan.waste, 4), len(plan))


def price(recipe: Recipe, batch: Batch, device: torch.device) -> Cost:
    """The cost of one training step on a mean batch."""
    n = None if isinstance(recipe.model, spec.Vision) else batch.n  # an image knows its own
    m = batch.m if isinstance(recipe.model, spec.EncoderDecoder) else None
    training = TrainingStep(implementation="fused", autocast=recipe.settings.autocast)
    return cost(recipe.model, n=n, m=m, batch=batch.rows, train=training, device=device.type)


def operations(priced: Cost, batch: Batch) -> float:
    """Matrix products of both passes for one prediction."""
    return (priced.total.flops + priced.total.backward_flops) / (batch.rows * batch.predicted)


def gauge(recipe: Recipe, rows: Any, device: torch.device, world: int = 1) -> meter.Meter:
    """The meter of a run on so many devices."""
    s = recipe.settings
    batch = mean_batch(rows, s.tokens, s.seed, s.packed)
    with dice_kept(device):
        rate = meter.peak(device.type, s.autocast or "float32", torch.get_num_threads())
    return meter.Meter(operations(price(recipe, batch, device), batch), world * rate, device)


def _roofline(device: torch.device) -> tuple[machines.Roofline, str]:
    known, kind = machines.load_roofline(), "CPU" if device.type == "cpu" else meter.machine(device)["device"]
    if known is not None and kind in known.machine:
        return known, f"from the rates of `regard bench machine` ({known.machine})"
    with dice_kept(device):
        found = machines.measure(device.type)
    rate = found.flops_per_s["float32"] / 1e9
    return found, f"from rates measured now: {rate:,.0f} GFLOP/s, {found.bytes_per_s / 1e9:,.0f} GB/s"


def _by_rates(priced: Cost, recipe: Recipe, batch: Batch, parameters: int, device: torch.device) -> Pace:
    """An update's products and bytes over what the machine does of them; what Python takes is left out."""
    roofline, how = _roofline(device)
    s = recipe.settings
    dtype = s.autocast if s.autocast in roofline.flops_per_s else "float32"
    passes = machines.estimate(priced, roofline, dtype, backward=True).seconds
    times = UPDATE["AdamW"] + (UPDATE["norm"] if s.clip else 0) + (UPDATE["average"] if s.average else 0)
    seconds = s.accumulate * passes + times * 4 * parameters / roofline.bytes_per_s
    return Pace(1, seconds, s.accumulate * batch.rows * batch.predicted, how)


def tried(model: nn.Module, laws: Sequence[str], foresees: bool = False) -> tuple[LawTold, ...]:
    """The laws on this model, in float64 on the CPU; the dice of the run are not touched.

    One that does not apply is left out; but a model that foresees what comes next has to be causal.
    """
    declared = getattr(model, "spec", None)
    with torch.random.fork_rng(devices=[]):
        large = sum(p.numel() for p in model.parameters()) > SHALLOW
        one = shallow(declared).build() if large and declared is not None else copy.deepcopy(model).cpu()
        try:
            found = check(one.eval(), laws, BUDGET)
        except RegardError as e:  # a model that no adapter knows
            return (LawTold("", "laws", "", "not tried", str(e)),)
    told = [
        LawTold(o.law.number, o.law.name, o.law.formula, o.status, o.message, o.cases) for o in found.outcomes
    ]
    if foresees:
        said = "it is to foresee what comes next, and may look there; declare pattern=causal()"
        told = [replace(o, status="broken", said=said) if _is_not_causal(o) else o for o in told]
    return tuple(o for o in told if o.status != "not applicable")


def _is_not_causal(one: LawTold) -> bool:
    return one.number == "L29" and one.status == "not applicable"


def shallow(declared: Any) -> Any:
    """The same declaration with one layer a stack."""
    match declared:
        case spec.EncoderDecoder():
            return replace(declared, encoder=shallow(declared.encoder), decoder=shallow(declared.decoder))
        case spec.Vision():
            return replace(declared, encoder=shallow(declared.encoder))
        case spec.Encoder() | spec.Decoder():
            return replace(declared, layers=1)
    return declared


def stored(folder: Path) -> Before | None:
    """What was told before this run; None where nobody asked."""
    path = folder / FILE
    return Before.from_json(path.read_text(encoding="utf-8")) if path.is_file() else None


def written(size: int | float) -> str:
    """
    >>> written(1_500_000_000), written(2048), written(12)
    ('1.40 GiB', '2.00 KiB', '12 B')
    """
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} B"


def duration(seconds: int | float) -> str:
    """
    >>> duration(372), duration(59.4), duration(7300)
    ('6 min 12 s', '59 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
