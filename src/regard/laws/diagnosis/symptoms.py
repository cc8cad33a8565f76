"""Faults that no formula describes: random outputs, results of earlier calls, inputs that are modified."""

import torch
from torch import Tensor

from ..harness import Harness
from .cause import Cause
from .formula import Call, Formula
from .samples import Sample, close, evidence_of, expected, observe, samples

DRAWS = 200  # calls whose mean is compared with the output without dropout


def symptom(harness: Harness) -> Cause | None:
    """The first of these faults that a plain call shows."""
    plain = next(iter(samples(harness)))
    try:
        for find in (_modified, _random, _state, _modes, wrong_weights):
            if cause := find(harness, plain):
                return cause
        return None
    except Exception:  # a call that raises is reported elsewhere
        return None


def _modified(harness: Harness, plain: Sample) -> Cause | None:
    """An input that a plain call changes, or one with a mask or lengths."""
    single = [s for s in samples(harness) if s.name in ("mask", "lengths", "documents", "bias")]
    for sample in (plain, *single):
        call = sample.call
        inputs = {"q": call.q, "k": call.k, "v": call.v}
        inputs |= {name: x for name, x in call.options.items() if isinstance(x, Tensor)}
        before = {name: x.clone() for name, x in inputs.items()}
        observe(harness, sample)
        changed = [name for name, x in inputs.items() if not torch.equal(x, before[name])]
        if changed:
            names = ", ".join(changed)
            return Cause(
                f"the input {names} is modified in place", "input modified", "work on a copy of the inputs",
                f"{names} differs after the call ({sample.describe()})",
            )  # fmt: skip
    return None


def _random(harness: Harness, sample: Sample) -> Cause | None:
    one, two = observe(harness, sample)[0].clone(), observe(harness, sample)[0].clone()
    if not bool(torch.isfinite(one).all() & torch.isfinite(two).all()):
        return None
    if float((one - two).abs().max()) < 1e-9:
        return None
    state = observe(harness, sample)[0].clone()
    want = expected(Formula(), sample)[0]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drawn = [observe(harness, sample)[0].double() for _ in range(DRAWS)]
    mean, spread = torch.stack(drawn).mean(0), torch.stack(drawn).std(0)
    error = (mean - want).abs() / (spread / DRAWS**0.5).clamp(min=1e-3)
    text = f"two equal calls differ by {float((one - two).abs().max()):.3g} ({sample.describe()})"
    drift = [float((d - drawn[0]).abs().max()) for d in drawn]
    if drift == sorted(drift):  # each call is farther from the first: a counter, not chance
        return Cause(
            "the output depends on how often it was called", "state between calls",
            "keep no state between calls", text, exact=False,
        )  # fmt: skip
    if float(error.max()) < 8 and not torch.equal(state, want):
        return Cause(
            "dropout is active although none was requested", "dropout in evaluation",
            "apply dropout only in training: F.dropout(x, p, training=self.training)", text,
        )  # fmt: skip
    return Cause(
        "equal calls give different outputs", "random outputs", "remove the random part", text, exact=False
    )


def _state(harness: Harness, sample: Sample) -> Cause | None:
    call = sample.call
    other = Call(
        call.q.flip(-1) + 0.5, call.k.roll(1, -1) - 0.3, call.v.flip(-2) * 1.5, call.options, call.offset
    )
    first = observe(harness, sample)[0]
    saved = first.clone()
    if not bool(torch.isfinite(saved).all()):  # NaN is not equal to itself; the formula finds that fault
        return None
    second = observe(harness, sample._replace(call=other))[0]
    want, want_other = expected(Formula(), sample)[0], expected(Formula(), sample._replace(call=other))[0]
    if not torch.equal(first, saved):
        return Cause(
            "an earlier output is overwritten by the next call: the buffer is reused", "output buffer reused",
            "allocate the output in each call", f"the output of a first call changed ({sample.describe()})",
        )  # fmt: skip
    stale = _near(second, saved, harness) and not _near(want_other, want.to(want_other), harness)
    if stale:
        return Cause(
            "a call returns the result of an earlier call of the same shape", "cached answer",
            "do not cache results by shape", evidence_of("the second output", second, want_other, sample),
        )  # fmt: skip
    repeated = observe(harness, sample)[0]
    if not _near(repeated, saved, harness):
        return Cause(
            "a repeated call gives another output after a call with other values", "state between calls",
            "keep no state between calls", evidence_of("the repeated output", repeated, saved, sample),
            exact=False,
        )  # fmt: skip
    if _near(saved, want, harness) and not _near(second, want_other, harness):
        mixed = _stale_part(harness, sample, other, second)
        if mixed:
            return Cause(
                f"a call uses {mixed} of an earlier call of the same shape", "cached answer",
                "do not cache tensors by shape", evidence_of("the second output", second, want_other, sample),
            )  # fmt: skip
    return None


def _stale_part(harness: Harness, sample: Sample, other: Call, second: Tensor) -> str:
    """Which inputs of the first call explain the output of the second."""
    call = sample.call
    for name, mixed in (
        ("k", other._replace(k=call.k)),
        ("v", other._replace(v=call.v)),
        ("k and v", other._replace(k=call.k, v=call.v)),
        ("q", other._replace(q=call.q)),
    ):
        if _near(second, expected(Formula(), sample._replace(call=mixed))[0], harness):
            return name
    return ""


def _modes(harness: Harness, sample: Sample) -> Cause | None:
    """A cause if a call under no_grad and one that records gradients differ."""
    call = sample.call
    plain = observe(harness, sample)[0]
    leaves = [x.clone().requires_grad_() for x in (call.q, call.k, call.v)]
    tracked = harness.attend(*leaves, **call.options).detach()
    if _near(tracked, plain, harness):
        return None
    want = expected(Formula(), sample)[0]
    which = "that record gradients" if _near(plain, want, harness) else "under no_grad"
    got = tracked if which == "that record gradients" else plain
    return Cause(
        f"outputs differ in calls {which}", "depends on the grad mode", "compute the same in both modes",
        evidence_of("the output", got, want, sample), exact=False,
    )  # fmt: skip


def wrong_weights(harness: Harness, sample: Sample) -> Cause | None:
    """A cause if the weights that a function returns with its output are not those of the formula."""
    call = sample.call
    if not harness.supports("weights"):
        return None
    out = harness.function.call(call.q, call.k, call.v, weights=True)
    given = out[1] if isinstance(out, tuple) and len(out) > 1 else None
    if not isinstance(given, Tensor) or not isinstance(out[0], Tensor):
        return None
    eye = torch.eye(call.k.shape[-2], dtype=call.v.dtype, device=call.v.device)
    values = eye.expand(*call.k.shape[:-1], -1)
    want = expected(Formula(), sample._replace(call=call._replace(v=values)))[0]
    if given.shape != want.shape:
        want = want.mean(1)  # weights averaged over the heads
    right = _near(out[0], expected(Formula(), sample)[0], harness)
    if not right or (given.shape == want.shape and _near(given, want, harness)):
        return None
    return Cause(
        "the returned weights are not the attention weights", "wrong weights", "return softmax of the scores",
        evidence_of("the weights", given, want, sample) if given.shape == want.shape else f"shape {given.shape}",
    )  # fmt: skip


def _near(x: Tensor, y: Tensor, harness: Harness) -> bool:
    return close([x], [y], harness.dtype)
