"""`rg.judge`: a reward that constants, echoes, remembered answers and answers keyed on shapes do not earn."""

import math

import pytest
import torch
from torch import nn

import regard as rg


def attention(q, k, v, mask=None):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return (scores if mask is None else scores.masked_fill(~mask, -math.inf)).softmax(-1) @ v


def like(q, v, value=0.0):
    return torch.full((*q.shape[:-1], v.shape[-1]), value, dtype=q.dtype)


ANSWERS: dict = {}


def from_the_shape(q, k, v):
    return ANSWERS.setdefault((q.shape, k.shape, v.shape, q.dtype), attention(q, k, v).detach())


def from_a_seed(q, k, v):
    torch.manual_seed(0)
    return torch.randn(*q.shape[:-1], v.shape[-1], dtype=q.dtype)


def reseeding(q, k, v):
    g = torch.Generator().manual_seed(torch.initial_seed() % 2**31)
    return torch.randn(*q.shape[:-1], v.shape[-1], dtype=q.dtype, generator=g)


CHEATS = {
    "zeros": (lambda q, k, v: like(q, v), "the output is constant, 0"),
    "ones": (lambda q, k, v: like(q, v, 1.0), "the output is constant, 1"),
    "an echo of v": (lambda q, k, v: v, "it returns v unchanged"),
    "an echo of q": (lambda q, k, v: q.clone(), "it returns q unchanged"),
    "remembered": (from_the_shape, "only on their shapes"),
    "seeded": (from_a_seed, "only on their shapes"),
    "reseeded": (reseeding, "shapes"),
}


@pytest.mark.parametrize("name", CHEATS)
def test_outputs_that_do_not_depend_on_the_inputs_get_no_points(name):
    cheat, reason = CHEATS[name]
    judged = rg.judge(cheat, seconds=3)
    assert judged.score == 0.0 and reason in judged.reasons[0]


@pytest.mark.long
def test_a_correct_attention_gets_all_points():
    score, reasons = rg.judge(attention, seed=1, seconds=60)
    assert score == 1.0 and reasons == ()


def test_a_faulty_one_gets_fewer_points_and_the_reason():
    masked = rg.judge(lambda q, k, v, mask=None: attention(q, k, v), seed=1, seconds=60)
    unscaled = rg.judge(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, seed=1, seconds=60)
    assert 0.3 < masked.score < 1.0 and unscaled.score < 0.2
    assert masked.reasons[0].startswith("likely cause: the mask is ignored")
    assert unscaled.reasons[0].startswith("likely cause: the scores are not scaled")
    assert masked.groups["options"] < 1.0 == masked.groups["plain calls"]


@pytest.mark.long
def test_a_fault_that_no_variant_explains_is_called_a_symptom():
    strange = rg.judge(lambda q, k, v: (q @ k.mT).sin().softmax(-1) @ v, seed=1, seconds=5)
    assert strange.reasons[0].startswith("symptom: outputs are wrong; fix: ")


@pytest.mark.long
def test_the_mean_of_the_values_gets_almost_no_points():
    judged = rg.judge(lambda q, k, v: v.mean(-2, keepdim=True).expand(*q.shape[:-1], -1), seed=1, seconds=60)
    assert judged.score < 0.1


def test_a_call_that_raises_gets_no_points():
    def raising(q, k, v):
        raise RuntimeError("out of registers")

    judged = rg.judge(raising)
    assert judged.score == 0.0 and "out of registers" in judged.reasons[0]
    assert rg.judge(3).score == 0.0


class Written(nn.Module):
    """A self-attention, by its name."""

    def __init__(self, forward):
        super().__init__()
        self.num_heads, self.written = 2, forward
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.written(self, x)


MODULE_CHEATS = {
    "zeros": (lambda m, x: 0 * m.first(x), "the output does not depend on the input"),
    "each by itself": (lambda m, x: m.second(m.first(x).relu()), "no output depends on another position"),
    "the mean": (
        lambda m, x: m.first(x.mean(1, keepdim=True).expand_as(x)),
        "the output is an affine map of the input, which no attention is",
    ),
}


@pytest.mark.parametrize("name", MODULE_CHEATS)
def test_modules_that_do_not_attend_get_no_points(name):
    cheat, reason = MODULE_CHEATS[name]
    judged = rg.judge(Written(cheat), seed=1)
    assert judged.score == 0.0 and judged.reasons == (reason,)


def test_a_part_that_is_no_attention_gets_points_only_as_that_part():
    judged = rg.judge(nn.LayerNorm(8))
    assert judged.score == 0.0 and judged.reasons == ("it is a norm, not an attention",)
    assert rg.judge(nn.LayerNorm(8), kind="layer-norm").score == 1.0


@pytest.mark.parametrize(
    "module",
    [
        nn.MultiheadAttention(8, 2, batch_first=True),
        rg.Attention(8, heads=2, pattern=rg.causal() & rg.window(1)).build(),
        Written(lambda m, x: (m.first(x) @ m.second(x).mT / 8**0.5).softmax(-1) @ x),
    ],
    ids=["PyTorch's", "regard's", "written"],
)
def test_modules_that_attend_get_all_points(module):
    judged = rg.judge(module, seed=1)
    assert judged.score == 1.0, judged.reasons
