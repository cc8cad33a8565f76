"""The cost of a model as a tree (model → layer → part → term) whose amounts are numbers or formulas.

Each term is written once, as plain arithmetic over its sizes: integers give the number, symbols give the formula.
Conventions: a multiply-add is 2 FLOPs. `flops` are those of matrix products; everything else (scale, softmax of
m entries = 5m − 2, norms, activations) is reported separately as `elementwise_flops`.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from ..errors import SpecError, nearest

Amount = Any  # an int, or a sympy expression over integers

CONVENTION = (
    "a multiply-add is 2 FLOPs; FLOPs are those of matrix products; "
    "a softmax over m entries is 5m − 2 elementwise FLOPs"
)


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
        amounts = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: a if isinstance(a, int | float) else str(a) for name, a in amounts.items()}


@dataclass(frozen=True)
class Part:
    """A node of the tree: its own amounts, its parts, and how many identical copies there are."""

    name: str
    own: Amounts = Amounts()
    parts: tuple["Part", ...] = ()
    times: Amount = 1
    note: str = ""  # a remark: "tied to the embedding", "recomputed in the backward pass"

    @cached_property
    def total(self) -> Amounts:
        """times · (own + Σ parts)."""
        return sum((p.total for p in self.parts), self.own) * self.times

    @property
    def is_term(self) -> bool:
        return not self.parts

    def __getitem__(self, path: str) -> "Part":
        """The part at this path: `tree["encoder/block/attention/scores"]`. Its total is that of one parent."""
        first, _, rest = path.partition("/")
        matches = [p for p in self.parts if p.name == first]
        if not matches:
            raise SpecError(
                f"{self.name} has no part {first!r}; {nearest(first, [p.name for p in self.parts])}"
            )
        return matches[0][rest] if rest else matches[0]

    def nodes(self, depth: int = 0, times: Amount = 1) -> Iterator[tuple[int, "Part", Amounts]]:
        """Every node, top down: its depth, the node, and its amounts summed over the whole tree."""
        yield depth, self, self.total * times
        for p in self.parts:
            yield from p.nodes(depth + 1, times * self.times)

    def terms(self) -> Iterator[tuple[str, Amounts]]:
        """Every leaf by its path, with its amounts over the whole tree; they add up to the total."""

        def descend(part: Part, path: str, times: Amount) -> Iterator[tuple[str, Amounts]]:
            if part.is_term or part.own != Amounts():
                yield path or part.name, part.own * (times * part.times)
            for p in part.parts:
                yield from descend(p, f"{path}/{p.name}" if path else p.name, times * part.times)

        yield from descend(self, "", 1)

    def map(self, f: Callable[[Amount], Amount]) -> "Part":
        """The same tree with f applied to every amount and every `times`."""
        return replace(
            self, own=self.own.map(f), parts=tuple(p.map(f) for p in self.parts), times=f(self.times)
        )

    def plain(self) -> dict[str, Any]:
        times = self.times if isinstance(self.times, int) else str(self.times)
        plain: dict[str, Any] = {"name": self.name, "times": times, **self.total.plain()}
        if self.note:
            plain["note"] = self.note
        return plain | ({"parts": [p.plain() for p in self.parts]} if self.parts else {})


@dataclass(frozen=True)
class Pairs:
    """Query-key pairs of one attention, for one head and one batch row."""

    path: str  # of the attention in the tree
    pattern: str
    needed: int  # allowed by the pattern
    computed: int  # evaluated by the backend
    full: int  # n · m
    backend: str
    reason: str = ""

    @property
    def waste(self) -> float:
        """computed / needed."""
        return self.computed / self.needed if self.needed else 1.0 + self.computed

    def plain(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"waste": self.waste}


@dataclass(frozen=True, repr=False)
class Cost:
    """The cost of a model. `print` it for a table; `total`, `tree` and `json()` are for programs."""

    name: str  # what was priced
    sizes: dict[str, Any]  # n, m, batch, dtype, …: the sizes that the numbers hold for
    tree: Part
    pairs: tuple[Pairs, ...] = ()
    uncounted: tuple[str, ...] = ()  # operations of a traced module that no amount includes
    remember: Callable[[], Any] | None = field(default=None, repr=False, compare=False)  # computes `memory`
    notes: tuple[str, ...] = ()  # assumptions of a trace
    formulas: Callable[[], tuple[Part, dict[Any, int]]] | None = field(
        default=None, repr=False, compare=False
    )
    # The declaration and its sizes; None if traced.
    request: Any = field(default=None, repr=False, compare=False)
    # (budget in bytes, "batch" or "n") → the largest that fits; None if traced at one size.
    fitting: Callable[[int, str], int] | None = field(default=None, repr=False, compare=False)

    @property
    def total(self) -> Amounts:
        return self.tree.total

    @cached_property
    def memory(self) -> Any:
        """regard.costs.Memory, in bytes, computed at the first use; None for a declaration without a width."""
        return None if self.remember is None else self.remember()

    def explain_peak(self) -> str:
        """Where the peak is, what is alive there, and what would lower it, in words."""
        if self.memory is None:
            raise SpecError(f"the memory of {self.name} is not known")
        return self.memory.explain_peak()

    @property
    def parameters(self) -> Amount:
        return self.total.parameters

    @property
    def flops(self) -> Amount:
        """FLOPs of the matrix products of one forward pass."""
        return self.total.flops

    def __getitem__(self, path: str) -> Part:
        return self.tree[path]

    @cached_property
    def _written(self) -> tuple[Part, dict[Any, int]]:
        if self.formulas is None:
            raise SpecError(
                f"the cost of {self.name} was traced, which gives numbers only; declare a spec to get a formula"
            )
        return self.formulas()

    @property
    def symbolic(self) -> Part:
        """The same tree, with a formula for each amount. Needs sympy."""
        return self._written[0]

    @property
    def values(self) -> dict[Any, int]:
        """The value of each symbol of the formulas: `formula.subs(values)` is the number."""
        return self._written[1]

    @property
    def formula(self) -> Any:
        """FLOPs of the forward pass as a sympy expression; `symbolic` has the formulas of all amounts."""
        return self.symbolic.total.flops.expand()

    @property
    def order(self) -> Any:
        """The leading order of the FLOPs: the monomials that no other monomial dominates, without coefficients."""
        from .analysis import leading_order

        return leading_order(self.symbolic.total.flops)

    @property
    def biases(self) -> dict[str, int] | None:
        """Parameters with no biases, with the output bias of attention only, and with all; None if traced."""
        from .analysis import biases

        return None if self.request is None else biases(self.request)

    @property
    def saving(self) -> Any:
        """The share of FLOPs that the patterns save, in the attention core and in total; None if traced."""
        from .analysis import saving

        return None if self.request is None else saving(self.request)

    @property
    def bottleneck(self) -> Any:
        """The kind of work with the most FLOPs, and why; None if there are no matrix products."""
        from .analysis import bottleneck

        return bottleneck(self)

    def fits(self, budget: int, vary: str = "batch") -> int:
        """The largest batch (or n, with `vary="n"`) whose peak memory is at most `budget` bytes; 0 if none fits."""
        if self.fitting is None:
            raise SpecError(
                f"{self.name} was traced at one size; declare a spec to find the largest size that fits"
            )
        return self.fitting(budget, vary)

    @property
    def score_orders(self) -> Any:
        """FLOPs of the scores of a declared attention in three orders of the same products; else None."""
        from .analysis import score_orders_of

        return None if self.request is None else score_orders_of(self.request)

    @property
    def position_orders(self) -> Any:
        """FLOPs of the scores of a declared quadratic position, per pair and per distinct offset; else None."""
        from .analysis import position_orders_of

        return None if self.request is None else position_orders_of(self.request)

    @property
    def latex(self) -> str:
        """A LaTeX array of formulas, term by term: parameters, FLOPs, elementwise FLOPs."""
        from .tables import latex

        return latex(self)

    def plain(self) -> dict[str, Any]:
        """The cost as dictionaries, lists, numbers and strings."""
        return {
            "name": self.name,
            "sizes": {
                k: v if isinstance(v, int | float | str | bool) else str(v) for k, v in self.sizes.items()
            },
            "convention": CONVENTION,
            "total": self.total.plain(),
            "biases": self.biases,
            "pairs": [p.plain() for p in self.pairs],
            "saving": None if self.saving is None else vars(self.saving),
            "score_orders": None if self.score_orders is None else vars(self.score_orders),
            "position_orders": None if self.position_orders is None else vars(self.position_orders),
            "bottleneck": None if self.bottleneck is None else vars(self.bottleneck),
            "memory": None if self.memory is None else self.memory.plain(),
            "uncounted": list(self.uncounted),
            "notes": list(self.notes),
            "tree": self.tree.plain(),
        }

    def json(self, indent: int | None = None) -> str:
        return json.dumps(self.plain(), indent=indent, ensure_ascii=False)

    def table(self, depth: int | None = None) -> Any:
        """The table to this depth of the tree: `.text()`, `.rich()`, `.html()`."""
        from .tables import table

        return table(self, depth)

    def __str__(self) -> str:
        return self.table().text()

    def __repr__(self) -> str:
        from .tables import summary

        return f"<Cost of {self.name[:60]}: {summary(self)}>"

    def __rich__(self) -> Any:
        return self.table().rich()

    def _repr_html_(self) -> str:
        return self.table().html()
