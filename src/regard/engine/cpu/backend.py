"""The backend `tiles`: on the CPU, only the keys of the pattern, read along arithmetic progressions.

Its variants, of which the fastest by estimate runs:

short sequence: gathered keys   tiles of queries, the keys of each copied one behind the other
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
from ..plan.planner import NoPlan, plan
from . import abreast, by_distance, gathered, packed, progressions, short, stretches
from .batches import program

EVERY_PAIR, EVERY_PAIR_GRAD = 1.8e-9, 6.4e-9  # seconds per pair where a call visits all of them
MAX_PARTS = 8  # progressions per tile: past that a mask is faster
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
        return _no_plan(f)

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
            return Variant(MERGED, inf, lambda: _merged(f))
        best = min(variants(f), key=lambda v: v.seconds)
        return best if best.name == GATHERED else best._replace(seconds=best.seconds / SAFETY_MARGIN)


def variants(f: CallFacts) -> list[Variant]:
    """Those that can run a pattern without data, bias or dropout."""
    return [v for v in (_gathered(f), _concatenated(f), _merged_variant(f)) if v is not None]


def _no_plan(f: CallFacts) -> str | None:
    """Why there is no good plan at these sizes."""
    if f.n == 0 or f.m == 0:
        return "there are no pairs"
    try:
        parts = plan(f.pattern, f.n, f.m, *f.offset).max_parts
    except NoPlan as why:
        return str(why)
    return f"{parts} progressions per tile; past {MAX_PARTS} a mask is faster" if parts > MAX_PARTS else None


def _no_documents(f: CallFacts) -> str | None:
    """Why a pattern with data is not run document by document."""
    if f.bias != "none":
        return "a bias is added to the scores"
    if f.dropout_p:
        return "it has no dropout with documents"
    if packed.parts(f.pattern) is None:
        return f"{f.pattern!r} is not documents(ids), or that and words that read i − j"
    if f.n == 0 or f.m == 0:
        return "there are no pairs"
    if torch.compiler.is_compiling():  # the ids are read when the graph runs
        return None
    if packed.programs(f.pattern, f.n, f.m, f.at) is None:
        return "the ids of a document do not follow one another, or queries skip some"
    return None


# One function per variant: its estimate, and how it is prepared.


def _gathered(f: CallFacts) -> Variant | None:
    if not _plain(f) or f.n * f.m > gathered.PAIRS:
        return None
    width = (f.d_k + f.d_v) // 2
    found = gathered.quickest(f.pattern, f.n, f.m, *f.offset, heads=f.flat_heads, d=width, grad=f.grad)
    if found is None:
        return None
    layout, nanoseconds = found

    def build() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        allowed = f.pattern.allowed(f.n, f.m, f.offset, torch.device("cpu"))
        place = f.pattern, *f.offset, f.factor
        run = short.Short(allowed, layout, *f.like(), place, f.grad)
        return zeros_in(run, ~allowed.any(-1, keepdim=True))

    note = f"{layout.tiles} × {layout.rows} queries, each time over the {layout.keys} keys gathered for them"
    return Variant(
        GATHERED,
        nanoseconds * 1e-9,
        lambda: Prepared("tiles", GATHERED, lambda: layout.pairs, None, build, note),
    )


def _concatenated(f: CallFacts) -> Variant | None:
    if not _plain(f):
        return None
    saved = min(f.flat_heads * (f.n + f.m) * (f.d_k + f.d_v), stretches.KEPT)
    found = stretches.quickest(f.pattern, f.n, f.m, *f.offset, heads=f.flat_heads, grad=f.grad, kept=saved)
    if found is None:
        return None
    layout, nanoseconds = found

    def build() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        return abreast.Abreast(layout, (f.pattern, *f.offset, f.factor), f.grad)

    note = f"tiles of {layout.rows} queries, all keys of a tile in one softmax"
    return Variant(
        CONCATENATED,
        nanoseconds * 1e-9,
        lambda: Prepared("tiles", CONCATENATED, lambda: layout.computed, None, build, note),
    )


def _plain(f: CallFacts) -> bool:
    """Whether the call is three tensors and a pattern, not observed, and not rounded between the products."""
    exact = f.dtype in (torch.float32, torch.float64)
    return f.only_pattern and not f.observed and exact and f.pairs > 0


def _merged_variant(f: CallFacts) -> Variant:
    seconds = program(f.pattern, f.n, f.m, *f.offset).nanoseconds(f.flat_heads, f.grad) * 1e-9
    return Variant(MERGED, seconds, lambda: _merged(f))


def _merged(f: CallFacts) -> Prepared:
    def run(call: Call) -> Outputs:
        if f.observed:
            return sparse_attention(call)
        tiles = program(f.pattern, f.n, f.m, *f.offset)
        return progressions.attend(
            call.q, call.k, call.v, f.pattern, (tiles,), scale=f.factor, lengths=call.lengths
        )

    return Prepared("tiles", MERGED, lambda: program(f.pattern, f.n, f.m, *f.offset).computed, run)


def _packed(f: CallFacts) -> Variant:
    def run(call: Call) -> Outputs:
        if f.observed:
            return sparse_attention(call)
        programs = packed.programs(f.pattern, f.n, f.m, f.at)
        assert programs is not None
        return progressions.attend(
            call.q, call.k, call.v, f.pattern, programs, scale=f.factor, lengths=call.lengths
        )

    def computed() -> int:
        return sum(each.computed for each in packed.programs(f.pattern, f.n, f.m, f.at) or ())

    if torch.compiler.is_compiling():
        return Variant(PACKED, inf, lambda: Prepared("tiles", PACKED, computed, run))
    programs = packed.programs(f.pattern, f.n, f.m, f.at) or ()
    seconds = sum(each.nanoseconds(f.flat_heads // len(programs), f.grad) for each in programs) * 1e-9
    return Variant(PACKED, seconds / SAFETY_MARGIN, lambda: Prepared("tiles", PACKED, computed, run))


def _by_distance(f: CallFacts) -> Variant:
    def run(call: Call) -> Outputs:
        if f.observed:
            return sparse_attention(call)
        assert call.bias is None or isinstance(call.bias, ByDistance)
        tiles = program(f.pattern, f.n, f.m, *f.offset)
        with torch.autocast("cpu", enabled=False):  # the tensors were cast at the entry point
            return by_distance.attend(
                call.q, call.k, call.v, tiles, call.bias, scale=f.factor, lengths=call.lengths,
                dropout_p=call.dropout_p, pattern=f.pattern,
            )  # fmt: skip

    name = BY_DISTANCE if f.bias == "distance" else WITH_DROPOUT

    def prepared() -> Prepared:
        return Prepared("tiles", name, lambda: program(f.pattern, f.n, f.m, *f.offset).computed, run)

    if torch.compiler.is_compiling():
        return Variant(name, inf, prepared)
    if f.bias == "distance" and (f.bias_grad or not f.dropout_p):
        call = 0.0 if f.bias_grad else BIAS_CALL_GRAD if f.grad else BIAS_CALL
        return Variant(name, f.pairs * (BIAS_GRAD if f.grad or f.bias_grad else BIAS) + call, prepared)
    return Variant(name, DROPOUT * _merged_variant(f).seconds, prepared)
