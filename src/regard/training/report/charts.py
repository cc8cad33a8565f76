"""Line charts as SVG markup, styled by the page that contains them."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 460, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 34
MAX_POINTS = 500  # per line

Number = int | float
Points = Sequence[tuple[Number, Number]]


@dataclass(frozen=True)
class Line:
    """One line of a chart; `dots` marks each of its points."""

    name: str
    points: Points
    dots: bool = False


def chart(title: str, lines: Sequence[Line], *, x: str = "update", log: bool = False) -> str:
    """A chart with title, axes and legend; an empty string where there is nothing to draw."""
    drawn = [Line(one.name, _thinned(_finite(one.points, log)), one.dots) for one in lines]
    drawn = [one for one in drawn if one.points]
    if not drawn:
        return ""
    xs = [p[0] for one in drawn for p in one.points]
    ys = [math.log10(p[1]) if log else p[1] for one in drawn for p in one.points]
    across = _Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    bottom = min(ys) if log else _floor(min(ys), max(ys))
    up = _Axis(bottom, max(ys), HEIGHT - BOTTOM, TOP)
    parts = [*_grid(across, up, log), *(_line(i, one, across, up, log) for i, one in enumerate(drawn))]
    parts.append(
        f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">'
        f"{html.escape(x)}</text>"
    )
    described = ", ".join(
        f"{one.name} from {_format(one.points[0][1])} to {_format(one.points[-1][1])}" for one in drawn
    )
    legend = "".join(
        f'<span class="line-{i}"><i></i>{html.escape(one.name)}</span>' for i, one in enumerate(drawn)
    )
    return (
        f'<figure><figcaption>{html.escape(title)} <span class="legend">{legend}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(f"{title}: {described}")}">'
        f"{''.join(parts)}</svg></figure>"
    )


@dataclass(frozen=True)
class _Axis:
    """Maps numbers to coordinates: low to `start`, high to `end`."""

    low: Number
    high: Number
    start: Number
    end: Number

    def at(self, value: Number) -> float:
        span = self.high - self.low or 1.0
        return round(self.start + (value - self.low) / span * (self.end - self.start), 1)


def ticks(low: Number, high: Number, about: int = 5) -> list[Number]:
    """Round numbers from low to high, 1, 2 or 5 times a power of ten apart.

    >>> ticks(0, 1370)
    [0.0, 500.0, 1000.0]
    """
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    power = 10.0 ** math.floor(math.log10(span / about))
    step = next(k * power for k in (1, 2, 5, 10) if span / (k * power) <= about)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def decades(low: Number, high: Number) -> list[Number]:
    """Logarithms of 1, 2 and 5 times the powers of ten from 10^low to 10^high; in a wide range of the powers alone.

    >>> [round(10**x, 6) for x in decades(-0.8, 0.4)]
    [0.2, 0.5, 1.0, 2.0]
    """
    powers = range(math.floor(low), math.ceil(high) + 1)
    leads = (1, 2, 5) if high - low < 2.5 else (1,)
    found = [power + math.log10(lead) for power in powers for lead in leads]
    inside = [x for x in found if low - 1e-9 <= x <= high + 1e-9]
    return inside if len(inside) > 2 else [math.log10(x) for x in ticks(10**low, 10**high) if x > 0]


def _grid(across: _Axis, up: _Axis, log: bool) -> list[str]:
    parts = []
    for value in decades(up.low, up.high) if log else ticks(up.low, up.high):
        y = up.at(value)
        label = _format(10**value if log else value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5}" text-anchor="end">{label}</text>')
    for value in ticks(across.low, across.high):
        at = across.at(value)
        parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(
            f'<text class="tick" x="{at}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{_format(value)}</text>'
        )
    return parts


def _line(i: int, one: Line, across: _Axis, up: _Axis, log: bool) -> str:
    points = [(across.at(x), up.at(math.log10(y) if log else y)) for x, y in one.points]
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
    dots = "".join(f'<circle cx="{x:g}" cy="{y:g}" r="2.5"/>' for x, y in points)
    return f'<g class="line-{i}"><path d="{path}"/>{dots if one.dots or len(points) == 1 else ""}</g>'


def _finite(points: Points, log: bool) -> list[tuple[Number, Number]]:
    return [(x, y) for x, y in points if math.isfinite(y) and (y > 0 or not log)]


def _thinned(points: Points) -> Points:
    """At most MAX_POINTS of them: each the mean of its neighbors, the last unchanged."""
    if len(points) <= MAX_POINTS:
        return points
    each = -(-len(points) // (MAX_POINTS - 1))
    groups = [points[i : i + each] for i in range(0, len(points) - 1, each)]
    means = [(sum(x for x, _ in s) / len(s), sum(y for _, y in s) / len(s)) for s in groups]
    return [*means, points[-1]]


def _floor(low: Number, high: Number) -> Number:
    """Zero, where the line still takes at least half of the height."""
    return 0.0 if 0 <= low <= 0.5 * high else low


def _format(value: Number) -> str:
    """
    >>> _format(12000.0), _format(0.0002), _format(3.5), _format(0.0)
    ('12k', '0.0002', '3.5', '0')
    """
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * (10 if unit == "k" else 1):
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"
