"""Private PyTorch APIs: each one may be missing."""

import os
from pathlib import Path

import pytest
import torch

import new_process
from regard import compat

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "regard"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="one process per API is forked")
@pytest.mark.parametrize(
    "names",
    [("dispatch_modes", "flash_forward"), pytest.param((), marks=pytest.mark.long, id="each")],
    ids=str,
)
def test_attention_works_without_a_private_api(names):
    program = ROOT / "tests" / "helpers" / "without_private.py"
    env = {**os.environ, "PYTHONPATH": str(SRC.parent), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = new_process.run(program, *names, env=env)
    assert done.returncode == 0, done.stderr


def test_version_and_base_of_a_tensor_may_be_unknown():
    class Bare:
        def is_inference(self):
            return False

    assert compat.version(Bare()) is None and compat.view_base(Bare()) is None
    x = torch.zeros(3)
    assert compat.version(x) == 0 and compat.version(x.add_(1)) == 1 and compat.view_base(x[1:]) is x
    with torch.inference_mode():
        assert compat.version(torch.zeros(1)) is None
