"""Faulty variants with one unknown number, such as an epsilon or a softcap, which is fitted to the outputs."""

from collections.abc import Callable, Iterator
from math import exp, inf, log
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...position import alibi_slopes
from .formula import Call, Variant
from .samples import Sample, close, expected
from .variants.make import variant
from .variants.positions import with_slopes

GRID = 28  # points over the range of a number, evenly on a logarithmic scale
SLOPE_STEPS = 12
STEPS = 60  # steps of the golden-section search; each reduces the interval to 0.618 of it
SHRINK = (5**0.5 - 1) / 2


class Fitted(NamedTuple):
    """A variant with one number. name contains {value}; changes: the changed steps of the formula for a number."""

    name: str
    family: str
    fix: str
    changes: Callable[[float], dict[str, Any]]
    low: float = 1e-4
    high: float = 1e3
    option: str = ""  # the option without which it changes nothing

    def variant(self, value: float) -> Variant:
        return variant(self.name.format(value=f"{value:.4g}"), self.family, self.fix, **self.changes(value))


def _factor(value: Callable[[Call], float]) -> dict[str, Any]:
    def factor(call: Call) -> float:
        given = call.options.get("scale")
        return value(call) if given is None else given

    return {"factor": factor}


def _kept(scores: Tensor, changed: Tensor) -> Tensor:
    """Changed scores; masked ones stay masked."""
    return changed.masked_fill(scores == -inf, -inf).softmax(-1)


def _denominator(extra: float, shifted: bool) -> dict[str, Any]:
    def normalize(s: Tensor, ok: Tensor | None) -> Tensor:
        e = (s - s.amax(-1, keepdim=True) if shifted else s).exp()
        return e / (extra + e.sum(-1, keepdim=True))

    return {"normalize": normalize}


def _after(extra: float) -> dict[str, Any]:
    def weights(a: Tensor, ok: Tensor | None) -> Tensor:
        return a if ok is None else a * ok / (extra + (a * ok).sum(-1, keepdim=True))

    return {"fill": lambda s, ok: s, "normalize": lambda s, ok: s.softmax(-1), "weights": weights}


FITTED = (
    Fitted(
        "the scale is a constant, {value}, for every d_k",
        "constant scale",
        "compute 1/√d_k from the shape of q",
        lambda t: _factor(lambda c: t),
    ),
    Fitted(
        "the scores are {value} times those of 1/√d_k",
        "scale off by a factor",
        "divide q·k by √d_k",
        lambda t: _factor(lambda c: t * c.q.shape[-1] ** -0.5),
    ),
    Fitted(
        "the denominator has an additional term of {value}",
        "extra term in the denominator",
        "divide by Σ exp(s) only",
        lambda t: _denominator(t, True),
        1e-7,
    ),
    Fitted(
        "the denominator has an additional term of {value}, before the maximum is subtracted",
        "extra term in the denominator",
        "divide by Σ exp(s) only",
        lambda t: _denominator(t, False),
        1e-7,
    ),
    Fitted(
        "the scores are squashed to {value} · tanh(s / {value})",
        "clipped scores",
        "use q·k/√d_k as it is, or claim a softcap",
        lambda t: {"normalize": lambda s, ok: _kept(s, t * (s / t).tanh())},
        1e-2,
    ),
    Fitted(
        "the scores are cut at ±{value}",
        "clipped scores",
        "subtract the row maximum instead of clipping",
        lambda t: {"normalize": lambda s, ok: _kept(s, s.clamp(-t, t))},
        1e-2,
    ),
    Fitted(
        "the output is multiplied by {value}",
        "output scaled",
        "return weights @ v",
        lambda t: {"output": lambda a, v, c: t * (a @ v)},
    ),
    Fitted(
        "masked scores are set to −{value}, which softmax does not turn into 0",
        "mask value too small",
        "use −∞ (or the smallest finite number)",
        lambda t: {"fill": lambda s, ok: s.masked_fill(~ok, -t)},
        1e-2,
        option="mask|causal|window|lengths|documents",
    ),
    Fitted(
        "masked scores are lowered by {value}, which softmax does not turn into 0",
        "mask value too small",
        "use −∞ (or the smallest finite number)",
        lambda t: {"fill": lambda s, ok: s - t * (~ok).to(s.dtype)},
        1e-2,
        option="mask|causal|window|lengths|documents",
    ),
    Fitted(
        "the mask is applied after softmax, and the weights are divided by their sum plus {value}",
        "mask after softmax",
        "set masked scores to −∞ before softmax",
        _after,
        1e-10,
        option="mask|causal|window|lengths|documents",
    ),
    Fitted(
        "the bias is multiplied by {value}",
        "bias scaled",
        "add the bias to the scaled scores as it is",
        lambda t: {"bias": lambda s, bias: s + t * bias},
        option="bias|alibi",
    ),
)


def nearest_slopes(error: Callable[[Tensor], Tensor], heads: int) -> Tensor:
    """The slopes of ALiBi, one per head, with the smallest error: Gauss–Newton with halved steps."""
    at = alibi_slopes(heads).double()
    now, step = error(at).flatten(), 1e-6
    for _ in range(SLOPE_STEPS):
        columns = [(error(at + step * unit).flatten() - now) / step for unit in torch.eye(heads).double()]
        move = torch.linalg.lstsq(torch.stack(columns, -1), now[:, None]).solution[:, 0]
        shorter = (at - move / 2**k for k in range(6))
        better = next((s for s in shorter if float(error(s).norm()) < float(now.norm())), None)
        if better is None:
            break
        at, now = better, error(better).flatten()
    return at


def fitting(sample: Sample, got: list[Tensor], dtype: torch.dtype) -> Iterator[Variant]:
    """The variants that reproduce the output of a call, each with its fitted number."""
    options = {*sample.facets["options"], *(name for name, _ in sample.implied)}
    for each in FITTED:
        if not each.option or options & set(each.option.split("|")):
            found = each.variant(_smallest(each, sample, got))
            if close(got, expected(found.formula(), sample), dtype):
                yield found
    if "alibi" in options:
        slopes = nearest_slopes(
            lambda s: expected(with_slopes(s).formula(), sample)[0] - got[0].double(),
            sample.call.q.shape[1],
        )
        yield with_slopes(slopes)


def _smallest(each: Fitted, sample: Sample, got: list[Tensor]) -> float:
    """The number with the smallest error."""

    def error(value: float) -> float:
        want = expected(each.variant(value).formula(), sample)[0]
        return float((got[0].double() - want).nan_to_num(0.0).abs().max())

    return smallest(error, each.low, each.high)


def smallest(error_of: Callable[[float], float], low: float, high: float) -> float:
    """Where an error is smallest, by a grid and a golden-section search around its best point."""

    def error(at: float) -> float:
        return error_of(exp(at))

    start, step = log(low), (log(high) - log(low)) / (GRID - 1)
    points = [start + i * step for i in range(GRID)]
    best = min(points, key=error)
    low, high = best - step, best + step
    inner, outer = high - SHRINK * (high - low), low + SHRINK * (high - low)
    left, right = error(inner), error(outer)
    for _ in range(STEPS):
        if left < right:
            high, outer, right = outer, inner, left
            inner = high - SHRINK * (high - low)
            left = error(inner)
        else:
            low, inner, left = inner, outer, right
            outer = low + SHRINK * (high - low)
            right = error(outer)
    return exp((low + high) / 2)
