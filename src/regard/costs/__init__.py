"""What a declaration, a module or a model costs: parameters, operations, bytes; as numbers and as formulas."""

from .analysis import relative_ways, score_ways
from .connectivity import ReceptiveField, layers_to_connect, receptive_field, receptive_set, sees
from .entry import cost
from .layer_types import Comparison, compare
from .memory import Memory, TrainingStep, fits
from .tree import Amounts, Cost, Pairs, Part

__all__ = [
    "Amounts",
    "Comparison",
    "Cost",
    "Memory",
    "Pairs",
    "Part",
    "ReceptiveField",
    "TrainingStep",
    "compare",
    "cost",
    "fits",
    "layers_to_connect",
    "receptive_field",
    "receptive_set",
    "relative_ways",
    "score_ways",
    "sees",
]
