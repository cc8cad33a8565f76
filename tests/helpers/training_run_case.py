"""A run small enough for tests: translating two words at a time."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from regard.cli.main import app
from regard.machine import Roofline, save_roofline
from regard.training import recipes
from regard.training.data.datasets import SentencePairs
from regard.training.recipes import Recipe

WORDS = [("one", "uno"), ("two", "dos"), ("cat", "gato"), ("dog", "perro"), ("red", "rojo")]


def write_pairs(folder):
    lines = [f"{a} {c}\t{b} {d}" for a, b in WORDS for c, d in WORDS]
    (folder / "train.tsv").write_text("\n".join(lines * 2 + ["very " * 99 + "\tmuy"]) + "\n")
    (folder / "valid.tsv").write_text("\n".join(lines[:9]) + "\n")
    return SentencePairs(
        train=str(folder / "train.tsv"), valid=str(folder / "valid.tsv"), vocab=300, max_tokens=40
    )


def small(folder, **settings) -> Recipe:
    made = recipes.translate(
        None, steps=12, d_model=16, layers=1, heads=2, data=write_pairs(folder), tokens=600
    )
    return replace(made, settings=replace(made.settings, **{"save_every": 6, "log_every": 3, **settings}))


def regard(*words: str, code: int = 0, given: str | None = None) -> str:
    done = CliRunner().invoke(app, words, input=given)
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.stdout


@contextmanager
def a_known_machine(folder):
    """Rates that need no measuring: 10 GFLOP/s and 10 GB/s."""
    rates = Roofline("a CPU of the tests", {"float32": 1e10}, 1e10, 1e-6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REGARD_MACHINE", str(save_roofline(rates, folder / "machine.json")))
        yield rates
