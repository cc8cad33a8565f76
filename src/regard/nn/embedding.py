"""From token ids to vectors, and from states to what a model is for."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from .. import spec
from ..errors import ShapeError
from . import position as positions
from .dropout import dropout
from .feed_forward import ACTIVATIONS
from .norm import norm


class Embedding(nn.Module):
    """E[id] (· √d_model) + position (+ type), normalised where declared."""

    def __init__(self, declared: spec.Embedding):
        super().__init__()
        self.spec = declared
        self.table = nn.Parameter(torch.empty(declared.vocab, declared.d_model).normal_(std=0.02))
        self.types = None
        if declared.types:
            self.types = nn.Parameter(torch.empty(declared.types, declared.d_model).normal_(std=0.02))
        self.position: nn.Module | None = None
        if declared.position is not None:
            self.position = positions.build(declared.position, d_model=declared.d_model)
        self.norm = norm("layer", declared.d_model, declared.eps) if declared.norm else nn.Identity()

    def forward(
        self,
        ids: Int[Tensor, "b n"],
        *,
        types: Int[Tensor, "b n"] | None = None,
        start: int | Int[Tensor, " b"] = 0,
        length: int | None = None,
        places: Int[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n d_model"]:
        """`start` is the position of the first id, one number or one a row; `length` the last position + 1.

        `places` is the position of every id, where they do not just follow one another.
        """
        x = F.embedding(ids, self.table)
        if self.spec.scaled:
            x = x * self.spec.d_model**0.5
        if self.position is not None and places is not None:
            x = self.position(x, places)
        elif self.position is not None:
            along = torch.arange(ids.shape[1], device=ids.device)
            where = along + (start[:, None] if isinstance(start, Tensor) else start)
            if length is None and not isinstance(start, Tensor):
                length = start + ids.shape[1]
            x = self.position(x, where, length)
        if self.types is not None:
            x = x + (self.types[0] if types is None else F.embedding(types, self.types))
        elif types is not None:
            raise ShapeError("token types were given, and the embedding declares none; set types=2 there")
        return dropout(self.norm(x), self.spec.dropout, self.training)


class LanguageHead(nn.Module):
    """Logits x·Eᵀ over the vocabulary, E the embedding's table where tied."""

    def __init__(self, declared: spec.LanguageHead, embedding: spec.Embedding):
        super().__init__()
        self.spec = declared
        self.factor = embedding.d_model**-0.5 if declared.scaled else 1.0
        self.table = None if declared.tied else nn.Parameter(torch.empty(embedding.vocab, embedding.d_model))
        self.bias = nn.Parameter(torch.zeros(embedding.vocab)) if declared.bias else None
        if self.table is not None:
            nn.init.normal_(self.table, std=0.02)

    def forward(
        self, x: Float[Tensor, "*b d_model"], table: Float[Tensor, "vocab d_model"]
    ) -> Float[Tensor, "*b vocab"]:
        return F.linear(*self.inputs(x, table))

    def inputs(
        self, x: Float[Tensor, "*b d_model"], table: Float[Tensor, "vocab d_model"]
    ) -> tuple[Float[Tensor, "*b d_model"], Float[Tensor, "vocab d_model"], Float[Tensor, " vocab"] | None]:
        """What is multiplied: logits are F.linear of these three, and a loss need not hold them all at once."""
        return x * self.factor, table if self.table is None else self.table, self.bias


class MaskedHead(nn.Module):
    """LN(f(x W + b))·Eᵀ + c: what token stands here."""

    def __init__(self, declared: spec.MaskedHead, embedding: spec.Embedding):
        super().__init__()
        self.spec = declared
        self.transform = nn.Linear(embedding.d_model, embedding.d_model)
        self.norm = norm("layer", embedding.d_model, declared.eps)
        self.bias = nn.Parameter(torch.zeros(embedding.vocab))

    def forward(
        self, x: Float[Tensor, "*b d_model"], table: Float[Tensor, "vocab d_model"]
    ) -> Float[Tensor, "*b vocab"]:
        return F.linear(*self.inputs(x, table))

    def inputs(
        self, x: Float[Tensor, "*b d_model"], table: Float[Tensor, "vocab d_model"]
    ) -> tuple[Float[Tensor, "*b d_model"], Float[Tensor, "vocab d_model"], Float[Tensor, " vocab"]]:
        """What is multiplied: logits are F.linear of these three."""
        return self.norm(ACTIVATIONS[self.spec.activation](self.transform(x))), table, self.bias


class ClassifierHead(nn.Module):
    """Class scores of the pooled state."""

    def __init__(self, declared: spec.ClassifierHead, d_model: int):
        super().__init__()
        self.spec = declared
        self.hidden = nn.Linear(d_model, declared.hidden) if declared.hidden else None
        self.w_out = nn.Linear(declared.hidden or d_model, declared.classes)

    def forward(
        self, x: Float[Tensor, "b n d_model"], lengths: Int[Tensor, " b"] | None = None
    ) -> Float[Tensor, "b classes"]:
        x = pool(x, self.spec.pool, lengths)
        return self.w_out(x if self.hidden is None else self.hidden(x).tanh())


class Pooler(nn.Module):
    """tanh(W x₀ + b)."""

    def __init__(self, declared: spec.Pooler, d_model: int):
        super().__init__()
        self.spec = declared
        self.w = nn.Linear(d_model, d_model)

    def forward(self, x: Float[Tensor, "b n d_model"]) -> Float[Tensor, "b d_model"]:
        return self.w(x[:, 0]).tanh()


def pool(
    x: Float[Tensor, "b n d"], how: str, lengths: Int[Tensor, " b"] | None = None
) -> Float[Tensor, "b d"]:
    """One state a row: the first, the last, the mean or the largest of those that count."""
    if how == "first":
        return x[:, 0]
    if lengths is None:
        return {"last": lambda: x[:, -1], "mean": lambda: x.mean(1), "max": lambda: x.amax(1)}[how]()
    real = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    if how == "last":
        return x[torch.arange(len(x), device=x.device), (lengths - 1).clamp(min=0)]
    if how == "mean":
        return x.masked_fill(~real[..., None], 0.0).sum(1) / lengths.clamp(min=1)[:, None]
    return x.masked_fill(~real[..., None], -torch.inf).amax(1)
