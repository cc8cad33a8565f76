"""Lessons: small experiments that train in seconds to a few minutes and decide a claim by measured numbers.

>>> list(LESSONS)
['T1', 'T2', 'T3', 'T4', 'T5', 'T6', 'T7', 'T8', 'T9', 'T10', 'T11', 'T12', 'T13']
"""

from .catalogue import LESSONS
from .lesson import Check, Lesson
from .run import LessonResult

__all__ = ["LESSONS", "Check", "Lesson", "LessonResult"]
