"""Which inputs an output depends on after several layers: L35, L59."""

import torch
from torch import Tensor

from ..controls import with_changed_call
from ..harness import Harness
from ..law import Case, Law, Trial
from ..measurement import Measurement, compare, excess, require, worst
from .masks import positions_out, sequence_lengths


def receptive_field(harness: Harness, c: Case) -> Measurement:
    """After L layers x ← x + f(x), the dependencies are the boolean power (I + allowed)^L."""
    n, d = c.n, c.d_k
    allowed = (harness.rand(n, n) < 0.35) | torch.eye(n, dtype=torch.bool, device=harness.device)
    if c.near:
        positions = torch.arange(n, device=harness.device)
        allowed = (positions[:, None] - positions).abs() <= 1
    x = harness.randn(1, 1, n, d).requires_grad_()
    y = x
    for _ in range(c.layers):
        y = y + harness.attend(y, y, y, allowed=allowed)
    got = torch.stack(
        [torch.autograd.grad(y[0, 0, t].sum(), x, retain_graph=True)[0][0, 0].abs().sum(-1) for t in range(n)]
    )
    reach = torch.linalg.matrix_power(allowed.double(), c.layers) > 0
    hidden, lost = (got != 0) & ~reach, (got == 0) & reach
    # In float32 a product of small weights may vanish, so that only a masked input that has an effect is a fault.
    wrong = (hidden | lost if harness.dtype == torch.float64 else hidden).nonzero()
    i, j = wrong[0].tolist() if len(wrong) else (0, 0)
    keys = int(allowed.sum(-1).max())
    return worst(
        require(
            f"after {_layers(c)}: {_dependence_error(got, i, j)}",
            not len(wrong),
        ),
        excess(
            "an output depends on more than (k + 1)^L inputs", (got != 0).sum(-1) - min(n, keys**c.layers)
        ),
    )


def window_reach(harness: Harness, c: Case) -> Measurement:
    """After L layers of a window (before, after), an output depends on inputs within L·before and L·after only."""
    model = harness.model
    assert model.window is not None and model.layers is not None
    before, after = (model.layers * reach for reach in model.window)
    n, t = c.n, int(harness.randint(c.n))
    x, context = harness.sequence(c.b, n), harness.context(c.b, n)
    i = torch.arange(n, device=harness.device)
    far = (i < t - before) | (i > t + after)
    other = harness.changed(x)
    outside = torch.where(far[:, None] if x.is_floating_point() else far, other, x)
    with torch.no_grad():
        o = harness.run(x, context)[:, t]
        measurements = [
            compare(
                f"output {t} after inputs beyond its receptive field were changed",
                harness.run(outside, context)[:, t],
                o,
            )
        ]
        for j in _inside(harness, max(0, t - before), min(n - 1, t + after)):
            changed = x.clone()
            changed[:, j] = other[:, j]
            change = (harness.run(changed, context)[:, t] - o).abs().amax()
            measurements.append(
                require(f"output {t} does not depend on input {j}, inside its receptive field", change > 0)
            )
    return worst(*measurements)


def _inside(harness: Harness, first: int, last: int) -> list[int]:
    """The edges of a receptive field and some positions between them."""
    between = [first + 1 + int(i) for i in harness.randperm(max(0, last - first - 1))[:3]]
    return [*dict.fromkeys((first, last)), *between]


def function_window_reach(harness: Harness, c: Case) -> Measurement:
    """The window of a function: exactly the keys −after ≤ i − j ≤ before, and L times that after L layers."""
    n, reach = c.n, (c.before, c.after)
    x = harness.randn(1, 1, n, c.d_k).requires_grad_()
    y = x
    for _ in range(c.layers):
        y = y + harness.attend(y, y, y, window=reach)
    got = torch.stack(
        [torch.autograd.grad(y[0, 0, t].sum(), x, retain_graph=True)[0][0, 0].abs().sum(-1) for t in range(n)]
    )
    distance = torch.arange(n, device=harness.device)[:, None] - torch.arange(n, device=harness.device)
    want = (distance <= c.layers * c.before) & (-distance <= c.layers * c.after)
    wrong = ((got != 0) != want).nonzero()
    i, j = wrong[0].tolist() if len(wrong) else (0, 0)
    return require(
        f"window {reach}, {_layers(c)}: {_dependence_error(got, i, j)}",
        not len(wrong),
    )


def _dependence_error(gradients: Tensor, i: int, j: int) -> str:
    if bool(gradients[i, j] != 0):
        return f"output {i} depends on input {j}, expected no dependence"
    return f"output {i} does not depend on input {j}, expected a dependence"


def _layers(c: Case) -> str:
    return "1 layer" if c.layers == 1 else f"{c.layers} layers"


def _around_window(harness: Harness) -> tuple[int, ...]:
    """Lengths in which a buffer of the window's size is filled more than twice, where they are short."""
    lengths, model = sequence_lengths(harness, 3), harness.model
    longest = 2 * sum(model.window or ()) + 5
    more = model.length is None and max(lengths, default=0) < longest <= min(70, model.max_length)
    return (*lengths, longest) if more else lengths


def _off_by_one_window():
    def change(q, k, v, options):
        if "window" in options:
            options["window"] = (options["window"][0] + 1, options["window"][1])
        return (q, k, v), options

    return with_changed_call("a window one key too wide", change)


def _depth_space(harness: Harness):
    return harness.space(b=None, h=None, m=None, d_v=None, n=(3, 5, 7, 11), d_k=(2, 3, 5), layers=(1, 2, 3))


LAWS = (
    Law(
        "L35",
        "receptive field",
        "the inputs that an output depends on after L layers = support of (I + allowed)^L, at most min(n, (k + 1)^L)",
        "supports a mask and gradients; x ← x + f(x)",
        {
            "function": Trial(
                receptive_field,
                lambda harness: {**_depth_space(harness), "near": (True, False)},
                needs=("mask", "grad"),
                unless=lambda harness: (
                    "the target accepts only fixed sizes" if harness.function.sizes else None
                ),
            )
        },
        lambda: with_changed_call(
            "more keys than the mask allows",
            lambda q, k, v, options: (
                (q, k, v),
                {**options, "allowed": options["allowed"] | torch.roll(options["allowed"], 2, -1)}
                if "allowed" in options
                else options,
            ),
        ),
    ),
    Law(
        "L59",
        "receptive field of a window",
        "output t depends on inputs t − L·before … t + L·after and on no others",
        "a window: an option of the function, or declared by the model with its layers",
        {
            "function": Trial(
                function_window_reach,
                lambda harness: {**_depth_space(harness), "before": (0, 1, 2), "after": (0, 1)},
                needs=("window", "grad"),
            ),
            "model": Trial(
                window_reach,
                lambda harness: {"b": (1, 2), "n": _around_window(harness)},
                unless=lambda harness: (
                    positions_out(harness)
                    or (
                        None
                        if harness.model.window and harness.model.layers and not harness.model.sinks
                        else "it declares no window (fields window and layers), or one with sinks"
                    )
                ),
            ),
        },
        _off_by_one_window,
    ),
)
