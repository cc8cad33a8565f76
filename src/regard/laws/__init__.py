"""Laws that every attention must obey, and `check`, which tests them on any attention."""

from .catalogue import LAWS, law
from .checker import check, replay
from .judge import Budget, try_law
from .law import Case, Law, Outcome, Tolerance
from .target import Function, Model, Part, Projections, Target
from .verdict import Verdict

__all__ = [
    "LAWS",
    "Budget",
    "Case",
    "Function",
    "Law",
    "Model",
    "Outcome",
    "Part",
    "Projections",
    "Target",
    "Tolerance",
    "Verdict",
    "check",
    "law",
    "replay",
    "try_law",
]
