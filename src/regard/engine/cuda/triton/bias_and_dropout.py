"""What may be added to a plain call: a bias of the scores by distance, and dropout of the weights.

    bias(i, j) = table[clip(j − i, ±reach)] − slope · |j − i|       in base 2 in here, as scores are

Whether a weight stays is decided by Philox, a random number that is a function: of a seed, the head, the query
and the key, and of nothing else. So forward and backward agree, and no tile or launch matters.
"""

import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

LOG2E = 1.4426950408889634
TABLE, SLOPES = 1, 2  # what BIAS is made of
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
ROUNDS = tl.constexpr(7)  # of Philox4x32: as many pass every known test
SEEDS = 1 << 33, 1 << 62  # such a seed always takes 64 bits, so one compiled kernel serves all


@dataclass(frozen=True, eq=False)
class Added:
    """The tensors and the seed of one call. None: no such part."""

    table: Float[Tensor, "h r"] | None = None
    slopes: Float[Tensor, " h"] | None = None
    seed: int = SEEDS[0]

    def ready(self) -> "Added":
        """In base 2 and float32, one number behind the other, as the kernels read them."""
        if self.table is None and self.slopes is None:
            return self
        table, slopes = (
            None if x is None else (x.detach().float() * LOG2E).contiguous()
            for x in (self.table, self.slopes)
        )
        return Added(table, slopes, self.seed)


NOTHING = Added()


def seed() -> Tensor:
    """Drawn on the CPU from PyTorch's generator: reading it waits for no GPU."""
    return torch.randint(*SEEDS, ())


def base2(scale: float) -> float:
    """The scale of scores in base 2. Not 0: it multiplies the −∞ of what may not be seen."""
    return max(scale * LOG2E, 1e-30)


def threshold(dropout_p: float) -> int:
    """Random numbers of 32 bits below it take their weight away."""
    return min(round(dropout_p * 2**32), 2**32 - 1)


@triton.jit
def _read(at):
    """Numbers of the table, each read by the thread that has the score.

    A load of so many would be given a layout of its own, and the softmax after it with it.
    """
    if INTERPRETED:
        return tl.load(at)
    else:
        return tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [at.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def with_bias(scores, TABLE, slope, reach, i, j, least, most, BIAS: tl.constexpr):
    """scores + bias of pairs (i, j), which broadcast; no distance is under `least` or over `most`.

    TABLE points to distance 0 of the head. A block that lies past its reach needs one entry.
    """
    x = j - i
    if BIAS >= 2:
        scores -= slope * tl.abs(x).to(tl.float32)
    if BIAS != 2:
        if (most > -reach) & (least < reach):
            scores += _read(TABLE + tl.minimum(tl.maximum(x, -reach), reach))
        else:
            scores += tl.load(TABLE + tl.minimum(tl.maximum(least, -reach), reach))
    return scores


@triton.jit
def stays(seed, bh, r, j, below):
    """Whether the weight of query row r on key j of head bh stays; r and j broadcast."""
    r, j = tl.broadcast(r, j)
    none = j * 0
    drawn, _, _, _ = tl.philox(seed, j, r, none + bh, none, ROUNDS)
    return drawn >= below.to(tl.uint32)


@triton.jit
def head_of(TABLE, SLOPES, h, reach, BIAS: tl.constexpr):
    """Where distance 0 of head h stands in the table, and its slope."""
    slope = 0.0
    if BIAS >= 2:
        slope = tl.load(SLOPES + h)
    if BIAS != 2:
        TABLE += h * (2 * reach + 1) + reach
    return TABLE, slope
