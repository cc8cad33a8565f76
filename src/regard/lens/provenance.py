"""Whether queries and keys come from one sequence (self-attention) or from two (cross-attention).

For each tensor the tensors are recorded that it was computed from token by token. The output of an attention has no
such ancestors, since attention mixes tokens. So q and k share an ancestor if both are projections of one sequence.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compat import aten_operator, aten_operators, storage_id

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
PRESERVES_WEIGHTS = aten_operators("native_dropout", "_to_copy", "clone", "mul", "div")
NEW_TENSORS = {aten.lift_fresh, aten.lift}  # torch.tensor(…): its storage may have belonged to another tensor
MAX_ANCESTORS = 6  # of one tensor; the newest ones decide
MAX_PENDING_SOFTMAXES = 2  # softmax results that were not yet multiplied with values

Ancestors = frozenset[int]
NONE: Ancestors = frozenset()


class TensorOrigin(NamedTuple):
    """serial: this tensor's number. ancestors: their numbers. pair: the ancestors of the two factors of q·k."""

    serial: int
    ancestors: Ancestors = NONE
    pair: tuple[Ancestors, Ancestors] | None = None
    softmax: int | None = None  # the number of the softmax whose weights it contains


class Provenance:
    """The origins of the tensors computed so far, by their storage."""

    def __init__(self) -> None:
        self._origins: dict[int, TensorOrigin] = {}
        self._softmaxes: dict[int, Tensor] = {}
        self._count = 0
        self.softmaxes = 0  # over the last axis, of tensors with at least three

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
        given = list(_tensors(args))
        packet = getattr(func, "overloadpacket", None)
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
        elif not getattr(func, "is_view", False):  # a view shares the storage, and so the origin
            origins = [self.of(x) for x in given if not x.is_nested and x.numel()]
            pair = next((o.pair for o in origins if o.pair), None)
            newest = sorted(NONE.union(*(o.ancestors for o in origins)), reverse=True)[:MAX_ANCESTORS]
            self._set(out, frozenset(newest), pair, self._softmax(packet, args, given, out))

    def start_anew(self, out: Any) -> None:
        """The output of an attention has no ancestors: it mixes tokens."""
        self._set(out)

    def take_weights(self, x: Tensor) -> tuple[Tensor, tuple[Ancestors, Ancestors] | None] | None:
        """The softmax that x is, or was computed from elementwise, and the origins of its q·k; each is given once."""
        origin = self.of(x)
        table = self._softmaxes.get(origin.softmax) if origin.softmax is not None else None
        if table is None or table.numel() != x.numel():
            return None
        del self._softmaxes[origin.softmax]  # type: ignore[arg-type]
        return table, origin.pair

    def _softmax(self, packet: Any, args: tuple[Any, ...], given: list[Tensor], out: Any) -> int | None:
        first = next(iter(_tensors((out,))), None)
        if first is None or not given:
            return None
        if packet in SOFTMAX and args[1] in (-1, first.dim() - 1):
            self.softmaxes += first.dim() > 2
            self._softmaxes[number := self._next()] = first
            for old in list(self._softmaxes)[:-MAX_PENDING_SOFTMAXES]:
                del self._softmaxes[old]
            return number
        if packet in PRESERVES_WEIGHTS and given[0].numel() == first.numel():
            return self.of(given[0]).softmax
        return None

    def _set(
        self,
        out: Any,
        ancestors: Ancestors = NONE,
        pair: tuple[Ancestors, Ancestors] | None = None,
        softmax: int | None = None,
    ) -> None:
        for x in _tensors((out,)):
            if not x.is_nested:
                self._origins[storage_id(x)] = TensorOrigin(self._next(), ancestors, pair, softmax)

    def _next(self) -> int:
        self._count += 1
        return self._count


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for v in values:
        if isinstance(v, Tensor):
            yield v
        elif isinstance(v, list | tuple):
            yield from _tensors(v)
