"""A counterexample as tables to draw: its smallest call that differs from the formula, with both results."""

import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import search
from .diagnosis.formula import Call, Formula
from .harness import Harness
from .law import Outcome
from .measurement import Comparison, recorded
from .probe import Probe
from .run_law import find_subject, measure
from .target import Function, Target

MAX_SIDE = 12  # rows and columns of a table; the rest is cut off
SECONDS = 4.0
VISIBLE = 1e-4  # a difference that a table shows


class Table(NamedTuple):
    """One quantity of one head: the target's result, the formula's result, and where they differ."""

    name: str
    got: list[list[float]]
    expected: list[list[float]]
    wrong: list[list[bool]]


class DrawnCase(NamedTuple):
    """A call of a counterexample. allowed: the pairs that may attend; None for every pair."""

    title: str
    allowed: list[list[bool]] | None
    tables: tuple[Table, ...]

    def plain(self) -> dict[str, Any]:
        """For JSON, which has no NaN: numbers that are not finite are None."""
        tables = [
            {
                "name": t.name,
                "got": _finite(t.got),
                "expected": _finite(t.expected),
                "wrong": t.wrong,
            }
            for t in self.tables
        ]
        return {"title": self.title, "allowed": self.allowed, "tables": tables}


def draw_case(outcome: Outcome, target: Target, probed: Probe) -> DrawnCase | None:
    """The counterexample of a broken law, run once more.

    For a function: its smallest call that differs from the formula, with the weights. For a module, or if no call
    differs (for example in a law about a gradient): of the tensors that the law compares, the pair that differs most.
    None if there is no counterexample, or if no two compared tensors differ.
    """
    case, subject = outcome.counterexample, find_subject(outcome.law, target)
    if case is None or subject is None or outcome.status == "holds":
        return None
    calls: list[tuple[Call, Tensor]] = []
    harness = recording = Harness(subject, probed.supported)
    if isinstance(subject, Function):

        def record(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
            out = subject.call(q, k, v, **options)
            o = out[0] if isinstance(out, tuple) else out
            if isinstance(o, Tensor) and o.shape == (*q.shape[:-1], v.shape[-1]):
                offset = harness.query_offset(q.shape[-2], k.shape[-2])
                calls.append((Call(q.detach(), k.detach(), v.detach(), options, offset), o.detach()))
            return out

        recording = Harness(replace(subject, call=record), probed.supported)
    with recorded() as comparisons:
        try:
            with warnings.catch_warnings(), search.time_limit(SECONDS):
                warnings.simplefilter("ignore")
                measure(outcome.law.trials[subject.kind], recording, case)
        except (
            search.TooSlow,
            Exception,
        ):  # foreign code may raise anything; the calls before that are drawn
            pass
    wrong = [n for n, (call, o) in enumerate(calls) if _largest_error(harness, call, o) > VISIBLE]
    if not wrong:
        return _draw_comparison(comparisons)
    n = min(wrong, key=lambda n: calls[n][0].q.numel() * calls[n][0].k.shape[-2])
    return _draw(harness, *calls[n], n, len(calls))


def _draw_comparison(comparisons: list[Comparison]) -> DrawnCase | None:
    """The pair of compared tensors that differs most: its last two axes, at the largest difference."""
    far = [
        torch.nan_to_num((got - want).abs(), nan=torch.inf) if got.shape == want.shape else None
        for _, got, want in comparisons
    ]
    seen = [i for i, d in enumerate(far) if d is not None and d.numel() and float(d.max()) > VISIBLE]
    if not seen:
        return None
    most = max(seen, key=lambda i: float(far[i].max()))  # type: ignore[union-attr]
    name, got, want = comparisons[most]
    while got.dim() < 2:
        got, want = got[None], want[None]
    gap = torch.nan_to_num((got - want).abs(), nan=torch.inf)
    first = torch.unravel_index(gap.flatten(-2).amax(-1).argmax(), gap.shape[:-2]) if gap.dim() > 2 else ()
    at = tuple(int(i) for i in first)
    title = f"{name}{f', at {list(at)} of its first axes' if at else ''}: a row per position"
    return DrawnCase(
        title if got.shape[-2] > 1 else title.partition(": a row")[0],
        None,
        (_table("value", got[at], want[at]),),
    )


def _expected(harness: Harness, call: Call) -> Any:
    names = ("scale", "bias", "softcap", "sink_logits")
    terms = {name: call.options[name] for name in names if call.options.get(name) is not None}
    return harness.reference(call.q, call.k, call.v, Formula().allowed(call), **terms)


def _largest_error(harness: Harness, call: Call, o: Tensor) -> float:
    """The largest difference from the formula; infinite if the output is not finite although the formula's is."""
    if call.options.get("dropout_p") or call.options.get("shift"):
        return 0.0  # the formula has neither
    far = (o.double() - _expected(harness, call).o.to(o.device)).abs()
    return float(torch.where(far.isnan(), torch.inf, far).max()) if far.numel() else 0.0


def _draw(harness: Harness, call: Call, o: Tensor, number: int, of: int) -> DrawnCase:
    right = _expected(harness, call)
    far = torch.nan_to_num((o.double() - right.o.to(o.device)).abs(), nan=torch.inf)
    b, h = (int(x) for x in torch.unravel_index(far.amax((-1, -2)).argmax(), far.shape[:2]))
    allowed = Formula().allowed(call)
    title = f"call {number + 1} of {of}" if of > 1 else "the call"
    n, m = call.q.shape[-2], call.k.shape[-2]
    title += f": {n} {'query' if n == 1 else 'queries'}, {m} {'key' if m == 1 else 'keys'}"
    if far.shape[0] * far.shape[1] > 1:
        title += f"; batch row {b}, head {h}"
    tables = []
    weights = _weights_of(harness, call)
    if weights is not None:
        tables.append(_table("weights", weights[b, h], right.weights[b, h]))
    if weights is None or not torch.equal(weights, o):  # equal if a law passes unit values to get the weights
        tables.append(_table("output", o[b, h], right.o[b, h]))
    pairs = None if allowed is None else allowed[b, h][:MAX_SIDE, :MAX_SIDE].tolist()
    return DrawnCase(title, pairs, tuple(tables))


def _weights_of(harness: Harness, call: Call) -> Tensor | None:
    """The target's weights, from its outputs for unit values; None if it does not accept them."""
    options = {name: value for name, value in call.options.items() if name not in ("lse", "weights")}
    try:
        with warnings.catch_warnings(), search.time_limit(SECONDS):
            warnings.simplefilter("ignore")
            return harness.weights(call.q, call.k, **options).detach()
    except (search.TooSlow, Exception):  # foreign code
        return None


def _table(name: str, got: Tensor, expected: Tensor) -> Table:
    got, expected = (x.double().cpu()[:MAX_SIDE, :MAX_SIDE] for x in (got, expected))
    far = torch.nan_to_num((got - expected).abs(), nan=torch.inf)
    return Table(name, got.tolist(), expected.tolist(), (far > VISIBLE).tolist())


def _finite(rows: list[list[float]]) -> list[list[float | None]]:
    return [[x if abs(x) < float("inf") else None for x in row] for row in rows]
