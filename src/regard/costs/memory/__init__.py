"""Memory of a model: weights, gradients, optimizer state, saved activations, peaks.

step.py       the options and parts of a training step
runs.py       a forward pass, a prompt with a cache or a training step, on meta tensors
allocator.py  what an allocator makes of it
peak.py       what is alive at the peak, by module and kind
report.py     all of it as one value
attention.py  formulas of attention
"""

from .report import Memory
from .step import TrainingStep

__all__ = ["Memory", "TrainingStep"]
