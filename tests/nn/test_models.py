"""Whole models: every preset built and run, padding, caches, heads, pictures, and a folder to keep them in."""

import dataclasses
from itertools import pairwise

import pytest
import torch
from torch.overrides import TorchFunctionMode

import regard as rg
from ledger_cases import case, cases
from long_cases import in_long
from regard import Attention, Block, Embedding, Encoder, EncoderDecoder, FeedForward, Vision
from regard.errors import FormatError, RegardError, ShapeError, SpecError
from regard.nn.serialization import WEIGHTS
from regard.spec import catalogue

f64 = torch.float64
PUBLIC = {
    "bert-base": 109_482_240,
    "gpt2": 124_439_808,
    "t5-small": 60_506_624,
    "vit-b16": 86_567_656,
    "transformer-base": 44_138_496 + 37_000 * 512,
}


def count(module):
    return sum(p.numel() for p in module.parameters())


def built(declared, seed=0):
    torch.manual_seed(seed)
    return declared.build().to(f64).eval()


def ids(*shape, vocab=50, seed=0):
    return torch.randint(1, vocab, shape, generator=torch.Generator().manual_seed(seed))


def shrunk(declared):
    """The preset with few layers and a small vocabulary: the same parts, quick to run."""
    match declared:
        case EncoderDecoder():
            return dataclasses.replace(
                declared, encoder=shrunk(declared.encoder), decoder=shrunk(declared.decoder)
            )
        case Vision():
            return dataclasses.replace(
                declared,
                encoder=dataclasses.replace(declared.encoder, layers=2),
                image=(32, 32),
                patch=(8, 8),
            )
    embedding = dataclasses.replace(declared.embedding, vocab=50)
    return dataclasses.replace(declared, layers=2, embedding=embedding)


def run(model, n=7):
    match model.spec:
        case EncoderDecoder():
            return model(ids(2, 5), ids(2, n, seed=1))
        case Vision():
            images = torch.randn(2, model.spec.channels, *model.spec.image)
            return model(images.to(next(model.parameters()).dtype))
    return model(ids(2, n))


@pytest.mark.ledger("S4.1.5b.1", "S4.1.5c.2")
@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_model_has_its_public_number_of_parameters(name):
    with torch.device("meta"):
        assert count(rg.preset(name).build()) == PUBLIC[name]


@pytest.mark.ledger("S1.Q5a.1")
@pytest.mark.parametrize("c", cases("params.transformer"), ids=lambda c: c["id"])
def test_a_transformer_has_the_parameters_the_ledger_counts(c):
    given = c["inputs"]
    assert given["bias"]
    with torch.device("meta"):
        declared = catalogue.transformer(
            given["d_model"],
            given["heads"],
            given["d_ff"],
            max(1, given["enc_layers"]),
            vocab=given["vocab"] or 1,
        )
        sides = {}
        for side, layers in (("encoder", given["enc_layers"]), ("decoder", given["dec_layers"])):
            stack = dataclasses.replace(
                getattr(declared, side),
                layers=max(1, layers),
                embedding=None,
                head=None,
                final_norm=given["final_norms"],
            )
            sides[side] = count(stack.build()) if layers else 0
    table = given["vocab"] * given["d_model"] * (1 if given["tied"] else 3)
    assert sides["encoder"] + sides["decoder"] + table == c["expected"]["total"]


@pytest.mark.ledger("S4.1.5a.2", "S4.1.5b.1", "S4.1.5d.1")
@pytest.mark.parametrize("c", cases("params.vit"), ids=lambda c: c["id"])
def test_a_vision_transformer_has_the_parameters_the_ledger_counts(c):
    g = c["inputs"]
    block = Block(
        Attention(g["d_model"], heads=g["heads"]), FeedForward(g["d_ff"], activation="gelu"), norm_at="pre"
    )
    declared = Vision(
        Encoder(block, g["layers"]),
        image=(g["image"],) * 2,
        patch=(g["patch"],) * 2,
        channels=g["channels"],
        class_token=g["cls_token"],
        head=rg.ClassifierHead(g["classes"], pool="first" if g["cls_token"] else "mean"),
    )
    with torch.device("meta"):
        model = declared.build()
    assert count(model) == c["expected"]["total"]
    if "tokens" in c["expected"]:
        assert declared.tokens == c["expected"]["tokens"]


@pytest.mark.ledger("S4.1.5b.3", "S1.Q5a.2", "S1.Q5a.3", "S4.1.5b.2")
@pytest.mark.parametrize(
    "name", [*(p for p in rg.presets() if p != "transformer-big"), *in_long("transformer-big")]
)
def test_every_preset_runs_and_every_parameter_learns(name):
    torch.manual_seed(0)
    model = shrunk(rg.preset(name)).build()
    out = run(model)
    assert out.isfinite().all()
    torch.manual_seed(1)
    target = torch.randn_like(out)
    (out * target).sum().backward()
    silent = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    # a bias on all keys changes no weight, so its gradient is rounding or nothing
    assert [n for n in silent if not n.endswith("w_k.bias")] == []
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.ledger("S1.Q5a.2", "S1.Q5a.3", "S4.1.5b.2", "S4.1.5b.3", "S1.Q5a.7")
def test_a_model_is_embedding_blocks_norm_and_head_in_this_order():
    """Token ids in: E[id] √d + PE, then block after block, the final norm, and x Eᵀ over the vocabulary out."""
    embedding = Embedding(11, 8, position=rg.sinusoidal(), scaled=True)
    block = Block(Attention(8, heads=2), rg.FeedForward(16), norm_at="pre")
    model = built(Encoder(block, 3, embedding=embedding, head=rg.LanguageHead()))
    assert model.head.table is None  # tied
    x = ids(2, 5) % 11
    with torch.no_grad():
        state = model.embedding.table[x] * 8**0.5
        for position in range(5):
            for i in range(4):
                angle = torch.tensor(position / 10000 ** (2 * i / 8), dtype=f64)
                state[:, position, 2 * i] += angle.sin()
                state[:, position, 2 * i + 1] += angle.cos()
        states = []
        for each in model.blocks:
            state = each(state)
            states.append(state)
        mean, variance = state.mean(-1, keepdim=True), state.var(-1, correction=0, keepdim=True)
        normed = (state - mean) / (variance + 1e-5).sqrt()
        assert torch.allclose(model(x), normed @ model.embedding.table.T, atol=1e-10)
    assert len(states) == 3 and all((a - b).abs().max() > 0.1 for a, b in pairwise(states))


@pytest.mark.ledger("S1.Q5a.1", "S1.Q5a.5")
def test_hello_world_has_the_attention_tables_of_the_ledger():
    c = case("shapes.hello_world")
    given, expected = c["inputs"], c["expected"]
    model = built(catalogue.transformer(64, given["heads"], 64, 2, vocab=9))
    logits, seen = model(
        ids(1, given["src_len"], vocab=9), ids(1, given["tgt_len"], vocab=9), return_weights=True
    )
    assert logits.shape == (1, given["tgt_len"], 9)
    assert torch.equal(logits, model(ids(1, given["src_len"], vocab=9), ids(1, given["tgt_len"], vocab=9)))
    for layer in seen["encoder"]:
        assert list(layer["self"].shape[1:]) == expected["encoder_self"]
    for layer in seen["decoder"]:
        assert list(layer["self"].shape[1:]) == expected["decoder_self"]
        assert list(layer["cross"].shape[1:]) == expected["cross"]
        assert (layer["self"][0, 0] > 0).sum() == expected["decoder_self_allowed"]


@pytest.mark.ledger("S3.Q2b.0", "S3.Q2b.1", "S3.Q2b.2", "S3.Q2b.3", "S1.Q3a.5", "S0.Q2b.9")
@pytest.mark.parametrize("name", ["tiny", "t5-small", "bert-base", "gpt2", "tiny-gpt", "tiny-classifier"])
def test_padding_has_no_effect(name):
    model = built(shrunk(rg.preset(name)))
    x, y, lengths = ids(3, 7), ids(3, 5, seed=1), torch.tensor([7, 3, 5])

    def forward(x):
        if isinstance(model.spec, EncoderDecoder):
            return model(x, y, source_lengths=lengths)
        return model(x, lengths=lengths)

    other = torch.where(torch.arange(7) < lengths[:, None], x, ids(3, 7, seed=9))
    assert not torch.equal(other, x)
    one, two = forward(x), forward(other)
    if one.dim() == 3 and not isinstance(model.spec, EncoderDecoder):
        real = torch.arange(7) < lengths[:, None]
        one, two = one[real], two[real]
    assert torch.allclose(one, two, atol=1e-12)
    if name in ("gpt2", "tiny-gpt"):  # causal, padded on the right: real positions need no lengths
        assert torch.allclose(model(x)[real], one, atol=1e-12) and torch.allclose(
            model(other)[real], one, atol=1e-12
        )
        assert not torch.allclose(model(x)[~real], model(other)[~real], atol=1e-6)
    else:  # control: what is not causal needs the lengths
        without = model(x, y) if isinstance(model.spec, EncoderDecoder) else model(x)
        assert not torch.allclose(without[1], forward(x)[1], atol=1e-6)


@pytest.mark.ledger("S1.Q5b.2")
@pytest.mark.parametrize("name", ["tiny", "t5-small", "transformer-base"])
def test_decoding_step_by_step_equals_the_full_pass(name):
    model = built(shrunk(rg.preset(name)))
    source, target, lengths = ids(2, 5), ids(2, 7, seed=1), torch.tensor([5, 2])
    with torch.no_grad():
        whole = model(source, target, source_lengths=lengths)
        states, cache = model.encode(source, lengths), model.decoder.cache()
        steps = [
            model.decoder(target[:, t : t + 1], states, context_lengths=lengths, cache=cache)
            for t in range(7)
        ]
    assert torch.allclose(torch.cat(steps, 1), whole, atol=1e-11)


@pytest.mark.parametrize("name", ["gpt2", "tiny-gpt"])
def test_a_language_model_continues_rows_of_different_lengths(name):
    model = built(shrunk(rg.preset(name)))
    x, lengths = ids(3, 9), torch.tensor([2, 5, 1])
    with torch.no_grad():
        whole, cache = model(x), model.cache()
        first = model(x[:, :5], lengths=lengths, cache=cache)
        for b, l in enumerate(lengths.tolist()):
            assert torch.allclose(first[b, :l], whole[b, :l], atol=1e-11)
        for t in range(4):
            at = lengths + t
            step = model(x[torch.arange(3), at][:, None], cache=cache)
            assert torch.allclose(step[:, 0], whole[torch.arange(3), at], atol=1e-11)


def test_a_learned_position_past_its_table_is_refused_before_it_wraps():
    embedding = Embedding(50, 8, position=rg.learned(6))
    model = built(Encoder(Block(Attention(8, heads=2), None), 1, embedding=embedding))
    with pytest.raises(ShapeError) as e:
        model(ids(1, 7))
    assert str(e.value).startswith("position 6 is past the learned table of 6: shorten the input")


@pytest.mark.ledger("S4.1.5a.2", "S4.1.5a.1")
def test_cutting_patches_and_a_linear_map_is_a_convolution():
    """L40: cut into P × P patches, flatten, multiply = the convolution with kernel = stride = P."""
    model = built(shrunk(rg.preset("vit-b16")))
    images = torch.randn(2, 3, 32, 32, dtype=f64, generator=torch.Generator().manual_seed(0))
    cut = torch.nn.functional.unfold(images, 8, stride=8).mT
    by_hand = cut @ model.patches.weight.flatten(1).mT + model.patches.bias
    assert torch.allclose(model.patches(images).flatten(2).mT, by_hand, atol=1e-12)
    # what the encoder gets: the class token, then the patches row by row, plus the learned positions
    seen = []
    hook = model.encoder.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        model.class_token.normal_()
        model(images)
    hook.remove()
    tokens = torch.cat([model.class_token.expand(2, 1, -1), by_hand], 1) + model.position.table
    assert torch.allclose(seen[0], tokens, atol=1e-12)


@pytest.mark.ledger("S4.1.5d.1", "S4.1.5d.2")
def test_the_vision_head_reads_the_class_token_after_the_encoder():
    declared = shrunk(rg.preset("tiny-vit"))
    model = built(declared)
    images = torch.randn(2, 1, *declared.image, dtype=f64, generator=torch.Generator().manual_seed(0))
    states = built(dataclasses.replace(declared, head=None))
    states.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("head")})
    assert torch.equal(model(images), model.head.w_out(model.head.hidden(states(images)[:, 0]).tanh()))
    seen = []
    states.encoder.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        states(images)
        states.class_token += 1.0
        states(images)
    moved = (seen[1] - seen[0]).abs().amax((0, 2))
    assert moved[0] == pytest.approx(1.0) and moved[1:].max() == 0  # the first token is the class token
    linear = rg.ClassifierHead(7, pool="first")
    assert built(dataclasses.replace(declared, head=linear)).head.w_out.weight.shape == (7, declared.d_model)


@pytest.mark.ledger("S1.Q3a.5")
def test_documents_in_one_row_equal_each_alone():
    attention = Attention(8, heads=2, pattern=rg.causal())
    embedding = Embedding(50, 8, position=rg.learned(6))
    model = built(
        Encoder(Block(attention, rg.FeedForward(8)), 2, embedding=embedding, head=rg.LanguageHead())
    )
    first, second = ids(2, 4), ids(2, 3, seed=1)
    documents = torch.tensor([[5] * 4 + [2] * 3]).expand(2, 7)
    packed = model(torch.cat([first, second], 1), documents=documents)
    assert torch.allclose(packed[:, :4], model(first), atol=1e-12)
    assert torch.allclose(packed[:, 4:], model(second), atol=1e-12)


@pytest.mark.parametrize(
    "declared, given",
    [
        (rg.causal() & (rg.window(1) | rg.every(3)), None),
        (rg.causal() & (rg.window(0) | rg.sinks(1)), rg.window(2)),
        (rg.blocks(2), None),
        (rg.causal(), rg.window(0) | rg.every(2)),
        (rg.every(2) | rg.window(0), rg.per_head([rg.blocks(2), rg.causal()])),
    ],
    ids=str,
)
def test_patterns_count_positions_within_each_document(declared, given):
    block = Block(Attention(8, heads=2, pattern=declared, position=rg.rope()), rg.FeedForward(8))
    model = built(Encoder(block, 2, embedding=Embedding(50, 8), head=rg.LanguageHead(), checkpoint=True))
    texts = [ids(2, 5), ids(2, 3, seed=1), ids(2, 4, seed=2)]
    documents = torch.tensor([[0] * 5 + [1] * 3 + [2] * 4]).expand(2, 12)
    packed = model(torch.cat(texts, 1), documents=documents, pattern=given)
    alone = torch.cat([model(text, pattern=given) for text in texts], 1)
    assert torch.allclose(packed, alone, atol=1e-12)
    table = torch.ones(12, 12, dtype=torch.bool)
    if given is None:
        assert torch.allclose(
            model(torch.cat(texts, 1), documents=documents, pattern=table), alone, atol=1e-12
        )


class Largest(TorchFunctionMode):
    """The size of the largest tensor that a function of PyTorch returns."""

    size = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.size = max(self.size, result.numel() if isinstance(result, torch.Tensor) else 0)
        return result


def test_packed_documents_whose_pattern_names_positions_make_no_table():
    """A table of n × n pairs is neither short nor sparse."""
    documents, within = torch.tensor([[0] * 700 + [1] * 900]), rg.causal() & (rg.window(8) | rg.sinks(2))
    block = Block(Attention(16, heads=2, pattern=within), rg.FeedForward(16))
    model = built(Encoder(block, 1, embedding=Embedding(50, 16), head=rg.LanguageHead()))
    with Largest() as largest:
        packed = model(ids(1, 1600), documents=documents)
    assert largest.size < 1600**2 / 8
    alone = [model(text) for text in ids(1, 1600).split([700, 900], 1)]
    assert torch.allclose(packed, torch.cat(alone, 1), atol=1e-12)


def test_an_image_of_another_size_is_refused():
    model = built(rg.preset("tiny-vit"))
    with pytest.raises(ShapeError) as e:
        model(torch.zeros(1, 1, 9, 8, dtype=f64))
    assert str(e.value) == "images have shape (1, 9, 8); declared is (channels, height, width) = (1, 8, 8)"


@pytest.mark.ledger("S2.1.3.1")
@pytest.mark.parametrize(
    "position",
    [rg.sinusoidal(grid=(4, 4)), rg.learned((4, 4)), rg.learned(17)],
    ids=["sines", "grid", "line"],
)
def test_images_take_positions_of_a_grid_or_of_a_line(position):
    declared = dataclasses.replace(rg.preset("tiny-vit"), position=position)
    model = built(declared)
    images = torch.randn(2, 1, 8, 8, dtype=f64)
    turned = images.flip(-1)
    assert (model(images) - model(turned)).abs().max() > 1e-6


@pytest.mark.parametrize("kind", [rg.quadratic, rg.relative_table, rg.rope])
def test_images_take_relative_positions_inside_attention(kind):
    block = Block(Attention(32, heads=2, position=kind(grid=(4, 4))), FeedForward(32), norm_at="pre")
    declared = Vision(
        Encoder(block, 2),
        image=(8, 8),
        patch=(2, 2),
        channels=1,
        class_token=False,
        head=rg.ClassifierHead(3),
    )
    model = built(declared)
    assert model(torch.randn(2, 1, 8, 8, dtype=f64)).shape == (2, 3)
    assert rg.from_json(declared.json()) == declared


@pytest.mark.parametrize("name", ["tiny", "tiny-gpt", "tiny-vit"])
def test_recomputing_blocks_in_the_backward_pass_changes_nothing(name):
    declared = shrunk(rg.preset(name))
    plain = built(declared)
    if isinstance(declared, EncoderDecoder):
        again = dataclasses.replace(
            declared,
            encoder=dataclasses.replace(declared.encoder, checkpoint=True),
            decoder=dataclasses.replace(declared.decoder, checkpoint=True),
        )
    elif isinstance(declared, Vision):
        again = dataclasses.replace(declared, encoder=dataclasses.replace(declared.encoder, checkpoint=True))
    else:
        again = dataclasses.replace(declared, checkpoint=True)
    again = built(again)
    again.load_state_dict(plain.state_dict())
    for model in (plain, again):
        torch.manual_seed(3)
        run(model).square().sum().backward()
    for a, b in zip(plain.parameters(), again.parameters()):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad)


def test_untied_heads_have_their_own_table():
    declared = dataclasses.replace(shrunk(rg.preset("gpt2")), head=rg.LanguageHead(tied=False, bias=True))
    model = built(declared)
    assert count(model) - count(built(shrunk(rg.preset("gpt2")))) == 50 * 768 + 50


def test_token_types_need_a_declaration():
    model = built(shrunk(rg.preset("gpt2")))
    with pytest.raises(ShapeError) as e:
        model(ids(1, 3), types=torch.zeros(1, 3, dtype=torch.long))
    assert str(e.value) == "token types were given, but the embedding declares none; set types=2 there"
    bert = built(shrunk(rg.preset("bert-base")))
    assert not torch.equal(bert(ids(1, 3)), bert(ids(1, 3), types=torch.ones(1, 3, dtype=torch.long)))


@pytest.mark.parametrize(
    "name",
    [
        *("t5-small", "vit-b16", "tiny", "tiny-gpt", "tiny-bert", "tiny-classifier"),
        *in_long("transformer-base", "bert-base", "gpt2", "tiny-vit"),
    ],
)
def test_a_model_comes_back_from_its_folder(name, tmp_path):
    model = built(shrunk(rg.preset(name))).float()
    rg.save(model, tmp_path / "m")
    back = rg.load(tmp_path / "m").eval()
    assert back.spec == model.spec
    torch.manual_seed(5)
    one = run(model)
    torch.manual_seed(5)
    assert torch.equal(one, run(back))


def test_tied_weights_are_stored_once_and_tied_again(tmp_path):
    model = shrunk(rg.preset("transformer-base")).build()
    rg.save(model, tmp_path)
    stored = (tmp_path / WEIGHTS).stat().st_size
    assert stored < 4 * count(model) + 50_000
    back = rg.load(tmp_path)
    assert back.decoder.embedding.table is back.encoder.embedding.table


def test_the_folder_of_a_run_names_its_model(tmp_path):
    rg.save(rg.preset("tiny-classifier").build(), tmp_path / "model")
    with pytest.raises(FormatError) as refused:
        rg.load(tmp_path)
    inside = str(tmp_path / "model")
    assert str(refused.value) == f"{tmp_path} is the folder of a run; load its model: rg.load({inside!r})"


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(FormatError, match=r"contains no config\.json; a folder written by rg\.save has"):
        rg.load(tmp_path)
    rg.save(rg.preset("tiny-classifier").build(), tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FormatError, match=r"config\.json is damaged or was changed"):
        rg.load(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(FormatError, match="is not JSON"):
        rg.load(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(FormatError, match="expected a JSON object, not list"):
        rg.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FormatError, match="is not in regard's format 1"):
        rg.load(tmp_path)
    rg.save(rg.preset("tiny-classifier").build(), tmp_path)
    other = rg.preset("tiny-gpt").build()
    rg.save(other, tmp_path / "other")
    (tmp_path / WEIGHTS).write_bytes((tmp_path / "other" / WEIGHTS).read_bytes())
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(FormatError, match="does not match its declaration"):
        rg.load(tmp_path)
    with pytest.raises(RegardError) as e:
        rg.save(torch.nn.Linear(2, 2), tmp_path)
    assert str(e.value) == "Linear was not built from a spec, so it has no declaration to save"
    with pytest.raises(RegardError, match="DataParallel wraps a model; save the model itself"):
        rg.save(torch.nn.DataParallel(built(rg.preset("tiny-vit"))), tmp_path)


def test_a_decoder_without_a_context_says_so():
    model = built(shrunk(rg.preset("tiny")))
    with pytest.raises(ShapeError) as e:
        model.decoder(ids(1, 3))
    assert str(e.value) == "this block needs a context"
    with pytest.raises(ShapeError) as e:
        model.encoder(ids(1, 3), torch.zeros(1, 3, 128, dtype=f64))
    assert str(e.value) == "this block has no cross-attention for a context"
    with pytest.raises(ShapeError) as e:
        model.encoder(torch.zeros(1, 3, 128, dtype=f64))
    assert str(e.value) == "this stack has an embedding and takes token ids, not torch.float64 vectors"


@pytest.mark.ledger("S0.Q1d.5", "S4.1.3b.1")
def test_cat_chased_dog_and_dog_chased_cat_are_the_same_vectors_in_another_order():
    """Without positions: token by token equal, the mean equal, the sequence not; a causal mask tells them apart."""
    one, two = torch.tensor([[0, 1, 2]]), torch.tensor([[2, 1, 0]])

    def states(pattern):
        block = Block(Attention(12, heads=3, pattern=pattern), FeedForward(20))
        model = built(Encoder(block, 2, embedding=Embedding(3, 12)))
        return model(one)[0], model(two)[0]

    a, b = states(rg.full())
    assert torch.allclose(a, b[[2, 1, 0]], atol=1e-12) and torch.allclose(a.mean(0), b.mean(0), atol=1e-12)
    assert (a - b).abs().max() > 1e-3
    a, b = states(rg.causal())
    assert (a.mean(0) - b.mean(0)).abs().max() > 1e-3


@pytest.mark.ledger("S1.Q5b.3")
def test_the_likelihood_of_all_sequences_is_one_with_a_causal_mask_only():
    """Σ over all v^T sequences of Π p(y_t | y_<t) = 1; without the mask it is not (L30)."""
    v, steps = 3, 3
    every = torch.cartesian_prod(*[torch.arange(v)] * steps)
    shifted = torch.cat([torch.full((len(every), 1), v), every[:, :-1]], 1)  # v is the start token

    def total(pattern):
        block = Block(Attention(12, heads=3, pattern=pattern), FeedForward(20))
        embedding = Embedding(v + 1, 12, position=rg.sinusoidal())
        model = built(Encoder(block, 2, embedding=embedding, head=rg.LanguageHead(tied=False)))
        for p in model.parameters():
            if p.dim() > 1:
                torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(1))
        p = model(shifted)[..., :v].log_softmax(-1)
        return p.gather(-1, every[..., None]).sum((1, 2)).exp().sum().item()

    assert total(rg.causal()) == pytest.approx(1.0, abs=1e-12)
    assert abs(total(rg.full()) - 1.0) > 1e-2


def cached(model, *batches):
    cache = model.cache()
    for rows in batches:
        model(torch.zeros(rows, 2, dtype=torch.long), cache=cache)


def one_layer():
    return rg.Attention(8, heads=2).build()


WRONG_INPUTS = {  # the first case is shape-checked: it has the declared types
    "the cache has 2 layers and this model 4; use model.cache()": lambda gpt: gpt(
        torch.zeros(1, 2, dtype=torch.long), cache=rg.Cache(2)
    ),
    "token ids of shape (b, n) are needed, one row per text, not (3,)": lambda gpt: gpt(
        torch.zeros(3).long()
    ),
    "token ids of shape (b, n) are needed, one row per text, not list": lambda gpt: gpt([[1, 2]]),
    "x of shape (b, n, d_model) is needed, not (5, 8)": lambda gpt: one_layer()(torch.randn(5, 8)),
    "'causal()' is not a pattern; use rg.causal(), rg.window(2), … or a bool tensor; of a text, "
    "rg.Pattern.from_text('causal()')": lambda gpt: one_layer()(torch.randn(1, 5, 8), pattern="causal()"),
    "the cache has 3 batch rows and this call 1; `cache.select(rows)` keeps or repeats rows": lambda gpt: (
        cached(gpt, 3, 3, 1)
    ),
    "the cache has 1 batch rows and this call 2; `cache.select(rows)` keeps or repeats rows": lambda gpt: (
        cached(gpt, 1, 2)
    ),
}


@pytest.mark.parametrize("message", WRONG_INPUTS)
@torch.no_grad()
def test_inputs_that_do_not_fit_are_described(message):
    with pytest.raises(rg.RegardError) as refused:
        WRONG_INPUTS[message](rg.preset("tiny-gpt").build().eval())
    assert str(refused.value) == message


@torch.no_grad()
def test_a_layer_takes_a_pattern_for_each_head():
    layer, x, heads = one_layer(), torch.randn(1, 5, 8), [rg.causal(), rg.window(1)]
    assert torch.equal(layer(x, pattern=heads), layer(x, pattern=rg.per_head(heads)))


@torch.no_grad()
def test_a_prompt_is_continued_in_several_ways():
    model = rg.preset("tiny-gpt").build().eval()
    prompt, next_tokens = torch.tensor([[5, 6, 7]]), torch.tensor([[1], [2], [3]])
    cache = model.cache()
    model(prompt, cache=cache)
    cache.select(torch.zeros(3, dtype=torch.long))
    expected = model(torch.cat([prompt.expand(3, -1), next_tokens], 1))[:, -1:]
    torch.testing.assert_close(model(next_tokens, cache=cache), expected)


TINY = Encoder(Block(Attention(8, heads=2), FeedForward(8)), 1, embedding=Embedding(11, 8, types=3))


@pytest.mark.parametrize(
    ("ids", "types", "message"),
    [
        ([[1, 11, 0]], None, "token id 11 has no embedding: vocab=11 is declared, 0 to 10"),
        ([[1, -2, 12]], None, "token id -2 has no embedding: vocab=11 is declared, 0 to 10"),
        ([[1, 2, 3]], [[0, 3, 0]], "token type 3 has no embedding: types=3 is declared, 0 to 2"),
    ],
)
def test_an_id_without_an_embedding_is_named(ids, types, message):
    model = TINY.build()
    with pytest.raises(ShapeError) as e:
        model(torch.tensor(ids), types=None if types is None else torch.tensor(types))
    assert str(e.value) == message
    with pytest.raises(
        ShapeError, match=r"token ids are torch\.int16; whole numbers of 32 or 64 bits are needed"
    ):
        model(torch.tensor([[1, 2]], dtype=torch.int16))


BLOCK = Block(Attention(8, heads=2), FeedForward(8))
MODULES = {
    "attention": (Attention(8, heads=2), [(1, 3, 8)], "MultiHeadAttention", "x, context, values, lengths, "),
    "block": (BLOCK, [(1, 3, 8)], "MultiHeadAttention", "x, context, values, lengths, "),
    "encoder": (Encoder(BLOCK, 1), [(1, 3, 8)], "Stack", "x, context, lengths, "),
    "encoder-decoder": (
        EncoderDecoder(
            Encoder(BLOCK, 1), rg.Decoder(dataclasses.replace(BLOCK, cross=Attention(8, heads=2)), 1)
        ),
        [(1, 3, 8), (1, 2, 8)],
        "EncoderDecoder",
        "source, target, source_lengths, target_lengths, return_weights",
    ),
    "vision": (
        Vision(Encoder(BLOCK, 1), image=(4, 4), patch=(2, 2)),
        [(1, 3, 4, 4)],
        "Vision",
        "images, return_weights",
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_an_argument_of_another_library_says_what_a_module_takes(name):
    declared, shapes, kind, takes = MODULES[name]
    module, inputs = declared.build(), [torch.randn(shape) for shape in shapes]
    module(*inputs)
    with pytest.raises(SpecError) as e:
        module(*inputs, key_padding_mask=None)
    assert str(e.value).startswith(
        f"key_padding_mask is not an argument of {kind}: padding is given as the number of real tokens of each row, "
        f"(~mask).sum(-1) if True is padding. It takes {takes}"
    )
    with pytest.raises(
        TypeError, match=f"^{kind} got an unexpected keyword argument 'foo'; it takes {takes}"
    ):
        module(*inputs, foo=1)
