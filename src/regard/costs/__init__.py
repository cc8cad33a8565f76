"""What a declaration, a module or a model costs: parameters, operations, bytes; as numbers and as formulas."""

from .door import cost
from .memory import Memory, fits
from .memory_step import Training
from .reach import ReceptiveField, layers_to_connect, receptive_field, receptive_set, sees
from .readings import relative_ways, score_ways
from .rivals import Comparison, compare
from .tree import Amounts, Cost, Pairs, Part

__all__ = [
    "Amounts",
    "Comparison",
    "Cost",
    "Memory",
    "Pairs",
    "Part",
    "ReceptiveField",
    "Training",
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
