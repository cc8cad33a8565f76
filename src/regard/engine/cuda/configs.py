"""The stored configurations: tile and block sizes, warps and stages, by direction, width and dtype.

Chosen on an H200 (bench/gpu_patterns.py --group sweep). No tuning at run time, so the first call is fast.
"""

from dataclasses import dataclass, replace

import torch

from ...errors import BackendError

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Config:
    """One kernel: members of a tile, members of a block, warps, stages of the load pipeline, a cap on registers.

    lines: the kernel has a cheaper test for blocks that a straight line cuts (see block_tests.py).
    """

    tile: int
    block: int
    warps: int
    stages: int
    registers: int | None = None
    lines: bool = False


@dataclass(frozen=True)
class Configs:
    forward: Config
    dq: Config
    dkv: Config
    hopper_forward: Config | None = None  # of the kernels for Hopper; None: only the general ones
    hopper_dq: Config | None = None
    hopper_dkv: Config | None = None

    def without_caps(self) -> "Configs":
        """For calls with a bias or dropout, whose kernels hold more: a cap would make them spill."""

        def free(config: Config) -> Config:
            return replace(config, registers=None)

        return Configs(free(self.forward), free(self.dq), free(self.dkv), self.hopper_forward)


HALF = {  # by the larger of the two padded widths
    32: Configs(Config(128, 64, 4, 3), Config(128, 64, 4, 3), Config(128, 64, 4, 3)),
    64: Configs(
        Config(64, 64, 4, 3), Config(64, 64, 4, 3, 168), Config(64, 64, 4, 3, 168),
        Config(64, 64, 4, 1, 128, lines=True), Config(64, 64, 4, 1, 168), Config(64, 64, 4, 1),
    ),
    128: Configs(
        Config(64, 64, 4, 3), Config(64, 64, 4, 2), Config(64, 64, 4, 2),
        Config(64, 64, 4, 1, 168, lines=True), Config(64, 64, 4, 1), Config(64, 64, 4, 1),
    ),
    256: Configs(Config(128, 32, 8, 2), Config(64, 32, 4, 2), Config(64, 32, 8, 2)),
}  # fmt: skip
SINGLE = {  # IEEE products run on the ordinary arithmetic units: larger tiles would overflow the registers
    32: Configs(Config(64, 32, 4, 2), Config(32, 32, 4, 2), Config(32, 32, 4, 2)),
    64: Configs(Config(32, 32, 4, 2), Config(32, 32, 4, 2), Config(32, 32, 4, 2)),
    128: Configs(Config(32, 32, 4, 2), Config(32, 32, 4, 1), Config(32, 32, 4, 1)),
    256: Configs(Config(16, 32, 4, 1), Config(16, 16, 4, 1), Config(16, 16, 4, 1)),
}


def padded(d: int) -> int:
    """The width a kernel works with: the next power of two, at least 16."""
    return max(16, 1 << (d - 1).bit_length())


def default(d_k: int, d_v: int, dtype: torch.dtype) -> Configs:
    """The stored configuration of these widths."""
    if max(d_k, d_v) > MAX_HEAD_DIM:
        raise BackendError(
            f"a head of width {max(d_k, d_v)} does not fit the Triton kernels, which hold up to {MAX_HEAD_DIM}"
        )
    width = max(32, padded(d_k), padded(d_v))
    return (SINGLE if dtype == torch.float32 else HALF)[width]
