"""Key/value caches for step-by-step inference, under `torch.no_grad()`."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import RegardError, ShapeError


class KeyValues:
    """The keys and values of one attention layer. Batch rows may have different lengths.

    Slot s of row b holds position s, so the next key of a row goes to slot lengths[b].
    """

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity  # initial slots, where the first call has one position
        self.k: Float[Tensor, "b h_kv capacity d_k"] | None = None
        self.v: Float[Tensor, "b h_kv capacity d_v"] | None = None
        self.filled = (
            0  # slots in use by the longest row; a Python number, so reading it does not synchronize
        )
        self.lengths: Int[Tensor, " b"] | None = None  # None while all rows are equally long

    @property
    def rows(self) -> int:
        """The number of batch rows."""
        return 0 if self.k is None else len(self.k)

    @property
    def offset(self) -> int | Int[Tensor, " b"]:
        """The query offset of each row's next query."""
        return self.filled if self.lengths is None else self.lengths

    def append(
        self,
        k: Float[Tensor, "b h_kv n d_k"],
        v: Float[Tensor, "b h_kv n d_v"],
        lengths: Int[Tensor, " b"] | None = None,
    ) -> tuple[Float[Tensor, "b h_kv m d_k"], Float[Tensor, "b h_kv m d_v"], Int[Tensor, " b"] | None]:
        """All keys and values with these appended, and each row's length (None: all rows are equally long).

        `lengths`: how many of the n new positions are real; a row's padding is overwritten by later positions.
        """
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise RegardError("a cache has no gradients; decode under torch.no_grad()")
        b, _, n, _ = k.shape
        if self.k is not None and len(self.k) != b:
            raise ShapeError(
                f"the cache has {len(self.k)} batch rows and this call {b}; `cache.select(rows)` keeps or repeats "
                f"rows"
            )
        start, self.filled = self.filled, self.filled + n
        # Slots past a row's length are read with weight 0, so they need to be finite.
        zeros = lengths is not None or self.lengths is not None
        self.k = _grow(self.k, k, self._slots(self.k), zeros)
        self.v = _grow(self.v, v, self._slots(self.v), zeros)
        if lengths is not None and self.lengths is None:
            self.lengths = torch.full((b,), start, device=k.device, dtype=lengths.dtype)
            for t in (self.k, self.v):
                t[:, :, start:] = 0
        if self.lengths is None:
            self.k.narrow(2, start, n).copy_(k)  # faster than indexing a slice
            self.v.narrow(2, start, n).copy_(v)
        else:
            row = torch.arange(b, device=k.device)[:, None]
            slot = self.lengths[:, None] + torch.arange(n, device=k.device)
            self.k[row, :, slot], self.v[row, :, slot] = k.transpose(1, 2), v.transpose(1, 2)
            self.lengths = self.lengths + (n if lengths is None else lengths)
        return self.k.narrow(2, 0, self.filled), self.v.narrow(2, 0, self.filled), self.lengths

    def _slots(self, old: Tensor | None) -> int:
        """How many slots a tensor gets: doubled when it is full."""
        if old is not None:
            return old.shape[2] if old.shape[2] >= self.filled else max(self.filled, 2 * old.shape[2])
        return max(self.filled, self.capacity if self.filled == 1 else 0)

    def select(self, rows: Int[Tensor, " r"], moves: "Moves | None" = None) -> None:
        """Keep these rows of the batch, in this order; rows may repeat. Rows that stay in place are not copied.

        moves: those of `rows`, where the caller has them from another layer.
        """
        if self.k is not None and self.v is not None:
            if len(rows) > len(self.k):
                self.k, self.v = self.k[rows], self.v[rows]
            else:
                moves = Moves(rows) if moves is None else moves
                self.k, self.v = (moves.apply(t, self.filled) for t in (self.k, self.v))
        if self.lengths is not None:
            self.lengths = self.lengths[rows]

    def keep_slots(self, slots: Int[Tensor, "b count"]) -> None:
        """Keep these slots of each row, in this order. All rows are equally long."""
        assert self.k is not None and self.v is not None and self.lengths is None
        (b, h, capacity, _), count = self.v.shape, slots.shape[1]
        first = torch.arange(b * h, device=slots.device).mul_(capacity).view(b, h, 1)
        index = (first + slots[:, None]).flatten()  # of the slots of all rows and heads
        for t in (self.k, self.v):
            t[:, :, :count].copy_(t.view(-1, t.shape[3]).index_select(0, index).view(b, h, count, -1))
        self.filled = count


def _grow(old: Tensor | None, new: Tensor, slots: int, zeros: bool) -> Tensor:
    """`old` with this number of slots. zeros: those that are new are 0."""
    if old is not None and old.shape[2] >= slots:
        return old
    b, h, _, d = new.shape
    out = (new.new_zeros if zeros else new.new_empty)(b, h, slots, d)
    if old is not None:
        out[:, :, : old.shape[2]] = old
    return out


class Moves:
    """Which rows have to be copied so that the first ones are `rows`."""

    def __init__(self, rows: Int[Tensor, " r"]):
        self.count = len(rows)
        self.into = (rows != torch.arange(len(rows), device=rows.device)).nonzero()[:, 0]
        self.origin = rows[self.into]
        # On a CPU copying row by row is fastest, where no row is both read and overwritten.
        self.pairs: list[tuple[int, int]] | None = None
        if rows.is_cpu:
            into, origin = self.into.tolist(), self.origin.tolist()
            if not set(into) & set(origin):
                self.pairs = list(zip(into, origin, strict=True))

    def apply(self, t: Tensor, filled: int) -> Tensor:
        """The selected rows of t (b, h, slots, d), copied up to slot `filled`."""
        if self.pairs is not None:
            for i, j in self.pairs:
                t[i].narrow(1, 0, filled).copy_(t[j].narrow(1, 0, filled))
        elif len(self.into):
            t[self.into, :, :filled] = t[self.origin, :, :filled]  # indexing copies the right side first
        return t[: self.count]


class LayerCache:
    """The caches of one block: of its self-attention, and of its cross-attention to the context."""

    def __init__(self) -> None:
        self.own, self.cross = KeyValues(capacity=32), KeyValues()

    def select(self, rows: Int[Tensor, " r"], moves: Moves, same_context: bool = False) -> None:
        """Keep these rows. same_context: each replaces a row with the same context."""
        self.own.select(rows, moves)
        if not same_context:
            self.cross.select(rows, moves)


class Cache:
    """The cache of a stack: pass it to each call, with only the new tokens."""

    def __init__(self, layers: int) -> None:
        self.layers = [LayerCache() for _ in range(layers)]

    @property
    def offset(self) -> int | Int[Tensor, " b"]:
        return self.layers[0].own.offset

    @property
    def filled(self) -> int:
        return self.layers[0].own.filled

    def select(self, rows: Int[Tensor, " r"], same_context: bool = False) -> None:
        """Keep these rows of the batch, in this order, in every layer."""
        moves = Moves(rows)
        for layer in self.layers:
            layer.select(rows, moves, same_context)
