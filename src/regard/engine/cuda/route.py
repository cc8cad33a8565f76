"""The passes of a plan on a device: schedules, masks, and which results join earlier ones."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ...pattern import Pattern
from ...progression import Ints
from .configs import Config
from .mask import Stretch, compiled, stretches
from .schedule import Schedule, schedule


@dataclass(frozen=True, eq=False)
class Step:
    """One pass, ready to launch."""

    work: Schedule
    allowed: Any
    keep: Any
    goes_on: bool  # some of its results join those of an earlier step
    kept: Pattern | None = None  # what `keep` was compiled from


@dataclass(frozen=True, eq=False)
class Route:
    """The passes of one direction."""

    steps: tuple[Step, ...]
    covers: bool  # every member is written before it is read, so outputs need no first value

    @property
    def joins(self) -> bool:
        return any(step.goes_on for step in self.steps)


@lru_cache(maxsize=256)
def route(
    pattern: Pattern,
    n: int,
    m: int,
    start: int,
    step: int,
    config: Config,
    by_keys: bool,
    device: torch.device,
) -> Route:
    """The passes of the plan (of the transposed plan: by_keys) on a device."""
    written = np.zeros(m if by_keys else n, dtype=bool)
    steps: list[Step] = []
    covers = False
    for stretch in stretches(pattern, n, m, start, step, config.tile, by_keys):
        mine = _owned(stretch, *((0, 1) if by_keys else (start, step)))
        goes_on = bool(written[mine].any())
        covers = covers or (not goes_on and not steps and len(mine) == len(written))
        written[mine] = True
        work = schedule(stretch.one, config.block, start, step, by_keys, device, config.lines)
        keep = None if stretch.keep is None else compiled(stretch.keep)
        steps.append(Step(work, compiled(work.pattern), keep, goes_on, stretch.keep))
    return Route(tuple(steps), covers or (bool(written.all()) and not any(s.goes_on for s in steps)))


def _owned(stretch: Stretch, start: int, step: int) -> Ints:
    """The members whose results this stretch writes."""
    first, hop, count = stretch.one.tiles.T
    place = np.arange(int(count.max(initial=0)))
    members = (first[:, None] + hop[:, None] * place)[place < count[:, None]]
    if stretch.keep is None:
        return members
    at = start + step * members
    return members[stretch.keep.allows(at, at)]
