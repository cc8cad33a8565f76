"""A comparison of layer types: attention, restricted attention, recurrent and convolutional layers.

FLOPs are those of the declarations that are timed. The path length is the number of layers (for a recurrent layer:
of steps) after which every output depends on every input.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import torch

from ..errors import SpecError, nearest
from ..machine import slope, time_call
from ..pattern import full, window
from ..spec import Attention, Convolutional, Recurrent
from ..spec.base import require_positive
from ..table import ShownAsTables, Table
from .flops.models import build_tree
from .result import core_of
from .sizes import Request
from .tree import Part

ATTENTION, RESTRICTED = "attention", "restricted attention"


class LayerKind(NamedTuple):
    """A layer type: its declaration, its complexity, the orders of its steps, and its path length at length n."""

    name: str
    spec: Any
    complexity: str
    sequential_order: str
    path_order: str
    path_length: Callable[[int], int]

    def _part(self, n: int) -> Part:
        """The layer over n positions, without the embedding and head of a recurrent model."""
        tree, _ = build_tree(Request(self.spec, n, n))
        inside = {Recurrent: "encoder", Convolutional: "layer"}.get(type(self.spec))
        return tree if inside is None else replace(tree[inside], times=1)

    def flops(self, n: int) -> int:
        """FLOPs of the matrix products of one layer over n positions."""
        return self._part(n).total.flops

    def core_flops(self, n: int) -> int:
        """FLOPs of scores and mixing; 0 if it is not attention."""
        return core_of(self._part(n)).flops

    def at(self, n: int) -> "LayerCost":
        """The row of the comparison at this length."""
        return LayerCost(
            self.name, self.flops(n), self.core_flops(n), n if self.sequential_order == "O(n)" else 1,
            self.path_length(n), *self.values(n), self.complexity, self.sequential_order, self.path_order,
        )  # fmt: skip

    def values(self, n: int) -> tuple[int, int]:
        """The number of values that training saves, and that generating the next position needs.

        A recurrent layer saves n states and needs the last one (an LSTM state is twice as wide); attention saves q,
        k, v, weights and outputs, and needs keys and values; a convolution needs the inputs under its kernel.
        """
        match self.spec:
            case Recurrent(d_model=d, cell=cell):
                state = 2 * d if cell == "lstm" else d
                return n * state, state
            case Convolutional(d_model=d, kernel=k, dilation=dilation):
                return n * d, min(n, (k - 1) * dilation) * d
            case Attention(d_model=d, pattern=pattern):
                keys = n if isinstance(pattern, full) else int(pattern.row_counts(n).max())
                return 4 * n * d + pattern.count(n), 2 * keys * d
        raise AssertionError(self.spec)


@dataclass(frozen=True)
class LayerCost:
    """A row of the comparison."""

    name: str
    flops: int
    core_flops: int  # scores and mixing; 0 if it is not attention
    sequential_steps: int
    path_length: int
    training_values: int  # saved for the backward pass
    decoding_values: int  # needed to generate the next position
    complexity: str
    sequential_order: str
    path_order: str


@dataclass(frozen=True)
class Crossover:
    """The length beyond which the first has more FLOPs than the second; None if it has more at every length."""

    first: str
    second: str
    n: int | float | None
    in_widths: str  # n as a multiple of d, for example "2 d"


@dataclass(frozen=True)
class Growth:
    """Time against length on this machine: the fitted exponent, and that of the FLOPs at the same lengths."""

    name: str
    lengths: tuple[int, ...]
    seconds: tuple[float, ...]
    measured: float
    predicted: float


@dataclass(frozen=True)
class Comparison(ShownAsTables):
    """Layer types side by side. `print` it; the fields and `json()` are for programs."""

    n: int
    d: int
    kernel: int
    window: int
    layers: tuple[LayerCost, ...]
    crossovers: tuple[Crossover, ...]
    growth: tuple[Growth, ...] = ()

    def __getitem__(self, name: str) -> LayerCost:
        by_name = {l.name: l for l in self.layers}
        if name not in by_name:
            raise SpecError(f"unknown layer type {name!r}; {nearest(name, by_name)}")
        return by_name[name]

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    def tables(self) -> list[Table]:
        title = f"one layer: n = {self.n}, d = {self.d}, kernel {self.kernel}, window {self.window}"
        head = ("layer", "FLOPs", "complexity", "sequential steps", "order", "path length", "order")
        types = [
            (l.name, f"{l.flops:,}", l.complexity, f"{l.sequential_steps:,}", l.sequential_order,
             f"{l.path_length:,}", l.path_order, f"{l.training_values:,}", f"{l.decoding_values:,}")
            for l in self.layers
        ]  # fmt: skip
        tables = [Table(title, (*head, "values saved to train", "values to decode"), types)]
        where = ["always" if c.n is None else f"{c.n:,.6g}" for c in self.crossovers]
        crossings = [(c.first, c.second, n, c.in_widths) for c, n in zip(self.crossovers, where)]
        tables.append(Table("crossover lengths", ("more FLOPs", "than", "beyond n =", ""), crossings))
        if self.growth:
            lengths = (f"n = {n:,}" for n in self.growth[0].lengths)
            columns = ("layer", "measured exponent", "predicted", *lengths)
            exponents = [(g, f"{g.measured:.2f}", f"{g.predicted:.2f}") for g in self.growth]
            timed = [(g.name, *fit, *(f"{1e3 * s:.3g} ms" for s in g.seconds)) for g, *fit in exponents]
            tables.append(Table("growth measured on this machine", columns, timed))
        return tables


def layer_kinds(d: int, kernel: int = 3, w: int = 2) -> tuple[LayerKind, ...]:
    """The layer types of width d, with this kernel size and w neighbors on each side of the window."""
    even = kernel % 2 == 0  # such a kernel has no center: it is causal

    def steps(reach: int, spans: int = 1) -> Callable[[int], int]:
        return lambda n: -(-spans * (n - 1) // max(1, reach))

    def powers(spans: int) -> Callable[[int], int]:
        """The least number of layers, each dilated `kernel` times as much as the one before, that span all inputs."""
        return lambda n: next((l for l in range(64) if kernel**l >= spans * (n - 1) + 1), 0)

    def convolution(**options: Any) -> Convolutional:
        return Convolutional(d, layers=2, kernel=kernel, **options)  # dilation starts with the second layer

    cells = {cell: Recurrent(1, d, cell=cell, attention="none") for cell in ("rnn", "gru", "lstm")}
    local, near = Attention(d, heads=1, pattern=window(w)), steps(kernel - 1, 1 if even else 2)
    dilated, past = convolution(causal=even, dilation=kernel), convolution(causal=True, dilation=kernel)
    separable, kd = convolution(causal=even, separable=True), "k·n·d²"
    return (
        LayerKind(ATTENTION, Attention(d, heads=1), "n²·d + n·d²", "O(1)", "O(1)", lambda n: 1),
        LayerKind(RESTRICTED, local, "r·n·d + n·d²", "O(1)", "O(n/r)", steps(w)),
        *(LayerKind(c.upper(), s, "n·d²", "O(n)", "O(n)", lambda n: n - 1) for c, s in cells.items()),
        LayerKind("convolution", convolution(causal=even), kd, "O(1)", "O(n/k)", near),
        LayerKind("causal convolution", convolution(causal=True), kd, "O(1)", "O(n/k)", steps(kernel - 1)),
        LayerKind("dilated convolution", dilated, kd, "O(1)", "O(log_k n)", powers(2)),
        LayerKind("dilated causal convolution", past, kd, "O(1)", "O(log_k n)", powers(1)),
        LayerKind("separable convolution", separable, "k·n·d + n·d²", "O(1)", "O(n/k)", near),
    )


def compare(
    n: int = 1000, d: int = 512, kernel: int = 3, w: int = 2, measure: Sequence[int] | bool = False
) -> Comparison:
    """Layer types side by side at length n and width d.

    kernel: size of the convolutions. w: neighbors on each side in restricted attention.
    measure: True, or the lengths at which to time the layers on this machine, to fit the exponent of their growth.

    >>> compare(1000, 512)["GRU"].flops
    3145728000
    """
    for name, value in (("n", n), ("d", d), ("kernel", kernel)):
        require_positive(name, value)
    if w < 1:
        raise SpecError(f"w={w}: the window needs at least one neighbor on each side")
    if kernel < 2:
        raise SpecError(f"kernel={kernel}: a kernel of size 1 does not connect positions; use 2 or more")
    kinds = layer_kinds(d, kernel, w)
    lengths = (512, 1024, 2048, 4096) if measure is True else tuple(measure or ())
    measured = tuple(growth(kind, lengths) for kind in kinds) if lengths else ()
    rows = tuple(kind.at(n) for kind in kinds)
    return Comparison(n, d, kernel, w, rows, crossovers(d, kernel), measured)


def crossovers(d: int, kernel: int = 3) -> tuple[Crossover, ...]:
    """Lengths at which two layers have equal FLOPs: each is a·n² + b·n, so n = (b₂ − b₁)/(a₁ − a₂)."""

    def polynomial(flops: Callable[[int], int]) -> tuple[Fraction, Fraction]:
        """(a, b), from the values at n = 1 and n = 2."""
        a = Fraction(flops(2) - 2 * flops(1), 2)
        return a, flops(1) - a

    kinds = {k.name: k for k in layer_kinds(d, kernel)}
    costs = {name: polynomial(k.flops) for name, k in kinds.items() if name != RESTRICTED}
    total, core = costs[ATTENTION], polynomial(kinds[ATTENTION].core_flops)
    costs |= {"attention core": core, "its projections": (total[0] - core[0], total[1] - core[1])}
    others = ("RNN", "GRU", "LSTM", "convolution", "separable convolution")
    parts = [("attention core", "its projections"), ("attention core", "RNN")]
    result = []
    for first, second in (*parts, *((ATTENTION, other) for other in others)):
        (a, b), (a_2, b_2) = costs[first], costs[second]
        n = (b_2 - b) / (a - a_2)
        exact, widths = int(n) if n.denominator == 1 else float(n), n / d
        multiple = "d" if widths == 1 else f"{widths} d" if widths.denominator < 100 else ""
        result.append(Crossover(first, second, exact if n > 0 else None, multiple if n > 0 else ""))
    return tuple(result)


def growth(kind: LayerKind, lengths: Sequence[int], repeats: int = 10) -> Growth:
    """The layer timed at each length, best of several runs, and the slope of log time against log length."""
    if len(lengths) < 2:
        raise SpecError(f"measure={tuple(lengths)}: fitting an exponent needs at least two lengths")
    layer: Any = kind.spec.build().eval()
    if not isinstance(kind.spec, Attention):
        layer = layer.encoder if isinstance(kind.spec, Recurrent) else layer.layers[-1]
    with torch.no_grad():
        inputs = [torch.randn(1, n, kind.spec.d_model) for n in lengths]
        seconds = [time_call(partial(layer, x), "cpu", repeats, min) for x in inputs]
    flops = [kind.flops(n) for n in lengths]
    return Growth(kind.name, tuple(lengths), tuple(seconds), slope(lengths, seconds), slope(lengths, flops))
