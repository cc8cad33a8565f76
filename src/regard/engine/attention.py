"""The entry point to attention: its arguments are checked, and those that change nothing are removed."""

from collections.abc import Callable, Sequence
from functools import partial
from math import inf, prod, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from .. import compat, reference
from ..errors import (
    ShapeError,
    SpecError,
    in_context_parallel,
    not_a_pattern,
    not_an_argument,
    require_device,
    require_offset,
    require_one_kind,
    require_tensors,
    require_whole_sequences,
)
from ..pattern import At, Pattern, causal, full, per_head, query_offset
from ..pattern.causal_bias import read_causal_bias
from ..position import ByDistance
from ..reference import Ties
from .backends import PREPARED, calls_with_data, choose, named
from .call import Bias, Cache, Call, Outputs, broadcasts, facts_of, readable, replaced, without_default_offset
from .merge import by_heads, merge_sink

# Bound once: looking up torch.compiler.is_compiling takes as long as calling it.
_compiling, _grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_transforms, _modes = compat.transforms_active, compat.dispatch_modes
_autocast, _higher = compat.autocast_active, compat.higher_derivatives
_plain_sdpa = F.scaled_dot_product_attention
INTEGERS = torch.int32, torch.int64
MAX_QUERIES = 64  # of a call whose number of keys may differ from that of an earlier one
TENSORS = Tensor, torch.nn.Parameter

Patterns = Pattern | Sequence[Pattern] | Tensor | None


def attention(
    q: Float[Tensor, "*h n d_k"],
    k: Float[Tensor, "*h_kv m d_k"],
    v: Float[Tensor, "*h_kv_ m d_v"],
    pattern: Patterns = None,
    *,
    lengths: Int[Tensor, "b *stop"] | None = None,
    bias: Bias = None,
    scale: int | float | None = None,
    softcap: int | float | None = None,
    sink_logits: Float[Tensor, " h"] | None = None,
    ties: Ties = "share",
    dropout_p: int | float = 0.0,
    at: At | Tensor = None,
    return_lse: bool = False,
    backend: str = "auto",
    **foreign: Any,
) -> Float[Tensor, "*o n d_v"] | tuple[Float[Tensor, "*o n d_v"], Float[Tensor, "*o n"]]:
    """softmax(scale · q kᵀ + bias) v over the pairs of the pattern, by the fastest exact backend.

    q, k, v: (batch, heads, positions, width). Leading axes may be missing, additional or broadcast (size 1), as in
    PyTorch's scaled_dot_product_attention.
    pattern: a `Pattern`; one per head (`per_head`, or a list); or a bool tensor that broadcasts to (b, h, n, m) and
    is True where a query may attend. None allows every pair.
    lengths: keys from index lengths[b] on are hidden, whatever they contain (even NaN); queries never are. With shape
    (b, 2), the visible keys of row b are [lengths[b, 0], lengths[b, 1]), for left padding.
    bias: added to the scores; a tensor that broadcasts to (b, h, n, m), or a bias by distance.
    scale: None means 1/√d_k; 0 gives the mean of the values; inf gives hard attention, where `ties` decides ties.
    softcap: c replaces the scores by c · tanh(scale · q kᵀ / c), before the bias is added (Gemma 2).
    sink_logits: one logit per head that takes part in each softmax but has no value (gpt-oss).
    at: the query offset. Query i is at position at + i; one offset per batch row, or (start, step); None is m − n.
    backend: "auto", "reference", "sdpa", "tiles" (CPU), "triton" (CUDA), "flex", "flash4"; see `explain`, `backend`.

    Key/value heads may be fewer than query heads (grouped heads); d_v may differ from d_k. A query with no allowed
    key gets zeros and finite gradients. With return_lse, the differentiable log-sum-exp is returned too.
    """
    if foreign:
        raise not_an_argument(foreign)
    backend = named(backend)
    rows = _row_extras(q, lengths, at, sink_logits)
    if rows is None or type(pattern) is Tensor:
        pattern, lengths, at = without_defaults(q, k, pattern, lengths, at)
        rows = _row_extras(q, lengths, at, sink_logits)
    key = without_keys = None
    if rows is not None and bias is None and not dropout_p and not return_lse and ties == "share":
        key = _cache_key(q, k, v, pattern, (scale, softcap), backend, rows)
    calls: Any = None  # looked up only where there is a key: a compiler guards what it sees of the cache
    if key is not None:
        calls = PREPARED if type(key[0]) is str else calls_with_data(pattern, key[0])
        if (direct := calls.get(key)) is not None:
            return direct(q, k, v, lengths, at, sink_logits) if rows else direct(q, k, v)
        if q.is_cuda and not rows and (without_keys := _without_keys(key)) is not None:
            earlier = PREPARED.get(without_keys)
            if earlier is not None and (o := earlier(q, k, v)) is not None:
                return o
    call, front = _checked(
        q, k, v, pattern, lengths=lengths, bias=bias, scale=scale, softcap=softcap, sink_logits=sink_logits,
        ties=ties, dropout_p=dropout_p, at=at, return_lse=return_lse,
    )  # fmt: skip
    if isinstance(call.pattern, per_head):
        o, lse = by_heads(call, lambda heads: _run(heads, backend))
    else:
        unchanged = key is not None and call.q is q and call.at is at
        keep = partial(_keep, calls, (key, without_keys)) if unchanged else None
        o, lse = _run(call, backend, keep)
    if front is not None:
        o, lse = o.reshape(*front, *o.shape[2:]), None if lse is None else lse.reshape(*front, call.n)
    return (o, lse) if return_lse else o  # type: ignore[return-value]


def _run(call: Call, backend: str, keep: Callable[[Any], Any] | None = None) -> Outputs:
    """One call of one pattern. A sink is a part of the softmax with a log-sum-exp and no value: it is merged in.

    keep: is given the function (q, k, v) → o for later calls, if this call has one.
    """
    if call.q.shape[1] == 0:  # no heads: an empty result of the right shape
        o = call.q @ call.k.mT @ call.v
        return o, o.sum(-1)
    if call.v.shape[-1] == 0:  # weights and their log-sum-exp, as of values with one component
        o, lse = _run(replaced(call, v=call.v.sum(-1, keepdim=True)), backend)
        return o[..., :0], lse
    prepared = choose(facts_of(call), backend)
    if keep is not None and prepared.build is not None:
        keep(prepared.direct)
    if call.sink_logits is None or prepared.joins_sink:
        return prepared.run(call) if _compiling() and prepared.run is not None else prepared(call)
    o, lse = _run(replaced(call, sink_logits=None, return_lse=True), backend)
    assert lse is not None
    return merge_sink(o, lse, call.sink_logits)


def weights(
    q: Float[Tensor, "*h n d_k"],
    k: Float[Tensor, "*h_kv m d_k"],
    pattern: Patterns = None,
    *,
    lengths: Int[Tensor, "b *stop"] | None = None,
    bias: Bias = None,
    **options: Any,
) -> Float[Tensor, "*o n m"]:
    """softmax(scale · q kᵀ + bias): the attention weights of `attention`, as a dense table.

    options: scale, softcap, sink_logits, ties and at, as in `attention`.
    """
    for name in options.keys() - {"scale", "softcap", "sink_logits", "ties", "at"}:
        raise TypeError(f"weights() got an unexpected keyword argument {name!r}")
    call, front = _checked(q, k, k, pattern, lengths=lengths, bias=bias, **options)
    call = call.hide()
    k = reference.repeat_heads(call.k, call.q.shape[1])
    terms = {name: getattr(call, name) for name in ("scale", "softcap", "sink_logits", "ties")}
    table = reference.attend(call.q, k, k, call.allowed(), bias=call.dense_bias(), **terms).weights
    return table if front is None else table.reshape(*front, *table.shape[2:])


def call_of(q: Tensor, k: Tensor, v: Tensor, pattern: Patterns = None, **options: Any) -> Call:
    """The arguments of `attention`, checked, without those that change nothing."""
    lengths, at = options.pop("lengths", None), options.pop("at", None)
    pattern, lengths, at = without_defaults(q, k, pattern, lengths, at)
    foreign = {name: x for name, x in options.items() if name not in Call.__dataclass_fields__}
    if foreign:
        raise not_an_argument(foreign)
    return _checked(q, k, v, pattern, lengths=lengths, at=at, **options)[0]


def _checked(
    q: Tensor, k: Tensor, v: Tensor, pattern: Patterns, **options: Any
) -> tuple[Call, tuple[int, ...] | None]:
    """The call, checked and normalized, and the leading axes that its results are reshaped to; None: these are
    (batch, heads)."""
    named = ("lengths", "bias", "sink_logits", "at", "scale")
    require_tensors(q=q, k=k, v=v, **{name: options.get(name) for name in named})
    pattern, options["at"] = read_causal_bias(pattern, options.get("at"), options.get("bias"), q, k)
    pattern, table = pattern_and_table(pattern)
    runs_sharded = isinstance(pattern, full) or (q.is_cuda and isinstance(pattern, causal))
    require_whole_sequences(q, k, v, runs_sharded and table is None)
    q, k, v = _autocast_inputs(q, k, v)
    if not isinstance(options.get("dropout_p", 0.0), int | float):
        raise SpecError(f"dropout_p={options['dropout_p']!r} is not a number in [0, 1)")
    options["dropout_p"] = float(options.get("dropout_p", 0.0))
    q, k, v, front = with_four_axes(q, k, v)
    if front is not None:
        table, options["bias"] = (_flattened(x, front) for x in (table, options.get("bias")))
    return normalized(check(Call(q, k, v, pattern, table, **options))), front


def pattern_and_table(pattern: Pattern | Tensor | Sequence | None) -> tuple[Pattern, Tensor | None]:
    """A pattern, or a bool tensor with True = may attend. A float mask is refused: 1 may mean either."""
    if pattern is None:
        return full(), None
    if isinstance(pattern, Pattern):
        return pattern, None
    if isinstance(pattern, list | tuple):
        return per_head(pattern), None
    if not isinstance(pattern, Tensor):
        raise not_a_pattern(pattern, " or a bool tensor")
    if pattern.dtype != torch.bool:
        raise SpecError(
            f"a {pattern.dtype} mask as pattern: is 1 'may attend', or is it added to the scores? Say which: "
            f"rg.allowed_from(zero_one=mask), rg.allowed_from(additive=mask), or bias=mask"
        )
    return full(), pattern


def _row_extras(q: Tensor, lengths: Any, at: Any, sink: Any = None) -> tuple | None:
    """Shapes and dtypes of lengths, offsets and sinks, and whether sinks are learned; () if there are none of them.

    None: one of them is not an ordinary tensor on the GPU, and its values may have to be read first.
    """
    if lengths is at is sink is None:
        return ()
    for x in (lengths, at):
        on_gpu = x is None or (type(x) is Tensor and x.is_cuda and x.is_contiguous())
        if not on_gpu or (x is not None and (x.dtype not in INTEGERS or x.device != q.device)):
            return None
    if sink is not None and (type(sink) not in TENSORS or not sink.is_cuda or sink.device != q.device):
        return None
    kinds = (None if x is None else (x.shape, x.dtype) for x in (lengths, at, sink))
    return *kinds, sink is not None and sink.requires_grad and _grad_enabled()


def _cache_key(
    q: Tensor, k: Tensor, v: Tensor, pattern: object, factors: tuple, backend: str, rows: tuple = ()
) -> tuple | None:
    """The cache key of a call that has no other arguments. Its first item is the text or the state of the pattern.

    None: a compiler, a transform or a dispatch mode must see PyTorch's operations, or the contents of a tensor decide
    how the call runs and a change of them could not be noticed. factors: scale and softcap.
    """
    if _compiling() or type(q) is not Tensor or not all(map(_is_number, factors)):
        return None
    if _transforms() or _modes() or _autocast() or _higher():
        return None
    if F.scaled_dot_product_attention is not _plain_sdpa and in_context_parallel():
        return None
    text: object = "" if pattern is None else pattern.text if isinstance(pattern, Pattern) else None
    if text is None and isinstance(pattern, Pattern) and q.is_cuda:
        text = pattern.state()
    if text is None:
        return None
    try:
        grad = _grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        return (
            text, *factors, grad, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
            type(k), type(v), backend, *rows,
        )  # fmt: skip
    except (AttributeError, TypeError, RuntimeError):
        return None  # not dense tensors, or scale not a number: `require_tensors` says so


def _without_keys(key: tuple) -> tuple | None:
    """The key of calls with any number of keys, if one may run by the launches of another: few queries, and no
    gradients."""
    text, scale, softcap, grad, q, k, v, *others = key
    if type(text) is not str or grad or len(q) != 4 or q[2] > MAX_QUERIES:
        return None
    return text, scale, softcap, q, (*k[:2], *k[3:]), (*v[:2], *v[3:]), *others


def _keep(calls: Cache, keys: tuple[Any, tuple | None], direct: Any) -> None:
    """For later calls with this key; and for those with another number of keys, which a decoder has at each step."""
    key, without_keys = keys
    calls.put(key, direct)
    if without_keys is not None and hasattr(direct, "with_other_keys"):
        PREPARED.put(without_keys, direct.with_other_keys)


def _is_number(x: object) -> bool:
    return x is None or (isinstance(x, int | float) and type(x) is not bool)


def _autocast_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, in its dtype, as PyTorch's own attention does; float64 stays."""
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # meta has none
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


# Other axes than batch, heads, positions and width, as PyTorch's attention takes them.


def with_four_axes(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...] | None]:
    """q, k and v as (batch, heads, positions, width), and the leading axes of the result; None: those of q.

    (n, d) has one head of one batch row, (h, n, d) one batch row. Further axes are batch axes. A size of 1 is
    expanded to that of the others.
    """
    four_axes = q.dim() == k.dim() == v.dim() == 4
    same_front = four_axes and q.shape[0] == k.shape[0] and k.shape[:2] == v.shape[:2]
    if same_front and (q.shape[1] != 1 or k.shape[1] == 1):
        return q, k, v, None
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() < 2:
            raise ShapeError(
                f"{name} has shape {tuple(x.shape)}; (batch, heads, positions, width) is needed, where batch and "
                "heads may be missing"
            )
    tensors = [x if x.dim() > 2 else x[None] for x in (q, k, v)]
    try:
        batch = torch.broadcast_shapes(*(x.shape[:-3] for x in tensors))
        (kv_heads,) = torch.broadcast_shapes(*(x.shape[-3:-2] for x in tensors[1:]))
    except RuntimeError:
        if four_axes:
            return q, k, v, None  # `check` says which axis does not fit
        raise ShapeError(
            f"q is {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}; their batch axes, and the heads of k "
            "and v, need to be the same, or 1"
        ) from None
    heads = kv_heads if tensors[0].shape[-3] == 1 else tensors[0].shape[-3]
    for index, count in enumerate((heads, kv_heads, kv_heads)):
        x = tensors[index].expand(*batch, count, *tensors[index].shape[-2:])
        tensors[index] = x.reshape(prod(batch), *x.shape[-3:])
    no_heads = max(q.dim(), k.dim(), v.dim()) == 2
    return *tensors, batch if no_heads else (*batch, heads)  # type: ignore[return-value]


def _flattened(x: Any, front: tuple[int, ...]) -> Any:
    """A table or bias that broadcasts to (*front, n, m), with one batch axis."""
    is_longer = isinstance(x, Tensor) and x.dim() > 3 and len(front) > 2
    fits = is_longer and broadcasts(x.shape[:-3], front[:-1])  # `check` says what does not
    return x.expand(*front[:-1], *x.shape[-3:]).flatten(0, -4) if fits else x


# Arguments that change nothing.


def without_defaults(
    q: Tensor, k: Tensor, pattern: Patterns, lengths: Tensor | None, at: At | Tensor
) -> tuple[Patterns, Tensor | None, At | Tensor]:
    """pattern, lengths and at; None in place of a table of ones, lengths of all keys, and the default query offset.

    Only what can be read without synchronization is replaced; what does not fit is left for `check` to refuse.
    """
    ordinary = lengths is None or (type(lengths) is Tensor and lengths.dtype in INTEGERS)
    if not ordinary or not (type(q) is type(k) is Tensor):
        require_tensors(q=q, k=k, lengths=lengths)
    if _compiling() or q.dim() != 4 or k.dim() != 4:  # a compiler has symbols for sizes
        return pattern, lengths, at
    (b, h, n, _), m = q.shape, k.shape[2]
    if at is not None and n <= m:
        at = without_default_offset(_common_offset(at, b), n, m)
    if lengths is not None and readable(lengths) and b:
        rows = lengths.tolist()
        if rows == [m] * b or rows == [[0, m]] * b:
            lengths = None
        elif lengths.shape == (b, 2) and not any(start for start, _ in rows):
            lengths = lengths[:, 1]  # every row is visible from key 0 on
    if type(pattern) is Tensor and pattern.dtype == torch.bool and broadcasts(pattern.shape, (b, h, n, m)):
        pattern = None if _allows_all(pattern) else pattern
    return pattern, lengths, at


def _common_offset(at: At | Tensor, b: int) -> At | Tensor:
    """The offset of all batch rows, where a tensor holds one and the same."""
    if not isinstance(at, Tensor) or at.shape != (b,) or not b or not readable(at) or not _has_integers(at):
        return at
    offset, *offsets = at.tolist()
    return at if any(x != offset for x in offsets) else offset


def _has_integers(x: Tensor) -> bool:
    """Whether the numbers of a tensor are whole by their dtype."""
    return not x.is_floating_point() and x.dtype != torch.bool


def _allows_all(table: Tensor) -> bool:
    """Whether a bool tensor is all ones."""
    if not table.numel() or not readable(table):
        return False
    if table.numel() <= 1 << 14:
        return 0 not in table.numpy().tobytes()  # a tenth of the time of `all`
    return bool(table.numpy().all())  # which stops at the first 0


def normalized(call: Call) -> Call:
    """The same call without the default scale, an infinite softcap, an offset that nothing reads or `ties` that
    cannot occur, and with a scale above 0 and at least one component."""
    changes: dict[str, Any] = {}
    if call.q.shape[-1] == 0:  # products of 0, as of one component of 0
        q, k = (x.sum(-1, keepdim=True) for x in (call.q, call.k))
        call = replaced(call, q=q, k=k, scale=call.scale if call.hard else None)
    if call.softcap is not None:
        changes["softcap"] = None if call.softcap == inf else float(call.softcap)
    if isinstance(call.pattern, per_head) and len(set(call.pattern.patterns)) == 1:
        changes["pattern"] = call.pattern.patterns[0]
    if not call.hard and call.ties != "share":
        changes["ties"] = "share"
    scale, d_k = call.scale, call.q.shape[-1]
    if scale is not None and scale in (d_k**-0.5, 1 / sqrt(d_k)):
        changes["scale"] = None
    elif scale is not None and scale <= 0:  # PyTorch's causal CPU kernel would give NaN (0 · −∞)
        changes |= {"q": -call.q, "scale": -scale} if scale < 0 else {"q": 0 * call.q, "scale": 1.0}
    if call.at is not None and not call.pattern.reads_query and not isinstance(call.bias, ByDistance):
        changes["at"] = None
    return replaced(call, **changes) if changes else call


# Arguments that do not fit.


def check(call: Call) -> Call:
    """The call, if its tensors fit one another; else a ShapeError that says which do not."""
    q, k, v = call.q, call.k, call.v
    require_one_kind(q, k, v)
    require_device(call)
    if q.shape[-1] != k.shape[-1]:
        raise ShapeError(f"queries are {q.shape[-1]} wide and keys {k.shape[-1]}; q·k needs one width d_k")
    if k.shape[:3] != v.shape[:3]:
        both = f"k is {tuple(k.shape)} and v {tuple(v.shape)}"
        raise ShapeError(f"{both}; they need the same batch, heads and positions")
    if q.shape[0] != k.shape[0]:
        raise ShapeError(
            f"a batch of {q.shape[0]} queries over a batch of {k.shape[0]} keys; give both the same"
        )
    if q.shape[1] % k.shape[1] if k.shape[1] else q.shape[1]:
        raise ShapeError(f"{k.shape[1]} key/value heads do not divide {q.shape[1]} query heads")
    _check_extras(call)
    return call


def _check_extras(call: Call) -> None:
    b, h, n, m = *call.q.shape[:2], call.n, call.m
    shape = (b,) if call.lengths is None else tuple(call.lengths.shape)
    if shape[:1] != (b,) or shape[1:] not in ((), (2,)):
        raise ShapeError(
            f"lengths has shape {shape}; one per batch row is needed: ({b},), or ({b}, 2) with the "
            "first visible key and the end"
        )
    if call.lengths is not None and readable(call.lengths) and b:
        low, high = (int(x) for x in call.lengths.aminmax())
        if low < 0 or high > m:
            wrong = low if low < 0 else high
            raise ShapeError(f"lengths has {wrong}, and there are {m} keys: 0 to {m} is needed")
    if isinstance(call.pattern, per_head):
        call.pattern.check_heads(h)
    if call.sink_logits is not None and tuple(call.sink_logits.shape) != (h,):
        raise ShapeError(
            f"sink_logits has shape {tuple(call.sink_logits.shape)}; one per query head is needed: ({h},)"
        )
    if not isinstance(call.bias, Tensor | ByDistance | None):
        raise SpecError(
            f"bias={call.bias!r} is neither a tensor nor rg.ByDistance(table=…, slopes=…); a position is declared in "
            f"rg.Attention(position=…), and the slopes of ALiBi are rg.position.alibi_slopes(heads)"
        )
    if call.softcap is not None:
        if isinstance(call.softcap, bool) or not isinstance(call.softcap, int | float):
            raise SpecError(f"softcap={call.softcap!r} is not a number; use None for scores without a cap")
        if not call.softcap > 0:
            raise SpecError(f"softcap={call.softcap} is not above 0; use None for scores without a cap")
    if not isinstance(call.at, Tensor):
        query_offset(call.pattern, n, m, call.at)
    elif not _has_integers(call.at):
        raise ShapeError(f"at is {call.at.dtype}; offsets are whole numbers: give at.long()")
    elif tuple(call.at.shape) != (b,):
        raise ShapeError(f"at has shape {tuple(call.at.shape)}; one offset per batch row is needed: ({b},)")
    elif readable(call.at):
        require_offset(call.at.tolist())
    if call.pattern.has_data:
        call.pattern.check_data(m, n, call.at, (b, h))
    for name, x in (("pattern", call.table), ("bias", call.bias if isinstance(call.bias, Tensor) else None)):
        if x is not None and not broadcasts(x.shape, (b, h, n, m)):
            raise ShapeError(
                f"{name} has shape {tuple(x.shape)}, which does not broadcast to "
                f"(batch, heads, queries, keys) = {(b, h, n, m)}"
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
            if x is not None and x.shape[0] != h:
                raise ShapeError(f"a bias by distance for {x.shape[0]} heads, and q has {h}")
    if call.scale != call.scale:  # as a compiler reads it, too
        raise SpecError("scale=nan is not a number; use None for 1/√d_k")
    if call.scale == -inf:
        raise SpecError("scale=-inf has no meaning; scale=inf is hard attention")
    if call.hard and call.sink_logits is not None:
        raise SpecError("scale=inf is hard attention, which has no softmax for sink_logits to join")
    if call.hard and call.return_lse:
        raise SpecError("scale=inf has no log-sum-exp: ask for return_lse=True with a finite scale only")
    if not 0.0 <= call.dropout_p < 1.0:
        raise SpecError(f"dropout_p={call.dropout_p} is not in [0, 1)")
    if call.ties not in ("share", "first"):
        raise SpecError(f"ties={call.ties!r}; use 'share' (tied keys share equally) or 'first'")
