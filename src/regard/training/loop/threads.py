"""The number of CPU threads of a training loop: measured, because a small model is fastest with one or two.

OpenMP's threads wait for one another after every operation. If another process occupies one of the cores, each of
those waits can take a time slice, and an update becomes up to fifty times slower; with one thread it does not. So the
number is measured before training on updates of a copy, and again if updates become much slower.

With the same seed and the same number of threads the results are the same, bit for bit. Another number of threads
sums in another order, so results then agree up to rounding only.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ...errors import SpecError

GAIN = 1.25  # twice as many threads have to be faster by this factor
MIN_UPDATES, MIN_SECONDS = 3, 0.15  # timed per number of threads
MAX_SECONDS = 4.0  # per number of threads: no update is begun after this time
SLOWER = 2.5  # times the measured seconds per unit of work: a reason to measure again
WINDOW = 1.0  # seconds of training that are compared with the measurement
AGAIN = 30.0  # seconds after a repeated measurement, to notice that the disturbance has ended

Step = Callable[[], int | float]  # makes one update and returns its amount of work, such as its tokens


@dataclass(frozen=True)
class ThreadTimes:
    """The chosen number of threads, and the seconds per unit of work for each number that was tried."""

    threads: int
    seconds: dict[int, float] = field(default_factory=dict)

    @property
    def expected(self) -> float | None:
        return self.seconds.get(self.threads)


def fastest(step: Step, max_threads: int | None = None) -> ThreadTimes:
    """Time `step` with 1, 2, 4, … threads, up to the number that is set now, and set the fastest.

    It stops at the first number that is not clearly faster than the one before. `step` should train a copy.
    """
    most = torch.get_num_threads() if max_threads is None else max_threads
    if most <= 1:
        return ThreadTimes(most)
    measured: dict[int, float] = {}
    best = 1
    try:
        torch.set_num_threads(1)
        _seconds_per_work(step, None)  # loads kernels and fills caches
        for count in _counts(most):
            torch.set_num_threads(count)
            limit = GAIN * measured[best] if measured else None
            measured[count] = _seconds_per_work(step, limit)
            if count == 1 or GAIN * measured[count] < measured[best]:
                best = count
            else:
                break
    finally:
        torch.set_num_threads(best)
    return ThreadTimes(best, measured)


def _counts(most: int) -> list[int]:
    """
    >>> _counts(6), _counts(8)
    ([1, 2, 4, 6], [1, 2, 4, 8])
    """
    powers = [2**i for i in range(most.bit_length()) if 2**i < most]
    return [*powers, most]


def _seconds_per_work(step: Step, limit: float | None) -> float:
    """The mean, so that rare long waits count; it ends early once the mean cannot come under `limit`."""
    began, work, updates = time.perf_counter(), 0.0, 0
    while True:
        work += step()
        updates += 1
        seconds = time.perf_counter() - began
        hopeless = limit is not None and updates == 1 and seconds / work > 3 * limit
        if hopeless or seconds > MAX_SECONDS or (updates >= MIN_UPDATES and seconds > MIN_SECONDS):
            return seconds / work


class Threads:
    """A context that sets the number of threads of a training loop, and afterwards the number it was before.

    rehearsal: returns the function that makes updates of a copy; it is called for each measurement. threads: a fixed
    number, then nothing is measured. Call `observe` after each update.
    """

    def __init__(self, rehearsal: Callable[[], Step], threads: int | None = None):
        if threads is not None and threads < 1:
            raise SpecError(f"threads={threads}: it needs to be at least 1")
        self.rehearsal, self.fixed = rehearsal, threads
        self.chosen = ThreadTimes(torch.get_num_threads())
        self.before = torch.get_num_threads()
        self._seconds = self._work = 0.0
        self._again: float | None = None  # when to measure again

    def __enter__(self) -> "Threads":
        self.before = torch.get_num_threads()
        if self.fixed is None:
            self._measure()
        else:
            self._use(self.fixed)
        return self

    def __exit__(self, *error: object) -> None:
        torch.set_num_threads(self.before)

    @property
    def count(self) -> int:
        return self.chosen.threads

    def resume(self, threads: int) -> None:
        """Continue with the number of the run's earlier part, unless one is fixed or fewer are allowed."""
        if self.fixed is None and threads <= self.before:
            self._use(threads)

    def _use(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self.chosen = ThreadTimes(threads, self.chosen.seconds)

    def observe(self, seconds: float, work: int | float) -> bool:
        """Whether the last updates were so slow that the number of threads was measured again."""
        expected = self.chosen.expected
        if self.fixed is not None or expected is None:
            return False
        self._seconds, self._work = self._seconds + seconds, self._work + work
        if self._seconds < WINDOW or not self._work:
            return False
        slow = self._seconds / self._work > SLOWER * expected
        self._seconds = self._work = 0.0
        now = time.perf_counter()
        if not slow and (self._again is None or now < self._again):
            return False
        self._measure()
        self._again = now + AGAIN if slow else None
        return True

    def _measure(self) -> None:
        self.chosen = fastest(self.rehearsal(), self.before) if self.before > 1 else ThreadTimes(1)
        self._seconds = self._work = 0.0
