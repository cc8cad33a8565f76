"""From a model to tokens: greedy, sampled or by beam search, with a key/value cache."""

from .loop import Generated, generate
from .strategies import Strategy, beam, greedy, sample

__all__ = ["Generated", "Strategy", "beam", "generate", "greedy", "sample"]
