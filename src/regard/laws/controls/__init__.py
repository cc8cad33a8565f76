"""The reference and small modules as targets, and faulty variants of both: the controls that laws must report."""

from .functions import CLAIMS, reference_function, with_changed_call, with_weights
from .modules import SmallAttention, small_attention, small_decoder

__all__ = [
    "CLAIMS",
    "SmallAttention",
    "reference_function",
    "small_attention",
    "small_decoder",
    "with_changed_call",
    "with_weights",
]
