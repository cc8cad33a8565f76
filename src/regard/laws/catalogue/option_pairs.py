"""Two options in one call: L64."""

import re
from itertools import combinations
from math import inf
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from ...errors import RegardError
from ..controls import CLAIMS, with_changed_call
from ..harness import Harness, Inexpressible
from ..law import Case, Law, Space, Trial
from ..measurement import Measurement, compare, worst
from ..probe import describe
from ..search import CallTooSlow
from ..target import OPTIONS, Function

REFUSALS = (NotImplementedError, ValueError, RegardError)
REFUSING_WORDS = re.compile(
    r"not support|should not|must not|cannot be|not implemented|only one of|mutually", re.I
)
REFUSED = -1.0  # the error of a rejected pair; it is never compared with a tolerance
MASKS = ("causal", "mask", "lengths", "documents", "window")
EXCLUSIVE = (
    {"mask", "causal"},
    {"bias", "causal"},
)  # without "mask and causal", mask and bias share an argument


def pairs(harness: Harness) -> list[tuple[str, str]]:
    """All pairs of options that the target supports."""
    supported = [name for name in (*MASKS, "bias", "scale") if harness.supports(name)]
    excluded = EXCLUSIVE if not harness.supports("mask and causal") else ()
    return [pair for pair in combinations(supported, 2) if set(pair) not in excluded]


def combined(harness: Harness, c: Case) -> Measurement:
    """Several pairs of options on the same inputs, against the reference; rows without an allowed key are skipped."""
    q, k, v = harness.qkv(c)
    measurements, supported = [], pairs(harness)
    for pair in (supported[i] for i in harness.randperm(len(supported))[:7].tolist()):
        allowed = torch.ones(1, 1, c.n, c.n, dtype=torch.bool, device=harness.device)
        call_options: dict[str, Any] = {}
        for name in pair:
            options, table = option(harness, name, c)
            call_options |= options
            allowed = allowed if table is None else allowed & table
        measurements += _compared(harness, (q, k, v), allowed, call_options, " and ".join(pair))
    compared = [m for m in measurements if m.error != REFUSED]
    refused = "; ".join(m.message for m in measurements if m.error == REFUSED)
    if not compared:
        raise Inexpressible(refused)
    largest = worst(*compared)
    return Measurement(largest.error, f"{largest.message}; {refused}" if refused else largest.message)


def option(harness: Harness, name: str, c: Case) -> tuple[dict[str, Any], Bool[Tensor, "..."] | None]:
    """The keyword arguments of an option, and the pairs that it allows."""
    if name in MASKS:
        kind = "random" if name == "mask" else name
        return harness.make_mask(kind, c.b, c.h, c.n, c.n)
    keyword = OPTIONS[name][0]
    return {keyword: harness.randn(c.n, c.n) if name == "bias" else 0.7}, None


def _compared(
    harness: Harness, qkv, allowed: Tensor, call_options: dict[str, Any], names: str
) -> list[Measurement]:
    expected = harness.reference(
        *qkv, allowed, bias=call_options.get("bias"), scale=call_options.get("scale")
    )
    nonempty = (expected.lse != -inf)[..., None]
    try:
        o, lse = (
            harness.attend_lse(*qkv, **call_options)
            if harness.supports("lse")
            else (harness.attend(*qkv, **call_options), None)
        )
    except REFUSALS as e:  # a pair that is rejected with a message is reported, and neither right nor wrong
        return [Measurement(REFUSED, f"{names} refused: {describe(e)}")]
    except (Inexpressible, CallTooSlow):
        raise
    except RuntimeError as e:  # PyTorch rejects a pair with a message in a RuntimeError
        if REFUSING_WORDS.search(str(e)):
            return [Measurement(REFUSED, f"{names} refused: {describe(e)}")]
        return [Measurement(inf, f"{names} combined raised {describe(e)}")]
    except Exception as e:  # foreign code; both options are in its signature, and together they fail
        return [Measurement(inf, f"{names} combined raised {describe(e)}")]
    measurements = [
        compare(f"{names} combined", o.where(nonempty, 0.0), expected.o.where(nonempty, 0.0).to(o.dtype))
    ]
    if lse is not None:
        rows = nonempty[..., 0]
        measurements.append(
            compare(f"log-sum-exp of {names} combined", lse.where(rows, 0.0), expected.lse.where(rows, 0.0))
        )
    return measurements


def _space(harness: Harness) -> Space:
    heads = {"h": (2, 4), "h_kv": (1, 2)} if harness.supports("grouped") else {}
    return harness.space(m=None, n=(2, 3, 5, 7), **heads)


def _two(harness: Harness) -> str | None:
    return None if pairs(harness) else "it does not support two options"


def _causal_ignored(q, k, v, call_options):
    if "lengths" in call_options:
        call_options.pop("causal", None)
    return (q, k, v), call_options


def control() -> Function:
    return with_changed_call("causal ignored if lengths are given", _causal_ignored, *CLAIMS)


LAWS = (
    Law(
        "L64",
        "options combined",
        "two options in one call both take effect: softmax(scale · q kᵀ + bias) v over the pairs that both allow",
        "a function with two options; a pair that is rejected with a message is reported as refused",
        {"function": Trial(combined, _space, unless=_two, always_report=True)},
        control,
    ),
)
