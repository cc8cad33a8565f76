"""Cases drawn so that every value of every field comes up, and the search for the smallest one that breaks a law."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

from .law import Case, Space

DRAWS = 200  # attempts to find a combination that fits
TRIES = 150  # runs that the search for a smaller case may take


class TooSlow(BaseException):  # past every `except Exception`, a target's too
    """A law's time ran out inside a call."""


def cases(
    space: Space, fits: Callable[[Case], bool] | None, seed: int, in_order: bool = False
) -> Iterator[Case]:
    """Endless: each field runs through its values, shuffled anew each round, or in their order."""
    random = Random(seed)
    rounds: dict[str, list] = {name: [] for name in space}
    misses, count = 0, 0
    while misses < DRAWS:
        fields = {}
        for name, values in space.items():
            if not rounds[name]:
                rounds[name] = list(values)[::-1] if in_order else random.sample(list(values), len(values))
            fields[name] = rounds[name].pop()
        case = Case(fields, seed=seed + count)
        if fits is not None and not fits(case):
            misses += 1
            continue
        misses, count = 0, count + 1
        yield case


def smallest(
    case: Case,
    space: Space,
    fits: Callable[[Case], bool] | None,
    breaks: Callable[[Case], bool],
    until: float,
) -> Case:
    """A case that still breaks, with each field as simple as it can be: the first values of its space, seed 0."""
    tries = 0
    improved = True
    while improved:
        improved = False
        for name, values in [("seed", range(4)), *space.items()]:
            simpler = list(values)
            if case[name] in simpler:
                simpler = simpler[: simpler.index(case[name])]
            elif name == "seed":
                simpler = list(values)
            for value in simpler:
                if tries >= TRIES or time.monotonic() > until:
                    return case
                smaller = Case(case, **{name: value})
                if fits is not None and not fits(smaller):
                    continue
                tries += 1
                if breaks(smaller):
                    case, improved = smaller, True
                    break
    return case


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """TooSlow inside the block once time is up. Outside the main thread, or without signals, only between cases."""
    usable = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if not usable or seconds <= 0:
        yield
        return

    def ring(_number, _frame):
        raise TooSlow

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
