"""Which way to run a call, and why. A way asked for by name never falls back in silence.

dense         PyTorch's own attention as it is: every pair, or every past one
progressions  only the keys of the pattern, by arithmetic progressions (walk.py; on the CPU also abreast.py); on CUDA
              with bias and dropout
tiled         bias by distance and dropout on the CPU, a tile of scores at a time (by_distance.py)
packed        documents that follow one another, each by itself, on the CPU (packed.py)
flex          what data or a function decide, by compiled FlexAttention on CUDA (flex.py)
masked        PyTorch's attention with a table of allowed pairs: any pattern, at the price of full attention
plain         the formula, some rows at a time: hard attention, and a log-sum-exp that nothing else gives
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import BackendError, SpecError, nearest
from ..pattern import At, Pattern, causal, full, query_offset
from ..position import ByDistance
from .call import Call
from .cpu import gathered, packed, stretches
from .cpu.batches import Program, program
from .plan.planner import NoPlan, Plan, plan

BACKENDS = ("auto", "dense", "progressions", "tiled", "packed", "flex", "masked", "plain")
MOST_PARTS = 8  # progressions a tile: past that the masked way is quicker
WIDEST = 256  # what the Triton kernels hold


class Choice(NamedTuple):
    backend: str
    reason: str


@dataclass(frozen=True)
class Facts:
    """What the choice depends on: sizes, kinds, and the pattern; no tensor."""

    pattern: Pattern
    n: int
    m: int
    d_k: int
    d_v: int
    heads: int  # of all batch rows together
    dtype: torch.dtype
    device: str
    at: At = None
    at_each_row: bool = False
    table: bool = False
    lengths: bool = False
    bias: str = "none"  # none, tensor or distance
    bias_grad: bool = False
    hard: bool = False
    dropout: bool = False
    lse: bool = False
    grad: bool = False

    @property
    def plain(self) -> bool:
        return not self.table and not self.lengths and self.bias == "none"

    @property
    def stands(self) -> tuple[int, int]:
        return query_offset(self.pattern, self.n, self.m, self.at)


def facts(call: Call) -> Facts:
    by_distance = isinstance(call.bias, ByDistance)
    adds = (call.bias.table, call.bias.slopes) if isinstance(call.bias, ByDistance) else (call.bias,)
    return Facts(
        call.pattern,
        call.n,
        call.m,
        call.q.shape[-1],
        call.v.shape[-1],
        call.q.shape[0] * call.q.shape[1],
        call.q.dtype,
        call.q.device.type,
        at=None if isinstance(call.at, Tensor) else call.at,
        at_each_row=isinstance(call.at, Tensor),
        table=call.table is not None,
        lengths=call.lengths is not None,
        bias="none" if call.bias is None else "distance" if by_distance else "tensor",
        bias_grad=_learns(*adds),
        hard=call.hard,
        dropout=call.dropout_p > 0,
        lse=call.return_lse,
        grad=_learns(call.q, call.k, call.v),
    )


def _learns(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def choose(f: Facts, backend: str = "auto") -> Choice:
    if backend not in BACKENDS:
        raise SpecError(f"unknown backend {backend!r}; {nearest(backend, BACKENDS)}")
    if backend == "auto":
        # Remembered, as a short call takes no longer than the choice; a trace has symbols for sizes, a pattern with
        # data is compared by identity and would be kept alive.
        return _auto(f) if torch.compiler.is_compiling() or f.pattern.has_data else _remembered(f)
    data = torch.compiler.is_compiling() or f.pattern.has_data
    if refusal := (cannot if data else _verdict)(f, backend):
        raise BackendError(f"backend={backend!r} cannot run this: {refusal}")
    return Choice(backend, "asked for by name")


@lru_cache(maxsize=1024)
def _remembered(f: Facts) -> Choice:
    return _auto(f)


@lru_cache(maxsize=1024)
def _verdict(f: Facts, backend: str) -> str | None:
    return cannot(f, backend)


def _auto(f: Facts) -> Choice:
    if f.hard:
        return Choice("plain", "hard attention has no softmax to fuse")
    if f.plain and not f.lse and _some_pairs(f) and _full_or_causal(f):
        return Choice("dense", "every pair, or every past one: PyTorch's own attention as it is")
    if torch.compiler.is_compiling():  # sizes may be symbols: nothing that reads them, and no message
        if f.pattern.has_data and f.device == "cuda" and not _cannot_flex(f):
            return Choice("flex", "")
        if f.device == "cpu" and f.bias == "distance" and not _unwalkable(f):
            return Choice("tiled", "")
        adds = f.dropout or f.bias != "none"
        walks = not (adds if f.device == "cpu" else f.bias == "tensor") and not _unwalkable(f)
        return Choice("progressions", "") if walks else Choice("plain" if f.lse else "masked", "")
    if f.bias == "distance" and f.bias_grad and cannot(f, "tiled") is None:
        return Choice(
            "tiled", "the bias learns: its gradient is summed by diagonals, without an n × m tensor"
        )
    if f.bias == "distance" and not f.dropout and _fills_tiles(f) and cannot(f, "tiled") is None:
        return Choice("tiled", "the bias is read along diagonals, without an n × m tensor")
    if f.dropout and not f.lse and cannot(f, "tiled") is None and TILED * estimate(f) < masked_estimate(f):
        return Choice("tiled", "dropout over the pairs of the pattern alone")
    if f.pattern.has_data and (found := _by_data(f)):
        return found
    why = cannot(f, "progressions")
    if why is None and f.lse:
        return Choice("progressions", "it gives the log-sum-exp")
    if f.lse:
        return Choice("plain", f"the log-sum-exp is asked for, and progressions cannot: {why}")
    if why is None and f.bias == "distance":
        return Choice("progressions", "the bias is added inside the kernels, without an n × m tensor")
    if why is None:
        ours, theirs = estimate(f), masked_estimate(f)
        told = f"about {ours / theirs:.0%} of the time of a masked call"
        if ours < (SURELY if f.device == "cpu" else 1.0) * theirs:
            return Choice("progressions", told)
        why = f"progressions would take {told}"
    return Choice("masked", why)


def _fills_tiles(f: Facts) -> bool:
    """Whether a bias by distance that does not learn is quicker in tiles: to gather it takes longer than all else."""
    return f.lse or f.heads * f.n * f.m >= (TILED_BOTH if f.grad else TILED_FORWARD)


def _by_data(f: Facts) -> Choice | None:
    """A way for a pattern with data that skips what the data hide."""
    if f.device == "cpu" and cannot(f, "packed") is None:
        if f.lse:
            return Choice("packed", "it gives the log-sum-exp")
        told = f"about {packed_estimate(f) / masked_estimate(f):.0%} of the time of a masked call"
        return Choice("packed", told) if packed_estimate(f) < SURELY * masked_estimate(f) else None
    if f.device == "cuda" and f.n * f.m >= FLEX_PAIRS and cannot(f, "flex") is None:
        return Choice("flex", "blocks of 128 × 128 pairs without an allowed one are skipped")
    return None


def cannot(f: Facts, backend: str) -> str | None:
    """Why this way cannot run the call; None if it can."""
    if backend != "plain" and f.hard:
        return "scale=inf has no softmax; use backend='plain'"
    match backend:
        case "plain":
            return None
        case "masked":
            return "it gives no log-sum-exp; use backend='plain'" if f.lse else None
        case "dense":
            return _cannot_dense(f)
        case "packed":
            return _cannot_pack(f)
        case "flex":
            return _cannot_flex(f)
        case "tiled" if f.device != "cpu":
            return f"it runs on the CPU, not on {f.device}"
        case "tiled" if f.bias == "tensor":
            return "a bias tensor is n × m already; use backend='masked'"
        case "progressions" if f.bias == "tensor" or (f.bias == "distance" and f.device == "cpu"):
            return "a bias is added to the scores; use backend='tiled' (by distance, CPU) or 'masked'"
        case "progressions" if f.dropout and f.device == "cpu":
            return "it has no dropout; use backend='tiled' (CPU) or 'masked'"
    if torch.compiler.is_compiling():  # sizes may be symbols: the plan is looked up when the graph runs
        return _unwalkable(f)
    return _unwalkable(f) or _unplanned(f)


def _cannot_dense(f: Facts) -> str | None:
    if f.lse:
        return "it gives no log-sum-exp; use backend='progressions'"
    if not f.plain:
        return "a bool tensor, lengths or a bias needs a mask; use backend='masked'"
    if not _some_pairs(f):
        return "there are no pairs"
    if not _full_or_causal(f):
        return f"{f.pattern!r} over {f.n} queries and {f.m} keys is neither full nor square causal"
    return None


def _unfused(f: Facts) -> str | None:
    """Why neither packed nor flex can: what is added or drawn."""
    if f.bias != "none":
        return "a bias is added to the scores; use backend='masked'"
    if f.dropout:
        return "it has no dropout; use backend='masked'"
    if f.table:
        return "a bool tensor is n × m already; use backend='masked'"
    return None if _some_pairs(f) else "there are no pairs"


def _cannot_pack(f: Facts) -> str | None:
    if why := _unfused(f):
        return why
    if f.device != "cpu":
        return f"it runs on the CPU, not on {f.device}; use backend='flex'"
    if packed.parts(f.pattern) is None:
        return f"{f.pattern!r} is not documents(ids), or that and words that read i − j; use backend='masked'"
    if f.at_each_row:
        return "each batch row stands elsewhere; use backend='masked'"
    if torch.compiler.is_compiling():  # the ids are read when the graph runs
        return None
    if packed.programs(f.pattern, f.n, f.m, f.at) is None:
        return "a document's ids do not follow one another, or queries skip some; use backend='masked'"
    return None


def _cannot_flex(f: Facts) -> str | None:
    if why := _unfused(f):
        return why
    if f.device not in ("cpu", "cuda"):
        return f"FlexAttention runs on CUDA and on the CPU, not on {f.device}"
    if f.dtype == torch.float64:
        return "FlexAttention takes float32, float16 or bfloat16, not float64; use backend='masked'"
    if f.device == "cuda" and f.n < FLEX_QUERIES:
        return (
            f"FlexAttention has no kernel for every n below {FLEX_QUERIES}, here {f.n}; use backend='masked'"
        )
    if f.device == "cpu" and f.grad:
        return "on the CPU FlexAttention has no backward; use backend='masked', or torch.no_grad()"
    if f.device == "cpu" and f.lse:
        return "on the CPU FlexAttention gives no log-sum-exp; use backend='plain'"
    return None


def _unwalkable(f: Facts) -> str | None:
    """Why no progressions describe the call, whatever its sizes."""
    if f.table:
        return "a bool tensor is no pattern; declare one, or use backend='masked'"
    if f.pattern.has_data:
        return f"{f.pattern!r} carries data, which no progression describes; use backend='masked'"
    if f.at_each_row:
        return "each batch row stands elsewhere; use backend='masked'"
    if f.device not in ("cpu", "cuda"):
        return f"it runs on the CPU and on CUDA, not on {f.device}"
    if f.device == "cuda" and f.dtype == torch.float64:
        return "the Triton kernels take float32, float16 or bfloat16, not float64; use backend='masked'"
    if f.device == "cuda" and max(f.d_k, f.d_v) > WIDEST:
        return f"heads {max(f.d_k, f.d_v)} wide do not fit the Triton kernels, which hold {WIDEST}"
    return None


def _unplanned(f: Facts) -> str | None:
    """Why there is no good plan at these sizes."""
    if not _some_pairs(f):
        return "there are no pairs"
    try:
        most = plan_of(f).max_parts
    except NoPlan as why:
        return str(why)
    return f"{most} progressions a tile; past {MOST_PARTS} a mask is quicker" if most > MOST_PARTS else None


def plan_of(f: Facts) -> Plan:
    return plan(f.pattern, f.n, f.m, *f.stands)


def program_of(f: Facts) -> Program:
    return program(f.pattern, f.n, f.m, *f.stands)


def computed(f: Facts) -> int:
    """The pairs that progressions visit for one head."""
    return program_of(f).computed if f.device == "cpu" else plan_of(f).computed


def estimate(f: Facts) -> float:
    """About the time of progressions, in nanoseconds on two cores or in units of a dense pair on a GPU."""
    if f.device == "cpu":
        usual, found = program_of(f).nanoseconds(f.heads, f.grad), _abreast(f)
        return usual if found is None else min(usual, found[1])
    if not f.grad:
        return f.heads * (computed(f) * 2.0 + 64 * f.n) + GPU_FORWARD
    one = f.plain and not f.dropout and brief(f.n, f.m, f.heads, max(f.d_k, f.d_v))
    return f.heads * computed(f) * 8.0 + (GPU_BRIEF if one else GPU_CALL)


def brief(n: int, m: int, heads: int, width: int) -> bool:
    """Whether the kernels go back through a call by one launch: where the GPU would wait for the CPU."""
    return n * m <= BRIEF and heads * n * m <= BRIEF_ALL and width <= BRIEF_WIDTH


def short(f: Facts, backend: str) -> gathered.Lay | None:
    """How a plain call on the CPU is cut into tiles of gathered keys (short.py), where that is quicker than the way
    chosen; None elsewhere."""
    if backend not in ("masked", "progressions") or not _only_pairs(f) or f.n * f.m > gathered.PAIRS:
        return None
    theirs = estimate(f) if backend == "progressions" else masked_estimate(f)
    wide = (f.d_k + f.d_v) // 2
    found = gathered.quickest(f.pattern, f.n, f.m, *f.stands, heads=f.heads, d=wide, grad=f.grad)
    return found[0] if found is not None and found[1] < theirs else None


def abreast(f: Facts, backend: str) -> stretches.Lay | None:
    """How progressions run a plain call on the CPU with the keys of a tile side by side (abreast.py), where that is
    quicker than joining parts; None elsewhere."""
    found = _abreast(f) if backend == "progressions" else None
    return found[0] if found is not None and found[1] < program_of(f).nanoseconds(f.heads, f.grad) else None


def _abreast(f: Facts) -> tuple[stretches.Lay, float] | None:
    """The quickest such way, and its nanoseconds."""
    if not _only_pairs(f):
        return None
    kept = min(f.heads * (f.n + f.m) * (f.d_k + f.d_v), stretches.KEPT)
    return stretches.quickest(f.pattern, f.n, f.m, *f.stands, heads=f.heads, grad=f.grad, kept=kept)


def _only_pairs(f: Facts) -> bool:
    """Whether a call on the CPU is a pattern and three tensors, and nothing else."""
    usual = f.plain and f.at is None and not (f.at_each_row or f.lse or f.dropout or f.pattern.has_data)
    exact = f.dtype in (torch.float32, torch.float64)  # half types are rounded between the products
    return f.device == "cpu" and usual and exact and f.heads * f.n * f.m > 0


def packed_estimate(f: Facts) -> float:
    """The same for packed documents, on the CPU."""
    ways = packed.programs(f.pattern, f.n, f.m, f.at) or ()
    return sum(way.nanoseconds(f.heads // len(ways), f.grad) for way in ways)


def masked_estimate(f: Facts) -> float:
    """The same for a masked call, which computes every pair."""
    if f.device == "cpu":
        pair = MASKED_BOTH if f.grad else MASKED_FORWARD
        return f.heads * f.n * f.m * (pair if f.n >= BLOCKS else 2 * pair)
    return f.heads * f.n * f.m * (7.0 if f.grad else 2.0) + (GPU_MASKED_BOTH if f.grad else GPU_MASKED)


# Nanoseconds a pair of SDPA: two cores, heads of 64, float32; measured by bench/cpu_patterns.py.
MASKED_FORWARD, MASKED_BOTH = 1.8, 6.4
BLOCKS = 192  # queries from which on the fused op works in larger blocks, twice as quick
TILED = 2.0  # tiles of scores in plain PyTorch cost so much more than the fused op
TILED_FORWARD, TILED_BOTH = 1 << 18, 1 << 21  # pairs of all heads: bench/cpu_bias.py, fixed
SURELY = 0.85  # what an estimate may say and be right: at 512 positions calls took up to 1.15 times of theirs
FLEX_PAIRS = 1 << 22  # a head's pairs from which on a compiled call is worth its start
FLEX_QUERIES = 128  # torch 2.11 on an H200: n = 77 with grouped heads finds "no choices exist for backend"
# What the CPU needs for a call, as dense pairs (10⁸ take the GPU about 50 µs): bench/gpu_door.py, short. Forward by
# our kernel, which is the lightest in a call made before, and with a mask. With backward: by one launch (0, and what
# the others need beyond that), by several, and with a mask.
GPU_FORWARD, GPU_MASKED = 4e7, 5e7
GPU_BRIEF, GPU_CALL, GPU_MASKED_BOTH = 0.0, 2.6e8, 8e7
# Pairs of a head up to which one launch is quicker than three (16 heads, n to 4096 measured), and of all heads, by
# estimate: its programs are slower, and many heads keep the GPU busy.
BRIEF, BRIEF_ALL, BRIEF_WIDTH = 1 << 22, 1 << 28, 128


def _some_pairs(f: Facts) -> bool:
    return f.n != 0 and f.m != 0


def _full_or_causal(f: Facts) -> bool:
    """Every pair; or every past one, for as many queries as keys or one query at the end."""
    if isinstance(f.pattern, full):
        return True
    if not isinstance(f.pattern, causal) or f.at is not None or f.at_each_row:
        return False
    return f.n == f.m or f.n == 1
