"""Memory of attention by formula: keys and values, the table of weights, what the cores save."""

from typing import Any

from ... import spec
from ..sizes import Request, Symbols
from .report import AttentionFacts

WITHOUT = (spec.Recurrent, spec.Convolutional, spec.Embedding, spec.Mixing)


def attention_facts(request: Request) -> AttentionFacts:
    """All of it for a declared model; zeros where it has no attention."""
    if isinstance(request.spec, WITHOUT):
        return AttentionFacts()
    one, cache = one_attention(request) * request.itemsize, kv_cache(request)
    return AttentionFacts(one, cache, attention_cores(request), lambda: formulas(request))


def last_stack(declared: Any) -> Any:
    declared = declared.decoder if isinstance(declared, spec.EncoderDecoder) else declared
    return declared.encoder if isinstance(declared, spec.Vision) else declared


def attention_of(declared: Any) -> spec.Attention:
    """The self-attention of a model's (last) stack."""
    inner = last_stack(declared)
    inner = getattr(inner, "block", inner)
    return getattr(inner, "attention", inner)


def one_attention(request: Request) -> int:
    """Values of one attention layer for one batch row: q, k, v, the weights, the outputs of the heads."""
    inner = attention_of(request.spec)
    s, n = inner.sizes, request.n
    m = request.m if inner is request.spec else n
    return s.heads * n * s.d_k + s.kv_heads * m * (s.d_k + s.d_v) + s.heads * n * m + s.heads * n * s.d_v


def kv_cache(request: Request) -> int:
    """Bytes of keys and values of every layer for n positions; with cross-attention also those of the context."""
    declared = last_stack(request.spec)
    own, cross = attention_of(declared), getattr(getattr(declared, "block", declared), "cross", None)

    def one_row(a: spec.Attention, length: int) -> int:
        return a.sizes.kv_heads * length * (a.sizes.d_k + a.sizes.d_v)

    values = one_row(own, request.m if own is request.spec else request.n)
    values += 0 if cross is None else one_row(cross, request.m)
    return values * getattr(declared, "layers", 1) * request.batch * request.itemsize


def core_terms(b: Any, n: Any, m: Any, s: Any, layers: Any, size: int) -> dict[str, Any]:
    """Bytes that the self-attention cores save: q, k and v, and the weights, or the output and a log-sum-exp."""
    projected = s.heads * n * s.d_k + s.kv_heads * m * (s.d_k + s.d_v)
    streamed = size * (projected + s.heads * n * s.d_v) + max(size, 4) * s.heads * n
    stored = size * (projected + s.heads * n * m)
    return {"weights stored": layers * b * stored, "weights streamed": layers * b * streamed}


def attention_cores(request: Request) -> dict[str, int]:
    """Bytes that the self-attention cores of the (last) stack save for the backward pass, by kind of kernel."""
    inner = attention_of(request.spec)
    m = request.m if inner is request.spec else request.n
    layers = getattr(last_stack(request.spec), "layers", 1)
    return core_terms(request.batch, request.n, m, inner.sizes, layers, request.compute_dtype.itemsize)


def formulas(request: Request) -> dict[str, Any]:
    """The same as sympy expressions in b, n, m, the widths and the number of layers."""
    reader, inner = Symbols(), attention_of(request.spec)
    n = reader.size("n", request.n)
    m = reader.size("m", request.m) if inner is request.spec and request.m != request.n else n
    layers = getattr(last_stack(request.spec), "layers", 1)
    count = reader.size("layers", layers) if layers > 1 else 1
    b, size = reader.size("b", request.batch), request.compute_dtype.itemsize
    return {k: v.expand() for k, v in core_terms(b, n, m, reader.attention(inner), count, size).items()}
