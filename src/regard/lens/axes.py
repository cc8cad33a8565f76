"""What each axis of a tensor means, by the operators that computed it and not by its size.

An operator's result is described by the order of its numbers in memory: for each stride, a factor. A view of it is
read by its strides, so that two axes of equal size are not confused, and an axis that combines two (batch · heads)
is divided again. Factors that come from a weight (the features of a linear layer) are told apart from those of the
data (batch rows and positions): heads are a part of the features.
"""

from collections.abc import Sequence
from functools import cache
from itertools import count, pairwise
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..compat import aten_operator, aten_operators, storage_id
from ..nested import tensors_in

aten = torch.ops.aten
# data: an axis of an input. row: one over which a linear layer is applied, such as positions and batch rows.
# feature: of the output of a linear layer or a convolution. weight: of a parameter or a buffer. new: of a result
# whose axes are not followed.
Kind = Literal["data", "row", "feature", "weight", "new"]
PRODUCTS = {aten.mm: (0, 1), aten.addmm: (1, 2), aten.bmm: (0, 1), aten.baddbmm: (1, 2)}
LEARNED = ("feature", "weight")
SAME_AXES = aten_operators(
    "native_layer_norm", "native_group_norm", "native_batch_norm", "_fused_rms_norm", "native_dropout", "clone",
    "_to_copy", "_softmax", "_safe_softmax", "_log_softmax", "cumsum", "bernoulli",
)  # fmt: skip
RESHAPED_COPY = aten_operator("_unsafe_view")  # it shares the storage of a copy
CONVOLUTIONS = aten_operators("convolution", "_convolution", "mkldnn_convolution")
OWN_RULE: dict[Any, str] = {aten.embedding: "embedding", aten.cat: "cat", aten.stack: "stack"}
SELECTIONS = aten_operators("index", "index_select", "gather")
_NUMBERS = count(1)


class Factor(NamedTuple):
    """A part of an axis: its indices start, start + step, …; `length` is that of the whole axis."""

    axis: int
    size: int
    start: int
    step: int
    length: int
    kind: Kind

    @classmethod
    def whole(cls, size: int, kind: Kind = "new") -> "Factor":
        return cls(next(_NUMBERS), size, 0, 1, size, kind)

    @property
    def learned(self) -> bool:
        return self.kind in LEARNED

    def part(self, start: int, step: int, size: int) -> "Factor":
        return self._replace(size=size, start=self.start + start * self.step, step=self.step * step)


# The factors of one axis, outermost first; an axis of size 1 has none, or one index of a larger axis.
Parts = tuple[Factor, ...]
Geometry = tuple[torch.Size, tuple[int, ...], int, int]  # sizes, strides, offset, bytes per element of a view


class Reading(NamedTuple):
    """The factors of each axis of a view; the index that it has of each axis that is not one of its own."""

    axes: tuple[Parts, ...]
    selected: Parts


class Stored:
    """The factors of a storage by their strides in bytes, largest first.

    leaf: no operator computed it. indexed: the index that was selected of each other axis, as in x[:, 0] or x[:, :1].
    learned: computed from weights alone.
    """

    __slots__ = ("_readings", "factors", "indexed", "leaf", "learned", "offset")

    def __init__(
        self,
        offset: int,
        factors: tuple[tuple[int, Factor], ...],
        leaf: bool = False,
        indexed: Parts = (),
        learned: bool = False,
    ):
        self.offset, self.factors = offset, factors
        self.leaf, self.indexed, self.learned = leaf, indexed, learned
        self._readings: dict[Geometry, Reading | None] = {}  # most views are used by several operators

    @classmethod
    def of(
        cls, x: Tensor, axes: Sequence[Parts], leaf: bool = False, indexed: Parts = (), learned: bool = False
    ) -> "Stored":
        geometry = sizes, strides, offset, unit = _geometry(x)
        found: list[tuple[int, Factor]] = []
        whole: list[Parts] = []
        for size, stride, parts in zip(sizes, strides, axes, strict=True):
            inner = stride * unit
            parts = parts if prod([f.size for f in parts]) == size else _new(size)
            for factor in reversed(parts):
                if factor.size > 1:
                    found.append((inner, factor))
                else:
                    indexed = (*indexed, factor)
                inner *= factor.size
            whole.append(parts if size > 1 else ())
        if x.is_complex():
            found.append((unit // 2, Factor.whole(2)))  # for torch.view_as_real
        found.sort(key=_by_stride)
        stored = cls(offset * unit, tuple(found), leaf, indexed, learned)
        if 0 not in strides and not x.is_complex() and all(f.size > 1 for parts in whole for f in parts):
            stored._readings[geometry] = Reading(tuple(whole), indexed)
        return stored

    def read(self, x: Tensor) -> Reading | None:
        """None if x is no view by these strides."""
        geometry = _geometry(x)
        if geometry not in self._readings:
            self._readings[geometry] = self._reading(*geometry)
        return self._readings[geometry]

    def overwritten(self) -> "Stored":
        """After an operator has written into it: a buffer may hold keys now."""
        if not self.leaf:
            return self
        return Stored(self.offset, tuple((stride, f._replace(kind="data")) for stride, f in self.factors))

    def _reading(self, sizes: torch.Size, strides: tuple[int, ...], offset: int, unit: int) -> Reading | None:
        starts, rest = [], offset * unit - self.offset
        for stride, factor in self.factors:
            start, rest = divmod(rest, stride) if stride else (0, rest)
            if not 0 <= start < factor.size:
                return None
            starts.append(start)
        if rest:
            return None
        found: list[list[tuple[int, int, int]]] = []  # (number of the factor, step, size)
        for size, stride in zip(sizes, strides, strict=True):
            parts = self._axis(size, stride * unit, starts)
            if parts is None:
                return None
            found.append(parts)
        used = {at for parts in found for at, _, _ in parts}
        for axis, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
            if size > 1:
                continue
            free = (
                i for i, (inner, _) in enumerate(self.factors) if inner == stride * unit and i not in used
            )
            if (at := next(free, None)) is not None:  # one index of an axis: x[:, 3:4]
                found[axis] = [(at, 1, 1)]
                used.add(at)
        others = (f.part(starts[i], 1, 1) for i, (_, f) in enumerate(self.factors) if i not in used)
        return Reading(self._with_starts(found, starts), (*self.indexed, *others))

    def _axis(self, size: int, stride: int, starts: list[int]) -> list[tuple[int, int, int]] | None:
        """One axis, outermost factor first."""
        if size == 1:
            return []
        if stride == 0:
            return [(-1, 1, size)]
        at = next((i for i, (inner, f) in enumerate(self.factors) if inner <= stride), None)
        found: list[tuple[int, int, int]] = []
        while size > 1:
            if at is None:
                return None
            inner, factor = self.factors[at]
            step, rest = divmod(stride, inner) if inner else (0, 1)
            if rest or step == 0:
                return None
            if starts[at] + (size - 1) * step < factor.size:
                return [(at, step, size), *found]
            own, rest = divmod(factor.size, step)
            if rest or size % own or at == 0 or self.factors[at - 1][0] != inner * factor.size:
                return None
            found.insert(0, (at, step, own))
            size, stride, at = size // own, inner * factor.size, at - 1
        return found

    def _with_starts(self, axes: list[list[tuple[int, int, int]]], starts: list[int]) -> tuple[Parts, ...]:
        """Of several axes in one factor, the one with the smallest step has the start."""
        steps: dict[int, int] = {}
        for at, step, _ in (part for parts in axes for part in parts):
            steps[at] = min(step, steps.get(at, step))
        return tuple(
            tuple(
                Factor.whole(size)
                if at < 0
                else self.factors[at][1].part(starts[at] if step == steps[at] else 0, step, size)
                for at, step, size in parts
            )
            for parts in axes
        )


class Axes:
    """The factors of the tensors computed so far, by their storage. weights: of the model."""

    def __init__(self, weights: Sequence[Tensor] = ()):
        self._stored: dict[int, Stored] = {}
        self._weights = {storage_id(x) for x in weights if followed(x)}
        self._pooled: dict[int, set[int]] = {}  # axis → those from which its entries were pooled or selected
        self._mixed: set[int] = set()  # axes whose entries are mixtures of positions

    def of(self, x: Tensor) -> tuple[Parts, ...]:
        """The factors of each axis of a tensor."""
        return self._read(x).axes

    def selected(self, x: Tensor) -> Parts:
        """Of axes that x does not have, the index at which it, or what it was computed from, was selected."""
        return self._read(x).selected

    def record(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Record the axes of the results of an operator."""
        if is_view(func):
            if isinstance(args[0], Tensor) and followed(args[0]):
                self._storage(args[0])  # a leaf is described before it is seen through its views
            return
        given = [x for x in tensors_in(args) if followed(x)]
        storages = {storage_id(x) for x in given}
        for x in tensors_in(out):
            if not followed(x):
                continue
            storage = storage_id(x)
            if storage in storages and storage in self._stored:  # in place
                self._stored[storage] = self._stored[storage].overwritten()
            else:
                axes = self._result(func, args, given, x)
                learned = bool(given) and all(self._learned(y) for y in given)
                indexed = self._indexed(func, args, given)
                if _is_pooled(func, given, x):
                    indexed = (*indexed, Factor(next(_NUMBERS), 1, 0, 1, 1, "new"))
                    self._pool(given[0], [*(f for parts in axes for f in parts), *indexed])
                self._stored[storage] = Stored.of(x, axes, indexed=indexed, learned=learned)

    def _read(self, x: Tensor) -> Reading:
        if not followed(x) or not x.numel():
            return Reading(_unknown(x), ())
        storage = storage_id(x)
        known = self._stored.get(storage)
        found = None if known is None else known.read(x)
        if found is None and (known is None or known.leaf):
            kind: Kind = "weight" if self._is_weight(x) else "data"
            leaf = tuple((Factor.whole(size, kind),) if size > 1 else () for size in x.shape)
            if known is None and 0 not in x.stride():
                self._stored[storage] = Stored.of(x, leaf, leaf=True, learned=kind == "weight")
            return Reading(leaf, ())
        return found or Reading(_unknown(x), ())

    def _indexed(self, func: Any, args: tuple[Any, ...], given: list[Tensor]) -> Parts:
        if (rule := _rule(func)) != "product":
            return self.selected(max(given, key=Tensor.numel)) if rule == "same axes" and given else ()
        left, right = (self.selected(args[i]) for i in PRODUCTS[func.overloadpacket])
        both = {f.axis for f in left} & {
            f.axis for f in right
        }  # a batch row; a position is one of q or k alone
        return tuple(f for f in (*left, *right) if f.axis not in both)

    def _pool(self, x: Tensor, pooled: Sequence[Factor]) -> None:
        """Record that these axes have pooled or selected entries of those of x."""
        own = {f.axis for parts in self.of(x) for f in parts} | {f.axis for f in self.selected(x)}
        own = own.union(*(self._pooled[axis] for axis in own if axis in self._pooled))
        self._pooled |= {f.axis: own for f in pooled}

    def _mix(self, x: Tensor, at: int, mixed: Parts) -> Parts:
        """The axis that a product of x with a weight makes of its axis `at`: of positions it makes mixtures."""
        summed = self.of(x)[at]
        if not summed or any(f.kind != "row" for f in summed):
            return mixed
        self._pool(x, mixed)
        self._mixed |= {f.axis for f in mixed}
        return tuple(f._replace(kind="row") for f in mixed)

    def differ(self, queries: Parts, keys: Parts) -> bool:
        """Whether the queries are not consecutive positions of the keys' sequence, nor the other way around.

        Some are pooled, mixed (or every second one is taken) and others not, or not in the same way.
        """
        if len(queries) != 1 or len(keys) != 1:
            return False
        q, k = queries[0], keys[0]
        if q.size == k.size and q.axis not in self._mixed and k.axis not in self._mixed:
            return False
        if q.axis == k.axis:
            return q.size > 1 and q.step != k.step
        of_q, of_k = (self._pooled.get(f.axis, set()) for f in (q, k))
        return k.axis in of_q or q.axis in of_k or not of_q.isdisjoint(of_k)

    def set(self, x: Tensor, axes: Sequence[Parts] | None = None, indexed: Parts = ()) -> None:
        """Describe a tensor; axes: None for unknown ones."""
        axes = _unknown(x) if axes is None else axes
        self._stored[storage_id(x)] = Stored.of(x, axes, indexed=indexed)

    def constant(self, x: Tensor) -> bool:
        """Whether x is a parameter or a buffer, or computed from them alone, without a product."""
        parts = [f for parts in self.of(x) for f in parts]
        return bool(parts) and all(f.kind == "weight" for f in parts)

    def is_leaf(self, x: Tensor) -> bool:
        known = self._storage(x)
        return known is None or known.leaf

    def _learned(self, x: Tensor) -> bool:
        known = self._storage(x)
        return known is not None and known.learned

    def _storage(self, x: Tensor) -> Stored | None:
        """What is known about the storage of x, which is a leaf where it is seen for the first time."""
        storage = storage_id(x)
        if storage not in self._stored:
            self._read(x)
        return self._stored.get(storage)

    def _is_weight(self, x: Tensor) -> bool:
        return isinstance(x, nn.Parameter) or storage_id(x) in self._weights

    def _result(self, func: Any, args: tuple[Any, ...], given: list[Tensor], out: Tensor) -> Sequence[Parts]:
        match _rule(func):
            case "product":
                return self._product(*(args[i] for i in PRODUCTS[func.overloadpacket]))
            case "same axes":
                return self._aligned(given, out)
            case "convolution":
                channels = (Factor.whole(out.shape[1], "feature"),)
                rows = ((Factor.whole(size, "row"),) for size in out.shape[2:])
                return [self.of(args[0])[0], channels, *rows]
            case "embedding":
                return [*self.of(args[1]), (Factor.whole(out.shape[-1], "feature"),)]
            case "cat":
                return self._joined(given, out, args[1] if len(args) > 1 else 0)
            case "stack":
                at = args[1] % out.dim() if len(args) > 1 else 0
                axes = self.of(given[0])
                return [*axes[:at], _new(len(given)), *axes[at:]]
        return _unknown(out)

    def _product(self, left: Tensor, right: Tensor) -> list[Parts]:
        """A product with a weight is a linear layer: its columns are features, its rows positions.

        Along the positions, as in Linformer, it mixes them, and the result has as many mixtures.
        """
        a, b = self.of(left), self.of(right)
        rows, columns = a[-2], b[-1]
        batch = (
            [next((p for p in (a[0], b[0]) if any(f.learned for f in p)), a[0])] if left.dim() == 3 else []
        )
        if self.is_linear(left, right):
            if self.constant(left) and not self.constant(right):
                columns = _rows(columns)
            else:
                rows, columns = _rows(rows), tuple(f._replace(kind="feature") for f in columns)
        if self.constant(left) and not self.constant(right):
            rows = self._mix(right, -2, rows)
        elif self.constant(right) and not self.constant(left):
            columns = self._mix(left, -1, columns)
        return [*batch, rows, columns]

    def is_linear(self, left: Tensor, right: Tensor) -> bool:
        """Whether a product multiplies data with a weight, without a batch of weights."""
        if left.dim() == 3 and len(left) > 1:
            return False
        # a function multiplies with a tensor that it has, or a layer with a sum of weights
        plain = left.dim() == 2 and (self.is_leaf(right) or self._learned(right))
        return plain or self.constant(left) or self.constant(right)

    def _joined(self, given: list[Tensor], out: Tensor, at: int) -> Sequence[Parts]:
        given = [x for x in given if x.dim() == out.dim() and x.shape[at]]
        if not given:
            return _unknown(out)
        axes = list(self.of(given[0]))
        every = [self.of(x)[at] for x in given]
        kinds = {f.kind for parts in every for f in parts}
        kind: Kind = next((k for k in ("row", "data") if k in kinds), "new")
        kind = "feature" if kinds == {"feature"} else kind
        if len({x.shape for x in given}) == 1 and self._are_chunks(given):  # the heads, one after another
            axes[at] = (Factor.whole(len(given), "feature"), *axes[at])
        else:
            axes[at] = (Factor.whole(sum(x.shape[at] for x in given), kind),)
        return axes

    def _are_chunks(self, given: list[Tensor]) -> bool:
        """Whether the tensors are consecutive chunks of the features of one tensor."""
        if len(given) < 2 or len({(storage_id(x), x.stride()) for x in given}) > 1:
            return False
        last = [self.of(x)[-1] for x in given]
        if any(len(parts) != 1 or parts[0].kind != "feature" for parts in last):
            return False
        starts = [parts[0].start for parts in last]
        return all(b - a == given[0].shape[-1] for a, b in pairwise(starts))

    def _aligned(self, given: list[Tensor], out: Tensor) -> Sequence[Parts]:
        """Elementwise: each axis is that of the first input with this size; data before weights."""
        if len(given) == 1 and given[0].shape == out.shape:
            return self.of(given[0])
        ordered = sorted(
            (x for x in given if x.dim() <= out.dim()),
            key=lambda x: (self.constant(x), x.dtype != out.dtype, -x.numel()),
        )
        if ordered and ordered[0].shape == out.shape:
            return self.of(ordered[0])
        known = [(x, self.of(x)) for x in ordered]
        axes: list[Parts] = []
        for at, size in enumerate(out.shape):
            back = at - out.dim()
            fitting = (parts[back] for x, parts in known if x.dim() >= -back and x.shape[back] == size)
            axes.append(next(fitting, _new(size)))
        return axes


def followed(x: Tensor) -> bool:
    """Whether x has strides and a storage: nested and sparse tensors have none."""
    return not x.is_nested and x.layout is torch.strided


def _new(size: int) -> Parts:
    return (Factor.whole(size),) if size != 1 else ()


@cache
def is_view(func: Any) -> bool:
    """Whether the result of an operator shares the storage, and so the origin, of its first argument."""
    return getattr(func, "is_view", False) or getattr(func, "overloadpacket", None) is RESHAPED_COPY


def _is_pooled(func: Any, given: list[Tensor], out: Tensor) -> bool:
    """Whether the entries of some axis of the result are means, maxima or a selection of those of the input."""
    rule = _rule(func)
    if not given or not given[0].is_floating_point() or rule not in ("unknown", "convolution"):
        return False
    if rule == "convolution":
        return out.shape[2:].numel() < given[0].shape[2:].numel()
    return getattr(func, "overloadpacket", None) in SELECTIONS or out.numel() < given[0].numel()


@cache
def _rule(func: Any) -> str:
    """How the axes of the result of an operator follow from those of its inputs."""
    packet = getattr(func, "overloadpacket", None)
    if packet in PRODUCTS:
        return "product"
    if packet in CONVOLUTIONS:
        return "convolution"
    if packet in SAME_AXES or torch.Tag.pointwise in getattr(func, "tags", ()):
        return "same axes"
    return OWN_RULE.get(packet, "unknown")


def _unknown(x: Tensor) -> tuple[Parts, ...]:
    return tuple(_new(size) for size in x.shape)


def _geometry(x: Tensor) -> Geometry:
    return x.shape, x.stride(), int(x.storage_offset()), x.element_size()


def _by_stride(stored: tuple[int, Factor]) -> int:
    return -stored[0]


def _rows(parts: Parts) -> Parts:
    """The rows of a linear layer; heads remain a part of the features where each has a linear layer of its own."""
    return tuple(f if f.kind == "feature" and f.size < f.length else f._replace(kind="row") for f in parts)
