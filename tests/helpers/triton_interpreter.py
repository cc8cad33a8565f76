"""Whether Triton's interpreter can run kernels here, for tests that need it."""

from importlib.metadata import PackageNotFoundError, version

import pytest


def _release(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version(package).split(".")[:2])


def _obstacle() -> str:
    """Why the interpreter cannot run; empty if it can."""
    try:
        old = _release("triton") < (3, 7)
    except PackageNotFoundError:
        return "Triton is not installed"
    # Loop bounds are arrays of one number there, and NumPy 2.4 no longer converts those to a Python int.
    if old and _release("numpy") >= (2, 4):
        return "the interpreter of Triton 3.6 cannot run loops with NumPy 2.4 or newer"
    return ""


needs_interpreter = pytest.mark.skipif(bool(_obstacle()), reason=_obstacle())
