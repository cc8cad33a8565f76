"""The modules that specs build: attention, block, norms, feed-forward, cache."""

from math import inf, sqrt

import pytest
import torch
from einops import rearrange
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import regard as rg
from ledger_cases import agrees, case, cases
from long_cases import in_long
from regard import Attention, Block, FeedForward, reference
from regard.engine.attention import weights as dense_weights
from regard.errors import RegardError, ShapeError

f64 = torch.float64


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=f64, generator=torch.Generator().manual_seed(seed))


def built(declared, seed=0):
    torch.manual_seed(seed)
    return declared.build().to(f64).eval()


def count(module):
    return sum(p.numel() for p in module.parameters())


def layer_of(inputs, **more):
    """The attention that a params.attention case of the ledger declares."""
    biases = "all" if inputs["qkv_bias"] else "output" if inputs["out_bias"] else "none"
    out = {"d_out": inputs["d_out"]} if inputs["out_proj"] else {"output": False}
    sizes = {"heads": inputs["heads"], "d_k": inputs["d_hid"], "d_v": inputs["d_o"]}
    return Attention(inputs["d_in"], **sizes, **out, biases=biases, **more)


@pytest.mark.ledger(
    "S0.Q2a.2", "S0.Q2a.3", "S0.Q2a.4", "S0.Q2a.5", "S1.Q2b.1", "S2.1.2.2", "S2.1.2.3", "S2.1.2.4", "S2.1.2.5"
)
@pytest.mark.parametrize("c", cases("params.attention"), ids=lambda c: c["id"])
def test_an_attention_has_the_parameters_the_ledger_counts(c):
    with torch.device("meta"):
        layer = layer_of(c["inputs"]).build()
    assert count(layer) == c["expected"]["total"]


@pytest.mark.ledger("S1.Q6b.3")
@pytest.mark.parametrize("c", cases("params.score"), ids=lambda c: c["id"])
def test_a_score_function_has_the_parameters_the_ledger_counts(c):
    d = c["inputs"]["d_q"]
    if c["inputs"].get("d_a", d) != d or c["inputs"]["d_k"] != d:
        pytest.fail("a case of unequal widths: extend this test")
    with torch.device("meta"):
        layer = Attention(d, heads=1, score=c["inputs"]["form"], biases="none", output=False).build()
    parts = [p.numel() for name, p in layer.named_parameters() if not name.startswith("w_v")]
    # a dot score needs no weights of its own: its two projections are those of the attention
    assert sum(parts) - (2 * d * d if c["inputs"]["form"] == "dot" else 0) == c["expected"]["total"]


@pytest.mark.ledger("S4.1.4d.1")
def test_a_feed_forward_has_the_parameters_the_ledger_counts():
    c = case("params.ffn.512.2048")
    with torch.device("meta"):
        block = Block(Attention(512), FeedForward(2048)).build()
    assert count(block.feed_forward) == c["expected"]["total"]
    with torch.device("meta"):
        assert count(Block(Attention(512), FeedForward(2048)).build()) == 3_152_384
        decoder = Block(Attention(512, pattern=rg.causal()), FeedForward(2048), cross=Attention(512))
        assert count(decoder.build()) == 4_204_032


@pytest.mark.ledger(
    "S1.Q3a.4", "S0.Q2b.1", "S1.Q3a.1", "S1.Q3a.2", "S1.Q3a.3", "S1.Q3a.6", "S3.Q2.1", "S4.1.2a.1", "S2.1.1.4"
)
def test_the_layer_gives_the_worked_example():
    c = case("attention.multihead.4x2")
    given = {name: torch.tensor(x, dtype=f64) for name, x in c["inputs"].items() if name != "heads"}
    layer = built(Attention(4, heads=2, biases="none"))
    with torch.no_grad():
        for name, w in (("W_Q", layer.w_q), ("W_K", layer.w_k), ("W_V", layer.w_v), ("W_O", layer.w_o)):
            w.weight.copy_(given[name].T)
        got = layer(given["X"][None])[0]
    expected = c["expected"]["output"] if isinstance(c["expected"], dict) else c["expected"]
    assert agrees(got.tolist(), expected, c["compare"])
    # with a mask, declared or given in the call: query i mixes the values 0 … i, head by head
    x, w = given["X"], {name: given[name] for name in ("W_Q", "W_K", "W_V")}
    masked = torch.zeros_like(x)
    for h in (slice(0, 2), slice(2, 4)):
        q, k, v = (x @ w[name][:, h] for name in ("W_Q", "W_K", "W_V"))
        for i in range(len(x)):
            powers = (k[: i + 1] @ q[i] / 2**0.5).exp()
            masked[i, h] = powers @ v[: i + 1] / powers.sum()
    declared = built(Attention(4, heads=2, biases="none", pattern=rg.causal()))
    declared.load_state_dict(layer.state_dict())
    for result in (declared(x[None]), layer(x[None], pattern=rg.causal())):
        assert torch.allclose(result[0], masked @ given["W_O"], atol=1e-12)
    assert (masked @ given["W_O"] - got).abs().max() > 0.01


@pytest.mark.ledger("S0.Q2b.3", "S0.Q2b.10", "S0.Q2b.12", "S0.Q2b.6", "S2.1.3.5", "S0.Q1a.1", "S0.Q1a.2")
@given(st.integers(1, 3), st.sampled_from([1, 2, 3]), st.booleans(), st.integers(0, 5))
def test_the_layer_is_the_formula(h, width, causal, seed):
    d, n = h * width, 7
    layer = built(Attention(d, heads=h, biases="none", pattern=rg.causal() if causal else rg.full()), seed)
    x = randn(2, n, d, seed=seed)
    w = [m.weight.T for m in (layer.w_q, layer.w_k, layer.w_v, layer.w_o)]
    allowed = rg.causal().allowed(n) if causal else None
    for in_sequence in (False, True):
        expected = reference.multi_head(x, *w, h, allowed, in_sequence=in_sequence)
        assert torch.allclose(layer(x), expected, atol=1e-12, rtol=0)


@pytest.mark.ledger("S0.Q2b.7", "S4.1.2a.3", "S0.Q2c.2")
def test_the_output_is_a_sum_over_heads_and_their_order_is_free():
    layer = built(Attention(12, heads=3, biases="none"))
    x = randn(1, 7, 12)
    q, k, v = (rearrange(w(x), "b n (h d) -> b h n d", h=3) for w in (layer.w_q, layer.w_k, layer.w_v))
    heads = rg.attention(q, k, v)
    by_head = rearrange(layer.w_o.weight.detach().clone(), "o (h d) -> h d o", h=3)
    assert torch.allclose(layer(x), torch.einsum("bhnd,hdo->bno", heads, by_head), atol=1e-12)
    with torch.no_grad():
        turned = [2, 0, 1]
        for w in (layer.w_q, layer.w_k, layer.w_v):
            w.weight.copy_(
                rearrange(rearrange(w.weight, "(h d) i -> h d i", h=3)[turned], "h d i -> (h d) i")
            )
        before = rg.attention(q, k, v)
        alone = layer(x)
        assert not torch.allclose(alone, torch.einsum("bhnd,hdo->bno", before, by_head), atol=1e-3)  # control
        layer.w_o.weight.copy_(
            rearrange(rearrange(layer.w_o.weight, "o (h d) -> o h d", h=3)[:, turned], "o h d -> o (h d)")
        )
        assert torch.allclose(layer(x), torch.einsum("bhnd,hdo->bno", before, by_head), atol=1e-12)


DECLARED = {
    "plain": {"heads": 4},
    "grouped": {"heads": 4, "kv_heads": 2},
    "multi-query": {"heads": 4, "kv_heads": 1},
    "free sizes": {"heads": 3, "d_k": 5, "d_v": 2},
    "rope": {"heads": 2, "position": rg.rope()},
    "rope interleaved": {"heads": 2, "position": rg.rope(pairing="interleaved")},
    "alibi": {"heads": 3, "position": rg.alibi()},
    "t5": {"heads": 3, "position": rg.t5_buckets()},
    "table": {"heads": 3, "position": rg.relative_table(3)},
    "shaw": {"heads": 3, "position": rg.shaw(2, values=True)},
    "position alone": {"heads": 3, "score": "position", "position": rg.quadratic()},
    "additive": {"heads": 3, "score": "additive"},
    "bilinear": {"heads": 3, "score": "bilinear"},
    "hard": {"heads": 3, "scale": inf},
    "hard additive": {"heads": 3, "score": "additive", "scale": inf},
    "mean": {"heads": 3, "scale": 0},
    "temperature": {"heads": 3, "temperature": 2.0},
    "window": {"heads": 3, "pattern": rg.causal() & (rg.window(2) | rg.every(3))},
}


@pytest.mark.ledger("S0.Q1b.4", "S0.Q2b.11", "S0.Q1d.8", "S1.Q1a.1", "S4.1.1b.2", "S4.1.1c.1", "S4.1.1d.1")
@pytest.mark.parametrize("kind", DECLARED)
def test_every_kind_gives_weights_that_mix_the_values_into_its_output(kind):
    layer = built(Attention(12, **DECLARED[kind]))
    x = randn(2, 7, 12).requires_grad_()
    out, weights = layer(x, return_weights=True)
    assert torch.equal(out, layer(x))  # asking for the weights changes nothing
    assert torch.allclose(weights.sum(-1), torch.ones((), dtype=f64), atol=1e-12)
    v = rearrange(layer.w_v(x), "b m (h d) -> b h m d", h=layer.spec.sizes.kv_heads)
    o = weights @ reference.repeat_heads(v, layer.spec.heads)
    if kind == "shaw":
        at = torch.arange(7)
        o = o + layer.position.values(weights, at, at)
    assert torch.allclose(layer.w_o(rearrange(o, "b h n d -> b n (h d)")), out, atol=1e-12)
    grads = torch.autograd.grad(out.sum(), [x, *layer.parameters()], allow_unused=True)
    silent = {n for (n, _), g in zip(layer.named_parameters(), grads[1:]) if g is None or not g.any()}
    hard = {n for n, _ in layer.named_parameters() if not n.startswith(("w_v", "w_o", "position.for_values"))}
    expected = (
        hard if "hard" in kind or kind == "mean" else {"w_k.bias"} & {n for n, _ in layer.named_parameters()}
    )
    assert silent <= expected | {"w_k.bias"}  # a constant added to all keys changes no weight
    assert all(g is None or g.isfinite().all() for g in grads)


@pytest.mark.ledger("S4.1.1d.1", "S4.1.1d.2")
def test_scale_zero_averages_the_values():
    layer = built(Attention(12, heads=3, scale=0))
    x = randn(2, 7, 12)
    mean = layer.w_v(x).mean(1, keepdim=True).expand(-1, 7, -1)
    assert torch.allclose(layer(x), layer.w_o(mean), atol=1e-12)


@pytest.mark.ledger("S1.Q1b.1", "S1.Q5a.5", "S3.Q2.1")
def test_cross_attention_reads_another_sequence_of_another_width():
    layer = built(Attention(12, heads=3, d_context=5, biases="output"))
    x, context = randn(2, 7, 12), randn(2, 11, 5, seed=1)
    out, weights = layer(x, context, return_weights=True)
    assert out.shape == (2, 7, 12) and weights.shape == (2, 3, 7, 11)
    short = torch.tensor([11, 4])
    padded = layer(x, context, lengths=short)
    assert torch.allclose(padded[0], out[0], atol=1e-12)
    assert torch.allclose(padded[1:], layer(x[1:], context[1:, :4]), atol=1e-12)
    more = layer(randn(1, 13, 12), randn(1, 11, 5))  # more queries than keys: two sequences, nothing compared
    assert more.shape == (1, 13, 12)


@pytest.mark.ledger("S1.Q5b.2")
@pytest.mark.parametrize("kind", [k for k in DECLARED if k not in ("position alone",)])
def test_cached_steps_equal_the_full_pass(kind):
    declared = dict(DECLARED[kind])
    declared["pattern"] = rg.causal() & declared.get("pattern", rg.full())
    layer = built(Attention(12, **declared))
    x = randn(2, 11, 12)
    with torch.no_grad():
        whole, cache = layer(x), rg.KeyValues()
        parts = [layer(x[:, a:b], cache=cache) for a, b in ((0, 4), (4, 5), (5, 9), (9, 11))]
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-12)


@pytest.mark.parametrize("kind", ["plain", "grouped", "rope", "alibi", "shaw", "table", "additive", "window"])
def test_cached_rows_of_different_lengths_equal_each_alone(kind):
    declared = dict(DECLARED[kind])
    declared["pattern"] = rg.causal() & declared.get("pattern", rg.full())
    layer = built(Attention(12, **declared))
    x, lengths, steps = randn(3, 11, 12), torch.tensor([2, 5, 1]), 4
    with torch.no_grad():
        whole, cache = layer(x), rg.KeyValues()
        prompt = x[:, :5].clone()
        prompt[torch.arange(5) >= lengths[:, None]] = 1e3  # padding, of whatever
        got = layer(prompt, cache=cache, lengths=lengths)
        for b, l in enumerate(lengths.tolist()):
            assert torch.allclose(got[b, :l], whole[b, :l], atol=1e-12)
        for t in range(steps):
            at = lengths + t
            step = layer(x[torch.arange(3), at][:, None], cache=cache)
            assert torch.allclose(step[:, 0], whole[torch.arange(3), at], atol=1e-12)


def test_a_cache_refuses_to_cut_gradients():
    layer = built(Attention(12, heads=3, pattern=rg.causal()))
    with pytest.raises(RegardError) as e:
        layer(randn(1, 3, 12), cache=rg.KeyValues())
    assert str(e.value) == "a cache has no gradients; decode under torch.no_grad()"


def test_a_pattern_given_to_the_call_restricts_the_declared_one():
    layer = built(Attention(12, heads=3, pattern=rg.causal()))
    x = randn(2, 7, 12)
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    packed = layer(x, pattern=rg.documents(ids))
    alone = torch.cat([layer(x[:, :3]), layer(x[:, 3:])], 1)
    assert torch.allclose(packed, alone, atol=1e-12)
    table = ids[:, None] == ids[None]
    assert torch.allclose(layer(x, pattern=table), packed, atol=1e-12)


def test_an_input_of_the_wrong_width_is_named():
    layer = built(Attention(12, heads=3))
    with pytest.raises(ShapeError) as e:
        layer(randn(1, 7, 11))
    assert str(e.value) == "x has width 11; this attention takes d_model=12"
    with pytest.raises(ShapeError) as e:
        layer(randn(1, 7, 12), randn(1, 7, 5))
    assert str(e.value) == "the context has width 5; declared is d_context=12"


@pytest.mark.compiled  # runs without the shape checker, which would refuse these first
def test_an_input_that_is_no_tensor_is_named():
    layer, x = built(Attention(12, heads=3)), randn(1, 7, 12)
    for inputs, name, kind in (
        ((x.numpy(),), "x", "ndarray"),
        ((x.tolist(),), "x", "list"),
        ((x, x.numpy()), "context", "ndarray"),
    ):
        with pytest.raises(ShapeError) as e:
            layer(*inputs)
        assert str(e.value) == f"{name} is of type {kind}, not a tensor; use torch.as_tensor({name})"
    stack = built(rg.Encoder(Block(Attention(12, heads=3), None), 1))
    with pytest.raises(ShapeError, match="x is of type ndarray, not a tensor"):
        stack(x.numpy())
    with pytest.raises(ShapeError, match="x is None, not a tensor"):
        layer(None)


@pytest.mark.ledger("S3.Q3.0", "S1.Q5a.6", "S1.Q5a.7", "S1.Q7b.2", "S4.1.4e.2")
@pytest.mark.parametrize("norm_at", ["post", "pre"])
@pytest.mark.parametrize("residual", [True, False])
def test_a_block_places_its_norms_and_residuals_as_declared(norm_at, residual):
    block = built(Block(Attention(12, heads=3), FeedForward(20), norm_at=norm_at, residual=residual))
    x = randn(2, 7, 12)

    def branch(x, f, norm):
        if norm_at == "pre":
            return (x if residual else 0) + f(norm(x))
        return norm((x if residual else 0) + f(x))

    expected = branch(x, block.attention, block.attention_norm)
    expected = branch(expected, block.feed_forward, block.feed_forward_norm)
    assert torch.allclose(block(x), expected, atol=1e-12)


@pytest.mark.ledger("S1.Q5c.1")
def test_without_branches_the_gradient_passes_a_pre_norm_block_unchanged():
    block = built(Block(Attention(12, heads=3), FeedForward(20), norm_at="pre"))
    with torch.no_grad():
        block.attention.w_o.weight.zero_(), block.attention.w_o.bias.zero_()
        block.feed_forward.w_out.weight.zero_(), block.feed_forward.w_out.bias.zero_()
    x = randn(1, 3, 12)
    jacobian = torch.autograd.functional.jacobian(block, x).reshape(36, 36)
    assert torch.equal(jacobian, torch.eye(36, dtype=f64))


@pytest.mark.ledger("S1.Q5c.1")
@pytest.mark.parametrize("c", cases("residual.chain"), ids=lambda c: c["id"])
def test_a_residual_keeps_the_slope_of_a_chain(c):
    slope, layers = c["inputs"]["c"], c["inputs"]["layers"]
    for name, keep in (("with_identity", 1.0), ("without", 0.0)):
        x = torch.ones((), dtype=f64, requires_grad=True)
        y = x
        for _ in range(layers):
            y = keep * y + slope * y
        (grad,) = torch.autograd.grad(y, x)
        assert grad.item() == pytest.approx(c["expected"][name], rel=1e-12)


@pytest.mark.ledger("S4.1.4d.1", "S4.1.4d.2")
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu"])
def test_a_feed_forward_acts_on_each_position_alone(activation):
    block = built(Block(Attention(6, heads=2), FeedForward(11, activation=activation)))
    x = randn(1, 5, 6)
    jacobian = torch.autograd.functional.jacobian(block.feed_forward, x)[0, :, :, 0]  # (5, 6, 5, 6)
    across = jacobian.abs().amax((1, 3))
    assert torch.equal(across.bool(), torch.eye(5, dtype=torch.bool))


@pytest.mark.ledger("S4.1.4d.1")
def test_a_feed_forward_is_two_pointwise_convolutions():
    ff = built(Block(Attention(6, heads=2), FeedForward(11))).feed_forward
    x = randn(1, 5, 6)
    conv = torch.conv1d(x.mT, ff.w_in.weight[..., None], ff.w_in.bias).relu()
    conv = torch.conv1d(conv, ff.w_out.weight[..., None], ff.w_out.bias).mT
    assert torch.allclose(ff(x), conv, atol=1e-12)


@pytest.mark.ledger("S3.Q3a.1", "S3.Q3a.2", "S3.Q3a.3", "S4.1.4e.1")
@pytest.mark.parametrize(
    "kind, training, rows, columns",
    [
        ("layer", True, False, True),
        ("rms", True, False, True),
        ("batch", True, True, False),
        ("batch", False, False, False),
    ],
)
def test_who_depends_on_whom_in_a_norm(kind, training, rows, columns):
    """(other rows, other columns) of (5 positions, 6 features) that reach an entry (L37)."""
    block = Block(Attention(6, heads=2), FeedForward(11), norm=kind).build().to(f64).train(training)
    x = randn(1, 5, 6)
    jacobian = torch.autograd.functional.jacobian(block.attention_norm, x)[0, :, :, 0]
    reached = jacobian.abs() > 1e-12
    same = torch.eye(5, dtype=torch.bool)[:, None, :, None] & torch.eye(6, dtype=torch.bool)[None, :, None, :]
    across_rows = reached & ~torch.eye(5, dtype=torch.bool)[:, None, :, None]
    across_columns = reached & ~torch.eye(6, dtype=torch.bool)[None, :, None, :]
    assert (reached | ~same).all()  # its own entry always
    assert across_rows.any() == rows and across_columns.any() == columns


@pytest.mark.ledger("S3.Q3b.1", "S3.Q3b.2")
@pytest.mark.parametrize("c", cases("norm.layer"), ids=lambda c: c["id"])
def test_layer_norm_gives_the_ledger_s_numbers(c):
    given, expected = c["inputs"], c["expected"]
    x = torch.tensor(given["x"], dtype=f64) if isinstance(given["x"], list) else None
    if x is None:
        pytest.fail("a case that gives no vector: extend this test")
    norm = Block(Attention(len(x), heads=1), None, eps=given["eps"]).build().to(f64).attention_norm
    with torch.no_grad():
        norm.weight.copy_(torch.as_tensor(given["gamma"], dtype=f64).expand(len(x)))
        norm.bias.copy_(torch.as_tensor(given["beta"], dtype=f64).expand(len(x)))
        y = norm(x)
    assert agrees(y.tolist(), expected["y"], c["compare"])
    if "norm_y_minus_beta" in expected:
        size = (y - torch.as_tensor(given["beta"], dtype=f64)).norm().item()
        assert agrees(size, expected["norm_y_minus_beta"], c["compare"])


@pytest.mark.ledger("S3.Q3b.1", "S3.Q3b.2")
def test_the_geometry_of_layer_norm():
    """Sum 0 and length √d before scale and shift; unmoved by a·x + c, turned over by a < 0 (L38)."""
    d = 512
    norm = Block(Attention(d), None, eps=0.0).build().to(f64).attention_norm
    x = randn(d)
    z = norm(x)
    assert abs(z.sum()) < 1e-10 and abs(z.norm() - sqrt(d)) < 1e-10
    assert torch.allclose(norm(3 * x + 2), z, atol=1e-12) and torch.allclose(norm(-2 * x + 5), -z, atol=1e-12)
    small = Block(Attention(8, heads=1), None, eps=0.0).build().to(f64).attention_norm
    y = randn(8)
    jacobian = torch.autograd.functional.jacobian(small, y)
    u, z = torch.ones(8, dtype=f64), small(y).detach()
    sigma = y.std(correction=0)
    expected = (torch.eye(8, dtype=f64) - torch.outer(u, u) / 8 - torch.outer(z, z) / 8) / sigma
    assert torch.allclose(jacobian, expected, atol=1e-12)
    assert torch.linalg.matrix_rank(jacobian, atol=1e-10) == 6


@pytest.mark.ledger("S0.Q1d.1", "S0.Q1d.2", "S0.Q1d.3", "S0.Q1d.4", "S1.Q3b.1")
@given(st.permutations(range(7)), st.integers(0, 20))
def test_a_block_without_positions_is_permutation_equivariant(order, seed):
    block = built(Block(Attention(12, heads=3), FeedForward(20)), seed)
    x = randn(1, 7, 12, seed=seed)
    assert torch.allclose(block(x[:, order]), block(x)[:, order], atol=1e-12)
    assert torch.allclose(block(x[:, order]).mean(1), block(x).mean(1), atol=1e-12)
    table = rg.causal().allowed(7)
    moved = block(x[:, order], pattern=table[order][:, order])
    assert torch.allclose(moved, block(x, pattern=rg.causal())[:, order], atol=1e-12)  # P M Pᵀ moves along


@pytest.mark.ledger("S0.Q1d.9", "S0.Q1d.7", "S1.Q4.0")
@pytest.mark.parametrize("position", [rg.rope(), rg.shaw(3), None, *in_long(rg.alibi(), rg.t5_buckets())])
def test_order_is_seen_with_positions_or_a_causal_pattern(position):
    declared = Attention(12, heads=3, position=position, pattern=rg.full() if position else rg.causal())
    seen = 0
    for seed in range(100):
        layer = built(declared, seed)
        if hasattr(layer.position, "table"):
            nn.init.normal_(layer.position.table)
        x, order = (
            randn(1, 7, 12, seed=seed),
            torch.randperm(7, generator=torch.Generator().manual_seed(seed)),
        )
        if torch.equal(order, torch.arange(7)):
            order = order.flip(0)
        apart = (layer(x[:, order]) - layer(x)[:, order]).abs().max()
        seen += bool(apart > 1e-3 * layer(x).abs().max())
    assert seen >= 99


@pytest.mark.ledger("S1.Q5b.1", "S1.Q5a.4", "S1.Q3a.4", "S0.Q2b.8")
def test_no_gradient_comes_back_from_the_future():
    """∂ output t / ∂ input s = 0 exactly for s > t; without the mask every block is alive (control) (L29)."""
    x = randn(1, 7, 12)
    for pattern, causal in ((rg.causal(), True), (rg.full(), False)):
        block = built(Block(Attention(12, heads=3, pattern=pattern, position=rg.rope()), FeedForward(20)))
        jacobian = torch.autograd.functional.jacobian(block, x)[0, :, :, 0].abs().amax((1, 3))
        future = torch.ones(7, 7).triu(1).bool()
        assert (jacobian[future] == 0).all() if causal else (jacobian[future] > 1e-6).all()


def test_weights_of_the_layer_are_those_of_the_engine():
    layer = built(Attention(12, heads=3, kv_heads=1, pattern=rg.causal()))
    x = randn(2, 7, 12)
    q = rearrange(layer.w_q(x), "b n (h d) -> b h n d", h=3)
    k = rearrange(layer.w_k(x), "b n (h d) -> b h n d", h=1)
    assert torch.equal(layer(x, return_weights=True)[1], dense_weights(q, k, rg.causal()))


@pytest.mark.parametrize("at", [0, 9, -3, (2, 3)], ids=str)
@pytest.mark.parametrize("kind", ["alibi", "t5", "table", "shaw", "position alone", "rope"])
def test_queries_may_have_any_offset(kind, at):
    """Past the last key, before the first, or at every third position: the pairs keep their distances."""
    layer = built(Attention(12, **DECLARED[kind]))
    x, context = randn(1, 5, 12), randn(1, 7, 12, seed=1)
    start, step = at if isinstance(at, tuple) else (at, 1)
    got = layer(x, context, at=at)
    for r in range(5):
        alone = layer(x[:, r : r + 1], context, at=start + step * r)
        assert torch.allclose(got[:, r : r + 1], alone, atol=1e-12)
    if kind == "position alone":  # whose scores have no end: the dense formula, pair by pair
        scores = layer.position(start + step * torch.arange(5), torch.arange(7))
        weights = layer(x, context, at=at, return_weights=True)[1]
        assert torch.allclose(weights[0], scores.softmax(-1), atol=1e-12)
    if start >= 0:
        long = torch.zeros(1, start + step * 5, 12, dtype=f64)
        places = start + step * torch.arange(5)
        long[:, places] = x
        longer = layer(long, context, at=0)[:, places]
        assert torch.allclose(got, longer, atol=1e-12)
