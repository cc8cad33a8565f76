"""Cross-attention of a few sentences, ready for a page: tokens, and weights as bytes."""

import base64
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ...lens.view import look
from ...nn.stack import EncoderDecoder
from ..data.tokens import END, START, Tokens
from ..recipes.evaluation import Example

LONGEST = 40  # tokens of either side
SENTENCES = 5


def cross_maps(model: nn.Module, tokens: Tokens, examples: Sequence[Example]) -> list[dict[str, Any]]:
    """Where each head of each decoder layer looks while the model writes its own translations."""
    if not isinstance(model, EncoderDecoder):
        return []
    found = []
    for example in examples:
        source, ours = tokens.encode([example.source, example.ours])
        if 0 < len(source) <= LONGEST and 0 < len(ours) <= LONGEST:
            found.append(_sentence(model, tokens, example, source, ours))
    return found[:SENTENCES]


def _sentence(
    model: EncoderDecoder, tokens: Tokens, example: Example, source: list[int], ours: list[int]
) -> dict[str, Any]:
    device = next(model.parameters()).device
    given = {
        "source": torch.tensor([source], device=device),
        "target": torch.tensor([[START, *ours]], device=device),
    }
    view = look(model.eval(), given)
    layers = [
        {
            "name": f"decoder layer {i}",
            "maps": _maps(torch.stack([view.map(c.layer, h) for h in range(c.heads)])),
        }
        for i, c in enumerate((c for c in view.calls if c.role == "cross"), 1)
    ]
    # Row i looks while token i + 1 is written, so rows are named by what comes of them.
    return {
        "source": example.source,
        "queries": tokens.words([*ours, END]),
        "keys": tokens.words(source),
        "layers": layers,
    }


def _maps(weights: Float[Tensor, "h n m"]) -> list[dict[str, Any]]:
    named = [("all heads", weights.mean(0)), *((f"head {h}", w) for h, w in enumerate(weights, 1))]
    return [{"name": name, **_packed(w)} for name, w in named]


def _packed(weights: Float[Tensor, "n m"]) -> dict[str, Any]:
    top = float(weights.max()) or 1.0
    raw = (weights.float() / top * 255).round().byte().cpu().contiguous()
    return {"top": round(top, 6), "bytes": base64.b64encode(raw.numpy().tobytes()).decode()}
