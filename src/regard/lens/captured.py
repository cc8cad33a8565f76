"""One attention call as it was seen, and its weights: only for the heads and rows that are asked for.

A call is kept as what goes into its softmax: q, k, the scale and what is added to the scores. That is
O(n · d), whatever kernel ran. A model that wrote its weights down itself (eager) is kept by those.
"""

from dataclasses import dataclass
from math import inf
from typing import Literal

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from ..errors import RegardError, ShapeError
from ..reference import Ties, hardmax, softmax
from .terms import Causal, Heads, Part, Rows, Term

Way = Literal["sdpa", "flex", "fast path", "eager", "regard"]
Role = Literal["self", "cross"]


@dataclass(frozen=True, eq=False)
class Compared:
    """scale · q kᵀ, changed by each term in turn."""

    q: Float[Tensor, "b h n d_k"]
    k: Float[Tensor, "b h_kv m d_k"]
    v: Float[Tensor, "b h_kv m d_v"] | None
    scale: float
    terms: tuple[Term, ...] = ()
    ties: Ties = "share"  # where the scale is ∞

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (*self.q.shape[:3], self.k.shape[2])

    @property
    def kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def top_left(self) -> bool:
        """Whether query i sees no key past i, by the call's own word."""
        return any(isinstance(t, Causal) for t in self.terms)

    def scores(self, part: Part) -> Float[Tensor, "h r m"]:
        precise = torch.promote_types(self.q.dtype, torch.float32)
        factor = self.q.shape[-1] ** -0.5 if self.scale == inf else self.scale
        q = self.q[part.batch, part.heads][:, part.rows].to(precise) * factor
        k = self.k[part.batch, :, : part.keys].to(precise)
        scores = _products(q, k, part.heads, self.q.shape[1])
        for term in self.terms:
            scores = term.change(scores, part)
        return scores

    def weights(self, part: Part) -> Float[Tensor, "h r m"]:
        scores = self.scores(part)
        return hardmax(scores, ties=self.ties) if self.scale == inf else softmax(scores)


def _products(
    q: Float[Tensor, "h r d_k"], k: Float[Tensor, "h_kv m d_k"], heads: Heads, all_heads: int
) -> Float[Tensor, "h r m"]:
    """q·k; query heads g·c … g·c + c − 1 share key head g."""
    group = all_heads // len(k)
    if group == 1:
        return q @ rearrange(k[heads], "h m d -> h d m")
    if heads == slice(0, all_heads):  # one product a key head, without repeating it
        scores = rearrange(q, "(g c) r d -> g (c r) d", c=group) @ rearrange(k, "g m d -> g d m")
        return rearrange(scores, "g (c r) m -> (g c) r m", c=group)
    of_key = torch.arange(all_heads, device=k.device)[heads] // group
    return q @ rearrange(k[of_key], "h m d -> h d m")


@dataclass(frozen=True, eq=False)
class Written:
    """The weights as the model itself wrote them down."""

    table: Float[Tensor, "b h n m"]
    v: Float[Tensor, "b h_kv m d_v"] | None = None
    scale = None
    top_left = False

    @property
    def shape(self) -> tuple[int, int, int, int]:
        b, h, n, m = self.table.shape
        return b, h, n, m

    @property
    def kv_heads(self) -> int:
        return self.table.shape[1]

    def scores(self, part: Part) -> Float[Tensor, "h r m"]:
        """ln weights: the scores up to a constant a row; −∞ where the weight is 0."""
        return self.weights(part).log()

    def weights(self, part: Part) -> Float[Tensor, "h r m"]:
        precise = torch.promote_types(self.table.dtype, torch.float32)
        return self.table[part.batch, part.heads][:, part.rows, : part.keys].to(precise)


@dataclass(frozen=True, eq=False)
class Captured:
    """One attention call: where in the model it ran, and what its weights are.

    layer: its place in running order, from 0. name: the path of its module ("#2" where it ran again).
    way: by which kind of call it was made. queries, keys: the tokens of both sides, one tuple a batch row.
    causal: no query looks past itself. real: which queries are no padding; None is all.
    """

    layer: int
    name: str
    role: Role
    way: Way
    source: Compared | Written | None
    shape: tuple[int, int, int, int]
    versions: tuple[int, ...] = ()
    causal: bool = False
    queries: tuple[tuple[str, ...], ...] = ()
    keys: tuple[tuple[str, ...], ...] = ()
    real: Bool[Tensor, "b n"] | None = None

    @property
    def b(self) -> int:
        return self.shape[0]

    @property
    def heads(self) -> int:
        return self.shape[1]

    @property
    def n(self) -> int:
        return self.shape[2]

    @property
    def m(self) -> int:
        return self.shape[3]

    @property
    def kv_heads(self) -> int:
        return self.heads if self.source is None else self.source.kv_heads

    @property
    def scale(self) -> float | None:
        return None if self.source is None else self.source.scale

    @property
    def start(self) -> int:
        """Where query 0 stands among the keys: at m − n in self-attention with a cache, else at 0."""
        top_left = self.source is not None and self.source.top_left
        return self.m - self.n if self.role == "self" and not top_left else 0

    def weights(
        self, heads: list[int] | None = None, rows: list[int] | None = None, batch: int = 0
    ) -> Float[Tensor, "h r m"]:
        """softmax(scores) of these heads and rows, all if None."""
        return self._kept().weights(self.part(heads, rows, batch))

    def scores(
        self, heads: list[int] | None = None, rows: list[int] | None = None, batch: int = 0
    ) -> Float[Tensor, "h r m"]:
        """scale · q kᵀ + bias, −∞ where the query may not look. Of an eager call: ln weights."""
        return self._kept().scores(self.part(heads, rows, batch))

    def allowed(self, rows: list[int] | None = None, batch: int = 0) -> Bool[Tensor, "h r m"]:
        """Who may look; for an eager call, whose weight is above 0."""
        lowest = torch.finfo(torch.float32).min / 2  # some models add their dtype's lowest number for "no"
        return self.scores(None, rows, batch) > lowest

    def values(self, heads: list[int] | None = None, batch: int = 0) -> Float[Tensor, "h m d_v"] | None:
        """What the weights mix, one a query head."""
        v = self._kept().v
        if v is None:
            return None
        chosen = self.part(heads, None, batch).heads
        of_key = torch.arange(self.heads, device=v.device)[chosen] // (self.heads // v.shape[1])
        return v[batch, of_key]

    def part(self, heads: Heads | None = None, rows: Rows | None = None, batch: int = 0) -> Part:
        """The part of the table that these name; an index that does not exist is refused with the range."""
        if not 0 <= batch < self.b:
            raise ShapeError(f"batch row {batch} of {self.name}: it ran {_range(self.b, 'row')}")
        for asked, there, what in ((heads, self.heads, "head"), (rows, self.n, "query")):
            wrong = [i for i in asked if not 0 <= i < there] if isinstance(asked, list) else []
            if wrong:
                raise ShapeError(
                    f"{what} {wrong[0]} of layer {self.layer} ({self.name}): it has {_range(there, what)}"
                )
        return Part(batch, heads or slice(0, self.heads), rows or slice(0, self.n), self.m)

    def _kept(self) -> Compared | Written:
        if self.source is None:
            raise RegardError(
                f"layer {self.layer} ({self.name}) was looked at with keep=False: its statistics are there, "
                f"its queries and keys are gone; look again with keep=True for maps"
            )
        if tuple(version(x) for x in held(self.source)) != self.versions:
            raise RegardError(
                f"the tensors of layer {self.layer} ({self.name}) were written over in place after the call "
                f"(a static cache?), so its weights cannot be made again; look with keep='copy'"
            )
        return self.source


def looks_back(source: Compared | Written, role: Role) -> bool:
    """Whether no query looks past itself, whoever sees to it: the first and the middle one are asked."""
    _, h, n, m = source.shape
    if role == "cross" or m < 2 or n > m:
        return False
    rows = sorted({0, (n - 1) // 2})
    device = held(source)[0].device
    later = torch.arange(m, device=device) > torch.tensor(rows, device=device)[:, None] + m - n
    weights = source.weights(Part(0, slice(0, h), rows, m))
    return bool(later.any()) and not bool((weights * later).any())


def held(source: Compared | Written) -> list[Tensor]:
    """The tensors that weights are made of."""
    return [source.q, source.k] if isinstance(source, Compared) else [source.table]


def version(x: Tensor) -> int:
    """How often x was written to in place; 0 where PyTorch does not count."""
    return 0 if x.is_inference() else x._version


def _range(count: int, what: str) -> str:
    many = {"query": "queries", "head": "heads", "row": "rows"}[what]
    return f"1 {what}, number 0" if count == 1 else f"{count} {many}, 0 to {count - 1}"
