"""From a model to tokens: greedy, sampled or by beams, with what was seen kept from step to step."""

from .how import beam, greedy, sample
from .loop import Generated, generate

__all__ = ["Generated", "beam", "generate", "greedy", "sample"]
