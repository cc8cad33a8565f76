"""Where memory and time go: the peak as a treemap, memory over a step, and kernels under the roofline."""

from typing import Any

from ...costs.memory.report import KINDS, OUTSIDE, Alive, Peak
from ...costs.time import Estimate
from ...machine import Roofline, readable
from . import style

MAX_RECTANGLES = 14  # of one kind; smaller modules are one rectangle


def _peak(cost: Any) -> Peak:
    return cost if isinstance(cost, Peak) else cost.memory.peak


def _color(kind: str) -> str:
    return (*style.COLORS, "#5B5B5B", "#8C6BB1", "#A6761D", "#B3C7D6")[KINDS.index(kind)]


def memory_treemap(cost: Any, *, dark: bool = False) -> Any:
    """What is allocated at the peak: a column for each kind, a rectangle for each module; areas are bytes."""
    peak = _peak(cost)
    total, figure = max(sum(a.bytes for a in peak.alive), 1), style.canvas(8.0, 4.6, dark)
    ax = style.axes(figure, dark=dark, title=f"{readable(peak.bytes)} at the peak, {peak.moment}")
    left = 0.0
    for kind, size in peak.by_kind().items():
        width, bottom = size / total, 0.0
        for part in _largest([a for a in peak.alive if a.kind == kind]):
            height = part.bytes / size
            ax.bar(
                left,
                height,
                width,
                bottom,
                align="edge",
                color=_color(kind),
                edgecolor=style.theme(dark).paper,
            )
            label = f"{part.path or OUTSIDE}\n{readable(part.bytes)}"
            if width * height > 0.012 and width > 0.07 and height > 0.05:
                room = int(width * 95)
                text = "\n".join(style.shown(line, max(room, 6)) for line in label.split("\n"))
                ax.text(
                    left + width / 2,
                    bottom + height / 2,
                    text,
                    ha="center",
                    va="center",
                    fontsize=6,
                    color="white",
                )
            bottom += height
        if width > 0.03:
            ax.text(left + width / 2, 1.01, f"{kind} {width:.0%}", ha="center", va="bottom", fontsize=6.5,
                    color=style.theme(dark).ink, rotation=0 if width > 0.12 else 25)  # fmt: skip
        left += width
    ax.set(xlim=(0, 1), ylim=(0, 1.1), xticks=[], yticks=[])
    for side in ax.spines.values():
        side.set_visible(False)
    return figure


def _largest(parts: list[Alive]) -> list[Alive]:
    """The largest modules of a kind, and the rest as one."""
    rest = sum(a.bytes for a in parts[MAX_RECTANGLES:])
    more = [Alive(rest, parts[0].kind, f"{len(parts) - MAX_RECTANGLES} more")] if rest else []
    return [*parts[:MAX_RECTANGLES], *more]


def memory_timeline(cost: Any, *, dark: bool = False) -> Any:
    """Memory by kind over a step, from the first operation to the last; the peak is marked."""
    peak = _peak(cost)
    figure = style.canvas(8.0, 4.0, dark)
    ax = style.axes(figure, dark=dark, title="memory over a step", x="operations, in order", y="GiB")
    kinds = [k for k in KINDS if any(at.get(k) for _, at in peak.timeline)]
    heights = [[at.get(k, 0) / 2**30 for _, at in peak.timeline] for k in kinds]
    along = range(len(peak.timeline))
    ax.stackplot(along, *heights, labels=kinds, colors=[_color(k) for k in kinds], linewidth=0)
    sums = [sum(column) for column in zip(*heights)]
    top = max(along, key=lambda i: sums[i])
    ax.annotate(f"{readable(peak.bytes)}: {peak.operation}", (top, sums[top]), xytext=(0, 6), fontsize=7,
                textcoords="offset points", ha="center", color=style.theme(dark).ink)  # fmt: skip
    phases = [phase for phase, _ in peak.timeline]
    for start in [i for i in along if i and phases[i] != phases[i - 1] and phases[i] not in phases[:i]]:
        ax.axvline(start, color=style.theme(dark).ink, linewidth=0.6, linestyle=(0, (2, 2)))
        ax.text(start, 1.0, f" {phases[start]}", transform=ax.get_xaxis_transform(), fontsize=7, va="top",
                color=style.theme(dark).ink)  # fmt: skip
    ax.set(xlim=(0, len(peak.timeline)), ylim=(0, 1.15 * max(sums)))
    style.legend(ax, dark, loc="upper right", ncols=2)
    return figure


def roofline(estimate: Estimate, machine: Roofline, *, dark: bool = False) -> Any:
    """The modules of a run under the roofline: the estimated FLOP/s of their kernels against FLOP/byte."""
    figure = style.canvas(7.0, 4.4, dark)
    ax = style.axes(figure, dark=dark, title=machine.machine, x="FLOP/byte", y="FLOP/s")
    parts = [p for p in estimate.parts if p.flops and p.bytes]
    intensities = [p.flops / p.bytes for p in parts] or [1.0]
    along = [min(intensities) / 30 * 10 ** (k / 20) for k in range(100)]
    for number, (dtype, rate) in enumerate(machine.flops_per_s.items()):
        style.line(ax, number, along, [min(rate, x * machine.bytes_per_s) for x in along], dtype)
    for p in parts:
        at = (p.flops / p.bytes, p.flops / p.seconds)
        size = 3 + 9 * (p.seconds / estimate.parts[0].seconds) ** 0.5
        ax.plot(*at, "o", color=style.theme(dark).ink, markersize=size, alpha=0.6)
    named: dict[str, Any] = {f"{p.flops / p.bytes:.1g}": p for p in reversed(parts[:8])}
    for p in named.values():
        ax.annotate(style.shown(p.path or OUTSIDE, 28), (p.flops / p.bytes, p.flops / p.seconds), fontsize=6,
                    xytext=(4, -8), textcoords="offset points", color=style.theme(dark).ink)  # fmt: skip
    ax.set(xscale="log", yscale="log")
    style.legend(ax, dark, loc="lower right")
    return figure
