"""Cases of the Triton kernels, each compared with the formula in float64. As a program, it runs those that are named:

    TRITON_INTERPRET=1 python kernel_cases.py cpu NAME …     most with small tiles, one line of JSON per case
    python kernel_cases.py cuda NAME …                       with the configurations stored for a GPU

The rule: max|fast − ref| ≤ 2 · max|plain − ref| + 4 ulp of max|ref|, where plain is ordinary PyTorch in the same
dtype, for o, lse and the gradients of q, k, v and of a bias by distance under random gradients of o and lse. Where
weights are dropped, the same are dropped in all three: which, Philox says, here once more in NumPy.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

import new_process
from interpreter import quicken
from regard import reference
from regard.pattern import (
    Pattern,
    Related,
    Relation,
    blocks,
    causal,
    dilated,
    every,
    full,
    neighborhood,
    positions,
    prefix,
    query_offset,
    rows,
    sinks,
    strided,
    window,
)
from regard.position import ByDistance

OUTPUTS = ("o", "lse", "dq", "dk", "dv")
SEED = 0x1234_5678_9ABC_DEF


@dataclass(frozen=True)
class Case:
    """One call of the kernels. `at` is the query offset; None: the last query is at the last key."""

    name: str
    pattern: Pattern
    n: int = 37
    m: int = 37
    d_k: int = 16
    d_v: int = 16
    b: int = 1
    h: int = 1
    h_kv: int = 1
    dtype: str = "float32"
    at: tuple[int, int] | None = None
    row_at: tuple[int, ...] | None = None  # the query offset of each batch row
    scale: float | None = None
    lengths: tuple[int, ...] | None = None  # keys past them hold NaN, values infinity
    starts: tuple[int, ...] | None = None  # with lengths: keys before them too
    softcap: float | None = None
    sink: tuple[float, ...] | None = None  # one logit per head
    given: str = "o and lse"  # which outputs have a gradient
    order: str = "b h n d"  # of the axes in memory
    one_key: bool = False  # no query has two keys: see `terms`
    draw: int = 0  # of the random numbers
    reach: int | None = None  # of a table of distances, which learns
    slopes: bool = False  # a bias falls with distance, by slopes that learn
    dropout_p: float = 0.0
    steep: float = 0.0  # the last keys are as many times longer than the first: the largest score moves
    stored: bool = (
        False  # with the stored configurations on a CPU too: such short calls go backward by one launch
    )


def _words() -> Iterator[Case]:
    for pattern in (
        full(), causal(), window(5), window(9, 2), dilated(2, 5), every(5, 2), strided(6), rows(7, 3), sinks(3),
        prefix(20), blocks(12),
    ):  # fmt: skip
        yield Case(repr(pattern), pattern)


BOTH = causal() & (window(5) | every(8))
RECENT = causal() & (window(20) | sinks(4))
LATTICE = Related(Relation(near=3, far=27, divisor=2, query_below=24, key_class=(4, 1)))
SMALL = [
    *_words(),
    # Compositions
    Case("window | every", window(4) | every(8), n=50, m=50),
    Case("causal window | every", BOTH, n=50, m=50),
    Case("window | strided", window(3) | strided(8)),
    Case("causal | prefix", causal() | prefix(13)),
    Case("a relation of several conditions", LATTICE | causal() & window(4), n=41, m=41),
    # Grids
    Case("grid", neighborhood((6, 9), (3, 5)), n=54, m=54, h=2, h_kv=1),
    Case("shifted grid with steps", neighborhood((5, 11), (3, 5), (1, 2), "shifted"), n=55, m=55),
    Case("video", neighborhood((3, 4, 5), 3, causal=(True, False, False)), n=60, m=60, lengths=(50,)),
    # Several passes, and tiles that are split
    Case("split rows", full(), n=36, m=283),
    Case("split keys", full(), n=283, m=5, at=(0, 1)),
    Case("split keys that go on", causal() & (sinks(3) | dilated(4, 8) | every(32, 5)), n=291, m=291),
    Case("tiles without a rest", full(), n=32, m=32),
    Case("sinks | window | every", sinks(2) | window(3) | every(13, 5), n=53, m=53),
    Case("window, then two kinds of rows", window(3) | rows(13, 5) | rows(17, 1), n=97, m=97),
    Case("sinks | window, then rows", sinks(2) | window(3) | rows(13, 5), n=97, m=97),
    Case("split rows that go on", causal() & (window(2) | sinks(3) | rows(32, 5)), n=291, m=291),
    # Shapes
    Case("grouped heads", BOTH, h=4, h_kv=2, n=19, m=23),
    Case("values narrower", BOTH, d_k=24, d_v=5),
    Case("width 1", full(), n=7, m=11, d_k=1, d_v=1),
    Case("n < m", BOTH, n=7, m=53),
    Case("one query", BOTH, n=1, m=53),
    Case("one query, keys in pieces", causal() & (window(90) | every(8)), n=1, m=283, h=4),
    Case(
        "one query, row positions",
        RECENT | every(8),
        n=1,
        m=97,
        b=3,
        h=2,
        lengths=(97, 41, 15),
        row_at=(96, 40, 14),
    ),
    Case("one query of a block", causal() & strided(6) | blocks(12), n=1, at=(31, 1), softcap=2.0),
    Case("one query, left padding", window(30) - dilated(3, 5), n=1, at=(33, 1), lengths=(35,), starts=(7,)),
    Case("one query of some", window(5) | rows(7, 3), n=1, at=(31, 1)),
    # Few queries, whose keys are formulas of their positions
    Case("few queries", RECENT | every(8), n=5, m=97),
    Case("few queries, pieces, groups", BOTH, n=3, m=283, h=4, h_kv=2, order="b n h d", softcap=2.0),
    Case(
        "few queries of residues",
        causal() & (window(3) | strided(6)),
        n=4,
        m=61,
        h=6,
        h_kv=2,
        sink=(0.5,) * 6,
    ),
    Case("few queries, every second position", blocks(7) | rows(5), n=4, m=60, at=(3, 2)),
    Case("few queries of residues, every second position", strided(5) | sinks(2), n=3, m=60, at=(3, 2)),
    Case("queries of residues, row positions, pieces", strided(2), n=2, m=283, h=8, row_at=(270,), draw=1),
    Case(
        "few queries, row positions",
        RECENT | every(8),
        n=5,
        m=97,
        b=3,
        h=2,
        row_at=(92, 30, 45),
        lengths=(97, 33, 41),
    ),
    Case(
        "tiles of queries, row positions", causal() & (window(9) | sinks(2)), n=70, m=97, b=2, row_at=(27, 0)
    ),
    Case(
        "tiles of queries, row positions, pieces",
        causal() & window(150) | rows(9, 4),
        n=20,
        m=283,
        h=2,
        h_kv=1,
        row_at=(200,),
        sink=(0.3, -1.0),
        starts=(90,),
        lengths=(280,),
        softcap=2.0,
    ),
    Case(
        "residues, row positions, half",
        strided(5) | sinks(2),
        n=9,
        m=75,
        b=2,
        h=2,
        row_at=(50, -3),
        dtype="float16",
    ),
    Case(
        "few queries without a plan", every(7) | every(11) | every(13) | every(17, 3), n=3, m=97, h=4, h_kv=2
    ),
    Case("few queries, no key in the first progression", window(3) & prefix(5) | every(8), n=3, m=97),
    Case("few queries of residues of keys", every(4, 1) & strided(4) | sinks(2), n=5, m=97),
    Case("queries without keys, row positions", BOTH & window(9), n=13, m=61, b=3, row_at=(-20, 55, 90)),
    Case("one query, a clause without keys", every(2) & every(4, 3) | window(2), n=1),
    Case("few queries, a clause without keys", every(2) & every(4, 3) | window(2), n=3, m=53),
    Case("one query without a plan", strided(7) | strided(11) | strided(13) | strided(17), n=1, m=61),
    Case("one key", full(), n=11, m=1, at=(0, 1), one_key=True),
    Case("one pair", full(), n=1, m=1, one_key=True),
    Case("lengths of one key", full(), n=7, m=11, lengths=(1,), one_key=True),
    # Query offsets, lengths
    Case("every second position", blocks(7) | rows(5), at=(-7, 2)),
    Case("empty rows", window(5) - window(2) - blocks(9)),
    Case("nothing at all", sinks(0), n=5, m=7),
    Case("left padding", window(3) | every(8), b=3, lengths=(37, 17, 9), starts=(5, 0, 9)),
    # Softcap
    Case("softcap", BOTH, h=2, h_kv=1, n=50, m=50, softcap=0.8),
    Case("sink", BOTH, b=2, h=2, h_kv=1, n=50, m=50, sink=(0.7, -1.3)),
    Case("sink of empty rows", window(2) & sinks(9), h=2, sink=(-0.4, 2.0), lengths=(7,)),
    Case(
        "sink, passes that continue",
        causal() & (window(3) | dilated(3, 5)),
        h=2,
        sink=(1.0, -inf),
        softcap=2.0,
    ),
    Case(
        "sink of one query",
        RECENT,
        b=2,
        h=4,
        h_kv=2,
        n=1,
        m=100,
        row_at=(99, 40),
        sink=(0.5, -2.0, 3.0, -inf),
    ),
    Case(
        "softcap, left padding, table", window(3) | every(8), softcap=2.0, reach=6, lengths=(30,), starts=(7,)
    ),
    # Scales and gradients
    Case("scale 0", BOTH, scale=0.0),
    # A bias by distance and its gradient: along diagonals, at places of their own, past the reach
    Case("table", full(), n=19, m=35, h=2, h_kv=1, reach=9),
    Case("slopes", BOTH, h=2, h_kv=2, slopes=True),
    Case("table over strided keys", causal() & (strided(6) | every(4)), reach=30),
    Case("table, every second position", blocks(7) | every(4), n=17, at=(1, 2), reach=15),
    Case("table and slopes, lengths", window(3) | every(8), reach=6, slopes=True, lengths=(17,)),
    # Dropout
    Case("dropout", BOTH, n=19, m=23, h=2, h_kv=1, dropout_p=0.3),
    Case("dropout with a table, half", window(3) | every(8), reach=5, dropout_p=0.1, dtype="float16"),
    # Half precision
    Case("half in groups, lengths", BOTH, h=2, d_k=24, d_v=40, lengths=(11,), dtype="float16"),
]

SHORT = [
    replace(case, name=f"short, {case.name}", stored=True)
    for case in [
        Case("causal window | every", BOTH, n=131, m=131, d_k=64, d_v=64),
        Case("dilated", dilated(3, 4), n=139, m=139),
        Case("grouped heads", BOTH, n=37, m=53, h=4, h_kv=2),
        Case("window | strided", window(3) | strided(8), n=67, m=67),
        Case("window, then two kinds of rows", window(3) | rows(13, 5) | rows(17, 1), n=67, m=67),
        Case("empty rows", window(5) - window(2) - blocks(9)),
        Case("nothing at all", sinks(0), n=5, m=7),
        Case("one query", BOTH, n=1, m=53),
        Case("one key", full(), n=11, m=1, at=(0, 1), one_key=True),
        Case("every second position", blocks(7) | rows(5), at=(-7, 2)),
        Case("values narrower", BOTH, d_k=24, d_v=5, given="o"),
        Case("heads behind positions", BOTH, h=2, h_kv=2, n=19, m=19, order="b n h d"),
        Case("full, half", full(), n=131, m=67, at=(0, 1), d_k=128, d_v=128, dtype="float16"),
    ]
]

OTHERS = [  # in `make long`, and on a GPU
    Case("one query, heads in groups", RECENT, n=1, m=283, b=2, h=6, h_kv=2),
    Case("lengths", window(3) | every(8), b=3, lengths=(37, 17, 0)),
    Case("heads behind positions", BOTH, h=2, h_kv=2, b=2, n=19, m=19, order="b n h d"),
    Case("long grid", neighborhood((300,), 7, step=3, border="shifted"), n=300, m=300),
    Case("half grid", neighborhood((17, 19), 9), n=323, m=323, dtype="float16"),
    Case("window, then rows", window(2) | rows(16), n=67, m=67),
    Case("gradient of o alone", BOTH, given="o"),
    Case("table over rows", window(2) | rows(8), n=43, m=43, reach=40),
    Case("half window | every", window(4) | every(8), n=50, m=50, dtype="float16"),
    Case("window | rows | every", window(2) | rows(8, 2) | every(16)),
    Case("causal strided", causal() & strided(8), n=41, m=41, h=2, h_kv=2),
    Case("lengths in groups", window(3) | every(4), b=2, h=2, n=19, m=23, lengths=(9, 22), order="b n h d"),
    Case("table of every distance", BOTH, n=67, m=67, reach=80),
    Case("table, split rows", full(), n=5, m=283, reach=150),
    Case("dropout, split keys", full(), n=283, m=5, at=(0, 1), dropout_p=0.5),
    Case("window | two everys", window(2) | every(6) | every(10, 3)),
    Case("sinks | window", sinks(3) | window(4)),
    Case("causal - window", causal() - window(2)),
    Case("not every", ~every(3)),
    Case("blocks | rows", blocks(7) | rows(5)),
    Case("window, then keys", window(2) | every(16), n=67, m=67),
    Case("causal window, then keys", causal() & (window(2) | every(32)), n=97, m=97),
    Case("one key head", window(3) | every(8), h=3, h_kv=1),
    Case("values wider", BOTH, d_k=16, d_v=40),
    Case("width 64", BOTH, d_k=64, d_v=64),
    Case("n > m", window(4) | every(8), n=41, m=11, at=(0, 1)),
    Case("one key, lse alone", full(), n=11, m=1, at=(0, 1), given="lse"),
    Case("features before positions", BOTH, n=19, m=19, order="b h d n"),
    Case("before the first key", window(2), at=(-7, 1)),
    Case("every second, strided", causal() & strided(6), n=17, at=(1, 2)),
    Case("lengths of full", full(), b=3, n=23, m=29, lengths=(29, 16, 2)),
    Case("scale 0.7", BOTH, scale=0.7),
    Case("gradient of lse alone", BOTH, given="lse"),
    Case("table of one distance", window(4) | every(8), reach=0),
    Case("table and slopes", window(4) | every(3), h=2, h_kv=1, reach=12, slopes=True, scale=0.3),
    Case("table, several passes", causal() & (window(2) | every(16) | rows(13)), n=67, m=67, reach=20),
    Case("dropout, split keys that go on", causal() & (window(2) | every(64)), n=291, m=291, dropout_p=0.5),
    Case("half window | strided", window(3) | strided(8), dtype="float16"),
    Case("half split keys", full(), n=283, m=5, at=(0, 1), dtype="float16"),
]

REPEATED = (
    "split rows",
    "dropout",
    "table",
    "one query, keys in pieces",
    "nothing at all",
)  # on a GPU all are
PREPARED = (
    "values narrower",
    "short, heads behind positions",
    "one query, row positions",
    "tiles of queries, row positions",
    "left padding",
    "lengths of one key",
)  # run as prepared calls too; on a GPU every case is


LONG = 2100  # its backward pass takes several launches: see cuda/call.py, MAX_PAIRS
LARGE = {
    "full": full(),
    "causal": causal(),
    "window | every": window(128) | every(64),
    "causal window | every": causal() & (window(128) | every(64)),
    "dilated": dilated(32, 16),
    "causal strided": causal() & strided(128),
    "window | strided": window(16) | strided(64),
}


def _wide_batch(case: Case, dtype: str) -> Case:
    """A small case in eight batch rows, so that a maximum is one over many numbers."""
    lengths, starts = (None if x is None else 8 * x for x in (case.lengths, case.starts))
    rows = {"lengths": lengths, "starts": starts, "row_at": None if case.row_at is None else 8 * case.row_at}
    return replace(case, name=f"{case.name}, {dtype}", b=8 * case.b, dtype=dtype, **rows)


def _large(name: str, d: int, dtype: str) -> Case:
    shape = {"n": LONG, "m": LONG, "d_k": d, "d_v": d, "h": 4, "h_kv": 2, "dtype": dtype}
    return Case(f"{name}, n = {LONG}, d = {d}, {dtype}", LARGE[name], **shape)


def _on_gpu() -> Iterator[Case]:
    """What is always run: all small cases in bfloat16, some in float32, large ones."""
    singles = [case for case in [*SMALL, *OTHERS] if case.dtype == "float32"]
    yield from (_wide_batch(case, "bfloat16") for case in singles)
    yield from (_wide_batch(case, "float32") for case in singles if case.name in IN_FLOAT32)
    yield from (_large(name, d, "bfloat16") for name, d in product(LARGE, (128, 256)))
    yield from (_large("causal window | every", 64, dtype) for dtype in ("bfloat16", "float16"))
    for d in (64, 128, 256):  # the rows of a head apart
        case = _large("causal window | every", d, "float16")
        yield replace(case, name=f"{case.name}, heads behind positions", order="b n h d")
    flattened = {"n": 2112, "m": 2112, "b": 2, "h_kv": 4}  # flattened heads: 64 divides 2112
    for name, d in product(("causal window | every", "window | every"), (64, 128, 256)):
        case = replace(_large(name, d, "bfloat16"), **flattened)
        yield replace(case, name=f"{name}, flattened heads, d = {d}")
    # Of the keys that all queries may attend to, parts of dk and dv, which the launch of the other keys adds up;
    # grouped heads are not flattened.
    parts = causal() & (window(40) | every(32))
    for d, n, h_kv in (
        (64, 3072, 4),
        (128, 3072, 4),
        (128, 3100, 2),
        (96, 3072, 4),
        (80, 3100, 2),
        (48, 3072, 4),
        (256, 3072, 4),
        (160, 3100, 2),
    ):
        name = f"causal window | every, in parts, d = {d}, h_kv = {h_kv}"
        yield Case(name, parts, n=n, m=n, d_k=d, d_v=d, b=2, h=4, h_kv=h_kv, dtype="bfloat16")
    # Several passes. In the second and third, tiles that are split go on from the results of an earlier pass.
    mixed = {
        "global rows and keys": window(40) | rows(64) | every(64),
        "split keys that go on": causal() & (window(64) | every(50) | sinks(100)),
        "split rows that go on": causal() & (window(64) | rows(64) | sinks(100)),
        "window, then strided": causal() & (window(63) | strided(64)),
        "window, then dilated": causal() & (window(32) | dilated(32, 8) | dilated(32, 64)),
    }
    for (name, pattern), d in product(mixed.items(), (64, 128, 256)):
        yield Case(f"{name}, d = {d}", pattern, n=3072, m=3072, d_k=d, d_v=d, h=4, h_kv=2, dtype="bfloat16")
    # Passes in one launch: tiles wait for those of earlier passes. At the ends of heads tiles and blocks are short.
    chained = {
        "window, then strided": mixed["window, then strided"],
        "window, then dilated": mixed["window, then dilated"],
        "first rows without a key": (causal() - window(2)) & (window(64) | dilated(64, 8) | dilated(64, 64)),
    }
    # Of heads wider than 64, more than 40 MB: forward passes too.
    shapes = (64, 2, 4, 3100), (128, 3, 8, 2112), (96, 3, 8, 2304), (256, 2, 4, 3072)
    for (name, pattern), (d, b, h, n) in product(chained.items(), shapes):
        shape = {"n": n, "m": n, "d_k": d, "d_v": d, "b": b, "h": h, "h_kv": h}
        yield Case(f"{name}, in one launch, d = {d}", pattern, dtype="bfloat16", **shape)
    # Tiles that are boxes of a grid, blocks that are lists; grouped heads are not flattened.
    grids = {
        "image": neighborhood((32, 48), (7, 5)),
        "image with steps": neighborhood((48, 32), 5, step=2, border="shifted"),
        "video": neighborhood((8, 16, 16), (3, 5, 5), causal=(True, False, False)),
        "image of odd sizes": neighborhood((37, 53), (9, 13), border="shifted"),
        "image in boxes of 7 × 7": neighborhood((56, 56), 7, step=8, border="shifted"),
        "video with a large kernel": neighborhood((9, 14, 23), (5, 11, 12), border="shifted"),
    }
    for (name, pattern), (d, h_kv) in product(grids.items(), ((64, 2), (128, 4), (96, 4), (256, 4))):
        shape = {"n": pattern.size, "m": pattern.size, "d_k": d, "d_v": d, "b": 2, "h": 4, "h_kv": h_kv}
        yield Case(f"{name} in boxes, d = {d}", pattern, dtype="bfloat16", **shape)
    for d, dtype in (
        (64, "bfloat16"),
        (64, "float16"),
        (128, "bfloat16"),
        (256, "bfloat16"),
        (256, "float16"),
    ):
        case = _large("causal window | every", d, dtype)
        yield replace(case, name=f"{case.name}, steep", steep=8.0)
    yield replace(_large("window | every", 64, "float16"), name="scale 0.5, float16", scale=0.5, steep=4.0)
    yield replace(_large("full", 64, "bfloat16"), name=f"table, n = {LONG}", reach=300)
    yield replace(_large("window | every", 128, "bfloat16"), name=f"dropout, n = {LONG}", dropout_p=0.2)
    yield replace(_large("causal window | every", 128, "bfloat16"), name=f"softcap, n = {LONG}", softcap=5.0)
    yield replace(_large("full", 64, "float16"), name=f"softcap of full, n = {LONG}", softcap=30.0)
    shape = {"n": 515, "m": 515, "d_k": 256, "d_v": 192, "dtype": "bfloat16"}
    yield Case("causal window | every, d = 256", LARGE["causal window | every"], **shape)


def _every_dtype() -> Iterator[Case]:
    """The other cases: every case in every dtype."""
    run = {case.name for case in _on_gpu()}
    for dtype in ("bfloat16", "float16", "float32"):
        every_one = [_wide_batch(case, dtype) for case in [*SMALL, *OTHERS] if case.dtype == "float32"]
        every_one += [_large(name, d, dtype) for name in LARGE for d in (64, 128)]
        yield from (case for case in every_one if case.name not in run)


# Of a small case on a GPU, and on a CPU if the first is not exact enough: in plain PyTorch an output of few numbers
# may be exact by chance, which differs between processors.
DRAWS = 8
IN_FLOAT32 = ("window | every", "grouped heads", "lengths", "split rows that go on", "table", "dropout")
ON_GPU, EVERY_DTYPE = list(_on_gpu()), list(_every_dtype())


def tensors(case: Case, device: str) -> list[Tensor]:
    """q, k, v and gradients for o and lse, numbers of the case's dtype; what lengths hide is NaN and infinity."""
    c = case
    g = torch.Generator().manual_seed(1000 * c.n + c.m + c.d_k + 7919 * c.draw)
    shapes: tuple[tuple[int, ...], ...] = (
        (c.b, c.h, c.n, c.d_k),
        (c.b, c.h_kv, c.m, c.d_k),
        (c.b, c.h_kv, c.m, c.d_v),
        (c.b, c.h, c.n, c.d_v),
    )
    dtype = getattr(torch, c.dtype)
    q, k, v, do = (torch.randn(s, generator=g, dtype=torch.float64).to(device, dtype) for s in shapes)
    dlse = torch.randn(shapes[0][:3], generator=g, dtype=torch.float64).to(device, dtype).float()
    past = hidden(case, device)
    at = torch.arange(c.m, dtype=torch.float32, device=device)  # not the default dtype, which `again` changes
    k = k * (1 + c.steep * at / c.m).to(dtype)[:, None]
    return [q, k.masked_fill(past, nan), v.masked_fill(past, inf), do, dlse]


def bias(case: Case, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The parts of the bias by distance: numbers of the case's dtype, in this one."""
    g = torch.Generator().manual_seed(case.n + case.m + 7919 * case.draw)
    parts = {}
    if case.reach is not None:
        parts["table"] = torch.randn(case.h, 2 * case.reach + 1, generator=g, dtype=torch.float64)
    if case.slopes:
        parts["slopes"] = 0.2 * torch.rand(case.h, generator=g, dtype=torch.float64)
    return {name: x.to(device, getattr(torch, case.dtype)).to(dtype) for name, x in parts.items()}


def philox(counter: list[np.ndarray], seed: int, rounds: int = 7) -> np.ndarray:
    """The first word of Philox4x32 of these four words, by its definition (Salmon and others, 2011)."""
    mask = np.uint64(0xFFFFFFFF)
    c = [np.asarray(x, dtype=np.uint64) for x in counter]
    keys = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(rounds):
        low, high = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        k0, k1 = (np.uint64(k) for k in keys)
        shift = np.uint64(32)
        c = [(high >> shift) ^ c[1] ^ k0, high & mask, (low >> shift) ^ c[3] ^ k1, low & mask]
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[0]


def dropout_factors(case: Case, device: str) -> Tensor:
    """What weights are multiplied with: 0 or 1/(1 − p), by seed, head, row and key."""
    shape = case.b * case.h, case.n, case.m
    head, row, key = np.indices(shape)
    random = philox([key, row, head, np.zeros(shape)], SEED)
    kept = torch.from_numpy(random >= round(case.dropout_p * 2**32)).double() / (1 - case.dropout_p)
    return rearrange(kept, "(b h) n m -> b h n m", b=case.b).to(device)


def in_memory_order(x: Tensor, order: str) -> Tensor:
    """The same numbers, laid out in memory in this order of axes."""
    return rearrange(rearrange(x, f"b h n d -> {order}").contiguous(), f"{order} -> b h n d")


def hidden(case: Case, device: str) -> Tensor:
    """Which keys lie past their length: (b, 1, m, 1)."""
    lengths = torch.tensor([case.m] * case.b if case.lengths is None else case.lengths, device=device)
    starts = torch.tensor([0] * case.b if case.starts is None else case.starts, device=device)
    keys = torch.arange(case.m, device=device)
    return rearrange((keys >= lengths[:, None]) | (keys < starts[:, None]), "b m -> b 1 m 1")


def dense(case: Case, device: str) -> Any:
    """(q, k, v) → (o, lse) by the formula, over every pair, in the dtype of q; lse at least in float32."""
    past = hidden(case, device)
    at = case.at if case.row_at is None else torch.tensor(case.row_at)
    allowed = case.pattern.allowed(case.n, case.m, at).to(device)
    allowed = allowed & rearrange(~past, "b h m 1 -> b h 1 m")
    where = positions(case.pattern, case.n, case.m, case.at, torch.device(device))

    def attend(q: Tensor, k: Tensor, v: Tensor, **parts: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (reference.repeat_heads(x.masked_fill(past, 0.0), case.h) for x in (k, v))
        added = None
        if parts:
            added = ByDistance(**parts).dense(where, torch.arange(case.m, device=device)).to(q.dtype)
        logits = None if case.sink is None else torch.tensor(case.sink, dtype=q.dtype, device=device)
        terms = {"bias": added, "scale": case.scale, "softcap": case.softcap, "sink_logits": logits}
        found = reference.attend(q, k, v, allowed, **terms)
        wide = found.scores if q.dtype == torch.float64 else found.scores.float()
        o = found.o
        if case.dropout_p:
            o = (found.weights * dropout_factors(case, device).to(q.dtype)) @ v
        lse = reference.log_sum_exp(wide, allowed)
        if logits is not None:
            lse = torch.logaddexp(lse, logits.to(lse.dtype)[:, None])
        return o, lse

    return attend


def options(case: Case) -> Any:
    """What the kernels compute."""
    from regard.engine.call import Options

    scale = case.d_k**-0.5 if case.scale is None else case.scale
    offset = query_offset(case.pattern, case.n, case.m, case.at)
    return Options(case.pattern, *offset, scale, case.dropout_p, case.softcap)


def row_extras(case: Case, device: str) -> Any:
    """Lengths and offsets by batch row."""
    from regard.engine.call import Extras

    lengths = None if case.lengths is None else torch.tensor(case.lengths, device=device)
    if case.starts is not None:
        lengths = torch.tensor(list(zip(case.starts, case.lengths)), device=device)
    at = None if case.row_at is None else torch.tensor(case.row_at, device=device)
    sink = None if case.sink is None else torch.tensor(case.sink, dtype=torch.float32, device=device)
    return Extras(lengths=lengths, at=at, sink=sink)


def fast(case: Case, device: str, configs: Any) -> list[Tensor]:
    """o, lse, dq, dk, dv and the gradients of the bias, by the kernels."""
    from regard.engine.cuda import host
    from regard.engine.cuda.call import task

    q, k, v, do, dlse = tensors(case, device)
    q, k, v = (in_memory_order(x, case.order) for x in (q, k, v))
    parts = bias(case, device, q.dtype)
    extras = row_extras(case, device)._replace(**parts, seed=SEED)
    made = task(q, v, options(case), extras, configs)
    o, lse = host.forward(q, k, v, made, extras)
    grads = do if "o" in case.given.split() else torch.zeros_like(o), dlse if "lse" in case.given else None
    found = host.backward((q, k, v, o, lse), grads, made, extras, bool(parts))[:5]
    return [o, lse, *(x for x in found if x is not None)]


def again(case: Case, device: str, configs: Any) -> list[Tensor]:
    """The same, prepared anew while tensors are float16 unless a dtype is given, as where a model is made."""
    from regard.engine.cuda.prepared import PREPARED

    PREPARED.clear()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        return fast(case, device, configs)
    finally:
        torch.set_default_dtype(before)


def repeatable(case: Case, device: str, configs: Any) -> bool:
    """Whether a plain call gives the same bits when it is prepared, called first and called again."""
    from regard.engine.cuda import host
    from regard.engine.cuda.call import task

    terms = case.reach is not None or case.slopes or case.softcap
    if terms or case.dropout_p or (case.scale or 1.0) < 0:
        return True
    if case.lengths or case.row_at or case.sink:
        return repeatable_by_rows(case, device, configs)
    q, k, v, do, _ = tensors(case, device)
    inputs = [in_memory_order(x, case.order).requires_grad_() for x in (q, k, v)]
    made = task(q, v, options(case), configs=configs)
    saved = [x.detach() for x in inputs]
    o, lse = host.forward(*saved, made)
    found = [o, *host.backward((*saved, o, lse), (do, None), made)[:3]]
    again = host.PreparedAttention(made, True)
    for _ in range(2):  # the first call prepares, the second looks up
        o = again(*inputs)
        if not all(map(torch.equal, found, [o, *torch.autograd.grad(o, inputs, do)])):
            return False
    plain = host.PreparedAttention(again.task, False)
    return all(torch.equal(found[0], plain(q, k, v)) for _ in range(2)) and replayable(plain, q, k, v)


def repeatable_by_rows(case: Case, device: str, configs: Any) -> bool:
    """The same with lengths and offsets by batch row, in whole numbers of either size. Gradients under
    create_graph=True are those of the formula."""
    from regard.engine.cuda import host
    from regard.engine.cuda.call import task

    q, k, v, do, _ = tensors(case, device)
    inputs = [in_memory_order(x, case.order).requires_grad_() for x in (q, k, v)]
    saved, given = [x.detach() for x in inputs], row_extras(case, device)
    made = task(q, v, options(case), configs=configs)
    o, lse = host.forward(*saved, made, given)
    gradients = host.backward((*saved, o, lse), (do, None), made, given)[:3]
    prepared, learns = (host.PreparedAttention(made, x) for x in (False, True))
    for dtype in (torch.int64, torch.int32, torch.int64):
        rows = [*(None if x is None else x.to(dtype) for x in (given.lengths, given.at)), given.sink]
        if not all(torch.equal(o, prepared(*saved, *rows)) for _ in range(2)):
            return False
        found = torch.autograd.grad(learns(*inputs, *rows), inputs, do)
        if not all(map(torch.equal, gradients, found)):
            return False
    graphed = [x.detach() for x in torch.autograd.grad(learns(*inputs, *rows), inputs, do, create_graph=True)]
    allowed_errors = {name: 0.05 * float(x.abs().max()) for name, x in zip(OUTPUTS[2:], gradients)}
    if case.one_key:
        allowed_errors |= allowed_with_one_key(case, device)
    pairs = zip(allowed_errors.values(), graphed, gradients, strict=True)
    return all(float((x - y).abs().max()) <= allowed for allowed, x, y in pairs)


def replayable(plain: Any, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a call inside a CUDA graph reuses no spare memory, and leaves none."""
    from regard.engine.cuda import host
    from regard.engine.cuda.prepared import PREPARED

    given: list[Tensor | None] = []

    def watched(run: Any) -> Any:
        return lambda *x: given.append(x[-1]) or run(*x)

    for key, found in list(PREPARED.items()):
        if key[0] is plain.token:
            PREPARED.put(key, (watched(found[0]), found[1]))
    before, host._in_graph = host._in_graph, lambda x: True
    try:
        fresh = host.PreparedAttention(plain.task, False)
        for attention in (plain, fresh, fresh):
            attention(q, k, v)
    finally:
        host._in_graph = before
    return fresh.spare is None and all(x is None for x in given)


def run(case: Case, attend: Any, device: str, dtype: torch.dtype) -> list[Tensor]:
    """o, lse, dq, dk, dv, and the gradients of the bias."""
    q, k, v, do, dlse = tensors(case, device)
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    parts = {name: x.requires_grad_() for name, x in bias(case, device, dtype).items()}
    o, lse = attend(q, k, v, **parts)
    given = {"o": (o, do.to(dtype)), "lse": (lse, dlse.to(lse.dtype))}
    outs, grads = zip(*(given[name] for name in case.given.split(" and ")))
    found = torch.autograd.grad(outs, (q, k, v, *parts.values()), grads, materialize_grads=True)
    return [o.detach(), lse.detach(), *found]


def ulp(ref: Tensor, dtype: torch.dtype) -> float:
    """The distance between neighbors of this dtype at max|ref|."""
    largest = ref.abs().max()
    return float(torch.finfo(dtype).eps * 2.0 ** largest.log2().floor()) if largest > 0 else 0.0


def errors(
    names: tuple[str, ...], fast: list[Tensor], plain: list[Tensor], ref: list[Tensor]
) -> dict[str, tuple[float, float]]:
    """For each output its largest error and the error allowed; an infinite error where −∞ is in other places."""
    out = {}
    for name, f, p, r in zip(names, fast, plain, ref, strict=True):
        none = r == -inf
        wrong = f.shape != r.shape or not torch.equal(f == -inf, none)
        dtype = f.dtype
        f, p, r = (x.double().masked_fill(none, 0.0) for x in (f, p, r))
        allowed_error = 2 * float((p - r).abs().max()) + 4 * ulp(r, dtype)
        out[name] = inf if wrong else float((f - r).abs().max()), allowed_error
    return out


def branches(case: Case, configs: Any) -> list[str]:
    """Which branches of the kernels a case takes, forward and for dk and dv ("by keys")."""
    from regard.engine.cuda.schedule import device_passes
    from regard.engine.plan import why_masked

    start, step = query_offset(case.pattern, case.n, case.m, case.at)
    if why_masked(case.pattern, case.n, case.m, start, step):
        return []
    out = []
    for direction, config in ("by rows", configs.forward), ("by keys", configs.dkv):
        by_keys = direction == "by keys"
        place = case.pattern, case.n, case.m, start, step
        route = device_passes(place, config, by_keys, torch.device("cpu"))
        for one in route.steps:
            split, goes_on = "split" if one.work.split else "whole", "goes on" if one.accumulates else "first"
            out.append(f"{direction}, {split}, {goes_on}")
            out.append(f"{direction}, {'keeps some' if one.keep is not None else 'keeps all'}")
            out.append(f"{direction}, {one.work.segments} segments")
            out.append(f"{direction}, {'ragged' if one.work.ragged else 'full'}")
    return sorted(set(out))


def terms(case: Case, device: str) -> dict[str, float]:
    """The largest Σ|term| of a number of dq and of dk.

    A query with one key has weight 1 and no gradient through it: do·v − do·o = 0. Plain PyTorch subtracts a number
    from itself; the kernels add up either side apart, so what is left is the rounding of the terms.
    """
    q, k, v, do, dlse = (x.double().abs() for x in tensors(case, device))
    k, v = (reference.repeat_heads(x.masked_fill(hidden(case, device), 0.0), case.h) for x in (k, v))
    scale = case.d_k**-0.5 if case.scale is None else abs(case.scale)
    seen = case.pattern.allowed(case.n, case.m, case.at).to(device)
    dscores = seen * scale * (do @ v.mT + (do @ v.mT).amax(-1, keepdim=True) + dlse[..., None])
    return {"dq": float((dscores @ k).max()), "dk": float((dscores.mT @ q).max()) * (case.h // case.h_kv)}


def allowed_with_one_key(case: Case, device: str) -> dict[str, float]:
    """The error of dq and dk that is allowed where no query has two keys."""
    eps = torch.finfo(getattr(torch, case.dtype)).eps
    return {name: 4 * eps * size for name, size in terms(case, device).items()}


def cancelled(case: Case, device: str) -> float:
    """√Σ term² behind the gradient of a table of one distance, the largest over heads.

    Weights add up to 1 whatever that number is: what o gives cancels, and the rounding of the terms is left.
    """
    q, k, v, do, dlse = (x.double() for x in tensors(case, device))
    parts = bias(case, device, torch.float64)
    o, lse = dense(case, device)(q, k, v, **parts)
    k, v = (reference.repeat_heads(x, case.h) for x in (k, v))
    scale = case.d_k**-0.5 if case.scale is None else case.scale
    allowed = case.pattern.allowed(case.n, case.m, case.at).to(device)
    weights = (scale * q @ k.mT + parts["table"][:, 0, None, None] - lse[..., None]).exp() * allowed
    delta = (do * o).sum(-1, keepdim=True)
    terms = weights * ((do @ v.mT).abs() + delta.abs() + dlse.abs()[..., None])
    return float(terms.square().sum((0, 2, 3)).max().sqrt())


def counted(module: Any, fn: Any) -> tuple[Any, int]:
    """What fn gives, and how many backward passes by one launch were prepared for it."""
    made: list[Any] = []

    def watched(call: Any) -> Any:
        prepared = inner(call)
        made.extend([] if prepared is None else [call])
        return prepared

    inner, module.one_launch_backward = module.one_launch_backward, watched
    try:
        return fn(), len(made)
    finally:
        module.one_launch_backward = inner


def deviations(case: Case, device: str, found: list[Tensor]) -> dict[str, tuple[float, float]]:
    """For each output its largest error and the error allowed."""
    dtype = getattr(torch, case.dtype)
    exact, plain = (run(case, dense(case, device), device, d) for d in (torch.float64, dtype))
    names = OUTPUTS[: len(found)] + tuple(f"d{name}" for name in bias(case, device, dtype))
    result = errors(names, found, plain, exact)
    if case.one_key:
        for name, allowed_error in allowed_with_one_key(case, device).items():
            result[name] = result[name][0], allowed_error
    if case.reach == 0:
        allowed_error = 4 * torch.finfo(dtype).eps * cancelled(case, device)  # each term is rounded once
        result["dtable"] = result["dtable"][0], max(result["dtable"][1], allowed_error)
    return result


def outcome(case: Case, device: str) -> dict[str, Any]:
    """The errors of a case, whether a second run gives the same bits, which branches it took."""
    from regard.engine.cuda import launches
    from regard.engine.cuda.call import Config, Configs

    small = Configs(Config(16, 16, 1, 1), Config(32, 16, 1, 1), Config(32, 16, 1, 1))
    configs = small if device == "cpu" and not case.stored else None
    found, one_launch = counted(launches, lambda: fast(case, device, configs))
    result = deviations(case, device, found)
    repeats = case.n < LONG if device == "cuda" else any(not error <= most for error, most in result.values())
    for draw in range(1, DRAWS if repeats else 1):
        other = replace(case, draw=draw)
        for name, pair in deviations(other, device, fast(other, device, configs)).items():
            both = torch.tensor([result[name], pair], dtype=torch.float64)
            result[name] = tuple(both.amax(0).tolist())  # NaN stays: no error that is not a number is allowed
    out: dict[str, Any] = {"name": case.name, "errors": result, "one_launch": one_launch}
    if device == "cuda" or case.name in REPEATED:
        repeated = again(case, device, configs)
        out["same"] = all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(found, repeated))
    if device == "cuda" or case.name in PREPARED:
        out["prepared"] = repeatable(case, device, configs)
    if configs is not None:
        out["branches"] = branches(case, configs)
    return out


def complaints(result: dict[str, Any]) -> str:
    """What is wrong with a case; empty if nothing is."""
    if "failure" in result:
        return result["failure"]
    over = [
        f"{name} is {error:.3g} off; allowed are {allowed_error:.3g}"
        for name, (error, allowed_error) in result["errors"].items()
        if not error <= allowed_error
    ]
    return "\n".join(over)


def outcomes(
    cases: list[Case], device: str, processes: int = 1, seconds: int = 540
) -> dict[str, dict[str, Any]]:
    """The outcome of each case, from processes of their own: a kernel that crashes takes no other case with it."""
    end = time.monotonic() + seconds
    names = [case.name for case in cases]
    with ThreadPoolExecutor(processes) as pool:
        shares = pool.map(lambda p: _share(names[p::processes], device, end), range(processes))
        return {name: result for share in shares for name, result in share.items()}


def _share(names: list[str], device: str, end: float) -> dict[str, dict[str, Any]]:
    """The outcomes of these cases in order, in a new process after each crash."""
    out: dict[str, dict[str, Any]] = {}
    while left := [name for name in names if name not in out]:
        lines, message = _child(left, device, max(1.0, end - time.monotonic()))
        out |= {result["name"]: result for result in map(json.loads, lines)}
        if all(name in out for name in left):
            break
        is_late = time.monotonic() >= end
        missing = [name for name in left if name not in out]
        out |= {
            name: {"failure": f"not reached in time\n{message}" if is_late else message}
            for name in missing[: None if is_late else 1]
        }
    return out


def _child(names: list[str], device: str, seconds: float) -> tuple[list[str], str]:
    """Whole lines of its output, and the end of its other output."""
    here = Path(__file__)
    paths = [str(here.parents[2] / "src"), str(here.parent), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if device == "cpu":
        done = new_process.run(
            here, device, *names, env=env | {"TRITON_INTERPRET": "1"}, timeout=int(seconds)
        )
        lines = done.stdout.splitlines(keepends=True)
        message = f"the process ended with {done.returncode}\n{done.stderr[-3000:]}"
        return [line for line in lines if line.endswith("\n")], message
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = subprocess.Popen([sys.executable, str(here), device, *names], stdout=out, stderr=err, env=env)
        try:
            message = f"the process ended with {child.wait(seconds)}"
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            message = f"stopped after {seconds:.0f} s"
        out.seek(0)
        err.seek(0)
        return [line for line in out if line.endswith("\n")], f"{message}\n{err.read()[-3000:]}"


def main(device: str, *names: str) -> None:
    torch.set_num_threads(1)
    if device == "cpu":
        quicken()
    known = {case.name: case for case in [*SMALL, *SHORT, *OTHERS, *ON_GPU, *EVERY_DTYPE]}
    for name in names:
        try:
            result = outcome(known[name], device)
        except Exception as error:
            result = {"name": name, "failure": traceback.format_exc()[-3000:]}
            if "CUDA error" in str(error) and "out of memory" not in str(error):
                print(json.dumps(result), flush=True)
                raise  # nothing more can run in this process
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
