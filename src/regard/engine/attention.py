"""The entry point to attention."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .. import compat, reference
from ..errors import SpecError
from ..pattern import At, Pattern, full
from ..reference import Ties
from .backends import PREPARED, choose
from .call import (
    Bias,
    Call,
    check,
    facts_of,
    normalized,
    simplified,
)

# Looked up once: a name behind three dots costs as much as what it reads.
_compiling, _grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_transforms, _modes, _autocast = compat.transforms_active, compat.dispatch_modes, compat.autocast_active
_prepared = PREPARED.get


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
    **foreign: Any,
) -> Float[Tensor, "b h n d_v"] | tuple[Float[Tensor, "b h n d_v"], Float[Tensor, "b h n"]]:
    """softmax(scale · q kᵀ + bias) v over the pairs of the pattern, by the fastest exact backend.

    pattern: a `Pattern`, or a bool tensor that broadcasts to (b, h, n, m), True = may attend; None is every pair.
    lengths: keys at and past lengths[b] are hidden, whatever they hold (NaN too); queries never are.
    bias: added to the scores; a tensor that broadcasts to (b, h, n, m), or a bias by distance.
    scale: None is 1/√d_k; 0 the mean of the values; inf the hard limit, where tied keys share (`ties`).
    at: the query offset: query i is at position at + i; one offset per batch row, or (start, step); None is m − n.
    backend: "auto", or "reference", "sdpa", "tiles" (CPU), "triton" (CUDA), "flex"; `explain` says which and why.
    Fewer key/value heads than query heads are shared by groups; d_v may differ from d_k.
    A query with no allowed key gets zeros, and finite gradients.
    With return_lse, also ln Σ exp(scores), differentiable.
    """
    if foreign:
        raise _not_an_argument(foreign)
    if lengths is not None or at is not None or type(pattern) is Tensor:
        pattern, lengths, at = simplified(q, k, pattern, lengths, at)
    key = None
    if lengths is at is bias is None and not dropout_p and not return_lse and ties == "share":
        key = _key(q, k, v, pattern, scale, backend)
        if key is not None and (direct := _prepared(key)) is not None:
            return direct(q, k, v)
    given = _call(q, k, v, pattern, (lengths, bias, scale, ties, float(dropout_p), at, return_lse))
    call = normalized(given)
    prepared = choose(facts_of(call), backend)
    if _compiling():
        assert prepared.run is not None
        o, lse = prepared.run(call)
    else:
        if key is not None and prepared.build is not None and call.q is q:
            PREPARED.put(key, prepared.direct)
        o, lse = prepared(call)
    return (o, lse) if return_lse else o  # type: ignore[return-value]


def weights(
    q: Float[Tensor, "b h n d_k"],
    k: Float[Tensor, "b h_kv m d_k"],
    pattern: Pattern | Tensor | None = None,
    *,
    lengths: Int[Tensor, " b"] | None = None,
    bias: Bias = None,
    **options: Any,
) -> Float[Tensor, "b h n m"]:
    """softmax(scale · q kᵀ + bias): the weights that `attention` mixes the values with, as a dense table.

    options: scale, ties and at, as in `attention`.
    """
    scale, ties, at = options.pop("scale", None), options.pop("ties", "share"), options.pop("at", None)
    if options:
        raise TypeError(f"weights() got an unexpected keyword argument {next(iter(options))!r}")
    call = normalized(_call(q, k, k, pattern, (lengths, bias, scale, ties, 0.0, at, False))).hide()
    k = reference.repeat_heads(call.k, q.shape[1])
    return reference.attend(
        call.q, k, k, call.allowed(), bias=call.dense_bias(), scale=call.scale, ties=call.ties
    ).weights


def call_of(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | Tensor | None = None, **options: Any) -> Call:
    """The arguments of `attention`, checked, without those that change nothing."""
    names = "lengths", "bias", "scale", "ties", "dropout_p", "at", "return_lse"
    defaults = {"ties": "share", "return_lse": False}
    options.pop("backend", None)
    simple = simplified(q, k, pattern, options.get("lengths"), options.get("at"))
    pattern, options["lengths"], options["at"] = simple
    options["dropout_p"] = float(options.get("dropout_p", 0.0))
    rest = tuple(options.pop(name, defaults.get(name)) for name in names)
    if options:
        raise _not_an_argument(options)
    return _call(q, k, v, pattern, rest)


def _call(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | Tensor | None, options: tuple[Any, ...]
) -> Call:
    """options: lengths, bias, scale, ties, dropout_p, at, return_lse."""
    pattern, table = _pattern_and_table(pattern)
    q, k, v = _autocast_inputs(q, k, v)
    return check(Call(q, k, v, pattern, table, *options))


def _pattern_and_table(given: Pattern | Tensor | None) -> tuple[Pattern, Tensor | None]:
    """A pattern, or a bool tensor with True = may attend. A float mask is refused: 1 may mean either."""
    if given is None:
        return full(), None
    if isinstance(given, Pattern):
        return given, None
    if not isinstance(given, Tensor):
        raise SpecError(f"{given!r} is no pattern; use rg.causal(), rg.window(2), … or a bool tensor")
    if given.dtype != torch.bool:
        raise SpecError(
            f"a {given.dtype} mask as pattern: is 1 'may attend', or is it added to the scores? Say which: "
            f"rg.allowed_from(zero_one=mask), rg.allowed_from(additive=mask), or bias=mask"
        )
    return full(), given


def _key(
    q: Tensor, k: Tensor, v: Tensor, pattern: object, scale: int | float | None, backend: str
) -> tuple | None:
    """All that decides how a call with only these arguments runs; None if data decide, or if a compiler, a transform
    or a dispatch mode must see PyTorch's operations."""
    if _compiling() or type(q) is not Tensor or _transforms() or _modes() or _autocast():
        return None
    if pattern is None:
        text: str | None = ""
    elif not isinstance(pattern, Pattern) or (text := pattern.text) is None:
        return None
    grad = _grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return (
        text, scale, grad, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
        type(k), type(v), backend,
    )  # fmt: skip


def _not_an_argument(foreign: dict[str, Any]) -> Exception:
    """What to write instead of the arguments of other libraries."""
    if "is_causal" in foreign:
        return SpecError(
            "is_causal is no argument here; declare it: rg.attention(q, k, v, pattern=rg.causal())"
        )
    if "attn_mask" in foreign:
        return SpecError(
            "attn_mask is no argument here; give a bool tensor (True = may attend) or rg.causal(), … as pattern=, "
            "and a float tensor that is added to the scores as bias="
        )
    return TypeError(f"attention() got an unexpected keyword argument {next(iter(foreign))!r}")


def _autocast_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, in its dtype, as PyTorch's own attention does; float64 stays."""
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # meta has none
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def allowed_from(
    *,
    zero_one: Tensor | None = None,
    additive: Tensor | None = None,
    padding: Bool[Tensor, "b m"] | None = None,
) -> Bool[Tensor, "..."]:
    """A foreign mask, by the name of its convention, as a bool tensor with True = may attend.

    zero_one: 1 = may attend. additive: 0 = may attend, −∞ (or a float's lowest number) = may not.
    padding: (b, m), True = this key is padding, as nn.MultiheadAttention's key_padding_mask.
    """
    given = [x for x in (zero_one, additive, padding) if x is not None]
    if len(given) != 1:
        raise SpecError("allowed_from takes one mask, by name: zero_one=, additive= or padding=")
    if zero_one is not None:
        return zero_one != 0
    if additive is not None:
        return additive > torch.finfo(additive.dtype).min
    assert padding is not None
    return ~padding[:, None, None, :]
