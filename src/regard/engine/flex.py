"""The backend `flex`: `where(fn)` and documents by compiled FlexAttention, which skips blocks of 128 × 128 pairs
without an allowed one.

On CUDA forward and backward; on the CPU PyTorch compiles the forward alone, so there it runs only by name.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from math import inf
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from .. import compat
from ..errors import compiler_errors_named
from ..pattern import BlockGrid, Pattern, neighborhood, positions, query_offset, where
from ..pattern.block_mask import from_grid
from ..pattern.classification import BLOCK
from .call import Cache, Call, CallFacts, Prepared
from .cuda.documents import Packed, for_hopper

if TYPE_CHECKING:  # imported where a call runs: it takes as long to import as the rest of regard
    from torch.nn.attention.flex_attention import BlockMask

MIN_HEAD_DIM = 16  # heads FlexAttention takes; narrower ones get zeros behind
MIN_PAIRS = 1 << 22  # pairs of a head from which on a compiled call is worth its start
MIN_QUERIES = 128  # torch 2.11 on an H200: n = 77 with grouped heads finds "no choices exist for backend"
PAIR = 5e-13  # seconds of a dense pair on an H200; fewer than all are computed
# The same in float32, per width of a head: as much longer as the Triton kernels take; and of heads wider than 128, of
# which one call was measured (15 documents, n = 4096, heads of 256: 31 ms, SDPA with a mask 11).
SINGLE, SINGLE_WIDE = 7e-14, 3.0e-13


class Flex:
    name = "flex"
    automatic = ("cuda",)

    def refuses(self, f: CallFacts) -> str | None:
        on_cpu = f.device_type == "cpu"
        reasons = (
            (f.hard, "scale=inf has no softmax"),
            (f.bias != "none", "a bias is added to the scores"),
            (f.left_padding, "lengths with a start per batch row (left padding) are not supported here"),
            (f.dropout_p > 0, "it has no dropout"),
            (f.table, "a bool tensor is n × m already"),
            (f.n == 0 or f.m == 0, "there are no pairs"),
            (f.pattern.data_shape[1] > 1, "the data of the pattern differ by head"),
            (not on_cpu and f.device_type != "cuda",
             f"FlexAttention runs on CUDA and on the CPU, not on {f.device_type}"),
            (f.dtype == torch.float64, "FlexAttention takes float32, float16 or bfloat16, not float64"),
            (not on_cpu and f.n < MIN_QUERIES,
             f"FlexAttention has no kernel for every n below {MIN_QUERIES}, here {f.n}"),
            (on_cpu and f.grad, "on the CPU FlexAttention has no backward, which torch.no_grad() avoids"),
            (on_cpu and f.needs_lse, "on the CPU FlexAttention gives no log-sum-exp"),
        )  # fmt: skip
        return next((reason for holds, reason in reasons if holds), None)

    def estimate(self, f: CallFacts) -> float:
        """Only what data decide is worth a compilation: for the rest there are faster kernels. For packed documents,
        too, on Hopper: it takes 1.6 to 3.9 times as long (six rows of bench/gpu_peers.py)."""
        worth = f.device_type == "cuda" and f.pattern.has_data and f.n * f.m >= MIN_PAIRS
        if worth and isinstance(for_hopper(f), Packed):
            return inf
        share = 3 if isinstance(f.pattern, neighborhood) else 1  # whose lines other kernels read, if they can
        single = f.d_k * (SINGLE_WIDE if f.d_k > 128 else SINGLE)
        return share * f.pairs * (single if f.dtype == torch.float32 else PAIR) if worth else inf

    def prepare(self, f: CallFacts) -> Prepared:
        computed = partial(visited, f.pattern, f.n, f.m, *f.offset)
        return Prepared(self.name, "blocks of 128 × 128", computed, lambda call: attend(call.hide()))


def attend(call: Call) -> tuple[Float[Tensor, "b h n d_v"], Float[Tensor, "b h n"] | None]:
    """softmax(scale · q kᵀ) v over the pairs of the pattern; the log-sum-exp where it is requested."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    missing = (max(MIN_HEAD_DIM - x.shape[-1], 0) for x in (call.q, call.k, call.v))
    q, k, v = (F.pad(x, (0, d)) if d else x for x, d in zip((call.q, call.k, call.v), missing))
    if q.is_cpu and compat.flex_needs_own_buffers:  # Inductor removes plain copies, not these
        k, v = (F.pad(x, (0, 8))[..., :-8] for x in (k, v))
    options: dict[str, Any] = {"scale": call.factor, "enable_gqa": call.grouped}
    if call.softcap is not None:
        options["score_mod"] = _capped(call.softcap)
    if call.return_lse:
        options["return_aux"] = AuxRequest(lse=True)
    with torch.autocast(q.device.type, enabled=False):
        mask = _block_mask(call)
        if torch.compiler.is_compiling():
            result = flex_attention(q, k, v, block_mask=mask, **options)
        else:
            with compat.denormals_preserved(), compiler_errors_named("flex"):  # C++ on the CPU
                result = _compiled(_kind(call))(q, k, v, block_mask=mask, **options)
    o, lse = (result[0], result[1].lse) if call.return_lse else (result, None)
    return o[..., : call.v.shape[-1]], lse


@lru_cache(maxsize=64)
def _capped(c: float) -> Callable:
    """Scores under a softcap, as FlexAttention takes a change of scores."""
    return lambda score, b, h, i, j: c * torch.tanh(score / c)


def visited(pattern: Pattern, n: int, m: int, start: int, step: int) -> int:
    """The pairs in the blocks that are not skipped, over all batch rows of the data."""
    grid = BlockGrid(positions(pattern, n, m, (start, step), pattern.device)[None], m, step)
    return int((~grid.classify(pattern).none).sum()) * BLOCK**2


# The mask: blocks to skip, blocks to leave as they are, and a function for the others.

_masks = Cache(8)  # with what they were computed from, so that the id of a tensor stays its own


def _block_mask(call: Call) -> "BlockMask":
    """Created once for a pattern and the contents of its data."""
    state = None if torch.compiler.is_compiling() else call.pattern.state()
    if state is None or call.lengths is not None or isinstance(call.at, Tensor):
        return _new_block_mask(call)
    key = (state, call.n, call.m, call.at, call.q.device)
    return (_masks.get(key) or _masks.put(key, (_new_block_mask(call), call.pattern.values())))[0]


def _new_block_mask(call: Call) -> "BlockMask":
    i = positions(call.pattern, call.n, call.m, call.at, call.q.device)
    at = None if isinstance(call.at, Tensor) else query_offset(call.pattern, call.n, call.m, call.at)
    return from_grid(call.pattern, i if i.dim() == 2 else i[None], call.m, at, call.lengths)


def _written(pattern: Pattern) -> str:
    """How a pattern with data is composed."""
    of_word = lambda word: word.text or f"data {getattr(word, 'within', '')!r}"  # noqa: E731
    return pattern.fold(of_word, "Both({}, {})".format, "Either({}, {})".format, "Not({})".format)


# One compiled function per kind of call: PyTorch counts recompilations by code, and past a limit runs the formula.


def _kind(call: Call) -> tuple:
    q = call.q
    # On the CPU the C++ for sizes that are symbols does not compile.
    sizes = tuple(x.shape if x.is_cpu else x.shape[1::2] for x in (q, call.k, call.v))
    codes = tuple(leaf.fn for leaf in call.pattern.leaves() if isinstance(leaf, where))
    flags = (call.return_lse, torch.is_grad_enabled(), call.lengths is None, isinstance(call.at, Tensor))
    return q.device.type, q.dtype, sizes, flags, call.softcap, _written(call.pattern), codes


@lru_cache(maxsize=64)
def _compiled(kind: tuple) -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    code: CodeType = _run.__code__.replace(co_name=f"flex_{abs(hash(kind)):x}")
    function = FunctionType(code, {**_run.__globals__, "flex_attention": flex_attention})
    return torch.compile(function, fullgraph=True, dynamic=False if kind[0] == "cpu" else None)


def _run(q, k, v, **options):
    return flex_attention(q, k, v, **options)  # a global that _compiled gives it
