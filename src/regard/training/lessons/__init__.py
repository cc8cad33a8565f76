"""Lessons: small experiments that train in seconds to a few minutes and decide a claim by a measured number.

>>> sorted(LESSONS, key=lambda t: int(t[1:]))
['T1', 'T2', 'T3', 'T4', 'T5', 'T6', 'T7', 'T8', 'T9', 'T10', 'T11', 'T12', 'T13']
"""

from .baselines import reversing
from .depth import gradient_flow
from .images import learned_offsets, vision_transformer
from .language import agreement, phrase_book
from .lesson import Lesson
from .masks import entropy_rate, future_leak, padding
from .order import bag_of_tokens, extrapolation, word_order
from .scaling import score_scaling

LESSONS = {
    "T1": padding,
    "T2": entropy_rate,
    "T3": phrase_book,
    "T4": learned_offsets,
    "T5": word_order,
    "T6": vision_transformer,
    "T7": gradient_flow,
    "T8": reversing,
    "T9": future_leak,
    "T10": extrapolation,
    "T11": bag_of_tokens,
    "T12": score_scaling,
    "T13": agreement,
}

__all__ = ["LESSONS", "Lesson"]
