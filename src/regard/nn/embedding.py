"""Embeddings of token ids, and the heads that read the final states."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from .. import spec
from ..errors import ShapeError
from . import position as position_modules
from .dropout import dropout
from .feed_forward import ACTIVATIONS
from .norm import norm


class Embedding(nn.Module):
    """E[id] (· √d_model) + position (+ type), with a norm where declared."""

    def __init__(self, declared: spec.Embedding):
        super().__init__()
        self.spec = declared
        self.table = nn.Parameter(torch.empty(declared.vocab, declared.d_model).normal_(std=0.02))
        self.types = None
        if declared.types:
            self.types = nn.Parameter(torch.empty(declared.types, declared.d_model).normal_(std=0.02))
        self.position: nn.Module | None = None
        if declared.position is not None:
            self.position = position_modules.build(declared.position, d_model=declared.d_model)
        self.norm = norm("layer", declared.d_model, declared.eps) if declared.norm else nn.Identity()

    def forward(
        self,
        ids: Int[Tensor, "b n"],
        *,
        types: Int[Tensor, "b n"] | None = None,
        start: int | Int[Tensor, " b"] = 0,
        length: int | None = None,
        positions: Int[Tensor, "b n"] | None = None,
        drops: bool = True,
    ) -> Float[Tensor, "b n d_model"]:
        """`start` is the position of the first id, one number or one per row; `length` is the last position + 1.

        `positions` is the position of every id, where these are not consecutive. drops: False leaves the dropout to
        the caller.
        """
        x = _rows_of(self.table, ids, "token id", "vocab")
        if self.spec.scaled:
            x = x * self.spec.d_model**0.5
        if self.position is not None and positions is not None:
            x = self.position(x, positions)
        elif self.position is not None:
            index = torch.arange(ids.shape[1], device=ids.device)
            positions = index + (start[:, None] if isinstance(start, Tensor) else start)
            if length is None and not isinstance(start, Tensor):
                length = start + ids.shape[1]
            x = self.position(x, positions, length)
        if self.types is not None:
            x = x + (self.types[0] if types is None else _rows_of(self.types, types, "token type", "types"))
        elif types is not None:
            raise ShapeError("token types were given, but the embedding declares none; set types=2 there")
        x = self.norm(x)
        return dropout(x, self.spec.dropout, self.training) if drops else x


def _rows_of(
    table: Float[Tensor, "entries d"], index: Int[Tensor, "b n"], name: str, field: str
) -> Float[Tensor, "b n d"]:
    """table[index]; an error names an index without a row, where reading it needs no synchronization."""
    if index.dtype not in (torch.int32, torch.int64):
        raise ShapeError(f"{name}s are {index.dtype}; whole numbers of 32 or 64 bits are needed: x.long()")
    try:
        return position_modules.lookup(index, table)
    except IndexError as e:
        low, high = (int(x) for x in index.aminmax())
        raise ShapeError(
            f"{name} {low if low < 0 else high} has no embedding: {field}={len(table)} is declared, 0 to "
            f"{len(table) - 1}"
        ) from e


class LanguageHead(nn.Module):
    """Logits x·Eᵀ over the vocabulary; E is the embedding's table where tied."""

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
        """The three arguments of F.linear that give the logits; a chunked loss multiplies them part by part."""
        x = x if self.factor == 1 else x * self.factor
        return x, table if self.table is None else self.table, self.bias


class MaskedHead(nn.Module):
    """LN(f(x W + b))·Eᵀ + c: logits of the token at each position."""

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
        """The three arguments of F.linear that give the logits."""
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
    x: Float[Tensor, "b n d"], kind: str, lengths: Int[Tensor, " b"] | None = None
) -> Float[Tensor, "b d"]:
    """One state per row: the first, the last, the mean or the maximum of the real positions."""
    if kind == "first":
        return x[:, 0]
    if lengths is None:
        return {"last": lambda: x[:, -1], "mean": lambda: x.mean(1), "max": lambda: x.amax(1)}[kind]()
    real = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    if kind == "last":
        return x[torch.arange(len(x), device=x.device), (lengths - 1).clamp(min=0)]
    if kind == "mean":
        return x.masked_fill(~real[..., None], 0.0).sum(1) / lengths.clamp(min=1)[:, None]
    return x.masked_fill(~real[..., None], -torch.inf).amax(1)
