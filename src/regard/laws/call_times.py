"""The CPU time of a target's calls, from which the time of a larger call is estimated before it is made."""

import time
from collections.abc import Callable
from typing import Any


class CallTimes:
    """Measured calls and the remaining time. A call takes time in proportion to its pairs (queries × keys).

    CPU time, so that which large calls are skipped does not depend on the load of the machine.
    """

    def __init__(self, seconds: float):
        self.left = seconds
        self._measured: dict[str, list[tuple[int, float]]] = {}

    def run(self, call: Callable[[], Any], pairs: int, kind: str = "") -> Any:
        """The result of a call, whose time is subtracted from `left`. kind: calls of one kind take similar time."""
        began = time.process_time()
        try:
            return call()
        finally:
            used = time.process_time() - began
            self.left -= used
            self._measured.setdefault(kind, []).append((pairs, used))

    def estimate(self, pairs: int, kind: str = "") -> float:
        """Estimated seconds of a call with this number of pairs, from the largest measured call; 0 without one."""
        size, seconds = max(self._measured.get(kind, []), default=(1, 0.0))
        return seconds * pairs / size
