"""Heads that attend to one offset, or to a band: what attention has in common with convolution."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard as rg
from ledger_cases import agrees, cases

f64 = torch.float64


def shift(s):
    """The pair (i, i − s) alone; past the border there is no key, and the query gets zeros."""
    return rg.where(lambda i, j: i - j == s)


def shift_heads(x, shifts, taps, stride=1):
    """y_q = Σ_s x[q − s] W_s at q = 0, stride, …: one head a shift, its values times its tap."""
    n = -(-x.shape[0] // stride)
    queries, keys = torch.zeros(1, 1, n, 1, dtype=f64), torch.zeros(1, 1, x.shape[0], 1, dtype=f64)
    return sum(
        rg.attention(queries, keys, (x @ w)[None, None], shift(s), at=(0, stride))[0, 0]
        for s, w in zip(shifts, taps)
    )


@pytest.mark.ledger(
    "S2.3.1.1", "S2.3.1.2", "S2.3.2.2", "S2.3.2.3", "S2.3.2.5", "S2.3.2.6", "S2.3.3.1", "S2.3.3.2", "S2.3.0.1"
)
@pytest.mark.parametrize("c", cases("conv.shift_heads"), ids=lambda c: c["id"])
def test_shift_heads_are_the_ledger_s_convolutions(c):
    given = c["inputs"]
    x = torch.tensor(given["x"], dtype=f64)
    taps = [torch.tensor(w, dtype=f64) for w in given["W"]]
    y = shift_heads(x, given["shifts"], taps, given.get("stride", 1))
    y = y + torch.tensor(given.get("bias", 0.0), dtype=f64)
    assert agrees(y.tolist(), c["expected"], c["compare"])


@pytest.mark.ledger("S2.3.2.4", "S2.3.2.5", "S2.3.3.1", "S2.3.3.2")
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 9))
def test_shift_heads_are_the_framework_s_convolution_with_the_kernel_flipped(dilation, stride, seed):
    """L25, L27; without the flip they are off by the size of the numbers (control)."""
    rng = torch.Generator().manual_seed(seed)
    x, kernel = torch.randn(11, 3, dtype=f64, generator=rng), torch.randn(5, 3, 3, dtype=f64, generator=rng)
    shifts = [dilation * s for s in (-1, 0, 1)]
    y = shift_heads(x, shifts, [kernel[:, :, t].mT for t in range(3)], stride)

    def conv(k):
        return torch.conv1d(x.mT[None], k, stride=stride, padding=dilation, dilation=dilation)[0].mT

    assert torch.allclose(y, conv(kernel.flip(-1)), atol=1e-12)
    assert (y - conv(kernel)).abs().max() > 1e-2


@pytest.mark.ledger("S4.1.3e.1", "S4.1.3e.2")
@pytest.mark.parametrize("c", cases("conv.average_band"), ids=lambda c: c["id"])
def test_equal_scores_over_a_band_average_neighbors(c):
    """Renormalized at the border by itself; a zero border needs keys of zeros to attend to."""
    w, x = c["inputs"]["window"], torch.tensor(c["inputs"]["x"], dtype=f64)
    n, values = len(x), x
    if c["inputs"]["border"] == "zero":
        values = torch.cat([x.new_zeros(w), x, x.new_zeros(w)])
    q = torch.zeros(1, 1, n, 1, dtype=f64)
    k, v = torch.zeros(1, 1, len(values), 1, dtype=f64), values[None, None, :, None]
    at = w if c["inputs"]["border"] == "zero" else 0
    y = rg.attention(q, k, v, rg.window(w), at=at)[0, 0, :, 0]
    assert agrees(y.tolist(), c["expected"], c["compare"])


@pytest.mark.ledger("S3.Q2a.1")
def test_the_field_of_stacked_attention_is_what_its_gradients_reach():
    """The boolean product of the patterns, and the support of the Jacobian of the stack: the same set."""
    n, p = 23, rg.window(1, after=0) | rg.dilated(1, 5)
    x = torch.randn(n, 4, dtype=f64, generator=torch.Generator().manual_seed(0))

    def stack(x):
        for _ in range(2):
            x = x + rg.attention(*[x[None, None]] * 3, p)[0, 0]
        return x

    reached = torch.autograd.functional.jacobian(stack, x).abs().amax((1, 3)) > 0
    step = (p.allowed(n) | torch.eye(n, dtype=torch.bool)).double()
    assert torch.equal(reached, (step @ step) > 0)
