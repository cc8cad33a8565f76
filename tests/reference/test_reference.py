"""The formula: against sums written out by hand, against the ledger's numbers, and by its laws L01-L08, L45.

Each law has a control: a wrong implementation that the same comparison must reject.
"""

from math import exp, inf, log, sqrt, tanh

import pytest
import torch
import torch.nn.functional as F
from einops import einsum, rearrange, repeat
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from ledger_cases import agrees, case, cases
from pattern_strategies import patterns
from regard.errors import ShapeError, SpecError
from regard.pattern import causal, every, window
from regard.reference import (
    additive_scores,
    allowed_from,
    attend,
    attend_columns,
    attend_streaming,
    bilinear_scores,
    dot_scores,
    hardmax,
    log_sum_exp,
    multi_head,
    repeat_heads,
    softmax,
    tanh_scores,
)

N, M, D_K, D_V = 7, 11, 5, 3


def randn(*shape, seed=0, dtype=torch.float64, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * spread).to(dtype)


def qkv(*batch, n=N, m=M, d_k=D_K, d_v=D_V, dtype=torch.float64):
    shapes = (*batch, n, d_k), (*batch, m, d_k), (*batch, m, d_v)
    return tuple(randn(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))


def some_allowed(n=N, m=M, seed=5):
    """A random table; row 2 sees nothing, row 3 everything, row 4 the last key alone."""
    allowed = randn(n, m, seed=seed) > 0
    allowed[2], allowed[3], allowed[4] = False, True, torch.arange(m) == m - 1
    return allowed


def with_gradients(f, *inputs):
    """f of the inputs, and the gradient of a fixed random mix of its outputs towards each of them."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = f(*leaves)
    outs = (out,) if isinstance(out, torch.Tensor) else out
    mix = [randn(*x.shape, seed=97).to(x.dtype) for x in outs]
    return out, torch.autograd.grad(outs, leaves, mix)


def same(got, expected, t64=1e-12):
    assert_close(got, expected, rtol=0, atol=t64, equal_nan=False)


def by_hand(q, k, v, allowed=None, scale=None, bias=None):
    """z_i = Σ_j a_ij v_j with a_ij = exp(e_ij) / Σ_k exp(e_ik): loops over plain numbers, nothing else."""
    n, m, d_k, d_v = len(q), len(k), len(q[0]), len(v[0])
    scale = 1 / sqrt(d_k) if scale is None else scale
    weights, outputs, totals = [], [], []
    for i in range(n):
        e = [scale * sum(q[i][c] * k[j][c] for c in range(d_k)) for j in range(m)]
        e = [x + (bias[i][j] if bias else 0.0) for j, x in enumerate(e)]
        mass = [exp(e[j]) if allowed is None or allowed[i][j] else 0.0 for j in range(m)]
        total = sum(mass)
        a = [x / total if total else 0.0 for x in mass]
        weights.append(a)
        outputs.append([sum(a[j] * v[j][c] for j in range(m)) for c in range(d_v)])
        totals.append(log(total) if total else -inf)
    return outputs, weights, totals


# The formula


@pytest.mark.ledger("S0.Q1a.3", "S0.Q1a.4", "S0.Q1a.5", "S0.Q1a.6", "S1.Q1b.1", "S2.1.3.3", "S2.1.3.4")
@pytest.mark.parametrize("scale", [None, 1.0, 0.0, -0.3, 4.0])
@pytest.mark.parametrize("masked", [False, True])
def test_the_matrix_form_is_the_sum_written_out(scale, masked):
    (q, k, v), allowed, bias = qkv(), some_allowed() if masked else None, randn(N, M, seed=8)
    got = attend(q, k, v, allowed, scale=scale, bias=bias)
    outputs, weights, totals = by_hand(
        q.tolist(), k.tolist(), v.tolist(), allowed.tolist() if masked else None, scale, bias.tolist()
    )
    assert got.o.shape == (N, D_V) and got.weights.shape == got.scores.shape == (N, M)
    same(got.o, torch.tensor(outputs, dtype=torch.float64))
    same(got.weights, torch.tensor(weights, dtype=torch.float64))
    same(got.lse, torch.tensor(totals, dtype=torch.float64))


@pytest.mark.ledger("S0.Q1a.1", "S0.Q1a.2", "S2.1.3.5", "S4.1.4b.1")
def test_self_attention_takes_queries_keys_and_values_from_one_input():
    x, w_q, w_k, w_v = randn(N, 13), randn(13, D_K, seed=1), randn(13, D_K, seed=2), randn(13, D_V, seed=3)
    got = attend(x @ w_q, x @ w_k, x @ w_v)
    assert got.weights.shape == (N, N) and got.o.shape == (N, D_V)
    rows = [[[sum(a * b for a, b in zip(row, column)) for column in w.T.tolist()] for row in x.tolist()]
            for w in (w_q, w_k, w_v)]  # fmt: skip
    same(got.o, torch.tensor(by_hand(*rows)[0], dtype=torch.float64))


@pytest.mark.parametrize("numbers", cases("attention.values"), ids=lambda c: c["id"])
@pytest.mark.ledger("S1.Q1b.1", "S0.Q2b.8", "S0.Q2b.9", "S1.Q3a.4", "S4.1.1d.1", "S4.1.1c.1")
def test_the_ledgers_small_attentions(numbers):
    given = numbers["inputs"]
    q, k, v = (torch.tensor(given[name], dtype=torch.float64) for name in "QKV")
    allowed = torch.tensor(given["mask"]).bool() if "mask" in given else None
    got = attend(q, k, v, allowed, scale=given["beta"])
    found = {"weights": got.weights.tolist(), "output": got.o.tolist()}
    assert agrees(found, numbers["expected"], numbers["compare"])


@pytest.mark.ledger("S0.Q1a.4")
def test_the_ledgers_softmax():
    (numbers,) = cases("softmax.values")
    scores = torch.tensor([numbers["inputs"]["scores"]], dtype=torch.float64) * numbers["inputs"]["beta"]
    assert agrees(softmax(scores)[0].tolist(), numbers["expected"], numbers["compare"])


@pytest.mark.ledger("S0.Q2b.1", "S1.Q3a.1", "S1.Q3a.2", "S1.Q3a.3", "S3.Q2.1", "S4.1.2a.1", "S2.1.1.4")
@pytest.mark.parametrize("in_sequence", [False, True])
def test_the_ledgers_two_heads(in_sequence):
    numbers = case("attention.multihead.4x2")
    given, heads = numbers["inputs"], numbers["inputs"]["heads"]
    x, *w = (torch.tensor(given[name], dtype=torch.float64) for name in ("X", "W_Q", "W_K", "W_V", "W_O"))
    q, k, v = (rearrange(x @ one, "n (h d) -> h n d", h=heads) for one in w[:3])
    found = {
        "weights": attend(q, k, v).weights.tolist(),
        "output": multi_head(x, *w, heads, in_sequence=in_sequence).tolist(),
    }
    assert agrees(found, numbers["expected"], numbers["compare"])


@pytest.mark.ledger("S1.Q5a.1", "S1.Q5a.5")
def test_the_shapes_of_the_weights_in_the_translation_example():
    numbers = case("shapes.hello_world")
    heads, src, tgt = (numbers["inputs"][name] for name in ("heads", "src_len", "tgt_len"))
    source, target = randn(heads, src, 64), randn(heads, tgt, 64, seed=1)
    decoder = attend(target, target, target, causal().allowed(tgt)).weights
    found = {
        "encoder_self": list(attend(source, source, source).weights.shape),
        "decoder_self": list(decoder.shape),
        "decoder_self_allowed": int((decoder[0] > 0).sum()),
        "cross": list(attend(target, source, source).weights.shape),
    }
    assert agrees(found, numbers["expected"], numbers["compare"])


@pytest.mark.ledger("S2.1.3.1")
def test_a_grid_is_attended_to_flattened_and_back():
    x = randn(4, 6, D_K)  # rows × columns
    flat = rearrange(x, "row col d -> (row col) d")
    whole = rearrange(attend(flat, flat, flat).o, "(row col) d -> row col d", row=4)
    same(whole[2, 5], attend(x[2, 5:6], flat, flat).o[0])
    turned = rearrange(x, "row col d -> (col row) d")  # the order of the cells does not matter
    same(rearrange(attend(turned, turned, turned).o, "(col row) d -> row col d", row=4), whole)


# Scores


@pytest.mark.ledger("S1.Q1a.1", "S2.1.1.2", "S2.1.3.2")
def test_each_score_is_its_own_formula():
    q, k, w, v = randn(2, N, D_K), randn(2, M, D_K, seed=1), randn(D_K, 13, seed=2), randn(2, D_K, seed=3)
    wide = randn(2, M, 13, seed=4)
    dots, forms, tanhs = dot_scores(q, k), bilinear_scores(q, wide, w), tanh_scores(q, k, v)
    w_q, w_k, one_v = randn(D_K, 2, seed=5), randn(13, 2, seed=6), randn(2, seed=7)
    sums = additive_scores(q, wide, w_q, w_k, one_v)
    for h, i, j in [(0, 0, 0), (0, 3, 10), (1, 6, 2), (1, 5, 7)]:
        columns = range(D_K)
        assert dots[h, i, j].item() == pytest.approx(
            sum(q[h, i, c].item() * k[h, j, c].item() for c in columns), abs=1e-12
        )
        assert forms[h, i, j].item() == pytest.approx(
            sum(
                q[h, i, c].item() * w[c, e].item() * wide[h, j, e].item() for c in columns for e in range(13)
            ),
            abs=1e-12,
        )
        assert tanhs[h, i, j].item() == pytest.approx(
            sum(v[h, c].item() * tanh(q[h, i, c].item() + k[h, j, c].item()) for c in columns), abs=1e-12
        )
        hidden = [
            sum(q[h, i, c].item() * w_q[c, a].item() for c in columns)
            + sum(wide[h, j, e].item() * w_k[e, a].item() for e in range(13))
            for a in range(2)
        ]
        assert sums[h, i, j].item() == pytest.approx(
            sum(one_v[a].item() * tanh(hidden[a]) for a in range(2)), abs=1e-12
        )
    assert dots.shape == forms.shape == tanhs.shape == sums.shape == (2, N, M)
    # the parts together: query and keys give the weights, the weights mix the values; any score may replace q·k
    swapped = attend(torch.zeros_like(q), k, wide, bias=forms)
    for got, scores in ((attend(q, k, wide), dots / sqrt(D_K)), (swapped, forms)):
        for h, i in [(0, 0), (1, 6)]:
            powers = [exp(s) for s in scores[h, i].tolist()]
            for c in range(13):
                mixed = sum(p * wide[h, j, c].item() for j, p in enumerate(powers)) / sum(powers)
                assert got.o[h, i, c].item() == pytest.approx(mixed, abs=1e-12)


@pytest.mark.ledger("S1.Q1a.1")
def test_an_additive_score_is_the_weights_of_any_other_score():
    q, k, v = qkv(2)
    scores = tanh_scores(q, k, randn(2, D_K, seed=6))
    weights = softmax(scores, some_allowed())
    same(weights.sum(-1)[:, [0, 1, 3, 4, 5, 6]], torch.ones(2, 6, dtype=torch.float64))
    same(einsum(weights, v, "h n m, h m d -> h n d")[:, 4], v[:, -1])  # row 4 sees the last key alone


@pytest.mark.ledger("S2.1.1.3")
def test_scores_and_weights_are_distinguished():
    q, k, v = qkv()
    got = attend(q, k, v, bias=randn(N, M, seed=8))
    same(got.scores, q @ k.T / sqrt(D_K) + randn(N, M, seed=8))
    same(got.weights, (got.scores - got.lse[:, None]).exp())
    assert (got.scores < 0).any() and (got.weights >= 0).all()


# L01-L04: the weights as a distribution


@pytest.mark.ledger("S0.Q1b.1", "S0.Q1b.4", "S0.Q1a.4")
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 4e-3)]
)
@pytest.mark.parametrize("n", [1, 7, 1024])
def test_rows_sum_to_one_over_the_allowed_keys(n, dtype, bound):
    masks = {
        "none": None,
        "causal": causal().allowed(n),
        "padding": (torch.arange(n) < max(1, n - 3)).expand(n, n),
        "band and columns": (window(2) | every(4)).allowed(n),
    }
    wide = torch.promote_types(dtype, torch.float32)  # bfloat16: computed in float32, stored in bfloat16
    scores = randn(8 if n < 100 else 1, n, n, spread=3e3, dtype=wide).clamp(-1e4, 1e4)
    for allowed in masks.values():
        weights = softmax(scores, allowed).to(dtype)
        assert (weights >= 0).all()
        if allowed is not None:
            assert (weights[:, ~allowed] == 0).all()
        assert (weights.double().sum(-1) - 1).abs().max() <= bound


@given(patterns, st.sampled_from([1, 2, 7]), st.sampled_from([1, 3, 11]))
@pytest.mark.ledger("S0.Q1b.1")
def test_rows_sum_to_one_or_are_zero_for_any_pattern(pattern, n, m):
    allowed = pattern.allowed(n, m, 0)
    weights = softmax(randn(n, m, spread=10), allowed)
    same(weights.sum(-1), allowed.any(-1).double())
    assert (weights[~allowed] == 0).all() and (weights >= 0).all()


def test_control_exponentials_alone_do_not_sum_to_one():
    scores = randn(N, M)
    assert (scores.exp().sum(-1) - 1).abs().min() > 0.1


def test_control_a_plain_softmax_of_an_empty_row_is_nan_and_minus_1e9_attends_to_masked_keys():
    forbidden = torch.zeros(N, M, dtype=torch.bool)
    assert randn(N, M).masked_fill(~forbidden, -inf).softmax(-1).isnan().all()
    same(
        randn(N, M).masked_fill(~forbidden, -1e9).softmax(-1), torch.full((N, M), 1 / M, dtype=torch.float64)
    )
    assert (softmax(randn(N, M), forbidden) == 0).all()


@pytest.mark.ledger("S0.Q1b.1", "S0.Q2b.11")
def test_a_query_with_no_allowed_key_gets_zeros_and_no_gradient():
    q, k, v = qkv()
    allowed = some_allowed()
    for scale in (None, inf):
        got = attend(q, k, v, allowed, scale=scale)
        assert (got.o[2] == 0).all() and (got.weights[2] == 0).all()
    assert attend(q, k, v, allowed).lse[2] == -inf

    def all_of_it(q, k, v):
        got = attend(q, k, v, allowed)
        return got.o, got.lse

    _, (g_q, g_k, g_v) = with_gradients(all_of_it, q, k, v)
    assert (g_q[2] == 0).all() and g_q[3].abs().min() > 0
    assert g_k.isfinite().all() and g_v.isfinite().all()
    rest = torch.arange(N) != 2  # the empty query has no part in the other gradients

    def without(q, k, v):
        got = attend(q, k, v, allowed[rest])
        return got.o, got.lse

    leaves = [x.clone().requires_grad_() for x in (q[rest], k, v)]
    mixes = randn(N, D_V, seed=97)[rest], randn(N, seed=97)[rest]
    expected = torch.autograd.grad(without(*leaves), leaves, mixes)
    same(g_q[rest], expected[0])
    same(g_k, expected[1])
    same(g_v, expected[2])


@pytest.mark.ledger("S0.Q1b.3")
@pytest.mark.parametrize("scale", [None, 0.0, 20.0, inf])
def test_each_output_is_in_the_box_and_the_ball_of_the_allowed_values(scale):
    (q, k, v), allowed = qkv(13), some_allowed()
    o = attend(q, k, v, allowed, scale=scale).o
    for i in set(range(N)) - {2}:
        seen = v[:, allowed[i]]
        assert (o[:, i] >= seen.amin(1) - 1e-12).all() and (o[:, i] <= seen.amax(1) + 1e-12).all()
        assert (o[:, i].norm(dim=-1) <= seen.norm(dim=-1).amax(1) + 1e-12).all()


def test_control_a_negative_weight_leaves_the_box():
    v = randn(M, D_V)
    o = torch.tensor([2.0, -1.0] + [0.0] * (M - 2)).double() @ v  # sums to one
    assert ((o < v.amin(0)) | (o > v.amax(0))).any()


@pytest.mark.ledger("S0.Q1b.2")
@pytest.mark.parametrize(
    ("dtype", "t", "t_log"), [(torch.float64, 1e-12, 1e-10), (torch.float32, 1e-4, 1e-4)]
)
def test_softmax_sees_differences_of_scores_and_keeps_their_order(dtype, t, t_log):
    scores, allowed = randn(N, M, dtype=dtype), some_allowed()
    weights = softmax(scores, allowed)
    same(softmax(scores + 100, allowed), weights, t)
    seen = weights[3].log()  # row 3 sees everything
    same(seen[:, None] - seen, scores[3, :, None] - scores[3], t_log)
    assert torch.equal(weights[3].argsort(), scores[3].argsort())
    same(softmax(torch.tensor([[1.0, 2.0]])), softmax(torch.tensor([[11.0, 12.0]])), 1e-7)


def test_control_dividing_scores_by_their_sum_sees_more_than_differences():
    scores = randn(N, M).exp()
    shifted = scores + 100
    difference = shifted / shifted.sum(-1, keepdim=True) - scores / scores.sum(-1, keepdim=True)
    assert difference.abs().max() > 0.1


@pytest.mark.ledger("S1.Q1b.1")
def test_softmax_is_the_best_distribution_for_score_plus_entropy():
    """softmax(s) maximizes ⟨p, s⟩ + H(p); the maximum is logsumexp(s)."""
    scores = randn(1, M, spread=2)

    def value(p):
        return (p * scores).sum(-1) + torch.special.entr(p).sum(-1)

    best = value(softmax(scores))
    same(best, log_sum_exp(scores))
    others = randn(1000, M, spread=3, seed=3).softmax(-1)
    assert (value(others) < best).all()
    assert best - value(torch.full((1, M), 1 / M, dtype=torch.float64)) > 0.5  # control: the uniform p


# L05: layouts


@pytest.mark.ledger("S4.1.1a.1", "S4.1.3a.1", "S4.1.2a.2")
@pytest.mark.parametrize("scale", [None, 0.7])
def test_the_column_layout_is_the_transpose_of_the_row_layout(scale):
    (q, k, v), allowed = qkv(2), some_allowed()
    columns = [rearrange(x, "b n d -> b d n") for x in (q, k, v)]
    got = attend_columns(*columns, allowed, scale=scale)
    assert got.shape == (2, D_V, N)
    same(got, rearrange(attend(q, k, v, allowed, scale=scale).o, "b n d -> b d n"))
    weights = (columns[1][0].T @ columns[0][0] * (scale or D_K**-0.5)).softmax(0)  # m × n, down each column
    same(attend_columns(*columns, scale=scale)[0], columns[2][0] @ weights)


def test_control_softmax_along_the_other_axis_is_another_result():
    q, k, v = (rearrange(x, "n d -> d n") for x in qkv())
    wrong = v @ (k.T @ q * D_K**-0.5).softmax(1)
    assert (wrong - attend_columns(q, k, v)).abs().max() > 0.1


@pytest.mark.ledger("S4.1.3a.1")
def test_control_keys_times_queries_with_rows_as_positions_compares_features():
    q, k, _ = qkv(m=N)
    assert (k.T @ q).shape == (D_K, D_K)
    assert attend(q, k, k).weights.shape == (N, N)


# L06: one result from many implementations

X, HEADS, D_MODEL = (2, N, 12), 3, 12  # head widths 4 (q, k) and 5 (v)


def projections():
    return (
        randn(*X),
        *(randn(D_MODEL, HEADS * width, seed=s) for s, width in ((1, 4), (2, 4), (3, 5))),
        randn(HEADS * 5, 7, seed=4),
    )


def head_loop(x, w_q, w_k, w_v, w_o, allowed=None):
    """One head after another, each with its own column blocks."""
    heads = []
    for h in range(HEADS):
        q, k, v = x @ w_q[:, 4 * h : 4 * h + 4], x @ w_k[:, 4 * h : 4 * h + 4], x @ w_v[:, 5 * h : 5 * h + 5]
        heads.append(attend(q, k, v, allowed).o)
    return torch.cat(heads, -1) @ w_o


def folded(x, w_q, w_k, w_v, w_o, allowed=None):
    """Heads folded into the batch axis, batch-major."""
    q, k, v = (rearrange(x @ w, "b n (h d) -> (b h) n d", h=HEADS) for w in (w_q, w_k, w_v))
    return rearrange(attend(q, k, v, allowed).o, "(b h) n d -> b n (h d)", h=HEADS) @ w_o


def streamed(x, w_q, w_k, w_v, w_o, allowed=None):
    q, k, v = (rearrange(x @ w, "b n (h d) -> b h n d", h=HEADS) for w in (w_q, w_k, w_v))
    return rearrange(attend_streaming(q, k, v, allowed, block=3)[0], "b h n d -> b n (h d)") @ w_o


def fused(x, w_q, w_k, w_v, w_o, allowed=None):
    """PyTorch's own attention."""
    q, k, v = (rearrange(x @ w, "b n (h d) -> b h n d", h=HEADS) for w in (w_q, w_k, w_v))
    return rearrange(F.scaled_dot_product_attention(q, k, v, allowed), "b h n d -> b n (h d)") @ w_o


def in_sequence(*args, allowed=None):
    return multi_head(*args, HEADS, allowed, in_sequence=True)


@pytest.mark.ledger(
    "S0.Q2b.3",
    "S0.Q2b.4",
    "S0.Q2b.6",
    "S0.Q2b.10",
    "S0.Q2b.11",
    "S0.Q2b.12",
    "S3.Q2.1",
    "S1.Q3a.2",
    "S4.1.4c.1",
)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("implementation", [head_loop, in_sequence, folded, streamed, fused])
def test_every_implementation_gives_the_same_outputs_and_gradients(implementation, masked):
    allowed = causal().allowed(N) if masked else None
    expected, wanted = with_gradients(lambda *a: multi_head(*a, HEADS, allowed), *projections())
    got, gradients = with_gradients(lambda *a: implementation(*a, allowed=allowed), *projections())
    assert got.shape == (2, N, 7)
    same(got, expected)
    for mine, other in zip(gradients, wanted):
        same(mine, other, 1e-10)


@pytest.mark.ledger("S0.Q2b.3")
def test_control_heads_split_in_another_order_give_another_result():
    x, w_q, w_k, w_v, w_o = projections()
    q, k, v = (rearrange(x @ w, "b n (d h) -> b h n d", h=HEADS) for w in (w_q, w_k, w_v))
    wrong = rearrange(attend(q, k, v).o, "b h n d -> b n (d h)") @ w_o
    assert (wrong - multi_head(x, w_q, w_k, w_v, w_o, HEADS)).abs().max() > 0.1


def test_multi_head_without_an_output_projection_gives_the_heads_side_by_side():
    x, w_q, w_k, w_v, _ = projections()
    same(multi_head(x, w_q, w_k, w_v, None, HEADS), head_loop(x, w_q, w_k, w_v, torch.eye(15).double()))


@pytest.mark.parametrize("block", [1, 2, 3, 5, 11, 64])
@pytest.mark.parametrize("scale", [None, 0.3, 0.0])
@pytest.mark.ledger("S0.Q1c.4")
def test_a_streaming_softmax_gives_the_same_result_for_any_block(block, scale):
    (q, k, v), allowed = qkv(2), some_allowed()
    allowed[5, :10] = False  # nothing allowed in the first blocks: the running maximum stays −∞

    def whole(q, k, v):
        got = attend(q, k, v, allowed, scale=scale)
        return got.o, got.lse

    expected, wanted = with_gradients(whole, q, k, v)
    got, gradients = with_gradients(
        lambda *x: attend_streaming(*x, allowed, scale=scale, block=block), q, k, v
    )
    for mine, other in zip((*got, *gradients), (*expected, *wanted)):
        same(mine, other, 1e-10)
    same(attend_streaming(q, k, v, scale=scale, block=block)[0], attend(q, k, v, scale=scale).o)


def test_control_a_streaming_softmax_that_does_not_rescale_is_wrong():
    q, k, v = qkv()
    scores = q @ k.T / sqrt(D_K)
    gathered, mass = torch.zeros(N, D_V).double(), torch.zeros(N).double()
    for j in range(0, M, 3):
        part = scores[:, j : j + 3]
        new = (part - part.amax(-1, keepdim=True)).exp()
        gathered, mass = gathered + new @ v[j : j + 3], mass + new.sum(-1)
    assert (gathered / mass[:, None] - attend(q, k, v).o).abs().max() > 0.1


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_grouped_heads_are_repeated_heads(kv_heads):
    q, (k, v) = randn(2, 6, N, D_K), (randn(2, kv_heads, M, d, seed=d) for d in (D_K, D_V))
    got = attend(q, repeat_heads(k, 6), repeat_heads(v, 6)).o
    for h in range(6):
        group = h * kv_heads // 6
        same(got[:, h], attend(q[:, h], k[:, group], v[:, group]).o)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ShapeError, match=r"^4 key/value heads do not divide 6 query heads$"):
        repeat_heads(randn(2, 4, M, D_K), 6)


# L07, L08


@pytest.mark.ledger("S0.Q2b.7", "S1.Q3a.3", "S4.1.2a.3")
def test_the_output_projection_is_a_sum_over_heads_and_does_not_mind_their_order():
    x, w_q, w_k, w_v, w_o = projections()
    whole = multi_head(x, w_q, w_k, w_v, w_o, HEADS)
    q, k, v = (rearrange(x @ w, "b n (h d) -> b h n d", h=HEADS) for w in (w_q, w_k, w_v))
    heads, blocks = attend(q, k, v).o, rearrange(w_o, "(h d) o -> h d o", h=HEADS)
    same(whole, einsum(heads, blocks, "b h n d, h d o -> b n o"))

    def reordered(w, order=(2, 0, 1)):
        return rearrange(rearrange(w, "i (h d) -> h i d", h=HEADS)[list(order)], "h i d -> i (h d)")

    swapped = reordered(w_q), reordered(w_k), reordered(w_v)
    same(multi_head(x, *swapped, reordered(w_o.T).T, HEADS), whole)
    alone = multi_head(x, *swapped, w_o, HEADS)  # control: heads permuted, their blocks of w_o not
    assert (alone - whole).abs().max() > 0.1


@pytest.mark.ledger("S0.Q2c.2")
@pytest.mark.parametrize(("n", "m", "d"), [(17, 19, 5), (3, 19, 5), (17, 2, 5)])
def test_scores_have_at_most_the_rank_of_a_head(n, m, d):
    q, k, _ = qkv(n=n, m=m, d_k=d)
    singular, rank = torch.linalg.svdvals(dot_scores(q, k)), min(n, m, d)
    assert (singular[rank:] < 1e-10 * singular[0]).all() and singular[rank - 1] > 1e-3 * singular[0]
    after = torch.linalg.svdvals(softmax(dot_scores(q, k)))  # control: softmax lifts the rank
    assert (after > 1e-10 * after[0]).sum() == min(n, m)


# Hard attention


@pytest.mark.ledger("S4.1.1c.1", "S2.4.1.3")
def test_tied_keys_share_and_the_first_alone_by_name():
    scores = torch.tensor([[2.0, 2.0, 1.0], [0.0, 3.0, 3.0], [5.0, 5.0, 5.0], [1.0, 2.0, 3.0]]).double()
    assert hardmax(scores).tolist() == [[0.5, 0.5, 0], [0, 0.5, 0.5], [1 / 3] * 3, [0, 0, 1]]
    assert hardmax(scores, ties="first").tolist() == [[1, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 1]]
    same((1e4 * scores).softmax(-1), hardmax(scores))  # the limit of softmax(t · s)
    seen = torch.tensor([False, True, True])
    assert hardmax(scores, seen).tolist() == [[0, 1, 0], [0, 0.5, 0.5], [0, 0.5, 0.5], [0, 0, 1]]
    assert hardmax(scores, seen, "first").tolist() == [[0, 1, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1]]
    assert (hardmax(scores, ~seen & seen) == 0).all()


def test_control_one_hot_is_not_the_limit_where_keys_tie():
    scores = torch.tensor([[2.0, 2.0, 1.0]]).double()
    assert ((1e4 * scores).softmax(-1) - F.one_hot(scores.argmax(-1), 3)).abs().max() == 0.5


@pytest.mark.ledger("S4.1.1c.1")
@pytest.mark.parametrize("ties", ["share", "first"])
def test_an_infinite_scale_keeps_the_value_of_the_best_finished_score(ties):
    (q, k, v), allowed, bias = qkv(), some_allowed(), randn(N, M, seed=8, spread=3)
    got = attend(q, k, v, allowed, bias=bias, scale=inf, ties=ties)
    best = (q @ k.T / sqrt(D_K) + bias).masked_fill(~allowed, -inf).argmax(-1)
    assert torch.equal(got.o[[0, 1, 3, 4, 5, 6]], v[best][[0, 1, 3, 4, 5, 6]])
    assert (got.o[2] == 0).all() and got.lse.isnan().all()
    unbiased = (q @ k.T).masked_fill(~allowed, -inf).argmax(-1)
    assert not torch.equal(best, unbiased)  # the bias has a say


def test_hard_attention_has_gradients_only_in_the_values():
    q, k, v = (x.requires_grad_() for x in qkv())
    got = attend(q, k, v, scale=inf)
    g_q, g_k, g_v = torch.autograd.grad(got.o.sum(), (q, k, v), allow_unused=True)
    assert g_q is None and g_k is None
    same(g_v, got.weights.sum(0)[:, None].expand(M, D_V))


def test_a_scale_of_minus_infinity_is_refused():
    with pytest.raises(
        SpecError,
        match=r"^scale=-inf: only \+inf is defined, as hard attention; negate q to select the smallest score$",
    ):
        attend(*qkv(), scale=-inf)


@pytest.mark.parametrize("scale", [None, 0.0, inf])
def test_no_keys_at_all_give_zeros_and_no_queries_give_nothing(scale):
    q, k, v = qkv()
    assert torch.equal(attend(q, k[:0], v[:0], scale=scale).o, torch.zeros(N, D_V).double())
    assert attend(q[:0], k, v, scale=scale).o.shape == (0, D_V)
    assert (attend(q, k[:0], v[:0]).lse == -inf).all()


# L45: mask arithmetic


@pytest.mark.ledger("S0.Q2b.5", "S0.Q2b.8")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_boolean_additive_and_zero_one_masks_are_equivalent(dtype):
    (q, k, v), allowed = qkv(dtype=dtype), some_allowed()
    additive = torch.zeros(N, M, dtype=dtype).masked_fill(~allowed, -inf)
    lowest = torch.zeros(N, M, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
    named = [
        allowed_from(zero_one=allowed.to(dtype)),
        allowed_from(zero_one=allowed.long()),
        allowed_from(additive=additive),
        allowed_from(additive=lowest),
    ]
    for table in named:
        assert torch.equal(table, allowed)
    expected, wanted = with_gradients(lambda *x: attend(*x, allowed).o, q, k, v)
    got, gradients = with_gradients(lambda *x: attend(*x, bias=additive).o, q, k, v)
    for mine, other in zip((got, *gradients), (expected, *wanted)):
        assert mine.isfinite().all()
        same(mine, other, 1e-12 if dtype is torch.float64 else 1e-5)


@pytest.mark.ledger("S0.Q2b.9", "S3.Q2.2")
def test_a_padding_mask_enters_by_its_own_name():
    padding = torch.arange(M) >= torch.tensor([[4], [M]])  # True = padding
    allowed = allowed_from(padding=padding)
    assert allowed.shape == (2, 1, 1, M) and torch.equal(allowed[:, 0, 0], ~padding)
    q, k, v = qkv(2, 3)
    same(attend(q, k, v, allowed).o[0], attend(q[0], k[0, :, :4], v[0, :, :4]).o)
    same(attend(q, k, v, allowed).o[1], attend(q[1], k[1], v[1]).o)
    # folded into the batch, a mask is repeated once a head, batch-major
    fold = [rearrange(x, "b h n d -> (b h) n d") for x in (q, k, v)]
    heads = repeat(~padding, "b m -> (b h) 1 m", h=3)
    same(rearrange(attend(*fold, heads).o, "(b h) n d -> b h n d", h=3), attend(q, k, v, allowed).o)


def test_allowed_from_takes_one_mask_by_name():
    wanted = r"^allowed_from takes one mask, by name: zero_one=, additive= or padding=$"
    with pytest.raises(SpecError, match=wanted):
        allowed_from()
    with pytest.raises(SpecError, match=wanted):
        allowed_from(zero_one=torch.ones(N, M), additive=torch.zeros(N, M))


@pytest.mark.ledger("S0.Q2b.5")
def test_masking_and_adding_a_bias_commute():
    (q, k, v), allowed, bias = qkv(), some_allowed(), randn(N, M, seed=8)
    first = attend(q, k, v, bias=bias.masked_fill(~allowed, -inf))
    then = attend(q, k, v, allowed, bias=bias)
    for a, b in zip(first[:3], then[:3]):
        same(a, b)


@pytest.mark.ledger("S0.Q2b.5")
def test_control_scores_plus_mask_times_minus_infinity_is_wrong_with_either_mask():
    scores, allowed = randn(N, M), causal().allowed(N, M, 0)
    forbidden = (~allowed).double()
    assert (scores + forbidden * -inf).softmax(-1).isnan().all()  # 0 · (−∞) = NaN poisons every allowed score
    additive = torch.zeros(N, M).double().masked_fill(~allowed, -inf)
    product = scores + additive * -inf  # (−∞) · (−∞) = +∞ selects what was forbidden
    assert (product[~allowed] == inf).all() and product[allowed].isnan().all()
    assert softmax(scores, allowed).isfinite().all()
