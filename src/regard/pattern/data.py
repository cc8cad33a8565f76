"""Patterns that tensors or a function decide. Compared by identity; refused in specs and JSON."""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from types import FunctionType, NoneType
from typing import Any, TypeVar, dataclass_transform

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from .. import compat
from ..errors import ShapeError, SpecError
from .algebra import Pattern, RowMask, register
from .classification import BlockGrid, Classes
from .preorder import numbered
from .words import sinks

T = TypeVar("T")


@dataclass_transform(eq_default=False, frozen_default=True)
class Data(Pattern):
    """A word with data states `allows`, `row_mask` and, where it can do better than enumerate, `classify`.

    A subclass becomes a frozen dataclass.
    """

    has_data = True
    reads_query = True
    reads_key = True
    shift_period = 0
    refuses_json = "carries data, so it has no JSON; pass it to the call (rg.attention, the module) instead"

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, eq=False, repr=False)(cls)
        register(cls)

    def terms(self):
        raise ShapeError(f"{self!r} carries data: there is no formula for it")

    def classify(self, grid: BlockGrid) -> Classes:
        """Which blocks of the grid it allows as a whole, and which not at all; "neither" is always a safe answer."""
        return grid.enumerate(self.allows)


class lengths(Data):
    """j < l: hides the keys beyond the length of each batch row, but no queries. l is (b,)."""

    l: Int[Tensor, " b"]

    reads_query = False

    def __post_init__(self):
        require_whole("lengths", "l", self.l)
        if self.l.dim() != 1:
            raise ShapeError(
                f"lengths: l has shape {tuple(self.l.shape)}; one length per batch row is needed, (b,)"
            )

    @property
    def device(self):
        return self.l.device

    @property
    def varies(self):
        return self.l.shape[0], 1

    @property
    def by_row(self):
        return tuple(sinks(max(end, 0)) for end in self.l.tolist())

    def allows(self, i, j):
        if isinstance(j, int):
            return bool((j < self.l).all())
        return (j < self.l[:, None, None, None]) & (i == i)

    def row_mask(self, inside):
        l = without_gaps(self.l)
        return (lambda b, i, j: j < l[0]) if len(l) == 1 else (lambda b, i, j: j < l[b])

    def classify(self, grid):
        return grid.keys_below(self.l)

    def __repr__(self):
        return f"lengths(<{len(self.l)} lengths>)"


class tree(Data):
    """j is i or an ancestor of i: sequences that share prefixes, packed as a tree. parents is (m,) or (b, m): the
    position of each position's parent, which comes before it; −1 for a root.

    >>> print(tree(torch.tensor([-1, 0, 1, 0, 3])).draw(5))
    ■ · · · ·
    ■ ■ · · ·
    ■ ■ ■ · ·
    ■ · · ■ ·
    ■ · · ■ ■
    """

    parents: Int[Tensor, "*b m"]

    def __post_init__(self):
        require_whole("tree", "parents", self.parents)
        require_rows("tree", "parents", self.parents)
        _ = self.preorder  # raises an error if the parents are not a tree

    @property
    def preorder(self) -> tuple[Int[Tensor, "*b m"], Int[Tensor, "*b m"]]:
        """first and end: the descendants of a node, itself included, are those numbered first … end − 1."""
        return kept(self, self.parents, numbered)

    @property
    def device(self):
        return self.parents.device

    @property
    def varies(self):
        return prod(self.parents.shape[:-1]), 1

    def allows(self, i, j):
        (first, end), last = self.preorder, self.parents.shape[-1] - 1
        if isinstance(i, int):
            inside = 0 <= i <= last and 0 <= j <= last
            return inside and bool(_below(first[..., i], first[..., j], end[..., j]).all())
        inside = (i >= 0) & (i <= last)  # a query beyond the tree has no allowed key
        if last < 0:
            return inside & (j == j)
        i = i.clamp(0, last)
        if first.dim() == 1:
            return _below(first[i], first[j], end[j]) & inside
        b = torch.arange(first.shape[0], device=first.device)[:, None, None, None]
        return _below(first[b, i], first[b, j], end[b, j]) & inside

    def row_mask(self, inside):
        (first, end), last = self.preorder, self.parents.shape[-1] - 1
        if self.varies[0] == 1:
            first, end = first.reshape(1, -1), end.reshape(1, -1)
            return lambda b, i, j: (
                _below(first[0, i.clamp(0, last)], first[0, j], end[0, j]) & (i >= 0) & (i <= last)
            )
        return lambda b, i, j: (
            _below(first[b, i.clamp(0, last)], first[b, j], end[b, j]) & (i >= 0) & (i <= last)
        )

    def classify(self, grid):
        """By the smallest and the largest number in preorder of each block."""
        first, end = (x.reshape(-1, x.shape[-1]) for x in self.preorder)
        last = first.shape[-1] - 1
        i = grid.positions.clamp(0, last).expand(max(len(first), len(grid.positions)), -1)
        node = first.expand(len(i), -1).gather(1, i)
        inside = grid.of_queries((grid.positions >= 0) & (grid.positions <= last))
        within = grid.within(node, first, end)
        return Classes(within.all & inside.all, within.none | inside.none)

    def fits(self, m: int, last: int = -1) -> None:
        if self.parents.shape[-1] != m:
            raise ShapeError(f"{self!r} over {m} keys: one parent per key is needed, ({m},) or (b, {m})")

    def __repr__(self):
        return f"tree(<{'×'.join(map(str, self.parents.shape))} parents>)"


def require_whole(word: str, name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise ShapeError(
            f"{word}: {name} is of type {type(x).__name__}, not a tensor; use torch.as_tensor({name})"
        )
    if word != "lengths" and not torch.compiler.is_compiling() and compat.is_mapped(x):
        raise ShapeError(
            f"{word}: torch.vmap maps over its {name}, which must be read; give those of all rows to one call, with "
            "an axis for the batch"
        )
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise ShapeError(f"{word}: {name} of {x.dtype}; whole numbers are needed, such as {name}.long()")


def require_rows(word: str, name: str, x: Tensor) -> None:
    if x.dim() not in (1, 2):
        raise ShapeError(f"{word}: {name} of shape {tuple(x.shape)}; (m,) or (b, m) is needed")


def without_gaps(x: Tensor) -> Tensor:
    """x, or a copy in which its last axis has the stride 1: FlexAttention does not compile others on the CPU."""
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def composed_row_mask(pattern: Pattern, inside: bool) -> RowMask:
    """The `row_mask` of all words of a pattern, combined."""
    return pattern.fold(lambda word: word.row_mask(inside), _and, _or, _not)


def _and(left: RowMask, right: RowMask) -> RowMask:
    return lambda b, i, j: left(b, i, j) & right(b, i, j)


def _or(left: RowMask, right: RowMask) -> RowMask:
    return lambda b, i, j: left(b, i, j) | right(b, i, j)


def _not(inner: RowMask) -> RowMask:
    return lambda b, i, j: ~inner(b, i, j)


def kept(word: Data, data: Tensor, compute: Callable[[Tensor], T]) -> T:
    """compute(data), kept until the data are changed in place; computed anew where changes are not counted."""
    found = getattr(word, "_kept", None)
    if (
        torch.compiler.is_compiling()
    ):  # it reads no data, so what was kept before it began is not computed again
        return compute(data) if found is None else found[1]
    if data.is_meta:
        raise ShapeError(f"{type(word).__name__}: its numbers must be read, and a tensor on meta has none")
    written = compat.version(data)
    if found is None or written is None or found[0] != written:
        found = written, compute(data)
        if not (compat.transforms_active() or compat.dispatch_modes()):  # whose tensors end with them
            object.__setattr__(word, "_kept", found)
    return found[1]


def _below(node: Any, first: Any, end: Any) -> Any:
    return (node >= first) & (node < end)


def chains(parents: list[int], queries: range, most: int) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Runs of positions, each the parent of the next, where queries are among them: the first, the first past them,
    and what they attend to besides themselves, as runs of keys. Of these, `most` + 1 are listed at most."""
    first = [i for i, parent in enumerate(parents) if i == 0 or parent != i - 1]
    for chain, end in zip(first, [*first[1:], len(parents)]):
        if end <= queries.start or chain >= queries.stop:
            continue
        above: list[tuple[int, int]] = []
        key = chain
        while (parent := parents[key]) >= 0 and len(above) <= most:
            key = first[bisect_right(first, parent) - 1]
            above.append((key, parent + 1))
        yield chain, end, above


class selected(Data):
    """Each block of `size` queries attends to the listed blocks of `size` keys: block r of the queries to key blocks
    indices[…, r, :], where −1 lists none. indices is (blocks, k), (b, blocks, k) or (b, h, blocks, k).

    >>> print(selected(torch.tensor([[0, -1], [0, 2], [2, 1]]), size=2).draw(6))
    ■ ■ · · · ·
    ■ ■ · · · ·
    ■ ■ · · ■ ■
    ■ ■ · · ■ ■
    · · ■ ■ ■ ■
    · · ■ ■ ■ ■
    """

    indices: Int[Tensor, "*bh blocks k"]
    size: int

    def __post_init__(self):
        if type(self.size) is not int or self.size < 1:
            raise ShapeError(f"selected(size={self.size!r}): a whole number >= 1 is needed")
        require_whole("selected", "indices", self.indices)
        if not 2 <= self.indices.dim() <= 4:
            raise ShapeError(
                f"selected: indices of shape {tuple(self.indices.shape)}; (blocks, k), (b, blocks, k) or "
                "(b, h, blocks, k) is needed"
            )
        if not torch.compiler.is_compiling():  # the graph's scatter refuses a block that there is not
            _ = self.listed  # raises an error if a number is none of a block

    @property
    def listed(self) -> Bool[Tensor, "*bh rows columns"]:
        """Whether each block of queries lists each block of keys; the last row and column stand for all others."""
        return kept(self, self.indices, _listed)

    @property
    def device(self):
        return self.indices.device

    @property
    def varies(self):
        b, h, *_ = *self.indices.shape[:-2], 1, 1
        return b, h

    def allows(self, i, j):
        listed = self.listed
        if isinstance(i, int):
            r, c = _entry(listed, *(torch.tensor(x // self.size, device=listed.device) for x in (i, j)))
            return bool(listed[..., r, c].all())
        r, c = _entry(listed, i // self.size, j // self.size)
        if listed.dim() == 2:
            return listed[r, c]
        b = torch.arange(listed.shape[0], device=listed.device)[:, None, None, None]
        if listed.dim() == 3:
            return listed[b, r, c]
        h = torch.arange(listed.shape[1], device=listed.device)[:, None, None]
        return listed[b, h, r, c]

    def row_mask(self, inside):
        listed, size = self._of_all_heads(), self.size

        def allows(b, i, j):
            r, c = _entry(listed, i // size, j // size)
            return listed[0, r, c] if len(listed) == 1 else listed[b, r, c]

        return allows

    def _of_all_heads(self) -> Bool[Tensor, "#b rows columns"]:
        if self.varies[1] > 1:
            raise ShapeError(f"{self!r} differs by head, which one mask for all heads cannot express")
        return self.listed.reshape(-1, *self.listed.shape[-2:])

    def classify(self, grid):
        """By the columns that are listed for some and for all blocks of queries that meet a block of the grid."""
        if torch.compiler.is_compiling():  # which does not read positions
            return super().classify(grid)
        listed, size, i, j = self._of_all_heads(), self.size, grid.queries, grid.keys
        *_, rows, columns = (x - 1 for x in listed.shape)
        edges = torch.stack([j.first // size, j.last // size + 1])
        lows, highs = ((x // size).flatten().tolist() for x in (i.first.amin(0), i.last.amax(0)))
        every = listed.new_zeros(len(listed), len(lows), edges.shape[1])
        none = torch.zeros_like(every)
        for x, (low, high) in enumerate(zip(lows, highs)):
            meets = listed[:, max(low, 0) : max(high + 1, 0), :columns]
            by_some, by_all = (
                F.pad(marked.int().cumsum(-1), (1, 0))[:, edges.clamp(max=columns)].diff(dim=1)[:, 0]
                for marked in (meets.any(1), meets.all(1))
            )
            none[:, x] = by_some == 0
            every[:, x] = (by_all == edges[1] - edges[0]) & (low >= 0 and high < rows)
        return Classes(every, none)

    def fits(self, m: int, last: int = -1) -> None:
        (*_, rows, _), blocks = self.indices.shape, -(-m // self.size)
        if torch.compiler.is_compiling() and getattr(self, "_kept", None) is None:
            # Declared within the graph, where the largest number listed is not known: as many columns as blocks.
            object.__setattr__(self, "_kept", (None, _table(self.indices, blocks)))
        largest = self.listed.shape[-1] - 2
        if last >= rows * self.size:
            raise ShapeError(
                f"{self!r} up to query {last}: it lists {rows} blocks of {self.size} queries, and "
                f"{last // self.size + 1} are needed"
            )
        if largest >= blocks:
            raise ShapeError(
                f"{self!r} over {m} keys: block {largest} is listed, and there are {blocks} blocks of {self.size}"
            )

    def __repr__(self):
        return f"selected(<{'×'.join(map(str, self.indices.shape))} indices>, size={self.size})"


def _listed(indices: Int[Tensor, "*bh blocks k"]) -> Bool[Tensor, "*bh rows columns"]:
    smallest, largest = (int(x) for x in indices.aminmax()) if indices.numel() else (-1, -1)
    if smallest < -1:
        raise ShapeError(f"selected: there is no block {smallest}; −1 lists none")
    return _table(indices, largest + 1)


def _table(indices: Int[Tensor, "*bh blocks k"], columns: int) -> Bool[Tensor, "*bh rows columns"]:
    *batch, blocks, _ = indices.shape
    listed = indices.long() + (
        indices >= columns
    )  # the last column is for −1: what is not below it is out of range
    table = torch.zeros(*batch, blocks + 1, columns + 1, dtype=torch.bool, device=indices.device)
    table[..., :-1, :].scatter_(-1, torch.where(listed == -1, columns, listed), True)
    table[..., -1] = False
    return table


def _entry(listed: Tensor, r: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The row and the column of a block of queries and a block of keys; the last for one that is not listed."""
    rows, columns = listed.shape[-2] - 1, listed.shape[-1] - 1
    return torch.where((r >= 0) & (r < rows), r, rows), c.clamp(max=columns)


class where(Data):
    """fn(i, j): any function of two broadcasting integer tensors that is made of tensor operations."""

    fn: Callable[[Any, Any], Any]

    def __post_init__(self):
        if not callable(self.fn):
            raise SpecError(f"{self!r}: a function of i and j is needed")

    def allows(self, i, j):
        try:
            pairs = self.fn(i, j)
        except RuntimeError as e:
            if "device" in str(e) and isinstance(i, Tensor):
                raise self._other_device(i) from e
            if "ambiguous" not in str(e):
                raise
            raise SpecError(
                f"{self!r}: i and j are tensors; combine conditions with & and |, and choose with torch.where"
            ) from e
        if isinstance(pairs, Tensor) and pairs.is_meta and isinstance(i, Tensor) and not i.is_meta:
            raise self._other_device(i)
        kind = pairs.dtype if isinstance(pairs, Tensor) else type(pairs)
        if kind in (int, float, NoneType) or (isinstance(kind, torch.dtype) and kind != torch.bool):
            name = "None" if pairs is None else kind.__name__ if isinstance(kind, type) else kind
            raise SpecError(f"{self!r}: it returned {name}, and a condition is needed, true or false")
        if isinstance(pairs, Tensor) and isinstance(i, Tensor) and not torch.compiler.is_compiling():
            self._check_shape(pairs, i, j)
        return pairs

    def _check_shape(self, pairs: Tensor, i: Tensor, j: Tensor) -> None:
        each = torch.broadcast_shapes(i.shape, j.shape)
        sizes = list(zip(reversed(pairs.shape), reversed(each)))
        if any(size not in (1, whole) for size, whole in sizes):
            raise ShapeError(
                f"{self!r}: it returned shape {tuple(pairs.shape)}, which does not broadcast to that of its "
                f"arguments, {tuple(each)}; compute it from i and j"
            )

    def _other_device(self, i: Tensor) -> ShapeError:
        return ShapeError(
            f"{self!r}: i and j are on {i.device}, and the function reads a tensor on another device; move it there"
        )

    def values(self):
        """The code of the function, and what its names are now."""
        if not isinstance(self.fn, FunctionType):
            return None
        code, names = self.fn.__code__, self.fn.__globals__
        found = [code, *(cell.cell_contents for cell in self.fn.__closure__ or ())]
        found += [names[name] for name in code.co_names if name in names]
        found += [*(self.fn.__defaults__ or ()), *(self.fn.__kwdefaults__ or {}).values()]
        return [type(self), len(found), *found]

    def row_mask(self, inside):
        fn = self.fn
        return lambda b, i, j: fn(i, j)

    def __repr__(self):
        return f"where({getattr(self.fn, '__name__', self.fn)})"
