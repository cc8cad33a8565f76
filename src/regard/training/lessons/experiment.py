"""The training loop of the lessons: it trains each model, stores it with its losses, and reports progress."""

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import RegardError
from ...lens.recorder import Recorder
from ...schedule import Schedule, warmup_cosine
from ..loop.optimizer import AdamW
from ..loop.threads import Step, Threads
from .lesson import seeded

Loss = Callable[[Any, torch.Generator], Tensor]  # of a model, on a batch that it samples
MIN_UPDATES = 20  # of a training whose number of threads is measured
REPORT_EVERY = 0.2  # seconds between two events


@dataclass(frozen=True)
class Training:
    """One trained model: its size, its updates and what they took."""

    name: str
    parameters: int
    updates: int
    seconds: float
    threads: int
    first_loss: float
    last_loss: float


@dataclass
class Experiment:
    """Trains the models of one lesson.

    device: where they are trained; they are evaluated on the CPU. threads: the number of CPU threads, by default the
    fastest, measured before each training. estimate: no training, only a few timed updates of copies.
    """

    seed: int = 0
    device: str | torch.device = "cpu"
    threads: int | None = None
    estimate: bool = False
    listener: Callable[[dict[str, Any]], None] = lambda event: None
    models: dict[str, nn.Module] = field(default_factory=dict)
    recorder: Recorder = field(default_factory=Recorder)
    trainings: list[Training] = field(default_factory=list)

    def fit(
        self,
        name: str,
        model: nn.Module,
        loss: Loss,
        steps: int,
        rate: float | Schedule = 1e-3,
        *,
        floor: float | None = None,
        on_step: Callable[[int], None] | None = None,
    ) -> list[float]:
        """Train on loss(model, generator); returns the loss of each step and leaves the model in evaluation mode.

        floor: the smallest loss that is possible, for the picture. on_step: called before each update.
        """
        self.models[name] = model
        generator = seeded(self.seed)
        threads = self.threads or (None if steps >= MIN_UPDATES else 1)
        if self.estimate:
            return self._estimated(name, model, loss, steps, rate, threads)
        began = reported = time.perf_counter()
        model.to(self.device).train()
        curve: list[float] = []
        update = _updates(model, loss, steps, rate, generator)
        with Threads(lambda: self._rehearsal(model, loss, steps, rate), threads) as chosen:
            for step in range(1, steps + 1):
                if on_step is not None:
                    on_step(step)
                start = time.perf_counter()
                curve.append(update(step))
                now = time.perf_counter()
                chosen.observe(now - start, 1)
                self.recorder.loss(step, curve[-1], name, floor)
                if now - reported > REPORT_EVERY or step == steps:
                    reported = now
                    self._report("train", name, step=step, steps=steps, loss=curve[-1])
            count = chosen.count
        model.to("cpu").eval()
        seconds = time.perf_counter() - began
        self.trainings.append(Training(name, _size(model), steps, seconds, count, curve[0], curve[-1]))
        return curve

    def _report(self, event: str, model: str, **values: Any) -> None:
        self.listener({"event": event, "model": model, **values})

    def _rehearsal(self, model: nn.Module, loss: Loss, steps: int, rate: float | Schedule) -> Step:
        """Updates of a copy, on batches of its own: neither the model nor the random numbers change."""
        twin = copy.deepcopy(model)
        update = _updates(twin, loss, steps, rate, seeded(self.seed))

        def step() -> int:
            with torch.random.fork_rng(devices=[]):
                update(1)
            return 1

        return step

    def _estimated(
        self, name: str, model: nn.Module, loss: Loss, steps: int, rate: float | Schedule, threads: int | None
    ) -> list[float]:
        """The time of the training, from a few updates of a copy; the model stays as it is."""
        model.to(self.device).train()
        with Threads(lambda: self._rehearsal(model, loss, steps, rate), threads) as chosen:
            step, began, updates = self._rehearsal(model, loss, steps, rate), time.perf_counter(), 0.0
            while updates < 3 or (updates < 30 and time.perf_counter() - began < 0.1):
                if updates == 1:
                    began = time.perf_counter()  # the first update loads kernels
                updates += step()
            each = (time.perf_counter() - began) / (updates - 1)
            count = chosen.count
        model.to("cpu").eval()
        self.trainings.append(Training(name, _size(model), steps, each * steps, count, math.nan, math.nan))
        return [math.nan]


def _updates(
    model: nn.Module, loss: Loss, steps: int, rate: float | Schedule, generator: torch.Generator
) -> Callable[[int], float]:
    """A function that makes the update of a step and returns its loss."""
    warmup = min(max(steps // 10, 1), steps - 1)
    schedule = rate if isinstance(rate, Schedule) else warmup_cosine(rate, warmup, steps)
    optimizer = AdamW(betas=(0.9, 0.98)).build(model)

    def update(step: int) -> float:
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        value = loss(model, generator)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        number = float(value.detach())
        if not math.isfinite(number):
            raise RegardError(f"the loss is {number} at step {step}: train with another seed or fewer steps")
        return number

    return update


def _size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
