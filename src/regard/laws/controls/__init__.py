"""The reference and small modules as targets, and faulty variants of both: the controls that laws must report."""

from .functions import CLAIMS, formula, weighing, wrapped
from .modules import SmallAttention, small_attention, small_decoder

__all__ = ["CLAIMS", "SmallAttention", "formula", "small_attention", "small_decoder", "weighing", "wrapped"]
