"""A product of a softmax with values, read as attention: which of its axes are batch, heads, queries and keys."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Literal, NamedTuple

from torch import Tensor

from ..errors import RegardError
from .axes import Factor, Parts
from .provenance import Weights

Axis = Literal["b", "h", "n", "m"]
Side = Literal["batch", "rows", "keys"]  # of a product: (batch, rows, keys) × (batch, keys, columns)

NOT_POSITIONS = (
    "a softmax over features or experts and not over positions (linear attention, channel attention, a router) is "
    "not shown as attention"
)
NO_QUERIES = (
    "the rows of its map are learned and not positions (learned queries, pooling by learned scores, or one half of "
    "linear attention)"
)

SUM_OF_SOFTMAXES = (
    "its weights are a sum or difference of {terms} softmaxes, as in a differential Transformer; the map shows them "
    "as they multiply the values: they may be negative, and a row need not sum to 1"
)


class Rows(NamedTuple):
    """Which positions of a sequence of `length` an axis has: `size` of them, from `start` on."""

    start: int
    size: int
    length: int

    @classmethod
    def of(cls, parts: Sequence[Factor]) -> "Rows | None":
        """None if they are not known to be consecutive positions of one sequence."""
        if len(parts) != 1 or parts[0].step != 1:
            return None
        return cls(parts[0].start, parts[0].size, parts[0].length)


@dataclass(frozen=True)
class Product:
    """The weights in a product: factors in their order there, each with its side of the product and its axis.

    rank: where a factor is in (b, h, n, m). left: whether the weights are the left side. split: how many heads the
    batch axis has, where only the module knows them.
    """

    factors: tuple[Factor, ...]
    sides: tuple[Side, ...]
    axes: tuple[Axis, ...]
    rank: tuple[int, ...]
    left: bool
    split: int = 1
    note: str = ""
    queries: Parts = ()
    keys: Parts = ()

    @property
    def shape(self) -> tuple[int, int, int, int]:
        b, h, n, m = (
            prod(f.size for f, own in zip(self.factors, self.axes) if own == axis) for axis in "bhnm"
        )
        return b // self.split, h * self.split, n, m

    def arranged(self, weights: Tensor) -> Tensor:
        """The weights of the product as (b, h, n, m)."""
        order = self._order(range(len(self.factors)))
        return weights.reshape([f.size for f in self.factors]).permute(order).reshape(self.shape)

    def arranged_softmax(self, softmax: Weights) -> Tensor | None:
        """The result of the softmax as (b, h, n, m); None if slices and permutations cannot give it."""
        places: list[int] = []  # of the factors, in the order of the softmax
        sizes, cuts = [], []
        for whole in (f for axis in softmax.axes for f in axis):
            own = [i for i, f in enumerate(self.factors) if f.axis == whole.axis]
            own.sort(key=lambda i: -self.factors[i].step)
            parts = [self.factors[i] for i in own]
            count = prod(f.size for f in parts)
            nested = all(a.step == b.step * b.size for a, b in pairwise(parts))
            if not nested or (len(own) > 1 and (count != whole.size or parts[-1].step != 1)):
                return None
            sizes.append(whole.size)
            cuts.append(_indices(parts[-1]) if len(own) == 1 else slice(None))
            places += own
        table = softmax.table.detach().reshape(sizes)[tuple(cuts)]
        table = table.reshape([self.factors[i].size for i in places])
        repeated = [i for i in range(len(self.factors)) if i not in places]  # the weights were expanded there
        table = table[(None,) * len(repeated)].expand(*(self.factors[i].size for i in repeated), *table.shape)
        everywhere = [*repeated, *places]
        return table.permute([everywhere.index(i) for i in self._order(range(len(self.factors)))]).reshape(
            self.shape
        )

    def values(self, values: Tensor) -> Tensor | None:
        """The other side of the product as (b, heads of the values, m, d)."""
        own = [i for i, side in enumerate(self.sides) if side != "rows"]
        shared = [i for i, side in enumerate(self.sides) if side == "rows" and self.axes[i] == "h"]
        heads = [i for i in own if self.axes[i] == "h"]
        if any(self.rank[i] < self.rank[j] for i in shared for j in heads):
            return None  # the heads that share values are not neighbors
        own.sort(key=lambda i: self.sides[i] == "keys")  # stable: as in the values
        v = values if self.left else values.mT
        v = v.reshape(*(self.factors[i].size for i in own), v.shape[-1])
        v = v.permute([own.index(i) for i in self._order(own)] + [len(own)])
        kv_heads = prod(self.factors[i].size for i in heads) * self.split
        if any(self.axes[i] == "b" for i, side in enumerate(self.sides) if side == "rows"):
            return None  # all batch rows share the values
        return v.reshape(self.shape[0], kv_heads, self.shape[3], -1)

    def heads_of(self, out: Tensor) -> Tensor:
        """The result of the product as (b, h, n, d)."""
        own = self._outer
        b, h, n, _ = self.shape
        return out.reshape(self._out_shape(out)).permute(self._out_order(own)).reshape(b, h, n, -1)

    def from_heads(self, heads: Tensor, out: Tensor) -> Tensor:
        """The inverse of `heads_of`."""
        order = self._out_order(self._outer)
        shape = self._out_shape(out)
        back = [order.index(i) for i in range(len(order))]
        return heads.reshape([shape[i] for i in order]).permute(back).reshape(out.shape)

    @property
    def _outer(self) -> list[int]:
        """The factors of the result."""
        own = [i for i, side in enumerate(self.sides) if side != "keys"]
        own.sort(key=lambda i: self.sides[i] == "rows")
        if any(axis == "h" and side == "keys" for axis, side in zip(self.axes, self.sides)):
            raise RegardError(
                "the output of this attention is summed over its heads, so neither a head nor a key can be removed"
            )
        return own

    def _out_shape(self, out: Tensor) -> list[int]:
        batch = [self.factors[i].size for i in self._outer if self.sides[i] == "batch"]
        rows = [self.factors[i].size for i in self._outer if self.sides[i] == "rows"]
        return [*batch, *rows, out.shape[-1]] if self.left else [*batch, out.shape[-2], *rows]

    def _out_order(self, own: list[int]) -> list[int]:
        """The axes of that shape in the order b, h, n, d."""
        at = own.index if self.left else lambda i: own.index(i) + (self.sides[i] == "rows")
        columns = len(own) if self.left else sum(self.sides[i] == "batch" for i in own)
        return [*(at(i) for i in self._order(own)), columns]

    def _order(self, own: Sequence[int]) -> list[int]:
        return sorted(own, key=lambda i: self.rank[i])


def _indices(f: Factor) -> slice:
    return slice(f.start, f.start + f.size * f.step, f.step)


def read_product(
    softmax: Weights, placed: list[tuple[Factor, Side]], left: bool, value_keys: Parts, heads: int | None
) -> Product | str:
    """The product of a softmax with values; a sentence if it is no attention over positions.

    placed: the factors of the weights, with their sides. value_keys: the factors that the product sums over, in the
    values. heads: how many the module says it has, used where the data flow does not tell heads from batch rows.
    """
    kind = _attention(softmax, placed, value_keys)
    if kind == NOT_POSITIONS:
        return kind
    found = _roles(softmax, placed)
    batch = [f for (f, _), role in zip(placed, found) if role == "b"]
    # A linear layer is applied over batch rows: then a loop over heads has only those in the first axis.
    folded = "h" not in found and softmax.table.dim() == 3 and all(f.kind != "row" for f in batch)
    split = heads if heads and folded and prod(f.size for f in batch) % heads == 0 else 1
    place = {f.axis: i for i, f in enumerate(f for parts in softmax.axes for f in parts)}
    ranks = [("bhnm".index(role), place.get(f.axis, -1), -f.step) for (f, _), role in zip(placed, found)]
    order = sorted(range(len(placed)), key=lambda i: ranks[i])
    positions: dict[str, list[Factor]] = {"n": [], "m": []}
    for (f, _), role in zip(placed, found):
        if role in positions and f.axis in softmax.sources:
            positions[role].append(softmax.sources[f.axis].part(f.start, f.step, f.size))
    return Product(
        tuple(f for f, _ in placed),
        tuple(side for _, side in placed),
        tuple(found),
        tuple(order.index(i) for i in range(len(placed))),
        left,
        split,
        kind or (SUM_OF_SOFTMAXES.format(terms=len(softmax.terms)) if softmax.terms else ""),
        tuple(positions["n"] or [f for f in softmax.indexed if not f.learned]),
        tuple(positions["m"]),
    )


def sides_of(axes: Sequence[Parts], left: bool) -> list[tuple[Factor, Side]]:
    """The factors of the weights of a matrix product, with their sides."""
    sides: list[Side] = ["batch", "rows", "keys"] if left else ["batch", "keys", "rows"]
    return [(f, side) for parts, side in zip(axes, sides[-len(axes) :], strict=True) for f in parts]


def sides_of_one_key(axes: Sequence[Parts], values: Tensor) -> list[tuple[Factor, Side]]:
    """Of an elementwise product with values: an axis that they do not have is one of rows."""
    sizes = (1,) * (len(axes) - values.dim()) + tuple(values.shape)[-len(axes) :]
    sides: list[Side] = ["batch" if size > 1 else "rows" for size in sizes]
    return [(f, side) for parts, side in zip(axes, sides, strict=True) for f in parts]


def _attention(softmax: Weights, placed: list[tuple[Factor, Side]], value_keys: Parts) -> str:
    """ "" for attention over positions; else NOT_POSITIONS or NO_QUERIES.

    Scores that are a product of two results are those of q and k. Other scores are additive attention or learned
    (then their keys or those of the values are positions), or they are features that a softmax normalizes.
    """
    rows = [softmax.sources[f.axis] for f, side in placed if side == "rows" and f.axis in softmax.sources]
    keys = [softmax.sources[f.axis] for f in softmax.axes[softmax.axis]]
    of_features = all(f.kind == "feature" for f in rows) and bool(rows)
    features_are_keys = all(f.learned for f in keys) and bool(keys)
    if of_features and features_are_keys:
        return NOT_POSITIONS  # between the channels of two projections
    if softmax.pair is not None:
        return ""
    if features_are_keys and not any(f.kind in ("data", "row") for f in value_keys):
        return NOT_POSITIONS
    if of_features and any(f.size < f.length for f in rows):
        return NOT_POSITIONS  # one row per feature of a head, as the keys of linear attention have
    return NO_QUERIES if of_features else ""


def _roles(softmax: Weights, placed: list[tuple[Factor, Side]]) -> list[Axis]:
    """The axis of each factor. Heads are those that a weight produced; if there are none, by (batch, heads, …)."""
    number = {f.axis: i for i, parts in enumerate(softmax.axes) for f in parts}
    rows = [f for f, side in placed if side == "rows"]
    product, data_rows = softmax.pair is not None, any(not f.learned for f in rows)
    heads = {
        f.axis
        for f, side in placed
        if f.learned
        and number.get(f.axis, softmax.axis) != softmax.axis
        and (side != "rows" or data_rows or (product and f.kind == "feature"))
    }
    lead = [i for i in range(len(softmax.axes)) if i != softmax.axis]
    queries = {number.get(f.axis, -1) for f in rows if f.axis not in heads}
    if rows:
        query = max(queries, default=None)
    else:  # one query
        query = max((i for i in lead if softmax.table.shape[i] == 1), default=None)
    rest = [i for i in lead if i != query]
    # Axes over which a linear layer is applied are known to be no heads.
    applied = {number.get(f.axis) for f, _ in placed if f.kind == "row"}
    head_axis = rest[-1] if len(rest) > 1 and not heads and applied.isdisjoint(rest) else None

    def role(f: Factor, side: Side) -> Axis:
        at = number.get(f.axis)
        if at == softmax.axis:
            return "m"
        if f.axis in heads or (at is not None and at == head_axis):
            return "h"
        return "n" if side == "rows" and at == query else "b"

    return [role(f, side) for f, side in placed]
