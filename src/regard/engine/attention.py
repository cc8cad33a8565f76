"""The one door to attention."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .. import reference
from ..pattern import At, Pattern, query_offset
from ..reference import Ties
from . import choose, dense, masked, packed_traced, plain, quick, walk
from .call import Bias, Call, as_pattern_and_table, check, readable, replaced
from .cpu import by_distance, packed, progressions
from .cpu.batches import program


def attention(
    q: Float[Tensor, "b h n d_k"],
    k: Float[Tensor, "b h_kv m d_k"],
    v: Float[Tensor, "b h_kv m d_v"],
    pattern: Pattern | Tensor | None = None,
    *,
    lengths: Int[Tensor, " b"] | None = None,
    bias: Bias = None,
    scale: int | float | None = None,
    ties: Ties = "share",
    dropout_p: int | float = 0.0,
    at: At | Tensor = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Float[Tensor, "b h n d_v"] | tuple[Float[Tensor, "b h n d_v"], Float[Tensor, "b h n"]]:
    """softmax(scale · q kᵀ + bias) v over the pairs of the pattern, by the fastest exact way.

    pattern: a `Pattern`, or a bool tensor that broadcasts to (b, h, n, m), True = may look; None is every pair.
    lengths: keys at and past lengths[b] are hidden, whatever they hold (NaN too); queries never are.
    bias: added to the scores; a tensor that broadcasts to (b, h, n, m), or a bias by distance.
    scale: None is 1/√d_k; 0 the mean of the values; inf the hard limit, where tied keys share (`ties`).
    at: where the queries stand: an offset, one a batch row, or (start, step); None is i + m − n.
    Fewer key/value heads than query heads are shared by groups; d_v may differ from d_k.
    A query that may look nowhere gets zeros, and finite gradients.
    With return_lse, also ln Σ exp(scores), differentiable.
    """
    if lengths is not None and _none_shorter(lengths, q, k):
        lengths = None
    usual = lengths is None and bias is None and at is None and not dropout_p and not return_lse
    usual = usual and ties == "share" and backend in ("auto", "progressions")
    key = quick.key(q, k, v, pattern, scale, backend) if usual else None
    if key is not None and (way := quick.known.get(key)) is not None:
        return way(q, k, v)
    given = _call(q, k, v, pattern, lengths, bias, scale, ties, dropout_p, at, return_lse)
    facts = choose.facts(given)
    chosen = choose.choose(facts, backend).backend
    way = quick.remember(key, given, facts, chosen)
    if way is not None and q.is_cpu:  # the first call gives the bits of all others
        return way(q, k, v)
    o, lse = _run(given, chosen)
    return o if lse is None or not return_lse else (o, lse)


def weights(
    q: Float[Tensor, "b h n d_k"],
    k: Float[Tensor, "b h_kv m d_k"],
    pattern: Pattern | Tensor | None = None,
    *,
    lengths: Int[Tensor, " b"] | None = None,
    bias: Bias = None,
    scale: int | float | None = None,
    ties: Ties = "share",
    at: At | Tensor = None,
) -> Float[Tensor, "b h n m"]:
    """softmax(scale · q kᵀ + bias): the weights that `attention` mixes the values with, as a dense table."""
    call = _call(q, k, k, pattern, lengths, bias, scale, ties, 0.0, at, False).hide()
    k = reference.repeat_heads(call.k, q.shape[1])
    return reference.attend(
        call.q, k, k, call.allowed(), bias=call.dense_bias(), scale=call.scale, ties=ties
    ).weights


def _call(q, k, v, pattern, lengths, bias, scale, ties, dropout_p, at, return_lse) -> Call:
    """The arguments of `attention`, checked and made ready."""
    pattern, table = as_pattern_and_table(pattern)
    q, k, v = _cast(q, k, v)
    call = Call(q, k, v, pattern, table, lengths, bias, scale, ties, float(dropout_p), at, return_lse)
    return _above_zero(check(call))


def _run(call: Call, backend: str) -> tuple[Tensor, Tensor | None]:
    if backend not in ("progressions", "packed"):  # which never read a hidden key
        call = call.hide()
    match backend:
        case "dense":
            return dense.attend(call), None
        case "masked":
            return masked.attend(call), None
        case "plain":
            return plain.attend(call)
        case "flex":
            from . import flex

            with torch.autocast(call.q.device.type, enabled=False):
                return flex.attend(call)
    assert not isinstance(call.at, Tensor) and not isinstance(call.bias, Tensor)  # choose.py saw to it
    if backend == "packed" and torch.compiler.is_compiling():
        return packed_traced.attend(call.q, call.k, call.v, call.pattern, call.at, call.factor, call.lengths)
    if backend == "packed":
        ways = packed.programs(call.pattern, call.n, call.m, call.at)
        assert ways is not None
        asked: dict[str, Any] = {"scale": call.factor, "lengths": call.lengths}
        return progressions.attend(call.q, call.k, call.v, call.pattern, ways, **asked)
    start, step = query_offset(call.pattern, call.n, call.m, call.at)
    if backend == "progressions" or torch.compiler.is_compiling():
        place = call.pattern, start, step, call.factor, call.lengths
        return walk.attend(call.q, call.k, call.v, *place, call.bias, call.dropout_p)
    way = program(call.pattern, call.n, call.m, start, step)
    more: dict[str, Any] = {"scale": call.factor, "lengths": call.lengths, "dropout_p": call.dropout_p}
    more["pattern"] = call.pattern
    with torch.autocast(call.q.device.type, enabled=False):  # cast once, at the door
        return by_distance.attend(call.q, call.k, call.v, way, call.bias, **more)


def _none_shorter(lengths: Tensor, q: Tensor, k: Tensor) -> bool:
    """Whether every row is as long as the keys, where that can be seen for nothing; lengths that do not fit are
    left to the check."""
    fits = q.dim() == 4 and tuple(lengths.shape) == (q.shape[0],) and len(lengths) > 0
    return fits and readable(lengths) and int(lengths.min()) >= k.shape[-2]


def _cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, to its dtype, as PyTorch's own attention does; float64 stays."""
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # meta has none
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _above_zero(call: Call) -> Call:
    """The same call with a scale above 0: PyTorch's causal CPU kernel gives NaN for others (0 · −∞)."""
    if call.scale is None or call.scale > 0:
        return call
    return (
        replaced(call, q=-call.q, scale=-call.scale)
        if call.scale < 0
        else replaced(call, q=0 * call.q, scale=1.0)
    )
