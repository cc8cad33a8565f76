"""From a declaration to its tree: read once with numbers, once more with symbols where a formula is asked for."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from .. import spec as specs
from ..errors import SpecError
from ..spec import Spec
from .flops.attention import attention
from .flops.baselines import convolutional, mixing, recurrent
from .flops.models import block, embedding, encoder_decoder, stack, vision
from .memory.report import memory_of
from .sizes import Given, Length, Numbers, Scope, Symbols, scope
from .tree import Cost, Pairs, Part

PRICES: dict[type, Callable[[Any, Scope], Part]] = {
    specs.Attention: lambda s, at: attention(s, at, cross=s.d_context is not None),
    specs.Block: block,
    specs.Embedding: embedding,
    specs.Encoder: lambda s, at: stack(s, at, "model"),
    specs.Decoder: lambda s, at: stack(s, at, "model"),
    specs.EncoderDecoder: encoder_decoder,
    specs.Vision: vision,
    specs.Recurrent: recurrent,
    specs.Convolutional: convolutional,
    specs.Mixing: mixing,
}
TWO_LENGTHS = (specs.Attention, specs.EncoderDecoder, specs.Recurrent)


def price(given: Given) -> Cost:
    """The cost of a declaration."""
    tree, pairs = read(given, Numbers())
    sizes = {
        "n": given.n,
        "m": given.m,
        "batch": given.batch,
        "dtype": str(given.dtype).removeprefix("torch."),
    }
    sizes |= {"device": given.device, "train": given.train}
    if not looks_across(given.spec):
        del sizes["m"]
    return Cost(
        repr(given.spec),
        sizes,
        tree,
        pairs,
        memory=memory_of(given),
        formulas=lambda: _write(given),
        facts=given,
    )


def _write(given: Given) -> tuple[Part, dict[Any, int]]:
    by = Symbols()
    return read(given, by)[0], by.values


def read(
    given: Given, by: Numbers | Symbols, ignore_patterns: bool = False
) -> tuple[Part, tuple[Pairs, ...]]:
    """The tree, by numbers or by symbols, and the masks met on the way."""
    kind = type(given.spec)
    if kind not in PRICES:
        raise SpecError(
            f"{given.spec!r} is a part that does not know its width; price the block or the model that holds it"
        )
    outer = scope(given, by, ignore_patterns)
    tree = PRICES[kind](given.spec, outer)
    return tree, tuple(replace(p, where=p.where.removeprefix(f"{tree.name}/")) for p in outer.seen)


def lengths(spec: Spec, n: int | None, m: int | None) -> tuple[int, int]:
    """(n, m), checked: an image says how long it is, a model without a second sequence has no m."""
    if isinstance(spec, specs.Vision):
        if n not in (None, spec.tokens) or m is not None:
            raise SpecError(
                f"n={n}, m={m}: an image of {spec.image} in patches of {spec.patch} is {spec.tokens} tokens; "
                f"leave n and m out, or declare another image"
            )
        return spec.tokens, spec.tokens
    if n is None:
        raise SpecError("how long? give n=, the number of positions, for example n=1000")
    need_whole("n", n)
    if m is None:
        return n, n
    need_whole("m", m)
    if not looks_across(spec):
        raise SpecError(f"m={m}: {type(spec).__name__} looks at its own {n} positions; leave m out")
    return n, m


def looks_across(spec: Spec) -> bool:
    """Whether there is a second sequence, m long."""
    if isinstance(spec, specs.Block):
        return spec.cross is not None
    if isinstance(spec, specs.Decoder):
        return spec.block.cross is not None
    return isinstance(spec, TWO_LENGTHS)


def need_whole(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(f"{name}={value!r}: a whole number of at least 1 is needed")


def with_biases(spec: Any, word: str) -> Any:
    """The same declaration with biases in no linear map, in attention's output alone, or in all.

    Attention and feed-forward change; norms, patches and heads stay as declared.
    """
    match spec:
        case specs.Attention():
            return replace(spec, biases=word)
        case specs.FeedForward():
            return replace(spec, bias=word == "all")
    if not is_dataclass(spec):
        return spec
    changed = {
        f.name: with_biases(getattr(spec, f.name), word)
        for f in fields(spec)
        if isinstance(getattr(spec, f.name), Spec)
    }
    return replace(spec, **changed)  # type: ignore[type-var]


__all__ = ["Length", "lengths", "looks_across", "need_whole", "price", "read", "with_biases"]
