"""Faults of modules that their own projections give away, and right modules of the same kinds."""

import math

import pytest
import torch
from torch import nn

from regard.laws.adapters import adapt
from regard.laws.diagnosis import modules
from regard.laws.diagnosis.modules import identify
from regard.laws.harness import Harness
from regard.laws.probe import probe


class Attention(nn.Module):
    """Multi-head attention of query, key and value."""

    def __init__(self, fault=""):
        super().__init__()
        self.fault, self.num_heads = fault, 2
        self.in_proj = nn.Linear(8, 24)
        self.out_proj = nn.Linear(8, 8)

    def forward(self, query, key, value):
        w, b = self.in_proj.weight.chunk(3), self.in_proj.bias.chunk(3)
        order = (0, 2, 1) if self.fault == "read as q, v, k" else (0, 1, 2)
        value = key if self.fault == "value ignored" else value
        q, k, v = (
            nn.functional.linear(x, w[i], None if self.fault == "no bias" else b[i])
            for i, x in zip(order, (query, key, value))
        )
        if self.fault == "bias of q not scaled":
            q = q + b[0] * (math.sqrt(4) - 1)
        q, k, v = (x.unflatten(-1, (2, 4)).transpose(1, 2) for x in (q, k, v))
        if self.fault == "over heads":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scale = 0.4 if self.fault == "scale" else 0.5
        s = q @ k.mT * scale
        if self.fault == "bfloat16":
            s = (q.bfloat16() @ k.bfloat16().mT).to(q.dtype) * scale
        s = s + 0.01 * (3 * s).sin() if self.fault == "nearly right" else s
        o = s.softmax(-1) @ v
        o = o.transpose(1, 2) if self.fault == "over heads" else o
        out = self.out_proj(o.transpose(1, 2).flatten(2))
        return out + query if self.fault == "input added" else out


class Window(nn.Module):
    """Attention within windows of 4 positions, with a bias for every pair."""

    def __init__(self, scale=0.5):
        super().__init__()
        self.num_heads, self.scale = 2, scale
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.relative_table = nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        s = q @ k.mT * self.scale + self.relative_table
        return self.proj((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Falcon(nn.Module):
    """Causal attention, two heads of q and one of k and v in one projection; ALiBi."""

    def __init__(self, fault=""):
        super().__init__()
        self.fault, self.num_heads = fault, 2
        self.query_key_value, self.dense = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x):
        fused = self.query_key_value(x).unflatten(-1, (4, 4)).transpose(1, 2)
        q, k, v = fused[:, :2], fused[:, 2:3], fused[:, 2:3] if self.fault == "k as v" else fused[:, 3:]
        n = x.shape[1]
        far = (torch.arange(n)[:, None] - torch.arange(n)).to(x.dtype)
        slopes = torch.tensor([2**-4, 2**-8], dtype=x.dtype)[:, None, None]
        s = q @ k.mT / 2 - slopes * (far**2 if self.fault == "squared" else far)
        s = s.masked_fill(far < 0, -math.inf)
        return self.dense((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


class AddedMask(nn.Module):
    """Self-attention. A float attn_mask of shape (n, n) is added; where a bool one is True, pairs are masked."""

    def __init__(self, fault=""):
        super().__init__()
        self.fault, self.num_heads = fault, 2
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, attn_mask=None):
        q, k, v = (
            f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        s = q @ k.mT / 2
        if attn_mask is not None:
            hides = {"cast to bool": attn_mask.bool(), "only negative ones": attn_mask < 0}.get(self.fault)
            if attn_mask.dtype == torch.bool or hides is not None:
                s = s.masked_fill(attn_mask.bool() if hides is None else hides, -1e9)
            else:
                s = s - attn_mask if self.fault == "subtracted" else s + attn_mask
        return self.out_proj((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Slopes(Falcon):
    """Causal attention with linear biases (ALiBi), two heads of q and one of k and v."""

    def __init__(self, first=2**-4, second=2**-8, learned=False):
        super().__init__()
        slopes = torch.tensor([first, second])
        self.slopes = nn.Parameter(slopes) if learned else slopes

    def forward(self, x):
        fused = self.query_key_value(x).unflatten(-1, (4, 4)).transpose(1, 2)
        far = (torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])).to(x.dtype)
        s = fused[:, :2] @ fused[:, 2:3].mT / 2 - self.slopes.to(x.dtype)[:, None, None] * far
        s = s.masked_fill(far < 0, -math.inf)
        return self.dense((s.softmax(-1) @ fused[:, 3:]).transpose(1, 2).flatten(2))


class Relative(nn.Module):
    """Attention with a learned bias by distance, as in T5: the scores are unscaled."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.num_heads, self.scale = 2, scale
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.relative = nn.Embedding(17, 2)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        far = torch.arange(x.shape[1]) - torch.arange(x.shape[1])[:, None]
        bias = self.relative(far.clamp(-8, 8) + 8).permute(2, 0, 1)
        return self.o(((q @ k.mT * self.scale + bias).softmax(-1) @ v).transpose(1, 2).flatten(2))


class StatesNoResidual(Attention):
    """Attention of query, key and value, without a residual connection."""


def cause(module):
    torch.manual_seed(0)
    target = adapt(module)
    probed = probe(target)
    return identify(Harness(target, probed.supported, cache=probed.cache)).cause


@pytest.mark.parametrize(
    "module",
    [
        Attention(), pytest.param(Window(), marks=pytest.mark.long), Falcon(), AddedMask(), Slopes(),
        pytest.param(Slopes(0.5, 0.1, learned=True), marks=pytest.mark.long), StatesNoResidual(), Relative(),
    ],
    ids=["attention", "window", "falcon", "added mask", "slopes", "learned slopes", "no residual", "unscaled"],
)  # fmt: skip
def test_right_modules_have_no_cause(module):
    assert cause(module) is None


@pytest.mark.parametrize(
    "module, family, words",
    [
        (Attention("read as q, v, k"), "wrong projection", "in the order q, v, k instead of q, k, v"),
        (Attention("value ignored"), "wrong operand", "the argument value has no effect"),
        (Attention("no bias"), "bias of the projection", "q and k and v is not added"),
        (Attention("bias of q not scaled"), "scale before the bias", "before the bias of q is added"),
        (Attention("over heads"), "head split order", "attends to its own heads"),
        (Attention("scale"), "scale off by a factor", "the scores are 0.8 times those of 1/√d_k"),
        pytest.param(Attention("bfloat16"), "precision lost", "is lost", marks=pytest.mark.long),
        (Attention("input added"), "residual inside", "the input is added to the output"),
        pytest.param(Window(1.0), "no scale", "the scores are not scaled", marks=pytest.mark.long),
        (Falcon("k as v"), "wrong projection", "v is projected with the matrix of k"),
        (Falcon("squared"), "position bias", "the bias is the squared distance"),
        (StatesNoResidual("input added"), "residual inside", "the input is added to the output"),
        (Relative(0.5), "scale against its words", "although the docstring says unscaled"),
        (AddedMask("cast to bool"), "bias as a mask", "pairs where it is not 0 are masked"),
        (AddedMask("only negative ones"), "bias as a mask", "pairs where it is negative are masked"),
        pytest.param(AddedMask("subtracted"), "bias sign", "is subtracted", marks=pytest.mark.long),
        (Slopes(0.7, 0.03), "position bias", "the slopes of the heads are 0.7, 0.03 … instead of 0.0625"),
    ],
    ids=lambda x: getattr(x, "fault", None),
)
def test_a_fault_of_a_module_is_named(module, family, words):
    found = cause(module)
    assert found is not None and (found.family, words in found.name) == (family, True), found


def test_if_time_runs_out_the_evidence_states_how_many_variants_were_compared(monkeypatch):
    monkeypatch.setattr(modules, "MATCH_SECONDS", 0.0)
    found = cause(AddedMask("cast to bool"))
    assert found.name == "outputs are wrong" and found.where == "with bias"
    assert "(compared with 0 of " in found.evidence


@pytest.mark.long
def test_a_small_error_that_is_not_rounding_is_not_reported_as_rounding():
    assert cause(Attention("nearly right")) is None  # it may be a term of its own, which is not known


class Inherits(Falcon):
    """Causal attention."""


def test_positions_of_a_class_that_is_inherited_from_are_found():
    assert "positions" in adapt(Inherits()).claims


def test_a_module_for_one_length_is_only_called_with_that_length():
    target = adapt(Window())
    assert target.length == 4 and "only sequences of 4 positions" in target.notes[0]
