"""Export: CTranslate2, given our weights, says what we say."""

import json
from dataclasses import replace

import ctranslate2
import pytest
import torch
import typer
from typer.testing import CliRunner

import regard as rg
from regard.cli.export import export as export_command
from regard.generation import beam, generate
from regard.interop.ctranslate2 import to_ctranslate2
from regard.training import recipes
from regard.training.data.datasets import SentencePairs
from regard.training.data.tokens import Tokens, bpe
from regard.training.recipes.export import export
from regard.training.recipes.translation import translate

VOCAB, END = 31, 2
WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(4, VOCAB))]


def declared(
    norm_at="post", final=None, place=None, embedding=None, mlp=None, head=None, block=None, **attention
):
    """An encoder-decoder 2 + 1 layers deep."""
    own = rg.Attention(12, heads=3, **attention)
    past = replace(own, pattern=rg.causal())
    place = rg.sinusoidal() if place is None else place
    words = rg.Embedding(VOCAB, 12, position=place, **(embedding or {}))
    feed = rg.FeedForward(20, **(mlp or {}))
    around = {"norm_at": norm_at, **(block or {})}
    return rg.EncoderDecoder(
        rg.Encoder(rg.Block(own, feed, **around), 2, embedding=words, final_norm=final),
        rg.Decoder(
            rg.Block(past, feed, cross=own, **around),
            1,
            embedding=words,
            head=rg.LanguageHead(**(head or {})),
            final_norm=final,
        ),
        share_embedding=True,
    )


def built(spec):
    """Every weight drawn, the norms' and the biases too, so that none can be left behind unseen."""
    model = spec.build().eval()
    noise = torch.Generator().manual_seed(5)
    for name, p in model.named_parameters():
        ones = 1.0 if name.endswith("norm.weight") else 0.0
        p.data = ones + 0.5 * torch.randn(p.shape, generator=noise)
    return model


KINDS = {
    "post": {},
    "pre": {"norm_at": "pre"},
    "pre without a final norm": {"norm_at": "pre", "final": False},
    "post with a final norm": {"final": True},
    "scaled, halves": {"embedding": {"scaled": True}, "place": rg.sinusoidal(order="halves")},
    "learned, normed": {"place": rg.learned(40), "embedding": {"norm": True}},
    "gelu, own head": {"mlp": {"activation": "gelu"}, "head": {"tied": False, "bias": True}},
    "gated, rms": {
        "mlp": {"activation": "swiglu", "bias": False},
        "block": {"norm": "rms"},
        "norm_at": "pre",
    },
    "no biases": {"biases": "none", "block": {"norm_bias": False, "eps": 1e-3}},
    "scales": {"scale": 0.9, "head": {"scaled": True}, "biases": "output"},
}


@pytest.fixture(params=KINDS)
def both(request, tmp_path):
    model = built(declared(**KINDS[request.param]))
    to_ctranslate2(model, WORDS, tmp_path / "out", positions=40)
    return model, ctranslate2.Translator(str(tmp_path / "out"), device="cpu", intra_threads=1)


def sources():
    noise = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 12, (17,), generator=noise)
    source = torch.randint(4, VOCAB, (17, 11), generator=noise)
    return (
        source,
        lengths,
        [[WORDS[i] for i in row[:n]] for row, n in zip(source.tolist(), lengths, strict=True)],
    )


def test_ctranslate2_says_what_we_say_greedily_and_by_beams(both):
    model, theirs = both
    source, lengths, said = sources()
    for width in (1, 4):
        strategy = rg.generation.greedy() if width == 1 else beam(width, length_penalty=0.0)
        ours = generate(
            model, [[1]] * 17, strategy, source=source, source_lengths=lengths, max_new_tokens=15, eos_id=END
        )
        results = theirs.translate_batch(
            said,
            beam_size=width,
            length_penalty=0.0,
            patience=100,
            max_decoding_length=15,
            min_decoding_length=0,
            return_scores=True,
        )
        assert [[WORDS[i] for i in row] for row in ours.rows()] == [t.hypotheses[0] for t in results]
        if width > 1:  # they normalize greedy scores by length
            assert ours.log_probs.tolist() == pytest.approx([t.scores[0] for t in results], abs=1e-3)


@torch.no_grad()
def test_every_token_is_as_likely_there_as_here(both):
    model, theirs = both
    source, lengths, said = sources()
    target = torch.cat([torch.ones(17, 1, dtype=torch.long), source.flip(0)[:, :7]], 1)
    log_p = model(source, target, source_lengths=lengths).log_softmax(-1)
    wanted = torch.cat([target[:, 1:], torch.full((17, 1), END)], 1)
    ours = log_p.gather(-1, wanted[..., None])[..., 0]
    results = theirs.score_batch(said, [[WORDS[i] for i in row[1:]] for row in target.tolist()])
    assert torch.allclose(ours, torch.tensor([t.log_probs for t in results]), atol=2e-4)
    assert float(ours.std()) > 0.5, "a model that finds every token alike would prove nothing"


OWN = declared().encoder.block.attention
REFUSED = {
    "CTranslate2 takes an EncoderDecoder here, not Stack": lambda: declared().encoder,
    "CTranslate2 cannot run the encoder's position=rope(): positions are added to the input": lambda: (
        declared(position=rg.rope())
    ),
    "CTranslate2 cannot run the encoder's score='additive': it compares by dot products": lambda: declared(
        score="additive"
    ),
    "CTranslate2 cannot run the encoder's kv_heads=1: every head has its own keys": lambda: declared(
        kv_heads=1
    ),
    "CTranslate2 cannot run the encoder's d_k=5, d_v=4: d_model / heads = 4 is what it has": lambda: declared(
        d_k=5
    ),
    "CTranslate2 cannot run the encoder's scale=inf: it takes a number above 0": lambda: declared(
        temperature=0
    ),
    "CTranslate2 cannot run the encoder's pattern=window(2): its pattern is full()": lambda: changed(
        "encoder", attention=replace(OWN, pattern=rg.window(2))
    ),
    "CTranslate2 cannot run the decoder's pattern=causal() & window(2): its pattern is causal()": lambda: (
        changed("decoder", attention=replace(OWN, pattern=rg.causal() & rg.window(2)))
    ),
    "CTranslate2 cannot run the encoder's pattern=per_head([full(), window(2), full()]): its pattern is full()": (
        lambda: changed("encoder", attention=replace(OWN, pattern=[rg.full(), rg.window(2), rg.full()]))
    ),
    "CTranslate2 cannot run the decoder's heads=2 and 3: a stack has one number of heads": lambda: changed(
        "decoder", cross=replace(OWN, heads=2)
    ),
    "CTranslate2 cannot run the encoder's residual=False: every branch is added to its input": lambda: (
        declared(block={"residual": False})
    ),
    "CTranslate2 cannot run the encoder's norm='batch': it has layer and rms norms": lambda: declared(
        block={"norm": "batch"}
    ),
    "CTranslate2 cannot run the encoder's eps=1e-06, 1e-05: all norms share one": lambda: changed(
        "encoder", eps=1e-6
    ),
    "CTranslate2 cannot run the encoder's types=2: it has no token types": lambda: declared(
        embedding={"types": 2}
    ),
    "CTranslate2 cannot run the encoder's position=learned(8, beyond='resample'): its table is not resampled": (
        lambda: declared(place=rg.learned(8, beyond="resample"))
    ),
}


def changed(side, **fields):
    whole = declared()
    stack = getattr(whole, side)
    return replace(whole, **{side: replace(stack, block=replace(stack.block, **fields))})


@pytest.mark.parametrize("message", REFUSED)
def test_what_ctranslate2_has_no_word_for_is_refused_by_name(message, tmp_path):
    with pytest.raises(rg.SpecError) as refused:
        to_ctranslate2(REFUSED[message]().build(), WORDS, tmp_path / "out")
    assert str(refused.value) == message
    assert not (tmp_path / "out").exists()


def test_a_folder_in_use_and_foreign_words_are_refused(tmp_path):
    model = declared().build()
    with pytest.raises(rg.FormatError, match="32 words and a model of 31; these are another model's words"):
        to_ctranslate2(model, [*WORDS, "more"], tmp_path / "out")
    (tmp_path / "here").write_text("mine")
    with pytest.raises(rg.FormatError, match="is not empty; give a new folder"):
        to_ctranslate2(model, WORDS, tmp_path)


@torch.no_grad()
def test_a_model_may_have_more_rows_than_words_and_needs_no_table(tmp_path):
    plain = replace(rg.Embedding(VOCAB, 12), position=None)
    whole = declared()
    spec = replace(
        whole,
        encoder=replace(whole.encoder, embedding=plain),
        decoder=replace(whole.decoder, embedding=plain),
    )
    out = to_ctranslate2(built(spec), WORDS[:20], tmp_path / "out")
    results = ctranslate2.Translator(str(out), device="cpu", intra_threads=1).score_batch(
        [["w5", "w4"]], [["w6"]]
    )
    again = built(spec)(torch.tensor([[5, 4]]), torch.tensor([[1, 6]])).log_softmax(-1)
    assert results[0].log_probs == pytest.approx([float(again[0, 0, 6]), float(again[0, 1, END])], abs=1e-4)


@pytest.fixture
def run(tmp_path):
    """The folder of a run as training leaves it."""
    texts = ["the red cat sees the dog", "no dog is red", "¿qué ves, gato?"]
    tokens, folder = bpe(texts, 300), tmp_path / "run"
    recipe = recipes.translate(None, d_model=16, layers=1, heads=2, data=SentencePairs(vocab=310))
    rg.save(built(recipe.model), folder / "model")
    (folder / "recipe.json").write_text(recipe.json())
    (folder / "tokens.json").write_text(tokens.json())
    return folder, texts


def test_a_run_is_exported_with_its_tokens_and_translates_the_same(run, tmp_path):
    folder, texts = run
    called = CliRunner().invoke(_alone(), [str(folder), "--out", str(tmp_path / "ct2"), "--json"])
    assert called.exit_code == 0, called.output
    results = json.loads(called.stdout)
    assert results["format"] == "ctranslate2" and "model.bin" in results["bytes"]
    theirs = ctranslate2.Translator(str(tmp_path / "ct2"), device="cpu", intra_threads=1)
    tokens = Tokens.from_json((tmp_path / "ct2" / "tokens.json").read_text())
    read = [tokens.tokenizer.encode(t).tokens for t in texts]
    said = [
        theirs.translate_batch([r], beam_size=1, min_decoding_length=0, max_decoding_length=2 * len(r) + 10)
        for r in read
    ]
    ids = [[tokens.tokenizer.token_to_id(w) or 0 for w in s[0].hypotheses[0]] for s in said]
    assert tokens.decode(ids) == translate(rg.load(folder / "model"), tokens, texts)


def test_an_unknown_format_and_a_missing_run_are_refused(run, tmp_path):
    with pytest.raises(rg.SpecError, match=r"^to='ctranslate' is unknown; did you mean ctranslate2\?$"):
        export(run[0], tmp_path / "out", "ctranslate")
    with pytest.raises(rg.FormatError, match=r"contains no recipe\.json; train there first"):
        export(tmp_path / "none", tmp_path / "out")


def _alone() -> typer.Typer:
    app = typer.Typer()
    app.command()(export_command)
    return app
