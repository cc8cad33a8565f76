"""Cases sampled so that every value of every field occurs, and the search for the smallest case that breaks a law."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

from .law import Case, Space

MAX_REJECTIONS = 200  # combinations in a row that do not fit before sampling stops
MAX_SHRINK_RUNS = 150  # cases that the search for a smaller one may run


class TooSlow(BaseException):  # not an Exception, so that no `except Exception` of a target can catch it
    """The time limit of a law expired inside a call."""


def cases(
    space: Space, fits: Callable[[Case], bool] | None, seed: int, in_order: bool = False
) -> Iterator[Case]:
    """An endless stream: each field cycles through its values, reshuffled in every round unless `in_order`."""
    random = Random(seed)
    remaining: dict[str, list] = {name: [] for name in space}
    rejections, count = 0, 0
    while rejections < MAX_REJECTIONS:
        fields = {}
        for name, values in space.items():
            if not remaining[name]:
                remaining[name] = list(values)[::-1] if in_order else random.sample(list(values), len(values))
            fields[name] = remaining[name].pop()
        case = Case(fields, seed=seed + count)
        if fits is not None and not fits(case):
            rejections += 1
            continue
        rejections, count = 0, count + 1
        yield case


def smallest(
    case: Case,
    space: Space,
    fits: Callable[[Case], bool] | None,
    breaks: Callable[[Case], bool],
    until: float,
) -> Case:
    """A case that still breaks the law, with each field as early in its space as possible, and a seed near 0."""
    runs = 0
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
                if runs >= MAX_SHRINK_RUNS or time.monotonic() > until:
                    return case
                smaller = Case(case, **{name: value})
                if fits is not None and not fits(smaller):
                    continue
                runs += 1
                if breaks(smaller):
                    case, improved = smaller, True
                    break
    return case


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TooSlow inside the block when the time is up.

    It needs signals and the main thread; elsewhere the limit is only checked between cases.
    """
    usable = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if not usable or seconds <= 0:
        yield
        return

    def expire(_number, _frame):
        raise TooSlow

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
