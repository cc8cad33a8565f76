"""Next tokens predicted with the true text as input, against tokens generated one by one."""

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ..errors import ShapeError


class Accuracy(NamedTuple):
    """The share of right tokens where the true text is the input, where the model's own tokens are, and by chance."""

    forced: float  # each position predicts the next token of the true text
    generated: float  # each token is appended to the input of the next
    chance: float  # 1 / vocabulary
    error: float  # the standard error of `generated`

    @property
    def at_chance(self) -> bool:
        """Whether the generated tokens are no better than chance, within three standard errors."""
        return self.generated <= self.chance + 3 * self.error


@torch.no_grad()
def next_token_accuracy(model: nn.Module, text: Int[Tensor, "b n"], prompt: int = 1) -> Accuracy:
    """How well a model continues `text` after its first `prompt` tokens, token by token (greedy).

    Every step runs the model on what exists so far, without a cache, so that a model without a causal mask can be
    measured too: all it reads in training is missing here, since the next tokens do not exist yet.
    """
    if not 1 <= prompt < text.shape[1]:
        raise ShapeError(f"prompt={prompt} of texts of {text.shape[1]} tokens; use 1 to {text.shape[1] - 1}")
    was_training = model.training
    model.eval()
    try:
        logits = model(text[:, :-1])
        forced = (logits.argmax(-1) == text[:, 1:])[:, prompt - 1 :]
        rows = text[:, :prompt]
        while rows.shape[1] < text.shape[1]:
            rows = torch.cat([rows, model(rows)[:, -1].argmax(-1, keepdim=True)], 1)
    finally:
        model.train(was_training)
    right = (rows == text)[:, prompt:].double()
    share = float(right.mean())
    chance = 1 / logits.shape[-1]
    spread = max(share * (1 - share), chance * (1 - chance))
    return Accuracy(float(forced.double().mean()), share, chance, (spread / right.numel()) ** 0.5)
