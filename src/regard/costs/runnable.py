"""The same step as a plan predicts, on real tensors: what the code that `rg.plan` prints calls."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..spec import Spec
from . import huggingface
from .memory.declared import example_inputs, targets_of, with_checkpoint
from .memory.step import Optimizer, TrainingStep, adapt, autocast_region, freeze, loss_of
from .sizes import Request


def runnable(declared: Spec, checkpointing: bool = False) -> nn.Module:
    """The module of a declaration, each block checkpointed or not."""
    built: nn.Module = with_checkpoint(declared, checkpointing).build()
    return built


def example(model: Any, n: int, batch: int, device: str = "cuda") -> tuple[Any, Tensor | None]:
    """Inputs on the device, and targets if the model itself takes none."""
    if isinstance(model, Spec):
        length = getattr(model, "tokens", n)
        request = Request(model, length, length, batch, train=True)
        targets = targets_of(request)
        given = tuple(torch.zeros(x.shape, dtype=x.dtype, device=device) for x in example_inputs(request))
        return given, None if targets is None else targets.to(device)
    named = huggingface.generated_inputs(model, n, None, batch, labels=True)
    return {k: torch.zeros(x.shape, dtype=x.dtype, device=device) + 1 for k, x in named.items()}, None


def call(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def stepping(
    model: nn.Module, inputs: Any, targets: Tensor | None, training: TrainingStep
) -> Callable[[], float]:
    """() → the loss of one training step with these options."""
    model.train()
    freeze(model, training.frozen)
    if training.lora:
        adapt(model, training.lora)
    device = next(model.parameters()).device.type
    optimizer = Optimizer(list(model.parameters()), training, device)

    def step() -> float:
        with autocast_region(training, device):
            loss = loss_of(call(model, inputs), targets, training)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step
