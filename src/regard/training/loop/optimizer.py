"""AdamW, and its state as named tensors."""

from dataclasses import KW_ONLY, dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import SpecError


@dataclass(frozen=True)
class AdamW:
    """w ← w − rate (m̂ / (√v̂ + ε) + decay · w); only matrices decay, not biases and norms.

    The learning rate comes from the schedule.
    """

    _: KW_ONLY
    betas: tuple[int | float, int | float] = (0.9, 0.98)
    eps: int | float = 1e-9
    decay: int | float = 0.0

    def __post_init__(self):
        if not all(0 <= b < 1 for b in self.betas):
            raise SpecError(f"betas={self.betas}: both need to be in [0, 1)")
        for name in ("eps", "decay"):
            if not 0 <= getattr(self, name) < inf:
                raise SpecError(f"{name}={getattr(self, name)}: it needs to be at least 0 and finite")

    def build(self, model: nn.Module, capturable: bool = False) -> torch.optim.AdamW:
        """Fused where the device supports it; its state is allocated from the start.

        capturable: a CUDA graph may contain its step; the learning rate is then a tensor on the GPU.
        """
        named = list(model.named_parameters())
        decays = [p for _, p in named if p.dim() >= 2 and p.requires_grad]
        others = [p for _, p in named if p.dim() < 2 and p.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": decays, "weight_decay": self.decay},
            {"params": others, "weight_decay": 0.0},
        ]
        fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for _, p in named)
        rate = torch.zeros((), device=named[0][1].device) if capturable else 0.0
        optimizer = torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=rate,
            betas=(float(self.betas[0]), float(self.betas[1])),  # PyTorch refuses the whole number 0
            eps=self.eps,
            fused=fused,
            capturable=capturable,
        )
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            optimizer.state[p] = {
                "step": torch.zeros((), device=p.device if fused else None),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
        return optimizer


def state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's state as "parameter/moment" → the tensor itself."""
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {
        f"{name}/{key}": value
        for name, p in model.named_parameters()
        if id(p) in optimized
        for key, value in optimizer.state[p].items()
    }
