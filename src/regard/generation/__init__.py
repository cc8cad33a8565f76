"""From a model to tokens: greedy, sampled or by beam search, with a key/value cache."""

from .accuracy import Accuracy, next_token_accuracy
from .loop import Generated, generate
from .strategies import Strategy, beam, greedy, sample

__all__ = [
    "Accuracy",
    "Generated",
    "Strategy",
    "beam",
    "generate",
    "greedy",
    "next_token_accuracy",
    "sample",
]
