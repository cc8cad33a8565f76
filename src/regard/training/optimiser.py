"""AdamW, and its state as named tensors."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import FormatError, SpecError


@dataclass(frozen=True)
class AdamW:
    """w ← w − rate (m̂ / (√v̂ + ε) + decay · w); only matrices decay, not biases and norms.

    The rate is the schedule's.
    """

    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.98)
    eps: int | float = 1e-9
    decay: int | float = 0.0

    def __post_init__(self):
        if not all(0 <= b < 1 for b in self.betas):
            raise SpecError(f"betas={self.betas} are not in [0, 1)")

    def build(self, model: nn.Module) -> torch.optim.AdamW:
        """Fused where the device has it; its state exists from the start."""
        named = list(model.named_parameters())
        decays = [p for _, p in named if p.dim() >= 2 and p.requires_grad]
        stays = [p for _, p in named if p.dim() < 2 and p.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": decays, "weight_decay": self.decay},
            {"params": stays, "weight_decay": 0.0},
        ]
        fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for _, p in named)
        return torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=0.0, betas=self.betas, eps=self.eps, fused=fused
        )


def state(optimiser: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """What the optimiser remembers, as "parameter/moment" → tensor."""
    return {
        f"{name}/{key}": value
        for name, p in _named(optimiser, model)
        for key, value in optimiser.state[p].items()
    }


def restore(optimiser: torch.optim.Optimizer, model: nn.Module, kept: dict[str, Tensor]) -> None:
    """Give it back; what is missing or left over is named."""
    known = dict(_named(optimiser, model))
    for entry, tensor in kept.items():
        name, _, key = entry.rpartition("/")
        if name not in known:
            raise FormatError(
                f"the checkpoint's optimiser remembers {name!r}, which this model does not have"
            )
        p = known[name]
        if key != "step" and tensor.shape != p.shape:
            raise FormatError(
                f"{entry} is {tuple(tensor.shape)} in the checkpoint; the model's is {tuple(p.shape)}"
            )
        where = p.device if key != "step" or tensor.device == p.device else tensor.device
        optimiser.state[p][key] = tensor.clone().to(where)


def _named(optimiser: torch.optim.Optimizer, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    held = {id(p) for group in optimiser.param_groups for p in group["params"]}
    return ((name, p) for name, p in model.named_parameters() if id(p) in held)
