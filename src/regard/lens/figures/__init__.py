"""The pictures: each function returns a matplotlib figure; `figure.savefig("x.svg")` writes it."""

from .architecture import architecture
from .costs_and_trace import attention_trace, layer_costs
from .curves import (
    cost_curves,
    gradient_flow,
    learning_rates,
    recorded_gradients,
    saturation,
    training_curves,
)
from .heads import convolution_map, head_evolution, head_gallery, shape_trace
from .maps import attention_map, attention_rows, dependence, overview
from .memory import memory_timeline, memory_treemap, roofline
from .patterns import mask_matrix, mask_table, receptive_field
from .positions import patch_positions, positional_encoding
from .sharpness import sharpness

__all__ = [
    "architecture",
    "attention_map",
    "attention_rows",
    "attention_trace",
    "convolution_map",
    "cost_curves",
    "dependence",
    "gradient_flow",
    "head_evolution",
    "head_gallery",
    "layer_costs",
    "learning_rates",
    "mask_matrix",
    "mask_table",
    "memory_timeline",
    "memory_treemap",
    "overview",
    "patch_positions",
    "positional_encoding",
    "receptive_field",
    "recorded_gradients",
    "roofline",
    "saturation",
    "shape_trace",
    "sharpness",
    "training_curves",
]
