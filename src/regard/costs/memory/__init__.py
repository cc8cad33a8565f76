"""Memory of a model: weights, gradients, optimizer state, saved activations, peaks.

step.py       a training step on meta tensors
allocator.py  what an allocator makes of it
peak.py       what is alive at the peak, by module and kind
report.py     all of it as one value
declared.py   declarations: their modules, formulas of attention, what fits
"""

from .declared import fits
from .report import Memory
from .step import TrainingStep

__all__ = ["Memory", "TrainingStep", "fits"]
