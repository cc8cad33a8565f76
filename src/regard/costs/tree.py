"""What a cost is: a tree, model → layer → part → term, whose amounts are numbers or formulas.

A term is written once, as plain arithmetic over its sizes: whole numbers give the number, symbols the formula.
Conventions: a multiply-add is 2 operations; the headline is matrix products; what is not one (scale, softmax of
m entries = 5m − 2, norms, activations, additions of a bias) is told apart, as `other`.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from ..errors import SpecError, nearest

Amount = Any  # an int, or a sympy expression of whole numbers

CONVENTION = (
    "multiply-add = 2; softmax of m entries = 5m − 2; operations are of matrix products, others apart"
)


@dataclass(frozen=True)
class Amounts:
    """What a part costs. Amounts add, and multiply by how many parts are alike."""

    parameters: Amount = 0
    operations: Amount = 0  # matrix products of the forward pass, over the pairs that the pattern needs
    backward: Amount = 0  # the same of the backward pass
    other: Amount = 0  # operations of the forward pass that are no matrix product
    executed: Amount = 0  # matrix products that the chosen backend really computes, forward
    executed_backward: Amount = 0
    bytes: Amount = 0  # read and written by the forward pass

    def __add__(self, more: "Amounts") -> "Amounts":
        return Amounts(*(getattr(self, f.name) + getattr(more, f.name) for f in fields(self)))

    def __mul__(self, times: Amount) -> "Amounts":
        return self.map(lambda amount: times * amount)

    def map(self, f: Callable[[Amount], Amount]) -> "Amounts":
        return Amounts(*(f(getattr(self, each.name)) for each in fields(self)))

    def plain(self) -> dict[str, Any]:
        """By name; a formula as its text."""
        told = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: a if isinstance(a, int | float) else str(a) for name, a in told.items()}


@dataclass(frozen=True)
class Part:
    """A node of the tree: its own amounts, the parts it is made of, and how many there are alike."""

    name: str
    own: Amounts = Amounts()
    parts: tuple["Part", ...] = ()
    times: Amount = 1
    note: str = ""  # in words: "tied to the embedding", "recomputed in the backward pass"

    @cached_property
    def total(self) -> Amounts:
        """All of it: times · (own + Σ parts)."""
        return sum((p.total for p in self.parts), self.own) * self.times

    @property
    def is_term(self) -> bool:
        return not self.parts

    def __getitem__(self, path: str) -> "Part":
        """The part at this path: `tree["encoder/block/attention/scores"]`. Its total is of one parent."""
        first, _, rest = path.partition("/")
        found = [p for p in self.parts if p.name == first]
        if not found:
            raise SpecError(
                f"{self.name} has no part {first!r}; {nearest(first, [p.name for p in self.parts])}"
            )
        return found[0][rest] if rest else found[0]

    def walk(self, depth: int = 0, times: Amount = 1) -> Iterator[tuple[int, "Part", Amounts]]:
        """Every node, top down: its depth, itself, and its amounts in the whole tree."""
        yield depth, self, self.total * times
        for p in self.parts:
            yield from p.walk(depth + 1, times * self.times)

    def terms(self) -> Iterator[tuple[str, Amounts]]:
        """Every leaf by its path, with its amounts in the whole tree; they add up to the total."""

        def down(part: Part, path: str, times: Amount) -> Iterator[tuple[str, Amounts]]:
            if part.is_term or part.own != Amounts():
                yield path or part.name, part.own * (times * part.times)
            for p in part.parts:
                yield from down(p, f"{path}/{p.name}" if path else p.name, times * part.times)

        yield from down(self, "", 1)

    def map(self, f: Callable[[Amount], Amount]) -> "Part":
        """The same tree with every amount, and every `times`, replaced by f of it."""
        return replace(
            self, own=self.own.map(f), parts=tuple(p.map(f) for p in self.parts), times=f(self.times)
        )

    def plain(self) -> dict[str, Any]:
        times = self.times if isinstance(self.times, int) else str(self.times)
        told: dict[str, Any] = {"name": self.name, "times": times, **self.total.plain()}
        if self.note:
            told["note"] = self.note
        return told | ({"parts": [p.plain() for p in self.parts]} if self.parts else {})


@dataclass(frozen=True)
class Pairs:
    """The mask, charged: pairs of one attention, for one head and one batch row."""

    where: str  # the path of the attention in the tree
    pattern: str
    needed: int  # by the pattern
    computed: int  # by the backend
    full: int  # n · m
    backend: str
    reason: str = ""

    @property
    def waste(self) -> float:
        """Computed over needed."""
        return self.computed / self.needed if self.needed else 1.0 + self.computed

    def plain(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"waste": self.waste}


@dataclass(frozen=True)
class Cost:
    """What a thing costs. `print` it for a table; `total`, `tree` and `json()` are for programs."""

    of: str  # what was priced
    sizes: dict[str, Any]  # n, m, batch, dtype, …: what the numbers stand for
    tree: Part
    pairs: tuple[Pairs, ...] = ()
    uncounted: tuple[str, ...] = ()  # what a traced module did that is in no amount
    memory: Any = None  # bytes held, line by line: has rows() -> [(name, bytes)] and plain()
    formulas: Callable[[], tuple[Part, dict[Any, int]]] | None = field(
        default=None, repr=False, compare=False
    )
    facts: Any = field(default=None, repr=False, compare=False)  # spec and sizes, for further readings

    @property
    def total(self) -> Amounts:
        return self.tree.total

    @property
    def parameters(self) -> Amount:
        return self.total.parameters

    @property
    def operations(self) -> Amount:
        """Matrix products of one forward pass."""
        return self.total.operations

    def __getitem__(self, path: str) -> Part:
        return self.tree[path]

    @cached_property
    def _written(self) -> tuple[Part, dict[Any, int]]:
        if self.formulas is None:
            raise SpecError(
                f"the cost of {self.of} was counted by running it, which gives numbers; declare a spec for a formula"
            )
        return self.formulas()

    @property
    def symbolic(self) -> Part:
        """The same tree, with a formula for each amount. Needs sympy."""
        return self._written[0]

    @property
    def values(self) -> dict[Any, int]:
        """What each symbol of the formulas stands for: `formula.subs(values)` is the number again."""
        return self._written[1]

    @property
    def formula(self) -> Any:
        """Operations of the forward pass, as a sympy expression; `symbolic` has every other formula."""
        return self.symbolic.total.operations.expand()

    @property
    def order(self) -> Any:
        """The leading order of the operations: its monomials that no other outgrows, without their factors."""
        from .analysis import leading_order

        return leading_order(self.symbolic.total.operations)

    @property
    def biases(self) -> dict[str, int] | None:
        """Parameters with no biases, with attention's output bias alone, with all; None for what was traced."""
        from .analysis import biases

        return None if self.facts is None else biases(self.facts)

    @property
    def saving(self) -> Any:
        """What the patterns save, of attention's core and of the whole; None for what was traced."""
        from .analysis import saving

        return None if self.facts is None else saving(self.facts)

    @property
    def bottleneck(self) -> Any:
        """The kind of work that dominates, and why; None where there are no matrix products."""
        from .analysis import bottleneck

        return bottleneck(self)

    def fits(self, budget: int, vary: str = "batch") -> int:
        """The largest batch (or n, with `vary="n"`) whose peak stays within `budget` bytes; 0 if not even 1 does."""
        from .memory.report import fits

        if self.facts is None:
            raise SpecError(
                f"{self.of} was counted by running it at one size; declare a spec to ask what fits"
            )
        return fits(self.facts, budget, vary)

    @property
    def score_ways(self) -> Any:
        """A declared attention's scores, projected for every pair, once, or with W_q W_kᵀ merged; else None."""
        from .analysis import ways_of

        return None if self.facts is None else ways_of(self.facts)

    @property
    def position_ways(self) -> Any:
        """Scores of a declared quadratic position, for every pair or for each offset once; else None."""
        from .analysis import positions_of

        return None if self.facts is None else positions_of(self.facts)

    @property
    def latex(self) -> str:
        """Term by term, as a LaTeX array: parameters and operations."""
        from .tables import latex

        return latex(self)

    def plain(self) -> dict[str, Any]:
        """Dictionaries, lists, numbers and strings."""
        return {
            "of": self.of,
            "sizes": {
                k: v if isinstance(v, int | float | str | bool) else str(v) for k, v in self.sizes.items()
            },
            "convention": CONVENTION,
            "total": self.total.plain(),
            "biases": self.biases,
            "pairs": [p.plain() for p in self.pairs],
            "saving": None if self.saving is None else vars(self.saving),
            "score_ways": None if self.score_ways is None else vars(self.score_ways),
            "position_ways": None if self.position_ways is None else vars(self.position_ways),
            "bottleneck": None if self.bottleneck is None else vars(self.bottleneck),
            "memory": None if self.memory is None else self.memory.plain(),
            "uncounted": list(self.uncounted),
            "tree": self.tree.plain(),
        }

    def json(self, indent: int | None = None) -> str:
        return json.dumps(self.plain(), indent=indent, ensure_ascii=False)

    def __str__(self) -> str:
        from .tables import text

        return text(self)

    def __rich__(self) -> Any:
        from .tables import rich

        return rich(self)

    def _repr_html_(self) -> str:
        from .tables import html

        return html(self)
