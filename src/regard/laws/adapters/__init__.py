"""Adapters that turn functions, modules and models into targets, one file per library; `adapt` chooses one."""

from .adapt import adapt
from .flex import flex
from .hugging_face import hugging_face
from .regard import regard_function, regard_model
from .sdpa import sdpa, sdpa_finfo_min
from .torch_attention import multihead_attention
from .torch_transformer import transformer, transformer_decoder, transformer_encoder
from .x_transformers import x_transformers

__all__ = [
    "adapt",
    "flex",
    "hugging_face",
    "multihead_attention",
    "regard_function",
    "regard_model",
    "sdpa",
    "sdpa_finfo_min",
    "transformer",
    "transformer_decoder",
    "transformer_encoder",
    "x_transformers",
]
