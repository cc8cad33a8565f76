"""Options asked for at once: L64."""

from itertools import combinations
from math import inf
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from ..controls import CLAIMS, wrapped
from ..harness import Lab
from ..law import Case, Law, Reading, Space, Trial, compare, worst
from ..target import OPTIONS, Function

HIDING = ("causal", "mask", "lengths", "documents", "window")
BOTH = ({"mask", "causal"}, {"bias", "causal"})  # whoever denies the first has one argument for mask and bias


def pairs(lab: Lab) -> list[tuple[str, str]]:
    """Two options that the target knows, each pair once."""
    known = [word for word in (*HIDING, "bias", "scale") if lab.takes(word)]
    apart = BOTH if not lab.takes("mask and causal") else ()
    return [pair for pair in combinations(known, 2) if set(pair) not in apart]


def together(lab: Lab, c: Case) -> Reading:
    """Some pairs of options on one draw, against the formula; rows that are left without a key say nothing."""
    q, k, v = lab.qkv(c)
    readings, known = [], pairs(lab)
    for pair in (known[i] for i in lab.shuffled(len(known))[:7].tolist()):
        allowed = torch.ones(1, 1, c.n, c.n, dtype=torch.bool, device=lab.device)
        asked: dict[str, Any] = {}
        for word in pair:
            options, table = option(lab, word, c)
            asked |= options
            allowed = allowed if table is None else allowed & table
        readings += _compared(lab, (q, k, v), allowed, asked, " and ".join(pair))
    return worst(*readings)


def option(lab: Lab, word: str, c: Case) -> tuple[dict[str, Any], Bool[Tensor, "..."] | None]:
    """How to ask for it, and the pairs that it leaves."""
    if word in HIDING:
        way = "random" if word == "mask" else word
        return lab.hide(way, c.b, c.h, c.n, c.n)
    keyword = OPTIONS[word][0]
    return {keyword: lab.randn(c.n, c.n) if word == "bias" else 0.7}, None


def _compared(lab: Lab, given, allowed: Tensor, asked: dict[str, Any], what: str) -> list[Reading]:
    right = lab.formula(*given, allowed, bias=asked.get("bias"), scale=asked.get("scale"))
    seen = (right.lse != -inf)[..., None]
    try:
        o, lse = lab.attend_lse(*given, **asked) if lab.takes("lse") else (lab.attend(*given, **asked), None)
    except (NotImplementedError, ValueError, TypeError, RuntimeError):
        return [Reading(0.0, f"{what}: refused")]  # a pair that is refused fools nobody
    readings = [compare(f"{what} at once", o.where(seen, 0.0), right.o.where(seen, 0.0).to(o.dtype))]
    if lse is not None:
        kept = seen[..., 0]
        readings.append(
            compare(f"log-sum-exp of {what} at once", lse.where(kept, 0.0), right.lse.where(kept, 0.0))
        )
    return readings


def _space(lab: Lab) -> Space:
    heads = {"h": (2, 4), "h_kv": (1, 2)} if lab.takes("grouped") else {}
    return lab.space(m=None, n=(2, 3, 5, 7), **heads)


def _two(lab: Lab) -> str | None:
    return None if pairs(lab) else "it has no two options to ask for at once"


def _causal_lost(q, k, v, asked):
    if "lengths" in asked:
        asked.pop("causal", None)
    return (q, k, v), asked


def control() -> Function:
    return wrapped("causal lost beside lengths", _causal_lost, *CLAIMS)


LAWS = (
    Law(
        "L64",
        "options together",
        "two options at once do what each does: softmax(scale · q kᵀ + bias) v over the pairs that both allow",
        "a function with two options; a pair that it refuses is no fault",
        {"function": Trial(together, _space, when=_two)},
        control,
    ),
)
