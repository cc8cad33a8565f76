"""The cost of a declaration or a module: parameters, FLOPs, memory, time; as numbers and as formulas."""

from ..formulas import (
    ReceptiveField,
    dependencies,
    layers_to_connect,
    receptive_field,
    receptive_set,
    relative_orders,
    score_orders,
)
from .entry import cost
from .layer_types import Comparison, compare
from .memory import Memory, TrainingStep
from .planner import Choice, Plan, plan
from .result import Cost
from .subject import call, example, generate_one, join_ranks, shard, stepping
from .tree import Amounts, Pairs, Part

__all__ = [
    "Amounts", "Choice", "Comparison", "Cost", "Memory", "Pairs", "Part", "Plan", "ReceptiveField",
    "TrainingStep", "call", "compare", "cost", "dependencies", "example", "generate_one", "join_ranks",
    "layers_to_connect", "plan", "receptive_field", "receptive_set", "relative_orders", "score_orders",
    "shard", "stepping",
]  # fmt: skip
