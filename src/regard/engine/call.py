"""One attention call: its tensors (Call); what a backend decides by (CallFacts); what runs it (Prepared)."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, reduce
from math import inf, prod
from operator import and_
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .. import compat
from ..errors import BackendError, ShapeError
from ..pattern import At, Pattern, causal, empty_rows, full, positions, query_offset
from ..pattern.heads import launches
from ..position import ByDistance
from ..reference import Ties, default_scale

Bias = ByDistance | Tensor | None
T = TypeVar("T")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # (q, k, v) → o
Outputs = tuple[Tensor, Tensor | None]  # o, and the log-sum-exp where it was computed
Place = tuple[Pattern, int, int, int, int]  # pattern, n, m, start, step: what a plan depends on


@dataclass(frozen=True, eq=False)
class Call:
    """q, k, v and all that decides the weights. A pair has to be allowed by both `pattern` and `table`."""

    q: Float[Tensor, "b h n d_k"]
    k: Float[Tensor, "b h_kv m d_k"]
    v: Float[Tensor, "b h_kv m d_v"]
    pattern: Pattern
    table: Bool[Tensor, "..."] | None = None
    lengths: Int[Tensor, "b *two"] | None = None  # the end of a row's visible keys; or begin and end
    bias: Bias = None
    scale: int | float | None = None  # None: 1/√d_k
    softcap: float | None = None
    sink_logits: Float[Tensor, " h"] | None = None
    ties: Ties = "share"
    dropout_p: float = 0.0
    at: At | Tensor = None
    return_lse: bool = False

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
        return self.scale == inf

    @property
    def factor(self) -> float:
        """What the products q·k are multiplied with; for hard attention the usual 1/√d_k."""
        return default_scale(self.q.shape[-1]) if self.scale is None or self.hard else float(self.scale)

    def allowed(self) -> Bool[Tensor, "..."] | None:
        """The dense table of allowed pairs, broadcastable to (b, h, n, m); None if every pair is allowed."""
        tables = []
        if not isinstance(self.pattern, full):
            table = dense(self.pattern, self.n, self.m, self.at, self.q)
            need = (self.q.shape[0], self.q.shape[1], self.n, self.m)
            if not broadcasts(table.shape, need):
                raise ShapeError(
                    f"{self.pattern!r} gives a table of {tuple(table.shape)}, which does not broadcast to "
                    f"(batch, heads, queries, keys) = {need}"
                )
            tables.append(table)
        if self.table is not None:
            tables.append(self.table)
        if (visible := self.visible()) is not None:
            tables.append(visible[:, None, None, :])
        return reduce(and_, tables) if tables else None

    def dense_bias(self, dtype: torch.dtype | None = None) -> Float[Tensor, "..."] | None:
        """The bias as a tensor that broadcasts to (b, h, n, m), in this dtype; None: that of q."""
        dtype = self.q.dtype if dtype is None else dtype
        if not isinstance(self.bias, ByDistance):
            return None if self.bias is None else self.bias.to(dtype)
        where = positions(self.pattern, self.n, self.m, self.at, self.q.device)
        return self.bias.dense(where, torch.arange(self.m, device=self.q.device)).to(dtype)

    def visible(self) -> Bool[Tensor, "b m"] | None:
        """Which keys `lengths` leaves visible in each batch row; None: all."""
        if self.lengths is None:
            return None
        keys, lengths = torch.arange(self.m, device=self.q.device), self.lengths.to(self.q.device)
        if lengths.dim() == 1:
            return keys < lengths[:, None]
        return (keys >= lengths[:, :1]) & (keys < lengths[:, 1:])

    def row_extras(self) -> tuple[Tensor | None, ...]:
        """Lengths and offsets by batch row and the sinks of heads, where there are any."""
        at = self.at if isinstance(self.at, Tensor) else None
        return () if self.lengths is at is self.sink_logits is None else (self.lengths, at, self.sink_logits)

    def hide(self) -> "Call":
        """Zeros in hidden keys and values: 0 · NaN is NaN, so a mask alone would not remove their effect."""
        visible = self.visible()
        if visible is None or (readable(self.k) and _small(self.k) and _small(self.v)):
            return self
        hidden = ~visible[:, None, :, None]
        return replaced(self, k=self.k.masked_fill(hidden, 0.0), v=self.v.masked_fill(hidden, 0.0))

    def may_be_empty(self) -> bool:
        """Whether a query might have no allowed key, as far as the declaration shows."""
        hidden = self.lengths is not None or self.table is not None or self.pattern.has_data
        if hidden or isinstance(self.at, Tensor) or compat.sizes_are_symbols():
            return True
        offset = query_offset(self.pattern, self.n, self.m, self.at)
        return has_empty_row(self.pattern, self.n, self.m, *offset)


SEEDS = 1 << 33, 1 << 62  # of dropout: all take 64 bits, so one compiled kernel serves any
NO_SEED = SEEDS[0]


class Options(NamedTuple):
    """What a sparse call computes, beside its tensors."""

    pattern: Pattern
    start: int  # query r is at position start + step · r
    step: int
    scale: float
    dropout_p: float = 0.0
    softcap: float | None = None


class Extras(NamedTuple):
    """The inputs of a sparse call beside q, k and v; None: no such input. The seed is that of dropout."""

    table: Float[Tensor, "h r"] | None = None  # of a bias by distance
    slopes: Float[Tensor, " h"] | None = None
    lengths: Int[Tensor, "b *two"] | None = None  # as `Call.lengths`
    seed: int = NO_SEED
    at: Int[Tensor, " b"] | None = None  # the query offset of each batch row
    ids: Int[Tensor, "*b m"] | None = None  # of packed documents
    sink: Float[Tensor, " h"] | None = None  # forward: sink_logits, to be joined

    @property
    def bias(self) -> ByDistance | None:
        absent = self.table is None and self.slopes is None
        return None if absent else ByDistance(self.table, self.slopes)


@dataclass(frozen=True)
class CallFacts:
    """What the choice of a backend depends on: sizes, kinds and the pattern; no tensor."""

    pattern: Pattern
    n: int
    m: int
    d_k: int = 64
    d_v: int = 64
    batch: int = 1
    heads: int = 8
    kv_heads: int = 8
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    at: At = None
    row_offsets: bool = False  # one query offset per batch row
    table: bool = False  # a bool tensor of allowed pairs
    lengths: bool = False  # keys that are hidden per batch row
    left_padding: bool = False  # lengths that say where the keys of a row begin, too
    bias: str = "none"  # none, tensor or distance
    bias_grad: bool = False
    scale: int | float | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    return_lse: bool = False
    sink_logits: bool = False
    grad: bool = False  # of q, k, v or the sink
    observed: bool = False  # a compiler, transform, dispatch mode or tensor subclass must see the operations
    higher: bool = False  # forward-mode derivatives, or a gradient of a gradient by torch.func

    @property
    def flat_heads(self) -> int:
        """Query heads of all batch rows."""
        return self.batch * self.heads

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key, allowed or not, of all heads and batch rows."""
        return self.flat_heads * self.n * self.m

    @property
    def device_type(self) -> str:
        return self.device.split(":")[0]

    @property
    def hard(self) -> bool:
        return self.scale == inf

    @property
    def factor(self) -> float:
        return default_scale(self.d_k) if self.scale is None or self.hard else float(self.scale)

    @property
    def offset(self) -> tuple[int, int]:
        """(start, step): query r is at position start + step · r. Where each batch row has its own offset, plans are
        chosen for queries at the end of the keys, or from key 0 on if there are more queries."""
        at = 0 if self.row_offsets and self.n > self.m else self.at
        return query_offset(self.pattern, self.n, self.m, at)

    @property
    def place(self) -> Place:
        return (self.pattern, self.n, self.m, *self.offset)

    @property
    def no_tiles(self) -> str | None:
        """Why a backend that visits only the keys of a pattern cannot run this, whatever its device."""
        if self.hard:
            return "scale=inf has no softmax"
        if self.bias == "tensor":
            return "a bias tensor is n × m already"
        if self.table:
            return "a bool tensor is not a pattern; declare one"
        on_gpu = self.row_offsets and self.device_type != "cpu"
        return "per-row query offsets (`at` as a tensor) are not supported" if on_gpu else None

    @property
    def unmasked(self) -> bool:
        """Whether PyTorch's attention runs this without a mask: every pair; or every past one, for as many queries as
        keys or one query at the end."""
        if self.table or self.lengths or self.bias != "none" or self.softcap is not None:
            return False
        if self.n == 0 or self.m == 0:
            return False
        if isinstance(self.pattern, full):
            return True
        if not isinstance(self.pattern, causal) or self.at is not None or self.row_offsets:
            return False
        return self.n == self.m or self.n == 1

    @property
    def makes_table(self) -> bool:
        """Whether a mask for PyTorch's attention would be the first large n × m tensor of the call. Without dropout
        it is made a chunk of queries at a time (query_chunks.py)."""
        given = self.pattern.has_data or self.table or self.bias == "tensor" or self.n * self.m <= 1 << 22
        of_keys = isinstance(self.pattern, full) and self.bias == "none"  # lengths alone: m entries for a row
        return self.dropout_p > 0 and not (given or of_keys or self.unmasked)

    @property
    def only_pattern(self) -> bool:
        """Whether the call is three tensors and a pattern without tensors, and nothing else."""
        extras = self.table or self.lengths or self.bias != "none" or self.dropout_p or self.needs_lse
        offset = self.row_offsets or self.at is not None
        return not (extras or offset or self.hard or self.softcap is not None or self.pattern.text is None)

    @property
    def needs_lse(self) -> bool:
        """Whether the log-sum-exp is a result, or joins a sink."""
        return self.return_lse or self.sink_logits

    @property
    def data_rows(self) -> int:
        """The batch rows and heads in which the pattern's data may differ: its pairs are counted over all of them."""
        return prod(self.pattern.data_shape)

    def launches(self) -> list[tuple[list[int], "CallFacts"]]:
        """The calls that it runs as, and their heads: one, unless heads have patterns of their own."""
        parts = launches(self.pattern, self.heads, self.kv_heads)
        return [(of, replace(self, pattern=p, heads=len(of), kv_heads=len(kv))) for p, of, kv in parts]

    def like(self) -> tuple[Tensor, Tensor, Tensor]:
        """Meta tensors with the shapes of q, k and v."""
        of_queries, of_keys = (self.batch, self.heads, self.n), (self.batch, self.kv_heads, self.m)
        shapes = (*of_queries, self.d_k), (*of_keys, self.d_k), (*of_keys, self.d_v)
        q, k, v = (torch.empty(shape, dtype=self.dtype, device="meta") for shape in shapes)
        return q, k, v


def facts_of(call: Call) -> CallFacts:
    """The facts of a call whose arguments were checked and normalized."""
    bias_tensors = (call.bias.table, call.bias.slopes) if isinstance(call.bias, ByDistance) else (call.bias,)
    batch, heads, n, d_k = call.q.shape
    sizes = n, call.m, d_k, call.v.shape[-1], batch, heads, call.k.shape[1]
    same = {name: getattr(call, name) for name in ("scale", "softcap", "dropout_p", "return_lse")}
    return CallFacts(
        call.pattern, *sizes, call.q.dtype, str(call.q.device), **same,
        at=None if isinstance(call.at, Tensor) else call.at, row_offsets=isinstance(call.at, Tensor),
        table=call.table is not None, sink_logits=call.sink_logits is not None,
        lengths=call.lengths is not None, left_padding=call.lengths is not None and call.lengths.dim() == 2,
        bias="none" if call.bias is None else "distance" if isinstance(call.bias, ByDistance) else "tensor",
        bias_grad=needs_grad(*bias_tensors), grad=needs_grad(call.q, call.k, call.v, call.sink_logits),
        observed=not eager(call.q, call.k, call.v), higher=compat.higher_derivatives(),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Prepared:
    """A call of one backend, ready to run: what depends on shapes alone is computed now, or at the first call.

    A call of nothing but tensors and a pattern has `build`, which makes the function (q, k, v) → o; with lengths and
    offsets by batch row or a sink, (q, k, v, lengths, at, sink) → o. Others have `run`, which takes the whole call.
    """

    backend: str
    variant: str
    # The pairs that are computed for one head; where data differ by batch row, for one head of all rows.
    computed: Callable[[], int]
    run: Callable[[Call], Outputs] | None = None
    build: Callable[[], Callable[..., Tensor]] | None = None
    note: str = ""  # how the variant is laid out
    reason: str = ""  # why this backend runs
    joins_sink: bool = False  # `run` has sink_logits in its results
    seconds: float = 0.0  # an estimate, where the backend compares variants by it

    @cached_property
    def direct(self) -> Callable[..., Tensor]:
        assert self.build is not None
        with torch.inference_mode(False):  # what is made in inference mode could not be saved for backward
            return self.build()

    def __call__(self, call: Call) -> Outputs:
        if self.build is not None:
            return self.direct(call.q, call.k, call.v, *call.row_extras()), None
        assert self.run is not None
        if self.variant not in ("masked", "formula"):  # which hold n × m numbers
            return self.run(call)
        heads = 1 if self.variant == "masked" and call.bias is None else call.q.shape[1]
        with memory_named(call.pattern, call.n, call.m, heads * call.q.dtype.itemsize):
            return self.run(call)


class Cache(dict[Any, Any]):
    """At most `limit` values by key; the oldest is dropped first. Reading takes no lock: a dict lookup is atomic."""

    def __init__(self, limit: int):
        self.limit, self.lock = limit, Lock()

    def put(self, key: Any, value: T) -> T:
        """If two threads compute the same value, the later one stays."""
        with self.lock:
            self[key] = value
            while len(self) > self.limit:
                del self[next(iter(self))]
        return value


def zero_rows(attend: Attend, empty: Tensor) -> Attend:
    """The same function with zeros in the rows of queries that have no allowed key."""
    if not bool(empty.any()):
        return attend
    return lambda q, k, v: attend(q, k, v).masked_fill(empty, 0.0)


def needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def eager(*tensors: Tensor) -> bool:
    """Whether nothing must see PyTorch's operations: no compiler, trace, transform, dispatch mode or subclass."""
    observed = compat.sizes_are_symbols() or compat.transforms_active() or compat.dispatch_modes()
    return not observed and all(type(x) is Tensor or type(x) is torch.nn.Parameter for x in tensors)


def aligned_rows(x: Tensor, min_width: int = 1) -> Tensor:
    """x, or a copy of it, with contiguous rows that begin and end at multiples of 16 bytes."""
    unit, width, (a, b, c, last) = 16 // x.element_size(), x.shape[-1], x.stride()
    if width % unit or width < min_width:
        return F.pad(x, (0, max(-width % unit, min_width - width)))
    # unit is a power of two: it divides a | b | c where it divides all three.
    aligned = last == 1 and not ((a | b | c) % unit or x.storage_offset() % unit)
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def readable(x: Tensor) -> bool:
    """Whether the numbers in x can be read without synchronization: a CPU tensor, and nothing observes the call."""
    return x.is_cpu and eager(x)


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """What the log-sum-exp has in every backend, and the products on the CPU: half types in float32, which is as fast
    there and exact."""
    return torch.promote_types(dtype, torch.float32)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Operations compute in the dtypes of their inputs; meta tensors have no autocast to switch off."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def visible_ranges(lengths: Int[Tensor, "b *two"] | None, b: int, m: int) -> list[tuple[int, ...]]:
    """The first visible key of each batch row, and the end of its keys. lengths: as `Call.lengths`."""
    if lengths is None:
        return [(0, m)] * b
    rows = lengths.tolist()
    return [(0, end) for end in rows] if lengths.dim() == 1 else [tuple(limits) for limits in rows]


def without_default_offset(at: At | Tensor, n: int, m: int) -> At | Tensor:
    """None in place of the default, where the last query is at the last key."""
    is_default = not isinstance(at, Tensor) and (at if isinstance(at, tuple) else (at, 1)) == (m - n, 1)
    return None if is_default and n <= m else at


def _small(x: Tensor) -> bool:
    """Whether a mask alone hides x: no NaN, and no number so large that a product with it could be infinite."""
    return bool(torch.linalg.vector_norm(x.detach(), dtype=computed_in(x.dtype)) < 1e15)


def replaced(call: Call, **changes: Any) -> Call:
    """dataclasses.replace, as Dynamo can trace it."""
    return Call(**{**{f: getattr(call, f) for f in Call.__dataclass_fields__}, **changes})


# Tables of allowed pairs.


@lru_cache(maxsize=256)
def has_empty_row(pattern: Pattern, n: int, m: int, start: int, step: int) -> bool:
    return m == 0 or empty_rows(pattern, n, m, start, step) > 0


def dense(pattern: Pattern, n: int, m: int, at: At | Tensor, like: Tensor) -> Bool[Tensor, "*b n m"]:
    """pattern.allowed, cached for the few sizes in use while it is small."""
    # Fake tensors and those of a transform must not be cached.
    if type(like) is not Tensor or compat.sizes_are_symbols() or compat.transforms_active():
        return pattern.allowed(n, m, at, like.device)
    if isinstance(at, Tensor) or pattern.has_data or n * m > 1 << 22:
        with memory_named(pattern, n, m):
            return pattern.allowed(n, m, at, like.device)
    if type(table := _dense(pattern, n, m, at, like.device)) is not Tensor:  # FakeTensorMode made it
        _dense.cache_clear()
    return table


@contextmanager
def memory_named(pattern: Pattern, n: int, m: int, pair: int = 1) -> Iterator[None]:
    """Where memory runs out, the error says how much a table would need. pair: bytes of a pair."""
    try:
        yield
    except RuntimeError as error:
        if "allocate memory" not in str(error) and "out of memory" not in str(error):
            raise
        raise BackendError(
            f"{pattern!r} over {n:,} queries and {m:,} keys needs a table of {n * m * pair / 2**30:,.1f} GiB, and "
            "several times as much while it is made: more than there is. Declare it by words (rg.window, rg.every, "
            "…), or compute fewer queries at a time (at=)"
        ) from error


@lru_cache(maxsize=32)
def _dense(pattern: Pattern, n: int, m: int, at: At, device: torch.device) -> Bool[Tensor, "*h n m"]:
    return pattern.allowed(n, m, at, device)


def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    # the sizes may be symbols, for which Dynamo has no `in`
    axes_fit = [s == t or s == 1 for s, t in zip(reversed(shape), reversed(to))]
    return len(shape) <= len(to) and all(axes_fit)
