"""`regard cost`, `regard plan` and `regard bench` as they are called."""

import json
import re
import sys
from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

import regard as rg
from regard.cli import bench, cost, plan
from regard.costs import planner
from regard.costs.entry import cost as price
from regard.costs.gpus import CARDS
from regard.costs.memory.step import IMPLEMENTATIONS, OPTIMIZERS

unchecked = pytest.mark.compiled  # without the shape checker: what fits is found by asking at many sizes
app = typer.Typer()
app.add_typer(cost.app, name="cost")
app.add_typer(bench.app, name="bench")
app.command(name="plan")(plan.plan)


def run(*words):
    done = CliRunner().invoke(app, [str(w) for w in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


@pytest.fixture
def one_layer(tmp_path):
    """A file that declares a model which is priced quickly."""
    file = tmp_path / "one-layer.json"
    file.write_text(replace(rg.preset("tiny-gpt"), layers=1).json())
    return file


def test_a_preset_is_priced_as_a_table():
    done = run("cost", "tiny-gpt", "--n", 64, "--batch", 2)
    assert done.exit_code == 0
    result = price("tiny-gpt", n=64, batch=2)
    assert f"{result.parameters:,}" in done.stdout and f"{result.flops:,}" in done.stdout
    assert "a multiply-add is 2 FLOPs" in done.stdout and "key/value cache" in done.stdout


@unchecked
def test_stdout_is_only_json(one_layer):
    options = (
        "--n",
        64,
        "--train",
        "--optimizer",
        "adam:fused",
        "--autocast",
        "bfloat16",
        "--device",
        "cuda",
    )
    found = json.loads(run("cost", one_layer, *options, "--checkpointing", "--fits", "90MB", "--json").stdout)
    train = rg.TrainingStep(optimizer="adam", implementation="fused", autocast="bfloat16", checkpointing=True)
    result = price(replace(rg.preset("tiny-gpt"), layers=1), n=64, train=train, device="cuda")
    assert found["total"]["parameters"] == result.parameters
    assert found["memory"]["training_peak"] == result.memory.training_peak
    assert found["fits"]["batch"] > 1 and found["fits"]["n"] > 64


def test_options_are_allowed_before_the_model():
    assert json.loads(run("cost", "--json", "tiny-gpt", "--n", 8).stdout)["sizes"]["n"] == 8


def test_latex_is_a_table_of_formulas():
    result = run("cost", "tiny-gpt", "--n", 64, "--latex").stdout
    assert result.startswith("\\begin") and "d_{model}" in result


def test_a_declaration_is_read_from_json_and_from_yaml(tmp_path):
    declared = rg.preset("tiny-bert")
    (tmp_path / "a.json").write_text(declared.json())
    import yaml

    (tmp_path / "a.yaml").write_text(yaml.safe_dump(json.loads(declared.json())))
    for name in ("a.json", "a.yaml"):
        found = json.loads(run("cost", tmp_path / name, "--n", 16, "--json").stdout)
        assert found["total"]["parameters"] == price(declared, n=16).parameters


@pytest.mark.filterwarnings("ignore")
def test_a_hugging_face_configuration_is_priced_without_its_weights(tmp_path):
    small = {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 4, "vocab_size": 50}
    (tmp_path / "config.json").write_text(json.dumps(small))
    found = json.loads(run("cost", tmp_path / "config.json", "--n", 11, "--json").stdout)
    assert found["pairs"][0]["needed"] == 66 and found["uncounted"] == []


BUILD = """
import torch
def model():
    return torch.nn.Linear(3, 4), torch.empty(5, 3)
def bare():
    return torch.nn.Linear(3, 4)
"""


def test_a_python_function_gives_a_model_and_its_inputs(tmp_path, monkeypatch):
    (tmp_path / "mine_to_price.py").write_text(BUILD)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("mine_to_price", None)
    assert json.loads(run("cost", "mine_to_price:model", "--json").stdout)["total"]["flops"] == 2 * 5 * 3 * 4
    with pytest.raises(rg.ShapeError) as error:
        run("cost", "mine_to_price:bare")
    assert "Linear is missing input" in str(error.value)


FAILS = """
import torch
from torch import nn


class Fails(nn.Linear):
    def forward(self, x):
        {statement}


def model():
    return Fails(4, 4), torch.zeros(2, 4)
"""


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("raise ValueError('odd rows')", "ValueError: odd rows"),
        ("assert x.shape[0] == 3", "AssertionError"),
        ("return {}['weights']", "KeyError: 'weights'"),
        ("raise StopIteration", "StopIteration"),
    ],
)
def test_a_model_that_fails_is_named_with_what_is_still_known(tmp_path, statement, words):
    (tmp_path / "fails.py").write_text(FAILS.replace("{statement}", statement))
    with pytest.raises(rg.ShapeError) as e:
        run("cost", f"{tmp_path / 'fails.py'}:model")
    known = "still known: 20 parameters, 80 bytes in float32"
    assert str(e.value) == f"Fails fails on inputs of these shapes: {words}; {known}"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise OSError('no disk')", "model() fails on meta tensors: OSError: no disk"),
        ("return ()", "returned an empty tuple; return a model, or a model and its inputs"),
    ],
)
def test_a_function_that_gives_no_model_is_named(tmp_path, body, words):
    (tmp_path / "nothing.py").write_text(f"def model():\n    {body}\n")
    with pytest.raises(rg.SpecError, match=re.escape(words)):
        run("cost", f"{tmp_path / 'nothing.py'}:model")


def test_layer_types_are_compared():
    done = run("cost", "compare", "--n", 16, "--d", 8)
    assert "LSTM" in done.stdout and "attention" in done.stdout
    assert json.loads(run("cost", "compare", "--n", 16, "--d", 8, "--json").stdout)


def test_estimated_and_measured_times_are_printed(tmp_path, monkeypatch):
    monkeypatch.setenv("REGARD_MACHINE", str(tmp_path / "m.json"))
    with pytest.raises(rg.SpecError) as error:
        run("cost", "tiny-gpt", "--n", 16, "--time")
    assert "run `regard bench machine` first" in str(error.value)
    done = run("bench", "machine", "--device", "cpu", "--size", 64)
    assert "GFLOP/s" in done.stdout and (tmp_path / "m.json").exists()
    assert (
        json.loads(run("bench", "machine", "--device", "cpu", "--size", 64, "--json").stdout)["bytes_per_s"]
        > 0
    )
    result = run("cost", "tiny-gpt", "--n", 16, "--measure").stdout
    assert "measured here: " in result and "estimated on " in result


@unchecked
def test_a_vision_model_needs_no_length():
    result = run("cost", "tiny-vit", "--train", "--fits", "100MB").stdout
    assert "within 95.37 MiB (100,000,000 bytes): batch " in result and ", or n" not in result


@unchecked
@pytest.mark.filterwarnings("ignore")
def test_options_of_a_step_act_on_a_hugging_face_configuration(tmp_path):
    small = {"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4}
    small |= {"vocab_size": 50, "intermediate_size": 64, "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(small))

    def peak(*options):
        words = (tmp_path / "config.json", "--n", 64, "--batch", 8, "--train", "--json", *options)
        return json.loads(run("cost", *words).stdout)["memory"]["training_peak"]

    plain = peak()
    assert peak("--checkpointing") < plain and peak("--autocast", "bfloat16") < plain != peak("--lora", 2)
    words = (tmp_path / "config.json", "--n", 16, "--fits", "50MB")
    assert json.loads(run("cost", *words, "--json").stdout)["fits"]["batch"] > 1
    table = run("cost", tmp_path / "config.json", "--n", 16).stdout
    assert "0–2 × 3" in table and "pairs in model.layers.*.self_attn" in table and ", 3 times" in table
    assert "parameters, " in table.splitlines()[2] and "inference peak" in table.splitlines()[2]
    assert len(run("cost", tmp_path / "config.json", "--n", 16, "--depth", 1).stdout.splitlines()) < len(
        table.splitlines()
    )


def test_help_shows_the_options_of_a_model():
    shown = run("cost", "--help").stdout
    assert "--autocast" in shown and "regard cost compare" in shown
    assert all(name in shown for name in (*OPTIMIZERS, *IMPLEMENTATIONS[1:]))
    cards = run("plan", "--help").stdout
    assert all(name in cards for name in CARDS)


@unchecked
def test_ranks_divide_the_peak():
    words = ("cost", "tiny-gpt", "--n", 16, "--train", "--device", "cuda", "--ranks", 4, "--json")
    found, repeated = (json.loads(run(*words, *more).stdout) for more in ((), ("--ddp",)))
    assert found["per_rank"]["peak"] < found["memory"]["training_peak"] < repeated["per_rank"]["peak"]
    assert (found["per_rank"]["strategy"], repeated["per_rank"]["strategy"]) == ("fsdp", "ddp")


@unchecked
def test_a_plan_is_a_table_data_or_a_program(one_layer, monkeypatch):
    find, found = planner.plan, {}

    def find_once(*given, **named):
        key = repr((given, named))
        found[key] = found.get(key) or find(*given, **named)
        return found[key]

    monkeypatch.setattr(planner, "plan", find_once)  # the outputs below are of one plan
    words = ("plan", one_layer, "--gpu", "l4", "--n", 32, "--inference")
    table = run(*words).stdout
    assert "tokens/s" in table and "l4: 24 GB" in table and "NVIDIA L4 data sheet" in table
    choices = json.loads(run(*words, "--json").stdout)["choices"]
    assert [c["label"] for c in choices] == ["forward, bfloat16", "generation, bfloat16"]
    assert run(*words, "--code", 1).stdout.strip() == choices[0]["code"]
    with pytest.raises(rg.SpecError, match="--code 3: there are 2 choices, of which 2 fit"):
        run(*words, "--code", 3)


@pytest.mark.parametrize(
    "words, result",
    [
        (("gtp2",), "unknown model 'gtp2'; accepted"),
        (("tiny-gpt", "--n", 0), "n=0"),
        (("tiny-gpt", "--n", 8, "--batch", -1), "batch=-1"),
        (("tiny-gpt", "--n", 8, "--dtype", "float31"), "unknown dtype 'float31'; did you mean float32?"),
        (("tiny-gpt", "--n", 8, "--device", "gpu"), "unknown device 'gpu'"),
        (("tiny-gpt", "--n", 8, "--train", "--optimizer", "adamq"), "optimizer='adamq' is unknown"),
        (("tiny-gpt", "--n", 8, "--autocast", "fp8"), "autocast='fp8' is unknown"),
        (("tiny-gpt", "--n", 8, "--autocast", "bfloat16"), "--autocast is an option of a training step: add"),
        (("tiny-gpt", "--n", 8, "--ranks", 4), "--ranks is an option of a training step: add --train"),
        (("tiny-gpt", "--n", 8, "--train", "--reentrant"), "--reentrant needs --checkpointing"),
        (("tiny-gpt", "--n", 8, "--train", "--ddp"), "--ddp needs --ranks"),
        (("tiny-gpt", "--n", 8, "--fits", "much"), "'much' is not an amount of memory; use 80GB, 24GiB or"),
    ],
)
def test_a_bad_request_is_refused_with_a_message(words, result):
    with pytest.raises(rg.RegardError) as error:
        run("cost", *words)
    assert result in str(error.value)


@pytest.mark.slow
def test_a_plan_takes_a_function_that_returns_a_model(tmp_path, one_layer):
    program = f"import regard as rg\ndef make():\n    return rg.spec.from_json({one_layer.read_text()!r})\n"
    (tmp_path / "own.py").write_text(program)
    options = ["--gpu", "l4", "--n", "32", "--inference"]
    assert "forward, bfloat16" in run("plan", f"{tmp_path / 'own.py'}:make", *options).stdout


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("cost", "tiny-gpt", "--n", 8, "--json", "--latex"), "--json and --latex are two forms of output"),
        (("plan", "tiny-gpt", "--n", 8, "--json", "--code", 1), "--json and --code are two forms of output"),
    ],
)
def test_two_forms_of_output_are_an_error(command, words):
    with pytest.raises(rg.SpecError, match=f"{words}; choose one"):
        run(*command)


@pytest.mark.slow
def test_the_planner_feeds_a_bar_in_a_terminal_until_the_command_ends(monkeypatch):
    from rich.progress import Progress

    from regard.costs.planner import PROGRESS

    plain, shown = PROGRESS.get(), []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(Progress, "update", lambda self, task, **given: shown.append(given))
    with pytest.raises(KeyError), plan.progress_bar():
        rg.costs.plan(
            rg.Encoder(rg.Block(rg.Attention(8, heads=2), rg.FeedForward(8)), 1), memory=1 << 30, n=8
        )
        raise KeyError
    assert shown[-1]["completed"] < shown[-1]["total"] and shown[-1]["description"]
    assert PROGRESS.get() is plain


HEADS = ["causal()", "causal() & window(2)", "causal() & (window(0) | every(3))", "causal()"]


@pytest.mark.parametrize("written", [HEADS, f"per_head([{', '.join(HEADS)}])"], ids=["list", "text"])
@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_a_file_declares_a_pattern_for_each_head(tmp_path, suffix, written):
    file = tmp_path / f"heads{suffix}"  # JSON is YAML, too
    file.write_text(json.dumps({"kind": "Attention", "d_model": 24, "heads": 4, "pattern": written}))
    declared = rg.Attention(24, heads=4, pattern=[rg.Pattern.from_text(text) for text in HEADS])
    done = run("cost", file, "--n", 13)
    assert done.exit_code == 0
    assert "pairs in attention, heads 0, 3: causal() allows 91 of 169" in done.stdout
    found = json.loads(run("cost", file, "--n", 13, "--json").stdout)
    assert found["total"] == price(declared, n=13).total.plain()


@unchecked
def test_a_plan_takes_a_pattern_for_each_head_as_text(one_layer):
    options = ["--memory", "1GB", "--inference", "--n", 16, "--json", "--pattern"]
    done = run("plan", one_layer, *options, f"per_head([{', '.join(HEADS)}])")
    assert done.exit_code == 0 and "per_head" in json.loads(done.stdout)["model"]
    with pytest.raises(
        rg.SpecError, match="pattern has 2 patterns for heads=4; give one for each query head"
    ):
        run("plan", one_layer, *options, "per_head([causal(), full() & causal()])")
