"""Effects of removing or changing heads and keys, against recomputing the model and against the ledger."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard as rg
from ledger_cases import agrees, case
from lens_models import huggingface, inputs
from regard.lens import ablation, perturbation
from regard.lens.rollout import rollout
from regard.lens.view import look


class Heads(nn.Module):
    """Multi-head attention with an output projection, its heads' outputs multiplied by `kept`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.kept = torch.ones(3, 1, 1)
        self.allowed = None

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=self.allowed) * self.kept
        return self.out(o.transpose(1, 2).flatten(-2))


X = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(1))


def moved(after, before):
    return float((after - before).norm() / before.norm())


@pytest.mark.ledger("S0.Q1b.5", "S0.Q2c.3")
def test_removing_a_head_equals_zeroing_its_output():
    model = Heads()
    view = look(model, X).remove_heads()
    with torch.no_grad():
        whole = model(X)
        for head in range(3):
            model.kept = torch.ones(3, 1, 1)
            model.kept[head] = 0
            assert view.effects[0, head] == pytest.approx(moved(model(X), whole), rel=1e-5)
    model.kept = torch.ones(3, 1, 1)
    assert [row["effect"] for row in view.rows()] == [view.effects[0, h] for h in range(3)]
    # of two layers only the one that is named changes, and a loss is measured in its own unit
    two = nn.Sequential(Heads(), Heads())
    view = look(two, X).remove_heads()
    with torch.no_grad():
        whole = two(X)
        for layer in (0, 1):
            two[layer].kept = torch.tensor([1.0, 0.0, 1.0])[:, None, None]
            changed = two(X)
            assert view.effects[layer, 1] == pytest.approx(moved(changed, whole), rel=1e-5)
            two[layer].kept = torch.ones(3, 1, 1)
    assert len({round(e, 6) for e in view.effects.values()}) == 6
    by_loss = look(two, X).remove_heads(loss=lambda out: out.square().mean())
    with torch.no_grad():
        two[1].kept = torch.tensor([0.0, 1.0, 1.0])[:, None, None]
        rise = float(two(X).square().mean() - whole.square().mean())
    assert by_loss.effects[1, 0] == pytest.approx(rise, rel=1e-4)


@pytest.mark.ledger("S0.Q1b.5")
def test_removing_a_key_equals_masking_it():
    model = Heads()
    view = look(model, X)
    with torch.no_grad():
        whole = model(X)
        model.allowed = torch.ones(1, 3, 7, 7, dtype=torch.bool)
        model.allowed[..., 2] = False
        hidden = model(X)
        model.allowed = torch.ones(1, 3, 7, 7, dtype=torch.bool)
        model.allowed[:, 1, :, 2] = False
        in_one_head = model(X)
        model.allowed = None
    assert view.remove_key(2) == pytest.approx(moved(hidden, whole), rel=1e-5)
    assert view.remove_key(2, layer=0, head=1) == pytest.approx(moved(in_one_head, whole), rel=1e-5)


def test_a_sink_keeps_its_part_when_a_key_is_removed():
    sink = torch.tensor([1.0, -0.5])

    class WithSink(nn.Module):
        def forward(self, x):
            return rg.attention(x, x, x, sink_logits=sink)

    x = X.unflatten(-1, (2, 6)).transpose(1, 2)
    others = x[..., :6, :]
    hidden = rg.attention(x, others, others, sink_logits=sink)
    effect = look(WithSink(), x).remove_key(6)
    assert effect == pytest.approx(moved(hidden, WithSink()(x)), rel=1e-5)


def test_a_large_weight_does_not_prove_influence():
    """Every query looks at key 0 alone, whose value is 0: removing any other key changes nothing."""
    q = torch.ones(1, 1, 5, 4)
    k, v = torch.zeros(2, 1, 1, 5, 4)
    k[..., 0, :], v[..., 1:, :] = 50.0, 1.0
    view = look(lambda q: F.scaled_dot_product_attention(q, k, v) + 1, q)
    assert view.map(0, 0)[:, 0].min() > 0.999
    assert view.remove_key(3) < 1e-6 and view.remove_heads().effects[0, 0] < 1e-6


def test_with_a_loss_the_effect_is_its_rise():
    model, aim = Heads(), torch.zeros(2, 7, 12)

    def loss(out):
        return F.mse_loss(out, aim)

    view = look(model, X).remove_heads(loss)
    with torch.no_grad():
        before = loss(model(X))
        model.kept[1] = 0
        rise = float(loss(model(X)) - before)
    assert view.effects[0, 1] == pytest.approx(rise, rel=1e-5)


@pytest.mark.parametrize("way", ["sdpa", "eager"])
def test_sdpa_and_eager_models_have_the_same_effects(way):
    pytest.importorskip("transformers")
    given = inputs("t5")
    view = look(huggingface("t5", way), given)
    got = [ablation.remove_head(view._model, given, 3, 2), view.remove_key(1, layer=3)]
    assert got == pytest.approx([EFFECTS.setdefault(i, x) for i, x in enumerate(got)], rel=1e-4)
    assert min(got) > 1e-4


EFFECTS: dict[int, float] = {}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_heads_of_pytorchs_encoder_can_be_removed():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    view = look(model, torch.randn(2, 5, 16)).remove_heads()
    assert len(view.effects) == 4 and min(view.effects.values()) > 1e-3
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_key_or_a_head_out_of_range_is_refused():
    view = look(Heads(), X)
    for key in (7, -1):
        with pytest.raises(rg.ShapeError, match=f"key {key!r} of layer 0 .Heads.: it has 7 keys, 0 to 6"):
            view.remove_key(key, layer=0)
    with pytest.raises(rg.ShapeError, match=r"head 3 of layer 0 \(Heads\): it has 3 heads, 0 to 2"):
        view.remove_key(0, head=3)
    with pytest.raises(rg.ShapeError, match="head 3: this attention has 3 heads, 0 to 2"):
        ablation.remove_head(Heads(), X, 0, 3)


def test_a_key_of_one_sequence_of_two_is_removed_in_the_layers_that_are_named():
    torch.manual_seed(0)
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True).eval()
    view = look(model, {"src": torch.randn(1, 7, 8), "tgt": torch.randn(1, 3, 8)})
    assert [call.m for call in view.calls] == [7, 3, 7]
    with pytest.raises(rg.ShapeError, match="it has 3 keys, 0 to 2; name the layers to change: layer="):
        view.remove_key(5)
    both, one, other = (view.remove_key(5, layer=at) for at in ([0, 2], 0, [2]))
    assert one > 1e-4 and other > 1e-4 and len({round(x, 6) for x in (both, one, other)}) == 3
    assert one == view.remove_key(5, layer="encoder.layers.0.self_attn")


class Growing(nn.Module):
    """Its keys are those of all runs so far, as in a cache."""

    def __init__(self):
        super().__init__()
        self.keys = []

    def forward(self, x):
        self.keys.append(x * (1 + len(self.keys)))
        k = torch.cat(self.keys, 2)
        return F.scaled_dot_product_attention(x, k, k)


def test_runs_that_do_not_repeat_have_no_effects():
    """The cache of the model grew with each removed head, and the effects with it."""
    x = X.unflatten(-1, (2, 6)).transpose(1, 2)
    fed = look(lambda x, cache: F.scaled_dot_product_attention(x, cache.mul_(2), x), (x, torch.randn_like(x)))
    dropping = look(nn.MultiheadAttention(12, 2, dropout=0.5, batch_first=True), (X, X, X))
    for view in (look(Growing(), x), fed, dropping):
        for remove in (view.remove_heads, lambda view=view: view.remove_key(0)):
            with pytest.raises(rg.RegardError, match=r"two equal runs of .* differ by .*: use model.eval"):
                remove()
    with pytest.raises(rg.RegardError, match="two equal runs"):
        fed.remove_heads(loss=lambda out: out.square().sum())


@pytest.mark.parametrize(
    "loss, words",
    [
        (lambda out: out, r"the loss returned a Tensor of shape \(2, 7, 12\); it has to return one number"),
        (lambda out: "low", "the loss returned a str; it has to return one number"),
    ],
)
def test_a_loss_has_to_return_a_number(loss, words):
    with pytest.raises(rg.SpecError, match=words):
        ablation.remove_head(Heads(), X, 0, 1, loss)


def worked():
    g = torch.Generator().manual_seed(4)
    return (torch.randn(n, d, generator=g, dtype=torch.float64) for n, d in ((7, 5), (11, 5), (11, 3)))


def attend(q, k, v, scale=5**-0.5):
    return (scale * q @ k.T).softmax(-1) @ v


@pytest.mark.ledger("S4.1.1f.1")
def test_a_longer_key_changes_the_output_as_recomputed():
    q, k, v = worked()
    alphas = (0.0, 0.5, 1.001, 3.0)
    got = perturbation.key_length(q, k, v, 4, alphas)
    for s, alpha in enumerate(alphas):
        changed = k.clone()
        changed[4] *= alpha
        assert torch.allclose(got.exact[s], attend(q, changed, v) - attend(q, k, v), atol=1e-12)
    near = got.exact[2]
    assert (got.first_order[2] - near).abs().max() < 1e-3 * near.abs().max()
    assert (got.first_order[3] - got.exact[3]).abs().max() > 0.05 * got.exact[3].abs().max()


@pytest.mark.ledger("S4.1.1e.1", "S4.1.1e.2")
def test_noise_on_a_key_changes_the_mean_too():
    q, k, v = worked()
    got = perturbation.key_noise(q, k, v, 4, (0.05, 0.8))
    g = torch.Generator().manual_seed(0)
    for s, sigma in enumerate((0.05, 0.8)):
        noise = sigma * torch.randn(200_000, 5, generator=g, dtype=torch.float64)
        scores = 5**-0.5 * q @ k.T
        drawn = scores[:, None, 4] + 5**-0.5 * q @ noise.T
        rest = (scores.exp().sum(-1) - scores[:, 4].exp())[:, None]
        weight = drawn.exp() / (drawn.exp() + rest)
        a = scores.softmax(-1)[:, 4:5]
        part = (weight - a) / (1 - a)
        towards = v[4] - attend(q, k, v)
        assert torch.allclose(got.mean[s], part.mean(-1)[:, None] * towards, atol=6 * sigma / 200_000**0.5)
        assert torch.allclose(got.deviation[s], part.std(-1)[:, None] * towards.abs(), rtol=0.02)
    assert torch.allclose(got.mean[0], got.mean_first_order[0], rtol=0.05, atol=1e-6)
    assert torch.allclose(got.deviation[0], got.deviation_first_order[0], rtol=0.01)


@pytest.mark.ledger("S4.1.1e.1", "S4.1.1f.1")
@pytest.mark.parametrize("name", ["key.shift", "key.scale_2", "key.scale_10"])
def test_a_changed_key_of_the_ledger(name):
    c = case(name)
    q, k, v, new = (torch.tensor(c["inputs"][x], dtype=torch.float64) for x in ("Q", "K", "V", "new_key"))
    got = perturbation.key_change(q, k, v, c["inputs"]["index"], new[None], c["inputs"]["beta"])
    shown = [
        {"exact_change": e.tolist(), "first_order_change": f.tolist()}
        for e, f in zip(got.exact[0], got.first_order[0])
    ]
    expected = [{x: row[x] for x in ("exact_change", "first_order_change")} for row in c["expected"]]
    assert agrees(shown, expected, c["compare"])


@pytest.mark.ledger("S4.1.1e.1")
def test_the_noise_of_the_ledger():
    c = case("key.noise_0.125")
    q, k, v = (torch.tensor(c["inputs"][x], dtype=torch.float64) for x in ("Q", "K", "V"))
    got = perturbation.key_noise(q, k, v, c["inputs"]["index"], [c["inputs"]["sigma"]], c["inputs"]["beta"])
    shown = [
        {"mean_change": m, "std_change": d, "mean_second_order": m2, "std_first_order": d1}
        for m, d, m2, d1 in zip(
            *(
                x[0].tolist()
                for x in (got.mean, got.deviation, got.mean_first_order, got.deviation_first_order)
            )
        )
    ]
    assert agrees(shown, c["expected"], c["compare"])


def test_rollout_is_the_product_of_the_layers():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    view = look(nn.TransformerEncoder(layer, 3).train(), torch.randn(1, 7, 16))
    truth = torch.eye(7)
    for call in view.calls:
        truth = (0.5 * torch.eye(7) + 0.5 * call.weights().mean(0)) @ truth
    assert torch.allclose(view.rollout(), truth, atol=1e-6)
    assert torch.allclose(view.rollout(rows=[5, 2]), truth[[5, 2]], atol=1e-6)
    assert torch.allclose(view.rollout().sum(-1), torch.ones(7), atol=1e-5)


def test_rollout_of_more_than_one_stack_is_refused():
    view = look(
        nn.Transformer(16, 2, 1, 1, 32, batch_first=True), (torch.randn(1, 7, 16), torch.randn(1, 5, 16))
    )
    with pytest.raises(rg.ShapeError, match=r"rollout multiplies the layers of one stack .* \(5 × 7\)"):
        rollout(view.calls)
    with pytest.raises(rg.ShapeError, match="rollout needs at least one self-attention"):
        rollout([])
    assert view.rollout().shape == (7, 7)


@pytest.mark.parametrize("given, words", [
    ({"rows": [0, 7]}, "query 7 of layer .* it has 7 queries, 0 to 6"),
    ({"rows": [-1]}, "query -1 of layer"),
    ({"batch": 2}, "batch row 2 of .* it has 2 rows, 0 to 1"),
    ({"residual": 1.5}, "residual=1.5: it is the share of the residual connection, from 0 to 1"),
])  # fmt: skip
def test_rollout_refuses_what_does_not_exist(given, words):
    with pytest.raises(rg.RegardError, match=words):
        look(Heads(), X).rollout(**given)


@dataclass
class Answer:
    states: torch.Tensor


class TakesADictionary(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, batch):
        return Answer(self.layer(batch["x"], src_key_padding_mask=batch["padding"]))


def test_heads_of_a_model_with_one_dictionary_as_its_argument_and_a_dataclass_as_its_output_are_removed():
    model, x, padding = TakesADictionary().eval(), torch.randn(1, 5, 16), torch.zeros(1, 5, dtype=torch.bool)
    view, plain = rg.look(model, {"x": x, "padding": padding}), rg.look(model.layer, x)
    torch.testing.assert_close(view.map(0, 1), plain.map(0, 1))
    assert view.remove_heads().effects == pytest.approx(plain.remove_heads().effects)
