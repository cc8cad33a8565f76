"""The likely cause of a target's faults: which faulty variant of attention returns the same numbers."""

from .cause import Cause
from .variants import VARIANTS

__all__ = ["VARIANTS", "Cause"]
