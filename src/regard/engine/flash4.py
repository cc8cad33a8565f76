"""The backend `flash4`: FlashAttention-4's kernels, where the package flash-attn-4 is installed (`regard[flash]`).

It takes 16-bit heads on Hopper and Blackwell GPUs and patterns that are one band of i − j: every pair, causal, a
window, and both; or a few of them, one after the other, as a causal pattern with a prefix; or one band within packed
documents, each of which is a sequence of its own for its kernels. Sinks are joined in its kernels. Its backward pass
adds up in a fixed order if torch.use_deterministic_algorithms(True) is set; that takes 4 to 8 % longer.
Nothing here imports the package before a call runs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from importlib import metadata
from math import ceil, inf
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from .. import compat
from ..pattern import Pattern, full, window
from ..pattern.classification import intervals
from ..progression import Ints
from . import reference_backend
from .call import Call, CallFacts, Outputs, Prepared, has_empty_row
from .cuda.documents import Packed, read

PACKAGE = "flash-attn-4"
CAPABILITIES = (9, 10)  # Hopper, Blackwell: others have no backward pass, or none in a fixed order
MAX_HEAD_DIM = 256
# Whose gradients agree with those of other backends (H200, 4.0.0b36; auto_choice.py). Those of heads of 80 do not.
HEAD_DIMS_GRAD = 32, 64, 96, 128, 192, 256
MAX_PARTS = 4  # calls of its kernels for one call
TILE = 128  # queries and keys of a tile of its kernels
PROGRAMS = 132  # tiles that an H200 computes at a time
# Seconds, H200, bf16 (bench/gpu_peers.py): per pair of a tile by the width of a head, per tile of queries; forward
# and with backward. With backward, heads of 96 and 192 were measured in deterministic mode, and scaled by 0.9.
PAIR = {
    64: (4.8e-13, 1.6e-12), 80: (5.8e-13, inf), 96: (6.4e-13, 2.4e-12), 128: (7.4e-13, 2.75e-12),
    192: (9.9e-13, 4.7e-12),
}  # fmt: skip
QUERY_TILE, QUERY_TILE_GRAD = 16e-9, 66e-9
CALL, CALL_GRAD = 200e-6, 900e-6  # what the CPU needs for a call (bench/auto_choice.py --documents)
WINDOW = 1.25  # the estimates of `triton` for windows are 14 to 24 % above its times; so these are, too
PARTS = 1.15  # two calls and what joins them, against one with as many pairs
# Pairs and tiles of packed documents, against those of one sequence (bench/gpu_peers.py, the last rows).
DOCUMENTS, DOCUMENTS_TILE = 1.05, 2.0
# Seconds per byte of q, k and v to bring batch rows one behind the other (bench/auto_choice.py --documents).
COPY, COPY_GRAD = 1.4e-12, 3.7e-12


class Flash4:
    name, automatic = "flash4", ("cuda",)

    @property
    def installed(self) -> bool:
        return version() is not None

    def refuses(self, f: CallFacts) -> str | None:
        if f.device_type != "cuda":
            return f"it runs on CUDA, not on {f.device_type}"
        if version() is None:
            return f"the package {PACKAGE} is not installed; pip install 'regard[flash]' brings it"
        major = capability(f.device)
        if major not in CAPABILITIES:
            return f"its backward pass has a fixed order on GPUs of capability 9 and 10 only, here {major}"
        if reason := _unsupported(f):
            return reason
        if f.pattern.has_data:
            packed = _packed(f)
            return packed if isinstance(packed, str) else None
        if has_empty_row(*f.place):
            return "some queries have no allowed key"
        if not _parts(f):
            return (
                f"{f.pattern!r} is neither a band of i − j (every pair, causal, a window) nor a few of them"
            )
        return None

    def estimate(self, f: CallFacts) -> float:
        """As measured; the rest runs by name. Windows of heads of 64 take `triton` less than it estimates."""
        parts = _parts(f)
        windows = any(part.left is not None for part in parts)
        if f.d_k not in PAIR or (windows and f.d_k != 128) or (f.n, f.offset[0]) != (f.m, 0):
            return inf
        tile, call = (QUERY_TILE_GRAD, CALL_GRAD) if f.grad else (QUERY_TILE, CALL)
        tiles, computed = _work(f)
        of_pairs, of_tiles = (DOCUMENTS, DOCUMENTS_TILE) if f.pattern.has_data else (1.0, 1.0)
        busy = f.heads * (of_pairs * computed * PAIR[f.d_k][f.grad] + of_tiles * tiles * tile)
        busy *= (WINDOW if windows else 1.0) * (PARTS if len(parts) > 1 else 1.0)
        if f.pattern.has_data and f.batch > 1:
            tensors = f.batch * f.n * (f.heads + 2 * f.kv_heads) * f.d_k * f.dtype.itemsize
            busy += tensors * (COPY_GRAD if f.grad else COPY)
        return max(busy * max(1.0, PROGRAMS / (f.heads * tiles)), len(parts) * call)

    def prepare(self, f: CallFacts) -> Prepared:
        options = options_of(f)
        run = partial(attend, _kernel, options)
        pattern = full() if options.documents else f.pattern
        direct = replace(f, sink_logits=False, pattern=pattern).only_pattern
        build = lambda: lambda q, k, v, lengths=None, at=None, sink=None: run(q, k, v, sink)[0]  # noqa: E731
        bands = " and ".join(map(str, options.parts)) + (", documents" if options.documents else "")
        return Prepared(
            self.name,
            f"{PACKAGE} {version()}, {bands}",
            lambda: _work(replace(f, batch=f.data_rows))[1],
            lambda call: run(call.q, call.k, call.v, call.sink_logits),
            build if direct else None,
            joins_sink=True,
        )


@cache
def version() -> str | None:
    """Of the installed package, which is not imported for it; None: there is none."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return None


def capability(device: str) -> int | None:
    """The first number of the compute capability; None: there is no GPU here."""
    return torch.cuda.get_device_capability(device)[0] if torch.cuda.is_available() else None


def _unsupported(f: CallFacts) -> str | None:
    """What is not in its softmax, or not as exact as here; shapes that its kernels do not take."""
    dtype, (_, step) = str(f.dtype).removeprefix("torch."), f.offset
    reasons = (
        (f.bias != "none", "a bias is added to the scores"),
        (f.no_tiles is not None, f.no_tiles),
        (f.observed, "a compiler or transform must see PyTorch's operations, which its kernels are not"),
        (f.softcap is not None, "its softcap is computed with an approximate tanh (11 bits)"),
        (f.lengths, "keys that are hidden per batch row (lengths) are not supported here"),
        (f.dropout_p > 0, "it has no dropout"),
        (dtype not in ("float16", "bfloat16"), f"its kernels take float16 or bfloat16, not {dtype}"),
        (f.d_k != f.d_v,
         f"queries {f.d_k} and values {f.d_v} wide: its kernels for two widths are for other shapes"),
        (f.d_k % 8 or not 8 <= f.d_k <= MAX_HEAD_DIM,
         f"heads {f.d_k} wide; a multiple of 8 up to {MAX_HEAD_DIM} is needed"),
        (f.grad and f.d_k not in HEAD_DIMS_GRAD,
         f"its gradients were compared for heads {', '.join(map(str, HEAD_DIMS_GRAD))} wide only, here {f.d_k}"),
        (f.pairs == 0, "there are no pairs"),
        (step != 1, f"queries {step} positions apart are not supported"),
    )  # fmt: skip
    return next((reason for holds, reason in reasons if holds), None)


# Bands: its windows are counted from the last key, which belongs to the last query.


class Part(NamedTuple):
    """The next `rows` queries over the keys first … end − 1. The last query has the last of these keys; the window
    has `left` keys before and `right` after the key of a query; None: all."""

    rows: int
    first: int
    end: int
    left: int | None
    right: int | None

    def __str__(self) -> str:
        if self.left is None:
            return {None: "every pair", 0: "causal"}.get(self.right, f"up to {self.right} keys after a query")
        return f"window of {self.left} and {'all' if self.right is None else self.right}"

    @property
    def computed(self) -> int:
        """Pairs in its tiles, for one head: about half a tile more at each end of a band."""
        keys = self.end - self.first
        if self.left is not None:
            return self.rows * min(keys, self.left + 2 * TILE + (keys if self.right is None else self.right))
        if self.right is None:
            return self.rows * keys
        return self.rows * min(keys, keys - self.rows // 2 + self.right + TILE // 2)

    @property
    def pattern(self) -> Pattern:
        """The same pairs, if the last query is at the last key."""
        keys = self.end - self.first
        before, after = (max(keys, self.rows) if x is None else x for x in (self.left, self.right))
        return window(before, after)


@lru_cache(maxsize=256)
def parts_of(pattern: Pattern, n: int, m: int, start: int) -> tuple[Part, ...]:
    """The calls of its kernels that make up a pattern, one after the other; empty: it is not a few bands.

    A call has a run of queries, the keys of each of which are one interval. From query to query its first key stays,
    and from some query on moves; its last key moves, and from some query on stays.
    """
    keys = intervals(pattern, np.arange(start, start + n), m)
    if keys is None or (keys[0] > keys[1]).any():
        return ()
    (low, high), row = keys, 0
    parts: list[Part] = []
    while row < n and len(parts) < MAX_PARTS:
        last = row + min(_moves(low[row:], 0, 1), _moves(high[row:], 1, 0))
        left = int(high[last] - low[last]) if low[last] > low[row] else None
        right = int(high[row] - high[last]) + last - row if high[last] > high[row] else None
        parts.append(Part(last + 1 - row, int(low[row]), int(high[last]) + 1, left, right))
        row = last + 1
    return tuple(parts) if row == n else ()


def _moves(keys: Ints, first: int, then: int) -> int:
    """How often a key moves on by `first`, and after that by `then`, before it moves in another manner."""
    moves = np.append(np.diff(keys), -1)  # which is neither
    turn = int((moves != first).argmax())
    return turn + int((moves[turn:] != then).argmax())


def _parts(f: CallFacts) -> tuple[Part, ...]:
    packed = _packed(f)
    return parts_of(packed.right if isinstance(packed, Packed) else f.pattern, f.n, f.m, f.offset[0])


def _work(f: CallFacts) -> tuple[int, int]:
    """Tiles of queries, and pairs in tiles, of one head of all batch rows."""
    parts, packed = _parts(f), _packed(f)
    if isinstance(packed, Packed):
        tiles, counts = np.unique(-(np.diff(_ends(packed, f.batch)) // -TILE), return_counts=True)
        parts = tuple(parts[0]._replace(rows=TILE * int(x), end=TILE * int(x)) for x in tiles)
    else:
        counts = np.full(len(parts), f.batch)
    each = [(ceil(part.rows / TILE), part.computed) for part in parts]
    tiles, computed = np.array(each, dtype=np.int64).T @ counts
    return int(tiles), int(computed)


# Packed documents: all batch rows one behind the other, each document a sequence of its own.


@dataclass(frozen=True, eq=False)
class Documents:
    pattern: Packed
    batch: int
    device: str

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Of its kernels. They are computed when a call runs: the choice of a backend needs no GPU."""
        ends = _ends(self.pattern, self.batch)
        on_device, longest = torch.from_numpy(ends).to(self.device), int(np.diff(ends).max())
        names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
        return dict(zip(names, (on_device, on_device, longest, longest)))


def _ends(packed: Packed, batch: int) -> NDArray[np.int32]:
    """Where each document begins, and where the last one ends."""
    begins = packed.first == np.arange(packed.first.shape[1])
    begins = np.broadcast_to(begins, (batch, begins.shape[1]))
    return np.append(np.flatnonzero(begins), begins.size).astype(np.int32)


def _packed(f: CallFacts) -> Packed | str:
    """A pattern with data, after reading it; or why it is not one band within documents."""
    if not f.pattern.has_data:
        return "there are no documents"
    if (f.n, *f.offset) != (f.m, 0, 1):
        return "documents need as many queries as keys, both from position 0 on"
    packed = read(f)
    if isinstance(packed, str):
        return packed
    parts = parts_of(packed.right, f.n, f.m, 0)
    if len(parts) != 1 or (parts[0].first, parts[0].end) != (0, f.m):
        return (
            f"{f.pattern!r}: beside documents, its kernels take one band of i − j (causal, a window, or both)"
        )
    return packed


# Running.


class Options(NamedTuple):
    parts: tuple[Part, ...]
    scale: float
    return_lse: bool
    documents: Documents | None


def options_of(f: CallFacts) -> Options:
    packed = _packed(f)
    documents = Documents(packed, f.batch, f.device) if isinstance(packed, Packed) else None
    return Options(_parts(f), f.factor, f.return_lse, documents)


def _kernel(*tensors: Tensor, **options: Any) -> Any:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    return (flash_attn_varlen_func if "cu_seqlens_q" in options else flash_attn_func)(*tensors, **options)


def attend(
    kernel: Callable[..., Any], options: Options, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None
) -> Outputs:
    """o and lse by `flash_attn_func`, which has the heads behind the positions."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    parts = options.parts
    sink = sink.float() if sink is not None and sink.dtype == torch.float64 else sink
    if len(parts) == 1:
        first, end = parts[0].first, parts[0].end
        if end - first < k.shape[1]:
            k, v = k[:, first:end], v[:, first:end]
        o, lse = _part(kernel, (q, k, v), sink, parts[0], options)
        return o.transpose(1, 2), lse
    queries = q.split([part.rows for part in parts], 1)
    ranges = tuple((part.first, part.end) for part in parts)
    keys, values = _Ranges.apply(k, ranges), _Ranges.apply(v, ranges)
    results = [_part(kernel, x, sink, part, options) for x, part in zip(zip(queries, keys, values), parts)]
    o = torch.cat([o for o, _ in results], 1).transpose(1, 2)
    return o, torch.cat([lse for _, lse in results], 2) if options.return_lse else None


class _Ranges(torch.autograd.Function):
    """The rows of x in each of several ranges (first, end). Their gradients, tensors of their own, are added to that
    of the longest; PyTorch would fill and add a tensor of all rows for each slice."""

    @staticmethod
    def forward(ctx, x, ranges):
        ctx.ranges, ctx.rows = ranges, x.shape[1]
        return tuple(x[:, first:end] for first, end in ranges)

    @staticmethod
    def backward(ctx, *grads):
        pairs = sorted(zip(ctx.ranges, grads), key=lambda pair: pair[0][0] - pair[0][1])
        if torch.is_grad_enabled():
            padded = (F.pad(x, (0, 0, 0, 0, first, ctx.rows - end)) for (first, end), x in pairs)
            return sum(padded), None
        (first, end), total = pairs[0]
        if end - first < ctx.rows:
            total = F.pad(total, (0, 0, 0, 0, first, ctx.rows - end))
        for (first, end), x in pairs[1:]:
            total[:, first:end] += x
        return total, None


def _part(
    kernel: Callable[..., Any],
    tensors: tuple[Tensor, Tensor, Tensor],
    sink: Tensor | None,
    part: Part,
    options: Options,
) -> tuple[Tensor, Tensor | None]:
    (q, k, v), documents, batch = tensors, options.documents, None
    arguments: dict[str, Any] = {"window_size": (part.left, part.right), "return_lse": options.return_lse}
    if documents is not None:
        batch = q.shape[0]
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        arguments |= documents.arguments
    if sink is not None:
        arguments["learnable_sink"] = sink
    fixed_order = torch.are_deterministic_algorithms_enabled()
    o, lse = kernel(q, k, v, softmax_scale=options.scale, deterministic=fixed_order, **arguments)
    if o.grad_fn is not None:
        # The node keeps q, k and v until its backward pass; a hook that held them would, as long as there is a graph.
        saved = None if compat.current_node is not None else (q, k, v)
        pattern = part.pattern if documents is None else documents.pattern
        terms = {"pattern": pattern, "scale": options.scale, "sink_logits": sink}
        o.grad_fn.register_hook(partial(_double_backward, saved, terms, batch))
    if batch is not None:
        o = o.unflatten(0, (batch, -1))
        lse = lse.unflatten(1, (batch, -1)).transpose(0, 1) if options.return_lse else None
    return o, lse


def _double_backward(
    saved: tuple[Tensor, ...] | None,
    terms: dict[str, Any],
    batch: int | None,
    grads: tuple[Tensor | None, ...],
    output_grads: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor | None, ...] | None:
    """A hook after its backward pass: the gradients as they are, or under create_graph=True by the formula. After
    those of q, k and v, only that of the sink is not None. batch: of rows that are one behind the other."""
    if not torch.is_grad_enabled() or output_grads[0] is output_grads[1] is None:
        return None
    tensors = saved if compat.current_node is None else compat.current_node().saved_tensors[:3]
    assert tensors is not None

    def heads_first(x: Tensor) -> Tensor:
        return (x if batch is None else x.unflatten(0, (batch, -1))).transpose(1, 2)

    def heads_behind(x: Tensor) -> Tensor:
        return x.transpose(1, 2) if batch is None else x.transpose(1, 2).flatten(0, 1)

    q, k, v = map(heads_first, tensors)
    grad, of_lse = output_grads
    grad = None if grad is None else heads_first(grad)
    if batch is not None and of_lse is not None:
        of_lse = of_lse.unflatten(1, (batch, -1)).transpose(0, 1)
    call = Call(q, k, v, **terms, at=k.shape[2] - q.shape[2])
    *results, of_sink = (*reference_backend.gradients((grad, of_lse), call), None)[:4]
    others = (None if x is None else of_sink for x in grads[3:])
    return *(None if x is None else heads_behind(x) for x in results), *others
