"""A training step of a module on meta tensors: forward, loss, backward, optimizer."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...compat import run_backward
from ...errors import ShapeError, SpecError
from ...spec.base import require_known, require_positive
from ..trace.nested import tensors_in
from ..trace.tracer import Trace

OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "adamw8bit")
IMPLEMENTATIONS = ("auto", "for_loop", "foreach", "fused")
STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2, "adamw8bit": 2}
AUTOCAST = ("bfloat16", "float16")
BLOCK_8BIT = 256  # values that share one float32 scale in 8-bit states


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """The options of a training step that its memory depends on.

    implementation: of the optimizer, as in PyTorch: for_loop (one weight after the other), foreach (the default on a
    GPU), fused (one kernel). autocast: "bfloat16" or "float16" for matrix products in that dtype. checkpointing:
    None follows the declaration or the model; "reentrant" for PyTorch's older form. master_weights: the optimizer
    updates float32 copies of 16-bit weights. accumulate: batches per optimizer step. frozen: patterns of parameter
    names that are not trained, such as "embedding.*". lora: rank of trained adapters on every linear layer, all else
    frozen. loss: output → loss, in place of the model's own.
    """

    optimizer: str = "adamw"
    implementation: str = "auto"
    autocast: str | None = None
    checkpointing: bool | str | None = None
    master_weights: bool = False
    accumulate: int = 1
    frozen: tuple[str, ...] = ()
    lora: int = 0
    loss: Callable[[Any], Tensor] | None = None

    def __post_init__(self):
        require_known("optimizer", self.optimizer, OPTIMIZERS)
        require_known("implementation", self.implementation, IMPLEMENTATIONS)
        require_positive("accumulate", self.accumulate)
        if self.autocast is not None:
            require_known("autocast", self.autocast, AUTOCAST)
        if self.lora < 0:
            raise SpecError(f"lora={self.lora} is not a rank; use 16, or 0 for none")
        if isinstance(self.checkpointing, str):
            require_known("checkpointing", self.checkpointing, ("reentrant",))

    @property
    def states(self) -> int:
        """Values that the optimizer stores per parameter."""
        return STATES[self.optimizer]

    def implementation_on(self, device: str) -> str:
        if self.implementation != "auto":
            return self.implementation
        return "foreach" if device == "cuda" else "for_loop"


def training_of(train: Any) -> TrainingStep | None:
    if train is None or train is False:
        return None
    if train is True:
        return TrainingStep()
    if not isinstance(train, TrainingStep):
        raise SpecError(f"train={train!r}: use True, False or rg.TrainingStep(optimizer='adamw', …)")
    return train


def autocast_region(training: TrainingStep | None, device: str) -> AbstractContextManager[Any]:
    if training is None or training.autocast is None:
        return nullcontext()
    return torch.autocast("cuda" if device == "cuda" else "cpu", dtype=getattr(torch, training.autocast))


class Adapted(nn.Module):
    """W x + B A x: a frozen linear layer with a trained adapter of low rank (LoRA)."""

    def __init__(self, inner: nn.Linear, rank: int):
        super().__init__()
        like: dict[str, Any] = {"bias": False, "device": inner.weight.device, "dtype": inner.weight.dtype}
        self.inner = inner
        self.down = nn.Linear(inner.in_features, rank, **like)
        self.up = nn.Linear(rank, inner.out_features, **like)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x))


def adapt(module: nn.Module, rank: int) -> None:
    """Adapters of this rank on every linear layer whose weight is its own; everything else is frozen."""
    for p in module.parameters():
        p.requires_grad_(False)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and not isinstance(parent, Adapted | nn.MultiheadAttention):
                setattr(parent, name, Adapted(child, rank))


def freeze(module: nn.Module, patterns: tuple[str, ...]) -> None:
    for name, p in module.named_parameters():
        if any(fnmatch(name, pattern) for pattern in patterns):
            p.requires_grad_(False)


def loss_of(out: Any, targets: Tensor | None, training: TrainingStep) -> Tensor:
    """The loss: the given one, the model's own, cross-entropy with targets, else the mean square of the outputs."""
    if training.loss is not None:
        return training.loss(out)
    own = out.get("loss") if isinstance(out, dict) else getattr(out, "loss", None)
    if isinstance(own, Tensor):
        return own
    if targets is not None:
        return F.cross_entropy(out.flatten(0, -2), targets)
    flat = [x for x in tensors_in(out) if x.requires_grad and x.is_floating_point()]
    if not flat:
        raise ShapeError("no output requires a gradient: a training step needs trainable weights")
    if len(flat) == 1:
        return flat[0] if not flat[0].dim() else flat[0].square().mean()
    return torch.stack([x.square().mean() for x in flat]).sum()


class Optimizer:
    """torch.optim's optimizer of the trainable parameters, or 8-bit states; with float32 copies if requested."""

    def __init__(self, parameters: list[nn.Parameter], training: TrainingStep, device: str):
        self.parameters, self.training = [p for p in parameters if p.requires_grad], training
        self.masters: list[Tensor] = []
        self.state8: list[Tensor] = []
        trained: list[Any] = self.parameters
        if training.master_weights:
            with torch.no_grad():
                trained = self.masters = [nn.Parameter(p.float()) for p in self.parameters]
        self.inner = None if training.optimizer == "adamw8bit" else _optimizer(trained, training, device)

    def step(self) -> None:
        for master, p in zip(self.masters, self.parameters):
            master.grad = None if p.grad is None else p.grad.float()
        if self.inner is None:
            self._step_8bit()
        else:
            self.inner.step()
        with torch.no_grad():
            for master, p in zip(self.masters, self.parameters):
                p.copy_(master)
                master.grad = None

    def _step_8bit(self) -> None:
        """Two states of one byte per value with a scale for every 256; the update itself allocates nothing."""
        for p in self.masters or self.parameters:
            if p.grad is not None and not self.full:
                blocks = -(-p.numel() // BLOCK_8BIT)
                self.state8 += [torch.empty_like(p, dtype=torch.uint8) for _ in range(2)]
                self.state8 += [p.new_empty(blocks, dtype=torch.float32) for _ in range(2)]

    @property
    def full(self) -> bool:
        return len(self.state8) >= 4 * len(self.masters or self.parameters)

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None

    def tensors(self) -> list[Tensor]:
        """The optimizer state, without counters that stay on the CPU."""
        if self.inner is None:
            return self.state8
        return [x for s in self.inner.state.values() for x in s.values() if isinstance(x, Tensor)]


def _optimizer(parameters: list[Any], training: TrainingStep, device: str) -> Any:
    implementation = training.implementation_on(device)
    options: dict[str, Any] = {"foreach": implementation == "foreach", "fused": implementation == "fused"}
    if training.optimizer in ("sgd", "momentum"):
        momentum = 0.9 if training.optimizer == "momentum" else 0.0
        return torch.optim.SGD(parameters, lr=0.1, momentum=momentum, **options)
    kind = torch.optim.AdamW if training.optimizer == "adamw" else torch.optim.Adam
    return kind(parameters, **options)


@dataclass
class Step:
    """The keys of storages by what they are, and where the step begins among the events of the meter."""

    trace: Trace
    begin: int
    weights: set[int]
    inputs: set[int]
    gradients: set[int]
    state: set[int]
    saved: set[int]  # alive after the forward pass
    owners: dict[int, str]  # storages of parameters, gradients and states → module


def run_step(
    trace: Trace,
    module: nn.Module,
    given: tuple[tuple, dict],
    targets: Tensor | None,
    training: TrainingStep,
) -> Step:
    """One traced training step. The module's parameters and the inputs are meta tensors that the meter knows."""
    meter = trace.meter
    weights, inputs = _keys(meter, module), set(meter.alive.values())
    if not any(p.requires_grad for p in module.parameters()):
        raise ShapeError("no output requires a gradient: a training step needs trainable weights")
    optimizer = Optimizer(list(module.parameters()), training, trace.device)
    masters = {k for k in map(meter.key_of, optimizer.masters) if k is not None}
    begin = len(meter.events)
    before, saved = set(meter.alive.values()), set[int]()
    for _ in range(min(training.accumulate, 2)):  # a third batch repeats the second
        with meter.during("forward"):
            loss = [_loss(trace, module, given, targets, training)]
        saved = saved or set(meter.alive.values()) - before
        with meter.during("backward"):
            run_backward(loss.pop())
    owners: dict[int, str] = {}
    for name, p in [*module.named_parameters(), *module.named_buffers()]:
        for x in (p, p.grad):
            if x is not None and (key := meter.key_of(x)) is not None:
                owners[key] = name.rpartition(".")[0]
    gradients = set(owners) - weights
    with meter.during("optimizer"):
        optimizer.step()
    state = {k for k in map(meter.key_of, optimizer.tensors()) if k is not None} | masters
    optimizer.zero_grad()
    meter.stop()
    return Step(trace, begin, weights, inputs - weights, gradients, state, saved - gradients, owners)


def _loss(
    trace: Trace, module: nn.Module, given: tuple[tuple, dict], targets: Tensor | None, training: TrainingStep
) -> Tensor:
    args, kwargs = given
    with autocast_region(training, trace.device):
        return loss_of(module(*args, **kwargs), targets, training)


def _keys(meter: Any, module: nn.Module) -> set[int]:
    tensors = [*module.parameters(), *module.buffers()]
    return {k for k in map(meter.key_of, tensors) if k is not None}
