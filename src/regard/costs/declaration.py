"""The cost of a declaration: a tree built with numbers, and again with symbols if a formula is requested."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache, partial
from typing import Any

from .. import spec as specs
from ..errors import SpecError
from ..spec import Spec
from ..spec.base import require_positive
from .flops.attention import attention
from .flops.baselines import convolutional, mixing, recurrent
from .flops.models import block, embedding, encoder_decoder, stack, vision
from .memory import Memory
from .memory.attention import attention_facts
from .memory.step import training_of
from .sizes import Numbers, Request, Scope, Symbols, root_scope
from .subject import Subject
from .tree import Cost, Pairs, Part

BUILDERS: dict[type, Callable[[Any, Scope], Part]] = {
    specs.Attention: lambda s, scope: attention(s, scope, cross=s.d_context is not None),
    specs.Block: block,
    specs.Embedding: embedding,
    specs.Encoder: lambda s, scope: stack(s, scope, "model"),
    specs.Decoder: lambda s, scope: stack(s, scope, "model"),
    specs.EncoderDecoder: encoder_decoder,
    specs.Vision: vision,
    specs.Recurrent: recurrent,
    specs.Convolutional: convolutional,
    specs.Mixing: mixing,
}
TWO_LENGTHS = (specs.Attention, specs.EncoderDecoder, specs.Recurrent)


def price(request: Request) -> Cost:
    """The cost of a declaration."""
    tree, pairs = build_tree(request, Numbers())
    sizes = {
        "n": request.n,
        "m": request.m,
        "batch": request.batch,
        "dtype": str(request.dtype).removeprefix("torch."),
        "device": request.device,
        "train": request.train,
    }
    if not has_context(request.spec):
        del sizes["m"]
    return Cost(
        repr(request.spec),
        sizes,
        tree,
        pairs,
        remember=lambda: memory_of(request),
        fitting=partial(Subject(request.spec).fits, request),
        formulas=lambda: _symbolic_tree(request),
        request=request,
    )


def memory_of(request: Request) -> Memory | None:
    """The memory of a declared model at these sizes; None for declarations that are no module by themselves."""
    if isinstance(request.spec, specs.Mixing):
        return None
    return _memory(replace(request, train=training_of(request.train)))


@lru_cache(maxsize=16)
def _memory(request: Request) -> Memory:
    setting = Subject(request.spec).setting(request.size, request.train, request.dtype, request.device)
    return Memory(setting, attention_facts(request))


def _symbolic_tree(request: Request) -> tuple[Part, dict[Any, int]]:
    symbols = Symbols()
    return build_tree(request, symbols)[0], symbols.values


def build_tree(
    request: Request, reader: Numbers | Symbols, ignore_patterns: bool = False
) -> tuple[Part, tuple[Pairs, ...]]:
    """The tree, with numbers or with symbols, and the pairs of each attention in it."""
    kind = type(request.spec)
    if kind not in BUILDERS:
        raise SpecError(
            f"{request.spec!r} has no width of its own; ask for the cost of the block or model that contains it"
        )
    scope = root_scope(request, reader, ignore_patterns)
    tree = BUILDERS[kind](request.spec, scope)
    return tree, tuple(replace(p, path=p.path.removeprefix(f"{tree.name}/")) for p in scope.attentions)


def check_lengths(spec: Spec, n: int | None, m: int | None) -> tuple[int, int]:
    """(n, m): an image model has its own length, and m is for models that read a second sequence."""
    if isinstance(spec, specs.Vision):
        if n not in (None, spec.tokens) or m is not None:
            raise SpecError(
                f"n={n}, m={m}: an image of {spec.image} in patches of {spec.patch} is {spec.tokens} tokens; "
                f"leave n and m out, or declare another image size"
            )
        return spec.tokens, spec.tokens
    if n is None:
        raise SpecError("n is missing: pass the number of positions, for example n=1000")
    require_positive("n", n)
    if m is None:
        return n, n
    require_positive("m", m)
    if not has_context(spec):
        raise SpecError(f"m={m}: {type(spec).__name__} attends to its own {n} positions only; leave m out")
    return n, m


def has_context(spec: Spec) -> bool:
    """Whether the model attends to a second sequence, of length m."""
    if isinstance(spec, specs.Block):
        return spec.cross is not None
    if isinstance(spec, specs.Decoder):
        return spec.block.cross is not None
    return isinstance(spec, TWO_LENGTHS)


def with_biases(spec: Any, biases: str) -> Any:
    """The same declaration with biases in no linear map, in the output of attention only, or in all.

    Attention and feed-forward change; norms, patches and heads keep their declaration.
    """
    match spec:
        case specs.Attention():
            return replace(spec, biases=biases)
        case specs.FeedForward():
            return replace(spec, bias=biases == "all")
    if not is_dataclass(spec):
        return spec
    changed = {
        f.name: with_biases(getattr(spec, f.name), biases)
        for f in fields(spec)
        if isinstance(getattr(spec, f.name), Spec)
    }
    return replace(spec, **changed)  # type: ignore[type-var]
