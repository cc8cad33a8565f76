"""How many files of the engine a first sparse call on the CPU runs through."""

import os
from pathlib import Path

import new_process

SRC = Path(__file__).parents[2] / "src"
MAX_FILES = 12
PROGRAM = """
import sys, torch, regard as rg
from pathlib import Path
engine, files = Path(rg.__file__).parent / "engine", set()

def note(frame, event, arg):
    if event == "call":
        files.add(frame.f_code.co_filename)

q, k, v = torch.randn(3, 1, 2, 4096, 8).unbind()
attention, pattern = rg.attention, rg.window(64) | rg.every(64)  # public names are imported when used
sys.setprofile(note)
attention(q, k, v, pattern)
sys.setprofile(None)
print("\\n".join(sorted(str(Path(f).relative_to(engine)) for f in files if str(engine) in f)))
"""


def test_a_cold_sparse_call_runs_through_few_files():
    env = {**os.environ, "PYTHONPATH": str(SRC), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = new_process.run(PROGRAM, env=env)
    assert done.returncode == 0, done.stderr
    files = done.stdout.split()
    assert 0 < len(files) <= MAX_FILES, files
