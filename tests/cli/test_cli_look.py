"""`regard look`: a model and an input by name, numbers on stdout, talk on stderr."""

import json

import numpy
import pytest
import torch

import regard as rg
from lens_models import small

typer = pytest.importorskip("typer")
from typer.testing import CliRunner  # noqa: E402

from regard.cli.look import look  # noqa: E402
from regard.cli.models import LoadedModel, encoded, load, namer, own_output, read_input  # noqa: E402
from regard.training.data.tokens import START, characters  # noqa: E402
from regard.training.recipes import recipe  # noqa: E402
from training_run_case import regard  # noqa: E402

app = typer.Typer()
app.command()(look)


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def folder(tmp_path):
    return rg.save(small(), tmp_path / "checkpoint")


def test_a_regard_checkpoint_gives_a_table(folder):
    result = run(folder, "3,1,4,1,5")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split()[:4] == ["layer", "head", "role", "kind"] and len(lines) == 7


def test_json_goes_to_stdout_and_messages_do_not(folder):
    result = run(folder, "random:7", "--json", "--effects")
    data = json.loads(result.stdout)
    assert data["title"] == "Stack" and data["layers"][0]["n"] == 7 and len(data["heads"]) == 6
    assert all(row["effect"] > 0 for row in data["heads"])


def test_numbers_are_written_to_the_given_file(folder, tmp_path):
    result = run(folder, "3,1,4", "--out", tmp_path / "heads.json")
    assert result.stdout == "" and "written: " in result.stderr
    assert len(json.loads((tmp_path / "heads.json").read_text())["heads"]) == 6


def test_a_hugging_face_configuration_is_built_with_random_weights(tmp_path):
    tf = pytest.importorskip("transformers")
    config = tf.T5Config(d_model=32, num_layers=2, num_heads=4, d_kv=8, d_ff=64, vocab_size=50)
    config.save_pretrained(tmp_path)
    result = run(f"hf:{tmp_path / 'config.json'}", "random:7", "--target", "3,4,5", "--json")
    assert result.exit_code == 0, result.output
    assert "has no weights: they are random, not trained" in result.stderr
    roles = [layer["role"] for layer in json.loads(result.stdout)["layers"]]
    assert roles == ["self", "self", "self", "cross", "self", "cross"]


def test_a_hugging_face_folder_keeps_its_weights(tmp_path):
    tf = pytest.importorskip("transformers")
    torch.manual_seed(5)
    plain = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = tf.BertModel(tf.BertConfig(vocab_size=50, **plain)).eval()
    model.save_pretrained(tmp_path)
    asked = load(str(tmp_path))
    assert torch.equal(asked.model.embeddings.word_embeddings.weight, model.embeddings.word_embeddings.weight)


def test_a_function_that_returns_a_model_is_called(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text("from lens_models import small\nthree = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert run("my_models:small", "3,1,4").exit_code == 0
    with pytest.raises(
        rg.SpecError, match="my_models:three is a int; expected a model, or a function that returns one"
    ):
        load("my_models:three")
    with pytest.raises(rg.SpecError, match=r"builtins:dict\(\) returned a dict; expected a model"):
        load("builtins:dict")


def test_a_text_without_tokens_is_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    for given in ("", str(tmp_path / "empty.txt")):
        with pytest.raises(rg.SpecError, match=r"^'' has no tokens; pass a text$"):
            read_input(given, LoadedModel(torch.nn.Identity(), characters(["abc"]), None))


def test_a_text_needs_a_tokenizer(folder):
    asked = load(str(folder))
    with pytest.raises(rg.SpecError, match="this model has no tokenizer, so 'the cat' is not an input"):
        read_input("the cat", asked)
    with pytest.raises(rg.FormatError, match="'random:many': write random:64 for 64 random tokens"):
        read_input("random:many", asked)
    with pytest.raises(
        rg.SpecError, match="is an image, and the configuration of this model has no image size"
    ):
        read_input("cat.png", asked)
    with pytest.raises(rg.FormatError, match=r"cannot read .*nothing.npy as an array: "):
        read_input("nothing.npy", asked)


def test_an_array_has_the_dtype_of_the_weights_and_a_batch_axis(tmp_path):
    """numpy's numbers are float64, which a model in float32 does not run on."""
    vectors = numpy.linspace(0, 1, 14).reshape(1, 7, 2)
    for name, array in {
        "v": vectors,
        "ids": numpy.arange(7)[None],
        "flat": numpy.arange(7),
        "words": ["a"],
    }.items():
        numpy.save(tmp_path / f"{name}.npy", array)
    (tmp_path / "empty.npy").write_text("")
    for dtype in (torch.float32, torch.bfloat16):
        asked = LoadedModel(torch.nn.Linear(2, 2, dtype=dtype), None, None)
        read = read_input(str(tmp_path / "v.npy"), asked)
        assert read.dtype == dtype and torch.equal(read, torch.from_numpy(vectors).to(dtype))
        assert read_input(str(tmp_path / "ids.npy"), asked).dtype == torch.int64
    with pytest.raises(
        rg.FormatError, match=r"flat.npy has the shape \(7,\); the first axis of an input is the batch"
    ):
        read_input(str(tmp_path / "flat.npy"), asked)
    for name in ("words", "empty"):
        with pytest.raises(rg.FormatError, match=f"cannot read .*{name}.npy as an array: "):
            read_input(str(tmp_path / f"{name}.npy"), asked)


def test_a_text_with_its_tokenizer_has_its_tokens(folder):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"the": 0, "cat": 1, "<unk>": 2}
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<unk>"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    own.save(str(folder / "tokenizer.json"))
    assert read_input("the cat the dog", load(str(folder))).tolist() == [[0, 1, 0, 2]]
    text = folder / "text.txt"
    text.write_text("cat cat")
    assert read_input(str(text), load(str(folder))).tolist() == [[1, 1]]


def test_an_image_is_resized_to_the_input_of_the_model(tmp_path):
    pil = pytest.importorskip("PIL.Image")
    tf = pytest.importorskip("transformers")
    plain = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    tf.ViTConfig(image_size=32, patch_size=8, **plain).save_pretrained(tmp_path)
    pil.new("RGB", (50, 40), (255, 0, 0)).save(tmp_path / "red.png")
    asked = load(str(tmp_path))
    pixels = read_input(str(tmp_path / "red.png"), asked)
    assert pixels.shape == (1, 3, 32, 32) and pixels[0, 0].min() == 1 and pixels[0, 1].max() == -1
    (tmp_path / "bad.png").write_text("no image")
    with pytest.raises(rg.FormatError, match=r"cannot read .*bad.png as an image"):
        read_input(str(tmp_path / "bad.png"), asked)


@pytest.fixture
def finished(tmp_path):
    """The folder of a run, as `regard train` leaves it: recipe, tokens, and the model one deeper."""
    from regard.training.data.tokens import characters
    from regard.training.recipes.run import MODEL, RECIPE, TOKENS

    tokens = characters(["abc def"])
    folder = tmp_path / "run"
    declared = rg.preset("tiny-gpt")
    assert len(tokens) <= declared.embedding.vocab
    rg.save(declared.build(), folder / MODEL)
    (folder / RECIPE).write_text("{}")
    (folder / TOKENS).write_text(tokens.json())
    return folder


def test_a_run_folder_tokenizes_texts_with_its_own_tokens(finished):
    result = run(finished, "fade", "--json")
    assert result.exit_code == 0, result.output
    layer = json.loads(result.stdout)["layers"][0]
    assert layer["n"] == 4 and load(str(finished)).model.spec == rg.preset("tiny-gpt")
    asked = load(str(finished))
    assert namer(asked.tokenizer)(encoded("fade", asked.tokenizer)) == list("fade")
    assert read_input("fade", asked).tolist() == [asked.tokenizer.encode(["fade"])[0]]


def test_a_run_without_a_model_yet_gets_a_hint(tmp_path):
    (tmp_path / "recipe.json").write_text(recipe("translate").json())
    with pytest.raises(
        rg.FormatError, match=r"has no model yet; `regard train .*` continues the run$"
    ) as hint:
        load(str(tmp_path))
    command = str(hint.value).split("`")[1]
    assert command == f"regard train {tmp_path}/recipe.json --out {tmp_path}"
    assert json.loads(regard(*command.split()[1:], "--show")) == json.loads(recipe("translate").json())


def test_a_decoder_without_a_target_reads_what_the_model_generates(tmp_path):
    torch.manual_seed(3)
    model = rg.preset("tiny").build().eval()
    rg.save(model, tmp_path / "model")
    source = "5,6,7,8,9"
    written = own_output(load(str(tmp_path / "model")), torch.tensor([[5, 6, 7, 8, 9]]))
    assert written[0, 0] == START and written.shape[1] != 5
    result = run(tmp_path / "model", source, "--json")
    assert result.exit_code == 0 and "the decoder reads what the model generates" in result.stderr
    sizes = [(layer["n"], layer["m"]) for layer in json.loads(result.stdout)["layers"]]
    n = written.shape[1]
    assert set(sizes) == {(5, 5), (n, n), (n, 5)}
    given = run(tmp_path / "model", source, "--target", "1,6,7", "--json")
    assert "generates" not in given.stderr and {
        layer["n"] for layer in json.loads(given.stdout)["layers"]
    } == {5, 3}


def test_an_encoder_decoder_of_transformers_reads_its_own_output(tmp_path):
    config = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config |= {"vocab_size": 40, "decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run(tmp_path / "config.json", "5,6,7", "--json")
    assert result.exit_code == 0 and "the decoder reads what the model generates" in result.stderr
    assert {layer["m"] for layer in json.loads(result.stdout)["layers"]} != {3}


def test_a_language_model_of_hugging_face_keeps_its_head_and_has_no_empty_tokenizer(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=16)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    loaded = load(str(tmp_path))
    assert type(loaded.model).__name__ == "GPT2LMHeadModel" and loaded.tokenizer is None
    space = {}
    exec(loaded.python, space)
    assert torch.equal(space["model"].lm_head.weight, loaded.model.lm_head.weight)


def test_the_line_of_python_imports_the_model_from_its_module(tmp_path, monkeypatch):
    """`torch.nn:Identity` was imported from torch, and an object had its own name in place of model."""
    (tmp_path / "mine_.py").write_text("import torch\nlayer = torch.nn.Identity()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for source in ("torch.nn:Identity", "mine_.py:layer"):
        space = {}
        exec(load(source).python, space)
        assert isinstance(space["model"], torch.nn.Identity)
