"""Padding in `attention`: the mask table of encoders, decoders and cross-attention; padded = packed = alone."""

import pytest
import torch
from einops import rearrange
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from regard.engine.attention import attention
from regard.pattern import causal, documents, full, lengths, window
from regard.reference import allowed_from

H, H_KV, D_K, D_V = 4, 2, 5, 3
LENGTHS = torch.tensor([7, 1, 4, 0, 5])
B, N = len(LENGTHS), 7
REAL = torch.arange(N) < LENGTHS[:, None]  # (b, n)
f64 = torch.float64


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=f64)


def qkv(b=B, n=N, m=N):
    return randn(b, H, n, D_K), randn(b, H_KV, m, D_K, seed=1), randn(b, H_KV, m, D_V, seed=2)


def of_real(x):
    """The rows of real positions, one after another: (positions, h, d)."""
    return rearrange(x, "b h n d -> b n h d")[REAL]


def with_other_padding(*tensors, factor=5.0):
    """The same with the contents of padded positions changed."""
    real = rearrange(REAL, "b n -> b 1 n 1")
    return tuple(x.where(real, factor * x + 1) for x in tensors)


def same(got, expected, t=1e-12):
    assert_close(got, expected, rtol=0, atol=t)


# Encoder


@pytest.mark.ledger("S3.Q2b.0", "S3.Q2b.1", "S0.Q2b.9")
def test_an_encoder_with_lengths_does_not_depend_on_padding():
    q, k, v = qkv()
    before = of_real(attention(q, k, v, lengths=LENGTHS))
    assert torch.equal(before, of_real(attention(*with_other_padding(q, k, v), lengths=LENGTHS)))
    free = of_real(attention(q, k, v))  # control: an encoder without a mask
    assert (free - of_real(attention(*with_other_padding(q, k, v)))).abs().max() > 0.1


@pytest.mark.ledger("S3.Q2b.0", "S3.Q2b.1")
def test_the_number_of_padded_keys_does_not_matter():
    q, k, v = qkv()
    more = [torch.cat([x, 9 * randn(B, x.shape[1], 4, x.shape[3], seed=5)], 2) for x in (k, v)]
    same(attention(q, *more, lengths=LENGTHS), attention(q, k, v, lengths=LENGTHS))
    assert (attention(q, *more) - attention(q, k, v)).abs().max() > 0.1  # control


@pytest.mark.ledger("S3.Q2b.0", "S0.Q2b.9", "S3.Q2.2")
def test_lengths_a_padding_mask_and_a_pattern_of_lengths_say_the_same():
    q, k, v = qkv()
    expected = attention(q, k, v, lengths=LENGTHS)
    same(attention(q, k, v, allowed_from(padding=~REAL)), expected)
    same(attention(q, k, v, lengths(LENGTHS)), expected)
    same(attention(q, k, v, full() & lengths(LENGTHS)), expected)
    assert (expected[3] == 0).all()  # a sequence of length 0 has no allowed key


@pytest.mark.parametrize("backend", ["reference", "sdpa", "tiles"])
def test_lengths_changed_before_the_backward_pass_change_no_gradient(backend):
    q, k, v = (x.requires_grad_() for x in qkv())
    used = LENGTHS.clone()
    o = attention(q, k, v, window(2), lengths=used, backend=backend)
    expected = torch.autograd.grad(o.square().sum(), (q, k, v), retain_graph=True)
    used.fill_(N)  # the buffer holds the next batch
    assert_close(torch.autograd.grad(o.square().sum(), (q, k, v)), expected, rtol=0, atol=0)


@pytest.mark.ledger("S3.Q2b.0")
@pytest.mark.parametrize("pattern", [full(), causal(), window(1)], ids=repr)
def test_a_loss_on_real_positions_sends_no_gradient_to_padding(pattern):
    inputs = [x.requires_grad_() for x in qkv()]
    loss = of_real(attention(*inputs, pattern, lengths=LENGTHS)).square().sum()
    for g in torch.autograd.grad(loss, inputs):
        assert g.isfinite().all() and of_real(g).any()
        assert (rearrange(g, "b h n d -> b n h d")[~REAL] == 0).all()


# Decoder


@pytest.mark.ledger("S3.Q2b.2", "S3.Q2b.3")
def test_a_causal_decoder_with_right_padding_needs_no_key_mask():
    q, k, v = qkv()
    free = of_real(attention(q, k, v, causal()))
    assert torch.equal(free, of_real(attention(*with_other_padding(q, k, v), causal())))
    same(free, of_real(attention(q, k, v, causal(), lengths=LENGTHS)))


def left_padded():
    """The same sequences at the end of their rows, after padding that holds other numbers."""
    moved = [9 * torch.ones_like(x) for x in qkv()]
    for x, y in zip(qkv(), moved):
        for b, l in enumerate(LENGTHS.tolist()):
            y[b, :, N - l :] = x[b, :, :l]
    return moved


@pytest.mark.ledger("S3.Q2b.2")
def test_a_causal_decoder_with_left_padding_needs_one():
    right = of_real(attention(*qkv(), causal()))
    real = torch.arange(N) >= N - LENGTHS[:, None]
    q, k, v = left_padded()
    hidden = attention(q, k, v, causal().allowed(N) & allowed_from(padding=~real))
    same(rearrange(hidden, "b h n d -> b n h d")[real], right)
    assert (rearrange(hidden, "b h n d -> b n h d")[~real] == 0).all()  # leading rows have no allowed key
    free = rearrange(attention(q, k, v, causal()), "b h n d -> b n h d")[real]  # control: causal alone
    assert (free - right).abs().max() > 0.1


# Cross-attention


@pytest.mark.ledger("S3.Q2b.3")
def test_cross_attention_with_source_lengths_does_not_depend_on_source_padding():
    q, k, v = randn(B, H, 11, D_K, seed=7), *qkv()[1:]  # 11 target positions over 7 source positions
    before = attention(q, k, v, lengths=LENGTHS)
    assert torch.equal(before, attention(q, *with_other_padding(k, v), lengths=LENGTHS))
    for b, l in enumerate(LENGTHS.tolist()):
        same(before[b : b + 1], attention(q[b : b + 1], k[b : b + 1, :, :l], v[b : b + 1, :, :l]))
    assert (attention(q, k, v) - attention(q, *with_other_padding(k, v))).abs().max() > 0.1  # control


# Padded = packed = each alone


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.sampled_from([full(), causal(), window(2)]))
@pytest.mark.ledger("S1.Q3a.5", "S3.Q2b.0")
def test_a_padded_batch_a_packed_batch_and_each_alone_are_the_same(sizes, pattern):
    b, n, many = len(sizes), max(sizes), torch.tensor(sizes)
    inputs = qkv(b, n, n)
    padded = attention(*inputs, pattern, lengths=many)
    joined = [torch.cat([x[i : i + 1, :, :l] for i, l in enumerate(sizes)], 2) for x in inputs]
    ids = torch.arange(b).repeat_interleave(many)
    packed = attention(*joined, pattern & documents(ids))
    starts = (many.cumsum(0) - many).tolist()
    for i, l in enumerate(sizes):
        alone = attention(*(x[i : i + 1, :, :l] for x in inputs), pattern)
        same(padded[i : i + 1, :, :l], alone)
        same(packed[:, :, starts[i] : starts[i] + l], alone)


@pytest.mark.ledger("S1.Q3a.5")
@pytest.mark.parametrize("pattern", [full(), causal()], ids=repr)
def test_padded_packed_and_alone_agree_in_their_gradients(pattern):
    sizes = [l for l in LENGTHS.tolist() if l]
    rows = [b for b, l in enumerate(LENGTHS.tolist()) if l]

    def padded(*inputs):
        return of_real(attention(*inputs, pattern, lengths=LENGTHS))

    def packed(*inputs):
        ids = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        joined = [torch.cat([x[b : b + 1, :, :l] for b, l in zip(rows, sizes)], 2) for x in inputs]
        return rearrange(attention(*joined, pattern & documents(ids)), "1 h n d -> n h d")

    def alone(*inputs):
        parts = [attention(*(x[b : b + 1, :, :l] for x in inputs), pattern) for b, l in zip(rows, sizes)]
        return rearrange(torch.cat(parts, 2), "1 h n d -> n h d")

    results = []
    for way in (padded, packed, alone):
        leaves = [x.requires_grad_() for x in qkv()]
        o = way(*leaves)
        results.append([o, *torch.autograd.grad((o * randn(*o.shape, seed=9)).sum(), leaves)])
    for way in results[:2]:
        for mine, other in zip(way, results[2]):
            same(mine, other, 1e-10)


@pytest.mark.ledger("S1.Q3a.5")
def test_control_packing_without_documents_and_pooling_over_padding_are_wrong():
    q, k, v = qkv(2)
    joined = [rearrange(x, "b h n d -> 1 h (b n) d") for x in (q, k, v)]
    mixed = rearrange(attention(*joined), "1 h (b n) d -> b h n d", b=2)
    assert (mixed - attention(q, k, v)).abs().max() > 0.1
    out = attention(*qkv(), lengths=LENGTHS)
    pooled, real = out.mean(2)[2], out[2, :, :4].mean(1)
    assert (pooled - real).abs().max() > 1e-3
