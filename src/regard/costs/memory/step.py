"""The options of a training step, and its parts: autocast, adapters, frozen weights, loss, optimizer."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...compat import without_function_modes
from ...errors import ShapeError, SpecError, nearest
from ...nested import tensors_in
from ...nn.stack import Stack
from ...spec.base import require_known, require_positive
from ..trace.tracer import merged

OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "adamw8bit")
IMPLEMENTATIONS = ("auto", "for_loop", "foreach", "fused")
AUTOCAST = ("bfloat16", "float16")
BLOCK_8BIT, LEAST_8BIT = 256, 4096  # values that share a scale; tensors with fewer values keep float32 states


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """The options of a training step that its memory depends on.

    implementation: of the optimizer, as in PyTorch: for_loop (one parameter after another), foreach (the default on a
    GPU), fused (one kernel). autocast: "bfloat16" or "float16" for matrix products in that dtype. checkpointing:
    None follows the declaration or the model; "reentrant" for PyTorch's older form. master_weights: the optimizer
    updates float32 copies of 16-bit weights. accumulate: batches per optimizer step. frozen: patterns of parameter
    names that are not trained, such as "embedding.*". lora: rank of trained adapters on every linear layer; the rest
    is frozen. loss: output → loss, instead of the model's own; without either, the mean square of the output.
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


def training_of(train: Any) -> TrainingStep | None:
    if train is None or isinstance(train, bool):
        return TrainingStep() if train else None
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

    def __getattr__(self, name: str) -> Any:
        """What a model reads of a linear layer, such as the dtype of its weight, is that of the inner one."""
        return super().__getattr__(name) if name in self._modules else getattr(self.inner, name)


def adapt(module: nn.Module, rank: int) -> None:
    """Adapters of this rank on every linear layer whose weight is its own; everything else is frozen."""
    for p in module.parameters():
        p.requires_grad_(False)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and not isinstance(parent, Adapted | nn.MultiheadAttention):
                setattr(parent, name, Adapted(child, rank))


def freeze(module: nn.Module, patterns: tuple[str, ...]) -> None:
    named = dict(module.named_parameters(remove_duplicate=False))  # a tied weight has several names
    for pattern in patterns:
        matches = [name for name in named if fnmatch(name, pattern)]
        if not matches:
            known = nearest(pattern, set(map(merged, named)))
            raise SpecError(f"frozen={pattern!r} matches no parameter; {known}")
        for name in matches:
            named[name].requires_grad_(False)


def checkpoint(module: Any, wanted: bool | str | None) -> None:
    """Turn checkpointing on or off in a module that knows how; None leaves it as it is."""
    if wanted is None:
        return
    stacks = [m for m in module.modules() if isinstance(m, Stack)]
    for stack in stacks:
        stack.spec = replace(stack.spec, checkpoint=bool(wanted))
    if wanted and not getattr(module, "supports_gradient_checkpointing", True):  # of Hugging Face
        raise SpecError(f"{type(module).__name__} does not support gradient checkpointing; leave it out")
    if wanted and hasattr(module, "gradient_checkpointing_enable"):
        module.gradient_checkpointing_enable({"use_reentrant": wanted == "reentrant"})
    elif hasattr(module, "gradient_checkpointing_disable"):
        module.gradient_checkpointing_disable()
    elif wanted and not stacks and not getattr(module, "spec", None):
        raise SpecError(
            f"{type(module).__name__} has no gradient_checkpointing_enable(); call torch.utils.checkpoint in its "
            f"forward, and leave checkpointing out here"
        )


def prepare(module: nn.Module, training: TrainingStep) -> None:
    """The module in the mode of this step: checkpointed, frozen, with adapters."""
    module.train()
    checkpoint(module, training.checkpointing)
    freeze(module, training.frozen)
    if training.lora:
        adapt(module, training.lora)


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

    def __init__(self, module: nn.Module, training: TrainingStep, device: str):
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        copied = self.parameters if training.master_weights else []
        self.masters = [nn.Parameter(p.detach().float()) for p in copied]
        self.inner: Any = _optimizer(self.masters or self.parameters, training, device)

    def step(self) -> None:
        for master, p in zip(self.masters, self.parameters):
            master.grad = None if p.grad is None else p.grad.float()
        self.inner.step()
        with torch.no_grad():
            for master, p in zip(self.masters, self.parameters):
                p.copy_(master)
                master.grad = None

    def tensors(self) -> list[tuple[Any, Tensor]]:
        """The optimizer state with the parameter that it belongs to, without counters that stay on the CPU."""
        owner: dict[Any, Any] = dict(zip(self.masters, self.parameters))
        return [(owner.get(p, p), x) for p, s in self.inner.state.items() for x in tensors_in(s)]


class States8:
    """The states of bitsandbytes' AdamW8bit without its arithmetic, whose kernel allocates nothing.

    Two states of one byte per value with a float32 scale for every 256; tensors below 4096 values stay in float32.
    """

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}

    def step(self) -> None:
        for p in self.parameters:
            if p.grad is None or p in self.state:
                continue
            kind = torch.uint8 if p.numel() >= LEAST_8BIT else torch.float32
            self.state[p] = {f"state{i}": torch.empty_like(p, dtype=kind) for i in (1, 2)}
            if kind == torch.uint8:
                blocks = -(-p.numel() // BLOCK_8BIT)
                self.state[p] |= {f"absmax{i}": p.new_empty(blocks, dtype=torch.float32) for i in (1, 2)}


def _optimizer(parameters: list[Any], training: TrainingStep, device: str) -> Any:
    if training.optimizer == "adamw8bit":
        with without_function_modes():
            if all(p.is_meta for p in parameters):
                return States8(parameters)
        try:
            return import_module("bitsandbytes.optim").AdamW8bit(parameters)
        except ModuleNotFoundError as missing:
            raise SpecError("optimizer='adamw8bit': pip install bitsandbytes, which has it") from missing
    by_default = "foreach" if device == "cuda" else "for_loop"
    implementation = by_default if training.implementation == "auto" else training.implementation
    options: dict[str, Any] = {"foreach": implementation == "foreach", "fused": implementation == "fused"}
    if training.optimizer in ("adam", "adamw"):
        kind = torch.optim.Adam if training.optimizer == "adam" else torch.optim.AdamW
        return kind(parameters, **options)
    momentum = 0.9 if training.optimizer == "momentum" else 0.0
    return torch.optim.SGD(parameters, lr=0.1, momentum=momentum, **options)
