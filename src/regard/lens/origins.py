"""Where queries and keys come from: from one sequence (self-attention) or from two (cross-attention).

Each tensor remembers the vectors it was computed from token by token. An attention starts anew, since it mixes
tokens. So q and k share an ancestor when both were projected from one sequence, and none when they were not.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten
LINEAR = {aten.mm: 0, aten.addmm: 1, aten.linear: 0, aten.convolution: 0, aten._addmm_activation: 1}
PRODUCTS = {aten.bmm: (0, 1), aten.baddbmm: (1, 2)}
SOFTMAX = {aten._softmax, aten._safe_softmax}
KEEPS_WEIGHTS = {aten.native_dropout, aten._to_copy, aten.clone, aten.mul, aten.div}
FROM_OUTSIDE = {aten.lift_fresh, aten.lift}  # torch.tensor(…): its storage may be one that was used before
REMEMBERED = 6  # ancestors of one tensor; the newest ones tell
KEPT = 2  # tables of weights that wait for their values

Roots = frozenset[int]
NONE: Roots = frozenset()


class Origin(NamedTuple):
    """serial: this tensor's number. roots: its ancestors' numbers. pair: those of the two sides of q·k."""

    serial: int
    roots: Roots = NONE
    pair: tuple[Roots, Roots] | None = None
    table: int | None = None  # the number of the softmax whose weights it holds


class Origins:
    """The origins of the tensors made so far, by the storage that holds them."""

    def __init__(self) -> None:
        self._known: dict[int, Origin] = {}
        self._tables: dict[int, Tensor] = {}
        self._count = 0

    def of(self, x: Tensor) -> Origin:
        place = _storage(x)
        if place not in self._known:
            self._known[place] = Origin(self._next())
        return self._known[place]

    def alike(self, q: Tensor, k: Tensor) -> bool | None:
        """Whether q and k come from one sequence; None where nothing is known of one of them."""
        a, b = self.of(q).roots, self.of(k).roots
        return bool(a & b) if a and b else None

    def note(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Remember where what func made comes from."""
        given = list(_tensors(args))
        packet = getattr(func, "overloadpacket", None)
        if packet in LINEAR:
            x = args[LINEAR[packet]]
            old = self.of(x)
            newest = sorted(old.roots, reverse=True)[:REMEMBERED]
            self._set(out, frozenset((old.serial, *newest)))
        elif packet in PRODUCTS:
            left, right = (self.of(args[i]).roots for i in PRODUCTS[packet])
            self._set(out, pair=(left, right))
        elif packet in FROM_OUTSIDE:
            self.start_anew(out)
        elif not getattr(func, "is_view", False):  # a view shares the storage, and so the origin
            all_old = [self.of(x) for x in given if not x.is_nested and x.numel()]
            pair = next((o.pair for o in all_old if o.pair), None)
            newest = sorted(NONE.union(*(o.roots for o in all_old)), reverse=True)[:REMEMBERED]
            self._set(out, frozenset(newest), pair, self._table(packet, args, given, out))

    def start_anew(self, out: Any) -> None:
        """What an attention made has no ancestor: it mixes tokens."""
        self._set(out)

    def take_weights(self, x: Tensor) -> tuple[Tensor, tuple[Roots, Roots] | None] | None:
        """The softmax that x is, or was made from value by value, and what it compared; once."""
        origin = self.of(x)
        table = self._tables.get(origin.table) if origin.table is not None else None
        if table is None or table.numel() != x.numel():
            return None
        del self._tables[origin.table]  # type: ignore[arg-type]
        return table, origin.pair

    def _table(self, packet: Any, args: tuple[Any, ...], given: list[Tensor], out: Any) -> int | None:
        first = next(iter(_tensors((out,))), None)
        if first is None or not given:
            return None
        if packet in SOFTMAX and args[1] in (-1, first.dim() - 1):
            self._tables[number := self._next()] = first
            for old in list(self._tables)[:-KEPT]:
                del self._tables[old]
            return number
        if packet in KEEPS_WEIGHTS and given[0].numel() == first.numel():
            return self.of(given[0]).table
        return None

    def _set(
        self,
        out: Any,
        roots: Roots = NONE,
        pair: tuple[Roots, Roots] | None = None,
        table: int | None = None,
    ) -> None:
        for x in _tensors((out,)):
            if not x.is_nested:
                self._known[_storage(x)] = Origin(self._next(), roots, pair, table)

    def _next(self) -> int:
        self._count += 1
        return self._count


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for v in values:
        if isinstance(v, Tensor):
            yield v
        elif isinstance(v, list | tuple):
            yield from _tensors(v)


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
