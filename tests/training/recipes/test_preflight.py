"""What is said before the first update, what is measured during it, and how a run is refused."""

import json
import os
import signal
import time
from dataclasses import replace

import pytest
import torch

import regard as rg
from long_cases import in_long
from regard.costs import Cost
from regard.pattern import full
from regard.training import recipes
from regard.training.data.datasets import ContinuousText
from regard.training.data.rows import Windows
from regard.training.loop import checkpoints, meter
from regard.training.loop.averaging import ema, last
from regard.training.loop.log import TensorBoardWriter
from regard.training.loop.trainer import Trainer
from regard.training.recipes import preflight, trial_run
from regard.training.recipes.run import Run
from regard.training.report.head_statistics import HeadStatistics, read
from training_run_case import a_known_machine, regard, small

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("before")
    return Run(small(folder, log_every=1), folder / "out", "cpu")


def test_a_mean_batch_is_counted_from_the_rows():
    rows = Windows(torch.arange(1000), context=10, step=10)
    assert preflight.mean_batch(rows, 200) == preflight.MeanBatch(20, 10, 10, 10.0, 0.0, 5)


def test_operations_of_a_step_are_those_of_both_passes(run):
    batch = preflight.mean_batch(run.data.train, 600)
    spec = run.recipe.model
    one = rg.cost(spec, n=batch.n, m=batch.m, batch=batch.rows, train=True).total
    estimate = preflight.flops_per_prediction(preflight.step_cost(run.recipe, batch, CPU), batch)
    assert estimate * batch.rows * batch.predicted == pytest.approx(one.flops + one.backward_flops)
    assert 2 * one.flops < one.flops + one.backward_flops < 3.2 * one.flops


def test_the_meter_divides_what_was_done_by_what_could_be():
    read = meter.Meter(flops=2e6, peak=1e9, device=CPU).read(predicted=1000, seconds=4.0)
    assert read["mfu"] == 0.5 and read["memory"] > 50e6
    assert preflight.meter_of.__doc__ and meter.peak("cpu", "float32", torch.get_num_threads()) > 1e8


def test_a_dry_run_reports_cost_time_and_laws_and_writes_nothing(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(small(tmp_path).json())
    said = regard("train", str(file), "--dry-run", "--out", str(tmp_path / "out"))
    plain = json.loads(regard("train", str(file), "--dry-run", "--json"))
    assert said.startswith("translate: 12 updates, 600 tokens per update, warmup_cosine(")
    for words in (
        "parameters\n",
        "% padding;",
        "MFLOP per predicted token, both passes",
        "are free: it fits",
        "for 12 updates",
        "tokens/s; estimated from 3 updates of a copy on real batches, ",
        "L29 causality: holds\n  L31 padding has no effect: holds\n",
    ):
        assert words in said, words
    assert plain["updates"] == 12 and [law["status"] for law in plain["laws"]] == ["holds", "holds"]
    assert not (tmp_path / "out").exists()


def test_time_is_that_of_a_few_updates_on_real_batches(run, monkeypatch):
    done, real = [], Trainer._update

    def update(trainer):
        done.append(real(trainer))
        time.sleep(0.2 if len(done) == 1 else 0.05)  # the first does not count
        return done[-1]

    monkeypatch.setattr(Trainer, "_update", update)
    estimate = preflight.preflight(run.recipe, run.data.train, run.model, CPU, laws=())
    predicted = sum(count for _, count, _ in done[1:])
    assert len(done) == 4 and estimate.updates == 12
    assert 12 * 0.05 < estimate.seconds < 12 * 0.2
    assert estimate.tokens_per_second == pytest.approx(predicted / 3 / (estimate.seconds / 12), rel=1e-3)
    took = estimate.seconds / 12 * 3
    assert estimate.method == f"from 3 updates of a copy on real batches, {took:.2f} s"
    assert preflight.Preflight.from_json(estimate.json()) == estimate


def test_a_slow_rehearsal_ends_early_and_says_what_it_left_out(run, monkeypatch):
    monkeypatch.setattr(trial_run, "MAX_SECONDS", -1.0)
    recipe = replace(run.recipe, settings=replace(run.recipe.settings, compile=True))
    pace = trial_run.measure_speed(recipe, run.data.train, run.model, CPU)
    assert pace.method == f"from 1 update of a copy on real batches, {pace.seconds:.2f} s, not compiled"
    assert pace.updates == 1 and pace.predicted > 0


@pytest.mark.parametrize("average", [ema(0.9), *in_long(last(2))])
def test_a_rehearsal_leaves_the_run_as_it_was(tmp_path, average):
    made, losses = small(tmp_path, log_every=1, average=average), []
    block = made.model.encoder.block
    made = replace(
        made,
        model=replace(made.model, encoder=replace(made.model.encoder, block=replace(block, dropout=0.2))),
    )
    for name in ("plain", "rehearsed"):
        one, seen = Run(made, tmp_path / name, "cpu"), []
        kept = [t.clone() for t in (*one.model.parameters(), torch.get_rng_state())]
        if name == "rehearsed":
            estimate = preflight.preflight(made, one.data.train, one.model, CPU, laws=())
            assert "3 updates" in estimate.method
        assert all(torch.equal(a, b) for a, b in zip(kept, (*one.model.parameters(), torch.get_rng_state())))
        assert one.trainer.step == 0 and all(p.grad is None for p in one.model.parameters())
        one.trainer.run(lambda e, seen=seen: seen.append(e["loss"]) if "loss" in e else None)
        losses.append((seen, [p.clone() for p in one.model.parameters()]))
    assert losses[0][0] == losses[1][0] and len(losses[0][0]) == 13  # bit for bit; the last is validation's
    assert all(torch.equal(a, b) for a, b in zip(losses[0][1], losses[1][1], strict=True))


def test_without_memory_time_is_estimated_from_products_and_bytes(run, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(trial_run, "_timed", fail)
    with a_known_machine(tmp_path) as rates:
        estimate = preflight.preflight(run.recipe, run.data.train, run.model, CPU, laws=())
        half = preflight.preflight(run.recipe, run.data.train, run.model, CPU, world=2, laws=())
    least = estimate.flops * estimate.batch.predicted * estimate.batch.rows / rates.rate("float32")
    assert 12 * least < estimate.seconds < 12 * (least + 1) and estimate.updates == 12
    assert estimate.method == "from the rates of `regard bench machine` (a CPU of the tests)"
    assert half.tokens_per_second == pytest.approx(2 * estimate.tokens_per_second, rel=1e-3)
    assert half.method.endswith("assuming a perfect speedup on 2 ranks")


def test_an_error_that_is_no_lack_of_memory_ends_a_rehearsal(run, monkeypatch):
    def fail(*_):
        raise RuntimeError("size mismatch")

    monkeypatch.setattr(trial_run, "_timed", fail)
    with pytest.raises(RuntimeError, match=r"^size mismatch$"):
        trial_run.measure_speed(run.recipe, run.data.train, run.model, CPU)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="this system forgets no peak")
def test_what_a_rehearsal_held_is_not_called_the_runs_memory(run, monkeypatch):
    def greedy(*_):
        torch.ones(256 << 20, dtype=torch.uint8)

    monkeypatch.setattr(trial_run, "_timed", greedy)
    most = meter.memory_used(CPU)
    trial_run.measure_speed(run.recipe, run.data.train, run.model, CPU)
    assert meter.memory_used(CPU) < most + (128 << 20)


def test_what_does_not_fit_is_refused_with_what_would(run, monkeypatch):
    batch = preflight.mean_batch(run.data.train, 600)
    peak = preflight.step_cost(run.recipe, batch, CPU).memory.training_peak
    monkeypatch.setattr(meter, "memory_free", lambda device: peak - 1)
    monkeypatch.setattr(Cost, "fits", lambda cost, budget: 30 if budget == peak - 1 else 0)
    with a_known_machine(run.folder):
        estimate = preflight.preflight(run.recipe, run.data.train, run.model, CPU, laws=())
    assert estimate.fits == 30 * (batch.n + batch.m) == 150
    assert "it does not fit; tokens=150 fits: raise accumulate to keep the effective batch size" in str(
        estimate
    )


def test_where_not_even_one_row_fits_the_model_is_to_shrink(run, monkeypatch):
    monkeypatch.setattr(meter, "memory_free", lambda device: 1000)
    none = preflight.max_tokens(run.recipe, run.data.train, CPU)
    assert none == 0 and preflight.what_fits(none).startswith("not even one row fits: make the model smaller")


def test_running_out_of_memory_names_a_batch_that_fits(run, monkeypatch):
    monkeypatch.setattr(preflight, "max_tokens", lambda recipe, rows, device: 4800)
    for error in (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried"
        ),
        MemoryError("no more"),
    ):

        def fail(*_, error=error):
            raise error

        monkeypatch.setattr(run.trainer, "run", fail)
        with pytest.raises(rg.RegardError) as raised:
            run.train()
        said = str(error).splitlines()[0]
        assert str(raised.value) == (
            f"a batch of 600 tokens does not fit the memory of cpu ({said}); by its estimated cost "
            f"tokens=4,800 fits: raise accumulate to keep the effective batch size"
        )


def test_other_errors_are_not_called_a_lack_of_memory(run, monkeypatch):
    def fail(*_):
        raise RuntimeError("size mismatch")

    monkeypatch.setattr(run.trainer, "run", fail)
    with pytest.raises(RuntimeError, match=r"^size mismatch$"):
        run.train()


def test_a_language_model_that_sees_the_future_is_stopped_before_it_learns():
    made = recipes.language_model(8, d_model=16, layers=1, heads=2, data=ContinuousText(context=16))
    blind = replace(made.model.block.attention, pattern=full())
    made = replace(made, model=replace(made.model, block=replace(made.model.block, attention=blind)))
    laws = preflight.check_laws(made.model.build(), preflight.BEFORE_TRAINING, autoregressive=True)
    estimate = replace(_estimate(), laws=laws)
    with pytest.raises(
        rg.RegardError,
        match=r"^the model violates law L29, causality \(.*\): it predicts the next token and may attend to it; "
        r"declare pattern=causal\(\); its training loss would be meaningless$",
    ):
        estimate.require_laws()


def test_a_broken_law_is_found_on_the_built_model_and_the_random_state_stays(run):
    state = torch.get_rng_state()
    leaky = recipes.recipe("language-model", d_model=16, layers=1, heads=2).model.build()
    leaky.blocks[0].register_forward_hook(lambda block, given, out: out + out.mean(1, keepdim=True))
    torch.set_rng_state(state)
    laws = {
        law.number: law for law in preflight.check_laws(leaky, preflight.BEFORE_TRAINING, autoregressive=True)
    }
    assert laws["L29"].status == "broken" and torch.equal(torch.get_rng_state(), state)


def _estimate() -> preflight.Preflight:
    return preflight.Preflight(
        "x", 1, preflight.MeanBatch(1, 1, 1, 1, 0.0, 1), 1.0, None, None, None, 1, 1.0, 1.0, "so", {}
    )


def test_two_runs_in_one_folder_are_refused_at_once(run):
    recipe = (run.folder / "recipe.json").read_text()
    with (
        checkpoints.locked(run.folder),
        pytest.raises(
            rg.RegardError, match=r"^another process is training in .*; give this run another folder$"
        ),
    ):
        Run(replace(run.recipe, settings=replace(run.recipe.settings, steps=99)), run.folder, "cpu")
    assert (run.folder / "recipe.json").read_text() == recipe


def test_an_interrupted_run_says_so_and_goes_on(tmp_path):
    def press(event):
        if event["event"] == "train" and event["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    made = small(tmp_path, log_every=1)
    one = Run(made, tmp_path / "out", "cpu")
    one.train(press)
    assert one.interrupted and one.trainer.step < 12 and (tmp_path / "out" / "model").is_dir()
    again, events = Run(made, tmp_path / "out", "cpu"), []
    again.train(events.append)
    assert not again.interrupted and again.trainer.step == 12 and events[0]["event"] == "resume"


def test_watching_heads_changes_nothing_and_is_kept(tmp_path):
    made, losses = small(tmp_path, log_every=1), []
    meter.peak.cache_clear()  # measured by the first run alone, and its dice are the second's all the same
    for name in ("plain", "watched"):
        one, seen = Run(made, tmp_path / name, "cpu"), []
        watcher = [HeadStatistics(one, 5)] if name == "watched" else []
        one.train(seen.append, *watcher)
        losses.append([e["loss"] for e in seen if e["event"] == "train"])
        if name == "plain":
            events = [e for e in seen if e["event"] == "train"]
            keys = {"loss", "norm", "rate", "tokens_per_second", "seconds", "padding_share", "mfu", "memory"}
            assert all(keys <= set(e) and e["mfu"] > 0 and e["memory"] > 0 for e in events)
    assert losses[0] == losses[1]  # bit for bit
    seen = read(tmp_path / "watched")
    assert [s["step"] for s in seen] == [5, 10]
    roles = [(h["role"], h["head"]) for h in seen[0]["heads"]]
    assert roles == [("self", 0), ("self", 1)] * 2 + [("cross", 0), ("cross", 1)]
    assert all(0 <= h["entropy_share"] <= 1.0001 for s in seen for h in s["heads"])
    assert seen[0]["heads"][0]["entropy"] != seen[1]["heads"][0]["entropy"]


def test_heads_are_watched_every_so_many_updates(run):
    with pytest.raises(rg.SpecError, match=r"^head statistics every 0 updates: at least 1 is needed$"):
        HeadStatistics(run, 0)


def test_tensorboard_gets_numbers_only(tmp_path, monkeypatch):
    written = []

    class Writer:
        def __init__(self, folder):
            written.append(folder)

        def add_scalar(self, *given):
            written.append(given)

        def flush(self):
            pass

    module = type("tensorboard", (), {"SummaryWriter": Writer})
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", module)
    TensorBoardWriter(tmp_path)({"event": "train", "step": 3, "time": 9.5, "loss": 2.5, "path": "x"})
    assert written == [str(tmp_path / "tensorboard"), ("train/loss", 2.5, 3, 9.5)]
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(rg.RegardError, match=r"needs tensorboard: pip install tensorboard$"):
        TensorBoardWriter(tmp_path)


def test_damaged_lines_of_head_statistics_are_left_out(tmp_path):
    lines = ('{"step": 2}', "[1]", "null", "{}", '{"step": 1}', '{"step"')
    (tmp_path / "heads.jsonl").write_text("\n".join(lines))
    assert read(tmp_path) == [{"step": 1}, {"step": 2}]
