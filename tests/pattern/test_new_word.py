"""A new word is one class: it runs by every backend, is counted, drawn, written, read and explained."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from typer.testing import CliRunner

import regard as rg
from regard import reference
from regard.cli.main import app
from regard.engine.plan import plan
from regard.pattern import KINDS, BlockGrid, Pattern, Relation, Shorthand, Word, classification, parse_pattern
from triton_interpreter import needs_interpreter

TOYS = {
    "lower_band(3)": '''
class lower_band(Word):
    """i − j ≥ back: what lies at least so far in the past."""

    back: int

    @property
    def relation(self):
        return Relation(near=self.back)
''',
    "lattice(3, k=4)": '''
class lattice(Word):
    """i − j even and j ≡ 1 (mod k), for the queries before 8 · back: four conditions at once."""

    back: int
    k: int = 4

    @property
    def relation(self):
        return Relation(divisor=2, far=9 * self.back, key_class=(self.k, 1), query_below=8 * self.back)
''',
    "local(5)": '''
class local(Shorthand):
    """The last `width` keys and the first two."""

    width: int

    @property
    def meaning(self):
        return rg.causal() & (rg.window(self.width) | rg.sinks(2))
''',
}
INEQUALITIES = {
    "lower_band(3)": lambda i, j: i - j >= 3,
    "lattice(3, k=4)": lambda i, j: (i - j) % 2 == 0 and i - j <= 27 and j % 4 == 1 and i < 24,
    "local(5)": lambda i, j: j <= i and (i - j <= 5 or j < 2),
}
N, M = 37, 41


@pytest.fixture(params=TOYS)
def toy(request) -> Pattern:
    """A word that no other file knows."""
    return declared(request.param)


def declared(text: str) -> Pattern:
    space = {"Word": Word, "Shorthand": Shorthand, "Relation": Relation, "rg": rg, "__name__": "toys"}
    exec(TOYS[text], space)
    return eval(text, space)


def table(text: str, n: int, m: int, start: int = 0, step: int = 1) -> torch.Tensor:
    holds = INEQUALITIES[text]
    return torch.tensor([[holds(start + step * r, j) for j in range(m)] for r in range(n)])


def text_of(toy: Pattern) -> str:
    return next(text for text in TOYS if text.startswith(type(toy).__name__))


@pytest.mark.parametrize("source", TOYS.values(), ids=TOYS)
def test_a_word_takes_ten_lines_at_most(source):
    assert len(source.strip().splitlines()) <= 10


def test_a_new_word_allows_draws_and_counts(toy):
    expected = table(text_of(toy), N, M, M - N)
    assert torch.equal(toy.allowed(N, M), expected)
    assert toy.draw(N, M).split("\n") == [" ".join("·■"[int(x)] for x in row) for row in expected]
    for at in (None, 0, -7, (3, 5), (-20, 2)):
        start, step = at if isinstance(at, tuple) else (M - N if at is None else at, 1)
        expected = table(text_of(toy), N, M, start, step)
        assert toy.count(N, M, at) == int(expected.sum())
        assert toy.row_counts(N, M, at).tolist() == expected.sum(-1).tolist()
        assert (~toy & rg.window(9)).count(N, M, at) == int(
            (~expected & rg.window(9).allowed(N, M, at)).sum()
        )
    assert (toy & rg.causal()).count(10**6) > 0


def test_a_new_word_is_written_and_read(toy):
    p = toy & ~rg.causal() | rg.every(3)
    assert Pattern.from_json(p.json()) == p and json.loads(p.text) == json.loads(p.json())
    assert parse_pattern(repr(p)) == p
    spec = rg.spec.Attention(d_model=16, heads=2, pattern=toy | rg.causal())
    assert rg.from_json(spec.json()) == spec


def test_a_new_word_is_planned_both_ways(toy):
    for pattern in (toy, toy & rg.causal(), rg.window(6) - toy, toy | rg.rows(5)):
        for n, m, start, step in ((N, M, 0, 1), (N, M, 4, 1), (19, 89, -5, 6)):
            wanted = pattern.allowed(n, m, (start, step)).int().numpy()
            for by_keys, dense in ((False, wanted), (True, wanted.T)):
                times = np.zeros_like(dense)
                for one in plan(pattern, n, m, start, step, 8, by_keys).passes:
                    allowed = one.pattern.allowed(n, m, (start, step)).numpy()
                    allowed = allowed.T if by_keys else allowed
                    for (row, row_step, rows), a, b in zip(one.tiles, one.offsets, one.offsets[1:]):
                        for key, key_step, keys, full in one.parts[a:b]:
                            pairs = np.ix_(row + row_step * np.arange(rows), key + key_step * np.arange(keys))
                            assert not full or allowed[pairs].all()
                            times[pairs] += allowed[pairs]
                assert np.array_equal(times, dense)


def test_blocks_of_a_new_word_are_classified(toy, monkeypatch):
    monkeypatch.setattr(classification, "BLOCK", 4)
    for pattern in (toy, ~toy, toy & rg.causal(), toy | rg.window(3)):
        found = BlockGrid(torch.arange(N)[None], M).classify(pattern)
        for x, rows in enumerate(pattern.allowed(N, M, 0).split(4)):
            for y, block in enumerate(rows.split(4, dim=1)):
                assert not found.none[0, x, y] or not block.any()
                assert not found.all[0, x, y] or (block.all() and block.shape == (4, 4))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton here")
def test_the_mask_source_of_a_new_word_is_what_it_allows(toy):
    from regard.engine.cuda.mask import expression

    i, j = np.arange(-9, N)[:, None], np.arange(M)
    for pattern in (toy, ~toy & rg.causal(), toy | rg.blocks(5)):
        found = np.broadcast_to(eval(expression(pattern), {"i": i, "j": j}), (len(i), M))
        assert np.array_equal(found, pattern.allowed(len(i), M, -9).numpy())


@pytest.mark.parametrize("backend", ["auto", "reference", "sdpa", "tiles"])
def test_a_new_word_runs_by_every_backend_of_the_cpu(toy, backend):
    pattern = toy & rg.causal()
    q, k, v = (torch.randn(2, 3, M, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    want = reference.attend(q, k, v, pattern.allowed(M)).o
    found = rg.attention(q, k, v, pattern, backend=backend)
    assert_close(found, want, rtol=0, atol=1e-12)
    do = torch.randn_like(want)
    for a, b in zip(torch.autograd.grad(found, (q, k, v), do), torch.autograd.grad(want, (q, k, v), do)):
        assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.compiled
@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="FlexAttention on the CPU is compiled by g++")
def test_a_new_word_runs_by_flex_attention():
    pattern = declared("lattice(3, k=4)") | declared("local(5)")
    q, k, v = (torch.randn(1, 2, 200, 16) for _ in range(3))
    with torch.no_grad():
        found = rg.attention(q, k, v, pattern, backend="flex")
    assert_close(found, rg.attention(q, k, v, pattern, backend="reference"), rtol=0, atol=1e-5)


@pytest.mark.long  # "make test" runs a relation of several conditions with the other kernel cases
@needs_interpreter
def test_a_new_word_runs_by_triton_under_its_interpreter():
    program = """
from kernel_cases import Case, complaints, outcome
from test_new_word import declared
pattern = declared("lattice(3, k=4)") | declared("lower_band(3)") & declared("local(5)")
print(complaints(outcome(Case("toy", pattern, n=23, m=23), "cpu")) or "right")
"""
    here = Path(__file__)
    paths = [here.parents[2] / "src", here.parents[1] / "helpers", here.parent]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert done.stdout == "right\n", done.stdout + done.stderr[-3000:]


def test_a_new_word_is_explained_in_python_and_on_the_command_line(toy):
    pattern = toy & rg.causal()
    explained = rg.explain(pattern, n=64)
    assert explained.needed == int((table(text_of(toy), 64, 64) & rg.causal().allowed(64)).sum())
    done = CliRunner().invoke(app, ["explain", repr(pattern), "--n", "64", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["pattern"], report["needed"]) == (repr(pattern), explained.needed)


def test_the_name_of_a_word_is_taken_once():
    with pytest.raises(
        rg.SpecError, match=r"^there is a pattern 'causal' already, in regard.pattern.words; "
    ):
        exec('class causal(Word):\n    "Another."', {"Word": Word, "__name__": "toys"})
    assert KINDS["causal"] is rg.causal
    first, second = declared("lower_band(3)"), declared("lower_band(3)")  # defined anew, as in a notebook
    assert KINDS["lower_band"] is type(second) and type(first) is not type(second)
