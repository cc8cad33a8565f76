"""Attention as a chain of small steps, so that a fault is one step replaced by another."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...position import alibi_slopes, rotate


class Call(NamedTuple):
    """The arguments of one call, with the laws' option names. offset: the position of query 0 among the keys."""

    q: Tensor  # (b, h, n, d_k)
    k: Tensor  # (b, h_kv, m, d_k)
    v: Tensor  # (b, h_kv, m, d_v)
    options: dict[str, Any]
    offset: int = 0

    @property
    def grid(self) -> tuple[Tensor, Tensor]:
        """Query indices as a column, key indices as a row."""
        device = self.q.device
        return (
            torch.arange(self.q.shape[-2], device=device)[:, None],
            torch.arange(self.k.shape[-2], device=device),
        )


def alibi(call: Call, slopes: Any = alibi_slopes, bias: Any = lambda distance: -distance.abs()) -> Tensor:
    """−slope · |i − j| for each head, (h, n, m), in float64."""
    i, j = call.grid
    each = slopes(call.q.shape[1]).to(call.q.device, torch.float64)
    return each[:, None, None] * bias((i + call.offset - j).double())


def turned(x: Tensor, pairing: str, offset: int = 0, base: float = 10000.0, sign: int = 1) -> Tensor:
    """x rotated to the positions offset, offset + 1, …; if the width is odd, x is returned unchanged."""
    if x.shape[-1] % 2:
        return x
    positions = sign * torch.arange(offset, offset + x.shape[-2], device=x.device)
    return rotate(x, positions, base, pairing)


def with_bias(call: Call, bias: Tensor) -> Call:
    given = call.options.get("bias")
    return call._replace(options=call.options | {"bias": bias if given is None else given + bias})


def _positions(call: Call) -> Call:
    """The call after a target's positions are applied: q and k rotated, or a bias by distance added."""
    if call.options.get("alibi"):
        return with_bias(call, alibi(call))
    if pairing := call.options.get("rotary"):
        return call._replace(q=turned(call.q, pairing, call.offset), k=turned(call.k, pairing))
    return call


def _same_inputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q, k, v


def _repeat(x: Tensor, heads: int) -> Tensor:
    return x if heads == x.shape[1] else x.repeat_interleave(heads // x.shape[1], 1)


def _dot(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT


def _factor(call: Call) -> float:
    given = call.options.get("scale")
    return call.q.shape[-1] ** -0.5 if given is None else given


def _causal(i: Tensor, j: Tensor, call: Call) -> Tensor:
    return j <= i + call.offset


def _window(i: Tensor, j: Tensor, call: Call) -> Tensor:
    before, after = call.options["window"]
    return (i + call.offset - j <= before) & (j - i - call.offset <= after)


def _sinks(i: Tensor, j: Tensor, call: Call) -> Tensor:
    return j < call.options.get("sinks", 0)


def _lengths(i: Tensor, j: Tensor, call: Call) -> Tensor:
    return j < call.options["lengths"][:, None, None, None]


def _documents(i: Tensor, j: Tensor, call: Call) -> Tensor:
    ids = call.options["documents"]
    return ids[:, None, :, None] == ids[:, None, None, :]


def _mask(i: Tensor, j: Tensor, call: Call) -> Tensor:
    return call.options["allowed"]


def _and(tables: list[Tensor]) -> Tensor:
    out = tables[0]
    for table in tables[1:]:
        out = out & table
    return out


def _add_bias(scores: Tensor, bias: Tensor) -> Tensor:
    return scores + bias


def _fill(scores: Tensor, allowed: Tensor) -> Tensor:
    return scores.masked_fill(~allowed, -inf)


def _softmax(scores: Tensor, allowed: Tensor | None) -> Tensor:
    return scores.softmax(-1)  # NaN without an allowed key: `close` accepts anything where NaN is expected


def _same_weights(a: Tensor, allowed: Tensor | None) -> Tensor:
    return a


def _product(a: Tensor, v: Tensor, call: Call) -> Tensor:
    return a @ v


@dataclass(frozen=True)
class Formula:
    """softmax(scale · q kᵀ + bias) v over the allowed pairs; each field is one step of it."""

    positions: Callable[[Call], Call] = _positions
    inputs: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] = _same_inputs
    repeat_k: Callable[[Tensor, int], Tensor] = _repeat
    repeat_v: Callable[[Tensor, int], Tensor] = _repeat
    scores: Callable[[Tensor, Tensor], Tensor] = _dot
    factor: Callable[[Call], Any] = _factor
    bias: Callable[[Tensor, Tensor], Tensor] = _add_bias
    causal: Callable[[Tensor, Tensor, Call], Tensor] = _causal
    window: Callable[[Tensor, Tensor, Call], Tensor] = _window
    sinks: Callable[[Tensor, Tensor, Call], Tensor] = (
        _sinks  # keys that are allowed besides those of the window
    )
    lengths: Callable[[Tensor, Tensor, Call], Tensor] = _lengths
    documents: Callable[[Tensor, Tensor, Call], Tensor] = _documents
    mask: Callable[[Tensor, Tensor, Call], Tensor] = _mask
    combine: Callable[[list[Tensor]], Tensor] = _and
    fill: Callable[[Tensor, Tensor], Tensor] = _fill
    normalize: Callable[[Tensor, Tensor | None], Tensor] = _softmax
    weights: Callable[[Tensor, Tensor | None], Tensor] = _same_weights
    output: Callable[[Tensor, Tensor, Call], Tensor] = _product
    bias_before_scale: bool = False

    def allowed(self, call: Call) -> Tensor | None:
        """All masks of a call as one table; None: every pair."""
        given = [name for name, keyword in MASKS.items() if call.options.get(keyword) is not None]
        given = [name for name in given if name != "causal" or call.options["causal"]]
        if not given:
            return None
        i, j = call.grid
        tables = []
        for name in given:
            table = getattr(self, name)(i, j, call)
            tables.append(table | self.sinks(i, j, call) if name == "window" else table)
        b, h, n, m = *call.q.shape[:-1], call.k.shape[-2]
        return self.combine([t.expand(b, h, n, m) for t in tables])

    def __call__(self, call: Call) -> Tensor:
        call = self.positions(call)
        q, k, v = self.inputs(call.q, call.k, call.v)
        call = call._replace(q=q, k=k, v=v)
        k, v = self.repeat_k(k, q.shape[1]), self.repeat_v(v, q.shape[1])
        call = call._replace(k=k, v=v)
        raw, bias = self.scores(q, k), call.options.get("bias")
        if bias is not None and self.bias_before_scale:
            scores = self.bias(raw, bias) * self.factor(call)
        else:
            scores = raw * self.factor(call)
            scores = scores if bias is None else self.bias(scores, bias)
        allowed = self.allowed(call)
        scores = scores if allowed is None else self.fill(scores, allowed)
        a = self.weights(self.normalize(scores, allowed), allowed)
        return self.output(a, v, call)


MASKS = {
    "mask": "allowed",
    "causal": "causal",
    "window": "window",
    "lengths": "lengths",
    "documents": "documents",
}


@dataclass(frozen=True)
class Variant:
    """One faulty variant of the formula. family: the fault in a few words, for tables; fix: what to change."""

    name: str
    family: str
    fix: str
    changes: dict[str, Any] = field(default_factory=dict)

    def formula(self, base: Formula | None = None) -> Formula:
        return self._of_the_right_one if base is None else replace(base, **self.changes)

    @cached_property
    def _of_the_right_one(self) -> Formula:
        return replace(Formula(), **self.changes)

    def disjoint(self, other: "Variant") -> bool:
        return not set(self.changes) & set(other.changes)
