"""Cross-attention maps of a few sentences for the report: tokens, and weights as bytes."""

import base64
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ...lens.view import View, look
from ...nn.stack import EncoderDecoder
from ..data.tokens import END, START, Tokens
from ..recipes.evaluation import Example

MAX_TOKENS = 40  # of either side
MAX_SENTENCES = 5


def cross_maps(model: nn.Module, tokens: Tokens, examples: Sequence[Example]) -> list[dict[str, Any]]:
    """The cross-attention of each head of each decoder layer while the model generates its translations."""
    if not isinstance(model, EncoderDecoder):
        return []
    maps = []
    for example in examples:
        source, output = tokens.encode([example.source, example.output])
        if 0 < len(source) <= MAX_TOKENS and 0 < len(output) <= MAX_TOKENS:
            maps.append(_sentence(model, tokens, example, source, output))
    return maps[:MAX_SENTENCES]


def _sentence(
    model: EncoderDecoder, tokens: Tokens, example: Example, source: list[int], output: list[int]
) -> dict[str, Any]:
    device = next(model.parameters()).device
    inputs = {
        "source": torch.tensor([source], device=device),
        "target": torch.tensor([[START, *output]], device=device),
    }
    view = look(model.eval(), inputs)
    layers = [
        {
            "name": f"decoder layer {i}",
            "maps": _maps(torch.stack([view.map(c.layer, h) for h in range(c.heads)])),
        }
        for i, c in enumerate((c for c in view.calls if c.role == "cross"), 1)
    ]
    # Row i is the attention that predicts token i + 1, so rows are named by the predicted token.
    return {
        "source": example.source,
        "queries": tokens.words([*output, END]),
        "keys": tokens.words(source),
        "layers": layers,
    }


def view_maps(title: str, view: View, batch: int = 0, role: str | None = None) -> dict[str, Any]:
    """The maps of one sequence of a view for the page's script; role: only "self" or "cross" attention.

    All attention calls have to be between the same tokens, as the self-attention of one stack is.
    """
    calls = [c for c in view.calls if role in (None, c.role)]
    layers = [
        {
            "name": f"layer {number}",
            "maps": _maps(torch.stack([view.map(c.layer, h, batch) for h in range(c.heads)])),
        }
        for number, c in enumerate(calls, 1)
    ]
    first = calls[0].layer
    return {
        "source": title,
        "queries": list(view.queries(first, batch)),
        "keys": list(view.keys(first, batch)),
        "layers": layers,
    }


def _maps(weights: Float[Tensor, "h n m"]) -> list[dict[str, Any]]:
    named = [("all heads", weights.mean(0)), *((f"head {h}", w) for h, w in enumerate(weights, 1))]
    return [{"name": name, **_packed(w)} for name, w in named]


def _packed(weights: Float[Tensor, "n m"]) -> dict[str, Any]:
    top = float(weights.max()) or 1.0
    raw = (weights.float() / top * 255).round().byte().cpu().contiguous()
    return {"top": round(top, 6), "bytes": base64.b64encode(raw.numpy().tobytes()).decode()}
