"""The training loop: batches, gradients, updates, checkpoints, and resuming from them."""

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import BackendError, FormatError, RegardError
from ...nn.block import Block
from ...nn.feed_forward import FeedForward
from ...nn.packed import Copies
from ...nn.position import Rotary
from ..data.batches import Stream, packed_width
from ..data.buckets import bucket_shape, pad_to_bucket
from ..data.packing import pack
from ..data.rows import Batch, fingerprint
from . import checkpoints, optimizer
from .averaging import CheckpointMean, RunningMean, ema, last
from .checkpoints import Retention
from .cuda_graphs import GraphedUpdates
from .log import Log
from .meter import Meter
from .ranks import Ranks, full_tensor, without_sync
from .settings import Settings
from .threads import Threads


class Diverged(RegardError):
    """A loss or a gradient that is not finite."""


class Trainer:
    """Trains the module of a task. `run` reports each event."""

    def __init__(
        self,
        task: nn.Module,
        train: Any,
        valid: Any,
        settings: Settings,
        folder: str | Path,
        ranks: Ranks | None = None,  # None: from torchrun's environment
    ):
        self.task, self.train, self.valid = task, train, valid
        self.settings, self.folder = settings, Path(folder)
        self.device = next(task.parameters()).device
        check_autocast(settings.autocast, self.device)
        self.ranks = Ranks.here() if ranks is None else ranks
        fuse_branch_ends(task, self.device.type == "cuda" and self.ranks.world == 1)
        self.call: Callable[..., tuple[Tensor, Tensor]]
        self.call = self.ranks.distribute(task, settings.parallel, settings.compile)
        self.parameters = list(task.parameters())  # listing them at each update would take 0.5 ms
        with_graphs = settings.graphs and self.device.type == "cuda" and self.ranks.world == 1
        self.optimizer = settings.optimizer.build(task, capturable=with_graphs)
        self.graphs = GraphedUpdates(self._work, self.device) if with_graphs else None
        self.copies = self._copies()
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=settings.autocast == "float16")
        self.mean = self._mean()
        self.stream = self._stream(train, settings.seed)
        if self.ranks.rank:  # each rank has its own dropout masks
            torch.manual_seed(settings.seed + 1_000_003 * self.ranks.rank)
        self.step, self.seconds, self.predicted = 0, 0.0, 0  # updates, training time, predicted tokens
        self.best, self.bad = math.inf, 0  # best validation loss, validations since then
        self.meter: Meter | None = None  # set by a run
        self.threads: Threads | None = None  # set by a run on a CPU

    def run(self, on_event: Callable[[dict[str, Any]], None] = lambda event: None) -> None:
        """Train to the end, from the last checkpoint where there is one. Rank 0 reports and logs events."""
        with contextlib.ExitStack() as stack:
            self.ranks.on_first(lambda: stack.enter_context(checkpoints.locked(self.folder)))
            log = stack.enter_context(contextlib.closing(Log(self.folder))) if self.ranks.rank == 0 else None

            def report(event: str, **values: Any) -> None:
                if log is not None:
                    on_event(log.write(event, self.step, **values))

            if checkpoints.steps(self.folder):
                self.resume()
                report("resume")
            interrupted = stack.enter_context(interruptible())
            for event in self._events(interrupted):
                report(**event)

    def _events(self, interrupted: Callable[[], bool]) -> Iterator[dict[str, Any]]:
        s = self.settings
        began = mark = time.perf_counter()
        before = self.seconds
        losses: list[tuple[Tensor, int]] = []
        norm = torch.tensor(math.nan)
        while not self._over():
            mark = mark if losses else time.perf_counter()
            start = time.perf_counter()
            loss, predicted, norm = self._update()
            if self.threads is not None and self.threads.observe(time.perf_counter() - start, predicted):
                yield {"event": "threads", "threads": self.threads.count}
            losses.append((loss, predicted))
            self.predicted += predicted
            leave = self._synchronize(before + time.perf_counter() - began, interrupted())
            stop = self._over() or leave
            if self.step % s.log_every == 0 or stop:
                yield self._train_event(self._summed(losses), norm, time.perf_counter() - mark)
                losses = []
            if self.step % s.valid_every == 0 or self._over():
                yield {"event": "valid", **self._validate()}
            if self.step % s.save_every == 0 or stop:
                self._need_finite(norm)
                yield {"event": "save", "path": str(self.save())}
            if leave:
                yield {"event": "interrupted"}
                return
        yield {"event": "done", "seconds": round(self.seconds, 2), "epochs": self.stream.epoch}

    def _synchronize(self, seconds: float, interrupted: bool) -> bool:
        """All ranks take rank 0's time, and stop if one of them was interrupted."""
        self.seconds, leave = self.ranks.sum(seconds if self.ranks.rank == 0 else 0.0, interrupted)
        return leave > 0

    def _summed(self, losses: list[tuple[Tensor, int]]) -> list[tuple[Tensor, int]]:
        """The losses summed over all ranks."""
        if self.ranks.world == 1:
            return losses
        sums = self.ranks.sum(*torch.stack([loss for loss, _ in losses]).tolist())
        return [(torch.tensor(loss), predicted) for loss, (_, predicted) in zip(sums, losses, strict=True)]

    def _over(self) -> bool:
        s = self.settings
        time_over = s.minutes is not None and self.seconds >= 60 * s.minutes
        no_improvement = s.patience is not None and self.bad > s.patience
        return time_over or no_improvement or (s.minutes is None and self.step >= s.steps)

    def rate(self) -> float:
        """The learning rate of the next update; the first is step 1."""
        s = self.settings
        if s.minutes is None:
            return s.schedule(self.step + 1)
        done = min(self.seconds / (60 * s.minutes), 1.0)
        return s.schedule(max(1, min(round(done * s.steps), s.steps)))

    def _update(self) -> tuple[Tensor, int, Tensor]:
        """One update: the sum of this rank's unsmoothed losses, the predictions of all ranks, the gradient's norm."""
        s, rate = self.settings, self.rate()
        self.step += 1
        if not self.task.training:
            self.task.train()
        batches = [self._batch(self.train, rows, s.bucketed) for rows in self.stream.share(s.accumulate)]
        predicted = int(self.ranks.sum(sum(b.predicted for b in batches))[0])
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        # Gradients are averaged over ranks, not summed, so each loss is multiplied by their number.
        divisor = max(predicted, 1) / self.ranks.world
        if self.graphs is None or any(b.predicted == 0 for b in batches):
            total, norm = self._work([b.to(self.device).inputs for b in batches], divisor, batches)
        else:
            total, norm = self.graphs([b.pinned().inputs for b in batches], divisor)
        if self.mean is not None:
            self.mean.update(self.step)
        return total, predicted, norm

    def _work(
        self, inputs: list[dict[str, Tensor]], divisor: Tensor | float, batches: list[Batch] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Forward, backward, clipping and the optimizer's step: the summed unsmoothed loss and the gradient's norm.

        batches: to find those without predictions; None where each has some.
        """
        total = torch.zeros((), device=self.device)
        with contextlib.nullcontext() if self.copies is None else self.copies.used():
            for i, batch in enumerate(inputs, 1):
                with without_sync(self.call) if i < len(inputs) else contextlib.nullcontext():
                    loss, plain = self._loss(batch, batches is None or batches[i - 1].predicted > 0)
                    self.scaler.scale(loss / divisor).backward()
                total += plain.detach()
        norm = self._clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return total, norm

    def timed(self, updates: int, patience: float) -> Iterator[tuple[float, int]]:
        """Seconds and predictions of single updates; none is begun after `patience` seconds. Nothing is saved."""
        began = time.perf_counter()
        for _ in range(updates):
            start = time.perf_counter()
            _, predicted, _ = self._update()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            yield time.perf_counter() - start, predicted
            if time.perf_counter() - began > patience:
                return

    def _clip(self) -> Tensor:
        """Clip the gradient; returns its norm over all ranks before clipping."""
        self.scaler.unscale_(self.optimizer)
        parameters = [p for p in self.parameters if p.grad is not None]
        norm = full_tensor(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        if self.settings.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.settings.clip, norm)
        if self.device.type == "cpu":  # on a GPU this would synchronize; there it is checked when logging
            self._need_finite(norm)
        return norm

    def _stream(self, data: Any, seed: int = 0) -> Stream:
        s, r = self.settings, self.ranks
        return Stream(
            data.sizes, s.tokens, seed, packed=s.packed, bucketed=s.bucketed, rank=r.rank, world=r.world
        )

    def _batch(self, data: Any, rows: Tensor, bucketed: bool = False) -> Batch:
        """A rank without rows uses one that does not count, since all ranks have to participate."""
        batch = data.batch(rows) if len(rows) else Batch(data.batch(torch.tensor([0])).inputs, 0)
        if self.settings.packed:
            return pack(batch, packed_width(data.sizes, self.settings.tokens))
        if bucketed and len(rows):
            longest = self.stream.lengths[rows].amax(0).tolist()
            return pad_to_bucket(batch, bucket_shape(longest, self.settings.tokens)[0])
        return batch

    def _loss(self, inputs: dict[str, Tensor], counts: bool = True) -> tuple[Tensor, Tensor]:
        kind = self.settings.autocast
        dtype = None if kind is None else getattr(torch, kind)
        with torch.autocast(self.device.type, dtype=dtype, enabled=kind is not None):
            loss, plain = self.call(**inputs)
        return (loss, plain) if counts else (loss * 0, plain * 0)

    def _train_event(self, losses: list[tuple[Tensor, int]], norm: Tensor, seconds: float) -> dict[str, Any]:
        self._need_finite(norm)
        predicted = sum(p for _, p in losses)
        plan = self.stream.plan
        return {
            "event": "train",
            "loss": float(sum(loss for loss, _ in losses) / predicted),
            "norm": float(norm),
            "rate": float(self.optimizer.param_groups[0]["lr"]),
            "tokens_per_second": round(predicted / seconds),
            "seconds": round(self.seconds, 3),
            "padding_share": 0.0 if plan is None else round(plan.padding_share, 4),
            **({} if self.meter is None else self.meter.read(predicted, seconds)),
        }

    def _need_finite(self, norm: Tensor) -> None:
        if bool(torch.isfinite(norm)) or (self.scaler.is_enabled() and self.scaler.get_scale() >= 1):
            return  # in float16 an update that overflows is skipped, and the next loss is scaled less
        steps = checkpoints.steps(self.folder)
        last_good = f"the last good checkpoint is step {steps[-1]}" if steps else "there is no checkpoint yet"
        raise Diverged(
            f"the gradient is not finite at step {self.step} (loss too large, or NaN in the data); {last_good}. "
            f"Lower the learning rate, warm up longer or clip lower, and run it again"
        )

    @torch.no_grad()
    def _validate(self) -> dict[str, Any]:
        """The unsmoothed loss on the validation rows, with the averaged weights where there are any."""
        with self.averaged():
            self.task.eval()
            stream = self._stream(self.valid)
            total, predicted = 0.0, 0
            while left := stream.left():
                for rows in stream.share(min(left, self.ranks.world)):
                    batch = self._batch(self.valid, rows)
                    plain = self._loss(batch.to(self.device).inputs, batch.predicted > 0)[1]
                    total, predicted = total + float(plain), predicted + batch.predicted
        total, count = self.ranks.sum(total, predicted)
        loss = total / count
        improved = loss < self.best
        self.best, self.bad = (loss, 0) if improved else (self.best, self.bad + 1)
        if improved and self.settings.patience is not None:
            self._store_best()
        return {"loss": loss, "best": self.best}

    def _copies(self) -> Copies | None:
        """16-bit copies of the weights, where one GPU trains with autocast."""
        kind = self.settings.autocast
        if kind is None or self.device.type != "cuda" or self.ranks.world > 1:
            return None
        return Copies(self.task, getattr(torch, kind))

    def _mean(self) -> RunningMean | CheckpointMean | None:
        match self.settings.average:
            case ema() as declared:
                return RunningMean(declared, self.task)
            case last() as declared:
                return CheckpointMean(declared, self.task, self.folder, self.settings.save_every, self.ranks)
        return None

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """A context in which the model holds the averaged weights."""
        with contextlib.nullcontext() if self.mean is None else self.mean.swapped(self.step):
            yield

    @torch.no_grad()
    def fill(self, model: nn.Module) -> None:
        """Copy the trained weights into a model of the same declaration. All ranks call it, to gather shards.

        They are the averaged ones; with patience those of the best validation.
        """
        targets = _tensors(model)
        if self.settings.patience is not None and math.isfinite(self.best):
            found = checkpoints.read_best(self.folder)
            _need_same(targets, {name: tuple(t.shape) for name, t in found.items()})
            for name, target in targets.items():
                target.copy_(found[name])
            return
        source: Any = self.task.model
        with self.averaged():
            for tensor, target in zip(_tensors(source).values(), targets.values(), strict=True):
                target.copy_(full_tensor(tensor))

    def _store_best(self) -> None:
        """Store the weights that were just validated. All ranks call it, to gather shards."""
        source: Any = self.task.model
        with self.averaged():
            weights = {name: full_tensor(t).cpu().contiguous() for name, t in _tensors(source).items()}
        self.ranks.on_first(lambda: checkpoints.write_best(self.folder, weights))

    def _random(self) -> dict[str, Tensor]:
        states = {f"random/cpu/{self.ranks.rank}": torch.get_rng_state()}
        if self.device.type == "cuda":
            states[f"random/cuda/{self.ranks.rank}"] = torch.cuda.get_rng_state(self.device)
        return states

    def _rest(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint besides weights and random states: optimizer and average."""
        means = {f"mean/{name}": t for name, t in (self.mean.state() if self.mean else {}).items()}
        return optimizer.state(self.optimizer, self.task) | means

    @cached_property
    def rows(self) -> str:
        """The checksum of the training rows: a run resumes with the same ones only."""
        return fingerprint(self.train)

    def save(self) -> Path:
        state = {
            "seconds": self.seconds,
            "predicted": self.predicted,
            "epoch": self.stream.epoch,
            "index": self.stream.index,
            "rows": self.rows,
            "best": self.best if math.isfinite(self.best) else None,
            "bad": self.bad,
            "scale": self.scaler.state_dict(),
            "threads": torch.get_num_threads() if self.threads is None else self.threads.count,
        }
        rest, retention = (
            self._rest() | self._random(),
            Retention(self.settings.keep, self.settings.save_every),
        )
        return checkpoints.write(
            self.folder, self.step, _tensors(self.task), rest, state, retention, self.ranks
        )

    def resume(self, step: int | None = None) -> None:
        """Continue from a checkpoint exactly; the number of ranks may have changed."""
        checkpoint = checkpoints.read(self.folder, step, self.ranks)
        live, random, state = _tensors(self.task) | self._rest(), self._random(), checkpoint.state
        if state.get("rows", self.rows) != self.rows:  # earlier versions stored none
            raise FormatError(
                f"the training rows are not those that the run in {self.folder} began with: its data has changed; "
                f"restore it, or use another folder"
            )
        shapes = checkpoint.shapes()
        _need_same(live, {name: shape for name, shape in shapes.items() if not name.startswith("random/")})
        random = {name: t for name, t in random.items() if name in shapes}
        checkpoint.fill(live | random)
        self.step, self.seconds, self.predicted = state["step"], state["seconds"], state["predicted"]
        self.stream.epoch, self.stream.index, self.stream.plan = state["epoch"], state["index"], None
        self.best, self.bad = math.inf if state["best"] is None else state["best"], state["bad"]
        if self.scaler.is_enabled() and state["scale"]:
            self.scaler.load_state_dict(state["scale"])
        if self.threads is not None and state.get("threads"):  # the same sums in the same order
            self.threads.resume(state["threads"])
        if not random:  # a rank that the checkpoint does not have gets a seed of its own
            torch.manual_seed(self.settings.seed + 1_000_003 * self.ranks.rank + 7919 * self.step)
        for name, numbers in random.items():
            if name.startswith("random/cpu/"):
                torch.set_rng_state(numbers)
            else:
                torch.cuda.set_rng_state(numbers, self.device)


def fuse_branch_ends(task: nn.Module, fuses: bool) -> None:
    """Whether a step computes dropout, residual sums and norms as one pass over memory, where the GPU can; and rotary
    positions as another."""
    for module in task.modules():
        if isinstance(module, Block):
            module.fuses_ends = fuses
        elif isinstance(module, Rotary):
            module.fuses = fuses
        elif isinstance(module, FeedForward):
            module.fuses_dropout = fuses


def check_autocast(kind: str | None, device: torch.device) -> None:
    """Refuse bfloat16 on a GPU that does not compute in it itself: before compute capability 8.0."""
    if kind == "bfloat16" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        name = torch.cuda.get_device_name(device)
        raise BackendError(f"{name} has no bfloat16; use autocast='float16' or None, or device='cpu'")


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; tied ones once."""
    return {n: t.detach() for n, t in (*module.named_parameters(), *module.named_buffers())}


def _need_same(live: dict[str, Tensor], stored: dict[str, tuple[int, ...]]) -> None:
    """Refuse a checkpoint of another model."""
    for name, tensor in live.items():
        if name in stored and tuple(tensor.shape) != stored[name]:
            raise FormatError(
                f"{name} has shape {stored[name]} in the checkpoint and {tuple(tensor.shape)} in the model"
            )
    if different := sorted(set(live) ^ set(stored)):
        raise FormatError(f"the checkpoint is of another model: {different[0]!r} is in only one of them")


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C, or a scheduler's SIGTERM, stops after the current update; a second Ctrl-C stops immediately.

    Under torchrun Ctrl-C arrives as both signals, so only a second SIGINT counts as a second Ctrl-C.
    """
    received: set[int] = set()

    def handle(number: int, frame: Any) -> None:
        if number == signal.SIGINT and number in received:
            raise KeyboardInterrupt
        received.add(number)

    try:
        old = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: signals do not arrive here
        yield lambda: False
        return
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
