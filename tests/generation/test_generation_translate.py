"""`regard translate`: a sentence, a file, stdin; what cannot be read is named."""

import json

import pytest
import torch
from typer.testing import CliRunner

import regard as rg
from regard.cli.main import app
from regard.training import recipes
from regard.training.data.datasets import SentencePairs
from regard.training.data.tokens import bpe
from regard.training.recipes.translation import max_source_tokens, translate

TEXTS = ["the red cat sees the dog", "no dog is red", "", "¿qué ves, gato?"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run as training leaves it."""
    folder = tmp_path_factory.mktemp("run")
    recipe = recipes.translate(None, d_model=16, layers=1, heads=2, data=SentencePairs(vocab=300))
    torch.manual_seed(0)
    rg.save(recipe.model.build(), folder / "model")
    (folder / "recipe.json").write_text(recipe.json())
    (folder / "tokens.json").write_text(bpe(TEXTS, 300).json())
    return folder


def regard(*words, code=0, given=None):
    done = CliRunner().invoke(app, ["translate", *map(str, words)], input=given)
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done


def test_a_sentence_a_file_and_stdin_say_the_same(run, tmp_path):
    model, tokens, _ = rg.training.recipes.run.open_run(run)
    said = translate(model, tokens, TEXTS)
    assert said[2] == "" and len(set(said)) > 2
    (tmp_path / "in.txt").write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    from_file = regard("--model", run, "--file", tmp_path / "in.txt").stdout
    from_stdin = regard("--model", run, given="\r\n".join(TEXTS)).stdout
    marked = regard("--model", run, given=("\ufeff" + "\n".join(TEXTS)).encode()).stdout
    assert from_file == from_stdin == marked == "\n".join(said) + "\n"
    assert regard(TEXTS[0], "--model", run).stdout == said[0] + "\n"
    assert regard(TEXTS[1], TEXTS[0], "--model", run).stdout == f"{said[1]}\n{said[0]}\n"
    as_json = regard("--model", run, "--json", given="\n".join(TEXTS)).stdout.splitlines()
    assert [json.loads(line) for line in as_json] == [
        {"source": a, "target": b} for a, b in zip(TEXTS, said, strict=True)
    ]


def test_a_beam_search_is_requested_by_its_width(run):
    model, tokens, _ = rg.training.recipes.run.open_run(run)
    strategy = rg.generation.beam(3)
    assert (
        regard(TEXTS[1], "--model", run, "--beam", 3).stdout
        == translate(model, tokens, TEXTS[1:2], strategy)[0] + "\n"
    )


def test_a_sentence_longer_than_the_model_reads_is_cut_and_named(run):
    finished = regard("--model", run, given="a dog\n" + "z" * 150)
    assert "line 2 has 151 tokens; the first 120 are translated: zzzz" in finished.stderr
    assert len(finished.stdout.splitlines()) == 2
    later = regard("--model", run, given="\n" * 1030 + "z" * 150)  # read in parts of 1,024 lines
    assert "line 1031 has 151 tokens" in later.stderr


def test_no_text_is_longer_than_a_learned_table():
    words = rg.Embedding(300, 16, position=rg.learned(9))
    own, mlp = rg.Attention(16, heads=2), rg.FeedForward(16)
    past = rg.Attention(16, heads=2, pattern=rg.causal())
    spec = rg.EncoderDecoder(
        rg.Encoder(rg.Block(own, mlp), 1, embedding=words),
        rg.Decoder(rg.Block(past, mlp, cross=own), 1, embedding=words, head=rg.LanguageHead()),
    )
    model = spec.build()
    assert max_source_tokens(model) == 9
    assert len(translate(model, bpe(TEXTS, 300), ["z" * 40])) == 1


REFUSED = {
    "give sentences or a file, not both": ("hello", "--file", "x.txt"),
    "there is no file none.txt": ("--file", "none.txt"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_translated_is_refused(message, run):
    with pytest.raises(rg.RegardError) as refused:
        regard("--model", run, *REFUSED[message])
    assert str(refused.value) == message


@pytest.mark.parametrize(
    "texts, message",
    [
        (None, "texts=None: a text is needed, or a list of texts"),
        (b"hello", "texts=b'hello': a text is needed, or a list of texts"),
        (["a", 3], "text 1 is 3, of type int, not a str"),
        ("a \ud800", "text 0 has '\\ud800' as character 2, which is not Unicode; read it as UTF-8"),
    ],
)
def test_what_is_no_text_is_refused(texts, message, run):
    with pytest.raises(rg.RegardError) as refused:
        rg.translate(texts, model=run)
    assert str(refused.value) == message


def test_a_text_that_is_cut_is_warned_about(run):
    with pytest.warns(UserWarning, match=r"^text 1 has 151 tokens; the first 120 are translated: zzzz"):
        rg.translate(["a dog", "z" * 150], model=run)


def test_bytes_that_are_no_text_and_a_folder_without_a_run_are_refused(run, tmp_path):
    with pytest.raises(rg.FormatError, match=r"^stdin, line 2: byte 3 is not UTF-8 \(invalid start byte\)$"):
        regard("--model", run, given=b"good\nno\xff\n")
    with pytest.raises(rg.FormatError, match=r"contains no recipe\.json; train there first"):
        regard("hello", "--model", tmp_path)
