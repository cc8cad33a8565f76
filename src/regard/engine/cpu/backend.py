"""The backend `tiles`: on the CPU, only the keys of the pattern, read along arithmetic progressions.

Its variants, of which the fastest by estimate runs:

short sequence: gathered keys   tiles of queries, the keys of each copied one after the other
concatenated keys               the keys of a tile side by side, one softmax
merged tiles                    parts of a tile merged by their log-sum-exps: any pattern, lengths, log-sum-exp
packed documents                each document by itself
bias by distance, dropout       tiles of scores, the bias read along diagonals
"""

from collections.abc import Callable
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from ...position import ByDistance
from ..call import Call, CallFacts, Outputs, Prepared, zeros_in
from ..compiled_ops import sparse_attention
from ..plan import why_masked
from . import documents, gathered_layout
from .layout import Layout
from .memory import MAX_SAVED_WEIGHTS
from .strided_layout import fastest_concatenated, layout
from .tiles import TileAttention, attend

EVERY_PAIR, EVERY_PAIR_GRAD = 1.8e-9, 6.4e-9  # seconds per pair where a call visits all of them
SAFETY_MARGIN = 0.85  # calls of 512 positions took up to 1.15 times their estimate
DROPOUT = 2.0  # tiles of scores in PyTorch operations take so many times the fused operation
# Seconds per pair of a bias by distance, and what a call takes more than a masked one: for a bias that is fixed the
# two meet at 2¹⁸ pairs, or 2²¹ with backward (bench/cpu_bias.py); one that is learned is faster here at any size.
BIAS, BIAS_GRAD = 1.3e-9, 10e-9
BIAS_CALL, BIAS_CALL_GRAD = 10.1e-9 * 2**18, 5.99e-9 * 2**21

GATHERED, CONCATENATED, MERGED = "short sequence: gathered keys", "concatenated keys", "merged tiles"
PACKED, BY_DISTANCE, WITH_DROPOUT = "packed documents", "bias by distance", "dropout"


class Variant(NamedTuple):
    name: str
    seconds: float
    prepared: Callable[[], Prepared]


class Tiles:
    name = "tiles"
    automatic = ("cpu",)

    def refuses(self, f: CallFacts) -> str | None:
        if f.hard:
            return "scale=inf has no softmax"
        if f.device_type != "cpu":
            return f"it runs on the CPU, not on {f.device_type}"
        if f.bias == "tensor":
            return "a bias tensor is n × m already"
        if f.table:
            return "a bool tensor is no pattern; declare one"
        if f.row_offsets:
            return "per-row query offsets (`at` as a tensor) are not supported"
        if f.pattern.has_data:
            return _no_documents(f)
        if torch.compiler.is_compiling() or f.unmasked:  # sizes may be symbols; every pair has a plan
            return None
        return why_masked(f.pattern, f.n, f.m, *f.offset)

    def estimate(self, f: CallFacts) -> float:
        if f.unmasked:  # the same products as without tiles, and more steps
            return f.pairs * (EVERY_PAIR_GRAD if f.grad else EVERY_PAIR) * (DROPOUT if f.dropout_p else 1.0)
        return self.variant(f).seconds

    def prepare(self, f: CallFacts) -> Prepared:
        return self.variant(f).prepared()

    def variant(self, f: CallFacts) -> Variant:
        """The variant that runs; where several can, the fastest by estimate."""
        if f.pattern.has_data:
            return _packed(f)
        if f.bias == "distance" or f.dropout_p:
            return _by_distance(f)
        if torch.compiler.is_compiling():
            return Variant(MERGED, inf, lambda: _merged(f, MERGED))
        best = min(variants(f), key=lambda v: v.seconds)
        return best if best.name == GATHERED else best._replace(seconds=best.seconds / SAFETY_MARGIN)


def variants(f: CallFacts) -> list[Variant]:
    """Those that can run a pattern without data, bias or dropout."""
    return [v for v in (_gathered(f), _concatenated(f), _merged_variant(f)) if v is not None]


def _no_documents(f: CallFacts) -> str | None:
    """Why a pattern with data is not run document by document."""
    if f.bias != "none":
        return "a bias is added to the scores"
    if f.dropout_p:
        return "it has no dropout with documents"
    if documents.parts(f.pattern) is None:
        return f"{f.pattern!r} is not documents(ids), or that and words that read i − j"
    if f.n == 0 or f.m == 0:
        return "there are no pairs"
    if torch.compiler.is_compiling():  # the ids are read when the graph runs
        return None
    if documents.layouts(f.pattern, f.n, f.m, f.at) is None:
        return "the ids of a document do not follow one another, or queries skip some"
    return None


# One function per variant: its estimate, and how it is prepared.


def _gathered(f: CallFacts) -> Variant | None:
    if not _plain(f) or f.n * f.m > gathered_layout.MAX_PAIRS:
        return None
    width = (f.d_k + f.d_v) // 2
    best = gathered_layout.fastest((f.pattern, f.n, f.m, *f.offset), f.flat_heads, width, f.grad)
    if best is None:
        return None
    shape, nanoseconds = best

    def build() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        allowed = f.pattern.allowed(f.n, f.m, f.offset, torch.device("cpu"))
        tables = gathered_layout.GatheredLayout(allowed, shape, *f.like(), f.grad)
        run = TileAttention((tables,), f.factor, (f.pattern, *f.offset), learns=f.grad)
        return zeros_in(run, ~allowed.any(-1, keepdim=True))

    note = f"{shape.tiles} × {shape.rows} queries, each time over the {shape.keys} keys gathered for them"
    return Variant(
        GATHERED,
        nanoseconds * 1e-9,
        lambda: Prepared("tiles", GATHERED, lambda: shape.pairs, None, build, note),
    )


def _concatenated(f: CallFacts) -> Variant | None:
    if not _plain(f):
        return None
    saved = min(f.flat_heads * (f.n + f.m) * (f.d_k + f.d_v), MAX_SAVED_WEIGHTS)
    best = fastest_concatenated((f.pattern, f.n, f.m, *f.offset), f.flat_heads, f.grad, saved)
    if best is None:
        return None
    groups, nanoseconds = best

    def build() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        return TileAttention((groups,), f.factor, (f.pattern, *f.offset), learns=f.grad)

    note = f"tiles of {groups.tile_rows} queries, all keys of a tile in one softmax"
    return Variant(
        CONCATENATED,
        nanoseconds * 1e-9,
        lambda: Prepared("tiles", CONCATENATED, lambda: groups.computed, None, build, note),
    )


def _plain(f: CallFacts) -> bool:
    """Whether the call is three tensors and a pattern, not observed, and not rounded between the products."""
    exact = f.dtype in (torch.float32, torch.float64)
    return f.only_pattern and not f.observed and exact and f.pairs > 0


def _merged_variant(f: CallFacts) -> Variant:
    seconds = _layout(f).nanoseconds(f.flat_heads, f.grad) * 1e-9
    return Variant(MERGED, seconds, lambda: _merged(f, MERGED))


def _layout(f: CallFacts) -> Layout:
    return layout(f.pattern, f.n, f.m, *f.offset)


def _merged(f: CallFacts, name: str) -> Prepared:
    """A merged layout: with bias and dropout, lengths, the log-sum-exp."""
    if name == PACKED:
        some = _run(f, _packed_layouts)
        return Prepared("tiles", name, lambda: sum(one.computed for one in _packed_layouts(f)), some)
    return Prepared("tiles", name, lambda: _layout(f).computed, _run(f, lambda f: (_layout(f),)))


def _run(f: CallFacts, layouts: Callable[[CallFacts], tuple[Layout, ...]]) -> Callable[[Call], Outputs]:
    def run(call: Call) -> Outputs:
        if f.observed:
            return sparse_attention(call)
        assert call.bias is None or isinstance(call.bias, ByDistance)
        place = f.pattern, *f.offset
        tiles = TileAttention(layouts(f), f.factor, place, call.lengths, call.dropout_p)
        with torch.autocast("cpu", enabled=False):  # the tensors were cast at the entry point
            return attend(call.q, call.k, call.v, tiles, call.bias)

    return run


def _packed_layouts(f: CallFacts) -> tuple[Layout, ...]:
    return documents.layouts(f.pattern, f.n, f.m, f.at) or ()


def _packed(f: CallFacts) -> Variant:
    if torch.compiler.is_compiling():
        return Variant(PACKED, inf, lambda: _merged(f, PACKED))
    rows = _packed_layouts(f)
    seconds = sum(each.nanoseconds(f.flat_heads // len(rows), f.grad) for each in rows) * 1e-9
    return Variant(PACKED, seconds / SAFETY_MARGIN, lambda: _merged(f, PACKED))


def _by_distance(f: CallFacts) -> Variant:
    name = BY_DISTANCE if f.bias == "distance" else WITH_DROPOUT
    if torch.compiler.is_compiling():
        return Variant(name, inf, lambda: _merged(f, name))
    if f.bias == "distance" and (f.bias_grad or not f.dropout_p):
        call = 0.0 if f.bias_grad else BIAS_CALL_GRAD if f.grad else BIAS_CALL
        seconds = f.pairs * (BIAS_GRAD if f.grad or f.bias_grad else BIAS) + call
    else:
        seconds = DROPOUT * _merged_variant(f).seconds
    return Variant(name, seconds, lambda: _merged(f, name))
