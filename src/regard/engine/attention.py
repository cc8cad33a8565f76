"""The entry point to attention: its arguments are checked, and those that change nothing are removed."""

from math import inf, isnan, sqrt
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .. import compat, reference
from ..errors import ShapeError, SpecError
from ..pattern import At, Pattern, full, query_offset
from ..position import ByDistance
from ..reference import Ties
from .backends import PREPARED, choose
from .call import Bias, Call, broadcasts, facts_of, readable, replaced

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
    options = {
        "lengths": lengths,
        "bias": bias,
        "scale": scale,
        "ties": ties,
        "dropout_p": dropout_p,
        "at": at,
    }
    call = normalized(_checked(q, k, v, pattern, return_lse=return_lse, **options))
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
    for name in options.keys() - {"scale", "ties", "at"}:
        raise TypeError(f"weights() got an unexpected keyword argument {name!r}")
    call = normalized(_checked(q, k, k, pattern, lengths=lengths, bias=bias, **options)).hide()
    k = reference.repeat_heads(call.k, q.shape[1])
    return reference.attend(
        call.q, k, k, call.allowed(), bias=call.dense_bias(), scale=call.scale, ties=call.ties
    ).weights


def call_of(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | Tensor | None = None, **options: Any) -> Call:
    """The arguments of `attention`, checked, without those that change nothing."""
    options.pop("backend", None)
    pattern, lengths, at = simplified(q, k, pattern, options.pop("lengths", None), options.pop("at", None))
    foreign = {name: x for name, x in options.items() if name not in Call.__dataclass_fields__}
    if foreign:
        raise _not_an_argument(foreign)
    return _checked(q, k, v, pattern, lengths=lengths, at=at, **options)


def _checked(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | Tensor | None, **options: Any) -> Call:
    pattern, table = _pattern_and_table(pattern)
    q, k, v = _autocast_inputs(q, k, v)
    options["dropout_p"] = float(options.get("dropout_p", 0.0))
    return check(Call(q, k, v, pattern, table, **options))


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


# Arguments that change nothing.

Sayable = tuple[Pattern | Tensor | None, Tensor | None, At | Tensor]


def simplified(
    q: Tensor, k: Tensor, pattern: Pattern | Tensor | None, lengths: Tensor | None, at: At | Tensor
) -> Sayable:
    """pattern, lengths and at; None in place of a table of ones, lengths of all keys, and the default query offset.

    Only what can be read without synchronization is replaced; what does not fit is left for `check` to refuse.
    """
    if torch.compiler.is_compiling() or q.dim() != 4 or k.dim() != 4:  # a compiler has symbols for sizes
        return pattern, lengths, at
    (b, h, n, _), m = q.shape, k.shape[2]
    if at is not None and n <= m:
        at = _common_offset(at, b)
        if not isinstance(at, Tensor) and (at == m - n or at == (m - n, 1)):
            at = None
    if lengths is not None and lengths.shape == (b,) and b and readable(lengths):
        lengths = None if min(lengths.tolist()) >= m else lengths
    if type(pattern) is Tensor and pattern.dtype == torch.bool and broadcasts(pattern.shape, (b, h, n, m)):
        pattern = None if _allows_all(pattern) else pattern
    return pattern, lengths, at


def _common_offset(at: At | Tensor, b: int) -> At | Tensor:
    """The offset of all batch rows, where a tensor holds one and the same."""
    if not isinstance(at, Tensor) or at.shape != (b,) or not b or not readable(at) or at.is_floating_point():
        return at
    first, *others = at.tolist()
    return at if any(other != first for other in others) else first


def _allows_all(table: Tensor) -> bool:
    """Whether a bool tensor is all ones. In a large one, the last key of the first query tells most masks apart."""
    if not readable(table) or not table.numel():
        return False
    if table.numel() > 1 << 14 and not bool(table[(0,) * (table.dim() - 1) + (-1,)]):
        return False
    return bool(table.all())


def normalized(call: Call) -> Call:
    """The same call without the default scale, an offset that nothing reads or `ties` that cannot occur, and with a
    scale above 0."""
    changes: dict[str, Any] = {}
    if not call.hard and call.ties != "share":
        changes["ties"] = "share"
    d_k = call.q.shape[-1]
    if call.scale is not None and d_k and call.scale in (d_k**-0.5, 1 / sqrt(d_k)):
        changes["scale"] = None
    if call.at is not None and not call.pattern.reads_query and not isinstance(call.bias, ByDistance):
        changes["at"] = None
    return _above_zero(replaced(call, **changes) if changes else call)


def _above_zero(call: Call) -> Call:
    """The same call with a scale above 0: PyTorch's causal CPU kernel gives NaN for others (0 · −∞)."""
    if call.scale is None or call.scale > 0:
        return call
    if call.scale < 0:
        return replaced(call, q=-call.q, scale=-call.scale)
    return replaced(call, q=0 * call.q, scale=1.0)


# Arguments that do not fit.


def check(call: Call) -> Call:
    """The call, if its tensors fit one another; else a ShapeError that says which do not."""
    q, k, v = call.q, call.k, call.v
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ShapeError(f"{name} has shape {tuple(x.shape)}; (batch, heads, positions, width) is needed")
    if not (q.device == k.device == v.device):
        raise ShapeError(f"q is on {q.device}, k on {k.device}, v on {v.device}; put all three on one device")
    if not (q.dtype == k.dtype == v.dtype):
        raise ShapeError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}; give all three one dtype")
    if q.shape[-1] != k.shape[-1]:
        raise ShapeError(f"queries are {q.shape[-1]} wide and keys {k.shape[-1]}; q·k needs one width d_k")
    if k.shape[:3] != v.shape[:3]:
        raise ShapeError(
            f"k is {tuple(k.shape)} and v {tuple(v.shape)}; they need the same batch, heads and positions"
        )
    if q.shape[0] != k.shape[0]:
        raise ShapeError(
            f"a batch of {q.shape[0]} queries over a batch of {k.shape[0]} keys; give both the same"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ShapeError(f"{k.shape[1]} key/value heads do not divide {q.shape[1]} query heads")
    _check_extras(call)
    return call


def _check_extras(call: Call) -> None:
    q, n, m = call.q, call.n, call.m
    b = q.shape[0]
    if call.lengths is not None and tuple(call.lengths.shape) != (b,):
        raise ShapeError(
            f"lengths has shape {tuple(call.lengths.shape)}; one per batch row is needed: ({b},)"
        )
    if isinstance(call.at, Tensor) and tuple(call.at.shape) != (b,):
        raise ShapeError(f"at has shape {tuple(call.at.shape)}; one offset per batch row is needed: ({b},)")
    if not isinstance(call.at, Tensor):
        query_offset(call.pattern, n, m, call.at)
    for name, x in (("pattern", call.table), ("bias", call.bias if isinstance(call.bias, Tensor) else None)):
        if x is not None and not broadcasts(x.shape, (b, q.shape[1], n, m)):
            raise ShapeError(
                f"{name} has shape {tuple(x.shape)}, which does not broadcast to "
                f"(batch, heads, queries, keys) = {(b, q.shape[1], n, m)}"
            )
    if isinstance(call.bias, Tensor) and call.bias.dtype == torch.bool:
        raise SpecError(
            "a bool tensor as bias would add 0 and 1 to the scores; give it as pattern, True = may attend"
        )
    if isinstance(call.bias, ByDistance):
        if n > m and call.at is None:
            raise ShapeError(
                f"{n} queries over {m} keys: a bias by distance compares positions, and query 0 would be at "
                f"{m - n}; give the query offset with at=, for example at=0"
            )
        for x in (call.bias.table, call.bias.slopes):
            if x is not None and x.shape[0] != q.shape[1]:
                raise ShapeError(f"a bias by distance for {x.shape[0]} heads and queries with {q.shape[1]}")
    if call.scale is not None and isnan(call.scale):
        raise SpecError("scale=nan is no number; use None for 1/√d_k")
    if call.scale == -inf:
        raise SpecError("scale=-inf has no meaning; scale=inf is hard attention")
    if call.hard and call.return_lse:
        raise SpecError("scale=inf has no log-sum-exp: ask for return_lse=True with a finite scale only")
    if not 0.0 <= call.dropout_p < 1.0:
        raise SpecError(f"dropout_p={call.dropout_p} is not in [0, 1)")
    if call.ties not in ("share", "first"):
        raise SpecError(f"ties={call.ties!r}; use 'share' (tied keys share equally) or 'first'")
