"""What a mistake on the command line gets: a sentence on stderr, exit code 2, no traceback; Ctrl-C gets 130."""

import inspect
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import regard as rg
from cli_fuzz import COMMANDS as FUZZED
from cli_fuzz import failure, lines, write_files
from regard.cli import names
from regard.cli.main import app
from regard.training.loop import meter
from regard.training.models import folder
from regard.training.progress import waiting
from regard.training.recipes import RECIPES


def refused(*words: object) -> str:
    """The message of a command line that is refused."""
    done = CliRunner().invoke(app, [str(w) for w in words])
    assert isinstance(done.exception, rg.RegardError), (done.exit_code, done.output, done.exception)
    return str(done.exception)


def shown(*words: object) -> dict:
    done = CliRunner().invoke(app, [str(w) for w in words])
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)


@pytest.fixture
def bad_files(tmp_path, monkeypatch):
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


A_FILE = "bytes.json is a file, and a folder is needed; choose another folder"
MISTAKES = {
    ("explain", "causal()", "--draw", "--json"): "--json and --draw are two forms of output; choose one",
    (
        "check",
        "torch.nn:MultiheadAttention",
        "--html",
        "nowhere/x.html",
    ): "--html nowhere/x.html: there is no folder nowhere",
    (
        "train",
        "translate",
        "--set",
        "data=mine.tsv",
    ): "recipe 'translate': data needs to be SentencePairs, not "
    "'mine.tsv'; --data FILE trains on your own file",
    (
        "train",
        "classify",
    ): "recipe 'classify' needs train=, a file of label<TAB>text lines; on the command line: "
    "regard train classify --data FILE.tsv",
    (
        "train",
        "translate",
        "--set",
        "d_model=wide",
    ): "recipe 'translate': d_model needs to be a whole number, not 'wide'",
    (
        "train",
        "masked-language-model",
        "--set",
        "vocab=-3",
    ): "vocab=-3: it needs to be at least 260, the special tokens and the 256 bytes",
    ("train", "translate", "--device", "tpu"): "unknown device 'tpu'; use cpu, cuda or cuda:1",
    (
        "train",
        "translate",
        "--out",
        "bytes.json",
    ): A_FILE,
    (
        "train",
        "T5",
        "--out",
        "bytes.json",
    ): A_FILE,
    (
        "train",
        "translate",
        "--out",
        "/proc/run",
    ): "cannot create /proc/run: No such file or directory; choose another folder",
    ("train", "bytes.json"): "bytes.json is not UTF-8 text: invalid start byte at byte 0",
    ("train", "folder.json"): "cannot read folder.json: Is a directory",
    (
        "train",
        "broken.json",
    ): "broken.json: not JSON: Expecting property name enclosed in double quotes at line 1, column 23",
    ("train", "translate", "--data", "none.tsv"): "--data none.tsv: file not found",
    ("train", "translate", "--valid", "one.tsv"): "--valid one.tsv: add --data, the file to train on",
    ("train", "image", "--data", "one.tsv"): "--data: recipe 'image' has its own data; leave it out",
    (
        "train",
        "language-model",
        "--data",
        "one.tsv",
        "--test",
        "one.tsv",
    ): "--test: recipe 'language-model' takes --data",
    (
        "train",
        "language-model",
        "--data",
        "one.tsv",
        "--set",
        "file=bytes.json",
    ): "--set file=… and --data both name the data; leave one of them out",
    (
        "train",
        "long-context",
        "--set",
        "pattern=windw(3)",
    ): "--set pattern=windw(3): 'windw' is not a pattern word; did you mean window?",
    ("train", "T5", "--data", "one.tsv"): "--data: lesson T5 makes its own data; leave it out",
    (
        "train",
        "translate",
        "--data",
        "one.tsv",
        "--out",
        "o",
    ): "one.tsv has 1 row; training and validation need at least 2",
    (
        "check",
        "torch.nn:MultiheadAttention",
        "--heads",
        "3",
        "--d-model",
        "16",
    ): "torch.nn:MultiheadAttention: "
    "building it with --heads 3 --d-model 16 raised AssertionError: embed_dim must be divisible by num_heads",
    ("check", "torch.nn:Linear", "--device", "gpu"): "unknown device 'gpu'; use cpu, cuda or cuda:1",
    ("check", "raises.py:model"): "raises.py:model: importing it raised ValueError: broken module",
    ("bench", "machine", "--device", "tpu"): "unknown device 'tpu'; use cpu, cuda or cuda:1",
    (
        "look",
        "fine.py:model",
        "1,2",
    ): "fine.py:model() raised KeyError: 'no model today'; expected a model, or a "
    "function without arguments that returns one",
    (
        "look",
        "tiny-gpt",
        "1,2",
        "--target",
        "3",
    ): "--target '3': tiny-gpt has no decoder with an input of its own; leave it out",
    (
        "look",
        "tiny-gpt",
        "1,2",
        "--out",
        "folder.json",
    ): "--out folder.json: it is a folder; add a file name, such as folder.json/heads.html",
    ("translate", "--file", "folder"): "cannot read folder: Is a directory",
    (
        "report",
        "damaged-run",
    ): "damaged-run/recipe.json cannot be read: not JSON: Expecting property name "
    "enclosed in double quotes at line 1, column 2",
}


@pytest.mark.parametrize("words", MISTAKES, ids=" ".join)
def test_a_mistake_gets_a_one_sentence_message(words, bad_files):
    assert refused(*words) == MISTAKES[words]


@pytest.mark.parametrize(
    "words",
    [
        ("train", "translate", "--out", "", "--dry-run"),
        ("train", "translate", "--out=", "--dry-run"),
        ("cost", "gpt2", "--n", "16", "--fits", ""),
        ("translate", "Hello", "--model", ""),
    ],
)
def test_an_empty_value_is_neither_the_current_folder_nor_ignored(words, bad_files):
    option = next(word for word in words if word.startswith(("--out", "--fits", "--model")))
    assert refused(*words) == f"{option.removesuffix('=')} is empty: give a value, or leave it out"


def test_an_empty_name_is_no_model(bad_files):
    (bad_files / "config.json").write_text(rg.preset("tiny-gpt").json())
    assert refused("cost", "", "--n", 4).startswith("the name of the model is empty; accepted: a preset, ")


def test_a_gpu_that_is_not_there_is_refused(bad_files, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for words in (("train", "translate"), ("check", "torch.nn:Linear"), ("bench", "machine")):
        assert refused(*words, "--device", "cuda").startswith("device 'cuda': ")


def test_a_model_that_does_not_fit_is_refused_before_it_is_built(tmp_path, monkeypatch):
    monkeypatch.setattr(meter, "memory_free", lambda device: 10**9)
    message = refused("train", "translate", "--set", "d_model=16384", "--out", tmp_path / "run")
    assert message.startswith("the model of translate has 22,679,420,928 parameters: ")
    assert not (tmp_path / "run").exists()
    assert message.endswith(
        "and 953.67 MiB are free on cpu; make it smaller, with fewer layers or a smaller d_model"
    )


def test_own_files_become_the_data_of_a_recipe(tmp_path):
    for name in ("a.tsv", "b.tsv", "c.tsv"):
        (tmp_path / name).write_text("one\ttwo\nthree\tfour\n")
    a, b, c = (str(tmp_path / name) for name in ("a.tsv", "b.tsv", "c.tsv"))
    recipe = shown("train", "translate", "--data", a, "--valid", b, "--test", c, "--show")
    assert [recipe["data"][k] for k in ("train", "valid", "test")] == [a, b, c]
    recipe = shown("train", "classify", "--data", a, "--show")
    assert (recipe["data"]["train"], recipe["data"].get("valid"), recipe["data"]["classes"]) == (a, None, 2)
    for name in ("language-model", "long-context"):
        assert shown("train", name, "--data", a, "--show")["data"]["file"] == a


@pytest.mark.parametrize("name", RECIPES)
def test_every_parameter_can_be_set_as_it_is_listed(name, bad_files):
    """None, (4, 3) and the pattern of long-context were refused as texts."""
    needed = ["train=one.tsv"] if name == "classify" else []
    known = inspect.signature(RECIPES[name]).parameters
    listed = [
        f"{p.name}={p.default!r}" for p in known.values() if p.default is not p.empty and p.name != "data"
    ]
    made = shown("train", name, *(word for x in [*needed, *listed] for word in ("--set", x)), "--show")
    assert made == shown("train", name, *(word for x in needed for word in ("--set", x)), "--show")


def test_every_twentieth_line_is_held_out_where_no_validation_file_is_given(tmp_path):
    file = tmp_path / "mine.tsv"
    file.write_text("".join(f"word{i}\tpalabra{i}\n" for i in range(100)))
    data = rg.training.SentencePairs(train=str(file), vocab=300).load(tmp_path)
    assert (len(data.train), len(data.valid), len(data.test)) == (95, 5, 5)
    assert data.texts == tuple((f"word{i}", f"palabra{i}") for i in (19, 39, 59, 79, 99))


def test_the_json_of_look_has_tokens_and_maps():
    plain = shown("look", "tiny-gpt", "3,1,4", "--json")
    layer = plain["layers"][0]
    assert layer["queries"] == layer["keys"] == ["3", "1", "4"] and len(layer["maps"]) == layer["heads"]
    assert all(abs(sum(row) - 1) < 1e-5 for weights in layer["maps"] for row in weights)
    assert layer["maps"][0][0] == [1.0, 0.0, 0.0]


def test_maps_that_are_too_large_for_json_are_left_out_with_a_message(monkeypatch):
    monkeypatch.setattr("regard.cli.look.MAX_JSON_WEIGHTS", 100)
    done = CliRunner().invoke(app, ["look", "tiny-gpt", "3,1,4", "--json"])
    assert "the maps are left out: 144 weights" in done.stderr
    assert "maps" not in json.loads(done.stdout)["layers"][0]


def test_slow_work_is_announced_on_stderr(capsys):
    with waiting("counting", first=0.01, again=0.02):
        time.sleep(0.2)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "counting …" and said[1] == "counting … 0 s so far"
    with waiting("counting", first=5.0):
        pass
    with waiting("counting", silent=True, first=0.0):
        time.sleep(0.02)
    assert capsys.readouterr().err == ""


def test_completion_lists_presets_recipes_laws_and_files(tmp_path, monkeypatch):
    from regard.laws.catalogue import LAWS
    from regard.training.lessons import LESSONS

    assert tuple(rg.presets()) == names.PRESETS
    assert tuple(RECIPES) == names.RECIPES and tuple(LESSONS) == names.LESSONS
    assert tuple(law.number for law in LAWS) == names.known_laws()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt-mine").mkdir()
    (tmp_path / "gpt.json").touch()
    (tmp_path / "gpt.txt").touch()
    assert names.models("gpt") == ["gpt2", "gpt-mine/", "gpt.json"] and names.laws("L6")[0] == "L60"
    assert names.recipes("T1") == ["T1", "T10", "T11", "T12", "T13"]


def test_the_shell_gets_completions():
    code = """
import os, sys
os.environ |= {"_REGARD_COMPLETE": "complete_bash", "COMP_WORDS": "regard show gp", "COMP_CWORD": "2"}
from regard.cli.main import app
try:
    app(prog_name="regard")
finally:
    print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["gpt2", "False"], done.stderr


@pytest.mark.parametrize("command", FUZZED)
def test_wrong_command_lines_end_in_a_sentence(command, bad_files):
    for words in lines(command, 3 if command in ("plan", "cost", "look", "check") else 6, seed=7):
        assert failure(words) is None, words


@pytest.mark.long
@pytest.mark.parametrize("command", FUZZED)
def test_200_wrong_command_lines_end_in_a_sentence(command, bad_files):
    for words in lines(command, 200):
        assert failure(words) is None, words


def interrupted(words, seconds, folder) -> subprocess.CompletedProcess:
    started = subprocess.Popen(
        [sys.executable, "-m", "regard", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell ignores Ctrl-C for what it starts in the background, and its children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    time.sleep(seconds)
    started.send_signal(signal.SIGINT)
    try:
        out, err = started.communicate(timeout=60)
    finally:
        started.kill()
    return subprocess.CompletedProcess(words, started.returncode, out, err)


TRAIN = ("train", "language-model", "--set", "steps=5000", "--threads", "1", "--out", "run")


@pytest.mark.long  # where the signal falls depends on how busy the machine is
def test_ctrl_c_in_the_first_seconds_exits_with_130(tmp_path):
    done = interrupted(TRAIN, 0.9, tmp_path)
    assert done.returncode == 130 and "Traceback" not in done.stderr, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("seconds", [0.15, 0.3, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0])
@pytest.mark.parametrize(
    "words", [TRAIN, ("look", "tiny-gpt", "random:3000"), ("translate", "Hello", "--beam", "2000")]
)
def test_ctrl_c_at_any_time_exits_with_130(words, seconds, tmp_path):
    done = interrupted(words, seconds, tmp_path)
    assert done.returncode in (130, 0) and "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 130 or words is not TRAIN


@pytest.mark.long
def test_an_interrupted_run_exits_with_130_and_prints_how_to_resume(tmp_path):
    done = interrupted(TRAIN, 20, tmp_path)
    assert done.returncode == 130 and "run the same command again to resume" in done.stderr, done.stderr
    step = int(done.stderr.split("interrupted after update ")[1].split(";")[0].replace(",", ""))
    done = interrupted(TRAIN, 15, tmp_path)
    assert f"resuming after update {step:,}, from its checkpoint" in done.stderr


ENDED = """
import os, signal, sys
import regard.cli.main as main
from regard.cli.entry import run

class Late:
    def __del__(self, kill=os.kill, process=os.getpid(), ctrl_c=signal.SIGINT):
        kill(process, ctrl_c)

late = Late()  # deleted while Python shuts down
main.run = lambda: sys.exit({code})
run()
"""


@pytest.mark.parametrize("code", [0, 1])
def test_ctrl_c_after_a_command_has_ended_does_not_change_its_exit_code(code):
    done = subprocess.run([sys.executable, "-c", ENDED.format(code=code)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, "")


def test_the_console_script_prints_a_sentence_about_an_unusable_file(tmp_path):
    (tmp_path / "x.json").mkdir()
    code = "import regard.cli.main as m, sys; m.app = lambda: open(sys.argv[1]); m.run()"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x.json")], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr == f"error: {tmp_path / 'x.json'}: Is a directory\n"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_behind_stdout_is_a_sentence(tmp_path):
    """Exit code 1 means that a law is broken."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "regard", "presets"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (2, "error: cannot write the output: No space left on device\n")


def test_without_typer_the_command_prints_what_to_install():
    code = "import sys; sys.modules['typer'] = None; from regard.cli.entry import run; run()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.endswith("needs an extra: pip install 'regard[cli]'\n")
    assert "Traceback" not in done.stderr


def test_without_tokenizers_the_translator_prints_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(
        rg.RegardError, match=r"^tokenizers need the library `tokenizers`: pip install 'regard\[train\]'$"
    ):
        rg.translate("hello", model=folder())  # the default one may be open already
