"""Memory of a declared attention by formula: keys and values, the table of weights, what the cores save."""

from typing import Any

from ... import spec
from ..sizes import Request, Scope, Symbols


def _last_block(declared: Any) -> tuple[Any, int]:
    """The block of a model's (last) stack, and how many there are; for what is no stack, itself."""
    stack = getattr(declared, "decoder", getattr(declared, "encoder", declared))
    return getattr(stack, "block", stack), getattr(stack, "layers", 1)


def attention_of(declared: Any) -> Any:
    """The self-attention of a model's (last) stack; None if it has none."""
    block, _ = _last_block(declared)
    inner = getattr(block, "attention", block)
    return inner if isinstance(inner, spec.Attention) else None


def _scope(request: Request, symbols: Symbols | None = None) -> Scope:
    alone = attention_of(request.spec) is request.spec
    return Scope(request, symbols, request.n, request.m if alone else request.n)


def one_attention(request: Request) -> int:
    """Values of one attention layer for one batch row: q, k, v, the weights, the outputs of the heads."""
    s, n, m = attention_of(request.spec).sizes, request.n, _scope(request).m
    return s.heads * n * s.d_k + s.kv_heads * m * (s.d_k + s.d_v) + s.heads * n * m + s.heads * n * s.d_v


def kv_cache(request: Request) -> int:
    """Bytes of keys and values of every layer for n positions; with cross-attention also those of the context."""
    block, layers = _last_block(request.spec)
    read = [(attention_of(request.spec).sizes, _scope(request).m)]
    if getattr(block, "cross", None) is not None:
        read.append((block.cross.sizes, request.m))
    values = sum(s.kv_heads * length * (s.d_k + s.d_v) for s, length in read)
    return values * layers * request.batch * request.dtype.itemsize


def saved_by_cores(request: Request, symbols: Symbols | None = None) -> dict[str, Any]:
    """Bytes that the self-attention cores of the (last) stack save for the backward pass, as numbers or formulas.

    q, k and v, and the weights, or, where a kernel does not store them, the output and a log-sum-exp.
    """
    scope, (_, layers) = _scope(request, symbols), _last_block(request.spec)
    s, n, m, size = scope.sizes(attention_of(request.spec)), scope.n, scope.m, scope.itemsize
    count = scope.b * (scope.size("layers", layers) if layers > 1 else 1)
    projected = s.heads * n * s.d_k + s.kv_heads * m * (s.d_k + s.d_v)
    stored = count * size * (projected + s.heads * n * m)
    streamed = count * (size * (projected + s.heads * n * s.d_v) + max(size, 4) * s.heads * n)
    kinds = {"weights stored": stored, "weights streamed": streamed}
    return kinds if symbols is None else {kind: formula.expand() for kind, formula in kinds.items()}
