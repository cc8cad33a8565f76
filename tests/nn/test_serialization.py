"""Saved models: 8-bit weights are rounded by a known amount, and no damaged file is loaded as another model."""

import json
import random

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
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(
        FormatError, match=r"does not match its declaration: encoder\.blocks\.1\S+ is in only one"
    ):
        rg.load(tmp_path)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return rg.save(model(), tmp_path_factory.mktemp("stored"))


def copy_of(folder, to):
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "manifest.json"])
def test_no_single_bit_flip_and_no_cut_gives_another_model(stored, tmp_path, name):
    folder, rng = copy_of(stored, tmp_path), random.Random(name)
    right, whole = rg.load(stored).state_dict(), (stored / name).read_bytes()
    for _ in range(25):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        for content in (bytes(damaged), whole[: rng.randrange(len(whole))]):
            (folder / name).write_bytes(content)
            try:
                loaded = rg.load(folder).state_dict()
            except rg.FormatError as error:
                assert str(folder) in str(error)
            else:  # a bit that changes nothing, such as in the white space of the manifest
                assert name == "manifest.json"
                assert all(torch.equal(right[key], value) for key, value in loaded.items())


def test_weights_of_another_model_of_the_same_shape_are_refused(stored, tmp_path):
    folder = copy_of(stored, tmp_path)
    torch.manual_seed(1)
    other = rg.save(rg.from_json(model().spec.json()).build(), tmp_path / "other")
    (folder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    with pytest.raises(
        rg.FormatError, match=r"safetensors is damaged or was changed: .* delete .*manifest\.json"
    ):
        rg.load(folder)
    (folder / "manifest.json").unlink()  # as the message says: the change is meant
    rg.load(folder)


def test_weights_that_are_not_finite_are_refused_unless_requested(tmp_path):
    broken = model()
    with torch.no_grad():
        next(broken.parameters())[0, 0] = float("nan")
    rg.save(broken, tmp_path)
    with pytest.raises(rg.FormatError, match=r"has NaN or infinite values; rg\.load"):
        rg.load(tmp_path)
    assert bool(next(rg.load(tmp_path, allow_non_finite=True).parameters()).isnan().any())


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(rg.RegardError, match="cannot save a model in"):
        rg.save(model(), tmp_path / "file")


@pytest.mark.parametrize("weights", ["float", "int8"])
def test_a_compiled_model_is_saved_as_the_model_itself(tmp_path, weights):
    """Its weights were stored under other names, in a folder that could not be loaded."""
    before = model()
    rg.save(torch.compile(before, backend="eager"), tmp_path / "compiled", weights=weights)
    rg.save(before, tmp_path / "plain", weights=weights)
    loaded = [rg.load(tmp_path / name).state_dict() for name in ("compiled", "plain")]
    assert all(torch.equal(a, b) for a, b in zip(*(x.values() for x in loaded), strict=True))


def changed(name: str) -> torch.nn.Module:
    """A model that was changed after it was built."""
    made = model()
    if name == "more":
        made.decoder.blocks[0].adapter = torch.nn.Linear(16, 16, bias=False)
    elif name == "fewer":
        made.decoder.norm = torch.nn.Identity()
        del made.encoder.blocks[0].feed_forward.w_in.bias
    else:
        made.encoder.blocks[0].attention.w_o = torch.nn.Linear(16, 9)
    return made


CHANGED = {
    "more": "this EncoderDecoder has 'decoder.blocks.0.adapter.weight', other than its declaration, so rg.load could "
    "not read it; save the EncoderDecoder as it was built, or its state_dict() by safetensors",
    "fewer": "this EncoderDecoder lacks 'encoder.blocks.0.feed_forward.w_in.bias', other than its declaration, so "
    "rg.load could not read it; save the EncoderDecoder as it was built, or its state_dict() by safetensors",
    "other": "encoder.blocks.0.attention.w_o.weight has shape (9, 16) and by its declaration (16, 16), so rg.load "
    "could not read it; change the declaration, and build it again",
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_could_not_be_loaded_is_not_saved(tmp_path, name):
    with pytest.raises(rg.RegardError) as refused:
        rg.save(changed(name), tmp_path / "model")
    assert str(refused.value) == CHANGED[name] and not (tmp_path / "model").exists()


def test_a_declaration_is_not_saved_as_a_model(tmp_path):
    with pytest.raises(rg.RegardError) as refused:
        rg.save(model().spec, tmp_path)
    assert str(refused.value) == "EncoderDecoder is a declaration without weights; save spec.build()"


def test_saving_does_not_draw_random_numbers(tmp_path):
    before = model()
    state = torch.get_rng_state()
    rg.save(before, tmp_path)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "device, text",
    [
        ("foo", "device='foo' is unknown; use 'cpu', 'cuda' or 'cuda:1'"),
        ("meta", "device='meta' has no values to load; use 'cpu' or 'cuda'"),
        ("cuda", "device='cuda': PyTorch finds no GPU on this machine; use device='cpu'"),
    ],
)
def test_a_device_that_cannot_hold_the_model_is_refused(tmp_path, device, text, monkeypatch):
    """On the device meta the file was called damaged."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rg.save(model(), tmp_path)
    with pytest.raises(rg.RegardError) as refused:
        rg.load(tmp_path, device=device)
    assert str(refused.value) == text
