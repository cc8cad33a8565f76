"""Weights as 8-bit integers: a quarter of the size, rounded by a known amount, tied weights stored once."""

import json

import pytest
import torch

import regard as rg
from regard.errors import FormatError, SpecError


def model() -> torch.nn.Module:
    embedding = rg.Embedding(97, 16, position=rg.learned(11))
    own, past = rg.Attention(16, heads=2), rg.Attention(16, heads=2, pattern=rg.causal())
    plain, block = rg.Block(own, rg.FeedForward(24)), rg.Block(past, rg.FeedForward(24), cross=own)
    torch.manual_seed(0)
    return rg.EncoderDecoder(
        rg.Encoder(plain, 1, embedding=embedding),
        rg.Decoder(block, 1, embedding=embedding, head=rg.LanguageHead()),
        share_embedding=True,
    ).build()


def test_each_row_is_rounded_to_a_254th_of_its_largest_weight(tmp_path):
    before = model()
    rg.save(before, tmp_path, weights="int8")
    after = rg.load(tmp_path)
    for (name, a), b in zip(before.named_parameters(), after.parameters(), strict=True):
        if a.dim() == 2:
            assert bool(((a - b).abs() <= a.abs().amax(1, keepdim=True) / 254 * 1.001).all()), name
            assert not torch.equal(a, b), name
        else:
            assert torch.equal(a, b), name


def test_a_second_save_gives_the_same_file(tmp_path):
    rg.save(model(), tmp_path / "a", weights="int8")
    rg.save(rg.load(tmp_path / "a"), tmp_path / "b", weights="int8")
    one, other = (rg.load(tmp_path / name) for name in "ab")
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=0)


def test_tied_weights_are_stored_once_and_tied_again(tmp_path):
    rg.save(model(), tmp_path / "int8", weights="int8")
    rg.save(model(), tmp_path / "float")
    loaded = rg.load(tmp_path / "int8")
    assert loaded.encoder.embedding.table is loaded.decoder.embedding.table
    small, large = ((tmp_path / n / "model.safetensors").stat().st_size for n in ("int8", "float"))
    assert small < 0.6 * large  # the names weigh much in a model this small


def test_zero_rows_stay_zero(tmp_path):
    before = model()
    with torch.no_grad():
        before.encoder.embedding.table[3] = 0.0
    rg.save(before, tmp_path, weights="int8")
    assert not bool(rg.load(tmp_path).encoder.embedding.table[3].any())


def test_weights_are_float_or_int8(tmp_path):
    with pytest.raises(SpecError, match="weights='int4'; use 'float' or 'int8'"):
        rg.save(model(), tmp_path, weights="int4")


def test_weights_of_another_declaration_are_refused(tmp_path):
    rg.save(model(), tmp_path, weights="int8")
    config = json.loads((tmp_path / "config.json").read_text())
    config["spec"]["encoder"]["layers"] = 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        FormatError, match=r"does not match its declaration: encoder\.blocks\.1\S+ is in only one"
    ):
        rg.load(tmp_path)
