"""A comparison of layer types: attention, restricted attention, recurrent and convolutional layers.

FLOPs are those of the declarations that are timed. The path length is the number of layers (for a recurrent layer:
of steps) after which every output depends on every input.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import torch

from ..errors import SpecError, nearest
from ..pattern import full, window
from ..spec import Attention, Convolutional, Recurrent, Spec
from ..spec.base import require_positive
from .analysis import core_of
from .declaration import build_tree
from .sizes import Numbers, Request
from .tables import Table
from .time import time_call
from .tree import Part

ATTENTION, RESTRICTED = "attention", "restricted attention"


@dataclass(frozen=True)
class LayerKind:
    """A layer type: its declaration, its complexity, the orders of its steps, and its path length at length n."""

    name: str
    spec: Spec
    complexity: str
    sequential_order: str
    path_order: str
    path_length: Callable[[int], int]

    def _tree(self, n: int) -> Part:
        return build_tree(Request(self.spec, n, n), Numbers())[0]

    def flops(self, n: int) -> int:
        """FLOPs of the matrix products of one layer over n positions."""
        tree = self._tree(n)
        match self.spec:
            case Recurrent():
                return tree["encoder"].total.flops  # the recurrent layer without embedding and head
            case Convolutional(layers=layers):
                return tree["layer"].total.flops // layers
        return tree.total.flops

    def core_flops(self, n: int) -> int:
        """FLOPs of scores and mixing; 0 if it is not attention."""
        return 0 if not isinstance(self.spec, Attention) else core_of(self._tree(n)).flops

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
class Comparison:
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

    def json(self, indent: int | None = None) -> str:
        return json.dumps(asdict(self), indent=indent, ensure_ascii=False)

    def tables(self) -> list[Table]:
        head = ("layer", "FLOPs", "complexity", "sequential steps", "order", "path length", "order")
        types = [
            (l.name, f"{l.flops:,}", l.complexity, f"{l.sequential_steps:,}", l.sequential_order,
             f"{l.path_length:,}", l.path_order, f"{l.training_values:,}", f"{l.decoding_values:,}")
            for l in self.layers
        ]  # fmt: skip
        title = f"one layer: n = {self.n}, d = {self.d}, kernel {self.kernel}, window {self.window}"
        crossings = [
            (c.first, c.second, "always" if c.n is None else f"{c.n:,.6g}", c.in_widths)
            for c in self.crossovers
        ]
        tables = [
            Table(title, (*head, "values saved to train", "values to decode"), types),
            Table("crossover lengths", ("more FLOPs", "than", "beyond n =", ""), crossings),
        ]
        if self.growth:
            lengths = (f"n = {n:,}" for n in self.growth[0].lengths)
            timed = [
                (g.name, f"{g.measured:.2f}", f"{g.predicted:.2f}", *(f"{1e3 * s:.3g} ms" for s in g.seconds))
                for g in self.growth
            ]
            heading = ("layer", "measured exponent", "predicted", *lengths)
            tables.append(Table("growth measured on this machine", heading, timed))
        return tables

    def __str__(self) -> str:
        return "\n\n".join(t.text() for t in self.tables())

    def __rich__(self) -> Any:
        from rich.console import Group

        return Group(*(t.rich() for t in self.tables()))

    def _repr_html_(self) -> str:
        return "".join(t.html() for t in self.tables())


def layer_kinds(d: int, kernel: int = 3, w: int = 2) -> tuple[LayerKind, ...]:
    """The layer types of width d, with this kernel size and w neighbors on each side of the window."""
    reach, even = max(1, kernel - 1), kernel % 2 == 0

    def steps_of(reached: int, spans: int = 1) -> Callable[[int], int]:
        return lambda n: _ceil_div(spans * (n - 1), reached)

    def powers(span: Callable[[int], int]) -> Callable[[int], int]:
        return lambda n: next((l for l in range(64) if kernel**l >= span(n)), 0) if kernel > 1 else 0

    near = steps_of(reach, 1 if even else 2)  # an even kernel has no center: it is causal
    both, past = powers(lambda n: 2 * n - 1), powers(lambda n: n)
    made = [
        LayerKind(ATTENTION, Attention(d, heads=1), "n²·d + n·d²", "O(1)", "O(1)", lambda n: 1),
    ]
    local = Attention(d, heads=1, pattern=window(w))
    made.append(LayerKind(RESTRICTED, local, "r·n·d + n·d²", "O(1)", "O(n/r)", steps_of(max(1, w))))
    for cell in ("rnn", "gru", "lstm"):
        spec = Recurrent(1, d, cell=cell, attention="none")
        made.append(LayerKind(cell.upper(), spec, "n·d²", "O(n)", "O(n)", lambda n: n - 1))
    for name, complexity, order, path, options in (
        ("convolution", "k·n·d²", "O(n/k)", near, {"causal": even}),
        ("causal convolution", "k·n·d²", "O(n/k)", steps_of(reach), {"causal": True}),
        ("dilated convolution", "k·n·d²", "O(log_k n)", both, {"causal": even, "dilation": kernel}),
        ("dilated causal convolution", "k·n·d²", "O(log_k n)", past, {"causal": True, "dilation": kernel}),
        ("separable convolution", "k·n·d + n·d²", "O(n/k)", near, {"causal": even, "separable": True}),
    ):
        layers = Convolutional(d, layers=2, kernel=kernel, **options)  # dilation starts with the second layer
        made.append(LayerKind(name, layers, complexity, "O(1)", order, path))
    return tuple(made)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


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
    rows = tuple(
        LayerCost(
            kind.name, kind.flops(n), kind.core_flops(n), n if kind.sequential_order == "O(n)" else 1,
            kind.path_length(n), *kind.values(n), kind.complexity, kind.sequential_order, kind.path_order,
        )
        for kind in kinds
    )  # fmt: skip
    lengths = (512, 1024, 2048, 4096) if measure is True else tuple(measure or ())
    measured = tuple(growth(kind, lengths) for kind in kinds) if lengths else ()
    return Comparison(n, d, kernel, w, rows, crossovers(d, kernel), measured)


def crossovers(d: int, kernel: int = 3) -> tuple[Crossover, ...]:
    """Lengths at which two layers have equal FLOPs: each is a·n² + b·n, so n = (b₂ − b₁)/(a₁ − a₂)."""
    by = {k.name: k for k in layer_kinds(d, kernel)}
    costs: dict[str, tuple[Fraction, Fraction]] = {
        name: _polynomial(k.flops) for name, k in by.items() if name != RESTRICTED
    }
    total, core = costs[ATTENTION], _polynomial(by[ATTENTION].core_flops)
    costs["its projections"] = (total[0] - core[0], total[1] - core[1])
    pairs = [("attention core", core, "its projections"), ("attention core", core, "RNN")]
    pairs += [
        (ATTENTION, total, name) for name in ("RNN", "GRU", "LSTM", "convolution", "separable convolution")
    ]
    result = []
    for first, (a, b), second in pairs:
        a_2, b_2 = costs[second]
        n = (b_2 - b) / (a - a_2)
        exact = int(n) if n.denominator == 1 else float(n)
        widths = n / d
        multiple = "d" if widths == 1 else f"{widths} d" if widths.denominator < 100 else ""
        result.append(Crossover(first, second, exact if n > 0 else None, multiple if n > 0 else ""))
    return tuple(result)


def _polynomial(flops: Callable[[int], int]) -> tuple[Fraction, Fraction]:
    """(a, b) of a·n² + b·n, from its values at n = 1 and n = 2."""
    one, two = flops(1), flops(2)
    a = Fraction(two - 2 * one, 2)
    return a, one - a


def growth(kind: LayerKind, lengths: Sequence[int], repeats: int = 10) -> Growth:
    """The layer timed at each length, best of several runs, and the slope of log time against log length."""
    if len(lengths) < 2:
        raise SpecError(f"measure={tuple(lengths)}: fitting an exponent needs at least two lengths")
    spec: Any = kind.spec
    model: Any = spec.build().eval()
    layer = {Recurrent: lambda: model.encoder, Convolutional: lambda: model.layers[-1]}.get(
        type(spec), lambda: model
    )()
    with torch.no_grad():
        inputs = [torch.randn(1, n, spec.d_model) for n in lengths]
        seconds = [time_call(partial(layer, x), "cpu", repeats, min) for x in inputs]
    flops = [kind.flops(n) for n in lengths]
    return Growth(kind.name, tuple(lengths), tuple(seconds), slope(lengths, seconds), slope(lengths, flops))


def slope(xs: Sequence[int | float], ys: Sequence[int | float]) -> float:
    """The exponent p of y = c · xᵖ, by least squares on the logarithms.

    >>> round(slope([1, 2, 4], [3, 12, 48]), 6)
    2.0
    """
    x, y = [math.log(v) for v in xs], [math.log(v) for v in ys]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y)) / sum((a - mean_x) ** 2 for a in x)
