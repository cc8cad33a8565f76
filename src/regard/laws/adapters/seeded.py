"""Modules built the same way each time."""

from collections.abc import Callable
from typing import TypeVar

import torch

Built = TypeVar("Built")


def seeded(build: Callable[[], Built], seed: int = 0) -> Built:
    """What `build` gives with the random numbers of this seed; the caller's go on as if nothing had happened."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()
