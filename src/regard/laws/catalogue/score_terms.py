"""Terms of the scores beside q·k: L66 (softcap) and L67 (sink logits)."""

import math

import torch

from ..controls import with_changed_call
from ..harness import Harness
from ..law import Case, Law, Trial
from ..measurement import Measurement, compare, gradients, worst
from .softmax import call_space, case_mask

NO_CAP = 1e8  # a cap that changes scores of up to 10 by less than 10³ / (3 · 10¹⁶)
NO_SINK = -math.inf


def softcap(harness: Harness, c: Case) -> Measurement:
    masking = case_mask(harness, c)
    q, k, v = harness.qkv(c, requires_grad=harness.supports("grad"))
    o = harness.attend(3.0 * q, k, v, softcap=c.softcap, **masking.options)
    right = harness.reference(3.0 * q, k, v, masking.allowed, softcap=c.softcap).o
    measurements = [
        compare(f"outputs with softcap={c.softcap} against the formula c · tanh(s / c)", o, right)
    ]
    with torch.no_grad():
        uncapped = harness.attend(q, k, v, softcap=NO_CAP, **masking.options)
        plain = harness.attend(q, k, v, **masking.options)
    measurements.append(compare("outputs with a very large softcap against those without", uncapped, plain))
    if harness.supports("grad"):
        grad = harness.randn(*o.shape)
        got, want = (gradients(x, (q, k, v), grad.to(x.dtype)) for x in (o, right))
        measurements += [compare(f"∂/∂{x} with a softcap", g, w) for x, g, w in zip("qkv", got, want)]
    return worst(*measurements)


def sinks(harness: Harness, c: Case) -> Measurement:
    masking = case_mask(harness, c)
    q, k, v = harness.qkv(c, requires_grad=harness.supports("grad"))
    sink = harness.randn(c.h)
    o = harness.attend(q, k, v, sink_logits=sink, **masking.options)
    right = harness.reference(q, k, v, masking.allowed, sink_logits=sink.double())
    measurements = [compare("outputs with sink logits against the reference", o, right.o)]
    with torch.no_grad():
        none = harness.attend(q, k, v, sink_logits=torch.full_like(sink, NO_SINK), **masking.options)
        plain = harness.attend(q, k, v, **masking.options)
        total = harness.attend(q, k, torch.ones_like(v), sink_logits=sink, **masking.options)
    of_sink = (sink.double()[:, None] - right.lse).exp()
    measurements += [
        compare("outputs with a sink of −∞ against those without", none, plain),
        compare(
            "the sum of each row's weights against 1 − the weight of the sink", total[..., 0], 1 - of_sink
        ),
    ]
    if harness.supports("grad"):
        grad = harness.randn(*o.shape)
        got, want = (gradients(x, (q, k, v), grad.to(x.dtype)) for x in (o, right.o))
        measurements += [compare(f"∂/∂{x} with sink logits", g, w) for x, g, w in zip("qkv", got, want)]
    return worst(*measurements)


def _other_cap(q, k, v, options):
    if "softcap" in options:  # tanh without the factor: the scores stay within ±1
        options["softcap"] = min(options["softcap"], 1.0)
    return (q, k, v), options


def _sink_of_other_head(q, k, v, options):
    if "sink_logits" in options:
        options["sink_logits"] = options["sink_logits"] + 0.01
    return (q, k, v), options


LAWS = (
    Law(
        "L66",
        "softcap",
        "scores s become c · tanh(s / c) before the mask and the bias; c → ∞ is plain attention",
        "targets with a softcap",
        {"function": Trial(softcap, call_space(softcap=(2.0, 0.7, 30.0)), needs=("softcap",))},
        lambda: with_changed_call("a softcap that is at most 1", _other_cap),
    ),
    Law(
        "L67",
        "sink logits",
        "Σ_j a_ij = 1 − exp(sink_h − lse_i); a sink of −∞ is plain attention",
        "targets with sink logits",
        {"function": Trial(sinks, call_space(), needs=("sink logits",))},
        lambda: with_changed_call("sink logits that are 0.01 too large", _sink_of_other_head),
    ),
)
