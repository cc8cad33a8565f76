"""Sampling cases so that every value of every field occurs, and searching for the smallest case that breaks a law."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

from .law import Case, Space

MAX_REJECTIONS = 200  # combinations in a row that do not fit before sampling stops
CALL_SECONDS = 10.0  # the time limit for one call of a target
MAX_SHRINK_RUNS = 150  # cases that the search for a smaller one may run


TIMEOUT_WORDS = "the call was stopped"


@contextmanager
def call_seconds(seconds: float | int | None) -> Iterator[None]:
    """Sets the time limit for each call of a target inside the block; None: the default."""
    global CALL_SECONDS
    before = CALL_SECONDS
    CALL_SECONDS = before if seconds is None else seconds
    try:
        yield
    finally:
        CALL_SECONDS = before


class TooSlow(BaseException):  # not an Exception, so that an `except Exception` of a target cannot catch it
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


class CallTooSlow(Exception):
    """One call of the target did not return within the time limit of a call."""


class _CallExpired(BaseException):  # becomes CallTooSlow outside the target, which might catch an Exception
    pass


class _Waiting:
    """Seconds that this thread has waited for a core, which no limit counts; 0 where the system does not tell."""

    FILE = "/proc/thread-self/schedstat"  # of Linux: nanoseconds on a core, nanoseconds of waiting for one
    REFRESH = 0.25  # seconds; reading the file takes as long as a small call of a target

    def __init__(self) -> None:
        self.seconds, self.read_at = 0.0, -1.0

    def now(self) -> float:
        try:
            with open(self.FILE) as file:
                self.seconds = int(file.read().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            self.seconds = 0.0
        self.read_at = time.monotonic()
        return self.seconds

    def recent(self) -> float:
        return self.now() if time.monotonic() - self.read_at > self.REFRESH else self.seconds


_waiting = _Waiting()


class _Deadline:
    """A limit in several parts: a process that was suspended for minutes, however often, exceeds one part each time.

    Time in which other processes had the core does not count: the same target passes on a busy machine.
    """

    PARTS = 8

    def __init__(self, seconds: float | int, error: type[BaseException]):
        self.part, self.error, self.left = seconds / self.PARTS, error, self.PARTS
        self.at = time.monotonic() + self.part
        self.waited = _waiting.recent()

    def passed(self, now: float) -> bool:
        if now < self.at - 1e-3:
            return False
        waited = _waiting.now()
        lost, self.waited = waited - self.waited, waited
        if lost > 0.1 * self.part:
            self.at = now + lost
            return False
        self.left, self.at = self.left - 1, now + self.part
        return self.left <= 0


_deadlines: list[_Deadline] = []  # the limits that are running, the outermost first


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TooSlow inside the block when the time has run out.

    It needs signals and the main thread; otherwise the limit is only checked between cases. Limits may be nested.
    """
    with _limit(seconds, TooSlow):
        yield


@contextmanager
def call_limit(seconds: float | int) -> Iterator[None]:
    """Raise CallTooSlow inside the block when one call of the target takes too long."""
    try:
        with _limit(seconds, _CallExpired):
            yield
    except _CallExpired:
        raise CallTooSlow(f"no answer within {seconds:g} s; {TIMEOUT_WORDS}") from None


@contextmanager
def _limit(seconds: float | int, kind: type[BaseException]) -> Iterator[None]:
    usable = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if not usable or seconds <= 0:
        yield
        return

    def expire(_number, _frame):
        now = time.monotonic()
        for deadline in _deadlines:  # an outer limit that has passed ends the inner blocks as well
            if deadline.passed(now):
                raise deadline.error
        _arm()

    before = signal.signal(signal.SIGALRM, expire)
    _deadlines.append(_Deadline(seconds, kind))
    _arm()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _deadlines.pop()
        signal.signal(signal.SIGALRM, before)
        _arm()


def _arm() -> None:
    """Set the timer to the nearest deadline that is still running."""
    if _deadlines:
        nearest = min(deadline.at for deadline in _deadlines)
        signal.setitimer(signal.ITIMER_REAL, max(1e-4, nearest - time.monotonic()))
