"""The steps in PTX, run by a small interpreter of a warp: 32 lanes side by side in NumPy.

A warp holds 16 rows of 64 scores, as Hopper's tensor cores leave them: lane l has rows l // 4 and l // 4 + 8.
"""

import re
from itertools import product

import numpy as np
import pytest

pytest.importorskip("triton")  # the package of the kernels imports it
from regard.engine.cuda.hopper.static import MAX_SUM, SCORES, hide_ptx, rescale_ptx, weights_ptx
from regard.engine.cuda.mask import MASK_WORDS, mask_words

LANES = np.arange(32)
COMPARE = {"ne": np.not_equal, "eq": np.equal, "gtu": lambda a, b: ~(a <= b)}
ONE = {"neg": np.negative, "mov": lambda x: x, "ex2": np.exp2}
TWO = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.fmax, "and": np.bitwise_and,
    "shr": np.right_shift,
}  # fmt: skip


class Warp:
    """Runs a text over `given`, 32 lanes for each register that is read; `of` is what each has in the end."""

    def __init__(self, text, kinds, given):
        body = [
            x.strip() for x in re.sub(r"\.reg [^;]*;", "", text).strip(" {}\n").replace(":", ":;").split(";")
        ]
        self.lines = [x for x in body if x]
        kinds = kinds.split(",")
        self.made = sum(x.startswith("=") for x in kinds)
        self.of = {"%laneid": LANES}
        for at, (kind, x) in enumerate(zip(kinds[self.made :], given, strict=True)):
            self.of[f"${kind if kind.isdigit() else self.made + at}"] = x
        self.count = dict.fromkeys([*ONE, *TWO, "shfl"], 0)
        with np.errstate(all="ignore"):
            self._run()

    def _read(self, name):
        if name.startswith("0f"):
            return np.full(32, np.frombuffer(bytes.fromhex(name[2:]), ">f4")[0], np.float32)
        if name.startswith("0x") or name.isdigit():
            return np.full(32, int(name, 0))
        return self.of[name]

    def _run(self):
        at = 0
        while at < len(self.lines):
            line, at = self.lines[at], at + 1
            if line.endswith(":"):
                continue
            when = re.match(r"@(!?)(\w+) bra (\w+)", line)
            if when or line.startswith("bra "):
                taken = self.of[when[2]] ^ bool(when[1]) if when else np.array([True])
                assert taken.all() or not taken.any(), "a warp must not part"
                if taken.all():
                    at = self.lines.index(f"{line.split()[-1]}:")
                continue
            op, _, rest = line.partition(" ")
            to, *args = re.split(r",\s*", rest)
            self.of[to] = self._value(op.split("."), [self._read(x) for x in args])

    def _value(self, op, x):
        name = op[0]
        if name in self.count:
            self.count[name] += 1
        if name in ONE:
            return np.asarray(ONE[name](x[0]), x[0].dtype)
        if name in TWO:
            return np.asarray(TWO[name](x[0], x[1]), x[0].dtype)
        if name == "setp":
            found = COMPARE[op[1]](x[0], x[1])
            return found | x[2] if "or" in op else found
        if name == "vote":
            return np.full(32, x[0].any()) if "any" in op else np.full(32, (x[0] << LANES).sum())
        if name == "fma":
            return (x[0].astype(np.float64) * x[1] + x[2]).astype(np.float32)
        if name == "selp":
            return np.where(x[2], x[0], x[1])
        if name == "shfl":
            return x[0][LANES ^ x[1]]
        assert name == "cvt"  # the second of the two is the lower half of the register
        return np.stack([_rounded(x[1], op[2]), _rounded(x[0], op[2])])


def _rounded(x, kind):
    if kind == "f16x2":
        return x.astype(np.float16).astype(np.float32)
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def held(x):
    """(16, columns) → (registers, 32): what each lane holds."""
    lane, pairs = LANES[None, :], np.arange(2 * x.shape[1] // 4)[:, None]
    row = lane // 4 + 8 * (pairs // 2 % 2)
    return x[row, 8 * (pairs // 4) + 2 * (lane % 4) + pairs % 2]


def laid(x):
    """And back."""
    out = np.empty((16, 2 * len(x)), x.dtype)
    lane, at = LANES[None, :], np.arange(len(x))[:, None]
    out[lane // 4 + 8 * (at // 2 % 2), 8 * (at // 4) + 2 * (lane % 4) + at % 2] = x
    return out


def weigh(scores, base, total, begins, kind="bf16", scale=0.5):
    """One block of 16 rows: its weights, and base, fading and sums as lanes hold them, (2, 32)."""
    text, kinds = weights_ptx(kind)
    rows = np.arange(SCORES) // 2 % 2
    given = [
        *held(scores), *base[rows], *total[rows], *np.full((SCORES, 32), int(begins)),
        *np.full((SCORES, 32), scale, np.float32),
    ]  # fmt: skip
    warp = Warp(text, kinds, given)
    half = SCORES // 2
    weights = np.concatenate([warp.of[f"${x}"] for x in range(half)])
    made = [np.stack([warp.of[f"${half + at * SCORES + x}"] for x in range(SCORES)]) for at in range(3)]
    assert all((x == x[rows * 2]).all() or np.isnan(x).any() for x in made)
    return laid(weights), *(x[[0, 2]] for x in made), warp.count


def per_row(x):
    """(2, 32) → (16, 4): the four lanes of a row."""
    return x.reshape(16, 4)


def attend(blocks, values, kind="bf16"):
    """o and lse (base 2) of a tile by the steps, and how often a largest score was looked for."""
    base, total = np.full((2, 32), 1e4, np.float32), np.full((2, 32), np.nan, np.float32)  # a tile before
    acc, looked = np.zeros((16, values.shape[-1])), []
    for at, (scores, v) in enumerate(zip(blocks, values)):
        weights, base, fade, total, count = weigh(scores, base, total, at == 0, kind)
        assert (per_row(base) == per_row(base)[:, :1]).all()
        acc = (0 if at == 0 else acc * per_row(fade)[:, :1]) + weights @ v
        looked.append(count["shfl"] // 4)
    whole = per_row(total).sum(1, dtype=np.float64)
    with np.errstate(all="ignore"):
        return acc / whole[:, None], per_row(base)[:, 0] + np.log2(whole), looked


def exact(blocks, values):
    s = np.concatenate([*blocks], 1).astype(np.float64) * 0.5
    top = s.max(1, keepdims=True)
    w = np.exp2(s - np.where(np.isinf(top), 0.0, top))
    with np.errstate(all="ignore"):
        return w @ np.concatenate([*values]) / w.sum(1, keepdims=True), np.log2(w.sum(1)) + top[:, 0]


def drawn(steps=5, slope=0.0):
    rng = np.random.default_rng(0)
    blocks = 3 * rng.standard_normal((steps, 16, 64)).astype(np.float32)
    blocks += np.float32(slope) * np.arange(steps, dtype=np.float32)[:, None, None]
    return blocks, rng.standard_normal((steps, 64, 8))


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("slope", [0.0, 20.0, -20.0, 300.0])
def test_tile_by_tile_weights_are_the_softmax_for_rising_and_falling_scores(slope, kind):
    blocks, values = drawn(slope=slope)
    blocks[1, 3, 5] = 40.0  # one score of one row
    o, lse, _ = attend(blocks, values, kind)
    want, by = exact(blocks, values)
    assert np.abs(lse - by).max() < 1e-4 and np.abs(o - want).max() < (0.02 if kind == "bf16" else 0.003)


def test_the_maximum_is_updated_at_the_start_of_a_tile_and_where_scores_rise_far():
    assert attend(*drawn())[2] == [1, 0, 0, 0, 0]
    assert attend(*drawn(slope=40.0))[2] == [1, 1, 1, 1, 1]
    blocks, values = drawn()
    blocks[3, 9, 17] = (
        2 * np.log2(MAX_SUM) + blocks[:3, 9].max() + 1.0
    )  # scaled by a half: just past what is allowed
    assert attend(blocks, values)[2] == [1, 0, 0, 1, 0]


def test_the_result_of_a_row_depends_on_no_other_row_of_its_warp():
    blocks, values = drawn()
    o, lse, _ = attend(blocks, values)
    blocks[2, 4, 8], blocks[3, 5], blocks[1:, 6] = 90.0, np.nan, np.inf
    other, by, looked = attend(blocks, values)
    rest = [x for x in range(16) if x not in (4, 5, 6)]
    assert looked == [1, 1, 1, 1, 1] and np.isnan(other[[5, 6]]).all()
    assert (other[rest] == o[rest]).all() and (by[rest] == lse[rest]).all() and (other[4] != o[4]).any()


def test_rows_without_keys_in_the_first_block_or_in_any_are_correct():
    blocks, values = drawn()
    blocks[:2, 2], blocks[:, 11] = -np.inf, -np.inf
    o, lse, _ = attend(blocks, values)
    want, by = exact(blocks, values)
    seen = [x for x in range(16) if x != 11]
    assert np.abs(o[seen] - want[seen]).max() < 0.02 and np.abs(lse[seen] - by[seen]).max() < 1e-4
    assert lse[11] == -np.inf


@pytest.mark.parametrize("d", [64, 128])
def test_a_warp_rescales_only_rows_whose_base_changed(d):
    rng = np.random.default_rng(d)
    acc = rng.standard_normal((16, d)).astype(np.float32)
    text, kinds = rescale_ptx(d // 2)
    for rows in ([], [7], [12], [3, 12]):
        by = np.ones((16, d), np.float32)
        by[rows] = 0.25
        warp = Warp(text, kinds, [*held(acc), *held(by)])
        assert (laid(np.stack([warp.of[f"${x}"] for x in range(d // 2)])) == acc * by).all()
        assert warp.count["mul"] == (d // 2 if rows else 0)


@pytest.mark.parametrize(
    "columns", [64, 32]
)  # of a thread's warpgroup: of heads of 256, two share the columns
def test_pairs_are_hidden_by_the_bits_of_their_mask(columns):
    generator = np.random.default_rng(0)
    allowed = generator.random((64, 64)) < 0.5
    words = mask_words(allowed[None]).reshape(4, MASK_WORDS // 4).astype(np.int64)
    scores = generator.standard_normal((64, 64)).astype(np.float32)
    count = columns // 2
    text, kinds = hide_ptx(count)
    for warp, first in product(range(4), range(0, 64, columns)):
        here = slice(16 * warp, 16 * warp + 16), slice(first, first + columns)
        given = held(scores[here])
        word = words[warp] >> first // 2  # as `hide` shifts it
        made = Warp(text, kinds, [*given, *np.broadcast_to(word, (count, 32))])
        hidden = laid(np.stack([made.of[f"${x}"] for x in range(count)]))
        assert np.array_equal(hidden, np.where(allowed[here], scores[here], -np.inf))
