"""Laws that every correct attention obeys, and `check`, which tests them on any attention."""

from .catalogue import LAWS, law
from .checker import check, replay
from .diagnosis import Cause
from .judgment import Judgment, judge
from .law import Case, Law, Outcome, Tolerance
from .run_law import Budget, try_law
from .target import Function, Model, Part, Projections, Target
from .verdict import Verdict

__all__ = [
    "LAWS",
    "Budget",
    "Case",
    "Cause",
    "Function",
    "Judgment",
    "Law",
    "Model",
    "Outcome",
    "Part",
    "Projections",
    "Target",
    "Tolerance",
    "Verdict",
    "check",
    "judge",
    "law",
    "replay",
    "try_law",
]
