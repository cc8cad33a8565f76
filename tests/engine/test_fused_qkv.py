"""The kernels of a training step without a GPU, by Triton's interpreter; and which calls they take."""

import json
import os
from pathlib import Path

import pytest
import torch

import new_process
import regard as rg
from fused_qkv_cases import ATTENDS, LOSSES
from regard.engine import fused_qkv
from triton_interpreter import needs_interpreter


@pytest.fixture(scope="module")
def results():
    program = Path(__file__).parents[1] / "helpers" / "fused_qkv_cases.py"
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = new_process.run(program, env=env)
    assert run.returncode == 0, run.stderr
    return {row["name"]: row for row in map(json.loads, run.stdout.splitlines())}


@needs_interpreter
@pytest.mark.parametrize("name", ATTENDS)
def test_o_and_the_gradients_of_the_projection_are_the_formulas(results, name):
    assert max(results[name]["errors"]) < (5e-3 if "half" in name else 2e-6)


@needs_interpreter
def test_dropout_takes_its_share(results):
    n, p = 2 * 2 * 13 * 13, 0.3
    assert abs(results["with dropout"]["stayed"] - (1 - p)) < 4 * (p * (1 - p) / n) ** 0.5


@needs_interpreter
@pytest.mark.parametrize("name", ["a layer over itself", "a layer over a context"])
def test_a_layer_gives_the_same_by_one_product(results, name):
    assert max(results[name]["errors"]) < 1e-5


@needs_interpreter
def test_a_whole_model_learns_the_same(results):
    assert max(results["a whole model"]["errors"]) < 1e-5


@needs_interpreter
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_on_a_gpu_is_pytorchs(results, name):
    assert max(results[name]["errors"]) < 2e-5


class Elsewhere(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def there(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype).as_subclass(Elsewhere)


@pytest.mark.parametrize(
    ("n", "m", "d", "dtype", "pattern", "fits"),
    [
        (64, None, 64, torch.bfloat16, rg.causal(), True),
        (128, 128, 64, torch.float16, rg.full(), True),
        (64, None, 128, torch.bfloat16, rg.full(), True),
        (64, 60, 64, torch.bfloat16, rg.causal(), False),  # two sequences have no past in common
        (64, None, 64, torch.bfloat16, rg.window(5), False),
        (64, None, 64, torch.float32, rg.full(), False),
        (129, None, 64, torch.bfloat16, rg.full(), False),
        (64, 129, 64, torch.bfloat16, rg.full(), False),
        (128, None, 128, torch.bfloat16, rg.full(), False),
    ],
)
def test_only_calls_that_fit_are_fused(monkeypatch, n, m, d, dtype, pattern, fits):
    monkeypatch.setattr(fused_qkv, "eager", lambda *tensors: True)
    x = there(2, n, 8, dtype=dtype)
    source = x if m is None else there(2, m, 8, dtype=dtype)
    assert fused_qkv.fits(x, source, d, pattern) == fits


def test_on_a_cpu_nothing_does():
    x = torch.zeros(2, 7, 8, dtype=torch.bfloat16)
    assert not fused_qkv.fits(x, x, 64, rg.full())
