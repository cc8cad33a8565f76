"""One attention call, checked: what every way to run it reads."""

from dataclasses import dataclass
from functools import lru_cache
from math import inf, isinf, isnan

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import ShapeError, SpecError
from ..pattern import At, Pattern, full, positions, query_offset
from ..position import ByDistance
from ..reference import Ties

Bias = ByDistance | Tensor | None


@dataclass(frozen=True, eq=False)
class Call:
    """q, k, v and all that decides the weights. `pattern` and `table` both hold where both are given."""

    q: Float[Tensor, "b h n d_k"]
    k: Float[Tensor, "b h_kv m d_k"]
    v: Float[Tensor, "b h_kv m d_v"]
    pattern: Pattern
    table: Bool[Tensor, "..."] | None
    lengths: Int[Tensor, " b"] | None
    bias: Bias
    scale: int | float | None  # None: 1/√d_k
    ties: Ties
    dropout_p: float
    at: At | Tensor
    return_lse: bool

    @property
    def n(self) -> int:
        return self.q.shape[-2]

    @property
    def m(self) -> int:
        return self.k.shape[-2]

    @property
    def grouped(self) -> bool:
        return True if self.q.shape[1] != self.k.shape[1] else False  # noqa: SIM210 — SDPA takes no symbol

    @property
    def hard(self) -> bool:
        return self.scale is not None and isinf(self.scale)

    @property
    def factor(self) -> float:
        """What the products q·k are multiplied with; for hard attention the usual 1/√d_k."""
        return self.q.shape[-1] ** -0.5 if self.scale is None or self.hard else float(self.scale)

    def allowed(self) -> Bool[Tensor, "..."] | None:
        """The dense table of allowed pairs, broadcastable to (b, h, n, m); None if every pair is."""
        tables = []
        if not isinstance(self.pattern, full):
            table = dense(self.pattern, self.n, self.m, self.at, self.q)
            need = (self.q.shape[0], self.q.shape[1], self.n, self.m)
            if not _broadcasts(table.shape, need):
                raise ShapeError(
                    f"{self.pattern!r} gives a table of {tuple(table.shape)}, which does not broadcast to "
                    f"(batch, heads, queries, keys) = {need}"
                )
            tables.append(table)
        if self.table is not None:
            tables.append(self.table)
        if self.lengths is not None:
            keys = torch.arange(self.m, device=self.q.device)
            tables.append((keys < self.lengths[:, None])[:, None, None, :])
        if not tables:
            return None
        out = tables[0]
        for t in tables[1:]:
            out = out & t
        return out

    def dense_bias(self) -> Float[Tensor, "..."] | None:
        """The bias as a tensor that broadcasts to (b, h, n, m), in q's dtype."""
        if not isinstance(self.bias, ByDistance):
            return None if self.bias is None else self.bias.to(self.q.dtype)
        where = positions(self.pattern, self.n, self.m, self.at, self.q.device)
        return self.bias.dense(where, torch.arange(self.m, device=self.q.device)).to(self.q.dtype)

    def hide(self) -> "Call":
        """Zeros where keys and values lie past the length: 0 · NaN is NaN, so a mask alone would let them through."""
        if self.lengths is None or (readable(self.k) and _small(self.k) and _small(self.v)):
            return self
        past = torch.arange(self.m, device=self.k.device) >= self.lengths[:, None]
        past = past[:, None, :, None]
        return replaced(self, k=self.k.masked_fill(past, 0.0), v=self.v.masked_fill(past, 0.0))

    def may_be_empty(self) -> bool:
        """Whether some query might look nowhere, as far as the declaration tells."""
        if (
            self.lengths is not None
            or self.table is not None
            or isinstance(self.at, Tensor)
            or self.pattern.has_data
        ):
            return True
        if torch.compiler.is_compiling():  # the sizes may be symbols
            return True
        return has_empty_row(
            self.pattern, self.n, self.m, *query_offset(self.pattern, self.n, self.m, self.at)
        )


def eager(*tensors: Tensor) -> bool:
    """Whether nothing looks on that must see PyTorch's operations: a compiler, a transform, a mode, another type."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
        and all(type(x) is Tensor or type(x) is torch.nn.Parameter for x in tensors)
    )


def readable(x: Tensor) -> bool:
    """Whether the numbers in x can be looked at for nothing: they are here, and nobody looks on."""
    return x.is_cpu and eager(x)


def _small(x: Tensor) -> bool:
    """Whether a mask alone hides x: no NaN, and no number so large that a product with it could be infinite."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return bool(torch.linalg.vector_norm(x.detach(), dtype=wide) < 1e15)


def replaced(call: Call, **changes: Tensor | float) -> Call:
    """dataclasses.replace, as Dynamo can trace it."""
    return Call(**{**{f: getattr(call, f) for f in Call.__dataclass_fields__}, **changes})


@lru_cache(maxsize=256)
def has_empty_row(pattern: Pattern, n: int, m: int, start: int, step: int) -> bool:
    return m == 0 or bool((pattern.row_counts(n, m, (start, step)) == 0).any())


def dense(pattern: Pattern, n: int, m: int, at: At | Tensor, like: Tensor) -> Bool[Tensor, "*b n m"]:
    """pattern.allowed, remembered for the few sizes in use while it is small."""
    real = type(like) is Tensor and not torch.compiler.is_compiling()  # a fake tensor must not be remembered
    if not real or isinstance(at, Tensor) or pattern.has_data or n * m > 1 << 22:
        return pattern.allowed(n, m, at, like.device)
    return _dense(pattern, n, m, at, like.device)


@lru_cache(maxsize=32)
def _dense(pattern: Pattern, n: int, m: int, at: At, device: torch.device) -> Bool[Tensor, "n m"]:
    return pattern.allowed(n, m, at, device)


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
        raise ShapeError(f"lengths has shape {tuple(call.lengths.shape)}; one a batch row is needed: ({b},)")
    if isinstance(call.at, Tensor) and tuple(call.at.shape) != (b,):
        raise ShapeError(f"at has shape {tuple(call.at.shape)}; one offset a batch row is needed: ({b},)")
    if not isinstance(call.at, Tensor):
        query_offset(call.pattern, n, m, call.at)
    for name, x in (("pattern", call.table), ("bias", call.bias if isinstance(call.bias, Tensor) else None)):
        if x is not None and not _broadcasts(x.shape, (b, q.shape[1], n, m)):
            raise ShapeError(
                f"{name} has shape {tuple(x.shape)}, which does not broadcast to "
                f"(batch, heads, queries, keys) = {(b, q.shape[1], n, m)}"
            )
    if isinstance(call.bias, Tensor) and call.bias.dtype == torch.bool:
        raise SpecError(
            "a bool tensor as bias would add 0 and 1 to the scores; give it as pattern, True = may look"
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


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    # the sizes may be symbols, for which Dynamo has no `in`
    fits = [s == 1 or s == t for s, t in zip(reversed(shape), reversed(to))]
    return len(shape) <= len(to) and all(fits)


def as_pattern_and_table(given: Pattern | Tensor | None) -> tuple[Pattern, Tensor | None]:
    """A pattern, or a bool tensor with True = may look. A float mask has no name here, so it is refused (D2)."""
    if given is None:
        return full(), None
    if isinstance(given, Pattern):
        return given, None
    if not isinstance(given, Tensor):
        raise SpecError(f"{given!r} is no pattern; use rg.causal(), rg.window(2), … or a bool tensor")
    if given.dtype != torch.bool:
        raise SpecError(
            f"a {given.dtype} mask as pattern: is 1 'may look', or is it added to the scores? Say which: "
            f"rg.allowed_from(zero_one=mask), rg.allowed_from(additive=mask), or bias=mask"
        )
    return full(), given


def allowed_from(
    *,
    zero_one: Tensor | None = None,
    additive: Tensor | None = None,
    padding: Bool[Tensor, "b m"] | None = None,
) -> Bool[Tensor, "..."]:
    """A foreign mask, by the name of its convention, as a bool tensor with True = may look.

    zero_one: 1 = may look. additive: 0 = may look, −∞ (or a float's lowest number) = may not.
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
