"""What a mask means, and the tensor that carries it through model code without its n × m elements."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ...pattern import Pattern
from .lifetimes import Held


class StoredKeys(int):
    """A key offset of 0 with the positions of the stored keys, which the mask of a bounded cache needs."""

    held: Held

    def __new__(cls, held: Held) -> "StoredKeys":
        made = super().__new__(cls, 0)
        made.held = held
        return made


@dataclass(frozen=True, eq=False)
class Mask:
    """What a mask of transformers means: a pattern over positions, and which keys of each batch row take part.

    Query r is at position at + r, key s at position s, both counted from the first key present; `origin` is the
    position of that key in the sequence. With `held`, a bounded cache holds some of the keys only, and positions are
    those of the sequence.
    """

    pattern: Pattern
    at: int
    batch: int
    n: int
    m: int
    keys: Tensor | None = None  # (b, m), True = takes part; None: all do
    origin: int = 0
    held: Held | None = None
    # With `held`: the real tokens of the whole sequence, (b, its length); None: all are. Layers hold different keys.
    real: Tensor | None = None
    build: Callable[[], Tensor] | None = field(default=None, repr=False)  # the table that transformers means
    dense: Tensor | None = None  # that table, where it is all that is known
    note: str = ""
    # The positions of the queries, (b, n), and of the keys, (b, m), as a user's pattern counts them. None: those of
    # the sequence, counted from the first key of each row that takes part.
    counted: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    # Whether a row has real keys before those present, and the first of these do not take part: they are no left
    # padding, so that its positions do not start after them.
    begins_in_hole: bool = False
    memo: dict[Any, Any] = field(
        default_factory=dict, repr=False
    )  # what other layers of this forward computed

    @property
    def stored(self) -> Tensor | None:
        """The positions of the keys that a bounded cache holds, sorted."""
        return None if self.held is None else self.held.positions

    def keys_of(self, held: Held) -> Tensor | None:
        """Which of the keys that one layer's bounded cache holds are real; None where all are."""
        if self.real is None or held is self.held:
            return self.keys
        key = "keys", held
        if key not in self.memo:
            keys = self.real[:, held.positions.to(self.real.device)]
            self.memo[key] = None if bool(keys.all()) else keys
        return self.memo[key]

    @cached_property
    def ranges(self) -> tuple[list[int], list[int]] | None:
        """For each batch row the first key and one past the last, where the keys that take part are contiguous."""
        if self.keys is None or self.begins_in_hole:
            return None
        count = self.keys.sum(-1)
        order = torch.arange(1, self.m + 1, device=self.keys.device)
        stops = (self.keys * order).amax(-1)
        starts = torch.where(count > 0, self.keys.int().argmax(-1), 0)
        rows = torch.stack([starts, stops, count]).tolist()
        if any(stop - start != n for start, stop, n in zip(*rows)):
            return None
        return [int(x) for x in rows[0]], [int(x) for x in rows[1]]

    def table(self) -> Tensor:
        """The mask as transformers builds it, (b, 1, n, m), True = may attend."""
        if self.dense is not None:
            return self.dense
        assert self.build is not None
        return self.build()


def positions_in_documents(ids: Tensor, keys: Tensor | None) -> Tensor:
    """Positions of packed tokens, (b, m), counted from the first real token of each document."""
    begins = nn.functional.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True)
    if keys is not None:
        begins = begins | nn.functional.pad(keys[:, 1:] & ~keys[:, :-1], (1, 0))
    order = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    return order - torch.where(begins, order, 0).cummax(-1).values


def positions_in_rows(
    n: int, m: int, at: Any, origin: Any, padding: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Positions of queries and keys counted from the first real token of each row, by tensors alone, for a graph.

    at: the position of the first query, origin: that of the first key; padding: (b, all positions), 0 = not real.
    """
    i, j = (torch.arange(n, device=device) + at)[None], (torch.arange(m, device=device) + origin)[None]
    if padding is None:
        return i, j
    starts = starts_of_rows(padding.to(device))
    return i - starts, j - starts


def starts_of_rows(padding: Tensor) -> Tensor:
    """The position from which a user's pattern counts, (b, 1), by tensors alone.

    That is a row's first real token; where the row has holes, or no real token, its first key.
    """
    real = padding.long()
    order = torch.arange(1, real.shape[1] + 1, device=real.device)
    starts, stops = real.argmax(-1, keepdim=True), (real * order).amax(-1, keepdim=True)
    return torch.where(stops - starts == real.sum(-1, keepdim=True), starts, 0)


class LazyMask(Tensor):
    """What eager adds to the scores, of shape (b, 1, n, m), without its elements: the first operation builds them.

    It travels through model code as a mask of eager does: 0 where a query may attend, else the lowest number of its
    dtype. "regard" reads `.mask`; anything else computes with the exact table, as it would in eager.
    """

    mask: Mask
    # For a compiled step over a static cache: the table, and the positions of its query and keys, as graph inputs.
    for_graph: tuple[Tensor, Tensor, Tensor] | None = None

    @staticmethod
    def of(mask: Mask, device: torch.device, dtype: torch.dtype = torch.float32) -> "LazyMask":
        one = torch.zeros(1, 1, 1, 1, dtype=dtype, device=device)
        made = one.expand(mask.batch, 1, mask.n, mask.m).as_subclass(LazyMask)
        made.mask = mask
        return made

    def __repr__(self, *, tensor_contents=None):
        return f"LazyMask({self.mask.pattern!r}, {tuple(self.shape)})"

    def __deepcopy__(self, memo: dict) -> "LazyMask":
        return self

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in METADATA or (getattr(func, "__name__", "") == "__get__" and func not in COMPUTED):
            return super().__torch_function__(func, types, args, kwargs)
        first = args[0] if args else None
        if isinstance(first, LazyMask) and _unchanged(func, first, args[1:], kwargs):
            made = LazyMask.of(first.mask, first.device, first.dtype)
            made.for_graph = first.for_graph
            return made
        return func(*_built(args), **{name: _built(x) for name, x in kwargs.items()})


METADATA = {Tensor.dim, Tensor.size, Tensor.is_floating_point, Tensor.numel, Tensor.stride, Tensor.__len__}
METADATA |= {Tensor.is_complex, Tensor.__hash__, Tensor.is_contiguous, Tensor.element_size, Tensor.ndimension}
COMPUTED = {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "data")}


def _built(x: Any) -> Any:
    """The tables in place of masks, in nested arguments."""
    if isinstance(x, LazyMask):
        return added_to_scores(x.mask.table(), x.dtype)
    if type(x) in (tuple, list):
        return type(x)(_built(y) for y in x)
    return x


def added_to_scores(table: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool table as eager's mask: 0, or the lowest number of the dtype."""
    return torch.zeros(table.shape, dtype=dtype, device=table.device).masked_fill_(
        ~table, torch.finfo(dtype).min
    )


def _unchanged(func: Any, x: LazyMask, rest: tuple, kwargs: dict) -> bool:
    """Whether the result is the mask itself: copies to its own device and dtype, and slices of all its elements."""
    if func in (Tensor.detach, Tensor.contiguous, Tensor.clone) and not rest and not kwargs:
        return True
    if func is Tensor.to:
        return all(y is None or y is x.dtype or _same_device(y, x) for y in (*rest, *kwargs.values()))
    if func is Tensor.__getitem__ and not kwargs:
        places = rest[0] if isinstance(rest[0], tuple) else (rest[0],)
        return len(places) <= 4 and all(
            (p is Ellipsis and place == 0 and len(places) == 1)
            or (
                isinstance(p, slice)
                and p.step in (None, 1)
                and not p.start
                and (p.stop is None or p.stop >= size)
            )
            for place, (p, size) in enumerate(zip(places, x.shape))
        )
    return False


def _same_device(given: Any, x: Tensor) -> bool:
    return isinstance(given, str | torch.device) and torch.device(given) == x.device
