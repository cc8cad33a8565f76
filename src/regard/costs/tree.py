"""The cost of a model as a tree (model → layer → part → term) whose amounts are numbers or formulas.

Each term is written once, as plain arithmetic over its sizes: integers give the number, symbols give the formula.
Conventions: a multiply-add is 2 FLOPs. `flops` are those of matrix products; everything else (scale, softmax of
m entries = 5m − 2, norms, activations) is reported separately as `elementwise_flops`.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

from ..errors import SpecError, nearest
from ..pattern.heads import numbered

Amount = Any  # an int, or a sympy expression over integers


@dataclass(frozen=True)
class Amounts:
    """What one part costs. Amounts can be added, and multiplied by a number of repetitions."""

    parameters: Amount = 0
    flops: Amount = 0  # matrix products of the forward pass, over the pairs that the pattern allows
    backward_flops: Amount = 0  # the same for the backward pass
    elementwise_flops: Amount = 0  # forward pass, everything that is not a matrix product
    executed_flops: Amount = 0  # matrix products that the chosen backend actually computes, forward
    executed_backward_flops: Amount = 0
    bytes: Amount = 0  # read and written by the forward pass

    def __add__(self, other: "Amounts") -> "Amounts":
        return Amounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, times: Amount) -> "Amounts":
        return self.map(lambda amount: times * amount)

    def map(self, f: Callable[[Amount], Amount]) -> "Amounts":
        return Amounts(*(f(getattr(self, each.name)) for each in fields(self)))

    def plain(self) -> dict[str, Any]:
        """The amounts by name; a formula becomes its text."""
        return vars(self.map(lambda a: a if isinstance(a, int | float) else str(a)))


@dataclass(frozen=True)
class Pairs:
    """Query-key pairs of one attention, for one head and one batch row: of any head, or of those named."""

    path: str  # of the attention in the tree
    pattern: str
    needed: int  # allowed by the pattern
    computed: int  # evaluated by the backend
    full: int  # n · m
    backend: str
    reason: str = ""
    heads: tuple[int, ...] = ()  # that have this pattern; none: all heads of the attention

    waste = property(lambda self: self.computed / self.needed if self.needed else 1.0 + self.computed)
    of_heads = property(lambda self: f", {numbered(self.heads)}" if self.heads else "")

    def plain(self) -> dict[str, Any]:
        return asdict(self) | {"waste": self.waste}


@dataclass(frozen=True)
class Part:
    """A node of the tree: its own amounts, its parts, and how many identical copies there are."""

    name: str
    own: Amounts = Amounts()
    parts: tuple["Part", ...] = ()
    times: Amount = 1
    note: str = ""  # a remark: "tied to the embedding", "recomputed in the backward pass"
    pairs: tuple[Pairs, ...] = ()  # of a declared attention: one for each call that it runs as

    @cached_property
    def total(self) -> Amounts:
        """times · (own + Σ parts)."""
        return sum((p.total for p in self.parts), self.own) * self.times

    def __getitem__(self, path: str) -> "Part":
        """The part at this path: `tree["encoder/block/attention/scores"]`. Its total is that of one parent."""
        first, _, rest = path.partition("/")
        parts = {p.name: p for p in reversed(self.parts)}
        if first not in parts:
            raise SpecError(f"{self.name} has no part {first!r}; {nearest(first, parts)}")
        return parts[first][rest] if rest else parts[first]

    def with_own(self, **amounts: Amount) -> "Part":
        """The same part with these amounts of its own."""
        return replace(self, own=replace(self.own, **amounts))

    def nodes(self, path: str = "", times: Amount = 1) -> Iterator[tuple[str, "Part", Amount]]:
        """Every node, top down: its path ("" of the root), the node, and how many parents of it there are."""
        yield path, self, times
        for p in self.parts:
            yield from p.nodes(f"{path}/{p.name}" if path else p.name, times * self.times)

    def terms(self) -> Iterator[tuple[str, Amounts]]:
        """Every leaf by its path, with its amounts over the whole tree; they add up to the total."""
        for path, part, times in self.nodes():
            if not part.parts or part.own != Amounts():
                yield path or part.name, part.own * (times * part.times)

    def plain(self) -> dict[str, Any]:
        times = self.times if isinstance(self.times, int) else str(self.times)
        plain: dict[str, Any] = {"name": self.name, "times": times, **self.total.plain()}
        plain |= {"note": self.note} if self.note else {}
        return plain | ({"parts": [p.plain() for p in self.parts]} if self.parts else {})
