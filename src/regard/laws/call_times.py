"""The processor time of a target's calls: how long a larger call would take, before it is made."""

import time
from collections.abc import Callable
from typing import Any


class CallTimes:
    """A target in tiles or loops takes time in proportion to queries × keys; a small call measures that.

    Processor time, so that what is left out does not depend on what else the machine does.
    """

    def __init__(self, seconds: float):
        self.left = seconds
        self._measured: dict[str, list[tuple[int, float]]] = {}

    def run(self, call: Callable[[], Any], pairs: int, kind: str = "") -> Any:
        """The result of a call; its time is taken from what is left. kind: calls with gradients take longer."""
        began = time.process_time()
        try:
            return call()
        finally:
            used = time.process_time() - began
            self.left -= used
            self._measured.setdefault(kind, []).append((pairs, used))

    def estimate(self, pairs: int, kind: str = "") -> float:
        """Seconds for a call with so many pairs, from the largest that was measured; 0 where none was."""
        size, seconds = max(self._measured.get(kind, []), default=(1, 0.0))
        return seconds * pairs / size
