"""Convolutions as attention, and attention heads as convolutions.

lift     a convolution → attention: one head per tap, scores from positions only; exact if hard, bounded if soft
lower    attention → a convolution: heads that are shifts or short kernels, with a certificate of the error

An offset is key − query; a shift s is its negative: y_q = Σ_h x[q − s_h] W_h.
"""

from .average_pooling import AveragePooling
from .bounds import leak, sharpness
from .certificate import Certificate, Head
from .geometry import Geometry, Offset, geometry_of, tap_of
from .lifting import Lifted, lift, sharpness_for, shift_heads
from .lowered import Lowered
from .lowering import lower, lower_all
from .readings import Reading, Readings, head_readings
from .shifts import NearestShifts, Spread, by_offset, nearest_shifts, spread, total_variation

__all__ = [
    "AveragePooling",
    "Certificate",
    "Geometry",
    "Head",
    "Lifted",
    "Lowered",
    "NearestShifts",
    "Offset",
    "Reading",
    "Readings",
    "Spread",
    "by_offset",
    "geometry_of",
    "head_readings",
    "leak",
    "lift",
    "lower",
    "lower_all",
    "nearest_shifts",
    "sharpness",
    "sharpness_for",
    "shift_heads",
    "spread",
    "tap_of",
    "total_variation",
]
