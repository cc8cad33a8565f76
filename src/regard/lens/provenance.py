"""Whether queries and keys come from one sequence (self-attention) or from two (cross-attention).

For each tensor we record its ancestors: the tensors from which it was computed token by token. The output of an
attention has none, since attention mixes tokens. So q and k share an ancestor if both are projections of one
sequence.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compat import aten_operator, aten_operators, storage_id
from ..nested import tensors_in

aten = torch.ops.aten
LINEAR = {
    aten.mm: 0,
    aten.addmm: 1,
    aten.linear: 0,
    aten.convolution: 0,
    aten_operator("_addmm_activation"): 1,
}
PRODUCTS = {aten.bmm: (0, 1), aten.baddbmm: (1, 2)}
SOFTMAX = aten_operators("_softmax", "_safe_softmax")
ELEMENTWISE = ("mul", "div", "masked_fill", "nan_to_num")  # and in place
PRESERVES_WEIGHTS = aten_operators(
    "native_dropout", "_to_copy", "clone", "where", *ELEMENTWISE, *(f"{name}_" for name in ELEMENTWISE)
)
RESHAPED_COPY = aten_operator("_unsafe_view")
COPIES = aten_operators("_to_copy", "clone")  # under autocast each projection reads a copy of its own
NEW_TENSORS = {aten.lift_fresh, aten.lift}  # torch.tensor(…): its storage may have belonged to another tensor
MAX_ANCESTORS = 6  # of one tensor; the newest ones decide
MAX_PENDING_SOFTMAXES = 2  # softmax results that were not yet multiplied with values

Ancestors = frozenset[int]
Columns = tuple[
    int, int
]  # the first column and the number of columns; (-1, …) if a part does not consist of columns
NONE: Ancestors = frozenset()


class Layout(NamedTuple):
    """Where a tensor's numbers are in its storage: a view of some of its columns has the same strides."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, x: Tensor) -> "Layout":
        return cls(x.shape, x.stride(), int(x.storage_offset()))

    def columns(self, view: "Layout") -> Columns:
        """Which columns of this tensor a view contains; in the view, batch and heads may be one axis."""
        count = view.shape[-1] if view.shape else 1
        start = view.offset - self.offset
        rows = self.shape[:-1]
        same_rows = view.shape[:-1] in (rows, (rows[:-1].numel(), rows[-1]))
        inside = start + count <= self.shape[-1] and view.stride[-2:] == self.stride[-2:]
        return (start, count) if same_rows and inside else (-1, count)


class TensorOrigin(NamedTuple):
    """serial: this tensor's number. ancestors: their numbers. pair: the ancestors of the two factors of q·k."""

    serial: int
    ancestors: Ancestors = NONE
    pair: tuple[Ancestors, Ancestors] | None = None
    softmax: int | None = None  # the number of the softmax whose weights it contains
    layout: Layout | None = None  # of a tensor with such weights; None of one whose axes may have been merged


class Provenance:
    """The origins of the tensors computed so far, by their storage."""

    def __init__(self) -> None:
        self._origins: dict[int, TensorOrigin] = {}
        self._softmaxes: dict[int, Tensor] = {}
        self._parts: dict[int, set[Columns]] = {}  # of each softmax: the parts of its result that were used
        self._taken_in_part: set[int] = set()
        self._count = 0
        self.softmaxes = 0  # over the last axis, of tensors with at least three
        self.softmaxes_over_another_axis = 0  # of such tensors

    def of(self, x: Tensor) -> TensorOrigin:
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
        given = tensors_in(args)
        packet = getattr(func, "overloadpacket", None)
        if not getattr(func, "is_view", False):
            for x in given:
                self.use(x)
        if packet in LINEAR:
            x = args[LINEAR[packet]]
            old = self.of(x)
            newest = sorted(old.ancestors, reverse=True)[:MAX_ANCESTORS]
            self._set(out, frozenset((old.serial, *newest)))
        elif packet in PRODUCTS:
            left, right = (self.of(args[i]).ancestors for i in PRODUCTS[packet])
            self._set(out, pair=(left, right))
        elif packet in NEW_TENSORS:
            self.start_anew(out)
        elif packet is RESHAPED_COPY:  # it shares the storage of a copy; a permuted tensor is reshaped so
            self._origins[storage_id(out)] = self.of(out)._replace(layout=None)
        elif not getattr(func, "is_view", False):  # a view shares the storage, and so the origin
            origins = [self.of(x) for x in given if not x.is_nested and x.numel()]
            pair = next((o.pair for o in origins if o.pair), None)
            newest = sorted(NONE.union(*(o.ancestors for o in origins)), reverse=True)[:MAX_ANCESTORS]
            serial = origins[0].serial if packet in COPIES and origins else None
            self._set(out, frozenset(newest), pair, self._softmax(packet, args, given, out), serial)

    def start_anew(self, out: Any) -> None:
        """The output of an attention has no ancestors: it mixes tokens."""
        self._set(out)

    def take_weights(self, x: Tensor) -> tuple[Tensor, tuple[Ancestors, Ancestors] | None] | None:
        """The softmax that x is, or was computed from elementwise, and the origins of its q·k; each is returned once.

        For a softmax with a sink, whose column multiplies no value, only the columns of the keys are returned.
        """
        origin = self.of(x)
        if (number := origin.softmax) is None or number not in self._softmaxes:
            return None
        table = self._softmaxes[number]
        if table.numel() != x.numel():
            start, count = next(iter(self._parts.get(number, ())), (-1, 0))
            table = table[..., start : start + count]
            if start < 0 or table.numel() != x.numel():
                return None
            self._taken_in_part.add(number)
        del self._softmaxes[number]
        return table, origin.pair

    def keeps_order(self, x: Tensor) -> bool:
        """Whether the rows of weights are known to be in the order of the tensor that they are a view of."""
        layout = self.of(x).layout
        return layout is not None and (x.shape[-2] == 1 or x.stride(-2) == layout.stride[-2])

    def use(self, x: Tensor) -> None:
        """Record that an operator other than a view uses x, which may be a part of a softmax's result."""
        if x.is_nested or not x.numel():
            return
        origin = self.of(x)
        if origin.softmax is None or origin.layout is None or x.numel() == origin.layout.shape.numel():
            return
        self._parts.setdefault(origin.softmax, set()).add(origin.layout.columns(Layout.of(x)))

    @property
    def read_in_part(self) -> int:
        """How many softmaxes were returned without columns that are used elsewhere."""
        return sum(len(self._parts[number]) > 1 for number in self._taken_in_part)

    def _softmax(self, packet: Any, args: tuple[Any, ...], given: list[Tensor], out: Any) -> int | None:
        first = next(iter(tensors_in(out)), None)
        if first is None or not given:
            return None
        if packet in SOFTMAX and args[1] in (-1, first.dim() - 1):
            self.softmaxes += first.dim() > 2
            self._softmaxes[number := self._next()] = first
            for old in list(self._softmaxes)[:-MAX_PENDING_SOFTMAXES]:
                del self._softmaxes[old]
            return number
        if packet in SOFTMAX:
            self.softmaxes_over_another_axis += first.dim() > 2
        if packet not in PRESERVES_WEIGHTS:
            return None
        numbers = (self.of(x).softmax for x in given if x.numel() == first.numel())
        return next((number for number in numbers if number is not None), None)

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
            if not x.is_nested:
                layout = None if softmax is None else Layout.of(x)
                number = self._next() if serial is None else serial
                self._origins[storage_id(x)] = TensorOrigin(number, ancestors, pair, softmax, layout)

    def _next(self) -> int:
        self._count += 1
        return self._count
