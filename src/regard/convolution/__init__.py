"""Attention that is a convolution, both ways.

lift     a convolution → attention: a head a tap, scores of position alone; exact when hard, bounded when soft
lower    attention → a convolution: heads that are shifts or short kernels, with a certificate of the error

The word offset is key − query; the documents' shift s is its negative: y_q = Σ_h x[q − s_h] W_h (D10).
"""

from .bands import Band
from .bounds import leak, sharpness
from .certificate import Certificate, Head
from .frame import Frame, Offset, frame, tap_of
from .lifting import Lifted, lift, sharpness_for, shift_heads
from .lowered import Lowered
from .lowering import lower, lower_all
from .shifts import Nearest, Spread, by_offset, nearest_shifts, spread, total_variation

__all__ = [
    "Band",
    "Certificate",
    "Frame",
    "Head",
    "Lifted",
    "Lowered",
    "Nearest",
    "Offset",
    "Spread",
    "by_offset",
    "frame",
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
