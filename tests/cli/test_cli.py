"""The command line: what a word names, what is printed where, which exit code."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import regard as rg
from regard.cli import targets
from regard.cli.main import COMMANDS, app, load_command
from regard.pattern import parse_pattern


def regard(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, words)
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.stdout


def test_the_presets_are_listed_as_text_and_as_json():
    assert regard("presets").split() == list(rg.presets())
    assert json.loads(regard("presets", "--json")) == list(rg.presets())


def test_a_declaration_goes_out_as_json_and_comes_back(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(regard("show", "tiny-gpt"))
    assert targets.read(str(file)) == rg.preset("tiny-gpt")
    assert regard("show", str(file)) == file.read_text()


def test_yaml_declares_the_same_value(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "kind: Attention\nd_model: 12\nheads: 3\npattern: {kind: window, before: 2, after: null}\n"
    )
    assert targets.read(str(file)) == rg.Attention(12, heads=3, pattern=rg.window(2))


def test_yaml_runs_no_code(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("kind: !!python/object/apply:os.system ['true']\n")
    with pytest.raises(rg.FormatError, match="is not YAML: could not determine a constructor"):
        targets.read(str(file))


def test_a_checkpoint_folder_names_its_model(tmp_path):
    torch.manual_seed(0)
    model = rg.Attention(12, heads=3).build()
    rg.save(model, tmp_path / "run")
    read = targets.read(str(tmp_path / "run"))
    assert read.spec == model.spec
    assert all(torch.equal(a, b) for a, b in zip(read.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("form", ["{}", "hf:{}"])
def test_a_hugging_face_configuration_is_read_without_a_download(tmp_path, form):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "gpt2", "n_layer": 3, "transformers_version": "5.0.0"}))
    config = targets.read(form.format(file))
    assert (config.model_type, config.n_layer) == ("gpt2", 3)
    assert targets.read(f"hf:{tmp_path}").n_layer == 3


def test_python_objects_are_found_on_the_path_and_in_the_current_folder(tmp_path, monkeypatch):
    assert targets.read("torch.nn.functional:softmax") is torch.nn.functional.softmax
    assert targets.read("torch:nn.Linear") is torch.nn.Linear
    (tmp_path / "my_attention_of_today.py").write_text("def mine(q, k, v):\n    return v\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != ""])
    assert targets.read("my_attention_of_today:mine")(1, 2, 3) == 3


PATTERNS = [
    rg.causal() & (rg.window(128) | rg.every(64)),
    ~rg.every(4, offset=1) - rg.sinks(2),
    rg.full() | rg.dilated(3, 2) | rg.strided(5) | rg.rows(4) | rg.prefix(6) | rg.blocks(7),
    rg.window(3, 0),
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_a_pattern_is_read_as_it_is_written(pattern):
    assert parse_pattern(repr(pattern)) == pattern


REFUSED = [
    ("causal() & widow(2)", "'widow' is not a pattern word; did you mean window?"),
    ("causal() &", "'causal() &' is not a pattern: invalid syntax at its end"),
    ("window(2", "'window(2' is not a pattern: '(' was never closed at column 7"),
    ("window(x)", "window(x): a whole number is needed"),
    ("window(True)", "window(True): a whole number is needed"),
    ("window()", "window(): "),
    ("__import__('os')", "'__import__' is not a pattern word; known: blocks"),
    ("causal() + full()", "'causal() + full()' is not a pattern; combine full, causal, window"),
    ("window(-1)", "window(-1): a window cannot end before it begins"),
    (
        "documents([0, 1])",
        "documents carries data, so it has no text; pass rg.documents(…) to rg.attention instead",
    ),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_an_invalid_pattern_is_refused(text, message):
    with pytest.raises(rg.RegardError) as refused:
        parse_pattern(text)
    assert str(refused.value).startswith(message)


def test_explain_prints_the_plan_and_its_picture():
    said = regard("explain", "causal() & window(1)", "--n", "4096", "--draw")
    assert said.startswith("■ ·") and "causal() & window(1): 4,096 queries" in said
    explained = json.loads(regard("explain", "causal() & window(1)", "--n", "4096", "--json"))
    assert explained["needed"] == 2 * 4096 - 1 and explained["pattern"] == "causal() & window(1)"


UNREAD = {
    "gtp2": "unknown model 'gtp2'; accepted: a preset, SPEC.json, SPEC.yaml, a Hugging Face config.json, "
    "a checkpoint folder, a run folder, package.module:name or file.py:name; did you mean gpt2?",
    "absent.json": "file not found: absent.json",
    "absent.py": "file not found: absent.py",
    "mine.py": "mine.py: give the name of a function, a class or a model in it, mine.py:NAME",
    "no_such_module:x": "no module 'no_such_module' on PYTHONPATH or in {here}",
    "torch.nn:Liner": "torch.nn has no 'Liner'; did you mean Linear?",
    "torch.nn:": "'torch.nn:' is not of the form package.module:name or file.py:name",
    "broken.json": "broken.json is not JSON: Expecting value at line 1, column 7",
    "list.yaml": "list.yaml: expected a mapping, not list",
    "bytes.json": "bytes.json is not UTF-8 text: invalid start byte at byte 0",
    "other.json": 'other.json has neither a "kind" (a declaration of regard) nor a "model_type" (a Hugging '
    "Face configuration)",
    "foreign.json": "foreign.json: unknown model_type 'no-such-model' in this version of transformers",
}


@pytest.mark.parametrize("source", UNREAD)
def test_a_target_that_cannot_be_read_gets_a_reason(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("broken.json").write_text('{"a": x}')
    Path("list.yaml").write_text("- 1\n")
    Path("bytes.json").write_bytes(b"\xff\xfe")
    Path("other.json").write_text("{}")
    Path("mine.py").write_text("")
    Path("foreign.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(rg.RegardError) as refused:
        targets.read(source)
    assert str(refused.value) == UNREAD[source].format(here=Path.cwd())


@pytest.mark.slow
def test_an_error_is_one_line_on_stderr_and_exit_code_2():
    done = subprocess.run(
        [sys.executable, "-m", "regard", "show", "gtp2"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: unknown model 'gtp2'; accepted") and done.stderr.count("\n") == 1


LIGHT = list(COMMANDS)  # their modules import PyTorch when they run


def test_help_is_printed_without_importing_pytorch():
    code = f"""
import sys
from regard.cli.main import app, load_command
for name in {LIGHT}:
    load_command(name)
app(["--help"], standalone_mode=False)
for name in {LIGHT}:
    app([name, "--help"], standalone_mode=False)
sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f" {name} " in done.stdout for name in ("presets", "explain", *COMMANDS))
    assert "--target" in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_shows_the_first_line_of_each_help_text(name):
    command = load_command(name)
    assert command.name == name
    assert " ".join((command.help or "").split("\n\n")[0].split()) == COMMANDS[name]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_model": None, "heads": 2}, "Attention: the field 'd_model' needs int, not None"),
        ({"d_model": True, "heads": 1}, "d_model=True is not a positive integer"),
        ({"d_model": 8, "heads": 2, "dropout": []}, "dropout=() is not in [0, 1)"),
        ({"d_model": 8, "heads": 2, "scale": []}, "scale=() is not a number; leave it out for the default"),
        ({"d_model": 8, "heads": 2, "extra_key": []}, "Attention: the field 'extra_key' needs bool, not ()"),
        ({"d_model": 8, "heads": 2, "pattern": 3}, "pattern=3 is not a pattern; use rg.causal()"),
    ],
)
def test_a_field_of_the_wrong_type_in_json_is_named(fields, message):
    with pytest.raises((rg.FormatError, rg.SpecError), match=re.escape(message)):
        rg.from_json(json.dumps({"kind": "Attention", **fields}))


def test_a_pattern_in_a_file_may_be_written_as_in_python(tmp_path):
    file = tmp_path / "spec.yaml"
    file.write_text(
        "kind: Attention\nd_model: 8\nheads: 2\npattern: causal() & window(3)\n", encoding="utf-8"
    )
    assert "Attention(8, heads=2, pattern=causal() & window(3))" in regard("cost", str(file), "--n", "16")
    with pytest.raises(rg.FormatError, match=r"'causl' is not a pattern word; did you mean causal\?"):
        rg.from_json('{"kind": "Attention", "d_model": 8, "heads": 2, "pattern": "causl()"}')


def test_nesting_is_limited_in_json_and_in_patterns():
    def nested(levels):
        inner = {"kind": "causal"}
        for _ in range(levels):
            inner = {"kind": "Not", "inner": inner}
        return json.dumps({"kind": "Attention", "d_model": 8, "heads": 2, "pattern": inner})

    with pytest.warns(rg.EmptyRowWarning):
        assert rg.from_json(nested(81)).pattern.count(4) == 6
    with pytest.raises(rg.FormatError, match="nested deeper than 100 levels"):
        rg.from_json(nested(900))
    assert parse_pattern("~" * 80 + "causal()").count(4) == 10
    for text in ("~" * 490 + "causal()", "(" * 5000 + "causal()" + ")" * 5000):
        with pytest.raises(rg.FormatError, match=r"nested at most 100 levels|too many nested"):
            parse_pattern(text)


def test_yaml_aliases_are_refused(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("kind: Attention\nd_model: &size 12\nheads: *size\n")
    with pytest.raises(rg.FormatError, match=r"YAML aliases \(\*name\) are not read"):
        targets.read(str(file))


def test_explain_refuses_an_unknown_device_and_has_every_field_as_json():
    with pytest.raises(rg.SpecError, match=r"^unknown device 'gpu'; use cpu or cuda$"):
        regard("explain", "causal()", "--device", "gpu")
    fields = json.loads(regard("explain", "causal() & window(9)", "--n", "512", "--json"))
    expected = rg.explain(rg.causal() & rg.window(9), n=512)
    assert fields["variant"] == expected.variant and fields["needed"] == expected.needed == 10 * 512 - 45
