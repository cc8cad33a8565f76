"""Parts of models, as modules or functions: norms, feed-forward networks, positions, schedules, clipping."""

import copy
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import SpecError, nearest
from ..parts import batch_norm, clip_by_norm, layer_norm
from ..target import Part
from .from_signature import Hints
from .names import parameters_of

KINDS = {  # what the user may pass to --as → the kind of part
    "layer-norm": "norm",
    "rms-norm": "norm",
    "batch-norm": "batch norm",
    "feed-forward": "feed-forward",
    "rotary": "rotary",
    "positions": "positions",
    "schedule": "schedule",
    "clip": "clip",
}
NOT_PARTS = ("function", "attention", "encoder", "decoder")
GAINS, SHIFTS = (
    ("weight", "gamma", "gain", "a_2", "scale", "g"),
    ("bias", "beta", "shift", "b_2", "offset", "b"),
)


def checked_kind(kind: str) -> str:
    """A kind that the user gave."""
    if kind not in KINDS and kind not in NOT_PARTS:
        raise SpecError(f"--as {kind!r}; {nearest(kind, (*KINDS, *NOT_PARTS))}")
    return kind


def part_of(thing: Any, hints: Hints) -> Part | None:
    """The part that a thing is, from the user's --as, its class or its name; None: not a part."""
    kind = hints.kind
    if kind in NOT_PARTS:
        return None
    name = getattr(thing, "__name__", None) or type(thing).__name__
    if kind is None and isinstance(thing, nn.Module):
        kind = _kind_of_module(thing)
    elif kind is None and callable(thing):
        kind = _kind_of_function(thing)
    if kind is None:
        return None
    return _part(name, KINDS[kind], kind, thing, hints)


def _kind_of_module(module: nn.Module) -> str | None:
    name = type(module).__name__.lower()
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return "batch-norm"
    if re.search(r"att|block|layer$|encoder|decoder|transformer", name) and "norm" not in name:
        return None
    if re.search(r"rms_?norm", name) or isinstance(module, nn.RMSNorm):
        return "rms-norm"
    if re.search(r"(layer_?norm|norm)$|^(ln|layernorm)", name) and not any(
        isinstance(m, nn.Linear) for m in module.modules()
    ):
        return "layer-norm"
    if re.search(r"mlp|feed_?forward|ffn|positionwise|glu", name) or isinstance(module, nn.Linear):
        return "feed-forward"
    return None


def _kind_of_function(function: Callable[..., Any]) -> str | None:
    parameters = parameters_of(function)
    if parameters is None:
        return None
    required = [n for n, p in parameters.items() if p.default is p.empty]
    name = getattr(function, "__name__", "").lower()
    if len(required) == 1 and (
        required[0] in ("step", "t", "it", "iteration", "epoch") or re.search("lr|sched|warm", name)
    ):
        return "schedule"
    if len(required) == 1 and "norm" in name:
        return "rms-norm" if "rms" in name else "layer-norm"
    if len(required) == 2 and re.search(r"rot|rope", name):
        return "rotary"
    if len(required) == 2 and re.search(r"sinus|position", name):
        return "positions"
    if len(required) == 2 and re.search(r"clip", name):
        return "clip"
    return None


def _part(name: str, kind: str, word: str, thing: Any, hints: Hints) -> Part:
    facts = dict(hints.facts)
    if kind == "norm":
        return _norm(name, thing, word, facts)
    if kind == "batch norm":
        return batch_norm(thing, name)
    if kind == "feed-forward":
        return _feed_forward(name, thing)
    if kind == "schedule":
        return Part(name, "schedule", thing, facts or _read_schedule(name, thing))
    if kind == "clip":
        return Part(name, "clip", thing if thing is not torch.nn.utils.clip_grad_norm_ else clip_by_norm)
    return Part(name, kind, thing)


def _norm(name: str, thing: Any, word: str, facts: dict[str, Any]) -> Part:
    rms = {"rms": True} if word == "rms-norm" else {}
    if isinstance(thing, nn.LayerNorm):
        return layer_norm(thing, name)
    if not isinstance(thing, nn.Module):
        return Part(name, "norm", thing, {**rms, **facts})
    double = copy.deepcopy(thing).double().requires_grad_(False)
    gain, shift = (
        next((getattr(double, n) for n in names if isinstance(getattr(double, n, None), Tensor)), None)
        for names in (GAINS, SHIFTS)
    )
    width = next((p.shape[-1] for p in double.parameters() if p.dim() == 1), None)
    eps = next(
        (
            v
            for n in ("eps", "epsilon", "variance_epsilon")
            if isinstance(v := getattr(thing, n, None), float)
        ),
        0.0,
    )
    found = {"eps": eps, "gain": gain, "shift": shift} | ({"width": width} if width else {})
    return Part(name, "norm", double, {**found, **rms, **facts})


def _feed_forward(name: str, module: Any) -> Part:
    if not isinstance(module, nn.Module):
        return Part(name, "feed-forward", module)
    first = next((m for m in module.modules() if isinstance(m, nn.Linear)), None)
    if first is None:
        raise SpecError(f"{name}: a feed-forward network has a Linear layer; specify what it is: --as …")
    return Part(name, "feed-forward", copy.deepcopy(module).double().eval(), {"width": first.in_features})


def _read_schedule(name: str, rate: Callable[[int], float]) -> dict[str, Any]:
    """lr_max, warmup and total, from the peak of the rate and from where it ends at 0."""
    try:
        rates = [float(rate(step)) for step in range(2001)]
    except Exception as e:
        raise SpecError(
            f"{name}: a schedule is called with a step and returns a rate; it raised {type(e).__name__}: {e}; "
            "specify what it is: --as …"
        ) from e
    peak = max(rates)
    last = max((i for i, r in enumerate(rates) if r > 0), default=0)
    if last >= 2000 or peak <= 0:
        raise SpecError(
            f"{name}: the end of this schedule could not be determined; give its parameters: --with lr_max=0.001 "
            "--with warmup=40 --with total=200"
        )
    return {"lr_max": peak, "warmup": rates.index(peak), "total": last + 1}


def signature(thing: Any) -> str:
    """name(parameters), for messages."""
    name = getattr(thing, "__name__", None) or type(thing).__name__
    try:
        return f"{name}{inspect.signature(thing)}"
    except (TypeError, ValueError):
        return name
