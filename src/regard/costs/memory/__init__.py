"""Memory of a declared model: weights, gradients, optimizer state, saved activations, peaks."""

from .report import Memory, fits
from .step import TrainingStep

__all__ = ["Memory", "TrainingStep", "fits"]
