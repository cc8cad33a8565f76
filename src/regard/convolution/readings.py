"""Two readings of "heads are like the kernels of a CNN": a head as one position of the kernel, and as one filter.

The first is exact: as many heads as the kernel has positions, each attending to one neighbor. The second is an
analogy: a head has one distribution over the neighbors, so as a filter it holds p wᵀ only, the same vector w at every
position of the kernel, weighted by p ≥ 0.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..table import aligned
from .lifting import lift

ROUNDS = 50  # of alternating least squares


@dataclass(frozen=True)
class Reading:
    """What a head is, how many there are, what they hold, and the relative error of this convolution in that form."""

    head: str
    heads: int
    attends_to: str
    value_matrix: str
    error: float

    @property
    def exact(self) -> bool:
        return self.error < 1e-6

    @property
    def verdict(self) -> str:
        return "exact" if self.exact else "an analogy"


@dataclass(frozen=True)
class Readings:
    """Both readings of one convolution; `print` shows them as a table."""

    by_position: Reading
    by_filter: Reading

    def rows(self) -> list[tuple[str, str, str]]:
        first, second = self.by_position, self.by_filter
        return [
            ("", "head = position of the kernel", "head = filter"),
            ("number of heads", str(first.heads), str(second.heads)),
            ("a head attends to", first.attends_to, second.attends_to),
            ("its value matrix is", first.value_matrix, second.value_matrix),
            ("error of this kernel", f"{first.error:.1e}", f"{second.error:.1e}"),
            ("so the statement is", first.verdict, second.verdict),
        ]

    def __str__(self) -> str:
        return "\n".join(aligned(self.rows(), ["left"] * 3))


@torch.no_grad()
def head_readings(conv: nn.Conv1d | nn.Conv2d, seed: int = 0) -> Readings:
    """Both readings of this convolution, each with the error it makes.

    The first is run: `lift` against the convolution on random inputs. For the second, each filter is replaced by the
    best p wᵀ with p ≥ 0 that alternating least squares finds.
    """
    lifted: Any = lift(conv)
    size = [2 * k + 3 for k in conv.kernel_size]
    weight = conv.weight.detach()
    x = torch.randn(2, conv.in_channels, *size, generator=torch.Generator().manual_seed(seed)).to(weight)
    want = conv(x)
    run_error = float((lifted(x) - want).norm() / want.norm())
    filters = weight.flatten(2).mT.double()  # c_out, taps, c_in of its group
    left = torch.stack([k - _one_head(k) for k in filters])
    return Readings(
        Reading(
            "one position of the kernel", lifted.heads, "one neighbor, the same for all filters",
            "the weights of all filters there", run_error,
        ),
        Reading(
            "one filter", conv.out_channels, "all neighbors, by one distribution",
            "one vector for all neighbors", float(left.norm() / filters.norm()),
        ),
    )  # fmt: skip


def _one_head(filter: Float[Tensor, "taps c"]) -> Float[Tensor, "taps c"]:
    """The best p wᵀ with p ≥ 0: alternating least squares from both signs of the first singular vector."""
    u = torch.linalg.svd(filter, full_matrices=False).U[:, 0]
    best = torch.zeros_like(filter)
    for p in (u.clamp(min=0), (-u).clamp(min=0), torch.ones_like(u)):
        for _ in range(ROUNDS):
            w = filter.mT @ p / (p @ p).clamp(min=1e-30)
            p = (filter @ w / (w @ w).clamp(min=1e-30)).clamp(min=0)
        candidate = p[:, None] * w
        if (filter - candidate).norm() < (filter - best).norm():
            best = candidate
    return best
