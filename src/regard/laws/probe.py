"""Determines by small calls which capabilities a target supports, beyond those it declares."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import search
from .harness import Harness, WrongOutput
from .law import Case
from .target import Function, Model, Part, Target

PROBE_SECONDS = 60.0  # the time limit for probing one target
STRAIGHT = 1e-11  # of the output: the curvature over 1e-7 is about 1e-14, a step of float32 about 1e-8


class Unsupported(Exception):
    """A probe ran without an exception, and its result shows that a capability is missing."""


@dataclass(frozen=True)
class Probe:
    """What probing a target showed: capability → whether it works, and the error where it does not."""

    supported: dict[str, bool] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    cache: dict[str, Any] = field(
        default_factory=dict, compare=False
    )  # results that the laws of one check share


def probe(target: Target) -> Probe:
    """Try every capability that the target does not declare, within a time limit."""
    if refusal := missing_device(target):
        return Probe({}, {"device": refusal})
    with search.time_limit(PROBE_SECONDS), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _probe(target)
        except search.TooSlow:
            return Probe({}, {"float32": f"no answer within {PROBE_SECONDS:.0f} s"})


def missing_device(target: Target) -> str | None:
    """Why the target cannot run on this machine; None if it can."""
    if target.device.partition(":")[0] == "cuda" and not torch.cuda.is_available():
        return "needs a CUDA device, and this machine has none"
    return None


def _probe(target: Target) -> Probe:
    supported: dict[str, bool] = {"float64": True} if isinstance(target, Part) else {}
    errors: dict[str, str] = {}
    probes: dict[str, Callable[[Harness], Any]] = {}
    if isinstance(target, Function):
        probes = FUNCTION_PROBES
    elif isinstance(target, Model):
        probes = MODEL_PROBES
    for capability, attempt in probes.items():
        if target.declares(capability) is not None:
            continue
        try:
            attempt(Harness(target, supported, torch.float32))
            supported[capability] = True
        except WrongOutput as e:  # the call ran and returned something wrong: a fault that the laws report
            works = supported.get("float32", target.declares("float32") is True)
            supported[capability] = works and capability not in ("float32", "float64")
            errors[capability] = describe(e)
        except search.CallTooSlow as e:
            supported[capability], errors[capability] = False, str(e)
            if capability == "float32":  # an ordinary call does not return: the other probes would not either
                return Probe(supported, errors)
        except Exception as e:  # the target is foreign code, which may raise anything
            supported[capability], errors[capability] = False, describe(e)
    return Probe(supported, errors)


def describe(e: BaseException) -> str:
    """The type and the first line of an exception; only the message if it is one of ours."""
    text = str(e).strip().splitlines()
    if isinstance(e, WrongOutput | Unsupported | search.CallTooSlow):
        return text[0]
    return f"{type(e).__name__}: {text[0]}" if text else type(e).__name__


def probe_case(target: Function, **sizes: int) -> Case:
    """A case of these sizes, or of the nearest sizes that the target accepts."""
    accepted = {
        name: min(values, key=lambda s: abs(s - sizes[name]))
        for name, values in target.sizes.items()
        if name in sizes
    }
    return Case({**sizes, **accepted, "seed": 0})


def _call(harness: Harness, dtype: torch.dtype | None = None, **sizes: int) -> Tensor:
    """One ordinary call: 7 positions, 2 heads of 5. A NaN in the output is left for the laws to report."""
    c = probe_case(harness.function, **{"b": 2, "h": 2, "n": 7, "d_k": 5, **sizes})
    harness.seed(c)
    q, k, v = (x.to(dtype or harness.dtype) for x in harness.qkv(c))
    return harness.attend(q, k, v)


def _half(harness: Harness, dtype: torch.dtype) -> None:
    """A call in a 16-bit dtype, alone and with each mask: a mask value of −1e9, for example, overflows float16."""
    _call(harness, dtype)
    c = probe_case(harness.function, b=2, h=2, n=7, d_k=5)
    for name in ("mask", "causal", "lengths"):
        if harness.supports(name):
            harness.seed(c)
            q, k, v = (x.to(dtype) for x in harness.qkv(c))
            kind = "random" if name == "mask" else name
            harness.attend(q, k, v, **harness.make_mask(kind, c.b, c.h, c.n, c.n).options)


def _float64(harness: Harness) -> None:
    """Raises Unsupported for a function that accepts float64 but computes in float32 inside."""
    c = probe_case(harness.function, b=2, h=2, n=7, d_k=5)
    harness.seed(c)
    q, k, v = (x.double() for x in harness.qkv(c))
    nudge = 1e-10 * torch.randn(q.shape, generator=harness.random, dtype=torch.float64).to(q.device)
    _smooth(lambda q: harness.attend(q, k, v), q, nudge)


def _smooth(f: Callable[[Tensor], Tensor], x: Tensor, nudge: Tensor) -> None:
    """Raises Unsupported unless small changes of the input change the output in proportion, as in float64.

    What is rounded to float32 somewhere inside changes in steps: not at all by 1e-10, and by 1e-7 not by opposite
    amounts in opposite directions.
    """
    with torch.no_grad():
        one, two, far = f(x), f(x + nudge), f(x + 1e7 * nudge)
        if torch.equal(one, far):  # an output that does not depend on x at all shows nothing about precision
            return
        bend = (f(x + 1e3 * nudge) + f(x - 1e3 * nudge) - 2 * one).abs()
    change, size = (two - one).abs(), max(1.0, float(one.abs().max()))
    if not bool(torch.isfinite(change).all()):
        return
    in_steps = float((change == 0).double().mean()) > 0.5 or float(change.max()) > 1e-8 * size
    if in_steps or float(bend.max()) > STRAIGHT * size:
        raise Unsupported("computes in float32 for float64 inputs")


def _gradients(harness: Harness) -> None:
    c = probe_case(harness.function, b=1, h=2, n=3, d_k=5)
    harness.seed(c)
    inputs = harness.qkv(c, requires_grad=True)
    o = harness.attend(*inputs)
    grads: tuple[Tensor | None, ...] = (None, None, None)
    if o.requires_grad:
        grads = torch.autograd.grad(o.sum(), inputs, allow_unused=True)
    if missing := [name for name, g in zip("qkv", grads) if g is None]:
        raise Unsupported(f"no gradient reached {', '.join(missing)}")


def _mask_and_causal(harness: Harness) -> None:
    if not (harness.supports("mask") and harness.supports("causal")):
        raise Unsupported("the target does not support both mask and causal")
    c = probe_case(harness.function, b=1, h=2, n=5, d_k=5)
    harness.seed(c)
    allowed = torch.ones(c.n, c.n, dtype=torch.bool, device=harness.device)
    harness.attend(*harness.qkv(c), causal=True, allowed=allowed)


FUNCTION_PROBES: dict[str, Callable[[Harness], Any]] = {
    "float32": lambda harness: _call(harness),
    "float64": _float64,
    "bfloat16": lambda harness: _half(harness, torch.bfloat16),
    "float16": lambda harness: _half(harness, torch.float16),
    "n≠m": lambda harness: _call(harness, n=7, m=11),
    "d_v≠d_k": lambda harness: _call(harness, d_k=5, d_v=3),
    "grouped": lambda harness: _call(harness, h=4, h_kv=2),
    "grad": _gradients,
    "mask and causal": _mask_and_causal,
}


def _model_call(harness: Harness) -> Tensor:
    """One ordinary call of a model: 5 positions, a batch of 2."""
    harness.seed(Case(seed=0))
    n = min(5, harness.model.max_length)
    with torch.no_grad():
        return harness.run(harness.sequence(2, n), harness.context(2, n))


def _model_float64(harness: Harness) -> None:
    out = _model_call(Harness(harness.target, harness.probed, torch.float64))
    if out.dtype != torch.float64:
        raise Unsupported(f"returned {out.dtype} from a module in float64")
    double = Harness(harness.target, harness.probed, torch.float64)
    double.seed(Case(seed=0))
    n = min(5, double.model.max_length)
    x, context = double.sequence(2, n), double.context(2, n)
    if not x.is_floating_point():
        return
    nudge = 1e-10 * torch.randn(x.shape, generator=double.random, dtype=torch.float64).to(x.device)
    _smooth(lambda x: double.run(x, context), x, nudge)


def _model_gradients(harness: Harness) -> None:
    harness.seed(Case(seed=0))
    n = min(5, harness.model.max_length)
    x = harness.sequence(2, n)
    x = x.requires_grad_() if x.is_floating_point() else x
    if not harness.run(x, harness.context(2, n)).requires_grad:
        raise Unsupported("no gradient reached the input or a parameter")


MODEL_PROBES: dict[str, Callable[[Harness], Any]] = {
    "float32": _model_call,
    "float64": _model_float64,
    "grad": _model_gradients,
}
