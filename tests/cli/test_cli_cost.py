"""`regard cost` and `regard bench` as they are called."""

import json
import sys

import pytest
import typer
from typer.testing import CliRunner

import regard as rg
from regard.cli import bench, cost
from regard.costs.entry import cost as price

unchecked = pytest.mark.compiled  # without the shape checker: what fits is found by asking at many sizes
app = typer.Typer()
app.add_typer(cost.app, name="cost")
app.add_typer(bench.app, name="bench")


def run(*words):
    done = CliRunner().invoke(app, [str(w) for w in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def test_a_preset_is_priced_as_a_table():
    done = run("cost", "tiny-gpt", "--n", 64, "--batch", 2)
    assert done.exit_code == 0
    result = price("tiny-gpt", n=64, batch=2)
    assert f"{result.parameters:,}" in done.stdout and f"{result.flops:,}" in done.stdout
    assert "a multiply-add is 2 FLOPs" in done.stdout and "key/value cache" in done.stdout


@unchecked
def test_stdout_is_only_json():
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
    found = json.loads(run("cost", "tiny-gpt", *options, "--checkpointing", "--fits", "1GB", "--json").stdout)
    train = rg.TrainingStep(optimizer="adam", implementation="fused", autocast="bfloat16", checkpointing=True)
    result = price("tiny-gpt", n=64, train=train, device="cuda")
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
    assert "within 100,000,000 bytes: batch " in result and ", or n" not in result


@pytest.mark.parametrize(
    "words, result",
    [
        (("gtp2",), "unknown model 'gtp2'; accepted"),
        (("tiny-gpt", "--n", 0), "n=0"),
        (("tiny-gpt", "--n", 8, "--batch", -1), "batch=-1"),
        (("tiny-gpt", "--n", 8, "--dtype", "float31"), "unknown dtype 'float31'; did you mean float32?"),
        (("tiny-gpt", "--n", 8, "--device", "gpu"), "unknown device 'gpu'"),
        (("tiny-gpt", "--n", 8, "--train", "--optimizer", "adamq"), "optimizer='adamq' is unknown"),
        (("tiny-gpt", "--n", 8, "--fits", "much"), "'much' is not an amount of memory; use 80GB, 24GiB or"),
    ],
)
def test_a_bad_request_is_refused_with_a_message(words, result):
    with pytest.raises(rg.RegardError) as error:
        run("cost", *words)
    assert result in str(error.value)
