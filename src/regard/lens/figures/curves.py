"""Curves: learning rates, gradient flow, cost against length, training losses, saturation of softmax."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...formulas import softmax_jacobian_norm
from ...schedule import Schedule, warmup_cosine
from ..recorder import Recorder
from . import style


def learning_rates(*schedules: Schedule, steps: int | None = None, dark: bool = False) -> Any:
    """The rate of each step; for warm-up and cosine the peak, the middle of the decay and the end are marked."""
    last = steps or max([getattr(s, "total", 0) or 3 * getattr(s, "warmup", 100) for s in schedules])
    figure = style.canvas(6.5, 3.6, dark)
    ax = style.axes(figure, dark=dark, title="learning rate", x="step", y="rate")
    along = sorted({round(last * i / 600) for i in range(601)})
    for number, schedule in enumerate(schedules):
        style.line(ax, number, along, [schedule(s) for s in along], repr(schedule))
        if isinstance(schedule, warmup_cosine):
            middle = (schedule.warmup + schedule.total) // 2
            for step in (schedule.warmup, middle, schedule.total):
                ax.plot([step], [schedule(step)], "o", color=style.COLORS[number % 6], markersize=4)
                text = f"{schedule(step):.3g} at {step:,}"
                ax.annotate(
                    text,
                    (step, schedule(step)),
                    xytext=(4, 6),
                    textcoords="offset points",
                    fontsize=7,
                    color=style.theme(dark).ink,
                    ha="right" if step == schedule.total else "left",
                )
    ax.set_ylim(bottom=0)
    style.legend(ax, dark, loc="upper right")
    return figure


def gradient_flow(norms: Mapping[str, Sequence[int | float]], *, dark: bool = False) -> Any:
    """The gradient norm of each layer, bottom first, one line per named stack."""
    figure = style.canvas(6.0, 3.6, dark)
    ax = style.axes(figure, dark=dark, title="gradient norm by layer", x="layer (0 is the bottom)", y="norm")
    for number, (name, values) in enumerate(norms.items()):
        style.line(ax, number, range(len(values)), values, name, marker="o", markersize=3)
    if all(v > 0 for values in norms.values() for v in values):
        ax.set_yscale("log")
    style.legend(ax, dark)
    return figure


def recorded_gradients(recorder: Recorder, *, dark: bool = False) -> Any:
    """The gradient norm of each layer at the first and the last recorded step, before and after clipping."""
    chosen: dict[str, list[float]] = {}
    for name, recorded in (("before clipping", recorder.gradients), ("after clipping", recorder.clipped)):
        for step, norms in [recorded[0], recorded[-1]] if recorded else []:
            chosen[f"step {step}, {name}"] = list(norms.values())
    return gradient_flow(chosen, dark=dark)


def training_curves(recorder: Recorder, *, dark: bool = False) -> Any:
    """Each series of losses, and the smallest loss it can reach."""
    figure = style.canvas(6.5, 3.8, dark)
    ax = style.axes(figure, dark=dark, title="loss", x="step", y="loss")
    for number, (name, losses) in enumerate(recorder.losses.items()):
        style.line(ax, number, [s for s, _ in losses], [v for _, v in losses], name)
        if name in recorder.floors:
            floor = recorder.floors[name]
            color = style.COLORS[number % 6]
            ax.axhline(floor, color=color, linewidth=0.9, linestyle=(0, (1, 2)))
            ax.annotate(
                f"floor {floor:.4g}", (1, floor), xycoords=("axes fraction", "data"), fontsize=7, ha="right",
                va="bottom", color=style.theme(dark).ink,
            )  # fmt: skip
    ax.set_ylim(bottom=0)
    style.legend(ax, dark)
    return figure


def cost_curves(
    work: Mapping[str, Mapping[int, int | float]],
    *,
    x: str = "length n",
    y: str = "FLOPs of one layer",
    crossings: Mapping[str, int | float] | None = None,
    dark: bool = False,
) -> Any:
    """The cost of each layer type against n (or d), on two logarithmic axes, with the crossings marked."""
    figure = style.canvas(6.5, 4.2, dark)
    ax = style.axes(figure, dark=dark, title=f"{y} against {x}", x=x, y=y)
    for number, (name, values) in enumerate(work.items()):
        style.line(ax, number, list(values), list(values.values()), name, marker=".")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    for name, position in (crossings or {}).items():
        ax.axvline(position, color=style.theme(dark).faint, linewidth=0.8)
        ax.annotate(
            name, (position, 0.02), xycoords=("data", "axes fraction"), rotation=90, fontsize=7,
            color=style.theme(dark).ink, ha="right",
        )  # fmt: skip
    style.legend(ax, dark)
    return figure


def saturation(
    widths: Sequence[int] = (16, 64, 256, 512),
    keys: int = 64,
    samples: int = 2000,
    seed: int = 0,
    *,
    dark: bool = False,
) -> Any:
    """For standard normal queries and keys: the largest weight, and the median and mean of the squared norm of
    softmax's Jacobian, against d, scaled and not."""
    noise = torch.Generator().manual_seed(seed)
    results: dict[str, dict[str, list[float]]] = {"q·k / √d": {}, "q·k": {}}
    for d in widths:
        scores = torch.randn(samples, 1, d, generator=noise) @ torch.randn(samples, d, keys, generator=noise)
        for name, factor in (("q·k / √d", d**-0.5), ("q·k", 1.0)):
            a = (factor * scores[:, 0]).softmax(-1)
            norm = softmax_jacobian_norm(a).square()
            for kind, value in (("top", a.amax(-1).mean()), ("median", norm.median()), ("mean", norm.mean())):
                results[name].setdefault(kind, []).append(float(value))
    figure = style.canvas(8.5, 3.8, dark)
    cells = style.grid(figure, 1, 2)
    title = f"largest of {keys} weights"
    left = style.axes(figure, cells[0], dark=dark, title=title, x="width d", y="mean over samples")
    right = style.axes(figure, cells[1], dark=dark, title="‖J‖² of softmax", x="width d")
    for number, (name, values) in enumerate(results.items()):
        style.line(left, number, widths, values["top"], name, marker="o")
        style.line(right, 2 * number, widths, values["median"], f"{name}, median", marker="o")
        style.line(right, 2 * number + 1, widths, values["mean"], f"{name}, mean", marker="s")
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        style.legend(ax, dark)
    left.set_ylim(0, 1.02)
    right.set_yscale("log")
    return figure
