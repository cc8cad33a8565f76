"""The backend `tiles`: on the CPU, only the keys of the pattern, read along arithmetic progressions.

Its variants, of which the fastest by estimate runs:

short sequence: gathered keys   tiles of queries, the keys of each copied one after the other
gathered keys                   the same for trees, listed blocks and grids, at any length
concatenated keys               the keys of a tile side by side, one softmax
merged tiles                    parts of a tile merged by their log-sum-exps: any pattern, lengths, log-sum-exp
one query                       products with each progression of its keys, read where they are: decoding
packed documents                each document by itself; a tree chain by chain
bias by distance, dropout       tiles of scores, the bias read along diagonals
"""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...pattern import At, Pattern, causal, full, tree, where
from ...pattern.one_query import keys_of_query
from ...position import ByDistance
from ...reference import softcapped
from ..call import Call, CallFacts, Outputs, Prepared, computed_in, needs_grad, visible_ranges, zero_rows
from ..compiled_ops import sparse_attention
from ..plan import NoPlan, why_masked
from . import documents, gathered_layout
from .gathered_layout import Gathering, Shape
from .kernels import PAIR, fused_forward, join, max_saved, pair_time
from .layout import NARROW, Layout
from .strided_layout import concatenated_layouts, layout
from .tiles import TileAttention, attend

SAFETY_MARGIN = 0.9  # nine of ten calls take at most 1.4 times their estimate (bench/auto_choice.py)
# Queries up to which PyTorch's attention computes more than half of the pairs that causal() hides.
MAX_CAUSAL = 1024
# Seconds of all pairs from which on such a call can gain: the plan for a new length takes milliseconds.
WORTH_A_PLAN = 1.5e-3, 0.25e-3
DROPOUT = 1.5  # what a pair takes more, in PyTorch operations; without it a pair of heads of 64 takes 1
# A bias by distance takes this many times as long, and seconds more per call; of keys within lengths this share is
# taken as visible, and each batch row takes so many seconds.
BIAS, BIAS_CALL = 1.15, (120e-6, 200e-6)
VISIBLE, LENGTHS_ROW = 0.7, (100e-6, 500e-6)
ROW_PLAN = 2e-3  # seconds to plan the queries of a batch row with its own offset, rarely the same twice

GATHERED, CONCATENATED, MERGED = "short sequence: gathered keys", "concatenated keys", "merged tiles"
LISTED, ONE_QUERY, PACKED = "gathered keys", "one query", "packed documents"
BY_DISTANCE, WITH_DROPOUT = "bias by distance", "dropout"
# Seconds of one query: of a call, of a progression of keys, and per number of k and v; the same of one batch row, by
# the same operation; and with other terms.
ONE, ONE_ROW, ONE_WITH_TERMS = (10e-6, 16e-6, 0.055e-9), (35e-6, 16e-6, 0.055e-9), (60e-6, 25e-6, 0.1e-9)
Gather = Callable[[], tuple[Gathering, ...]]
Keys = list[tuple[slice | Tensor, int]]  # of one query: a progression, or positions one by one; their number


class Tiles:
    name = "tiles"
    automatic = ("cpu",)

    def refuses(self, f: CallFacts) -> str | None:
        if f.no_tiles:
            return f.no_tiles
        if f.device_type != "cpu":
            return f"it runs on the CPU, not on {f.device_type}"
        if f.row_offsets and (f.observed or f.pattern.has_data or f.bias != "none"):
            return "per-row query offsets (`at` as a tensor) need a pattern without data, no bias and no compiler"
        if f.pattern.has_data:
            return variant if isinstance(variant := _with_data(f), str) else None
        if torch.compiler.is_compiling() or f.unmasked or _is_one_query(f):  # sizes may be symbols
            return None
        return why_masked(*f.place, tile=NARROW)  # a plan that `prepare` reads again

    def estimate(self, f: CallFacts) -> float:
        if f.unmasked and f.n > 1 and not f.dropout_p:
            dense = f.pairs * PAIR[f.grad] * pair_time(f.d_k, f.d_v, f.dtype)
            past, short = isinstance(f.pattern, causal), f.n <= MAX_CAUSAL
            if not (past and short and dense > WORTH_A_PLAN[f.grad]):  # as long as without tiles, or longer
                return dense * (0.7 if past and not short else 1.05 if f.grad and not past else 1.2) + 1e-4
        return self.prepare(f).seconds

    def prepare(self, f: CallFacts) -> Prepared:
        """The variant that runs; where several can, the fastest by estimate."""
        if f.pattern.has_data:
            variant = _with_data(f)
            assert isinstance(variant, Prepared), variant
            return variant
        if _is_one_query(f):
            return _one_query(f)
        if f.bias == "distance" or f.dropout_p or torch.compiler.is_compiling():
            return _merged(f)
        best = min(variants(f), key=lambda v: v.seconds)
        return best if best.variant == GATHERED else _with_margin(best)


def _with_margin(variant: Prepared) -> Prepared:
    return replace(variant, seconds=variant.seconds / SAFETY_MARGIN)


def variants(f: CallFacts) -> list[Prepared]:
    """Those that can run a pattern without data, bias or dropout."""
    found = [v for v in (_gathered(f), _concatenated(f)) if v is not None]
    # The plan of merged tiles takes as long again, and they were never the fastest for short causal calls.
    short = f.unmasked and isinstance(f.pattern, causal) and f.n <= MAX_CAUSAL
    return found if found and short else [*found, _merged(f)]


def _with_data(f: CallFacts) -> Prepared | str:
    """The fastest variant for a pattern with data, or why none can run it."""
    split = documents.split(f.pattern)
    listed, packed = _listed(f, split), _packed(f, split)
    if isinstance(packed, str):
        return listed if isinstance(listed, Prepared) else packed or listed
    return listed if isinstance(listed, Prepared) and listed.seconds <= packed.seconds else packed


def _packed(f: CallFacts, split: documents.Split) -> Prepared | str:
    """Each document by itself; else why not, or an empty reason if the pattern has no documents."""
    if f.bias != "none":
        return "a bias is added to the scores"
    if f.dropout_p:
        return "it has no dropout with documents"
    if split is None:
        reason = f"{f.pattern!r} is not documents(ids, …), or that and words that read i − j"
        return reason if any(isinstance(x, documents.documents | tree) for x in f.pattern.leaves()) else ""
    if f.observed and (isinstance(split[0], tree) or type(split[0].ids) is not Tensor):
        return "a compiler, a transform or a mode observes the call, and the data of the pattern must be read"
    if f.n == 0 or f.m == 0:
        return "there are no pairs"
    # In a compiled graph the ids are read when it runs.
    layouts = () if torch.compiler.is_compiling() else documents.layouts(f.pattern, f.n, f.m, f.at)
    if layouts is None:
        ids = "ids of a document do not follow one another"
        return f"the {'tree has many branches' if isinstance(split[0], tree) else ids}, or queries skip some"
    return _with_margin(_merged(f, layouts))


# One function per variant: its estimate, and how it is prepared.


def _gathered(f: CallFacts) -> Prepared | None:
    """Not where there is one tile and nothing is differentiated: that is one call of the fused op."""
    if not _plain(f) or f.n * f.m > gathered_layout.MAX_PAIRS:
        return None
    shapes = [shape for shape in gathered_layout.shapes(*f.place) if f.grad or shape.tiles > 1]
    if not shapes:
        return None
    seconds, shape = min(((_gathering_seconds(f, x), x) for x in shapes), key=lambda pair: pair[0])
    return _by_gathering(f, GATHERED, [shape], seconds, lambda: (gathered_layout.gathered(f.place, shape),))


def _gathering_seconds(f: CallFacts, shape: Shape) -> float:
    return gathered_layout.nanoseconds(shape, f.n, f.flat_heads, (f.d_k + f.d_v) // 2, f.dtype, f.grad) * 1e-9


def _listed(f: CallFacts, split: documents.Split) -> Prepared | str:
    """A pattern that data or a grid decide, where few keys are needed by each tile; else why not."""
    if any(isinstance(leaf, where) for leaf in f.pattern.leaves()):
        return f"a function decides {f.pattern!r}, which may give something else at the next call"
    packed, device = split is not None and not isinstance(split[0], tree), f.pattern.device
    rows, on_cpu = gathered_layout.DATA_ROWS, device is None or device.type == "cpu"
    if packed or f.n < rows or not on_cpu or not _plain(replace(f, pattern=full())):
        return f"keys by data or a grid are gathered from {rows} queries on, in 32 or 64 bits, without other terms"
    f.pattern.check_data(f.m)
    gatherings = gathered_layout.gathered_by_rows(f.place)
    shapes = [gathering.shape for gathering in gatherings or ()]
    pairs = sum(shape.pairs for shape in shapes)
    if gatherings is None or 2 * pairs > f.n * f.m:
        too_many = "its data differ by batch row or head, or allow too many pairs to gather keys"
        return f"each {rows} neighboring queries need most of the keys" if gatherings else too_many
    count = sum(shape.tiles for shape in shapes)
    average = shapes[0]._replace(tiles=count, keys=-(-pairs // (count * shapes[0].rows)))
    return _by_gathering(f, LISTED, shapes, _gathering_seconds(f, average), lambda: gatherings)


def _by_gathering(f: CallFacts, name: str, shapes: list[Shape], seconds: float, gather: Gather) -> Prepared:
    def build() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        gatherings = gather()
        layout = gathered_layout.GatheredLayout(gatherings, *f.like())
        has_key = torch.zeros(f.n, dtype=torch.bool, device="cpu")
        for gathering in gatherings:
            has_key[gathering.rows] = gathering.table.any(-1)
        return zero_rows(_tile_function(f, layout), ~has_key[:, None])

    count, keys = sum(shape.tiles for shape in shapes), sorted({shape.keys for shape in shapes})
    key_range = f"{keys[0]} to {keys[-1]}" if len(keys) > 1 else keys[0]
    note = f"{count} × {shapes[0].rows} queries, each time over the {key_range} keys gathered for them"
    pairs = sum(shape.pairs for shape in shapes)
    return Prepared("tiles", name, lambda: pairs, None, build, note, seconds=seconds)


def _concatenated(f: CallFacts) -> Prepared | None:
    if not _plain(f):
        return None
    layouts = concatenated_layouts(*f.place)
    if not layouts:
        return None
    saved = max_saved(f.flat_heads * (f.n + f.m) * (f.d_k + f.d_v))
    pair = pair_time(f.d_k, f.d_v, f.dtype)
    times = ((layout.nanoseconds(f.flat_heads, f.grad, saved, pair) * 1e-9, layout) for layout in layouts)
    seconds, fastest = min(times, key=lambda pair: pair[0])
    note = f"tiles of {max(x.rows for x in fastest.groups)} queries, all keys of a tile in one softmax"
    count, build = lambda: fastest.computed, lambda: _tile_function(f, fastest)
    return Prepared("tiles", CONCATENATED, count, None, build, note, seconds=seconds)


def _plain(f: CallFacts) -> bool:
    """Whether the call is three tensors and a pattern, not observed, and not rounded between the products."""
    exact = f.dtype in (torch.float32, torch.float64)
    return f.only_pattern and not f.observed and exact and f.pairs > 0


def _tile_function(f: CallFacts, layout: Any) -> TileAttention:
    return TileAttention((layout,), f.factor, (f.pattern, f.offset), grad=f.grad)


def _merged(f: CallFacts, layouts: tuple[Layout, ...] | None = None) -> Prepared:
    """By merged layouts: with bias and dropout, lengths, the log-sum-exp. layouts: of documents."""
    if layouts is None:
        layouts = () if torch.compiler.is_compiling() else _layouts(f) * (f.batch if f.row_offsets else 1)
    factor = BIAS if f.bias == "distance" else 1.0
    pair = factor * pair_time(f.d_k, f.d_v, f.dtype) + (DROPOUT if f.dropout_p else 0.0)
    seconds = sum(x.nanoseconds(f.flat_heads // len(layouts), f.grad, 0, pair) for x in layouts) * 1e-9
    grad = 1 if f.grad else 0  # Dynamo of torch 2.11 cannot index by a bool, and this runs inside graphs
    if f.row_offsets:
        seconds += f.batch * ROW_PLAN
    if f.lengths:
        seconds = VISIBLE * seconds + f.batch * LENGTHS_ROW[grad]
    if f.bias == "distance":
        seconds += BIAS_CALL[grad]
    without_terms = PACKED if f.pattern.has_data else MERGED
    name = BY_DISTANCE if f.bias == "distance" else WITH_DROPOUT if f.dropout_p else without_terms

    def run(call: Call) -> Outputs:
        if f.observed:
            return sparse_attention(call)
        assert call.bias is None or isinstance(call.bias, ByDistance)
        layouts, at = _layouts(f, call.at), call.at if isinstance(call.at, Tensor) else f.offset
        terms: dict[str, Any] = {"dropout_p": call.dropout_p, "softcap": call.softcap}
        lengths = None if call.lengths is None else call.lengths.clone()  # the backward pass reads them again
        tiles = TileAttention(layouts, f.factor, (f.pattern, at), lengths, **terms)
        with torch.autocast("cpu", enabled=False):  # the tensors were cast at the entry point
            return attend(call.q, call.k, call.v, tiles, call.bias)

    return Prepared("tiles", name, lambda: sum(x.computed for x in _layouts(f)), run, seconds=seconds)


def _layouts(f: CallFacts, at: At | Tensor = None) -> tuple[Layout, ...]:
    """Merged layouts: one for all batch rows, or one each (also without batch rows there is one). at: of the call."""
    if f.pattern.has_data:
        return documents.layouts(f.pattern, f.n, f.m, f.at) or ()
    if isinstance(at, Tensor):
        return tuple(layout(f.pattern, f.n, f.m, start, 1) for start in at.tolist() or [0])
    return (layout(*f.place),)


# One query: decoding costs the keys of the pattern, however long the cache is.


def _is_one_query(f: CallFacts) -> bool:
    if torch.compiler.is_compiling() or f.n != 1 or not f.pairs or f.observed or f.pattern.has_data:
        return False
    try:
        keys_of_query(f.pattern, f.offset[0])
    except NoPlan:
        return False
    return True


def _one_query(f: CallFacts) -> Prepared:
    keys, rows = _visible_keys(f.pattern, f.offset[0], 0, f.m), f.batch if f.row_offsets or f.lengths else 1
    key_count, numbers_per_key = sum(size for _, size in keys), f.batch * f.kv_heads * (f.d_k + f.d_v)
    direct = _plain(f) and not f.grad
    fused = not (f.grad or f.dropout_p or f.softcap) and f.bias == "none" and computed_in(f.dtype) == f.dtype
    call, part, number = ONE if direct else ONE_ROW if fused else ONE_WITH_TERMS
    number *= f.dtype.itemsize / 4
    seconds = rows * (call + len(keys) * part) + numbers_per_key * key_count * number
    if f.grad:  # the gradient of each part is a tensor as long as the cache
        seconds = 3 * seconds + len(keys) * numbers_per_key * f.m * number
    build = (lambda: lambda q, k, v: _fused_one_query(q, k, v, keys, f.factor)[0]) if direct else None
    run = lambda call: _attend_one_query(call, f.offset[0])  # noqa: E731
    return Prepared("tiles", ONE_QUERY, lambda: key_count, run, build, seconds=seconds)


def _visible_keys(pattern: Pattern, position: int, low: int, high: int) -> Keys:
    """The keys of one query among low … high − 1: progressions, or of a partial one the keys that are allowed."""
    parts: Keys = []
    for first, step, count, complete in keys_of_query(pattern, position):
        part = range(first + max(-((first - low) // step), 0) * step, min(first + step * count, high), step)
        if complete or not part:
            parts.append((slice(part.start, part.stop, step), len(part)))
        else:
            j = torch.arange(part.start, part.stop, step, device="cpu")
            j = j[torch.as_tensor(pattern.allows(position, j), device="cpu")]
            parts.append((j, len(j)))
    return [part for part in parts if part[1]] or [(slice(0), 0)]


def _attend_one_query(call: Call, position: int) -> Outputs:
    """o and lse by operations that PyTorch differentiates; each batch row by itself where their keys differ."""
    b = len(call.q)
    with torch.autocast("cpu", enabled=False):  # the tensors were cast at the entry point
        if call.lengths is None and not isinstance(call.at, Tensor):
            return _attend_rows(call, slice(None), position, (0, call.m))
        at = call.at.tolist() if isinstance(call.at, Tensor) else [position] * b
        positions_and_limits = enumerate(zip(at, visible_ranges(call.lengths, b, call.m)))
        rows = [_attend_rows(call, slice(r, r + 1), *of_row) for r, of_row in positions_and_limits]
    o, lse = (torch.cat(x) for x in zip(*rows))
    return o, lse


def _fused_one_query(q: Tensor, k: Tensor, v: Tensor, keys: Keys, scale: float) -> tuple[Tensor, Tensor]:
    """o and lse by the fused op, in few steps: Python takes most of the time of one query."""
    b, h, _, d = q.shape
    q = q.reshape(b, k.shape[1], -1, d)
    parts = (fused_forward(q, k[:, :, part], v[:, :, part], scale) for part, _ in keys)
    o, lse = next(parts)
    for part in parts:
        join(o, lse, *part)
    return o.reshape(b, h, 1, -1), lse.reshape(b, h, 1)


def _attend_rows(call: Call, rows: slice, position: int, limits: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """limits: the first visible key, and the end."""
    q, k, v, dtype = call.q[rows], call.k[rows], call.v[rows], computed_in(call.q.dtype)
    (b, h, _, d_k), kv_heads = q.shape, k.shape[1]
    q, keys = q.to(dtype).reshape(b, kv_heads, -1, d_k), _visible_keys(call.pattern, position, *limits)
    no_terms = call.bias is call.softcap is None and not call.dropout_p and dtype == call.q.dtype
    if no_terms and keys[0][1] and not needs_grad(q, k, v):  # the fused op takes fewer steps
        return _fused_one_query(call.q[rows], k, v, keys, call.factor)
    parts, sizes = zip(*keys)
    products = [q @ k[:, :, part].to(dtype).mT for part in parts]
    s = softcapped(call.factor * torch.cat(products, -1), call.softcap)
    if isinstance(call.bias, ByDistance):
        j = torch.cat([torch.arange(k.shape[2], device=k.device)[part] for part in parts])
        s = s + call.bias.at(j - position).to(dtype).reshape(s.shape[1:])
    lse = s.logsumexp(-1) if s.shape[-1] else s.sum(-1) - inf
    weights = F.dropout(s.softmax(-1), call.dropout_p) if call.dropout_p else s.softmax(-1)
    o = sum(share @ v[:, :, part].to(dtype) for share, part in zip(weights.split(sizes, -1), parts))
    assert isinstance(o, Tensor)
    return o.reshape(b, h, 1, -1).to(call.q.dtype), lse.reshape(b, h, 1)
