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

from ...errors import FormatError, RegardError, SpecError
from ...schedule import Schedule
from ..data.batches import Stream, width
from ..data.packing import laid
from ..data.rows import Batch
from . import checkpoints
from . import optimizer as optimiser
from .averaging import Last, Mean, ema, last
from .log import Log
from .meter import Meter
from .optimizer import AdamW
from .ranks import REPLICATE, SHARD, Ranks, silent, whole

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
    accumulate: int = 1  # batches an update, of all ranks together
    packed: bool = False  # texts of any length end to end, several in a row, instead of rows of like length
    average: ema | last | None = None
    autocast: str | None = None  # "bfloat16" or "float16"
    parallel: str = REPLICATE  # among ranks: each holds all weights, or with "shard" a part
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
        if self.parallel not in (REPLICATE, SHARD):
            raise SpecError(f"parallel={self.parallel!r}; use {REPLICATE!r} or {SHARD!r}")
        if isinstance(self.average, last) and self.average.k > self.keep:
            raise SpecError(f"{self.average} is of more checkpoints than keep={self.keep} keeps; raise keep")


class Diverged(RegardError):
    """A loss or a gradient that is not finite."""


class Trainer:
    """A task's module in training. `run` yields what happened, an event at a time."""

    def __init__(
        self,
        task: nn.Module,
        train: Any,
        valid: Any,
        settings: Settings,
        folder: str | Path,
        ranks: Ranks | None = None,  # None: as torchrun says
    ):
        self.task, self.train, self.valid = task, train, valid
        self.settings, self.folder = settings, Path(folder)
        self.device = next(task.parameters()).device
        self.ranks = Ranks.here() if ranks is None else ranks
        self.call: Callable[..., tuple[Tensor, Tensor]]
        self.call = self.ranks.spread(task, settings.parallel, settings.compile)
        self.parameters = list(task.parameters())  # asking for them at each update would take 0.5 ms
        self.optimiser = settings.optimiser.build(task)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=settings.autocast == "float16")
        self.mean = self._mean()
        self.stream = self._stream(train, settings.seed)
        if self.ranks.rank:  # dropout falls elsewhere on each rank
            torch.manual_seed(settings.seed + 1_000_003 * self.ranks.rank)
        self.step, self.seconds, self.seen = 0, 0.0, 0  # updates, time in training, tokens predicted
        self.best, self.bad = math.inf, 0
        self.meter: Meter | None = None  # a run's

    def run(self, on_event: Callable[[dict[str, Any]], None] = lambda event: None) -> None:
        """Train to the end, from the last checkpoint where there is one. Rank 0 tells and logs it."""
        with contextlib.ExitStack() as held:
            self.ranks.first(lambda: held.enter_context(checkpoints.locked(self.folder)))
            log = held.enter_context(contextlib.closing(Log(self.folder))) if self.ranks.rank == 0 else None

            def tell(event: str, **values: Any) -> None:
                if log is not None:
                    on_event(log.write(event, self.step, **values))

            if checkpoints.steps(self.folder):
                self.resume()
                tell("resume")
            interrupted = held.enter_context(interruptible())
            for event in self._events(interrupted):
                tell(**event)

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
            self.seen += predicted
            leave = self._agree(before + time.perf_counter() - began, interrupted())
            stop = self._over() or leave
            if self.step % s.log_every == 0 or stop:
                yield self._told(self._of_all(losses), norm, time.perf_counter() - mark)
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

    def _agree(self, seconds: float, asked: bool) -> bool:
        """All ranks take rank 0's time; someone who asks to leave asks for all."""
        self.seconds, leave = self.ranks.sum(seconds if self.ranks.rank == 0 else 0.0, asked)
        return leave > 0

    def _of_all(self, losses: list[tuple[Tensor, int]]) -> list[tuple[Tensor, int]]:
        if self.ranks.world == 1:
            return losses
        sums = self.ranks.sum(*torch.stack([loss for loss, _ in losses]).tolist())
        return [(torch.tensor(loss), predicted) for loss, (_, predicted) in zip(sums, losses, strict=True)]

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
        """One update: the sum of this rank's plain losses, the predictions of all ranks, the gradient's norm."""
        s, rate = self.settings, self.rate()
        self.step += 1
        if not self.task.training:
            self.task.train()
        batches = [self._batch(self.train, rows) for rows in self.stream.share(s.accumulate)]
        predicted = int(self.ranks.sum(sum(b.predicted for b in batches))[0])
        total = torch.zeros((), device=self.device)
        for i, batch in enumerate(batches, 1):
            with silent(self.call) if i < len(batches) else contextlib.nullcontext():
                loss, plain = self._loss(batch)
                # The ranks' gradients are averaged, not summed: so each counts as many times as there are ranks.
                self.scaler.scale(loss / (max(predicted, 1) / self.ranks.world)).backward()
            total += plain.detach()
        norm = self._clipped()
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.scaler.step(self.optimiser)
        self.scaler.update()
        self.optimiser.zero_grad(set_to_none=True)
        if self.mean is not None:
            self.mean.update(self.step)
        return total, predicted, norm

    def timed(self, updates: int, patience: float) -> Iterator[tuple[float, int]]:
        """The seconds and predictions of single updates; after so many seconds none is begun. Nothing is kept."""
        began = time.perf_counter()
        for _ in range(updates):
            start = time.perf_counter()
            _, predicted, _ = self._update()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            yield time.perf_counter() - start, predicted
            if time.perf_counter() - began > patience:
                return

    def _clipped(self) -> Tensor:
        """The gradient's norm, over all ranks, before it is clipped."""
        self.scaler.unscale_(self.optimiser)
        parameters = [p for p in self.parameters if p.grad is not None]
        norm = whole(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        if self.settings.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.settings.clip, norm)
        if self.device.type == "cpu":  # elsewhere asking would wait for the device; it is asked when logged
            self._need_finite(norm)
        return norm

    def _stream(self, data: Any, seed: int = 0) -> Stream:
        s, r = self.settings, self.ranks
        return Stream(data.sizes, s.tokens, seed, packed=s.packed, rank=r.rank, world=r.world)

    def _batch(self, data: Any, rows: Tensor) -> Batch:
        """A rank without rows takes one that does not count, since all ranks have to take part."""
        batch = data.batch(rows) if len(rows) else Batch(data.batch(torch.tensor([0])).given, 0)
        return laid(batch, width(data.sizes, self.settings.tokens)) if self.settings.packed else batch

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        kind = self.settings.autocast
        dtype = None if kind is None else getattr(torch, kind)
        with torch.autocast(self.device.type, dtype=dtype, enabled=kind is not None):
            loss, plain = self.call(**batch.to(self.device).given)
        return (loss, plain) if batch.predicted else (loss * 0, plain * 0)

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
            **({} if self.meter is None else self.meter.read(predicted, seconds)),
        }

    def _need_finite(self, norm: Tensor) -> None:
        if bool(torch.isfinite(norm)) or (self.scaler.is_enabled() and self.scaler.get_scale() >= 1):
            return  # in float16 an update that overflows is left out, and the next one scaled less
        there = checkpoints.steps(self.folder)
        kept = f"the last good checkpoint is step {there[-1]}" if there else "there is no checkpoint yet"
        raise Diverged(
            f"the gradient is not finite at step {self.step} (loss too large, or NaN in the data); {kept}. "
            f"Lower the learning rate, warm up longer or clip lower, and run again"
        )

    @torch.no_grad()
    def _validated(self) -> dict[str, Any]:
        """The plain loss on the held-out rows, by the averaged weights where there are some."""
        with self.averaged():
            self.task.eval()
            stream = self._stream(self.valid)
            total, predicted = 0.0, 0
            while left := stream.left():
                for rows in stream.share(min(left, self.ranks.world)):
                    batch = self._batch(self.valid, rows)
                    total, predicted = total + float(self._loss(batch)[1]), predicted + batch.predicted
        total, count = self.ranks.sum(total, predicted)
        loss = total / count
        self.best, self.bad = (loss, 0) if loss < self.best else (self.best, self.bad + 1)
        return {"loss": loss, "best": self.best}

    def _mean(self) -> Mean | Last | None:
        match self.settings.average:
            case ema() as declared:
                return Mean(declared, self.task)
            case last() as declared:
                return Last(declared, self.task, self.folder, self.settings.save_every, self.ranks)
        return None

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The averaged weights in the model for a while."""
        with contextlib.nullcontext() if self.mean is None else self.mean.swapped(self.step):
            yield

    @torch.no_grad()
    def fill(self, model: nn.Module) -> None:
        """Give a model of the same declaration the averaged weights. Parts are gathered, so every rank calls it."""
        source: Any = self.task.model
        with self.averaged():
            for ours, its in zip(_tensors(source).values(), _tensors(model).values(), strict=True):
                its.copy_(whole(ours))

    def _random(self) -> dict[str, Tensor]:
        found = {f"random/cpu/{self.ranks.rank}": torch.get_rng_state()}
        if self.device.type == "cuda":
            found[f"random/cuda/{self.ranks.rank}"] = torch.cuda.get_rng_state(self.device)
        return found

    def _rest(self) -> dict[str, Tensor]:
        """What a checkpoint holds besides weights and random numbers."""
        means = {f"mean/{name}": t for name, t in (self.mean.state() if self.mean else {}).items()}
        return optimiser.state(self.optimiser, self.task) | means

    def save(self) -> Path:
        state = {
            "seconds": self.seconds,
            "seen": self.seen,
            "epoch": self.stream.epoch,
            "index": self.stream.index,
            "best": self.best if math.isfinite(self.best) else None,
            "bad": self.bad,
            "scale": self.scaler.state_dict(),
        }
        rest, s = self._rest() | self._random(), self.settings
        return checkpoints.write(
            self.folder,
            self.step,
            _tensors(self.task),
            rest,
            state,
            keep=s.keep,
            every=s.save_every,
            ranks=self.ranks,
        )

    def resume(self, step: int | None = None) -> None:
        """Go on from a checkpoint, as if nothing had happened; as another number of ranks, if it is one."""
        kept = checkpoints.read(self.folder, step, self.ranks)
        live, random, state = _tensors(self.task) | self._rest(), self._random(), kept.state
        shapes = kept.shapes()
        need_same(live, {name: shape for name, shape in shapes.items() if not name.startswith("random/")})
        random = {name: t for name, t in random.items() if name in shapes}
        kept.fill(live | random)
        self.step, self.seconds, self.seen = state["step"], state["seconds"], state["seen"]
        self.stream.epoch, self.stream.index, self.stream.plan = state["epoch"], state["index"], None
        self.best, self.bad = math.inf if state["best"] is None else state["best"], state["bad"]
        if self.scaler.is_enabled() and state["scale"]:
            self.scaler.load_state_dict(state["scale"])
        if not random:  # a rank that was not there: numbers of its own
            torch.manual_seed(self.settings.seed + 1_000_003 * self.ranks.rank + 7919 * self.step)
        for name, numbers in random.items():
            if name.startswith("random/cpu/"):
                torch.set_rng_state(numbers)
            else:
                torch.cuda.set_rng_state(numbers, self.device)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Its weights and buffers by name, tied ones once."""
    return {n: t.detach() for n, t in (*module.named_parameters(), *module.named_buffers())}


def need_same(live: dict[str, Tensor], kept: dict[str, tuple[int, ...]]) -> None:
    """Refuse a checkpoint of another model."""
    for name, tensor in live.items():
        if name in kept and tuple(tensor.shape) != kept[name]:
            raise FormatError(
                f"{name} is {kept[name]} in the checkpoint and {tuple(tensor.shape)} in the model"
            )
    if unlike := sorted(set(live) ^ set(kept)):
        raise FormatError(f"the checkpoint is of another model: {unlike[0]!r} is in one of them only")


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C, or a scheduler's SIGTERM, asks to stop after this update; a second Ctrl-C stops at once.

    Under torchrun Ctrl-C comes as both, so the second of those is no second Ctrl-C.
    """
    asked: set[int] = set()

    def ask(number: int, frame: Any) -> None:
        if number == signal.SIGINT and number in asked:
            raise KeyboardInterrupt
        asked.add(number)

    try:
        old = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: nobody can interrupt it
        yield lambda: False
        return
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
