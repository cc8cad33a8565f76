"""Memory of a model: weights, gradients, optimizer state, saved activations, peaks.

step.py       the options and parts of a training step
runs.py       a forward pass, a prompt with a cache or a training step, on meta tensors
allocator.py  what an allocator makes of it
report.py     all of it as one value, and what is alive at the peak; formulas of attention
"""

from .report import Memory
from .step import TrainingStep

__all__ = ["Memory", "TrainingStep"]
