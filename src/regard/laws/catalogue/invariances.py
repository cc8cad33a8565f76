"""What a call must not depend on: where numbers lie, tiles, earlier calls: L57, L61, L62."""

from typing import Any

import torch
from torch import Tensor

from ..controls import formula, wrapped
from ..harness import Lab
from ..law import Case, Law, Reading, Trial, compare, exactly, gradients, worst
from ..target import Function
from .masks import lengths_in, sequences
from .softmax import asked, spaced


def any_layout(lab: Lab, c: Case) -> Reading:
    """The same numbers in other places of memory."""
    q, k, v = lab.qkv(c)
    hiding = asked(lab, c)
    want = lab.attend(*(x.contiguous() for x in (q, k, v)), **hiding.options)

    def laid(x: Tensor, how: str) -> Tensor:
        match how:
            case "heads inside positions":
                return x.transpose(1, 2).contiguous().transpose(1, 2)
            case "columns":
                return x.mT.contiguous().mT
            case "every other":
                wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), 9.0)
                wide[..., ::2] = x
                return wide[..., ::2]
            case "with an offset":
                long = x.new_full((*x.shape[:-2], x.shape[-2] + 3, x.shape[-1]), 9.0)
                long[..., 2:-1, :] = x
                return long[..., 2:-1, :]
        return x[:1].expand_as(x)  # stride 0 along the batch

    if c.how == "one row for all":
        q, k, v = (x[:1].expand_as(x).contiguous() for x in (q, k, v))
        want = lab.attend(q, k, v, **hiding.options)
    got = lab.attend(*(laid(x, c.how) for x in (q, k, v)), **hiding.options)
    return compare(f"the same numbers laid out as {c.how!r}", got, want)


LAYOUTS = ("heads inside positions", "with an offset", "columns", "every other", "one row for all")


def model_any_layout(lab: Lab, c: Case) -> Reading:
    x, context = lab.sequence(c.b, c.n), lab.context(c.b, c.n)
    spread = torch.stack([x, lab.others(x)], -1)[..., 0]
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    with torch.no_grad():
        want = lab.run(x, context)
        return worst(
            compare("the same input with stride 2", lab.run(spread, context), want),
            compare("the same input, positions first in memory", lab.run(turned, context), want),
        )


def past_tiles(lab: Lab, c: Case) -> Reading:
    """Lengths just below, at and past the tiles kernels work in."""
    q, k, v = lab.qkv(c, learn=lab.takes("grad"))
    hiding = asked(lab, c)
    o, want = lab.attend(q, k, v, **hiding.options), lab.formula(q, k, v, hiding.allowed).o
    m = k.shape[-2]
    readings = [compare(f"{c.n} queries over {m} keys against the formula", o, want)]
    if lab.takes("grad"):
        towards = lab.randn(*o.shape)
        got, right = gradients(o, (q, k, v), towards), gradients(want, (q, k, v), towards)
        readings += [
            compare(f"∂/∂{x}, {c.n} queries over {m} keys", g, w, lab.slack)
            for x, g, w in zip("qkv", got, right)
        ]
    return worst(*readings)


TILES = (15, 16, 17, 31, 33, 63, 64, 65, 129, 257)


def leaves_nothing(lab: Lab, c: Case) -> Reading:
    """A call between two equal ones, of another length and another mask, changes nothing."""
    q, k, v = lab.qkv(c)
    hiding, m = asked(lab, c), k.shape[-2]
    before = [x.clone() for x in (q, k, v)]
    held = lab.attend(q, k, v, **hiding.options)
    first = held.clone()
    for other in (Case(c, n=c.n + 3, **({"m": m + 3} if "m" in c else {})), Case(c, b=c.b + 1)):
        more = lab.qkv(other)
        way = c.hide if lab.fits(other) else "nothing"
        asking = lab.hide(way, other.b, other.h, other.n, other.get("m", other.n))
        got = lab.attend(*more, **asking.options)
        fresh = compare("a call after one of another length", got, lab.formula(*more, asking.allowed).o)
        if fresh.rank > 1e-3:
            return fresh
    same = asked(lab, c)  # the same sizes, another mask of the same kind
    again = lab.attend(q, k, v, **same.options)
    return worst(
        compare("a call with another mask of the same shape", again, lab.formula(q, k, v, same.allowed).o),
        compare("the first call again", lab.attend(q, k, v, **hiding.options), first),
        exactly("an earlier output was written over", torch.equal(held, first)),
        *(
            exactly(f"{name} was written to", torch.equal(x, y))
            for name, x, y in zip("qkv", (q, k, v), before)
        ),
    )


def model_leaves_nothing(lab: Lab, c: Case) -> Reading:
    """A longer and a wider input between two equal ones, against a copy that saw nothing before."""
    used, x = lab.fresh(), lab.sequence(c.b, c.n)
    long = min(c.n + 3, lab.model.longest)
    others = [(lab.sequence(c.b, long), c.b), (lab.sequence(c.b + 1, c.n), c.b + 1)]
    context, before = lab.context(c.b, c.n), x.clone()
    options: list[dict[str, Any]] = [{}]
    if lab.takes("lengths"):
        options.append({"lengths": lab.below(c.n + 1, c.b, low=1)})
    readings = []
    with torch.no_grad():
        first = [lab.run(x, context, used, **asking).clone() for asking in options]
        for y, b in others:
            other = lab.context(b, 4)
            late, fresh = lab.run(y, other, used), lab.run(y, other, lab.fresh())
            readings.append(compare("an input of another size after others", late, fresh))
        again = [lab.run(x, context, used, **asking) for asking in options]
    return worst(
        *readings,
        *(compare("the first call again", late, early) for late, early in zip(again, first)),
        exactly("the input was written to", torch.equal(x, before)),
    )


def _any_size(lab: Lab) -> str | None:
    return "the target takes fixed lengths only" if {"n", "b"} & set(lab.function.sizes) else None


def _remembering() -> Function:
    right = formula()
    kept: dict[Any, Tensor] = {}

    def call(q, k, v, *, allowed=None, **asked):
        if allowed is not None:
            allowed = kept.setdefault((q.shape, k.shape, allowed.dim()), allowed)
        return right.call(q, k, v, allowed=allowed, **asked)

    claims = right.claims - {"documents", "lengths", "window", "causal"}
    return Function("a mask remembered by its shape", call, claims=claims, alignment="bottom-right")


def _misread(x: Tensor) -> Tensor:
    """What a kernel sees that walks the storage as if it were contiguous."""
    return x if x.is_contiguous() else x.as_strided(x.shape, x.contiguous().stride())


def _past_64(q, k, v, asked):
    shift = torch.zeros_like(k)
    shift[..., 64:, :] = 1e-3
    return (q, k + shift, v), asked


LAWS = (
    Law(
        "L57",
        "any memory layout",
        "the same numbers with other strides and offsets give the same",
        "everywhere",
        {
            "function": Trial(any_layout, lambda lab: lab.space(hide=lab.hidings(), how=LAYOUTS)),
            "model": Trial(
                model_any_layout,
                lambda lab: {"b": (1, 2, 3), "n": lengths_in(lab)},
                when=sequences,
            ),
        },
        lambda: wrapped("storage read as if contiguous", lambda q, k, v, asked: ((q, _misread(k), v), asked)),
    ),
    Law(
        "L61",
        "past tile boundaries",
        "the formula holds at lengths around 16, 32, 64, 128 and 256",
        "everywhere",
        {
            "function": Trial(
                past_tiles,
                lambda lab: lab.space(
                    b=(1,),
                    h=(1, 2),
                    n=TILES,
                    m=TILES if lab.takes("n≠m") else None,
                    d_k=(8,),
                    d_v=None,
                    hide=lab.hidings(),
                ),
            )
        },
        lambda: wrapped("an error past key 64", _past_64),
    ),
    Law(
        "L62",
        "a call leaves nothing behind",
        "f(x), f(y), f(x): the first and the last are the same, and x is as it was",
        "everywhere",
        {
            "function": Trial(leaves_nothing, spaced(), when=_any_size),
            "model": Trial(
                model_leaves_nothing, lambda lab: {"b": (1, 2, 3), "n": lengths_in(lab)[:-1]}, when=sequences
            ),
        },
        _remembering,
    ),
)
