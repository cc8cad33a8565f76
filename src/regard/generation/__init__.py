"""From a model to tokens: greedy, sampled or by beams, with what was seen kept from step to step."""

from .loop import Generated, generate
from .strategies import beam, greedy, sample

__all__ = ["Generated", "beam", "generate", "greedy", "sample"]
