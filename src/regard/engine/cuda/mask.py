"""Which pairs are allowed: a pattern as a Triton function `allowed(i, j)`; the pairs of a block as bits for the
Hopper kernels. Nothing here imports Triton before a call runs."""

import hashlib
import linecache
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...pattern import Pattern, Relation, neighborhood
from ...pattern.one_query import residue, run_formulas
from ...progression import FAR, Ints


def expression(pattern: Pattern) -> str:
    """The condition on positions i and j as Triton source. Of words with data, only grids have one.

    >>> from regard.pattern import causal, every
    >>> expression(causal() & ~every(4))
    '((j <= i) & ((j % 4 == 0) == 0))'
    """
    return pattern.fold(
        lambda word: word.condition() if isinstance(word, neighborhood) else _condition(word.relation),
        "({} & {})".format,
        "({} | {})".format,
        "({} == 0)".format,  # ~ of a truth value is not one in Triton's interpreter
    )


def _condition(r: Relation) -> str:
    """Remainders are taken of i and of j, never of i − j: a tile has rows + columns of those, not rows × columns."""
    conditions = (
        (r.divisor > 1, f"{residue('i', r.divisor)} == j % {r.divisor}"),
        (r.query_class[0] > 1, f"{residue('i', r.query_class[0])} == {r.query_class[1]}"),
        (r.key_class[0] > 1, f"j % {r.key_class[0]} == {r.key_class[1]}"),
        (r.query_below < FAR, f"i < {r.query_below}"),
        (r.key_below < FAR, f"j < {r.key_below}"),
        *((True, f"i - {residue('i', size)} == j - j % {size}") for size in r.blocks),
        (r.far < FAR, f"i - j <= {r.far}"),
        (r.near > -FAR, f"j - i <= {-r.near}" if r.near else "j <= i"),
    )
    tested = [text for is_tested, text in conditions if is_tested]
    if len(tested) <= 1:
        return f"({tested[0] if tested else 'j == j'})"
    return f"({' & '.join(f'({one})' for one in tested)})"


@lru_cache(maxsize=1024)
def compiled(pattern: Pattern | None) -> Any:
    """`allowed(i, j)` as a Triton function; None: there is no condition."""
    return None if pattern is None else function("allowed", "i, j", expression(pattern))


@lru_cache(maxsize=1024)
def runs(pattern: Pattern, several: bool) -> Any:
    """The progressions of keys of one query (see one_query.run_formulas) as a Triton function of p and m; of several
    queries at positions p, progressions that contain theirs."""
    formulas = list(run_formulas(pattern) or ())
    if several:
        formulas[::3] = (f"tl.min({first} + 0 * p, 0)" for first in formulas[::3])
        formulas[2::3] = (f"tl.max({end} + 0 * p, 0)" for end in formulas[2::3])
    body = re.sub(r"\b(maximum|minimum|where)\(", r"tl.\1(", ", ".join(formulas))
    return function("runs", "p, m", f"({body},)")


def function(prefix: str, arguments: str, body: str, jit: Any = None, **namespace: Any) -> Any:
    """A function for this compiler, or for Triton's; its name has a hash of its body, by which caches know it."""
    if jit is None:
        import triton

        jit, namespace = triton.jit, {"tl": triton.language}  # the interpreter needs tl
    name = f"{prefix}_{hashlib.sha256(body.encode()).hexdigest()[:16]}"
    source = f"def {name}({arguments}):\n    return {body}\n"
    path = f"<regard {name}>"
    lines = source.splitlines(keepends=True)
    linecache.cache[path] = (len(source), None, lines, path)  # compilers read the source
    namespace = {"__name__": __name__, **namespace}
    exec(compile(source, path, "exec"), namespace)
    return jit(namespace[name])


# Masks, for the Hopper kernels: one bit per pair, which is 1 if the pair is allowed. Bits cost less than conditions,
# and kernels need not be compiled for each pattern. Where a pattern repeats itself, blocks share a mask: most passes
# have a few.

MEMBERS = 64  # the number of members of a tile, and of a block
MASK_WORDS = 128  # of a mask, one for each thread of a Hopper kernel


@dataclass(frozen=True, eq=False)
class Masks:
    """The masks of the blocks of a schedule. Word 8 of a block: its number of members + 256 × the number of its mask,
    of which the first allows no pair. If tiles are boxes, lists of members follow; word 1 of a block: where its list
    begins."""

    words: Tensor  # (x, MASK_WORDS); boxes: flat
    spread: str | None = None  # boxes: source code of the distance of member a of a tile from the first one
    owned: str | None = None  # … of whether it belongs to this tile, by word 11 of a block; None: all do
    pairs: int = 0  # boxes and documents: the number of pairs that are computed


@lru_cache(maxsize=1)
def _random_factors() -> Ints:
    return np.random.default_rng(0).integers(1 << 62, size=MASK_WORDS)


def distinct_rows(rows: NDArray[Any]) -> tuple[NDArray[Any], Ints]:
    """The distinct rows, and which of them each row is, by a number for each row: sorting rows takes far longer."""
    number = np.einsum("rc,c->r", rows, _random_factors()[: rows.shape[1]])  # modulo 2⁶⁴
    _, first, nth_distinct = np.unique(number, return_index=True, return_inverse=True)
    if (rows != rows[first][nth_distinct]).any():  # different rows have one number
        _, first, nth_distinct = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    return rows[first], nth_distinct.ravel()


def mask_words(allowed: Tensor | NDArray[Any]) -> NDArray[np.int32]:
    """The masks of blocks, on the host. allowed: (x, MEMBERS, MEMBERS), which pairs are allowed."""
    if not isinstance(allowed, Tensor):
        rows = np.packbits(allowed, bitorder="little")
    else:
        eight = allowed.reshape(-1, 8).byte() << torch.arange(8, dtype=torch.uint8, device=allowed.device)
        rows = eight.sum(-1, dtype=torch.uint8).cpu().numpy()
    return _of_threads(rows.view(np.uint64).reshape(-1, MEMBERS))


# The bits of the columns before x, by x.
BELOW = np.array([(1 << x) - 1 for x in range(MEMBERS + 1)], dtype=np.uint64)
TWO, *CLOSER = map(np.uint64, (0x0303030303030303, 0x00FF00FF00FF00FF, 0x0000FFFF0000FFFF, 0xFFFFFFFF))


def interval_mask_words(ends: NDArray[np.uint8]) -> NDArray[np.int32]:
    """`mask_words` of intervals. ends: of each mask, the first column of each row, then the end of each."""
    return _of_threads(BELOW[ends[:, MEMBERS:]] & ~BELOW[ends[:, :MEMBERS]])


def _of_threads(of_rows: NDArray[np.uint64]) -> NDArray[np.int32]:
    """Masks from 64 bits for each row. A thread of a Hopper product holds, of the rows 16 · x + y and 16 · x + y + 8
    (y < 8), the columns 8 · u + 2 · v and 8 · u + 2 · v + 1 for all u: words are by x, y, v, and bits by u, row,
    column."""
    of_pairs = of_rows.reshape(-1, 4, 2, 8, 1)  # rows 16 · x + y and 16 · x + y + 8
    two = of_pairs >> 2 * np.arange(4, dtype=np.uint64) & TWO  # of each eight columns
    bits = two[:, :, 0] | two[:, :, 1] << np.uint64(2)
    for shift, mask in zip((4, 8, 16), CLOSER):  # four bits of each byte, moved next to one another
        bits = (bits | bits >> np.uint64(shift)) & mask
    return bits.astype(np.uint32).view(np.int32).reshape(-1, MASK_WORDS)
