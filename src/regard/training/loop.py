"""The loop: batches, gradients, updates; it saves, stops and goes on where it was."""

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import FormatError, RegardError, SpecError
from ..schedule import Schedule
from . import checkpoints, optimiser
from .average import Mean, ema
from .batches import Stream
from .log import Log
from .optimiser import AdamW
from .tasks import Batch

ADAMW = AdamW()


@dataclass(frozen=True)
class Settings:
    """How something is trained, apart from what."""

    steps: int  # updates
    tokens: int  # a batch, padding counted
    schedule: Schedule
    _: KW_ONLY
    optimiser: AdamW = ADAMW
    minutes: int | float | None = None  # end then, the schedule stretched to it, whatever the steps
    clip: int | float | None = 1.0  # the gradient's global norm
    accumulate: int = 1  # batches an update
    average: ema | None = None
    autocast: str | None = None  # "bfloat16" or "float16"
    compile: bool = False
    seed: int = 0
    save_every: int = 500
    keep: int = 3
    log_every: int = 20
    valid_every: int = 500
    patience: int | None = None  # end after as many validations without a better one

    def __post_init__(self):
        for name in ("steps", "tokens", "accumulate", "save_every", "keep", "log_every", "valid_every"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name}={getattr(self, name)}: at least 1 is needed")
        if self.autocast not in (None, "bfloat16", "float16"):
            raise SpecError(f"autocast={self.autocast!r}; use 'bfloat16', 'float16' or None")


class Diverged(RegardError):
    """A loss or a gradient that is not finite."""


class Trainer:
    """A task's module in training. `run` yields what happened, an event at a time."""

    def __init__(self, task: nn.Module, train: Any, valid: Any, settings: Settings, folder: str | Path):
        self.task, self.train, self.valid = task, train, valid
        self.settings, self.folder = settings, Path(folder)
        self.device = next(task.parameters()).device
        self.optimiser = settings.optimiser.build(task)
        self.mean = None if settings.average is None else Mean(settings.average, task)
        self.stream = Stream(train.sizes, settings.tokens, settings.seed)
        self.call: Callable[..., tuple[Tensor, Tensor]] = torch.compile(task) if settings.compile else task
        self.step, self.seconds, self.seen = 0, 0.0, 0  # updates, time in training, tokens predicted
        self.best, self.bad = math.inf, 0

    def run(self, on_event: Callable[[dict[str, Any]], None] = lambda event: None) -> None:
        """Train to the end, from the last checkpoint where there is one."""
        with checkpoints.locked(self.folder):
            log = Log(self.folder)
            try:
                if checkpoints.steps(self.folder):
                    self.resume()
                    on_event(log.write("resume", self.step))
                with interruptible() as interrupted:
                    for event in self._events(interrupted):
                        on_event(log.write(event.pop("event"), self.step, **event))
            finally:
                log.close()

    def _events(self, interrupted: Callable[[], bool]) -> Iterator[dict[str, Any]]:
        s = self.settings
        began = mark = time.perf_counter()
        before = self.seconds
        losses: list[tuple[Tensor, int]] = []
        norm = torch.tensor(math.nan)
        while not self._over():
            mark = mark if losses else time.perf_counter()
            loss, predicted, norm = self._update()
            losses.append((loss, predicted))
            self.step, self.seen = self.step + 1, self.seen + predicted
            self.seconds = before + time.perf_counter() - began
            leave = interrupted()
            stop = self._over() or leave
            if self.step % s.log_every == 0 or stop:
                yield self._told(losses, norm, time.perf_counter() - mark)
                losses = []
            if self.step % s.valid_every == 0 or self._over():
                yield {"event": "valid", **self._validated()}
            if self.step % s.save_every == 0 or stop:
                self._need_finite(norm)
                yield {"event": "save", "path": str(self.save())}
            if leave:
                yield {"event": "interrupted"}
                return
        yield {"event": "done", "seconds": round(self.seconds, 2), "epochs": self.stream.epoch}

    def _over(self) -> bool:
        s = self.settings
        timed = s.minutes is not None and self.seconds >= 60 * s.minutes
        tired = s.patience is not None and self.bad > s.patience
        return timed or tired or (s.minutes is None and self.step >= s.steps)

    def rate(self) -> float:
        """The learning rate of the next update; the first is step 1."""
        s = self.settings
        if s.minutes is None:
            return s.schedule(self.step + 1)
        done = min(self.seconds / (60 * s.minutes), 1.0)
        return s.schedule(max(1, min(round(done * s.steps), s.steps)))

    def _update(self) -> tuple[Tensor, int, Tensor]:
        """One update: the sum of the plain losses, how many predictions they are of, the gradient's norm."""
        s = self.settings
        self.task.train()
        batches = [self.train.batch(self.stream.next()) for _ in range(s.accumulate)]
        predicted = sum(b.predicted for b in batches)
        total = torch.zeros((), device=self.device)
        for batch in batches:
            loss, plain = self._loss(batch)
            (loss / predicted).backward()
            total += plain.detach()
        parameters = [p for p in self.task.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if s.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, s.clip, norm)
        if (
            self.device.type == "cpu"
        ):  # elsewhere asking would wait for the device; it is asked when it is logged
            self._need_finite(norm)
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        if self.mean is not None:
            self.mean.update(self.step + 1)
        return total, predicted, norm

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        kind = self.settings.autocast
        dtype = None if kind is None else getattr(torch, kind)
        with torch.autocast(self.device.type, dtype=dtype, enabled=kind is not None):
            return self.call(**batch.to(self.device).given)

    def _told(self, losses: list[tuple[Tensor, int]], norm: Tensor, seconds: float) -> dict[str, Any]:
        self._need_finite(norm)
        predicted = sum(p for _, p in losses)
        plan = self.stream.plan
        return {
            "event": "train",
            "loss": float(sum(loss for loss, _ in losses) / predicted),
            "norm": float(norm),
            "rate": self.optimiser.param_groups[0]["lr"],
            "tokens_per_second": round(predicted / seconds),
            "seconds": round(self.seconds, 3),
            "waste": 0.0 if plan is None else round(plan.waste, 4),
        }

    def _need_finite(self, norm: Tensor) -> None:
        if not bool(torch.isfinite(norm)):
            there = checkpoints.steps(self.folder)
            kept = f"the last good checkpoint is step {there[-1]}" if there else "there is no checkpoint yet"
            raise Diverged(
                f"the gradient is not finite at step {self.step + 1} (loss too large, or NaN in the data); {kept}. "
                f"Lower the learning rate, warm up longer or clip lower, and run again"
            )

    @torch.no_grad()
    def _validated(self) -> dict[str, Any]:
        """The plain loss on the held-out rows, by the averaged weights where there are some."""
        with self.averaged():
            self.task.eval()
            stream = Stream(self.valid.sizes, self.settings.tokens)
            total, predicted = 0.0, 0
            while stream.plan is None or stream.index < len(stream.plan):
                batch = self.valid.batch(stream.next())
                total, predicted = total + float(self._loss(batch)[1]), predicted + batch.predicted
        loss = total / predicted
        self.best, self.bad = (loss, 0) if loss < self.best else (self.best, self.bad + 1)
        return {"loss": loss, "best": self.best}

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The averaged weights in the model for a while."""
        if self.mean is None:
            yield
            return
        self.mean.swap()
        try:
            yield
        finally:
            self.mean.swap()

    def save(self) -> Path:
        kept = optimiser.state(self.optimiser, self.task)
        kept |= {f"mean/{name}": t for name, t in (self.mean.state() if self.mean else {}).items()}
        kept["random/cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            kept["random/cuda"] = torch.cuda.get_rng_state(self.device)
        state = {
            "seconds": self.seconds,
            "seen": self.seen,
            "epoch": self.stream.epoch,
            "index": self.stream.index,
            "best": self.best if math.isfinite(self.best) else None,
            "bad": self.bad,
        }
        weights = dict(self.task.named_parameters()) | dict(self.task.named_buffers())
        return checkpoints.write(self.folder, self.step, weights, kept, state, self.settings.keep)

    def resume(self, step: int | None = None) -> None:
        """Go on from a checkpoint, as if nothing had happened."""
        weights, kept, state = checkpoints.read(self.folder, step, self.device)
        live = dict(self.task.named_parameters()) | dict(self.task.named_buffers())
        if unlike := sorted(set(live) ^ set(weights)):
            raise FormatError(f"the checkpoint is of another model: {unlike[0]!r} is in one of them only")
        with torch.no_grad():
            for name, tensor in weights.items():
                if live[name].shape != tensor.shape:
                    ours = tuple(live[name].shape)
                    raise FormatError(
                        f"{name} is {tuple(tensor.shape)} in the checkpoint and {ours} in the model"
                    )
                live[name].copy_(tensor)
        random = {k: kept.pop(k) for k in [k for k in kept if k.startswith("random/")]}
        mean = {k.removeprefix("mean/"): kept.pop(k) for k in [k for k in kept if k.startswith("mean/")]}
        optimiser.restore(self.optimiser, self.task, kept)
        if self.mean is not None:
            self.mean.restore(mean)
        self.step, self.seconds, self.seen = state["step"], state["seconds"], state["seen"]
        self.stream.epoch, self.stream.index, self.stream.plan = state["epoch"], state["index"], None
        self.best, self.bad = math.inf if state["best"] is None else state["best"], state["bad"]
        torch.set_rng_state(random["random/cpu"].cpu())
        if self.device.type == "cuda" and "random/cuda" in random:
            torch.cuda.set_rng_state(random["random/cuda"].cpu(), self.device)


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks to stop after this update; a second one stops at once."""
    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    try:
        old = signal.signal(signal.SIGINT, ask)
    except ValueError:  # not the main thread: nobody can interrupt it
        yield lambda: False
        return
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, old)
