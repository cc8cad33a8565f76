"""The fused ends of residual branches without a GPU, by Triton's interpreter; and which calls they take."""

import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import new_process
import regard as rg
from branch_cases import CASES, ROTATIONS
from regard.nn import branch_end, position
from regard.nn.block import Residual
from regard.nn.position import Rotary
from regard.position.angles import cos_sin
from regard.training.loop.trainer import fuse_branch_ends
from triton_interpreter import needs_interpreter


@pytest.fixture(scope="module")
def results():
    program = Path(__file__).parents[1] / "helpers" / "branch_cases.py"
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = new_process.run(program, env=env)
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


@pytest.mark.parametrize("norm_at", ["pre", "post"])
def test_a_branch_without_residual_does_not_end_fused_on_a_gpu(norm_at, monkeypatch):
    monkeypatch.setattr(branch_end, "supports", lambda *given: True)
    inner = rg.FeedForward(16, dropout=0.0)
    block = rg.Block(rg.Attention(8, heads=2), inner, norm_at=norm_at, residual=False).build().train()
    x = torch.randn(2, 3, 8)
    usual = block(x)
    block.fuses_ends = True
    assert torch.equal(block(x), usual)


def test_fused_ends_are_turned_off_again():
    stack = rg.Encoder(rg.Block(rg.Attention(8, heads=2, position=rg.rope()), rg.FeedForward(16)), 1).build()
    parts = (
        (stack.blocks[0], "fuses_ends"),
        (stack.blocks[0].feed_forward, "fuses_dropout"),
        (stack.blocks[0].attention.position, "fuses"),
    )
    for fuses in (True, False):
        fuse_branch_ends(stack, fuses)
        assert [getattr(part, name) for part, name in parts] == [fuses] * 3


def test_angles_of_many_lengths_take_a_bounded_part_of_the_memory():
    rotation_kernel = pytest.importorskip("regard.nn.rotation_kernel")
    table, device = rotation_kernel.angle_table, torch.device("cpu")
    rotation_kernel._cached_angles.cache_clear()
    exact = cos_sin(5 + 3 * torch.arange(1100), 6, 100.0).float()
    for n in range(1, 1100, 7):
        found = table(5, 3, n, 6, 100.0, device, True)
        assert torch.equal(found, exact[:, :n]) and found[0].is_contiguous() and found[1].is_contiguous()
    assert rotation_kernel._cached_angles.cache_info().currsize <= rotation_kernel.MAX_TABLES
    assert rotation_kernel._cached_angles.cache_info().misses <= 12  # 2⁰ to 2¹¹ rows
    before = rotation_kernel._cached_angles.cache_info()
    length = rotation_kernel.MAX_CACHED_ANGLES // 3 + 1
    assert table(0, 1, length, 6, 100.0, device, True).shape == (2, length, 3)
    assert table(0, 1, 9, 6, 100.0, device, False).shape == (2, 9, 3)
    assert rotation_kernel._cached_angles.cache_info() == before


def test_a_grid_is_rotated_by_its_cells_on_a_gpu_too(monkeypatch):
    monkeypatch.setattr(position, "_rotates_on_gpu", lambda x: True)
    x, cells = torch.randn(1, 2, 6, 8), Rotary(rg.rope(grid=(2, 3)), 8)
    cells.fuses = True
    assert torch.equal(cells.along(x, 0, 1), cells(x, torch.arange(6)))
