"""Layer types compared: attention, restricted attention, recurrent and convolutional layers, priced and timed.

Operations are those of `price`, of the very declarations that are timed. A path is counted in layers, of a
recurrent layer in steps of its state: how many until every output depends on every input.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SpecError, nearest
from ..pattern import full, window
from ..spec import Attention, Convolutional, Recurrent, Spec
from .analysis import core_of
from .declaration import need_whole, read
from .sizes import Given, Numbers

ATTENTION, RESTRICTED = "attention", "restricted attention"


@dataclass(frozen=True)
class Kind:
    """A layer type: its declaration, its order of work, its steps that wait, and its path at length n."""

    name: str
    spec: Spec
    order: str  # of work
    sequential_order: str
    path_order: str
    sequential: Callable[[int], int]
    path: Callable[[int], int]

    def operations(self, n: int) -> int:
        """Matrix products of one layer over n positions."""
        tree, _ = read(Given(self.spec, n, n), Numbers())
        match self.spec:
            case Recurrent():
                return tree["encoder"].total.operations  # one layer of cells, without the words around it
            case Convolutional(layers=layers):
                return tree["layer"].total.operations // layers
        return tree.total.operations

    def core(self, n: int) -> int:
        """Scores and mixing alone."""
        return core_of(read(Given(self.spec, n, n), Numbers())[0]).operations

    def space(self, n: int) -> tuple[int, int]:
        """Values that carry the sequence: all that training keeps, and what the next position needs.

        A recurrent layer keeps n states and goes on from one (an LSTM's is twice as wide); attention keeps q, k, v,
        weights and outputs, and goes on from keys and values; a convolution from the inputs under its kernel.
        """
        match self.spec:
            case Recurrent(d_model=d, cell=cell):
                state = 2 * d if cell == "lstm" else d
                return n * state, state
            case Convolutional(d_model=d, kernel=k, dilation=dilation):
                return n * d, min(n, (k - 1) * dilation) * d
            case Attention(d_model=d, pattern=pattern):
                near = n if isinstance(pattern, full) else int(pattern.row_counts(n).max())
                return 4 * n * d + pattern.count(n), 2 * near * d
        raise AssertionError(self.spec)


@dataclass(frozen=True)
class LayerType:
    """A row of the comparison."""

    name: str
    operations: int
    core: int  # scores and mixing, of attention
    sequential: int
    path: int
    kept: int  # values that carry the sequence while training
    state: int  # values that the next position needs
    order: str
    sequential_order: str
    path_order: str


@dataclass(frozen=True)
class Crossing:
    """The length from which on the first costs more than the second; None where it does at every length."""

    first: str
    second: str
    n: int | float | None
    in_widths: str  # n as a multiple of d: "2 d"


@dataclass(frozen=True)
class Growth:
    """Time against length on this machine: the exponent fitted, and that of the operations over the same lengths."""

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
    layers: tuple[LayerType, ...]
    crossings: tuple[Crossing, ...]
    growth: tuple[Growth, ...] = ()

    def __getitem__(self, name: str) -> LayerType:
        by_name = {l.name: l for l in self.layers}
        if name not in by_name:
            raise SpecError(f"no layer type {name!r} was compared; {nearest(name, by_name)}")
        return by_name[name]

    def json(self, indent: int | None = None) -> str:
        return json.dumps(asdict(self), indent=indent, ensure_ascii=False)

    def tables(self) -> list[tuple[str, list[tuple[str, ...]]]]:
        """(title, lines) of each table; the first line is its heading."""
        types: list[tuple[str, ...]] = [
            (
                "layer",
                "operations",
                "order",
                "waits for",
                "order",
                "path",
                "order",
                "kept to train",
                "to go on",
            )
        ]
        types += [
            (
                l.name,
                f"{l.operations:,}",
                l.order,
                f"{l.sequential:,}",
                l.sequential_order,
                f"{l.path:,}",
                l.path_order,
                f"{l.kept:,}",
                f"{l.state:,}",
            )
            for l in self.layers
        ]
        cross: list[tuple[str, ...]] = [("costs more", "than", "from n =", "")]
        cross += [
            (c.first, c.second, "always" if c.n is None else f"{c.n:,.6g}", c.in_widths)
            for c in self.crossings
        ]
        out: list[tuple[str, list[tuple[str, ...]]]] = [
            (f"one layer: n = {self.n}, d = {self.d}, kernel {self.kernel}, window {self.window}", types),
            ("crossings", cross),
        ]
        if self.growth:
            timed: list[tuple[str, ...]] = [
                ("layer", "measured exponent", "predicted", *(f"n = {n:,}" for n in self.growth[0].lengths))
            ]
            timed += [
                (
                    g.name,
                    f"{g.measured:.2f}",
                    f"{g.predicted:.2f}",
                    *(f"{1e3 * s:.3g} ms" for s in g.seconds),
                )
                for g in self.growth
            ]
            out.append(("growth on this machine", timed))
        return out

    def __str__(self) -> str:
        return "\n\n".join(f"{title}\n{_aligned(lines)}" for title, lines in self.tables())

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table

        shown: list[Any] = []
        for title, (head, *lines) in self.tables():
            table = Table(*head, title=title, title_justify="left", box=None, header_style="bold")
            for line in lines:
                table.add_row(*line)
            shown += [table, ""]
        return Group(*shown)

    def _repr_html_(self) -> str:
        def row(cells: tuple[str, ...], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{c}</{tag}>" for c in cells) + "</tr>"

        return "".join(
            f"<p>{title}</p><table>{row(head, 'th')}{''.join(row(l, 'td') for l in lines)}</table>"
            for title, (head, *lines) in self.tables()
        )


def _aligned(lines: list[tuple[str, ...]]) -> str:
    wide = [max(len(line[k]) for line in lines) for k in range(len(lines[0]))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(line, wide, strict=True)).rstrip() for line in lines
    )


def kinds(d: int, kernel: int = 3, w: int = 2) -> tuple[Kind, ...]:
    """The layer types of width d, with so many taps of a convolution and w neighbours each side of a window."""
    one, steps = (lambda n: 1), (lambda n: n)
    near = max(1, kernel - 1)

    def cell(name: str, word: str) -> Kind:
        spec = Recurrent(1, d, cell=word, attention="none")
        return Kind(name, spec, "n·d²", "O(n)", "O(n)", steps, lambda n: n - 1)

    def conv(name: str, order: str, path_order: str, path: Callable[[int], int], **how: Any) -> Kind:
        spec = Convolutional(d, layers=2, kernel=kernel, **how)  # the second of them is dilated, where any is
        return Kind(name, spec, order, "O(1)", path_order, one, path)

    def dilated(reach: Callable[[int], int]) -> Callable[[int], int]:
        return lambda n: next((l for l in range(64) if kernel**l >= reach(n)), 0) if kernel > 1 else 0

    def centred(n: int) -> int:
        return _up(2 * (n - 1), near)

    def causally(n: int) -> int:
        return _up(n - 1, near)

    centre = {"causal": kernel % 2 == 0}  # an even kernel has no middle
    middle = causally if kernel % 2 == 0 else centred
    return (
        Kind(ATTENTION, Attention(d, heads=1), "n²·d + n·d²", "O(1)", "O(1)", one, one),
        Kind(
            RESTRICTED,
            Attention(d, heads=1, pattern=window(w)),
            "r·n·d + n·d²",
            "O(1)",
            "O(n/r)",
            one,
            lambda n: _up(n - 1, max(1, w)),
        ),
        cell("RNN", "rnn"),
        cell("GRU", "gru"),
        cell("LSTM", "lstm"),
        conv("convolution", "k·n·d²", "O(n/k)", middle, **centre),
        conv("causal convolution", "k·n·d²", "O(n/k)", causally, causal=True),
        conv(
            "dilated convolution",
            "k·n·d²",
            "O(log_k n)",
            dilated(lambda n: 2 * n - 1),
            dilation=kernel,
            **centre,
        ),
        conv(
            "dilated causal convolution",
            "k·n·d²",
            "O(log_k n)",
            dilated(lambda n: n),
            causal=True,
            dilation=kernel,
        ),
        conv("separable convolution", "k·n·d + n·d²", "O(n/k)", middle, separable=True, **centre),
    )


def _up(a: int, b: int) -> int:
    return -(-a // b)


def compare(
    n: int = 1000, d: int = 512, kernel: int = 3, w: int = 2, measure: Sequence[int] | bool = False
) -> Comparison:
    """Layer types side by side at length n and width d; `measure` times them on this machine.

    measure: True, or the lengths to time. The fitted exponent stands beside that of the operations.

    >>> compare(1000, 512)["GRU"].operations
    3145728000
    """
    for name, value in (("n", n), ("d", d), ("kernel", kernel)):
        need_whole(name, value)
    if w < 1:
        raise SpecError(
            f"w={w}: a window needs at least one neighbour each side, or nothing is ever connected"
        )
    if kernel < 2:
        raise SpecError(f"kernel={kernel}: a kernel of one tap connects nothing; use 2 or more")
    types = kinds(d, kernel, w)
    rows = tuple(
        LayerType(
            t.name,
            t.operations(n),
            t.core(n) if isinstance(t.spec, Attention) else 0,
            t.sequential(n),
            t.path(n),
            *t.space(n),
            t.order,
            t.sequential_order,
            t.path_order,
        )
        for t in types
    )
    lengths = (512, 1024, 2048, 4096) if measure is True else tuple(measure or ())
    return Comparison(
        n,
        d,
        kernel,
        w,
        rows,
        crossings(d, kernel),
        tuple(growth(t, lengths) for t in types) if lengths else (),
    )


def crossings(d: int, kernel: int = 3) -> tuple[Crossing, ...]:
    """Lengths at which two costs are equal: each is a·n² + b·n, so n = (b₂ − b₁)/(a₁ − a₂)."""
    by = {k.name: k for k in kinds(d, kernel)}
    costs: dict[str, tuple[Fraction, Fraction]] = {
        name: _polynomial(k.operations) for name, k in by.items() if name != RESTRICTED
    }
    whole, core = costs[ATTENTION], _polynomial(by[ATTENTION].core)
    costs["its projections"] = (whole[0] - core[0], whole[1] - core[1])
    pairs = [("attention's core", core, "its projections"), ("attention's core", core, "RNN")]
    pairs += [
        (ATTENTION, whole, name) for name in ("RNN", "GRU", "LSTM", "convolution", "separable convolution")
    ]
    found = []
    for first, (a, b), second in pairs:
        a_2, b_2 = costs[second]
        n = (b_2 - b) / (a - a_2)
        exact = int(n) if n.denominator == 1 else float(n)
        widths = n / d
        told = "d" if widths == 1 else f"{widths} d" if widths.denominator < 100 else ""
        found.append(Crossing(first, second, exact if n > 0 else None, told if n > 0 else ""))
    return tuple(found)


def _polynomial(operations: Callable[[int], int]) -> tuple[Fraction, Fraction]:
    """(a, b) of a·n² + b·n, from its values at 1 and 2."""
    one, two = operations(1), operations(2)
    a = Fraction(two - 2 * one, 2)
    return a, one - a


def growth(kind: Kind, lengths: Sequence[int], repeats: int = 3) -> Growth:
    """The layer timed at each length, the best of some runs, and the slope of log time against log length."""
    if len(lengths) < 2:
        raise SpecError(f"lengths={tuple(lengths)}: an exponent needs at least two")
    layer, width = _layer(kind.spec)
    seconds = [_time(layer, torch.randn(1, n, width), repeats) for n in lengths]
    operations = [kind.operations(n) for n in lengths]
    return Growth(
        kind.name, tuple(lengths), tuple(seconds), slope(lengths, seconds), slope(lengths, operations)
    )


def _layer(spec: Any) -> tuple[nn.Module, int]:
    """One layer of this declaration, ready to run, and its width."""
    module: Any = spec.build().eval()
    match spec:
        case Recurrent():
            return module.encoder, spec.d_model
        case Convolutional():
            return module.layers[-1], spec.d_model
    return module, spec.d_model


@torch.no_grad()
def _time(layer: nn.Module, x: Tensor, repeats: int) -> float:
    """The best of at least so many runs, and of as many as fit into a fifth of a second."""
    layer(x)
    best, runs, until = math.inf, 0, time.perf_counter() + 0.2
    while runs < repeats or time.perf_counter() < until:
        start = time.perf_counter()
        layer(x)
        best, runs = min(best, time.perf_counter() - start), runs + 1
    return best


def slope(xs: Sequence[int | float], ys: Sequence[int | float]) -> float:
    """The exponent p of y = c · xᵖ, by least squares of the logarithms.

    >>> round(slope([1, 2, 4], [3, 12, 48]), 6)
    2.0
    """
    x, y = [math.log(v) for v in xs], [math.log(v) for v in ys]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y)) / sum((a - mean_x) ** 2 for a in x)
