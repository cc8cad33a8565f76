"""Faults of positions that a target applies in every call: rotations of q and k, and ALiBi."""

from collections.abc import Callable

import torch
from torch import Tensor

from ....position import alibi_slopes
from ..formula import Call, Variant, alibi, turned, with_bias
from .make import variant as _v

FIX = "rotate pair c of q and k at position p by p · 10000^(−2c/d)"
SLOPES = "subtract slope · (i − j), with the slopes 2^(−8(t + 1)/h) of the heads t = 0, 1, …"


def _rotated(turn: Callable[[Call, str], Call]) -> Callable[[Call], Call]:
    return lambda call: turn(call, call.options["rotary"]) if call.options.get("rotary") else call


def _interleaved(x: Tensor, pairing: str, offset: int = 0) -> Tensor:
    """Angles in the order of one pairing, columns paired in the other."""
    d = x.shape[-1]
    rates = 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64, device=x.device) / d)
    angle = torch.arange(offset, offset + x.shape[-2], device=x.device)[:, None] * rates
    if pairing == "halves":
        angle = angle.repeat_interleave(2, -1)
        other = torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1)
    else:
        angle = torch.cat([angle, angle], -1)
        other = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * angle.cos().to(x.dtype) + other * angle.sin().to(x.dtype)


def _without_minus(x: Tensor, pairing: str, offset: int = 0) -> Tensor:
    """(a cos + b sin, b cos + a sin): no rotation."""
    d = x.shape[-1]
    rates = 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64, device=x.device) / d)
    angle = torch.arange(offset, offset + x.shape[-2], device=x.device)[:, None] * rates
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    if pairing == "halves":
        a, b = x[..., : d // 2], x[..., d // 2 :]
        return torch.cat([a * cos + b * sin, b * cos + a * sin], -1)
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * cos + b * sin, b * cos + a * sin], -1).flatten(-2)


def _both(turn: Callable[..., Tensor]) -> Callable[[Call], Call]:
    return _rotated(lambda c, p: c._replace(q=turn(c.q, p, c.offset), k=turn(c.k, p)))


def _other(pairing: str) -> str:
    return "interleaved" if pairing == "halves" else "halves"


def _along_heads(call: Call, pairing: str) -> Call:
    """Positions are the indices of the heads."""
    q, k = (turned(x.transpose(1, 2), pairing).transpose(1, 2) for x in (call.q, call.k))
    return call._replace(q=q, k=k)


def _rotary(name: str, turn: Callable[[Call, str], Call]) -> Variant:
    return _v(name, "rotary positions", FIX, positions=_rotated(turn))


ROTARY = (
    _rotary("q and k are not rotated", lambda c, p: c),
    _rotary("only q is rotated", lambda c, p: c._replace(q=turned(c.q, p, c.offset))),
    _rotary("only k is rotated", lambda c, p: c._replace(k=turned(c.k, p))),
    _rotary(
        "v is rotated as well",
        lambda c, p: c._replace(q=turned(c.q, p, c.offset), k=turned(c.k, p), v=turned(c.v, p)),
    ),
    _rotary(
        "k is rotated backwards: scores depend on i + j",
        lambda c, p: c._replace(q=turned(c.q, p, c.offset), k=turned(c.k, p, sign=-1)),
    ),
    _rotary(
        "q is rotated with the other pairing of columns than k",
        lambda c, p: c._replace(q=turned(c.q, _other(p), c.offset), k=turned(c.k, p)),
    ),
    _rotary(
        "k is rotated with the other pairing of columns than q",
        lambda c, p: c._replace(q=turned(c.q, p, c.offset), k=turned(c.k, _other(p))),
    ),
    _rotary(
        "the columns are paired differently from what is stated",
        lambda c, p: c._replace(q=turned(c.q, _other(p), c.offset), k=turned(c.k, _other(p))),
    ),
    *(
        _rotary(
            f"the base of the rotation is {base:g} instead of 10000",
            lambda c, p, base=base: c._replace(q=turned(c.q, p, c.offset, base), k=turned(c.k, p, base=base)),
        )
        for base in (100.0, 1000.0, 100000.0, 500000.0, 1000000.0)
    ),
    _v(
        "angles are laid out for one pairing of the columns, and the columns are rotated in the other",
        "rotary positions", FIX, positions=_both(_interleaved),
    ),
    _v("the rotation lacks its minus sign", "rotary positions", FIX, positions=_both(_without_minus)),
    _rotary("positions are taken along the heads", _along_heads),
)  # fmt: skip


def _distances(**how: Callable) -> Callable[[Call], Call]:
    def positions(call: Call) -> Call:
        return with_bias(call, alibi(call, **how)) if call.options.get("alibi") else call

    return positions


def _without(call: Call) -> Call:
    return call


def _alibi(name: str, **how: Callable) -> Variant:
    return _v(name, "position bias", SLOPES, positions=_distances(**how))


def with_slopes(slopes: Tensor) -> Variant:
    """ALiBi with these slopes, one for each head."""
    right = alibi_slopes(len(slopes))
    got, want = (", ".join(f"{float(x):.4g}" for x in each[:4]) for each in (slopes, right))
    return _alibi(f"the slopes of the heads are {got} … instead of {want} …", slopes=lambda h: slopes)


ALIBI = (
    _alibi("the bias grows with the distance: its sign is wrong", bias=lambda d: d.abs()),
    _alibi("the slopes begin with 1: 2^(−8t/h) with t from 0", slopes=lambda h: alibi_slopes(h) * 2.0 ** (8 / h)),
    _alibi("the slopes are in reverse order of the heads", slopes=lambda h: alibi_slopes(h).flip(0)),
    _alibi("the slopes are arithmetic instead of geometric", slopes=lambda h: (torch.arange(h) + 1.0) / h),
    _alibi("the bias is the squared distance", bias=lambda d: -(d**2)),
    _alibi("all heads have the slope of head 0", slopes=lambda h: alibi_slopes(h)[:1].expand(h)),
    _alibi("all slopes are 1", slopes=lambda h: torch.ones(h)),
    _v("the bias by distance is missing, or cancels in softmax", "position bias", SLOPES, positions=_without),
    _v(
        "the bias is divided by √d_k together with the scores", "bias scaled", "add it after the scale",
        bias_before_scale=True,
    ),
)  # fmt: skip
