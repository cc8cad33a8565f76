"""Size of the code base: files and lines of the engine, files of a first sparse call and of a new word, signatures.

    python bench/house.py

A new word is added to a copy of the source by its class and its name in pattern/words.py, and nothing else; it must
then be counted, drawn, run, explained, written and read there, in Python and on the command line.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
ENGINE = ROOT / "src" / "regard" / "engine"
sys.path.insert(0, str(ROOT / "tests" / "helpers"))  # which the test files import
WORD = '''

class lower_band(Word):
    """i − j ≥ back."""

    back: int

    @property
    def relation(self) -> Relation:
        return Relation(near=self.back)
'''
USED = """
import torch, regard as rg
from regard.cli.main import app
from typer.testing import CliRunner
word = rg.lower_band(3)
assert word.count(5) == 3 and word.draw(5).count("■") == 3
assert rg.Pattern.from_json(word.json()) == word == rg.Pattern.from_text(repr(word))
q, k, v = torch.randn(3, 1, 2, 300, 8).unbind()
for backend in ("reference", "sdpa", "tiles"):
    found = rg.attention(q, k, v, word & rg.causal(), backend=backend)
    assert torch.allclose(found, rg.attention(q, k, v, word.allowed(300) & rg.causal().allowed(300)), atol=1e-5)
assert "lower_band(3)" in CliRunner().invoke(app, ["explain", "lower_band(3)", "--n", "64"]).stdout
"""


def module(path: str) -> ModuleType:
    """A test file, for what it counts with."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def run(program: str, src: Path) -> str:
    env = {**os.environ, "PYTHONPATH": str(src), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def files_of_a_new_word() -> int:
    """How many source files a new word edits; the list of words in the tests is one more file."""
    with tempfile.TemporaryDirectory() as folder:
        src = Path(folder) / "src"
        shutil.copytree(ROOT / "src", src, ignore=shutil.ignore_patterns("__pycache__"))
        words = src / "regard" / "pattern" / "words.py"
        text = re.sub(
            r'(__all__ = \[\n(?:    ".*",\n)*)\]', r'\1    "lower_band",\n]', words.read_text("utf-8")
        )
        words.write_text(text + WORD, "utf-8")
        run(USED, src)
    return 1


def main() -> None:
    files = sorted(ENGINE.rglob("*.py"))
    lines = {f: len(f.read_text("utf-8").splitlines()) for f in files}
    cuda = sum(count for f, count in lines.items() if "cuda" in f.parts)
    print(f"engine: {len(files)} files, {sum(lines.values()):,} lines ({cuda:,} of them in engine/cuda)")
    cold = run(module("tests/engine/test_cold_call.py").PROGRAM, ROOT / "src").split()
    print(f"engine files of a cold CPU sparse forward: {len(cold)} ({', '.join(cold)})")
    print(
        f"files that a new word edits: {files_of_a_new_word()} in src/, and the list of words in tests/helpers"
    )
    house = module("tests/project/test_house.py")
    found = [
        line
        for f in house.FILES
        for line in house.functions_with_many_arguments(f.read_text("utf-8"), str(f.relative_to(house.SRC)))
    ]
    print(f"functions with 8 or more arguments outside kernels: {len(found)}")
    print("\n".join(f"  {line}" for line in found))


if __name__ == "__main__":
    main()
