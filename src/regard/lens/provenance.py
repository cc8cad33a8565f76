"""Whether queries and keys come from one sequence (self-attention) or from two (cross-attention).

For each tensor we record its ancestors: the tensors from which it was computed token by token. The output of an
attention has none, since attention mixes tokens. So q and k share an ancestor if both are projections of one
sequence.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compat import aten_operator, aten_operators, storage_id
from ..nested import tensors_in
from .axes import PRODUCTS, Axes, Factor, Parts, followed, is_view

aten = torch.ops.aten
LINEAR = {
    aten.mm: 0,
    aten.addmm: 1,
    aten.linear: 0,
    aten.convolution: 0,
    aten_operator("_addmm_activation"): 1,
}
SOFTMAX = aten_operators("_softmax", "_safe_softmax")
ELEMENTWISE = ("mul", "div", "masked_fill", "nan_to_num")  # and in place
PRESERVES_WEIGHTS = aten_operators(
    "native_dropout", "_to_copy", "clone", "where", *ELEMENTWISE, *(f"{name}_" for name in ELEMENTWISE)
)
SUMS = aten_operators("add", "sub", "rsub", "add_", "sub_")  # a differential Transformer subtracts weights
COPIES = aten_operators("_to_copy", "clone")  # under autocast each projection reads a copy of its own
NEW_TENSORS = {aten.lift_fresh, aten.lift}  # torch.tensor(…): its storage may have belonged to another tensor
MAX_ANCESTORS = 6  # of one tensor; the newest ones decide
# Softmax results that were not yet multiplied with values: the last two are held, and older ones that fit into so
# many bytes together (a model may compute the weights of all its heads before it uses the first).
MAX_PENDING_BYTES = 64 << 20

Ancestors = frozenset[int]
Columns = tuple[int, int]  # the first one and their number; (-1, …) if a part does not consist of columns
NONE: Ancestors = frozenset()


class Weights(NamedTuple):
    """The result of a softmax. axis: over which it ran. axes: its factors. sources: those of its input, by number.

    pair: the ancestors of the two factors of q·k; None if its input is no product of two results. indexed: of axes
    that it does not have, the index at which its queries were selected. terms: the softmaxes that were added up,
    where it is a sum of several or of parts of one.
    """

    table: Tensor
    axis: int
    axes: list[Parts]
    sources: dict[int, Factor]
    pair: tuple[Ancestors, Ancestors] | None
    indexed: Parts
    terms: tuple[int, ...] = ()


class TensorOrigin(NamedTuple):
    """serial: this tensor's number. ancestors: their numbers. pair: the ancestors of the two factors of q·k."""

    serial: int
    ancestors: Ancestors = NONE
    pair: tuple[Ancestors, Ancestors] | None = None
    softmax: int | None = None  # the number of the softmax whose weights it contains


class Provenance:
    """The origins of the tensors computed so far, by their storage."""

    def __init__(self, weights: Sequence[Tensor] = ()) -> None:
        self.axes = Axes(weights)
        self._origins: dict[int, TensorOrigin] = {}
        self._softmaxes: dict[int, Weights] = {}  # not yet multiplied with values
        self._tables: dict[
            int, tuple[int, set[int]]
        ] = {}  # of each softmax: its size, the factors of its keys
        self._parts: dict[int, set[Columns]] = {}  # of each softmax: the parts of its result that were used
        self._taken_in_part: set[int] = set()
        self._count = 0
        self.softmaxes = 0  # of tensors with at least three axes
        self.unread = (
            0  # of these, those over the last axis, as attention modules usually have, that were not taken
        )

    def of(self, x: Tensor) -> TensorOrigin:
        if not followed(x):
            return TensorOrigin(self._next())
        storage = storage_id(x)
        if storage not in self._origins:
            self._origins[storage] = TensorOrigin(self._next())
        return self._origins[storage]

    def same_sequence(self, q: Tensor, k: Tensor) -> bool | None:
        """Whether q and k come from one sequence; None if the origin of one of them is unknown."""
        a, b = self.of(q).ancestors, self.of(k).ancestors
        return bool(a & b) if a and b else None

    def record(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Record the origin of the output of an operator."""
        self.axes.record(func, args, out)
        if is_view(func):
            return
        given = tensors_in(args)
        packet = getattr(func, "overloadpacket", None)
        for x in given:
            self.use(x)
        if packet in LINEAR:
            x = args[LINEAR[packet]]
            old = self.of(x)
            newest = sorted(old.ancestors, reverse=True)[:MAX_ANCESTORS]
            pair = self._pair(*(args[i] for i in PRODUCTS[packet])) if packet in PRODUCTS else None
            self._set(out, frozenset((old.serial, *newest)), pair)
        elif packet in PRODUCTS:
            self._set(out, pair=self._pair(*(args[i] for i in PRODUCTS[packet])))
        elif packet in NEW_TENSORS:
            self.start_anew(out)
        else:
            origins = [self.of(x) for x in given if followed(x) and x.numel()]
            pair = next((o.pair for o in origins if o.pair), None)
            newest = sorted(NONE.union(*(o.ancestors for o in origins)), reverse=True)[:MAX_ANCESTORS]
            serial = origins[0].serial if packet in COPIES and origins else None
            self._set(out, frozenset(newest), pair, self._softmax(packet, args, given, out, pair), serial)

    def _pair(self, left: Tensor, right: Tensor) -> tuple[Ancestors, Ancestors] | None:
        """The ancestors of the factors of a product of two results; None for a linear layer."""
        return (
            None if self.axes.is_linear(left, right) else (self.of(left).ancestors, self.of(right).ancestors)
        )

    def start_anew(self, out: Any) -> None:
        """The output of an attention has no ancestors: it mixes tokens."""
        self._set(out)
        for x in tensors_in(out):
            if followed(x):
                self.axes.set(x)

    def take_weights(self, x: Tensor, keys: int) -> tuple[Weights, Sequence[Parts]] | None:
        """The softmax that x is, or was computed from elementwise, and the factors of x; each is returned once.

        keys: the axis of x that a product sums over. It has to be the one over which the softmax ran, or a part of
        it: for a softmax with a sink, whose column multiplies no value, only the columns of the keys are returned.
        """
        number = self.of(x).softmax
        if number is None or number not in self._softmaxes:
            return None
        found, axes = self._softmaxes[number], self.axes.of(x)
        summed, here = ({f.axis for f in axes[keys]}, {f.axis for parts in axes for f in parts})
        if not found.axes[found.axis] and x.shape[keys] > 1:
            return None
        if any(f.axis not in summed for f in found.axes[found.axis] if f.size > 1):
            return None
        if any(f.axis not in here for parts in found.axes for f in parts if f.size > 1):  # some rows of it
            return None
        if number in self._parts:
            self._taken_in_part.add(number)
        for one in {number, *found.terms}:
            taken = self._softmaxes.pop(one, None)
            if taken is not None and not taken.terms:
                self.unread -= _is_usual(taken.table, taken.axis)
        return found, axes

    def take_one_key(self, x: Tensor, y: Tensor) -> tuple[Weights, Sequence[Parts]] | None:
        """The weights over a single key that an elementwise product multiplies with values, as einsum does."""
        found = self._softmaxes.get(self.of(x).softmax or 0)
        if found is None or found.pair is None or found.table.shape[found.axis] > 1 or 1 not in x.shape:
            return None
        larger = torch.broadcast_shapes(x.shape, y.shape).numel() > x.numel()
        return self.take_weights(x, tuple(x.shape).index(1)) if larger else None

    def use(self, x: Tensor) -> None:
        """Record that an operator other than a view uses x, which may be a part of a softmax's result."""
        if not followed(x) or not x.numel():
            return
        number = self.of(x).softmax
        if number is None or x.numel() >= self._tables[number][0]:
            return
        cut = [f for parts in self.axes.of(x) for f in parts if f.size < f.length]
        of_keys = len(cut) == 1 and cut[0].axis in self._tables[number][1]
        self._parts.setdefault(number, set()).add((cut[0].start, cut[0].size) if of_keys else (-1, x.numel()))

    @property
    def read_in_part(self) -> int:
        """How many softmaxes were returned without columns that are used elsewhere."""
        return sum(len(self._parts[number]) > 1 for number in self._taken_in_part)

    def _softmax(
        self,
        packet: Any,
        args: tuple[Any, ...],
        given: list[Tensor],
        out: Any,
        pair: tuple[Ancestors, Ancestors] | None,
    ) -> int | None:
        first = next(iter(tensors_in(out)), None)
        if first is None or not given:
            return None
        if packet in SOFTMAX and first.dim():
            axis = args[1] % first.dim()
            self.softmaxes += first.dim() > 2
            self.unread += _is_usual(first, axis)
            return self._hold(self._weights(first, axis, pair))
        if packet in SUMS and len(tables := [x for x in given if x.dim()]) > 1:
            return self._sum(tables, first)
        if packet not in PRESERVES_WEIGHTS and packet not in SUMS:
            return None
        for x in given:
            known = self.of(x).softmax
            if known is not None and x.numel() == first.numel():
                if storage_id(x) != storage_id(first):  # its axes, not those of what it is multiplied with
                    self.axes.set(first, [*[()] * (first.dim() - x.dim()), *self.axes.of(x)])
                return known
        return None

    def _hold(self, found: Weights) -> int:
        """The number under which these weights are held until they multiply values."""
        self._softmaxes[number := self._next()] = found
        self._tables[number] = found.table.numel(), {f.axis for f in found.axes[found.axis]}
        held = sum(x.table.nbytes for x in self._softmaxes.values())
        for old in list(self._softmaxes)[:-2]:
            if held > MAX_PENDING_BYTES:
                held -= self._softmaxes.pop(old).table.nbytes
        return number

    def _sum(self, tables: list[Tensor], out: Tensor) -> int | None:
        """Weights that are the sum of others, such as softmax(…) − λ softmax(…); None if a term is no weights."""
        numbers = [self.of(x).softmax or 0 for x in tables]
        if {x.shape for x in tables} != {out.shape} or not all(n in self._softmaxes for n in numbers):
            return None
        first, parts = self._softmaxes[numbers[0]], self.axes.of(tables[0])
        keys = {f.axis for f in first.axes[first.axis]}
        axis = next((i for i, own in enumerate(parts) if keys & {f.axis for f in own}), None)
        if axis is None:
            return None
        self.axes.set(out, parts)
        found = self._weights(out, axis, first.pair)
        sources = {
            new: first.sources[f.axis].part(f.start, f.step, f.size) if f.axis in first.sources else f
            for new, f in found.sources.items()
        }
        terms = [term for n in numbers for term in self._softmaxes[n].terms or (n,)]
        return self._hold(found._replace(sources=sources, indexed=first.indexed, terms=tuple(terms)))

    def _weights(self, table: Tensor, axis: int, pair: tuple[Ancestors, Ancestors] | None) -> Weights:
        """Describe the result of a softmax by factors of its own, so that they are found again where it is used."""
        sources: dict[int, Factor] = {}
        axes: list[Parts] = []
        for parts in self.axes.of(table):
            own = tuple(Factor.whole(f.size, f.kind) for f in parts)
            sources.update(zip((f.axis for f in own), parts, strict=True))
            axes.append(own)
        indexed = self.axes.selected(table)
        self.axes.set(table, axes)
        return Weights(table, axis, axes, sources, pair, indexed)

    def _set(
        self,
        out: Any,
        ancestors: Ancestors = NONE,
        pair: tuple[Ancestors, Ancestors] | None = None,
        softmax: int | None = None,
        serial: int | None = None,
    ) -> None:
        """serial: of the tensor that `out` is a copy of; None for a new one."""
        for x in tensors_in(out):
            if followed(x):
                number = self._next() if serial is None else serial
                self._origins[storage_id(x)] = TensorOrigin(number, ancestors, pair, softmax)

    def _next(self) -> int:
        self._count += 1
        return self._count


def _is_usual(table: Tensor, axis: int) -> bool:
    """Whether this is a softmax over the last axis of a table, as attention modules usually have."""
    return table.dim() > 2 and axis == table.dim() - 1 and table.numel() > 0
