"""A call does not depend on memory layout, tile sizes or earlier calls: L57, L61, L62."""

from typing import Any

import torch
from torch import Tensor

from ..controls import reference_function, with_changed_call
from ..harness import Harness
from ..law import Case, Law, Trial
from ..measurement import Measurement, compare, gradients, require, worst
from ..target import Function
from .masks import sequence_lengths, sequences
from .softmax import call_space, case_mask


def any_layout(harness: Harness, c: Case) -> Measurement:
    """The same values with other strides and offsets."""
    q, k, v = harness.qkv(c)
    masking = case_mask(harness, c)
    want = harness.attend(*(x.contiguous() for x in (q, k, v)), **masking.options)

    def laid_out(x: Tensor, layout: str) -> Tensor:
        match layout:
            case "(b, n, h, d)":
                return x.transpose(1, 2).contiguous().transpose(1, 2)
            case "(b, h, d, n)":
                return x.mT.contiguous().mT
            case "stride 2":
                padded = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), 9.0)
                padded[..., ::2] = x
                return padded[..., ::2]
            case "offset":
                longer = x.new_full((*x.shape[:-2], x.shape[-2] + 3, x.shape[-1]), 9.0)
                longer[..., 2:-1, :] = x
                return longer[..., 2:-1, :]
        return x[:1].expand_as(x)  # the first batch row, repeated with stride 0

    if c.layout == "stride 0":
        q, k, v = (x[:1].expand_as(x).contiguous() for x in (q, k, v))
        want = harness.attend(q, k, v, **masking.options)
    got = harness.attend(*(laid_out(x, c.layout) for x in (q, k, v)), **masking.options)
    return compare(f"outputs with inputs laid out as {c.layout!r}", got, want)


LAYOUTS = ("(b, n, h, d)", "offset", "(b, h, d, n)", "stride 2", "stride 0")


def model_any_layout(harness: Harness, c: Case) -> Measurement:
    x, context = harness.sequence(c.b, c.n), harness.context(c.b, c.n)
    spread = torch.stack([x, harness.changed(x)], -1)[..., 0]
    transposed = x.transpose(0, 1).contiguous().transpose(0, 1)
    with torch.no_grad():
        want = harness.run(x, context)
        measurements = []
        if harness.supports("separate values"):  # it may test whether its three inputs are one tensor
            copied = harness.run(x, x.clone(), values=x.clone())
            measurements.append(compare("outputs with copies of x as keys and values", copied, want))
        return worst(
            *measurements,
            compare("outputs of an input with stride 2", harness.run(spread, context), want),
            compare(
                "outputs of an input with positions first in memory", harness.run(transposed, context), want
            ),
        )


def around_tile_sizes(harness: Harness, c: Case) -> Measurement:
    """Lengths just below, at and just above common tile sizes."""
    q, k, v = harness.qkv(c, requires_grad=harness.supports("grad"))
    masking = case_mask(harness, c)
    o, want = harness.attend(q, k, v, **masking.options), harness.reference(q, k, v, masking.allowed).o
    m = k.shape[-2]
    measurements = [compare(f"{c.n} queries and {m} keys: outputs against the reference", o, want)]
    if harness.supports("grad"):
        grad_output = harness.randn(*o.shape)
        got, expected = gradients(o, (q, k, v), grad_output), gradients(want, (q, k, v), grad_output)
        measurements += [
            compare(f"{c.n} queries and {m} keys: ∂/∂{x}", g, w, harness.slack)
            for x, g, w in zip("qkv", got, expected)
        ]
    return worst(*measurements)


TILES = (15, 16, 17, 31, 33, 63, 64, 65, 129, 257)


def stateless(harness: Harness, c: Case) -> Measurement:
    """Calls of another length or with another mask between two equal calls have no effect."""
    q, k, v = harness.qkv(c)
    masking, m = case_mask(harness, c), k.shape[-2]
    before = [x.clone() for x in (q, k, v)]
    output = harness.attend(q, k, v, **masking.options)
    first = output.clone()
    for other in (Case(c, n=c.n + 3, **({"m": m + 3} if "m" in c else {})), Case(c, b=c.b + 1)):
        more = harness.qkv(other)
        kind = c.mask if harness.fits(other) else "none"
        other_mask = harness.make_mask(kind, other.b, other.h, other.n, other.get("m", other.n))
        got = harness.attend(*more, **other_mask.options)
        measured = compare(
            "a call after one of another length", got, harness.reference(*more, other_mask.allowed).o
        )
        if measured.rank > 1e-3:
            return measured
    same = case_mask(harness, c)  # the same sizes, another mask of the same kind
    repeated = harness.attend(q, k, v, **same.options)
    return worst(
        compare(
            "a call with another mask of the same shape", repeated, harness.reference(q, k, v, same.allowed).o
        ),
        compare("the first call, repeated", harness.attend(q, k, v, **masking.options), first),
        require("an earlier output was overwritten", torch.equal(output, first)),
        *(
            require(f"the input {name} was modified", torch.equal(x, y))
            for name, x, y in zip("qkv", (q, k, v), before)
        ),
    )


def model_stateless(harness: Harness, c: Case) -> Measurement:
    """A longer input and a larger batch between two equal calls, against a fresh copy of the module."""
    used, x = harness.module_copy(), harness.sequence(c.b, c.n)
    longer = min(c.n + 3, harness.model.max_length)
    others = [(harness.sequence(c.b, longer), c.b), (harness.sequence(c.b + 1, c.n), c.b + 1)]
    context, before = harness.context(c.b, c.n), x.clone()
    options: list[dict[str, Any]] = [{}]
    if harness.supports("lengths"):
        options.append({"lengths": harness.randint(c.n + 1, c.b, low=1)})
    measurements = []
    with torch.no_grad():
        first = [harness.run(x, context, used, **arguments).clone() for arguments in options]
        for y, b in others:
            other = harness.context(b, 4)
            after, fresh = harness.run(y, other, used), harness.run(y, other, harness.module_copy())
            measurements.append(compare("an input of another size after other calls", after, fresh))
        repeated = [harness.run(x, context, used, **arguments) for arguments in options]
    return worst(
        *measurements,
        *(compare("the first call, repeated", after, before_) for after, before_ in zip(repeated, first)),
        require("the input was modified", torch.equal(x, before)),
    )


def _any_size(harness: Harness) -> str | None:
    return "the target accepts only fixed lengths" if {"n", "b"} & set(harness.function.sizes) else None


def _caching_masks() -> Function:
    correct = reference_function()
    cached: dict[Any, Tensor] = {}

    def call(q, k, v, *, allowed=None, **options):
        if allowed is not None:
            allowed = cached.setdefault((q.shape, k.shape, allowed.dim()), allowed)
        return correct.call(q, k, v, allowed=allowed, **options)

    claims = correct.claims - {"documents", "lengths", "window", "causal"}
    return Function("a mask cached by its shape", call, claims=claims, alignment="bottom-right")


def _misread(x: Tensor) -> Tensor:
    """What a kernel reads that assumes contiguous storage."""
    return x if x.is_contiguous() else x.as_strided(x.shape, x.contiguous().stride())


def _past_64(q, k, v, options):
    shift = torch.zeros_like(k)
    shift[..., 64:, :] = 1e-3
    return (q, k + shift, v), options


LAWS = (
    Law(
        "L57",
        "any memory layout",
        "inputs with other strides and offsets, and copies of one input, give the same outputs",
        "every target",
        {
            "function": Trial(
                any_layout, lambda harness: harness.space(mask=harness.mask_kinds(), layout=LAYOUTS)
            ),
            "model": Trial(
                model_any_layout,
                lambda harness: {"b": (1, 2, 3), "n": sequence_lengths(harness)},
                unless=sequences,
            ),
        },
        lambda: with_changed_call("strides ignored", lambda q, k, v, options: ((q, _misread(k), v), options)),
    ),
    Law(
        "L61",
        "lengths around tile sizes",
        "outputs and gradients equal the reference at lengths around 16, 32, 64, 128 and 256",
        "every target",
        {
            "function": Trial(
                around_tile_sizes,
                lambda harness: harness.space(
                    b=(1,),
                    h=(1, 2),
                    n=TILES,
                    m=TILES if harness.supports("n≠m") else None,
                    d_k=(8,),
                    d_v=None,
                    mask=harness.mask_kinds(),
                ),
            )
        },
        lambda: with_changed_call("an error past key 64", _past_64),
    ),
    Law(
        "L62",
        "calls are stateless",
        "f(x), f(y), f(x): the first and the last output are equal, and x is unchanged",
        "every target",
        {
            "function": Trial(stateless, call_space(), unless=_any_size),
            "model": Trial(
                model_stateless,
                lambda harness: {
                    "b": (1, 2, 3),
                    "n": sequence_lengths(harness)[:-1] or sequence_lengths(harness),
                },
                unless=sequences,
            ),
        },
        _caching_masks,
    ),
)
