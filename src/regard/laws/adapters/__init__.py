"""Foreign attentions in the language of the laws: one small file a library; `adapt` finds the right one."""

from .adapt import adapt
from .flex import flex
from .hugging_face import hugging_face
from .ours import regard_function, regard_model
from .sdpa import sdpa, sdpa_with_least_number
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
    "sdpa_with_least_number",
    "transformer",
    "transformer_decoder",
    "transformer_encoder",
    "x_transformers",
]
