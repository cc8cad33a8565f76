"""Modules built with reproducible random numbers."""

from collections.abc import Callable
from typing import TypeVar

import torch

Built = TypeVar("Built")


def seeded(build: Callable[[], Built], seed: int = 0) -> Built:
    """The result of `build` with this seed; the global random state is restored afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()
