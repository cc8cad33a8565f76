"""The fused ends of residual branches without a GPU, by Triton's interpreter; and which calls they take."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import regard as rg
from branch_cases import CASES, ROTATIONS
from regard.nn import branch_end
from regard.nn.block import Residual
from regard.training.loop.trainer import fuse_branch_ends
from triton_interpreter import needs_interpreter


@pytest.fixture(scope="module")
def results():
    program = Path(__file__).parents[1] / "helpers" / "branch_cases.py"
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, program], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return {row["name"]: row for row in map(json.loads, run.stdout.splitlines())}


@needs_interpreter
@pytest.mark.parametrize(
    "name", [*CASES, *ROTATIONS, "relu", "relu without dropout", "packed", "packed without biases"]
)
def test_outputs_and_gradients_are_those_of_the_formula(results, name):
    assert max(results[name]["errors"]) < 3e-6


@pytest.mark.long
@needs_interpreter
@pytest.mark.parametrize("name", CASES)
def test_dropout_keeps_its_share_and_scales_the_rest(results, name):
    rows, width, _, p = CASES[name]
    assert abs(results[name]["kept"] - (1 - p)) <= 4 * (p * (1 - p) / (rows * width)) ** 0.5
    assert results[name]["factor"] == pytest.approx(1.0, abs=1e-6)


@needs_interpreter
def test_relu_drops_its_share_of_what_is_positive(results):
    assert abs(results["relu"]["kept"] - 0.6) < 4 * (0.4 * 0.6 / 1000) ** 0.5


@needs_interpreter
@pytest.mark.parametrize("name", ["a model, pre-norm", "a model, post-norm"])
def test_a_model_has_the_same_loss_and_gradients_and_every_branch_ends_fused(results, name):
    assert max(results[name]["errors"]) < 1e-5
    assert results[name]["calls"] == 2 * 2 + 3 + 2 * ("pre" in name)  # branches, and where a stack begins


def test_a_cpu_and_other_norms_are_not_fused():
    x = torch.randn(2, 3, 8)
    assert not branch_end.supports(nn.LayerNorm(8), x, 0.1)
    total, out = Residual(x, x, 0).normed(nn.Identity())
    assert torch.equal(total, 2 * x) and torch.equal(out, 2 * x)


def test_a_block_that_may_fuse_gives_the_same_on_a_cpu():
    block = rg.Block(rg.Attention(8, heads=2), rg.FeedForward(16, dropout=0.0), norm_at="pre").build()
    x = torch.randn(2, 3, 8)
    usual = block(x)
    block.fuses_ends = block.feed_forward.fuses_dropout = True
    assert torch.equal(block(x), usual)


@pytest.mark.parametrize("residual", [True, False])
def test_a_stack_that_may_fuse_gives_the_same_on_a_cpu(residual):
    block = rg.Block(rg.Attention(8, heads=2), rg.FeedForward(16), norm_at="pre", residual=residual)
    stack = rg.Encoder(block, 2, embedding=rg.Embedding(11, 8)).build().train()
    ids = torch.randint(11, (2, 3))
    usual = stack(ids)
    fuse_branch_ends(stack, True)
    assert torch.equal(stack(ids), usual)
