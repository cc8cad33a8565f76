"""The same step as a plan predicts, on real tensors: what the code that `rg.plan` prints calls."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..spec import Spec
from .memory.runs import prompt
from .memory.step import Optimizer, TrainingStep, autocast_region, loss_of, prepare
from .sizes import Size
from .subject import Subject


def example(
    model: Any, n: int, batch: int, device: str = "cuda", m: int | None = None
) -> tuple[Any, Tensor | None]:
    """Inputs of a declaration or a Hugging Face model on the device, and targets if it does not take labels."""
    subject = Subject(model)
    length = subject.tokens or n
    setting = subject.setting(Size(length, m or length, batch), TrainingStep())
    args, kwargs = setting.given
    targets = None if setting.targets is None else setting.targets.to(device)

    def real(x: Tensor) -> Tensor:
        if x.is_floating_point():
            return torch.randn(x.shape, dtype=x.dtype, device=device)
        return torch.zeros(x.shape, dtype=x.dtype, device=device) + int(not isinstance(model, Spec))

    return ({k: real(x) for k, x in kwargs.items()} or tuple(map(real, args))), targets


def call(model: nn.Module, inputs: Any) -> Any:
    """The output for positional or named inputs."""
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def generate_one(model: nn.Module, inputs: Any) -> None:
    """A prompt of all tokens but the last, and the last one with the cache of keys and values."""
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    with torch.no_grad():
        prompt(model, args, kwargs)()


def join_ranks() -> None:
    """Join the processes that torchrun started, each on a device of its own."""
    cuda = torch.cuda.is_available()
    torch.distributed.init_process_group("nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(torch.distributed.get_rank() % torch.cuda.device_count())


def shard(model: nn.Module) -> None:
    """FSDP2: every module of a list of modules by itself, then the rest."""
    from torch.distributed.fsdp import fully_shard

    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block)
    fully_shard(model)


def stepping(
    model: nn.Module, inputs: Any, targets: Tensor | None, training: TrainingStep
) -> Callable[[], float]:
    """() → the loss of one training step with these options."""
    prepare(model, training)
    device = next(model.parameters()).device.type
    optimizer = Optimizer(list(model.parameters()), training, device)

    def step() -> float:
        for _ in range(training.accumulate):
            with autocast_region(training, device):
                loss = loss_of(call(model, inputs), targets, training)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step
