"""The teaching systems: each trains in seconds to a few minutes and ends in a number that decides its claim.

>>> sorted(LESSONS, key=lambda t: int(t[1:]))
['T1', 'T2', 'T3', 'T4', 'T5', 'T6', 'T7', 'T8', 'T9', 'T10', 'T11', 'T12', 'T13']
"""

from .baselines import reversing
from .depth import flow
from .images import patches, shifts
from .language import agreement, phrase_book
from .lesson import Lesson
from .masks import future, padding, source
from .order import bag, beyond, chased
from .scaling import widths

LESSONS = {
    "T1": padding,
    "T2": source,
    "T3": phrase_book,
    "T4": shifts,
    "T5": chased,
    "T6": patches,
    "T7": flow,
    "T8": reversing,
    "T9": future,
    "T10": beyond,
    "T11": bag,
    "T12": widths,
    "T13": agreement,
}

__all__ = ["LESSONS", "Lesson"]
