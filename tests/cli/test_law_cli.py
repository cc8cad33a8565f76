"""`regard check` on the command line: its input, its output, its exit code."""

import json

import pytest

typer_testing = pytest.importorskip("typer.testing")

from regard.cli import check as module  # noqa: E402
from regard.cli.main import app  # noqa: E402
from regard.errors import SpecError  # noqa: E402
from regard.laws import LAWS  # noqa: E402

MINE = """
import torch.nn.functional as F

def good(q, k, v, attn_mask=None, is_causal=False):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal)

def leaky(q, k, v, is_causal=False):
    return F.scaled_dot_product_attention(q, k, v)

def raising(q, k, v):
    raise RuntimeError("needs a GPU")
"""


def run(*words):
    return typer_testing.CliRunner().invoke(app, ["check", *words])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_attentions.py").write_text(MINE)
    (tmp_path / "dying.py").write_text("raise ValueError('at import')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_function_of_the_current_folder_that_holds(folder):
    done = run("my_attentions:good", "--law", "causality", "--law", "L02", "--cases", "3")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("good: 2 hold\n✓ L29 causality")
    assert done.stderr.startswith("checking good …")


def test_a_broken_law_ends_with_1_and_shows_the_case_and_a_snippet(folder):
    done = run("my_attentions:leaky", "--law", "causality", "--cases", "3")
    assert done.exit_code == 1
    assert "✗ L29 causality" in done.stdout and "smallest case: " in done.stdout
    assert done.stdout.splitlines()[1] == "likely cause: causal is ignored: queries attend to the future"
    assert "import my_attentions" in done.stdout and "replay('L29'" in done.stdout


def test_json_is_data(folder):
    done = run("my_attentions:good", "--law", "P01", "--claim", "nan under mask", "--cases", "6", "--json")
    data = json.loads(done.stdout)
    assert data["exit_code"] == done.exit_code == 1
    assert data["laws"][0]["number"] == "P01" and data["laws"][0]["status"] == "broken"


def test_if_no_law_could_run_the_exit_code_is_2(folder):
    done = run("my_attentions:raising", "--law", "L41")
    assert done.exit_code == 2


def test_a_class_is_built_with_the_sizes_given():
    done = run(
        "torch.nn:MultiheadAttention", "--heads", "2", "--d-model", "8", "--law", "L19", "--cases", "3"
    )
    assert done.exit_code == 0 and "torch.nn.MultiheadAttention: 1 holds" in done.stdout


def test_sdpa_needs_no_adapter():
    done = run("torch.nn.functional:scaled_dot_product_attention", "--law", "rows sum to one", "--cases", "3")
    assert done.exit_code == 0 and done.stdout.startswith(
        "torch.nn.functional.scaled_dot_product_attention: 1 holds"
    )


def test_a_hugging_face_configuration(tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "gpt2-config.json"
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 29, "bos_token_id": 0, "eos_token_id": 0}
    path.write_text(json.dumps({"model_type": "gpt2", **sizes}))
    done = run(f"hf:{path}", "--law", "causality", "--cases", "2")
    assert done.exit_code == 0 and "GPT2LMHeadModel" in done.stdout


def test_a_claim_on_the_command_line_is_checked(folder):
    done = run("my_attentions:good", "--law", "P01", "--claim", "nan under mask", "--cases", "6")
    assert done.exit_code == 1 and "P01" in done.stdout


def test_a_page_is_written(folder):
    done = run("my_attentions:good", "--law", "L02", "--cases", "2", "--html", "out.html")
    assert done.exit_code == 0 and "wrote out.html" in done.stderr
    assert (folder / "out.html").read_text("utf-8").startswith("<!doctype html>")


def test_the_laws_are_listed():
    done = run("--list")
    assert done.exit_code == 0 and len(done.stdout.splitlines()) == len(LAWS)
    listed = json.loads(run("--list", "--json").stdout)
    assert listed[0] == {**listed[0], "number": "L01", "name": "rows sum to one", "promise": None}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), r"no target; give a preset"),
        (("my_attentions:god",), r"my_attentions has no 'god'; did you mean good\?"),
        (("dying:f",), r"dying:f: importing it raised ValueError: at import"),
        (
            ("my_attentions:good", "--law", "causalty"),
            r"no law is called 'causalty'; did you mean causality\?",
        ),
        (("my_attentions:good", "--claim", "nan"), r"claims has 'nan'; "),
        (
            ("my_attentions:good", "--heads", "4"),
            r"good is already built; heads can only be given for a class",
        ),
        (
            ("my_attentions:good", "--law", "L02", "--cases", "1", "--html", "no/such/folder.html"),
            r"--html no/such/folder\.html: there is no folder no/such",
        ),
    ],
)
def test_the_message_of_a_bad_request_names_the_problem(folder, words, message):
    done = run(*words)
    assert isinstance(done.exception, SpecError)  # which `regard` turns into one line and exit code 2
    with pytest.raises(SpecError, match=message):
        raise done.exception


def test_a_terminal_shows_a_table(folder, monkeypatch, capsys):
    pytest.importorskip("rich")
    from regard.laws import adapters, check

    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    module._show(check(adapters.sdpa(), ["L02", "L41"], 2))
    shown = capsys.readouterr().out
    assert "convex hull" in shown and "not applicable" in shown


def test_a_file_and_a_name_are_enough(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    done = run(f"{tmp_path.name}/my_attentions.py:good", "--law", "L02", "--cases", "3")
    assert done.exit_code == 0, done.output
    missing = run("nowhere.py:good")
    assert isinstance(missing.exception, SpecError) and str(missing.exception) == "file not found: nowhere.py"
    other = run(f"{tmp_path.name}/my_attentions.py:goood")
    assert isinstance(other.exception, SpecError) and "did you mean good" in str(other.exception)


def test_a_factory_and_what_it_makes_can_be_named(folder):
    (folder / "made.py").write_text(
        "import torch\n"
        "def make():\n    return torch.nn.LayerNorm(5)\n"
        "def columns(q, k, v):\n    return v @ (k.mT @ q / q.shape[-2] ** 0.5).softmax(-2)\n"
        "def forward_only(q, k, v):\n"
        "    return torch.nn.functional.scaled_dot_product_attention(q, k, v).detach()\n"
    )
    assert run("made.py:make", "--law", "L38", "--as", "layer-norm", "--cases", "2").exit_code == 0
    found = run("made.py:columns", "--law", "L05", "--cases", "2")
    assert found.exit_code == 0 and "layout (b, h, d, n), found by probing" in found.stdout
    assert run("made.py:columns", "--law", "L05", "--with", "layout=b h d n", "--cases", "2").exit_code == 0
    assert run("made.py:forward_only", "--law", "L50", "--cases", "2").exit_code == 1
    assert (
        run(
            "made.py:forward_only", "--law", "L50", "--law", "L02", "--with", "lacks=grad", "--cases", "2"
        ).exit_code
        == 0
    )
    bad = run("made.py:make", "--with", "warmup")
    assert isinstance(bad.exception, SpecError) and "--with 'warmup' is not of the form name=value" in str(
        bad.exception
    )
