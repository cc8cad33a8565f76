"""Every intermediate of an attention is the one its formula says, and together they give the layer's output."""

from math import inf

import pytest
import torch

import regard as rg
from ledger_cases import case
from regard.lens import figures
from regard.lens.trace import trace

f64 = torch.float64


def named(steps):
    return {s.name: s.tensor for s in steps}


@pytest.mark.ledger("S1.I.1", "S0.Q1a.1", "S0.Q1a.3", "S1.Q1b.1", "S2.1.1.2", "S3.Q2.3")
def test_each_step_follows_from_the_ones_before_it():
    torch.manual_seed(0)
    layer = rg.Attention(12, heads=3, pattern=rg.causal()).build().double()
    x = torch.randn(1, 7, 12, dtype=f64)
    steps = trace(layer, x)
    t = named(steps)
    assert list(t) == ["X", "Q", "K", "V", "products", "scaled", "masked", "row max", "exp", "row sums",
                       "weights", "heads", "concat", "output"]  # fmt: skip
    for name, w in (("Q", layer.w_q), ("K", layer.w_k), ("V", layer.w_v)):
        for h in range(3):
            rows = slice(4 * h, 4 * h + 4)
            assert torch.allclose(t[name][h], x[0] @ w.weight[rows].T + w.bias[rows])
    assert torch.allclose(t["products"], t["Q"] @ t["K"].mT)
    assert torch.allclose(t["scaled"], t["products"] / 4**0.5)
    allowed = torch.ones(7, 7, dtype=torch.bool).tril()
    assert torch.equal(t["masked"] == -inf, ~allowed.expand(3, 7, 7))
    assert torch.allclose(t["masked"][:, allowed], t["scaled"][:, allowed])
    assert torch.equal(t["row max"], t["masked"].amax(-1))
    assert torch.allclose(t["exp"], (t["masked"] - t["row max"][..., None]).exp())
    assert torch.allclose(t["row sums"], t["exp"].sum(-1))
    assert torch.allclose(t["weights"], t["exp"] / t["row sums"][..., None])
    assert torch.allclose(t["weights"], layer(x, return_weights=True)[1][0])
    assert torch.allclose(t["heads"], t["weights"] @ t["V"])
    assert torch.allclose(t["concat"], torch.cat(list(t["heads"]), -1))
    assert torch.allclose(t["output"], t["concat"] @ layer.w_o.weight.T + layer.w_o.bias)
    assert torch.allclose(t["output"], layer(x)[0]) and bool(t["output"].abs().max() > 0.01)
    price = layer.spec.cost(n=7)
    for name, part in (
        ("Q", "q"),
        ("V", "v"),
        ("products", "scores"),
        ("heads", "mixing"),
        ("output", "output"),
    ):
        assert steps[name].flops == price[part].total.flops > 0
    assert steps["weights"].elementwise == price["softmax"].total.elementwise_flops


@pytest.mark.ledger("S1.Q1b.1", "S1.I.1")
def test_the_worked_example_of_the_ledger_step_by_step():
    """Two queries, three keys: the intermediate numbers by hand."""
    given = {
        k: torch.tensor(v, dtype=f64) for k, v in case("attention.rect.2x3")["inputs"].items() if k in "QKV"
    }
    q, k, v = given["Q"], given["K"], given["V"]
    d, d_v = q.shape[-1], v.shape[-1]
    layer = (
        rg.Attention(d, heads=1, d_k=d, d_v=d_v, d_context=d + d_v, output=False, biases="none")
        .build()
        .double()
    )
    with torch.no_grad():
        layer.w_q.weight.copy_(torch.eye(d))
        layer.w_k.weight.copy_(torch.eye(d + d_v)[:d])
        layer.w_v.weight.copy_(torch.eye(d + d_v)[d:])
    t = named(trace(layer, q[None], torch.cat([k, v], -1)[None]))
    assert t["products"][0].tolist() == (q @ k.T).tolist()
    for i in range(len(q)):
        scores = [sum(float(a) * float(b) for a, b in zip(q[i], key)) / d**0.5 for key in k]
        assert t["scaled"][0, i].tolist() == pytest.approx(scores)
        powers = [torch.e ** (s - max(scores)) for s in scores]
        assert t["exp"][0, i].tolist() == pytest.approx(powers)
        assert float(t["row sums"][0, i]) == pytest.approx(sum(powers))
        assert t["weights"][0, i].tolist() == pytest.approx([p / sum(powers) for p in powers])
    assert t["concat"][0].tolist() == pytest.approx([4, 5, 6.401112], abs=1e-6)
    assert t["concat"][1].tolist() == pytest.approx([4.610009, 5.610009, 7.011121], abs=1e-6)
    assert "output" not in t


@pytest.mark.parametrize(
    "declared",
    [
        rg.Attention(12, heads=4, kv_heads=2, position=rg.alibi()),
        rg.Attention(12, heads=2, position=rg.rope(), pattern=rg.window(1)),
        rg.Attention(12, heads=2, score="additive"),
        rg.Attention(12, heads=2, scale=inf),
        rg.Attention(12, heads=2, scale=0.3),
        rg.Attention(12, heads=2, softcap=0.1, sink_logits=True, pattern=rg.causal()),
    ],
    ids=repr,
)
def test_the_trace_of_any_declaration_ends_in_its_output(declared):
    torch.manual_seed(0)
    layer, x = declared.build().double(), torch.randn(1, 5, 12, dtype=f64)
    steps = trace(layer, x)
    assert torch.allclose(steps["output"].tensor, layer(x)[0])
    assert ("bias" in named(steps)) == isinstance(declared.position, rg.alibi)
    assert ("Q" in named(steps)) == (declared.score == "dot")
    assert ("capped" in named(steps)) == (declared.softcap is not None)


def test_a_trace_prints_and_draws_all_steps_and_refuses_what_it_cannot_show():
    torch.manual_seed(0)
    layer, x = rg.Attention(12, heads=3).build(), torch.randn(1, 7, 12)
    steps = trace(layer, x)
    lines = str(steps).splitlines()
    assert len(lines) == 14 and lines[5].startswith("scaled    0.5 · products") and "3 × 7 × 7" in lines[5]
    figure = figures.attention_trace(layer, x)
    drawn = [t.get_text() for t in figure.axes[0].texts]
    assert {s.name for s in steps} <= set(drawn)
    for s in steps:
        assert "  ".join(f"{v:+.3f}" for v in s.tensor.flatten()[:4].tolist()) in drawn
    with pytest.raises(rg.SpecError, match=r"no step is named 'softmax'; the steps are X, Q, K, V, products"):
        steps["softmax"]
    with pytest.raises(rg.ShapeError, match=r"x has 2 batch rows; a trace shows one sequence: x\[:1\]"):
        trace(layer, x.expand(2, 7, 12))
    with pytest.raises(rg.SpecError, match=r"^Linear is not an attention module of regard; build one"):
        trace(torch.nn.Linear(2, 2), x)
