"""One call as the kernels see it: what it computes, and shapes and strides of its tensors.

    bias(i, j) = table[clip(j − i, ±reach)] − slope · |j − i|       held in base 2 here, as scores are

Dropout is decided by Philox, a function of seed, head, query and key: forward and backward agree in any launch.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ...pattern import Pattern
from .configs import Configs, default

LOG2E = 1.4426950408889634
SEEDS = 1 << 33, 1 << 62  # every seed in this range takes 64 bits, so one compiled kernel serves all of them


@dataclass(frozen=True, eq=False)
class BiasAndDropout:
    """The bias tensors and the dropout seed of one call; None: no such part."""

    table: Float[Tensor, "h r"] | None = None
    slopes: Float[Tensor, " h"] | None = None
    seed: int = SEEDS[0]

    def in_base2(self) -> "BiasAndDropout":
        """Contiguous, in float32 and base 2, as the kernels read them."""
        if self.table is None and self.slopes is None:
            return self
        table, slopes = (
            None if x is None else (x.detach().float() * LOG2E).contiguous()
            for x in (self.table, self.slopes)
        )
        return BiasAndDropout(table, slopes, self.seed)


PLAIN = BiasAndDropout()


def sample_seed() -> Tensor:
    """From PyTorch's CPU generator, so that reading it does not synchronize with the GPU."""
    return torch.randint(*SEEDS, ())


def base2(scale: float) -> float:
    """The scale of scores in base 2. Never 0, because it multiplies the −∞ of pairs that are not allowed."""
    return max(scale * LOG2E, 1e-30)


def dropout_threshold(dropout_p: float) -> int:
    """A weight is dropped where its random 32-bit number is below this."""
    return min(round(dropout_p * 2**32), 2**32 - 1)


@dataclass(frozen=True, eq=False)
class Task:
    """What one call computes, apart from its tensors. Compared by identity: equal calls share one object."""

    pattern: Pattern
    start: int  # query r is at position start + step · r
    step: int
    scale: float
    configs: Configs
    reach: int | None = None  # of the bias table; None: no table
    has_slopes: bool = False
    dropout_p: float = 0.0

    @property
    def plain(self) -> bool:
        """Neither bias nor dropout."""
        return self.reach is None and not self.has_slopes and self.dropout_p == 0


class Sizes(NamedTuple):
    """What selects the stored configuration of a task."""

    d_k: int
    d_v: int
    dtype: torch.dtype


Where = tuple[Pattern, int, int, float]  # pattern, start, step, scale


@lru_cache(maxsize=256)
def _task(sizes: Sizes, where: Where, more: tuple[int | None, bool, float], configs: Configs | None) -> Task:
    made = Task(*where, configs or default(*sizes), *more)
    return made if made.plain or configs else replace(made, configs=made.configs.without_caps())


def task(
    q: Float[Tensor, "b h n d_k"],
    v: Float[Tensor, "b h_kv m d_v"],
    where: Where,
    extras: BiasAndDropout = PLAIN,
    dropout_p: float = 0.0,
    configs: Configs | None = None,
) -> Task:
    """The task, with the stored configuration of these widths unless one is given."""
    reach = None if extras.table is None else extras.table.shape[-1] // 2
    sizes = Sizes(q.shape[-1], v.shape[-1], q.dtype)
    return _task(sizes, where, (reach, extras.slopes is not None, dropout_p), configs)


@lru_cache(maxsize=64)
def negated(task: Task) -> Task:
    """The same task with the sign of its scale changed: kernels take the running maximum before scaling."""
    return replace(task, scale=-task.scale)


class Layout(NamedTuple):
    """Shape and strides of a tensor, and whether it begins at a multiple of 16 bytes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    aligned: bool

    @property
    def strides(self) -> tuple[int, ...]:
        """Of batch, head and row; numbers of a row are adjacent."""
        return self.stride[:3]


def layout(x: Tensor) -> Layout:
    return Layout(x.shape, x.stride(), x.data_ptr() % 16 == 0)


def contiguous(*shape: int) -> Layout:
    _, h, n, d = shape
    return Layout(shape, (h * n * d, n * d, d, 1), True)


def exceeds_int32(*layouts: Layout) -> bool:
    """Whether an offset within one head can pass 2³¹."""
    return any(x.shape[2] * x.stride[2] >= 2**31 for x in layouts)


class CallLayout(NamedTuple):
    """All that is known of a call before its tensors: what launches are prepared for, and cached by."""

    task: Task
    tensors: tuple[Layout, ...]  # q, k, v; backward also o and the gradient of o
    dtype: torch.dtype
    device: torch.device
    has_lengths: bool = False
    has_dlse: bool = False  # backward: the log-sum-exp has a gradient
    bias_gradient: bool = False  # backward: the bias needs a gradient

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """b, h, h_kv, n, m, d_k, d_v."""
        (b, h, n, d_k), (h_kv, m), d_v = (
            self.tensors[0].shape, self.tensors[1].shape[1:3], self.tensors[2].shape[-1]
        )  # fmt: skip
        return b, h, h_kv, n, m, d_k, d_v

    @property
    def optional_inputs(self) -> tuple[str, ...]:
        """Which of the inputs that not every call has are there, in order."""
        there = self.has_dlse, self.has_lengths, self.task.reach is not None, self.task.has_slopes
        return tuple(
            name for name, is_there in zip(("dlse", "lengths", "table", "slopes"), there) if is_there
        )
