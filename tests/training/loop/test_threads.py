"""The number of threads of a training loop: the fastest is set, a disturbance is noticed, the old number returns."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import regard as rg
from regard.training.loop import threads as module
from regard.training.loop.threads import Threads, fastest
from regard.training.recipes.run import Run
from training_run_case import small


@pytest.fixture(autouse=True)
def four_threads(monkeypatch):
    """PyTorch as the module sees it: four threads may be used, and the number can be set without starting any."""
    state = SimpleNamespace(count=4)
    functions = {
        "get_num_threads": lambda: state.count,
        "set_num_threads": lambda n: vars(state).update(count=n),
    }
    monkeypatch.setattr(module, "torch", SimpleNamespace(**functions))
    return state


@pytest.fixture
def clock(monkeypatch):
    """A clock that only `taking` advances."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now.seconds))
    return now


def taking(clock, seconds: dict[int, float]):
    """An update that takes this long with each number of threads; the numbers that were tried."""
    tried = []

    def step() -> int:
        tried.append(module.torch.get_num_threads())
        clock.seconds += seconds[tried[-1]]
        return 10

    return step, tried


@pytest.mark.parametrize(
    ("seconds", "best", "last_tried"),
    [
        ({1: 0.002, 2: 0.02, 4: 0.02}, 1, 2),  # a small model, or a busy core
        ({1: 0.02, 2: 0.019, 4: 0.001}, 1, 2),  # a gain of 5 % is not worth another order of summation
        ({1: 0.02, 2: 0.01, 4: 0.012}, 2, 4),
        ({1: 0.02, 2: 0.01, 4: 0.005}, 4, 4),
    ],
)
def test_the_fastest_number_is_set(four_threads, clock, seconds, best, last_tried):
    step, tried = taking(clock, seconds)
    chosen = fastest(step)
    assert chosen.threads == best == four_threads.count and max(tried) == last_tried
    assert chosen.expected == pytest.approx(seconds[best] / 10)


def test_with_one_thread_nothing_is_measured(clock):
    step, tried = taking(clock, {1: 0.0})
    assert fastest(step, max_threads=1).threads == 1 and not tried


def test_a_number_that_is_far_slower_is_tried_once(four_threads, clock):
    step, tried = taking(clock, {1: 0.002, 2: 0.2, 4: 0.2})
    fastest(step)
    assert tried.count(2) == 1 and 4 not in tried


def test_updates_that_become_slow_are_measured_again_and_later_once_more(four_threads, clock):
    times = {1: 0.02, 2: 0.004, 4: 0.02}
    step, _ = taking(clock, times)
    with Threads(lambda: step) as threads:
        assert threads.count == 2
        assert not threads.observe(2.0, 5000)  # as quick as measured
        times[2] = 0.4  # another process takes a core
        assert not threads.observe(0.4, 10)  # one slow update is not yet a reason
        assert threads.observe(0.8, 20) and threads.count == 1
        times[2] = 0.004
        assert not threads.observe(2.0, 1000)  # as quick as measured with one thread
        clock.seconds += module.AGAIN
        assert threads.observe(2.0, 1000) and threads.count == 2
        clock.seconds += module.AGAIN
        assert not threads.observe(2.0, 5000)
    assert four_threads.count == 4


def test_a_fixed_number_is_never_changed(four_threads, clock):
    step, tried = taking(clock, {1: 0.0, 2: 0.0, 4: 0.0})
    with Threads(lambda: step, threads=3) as threads:
        assert four_threads.count == 3
        threads.resume(2)
        assert not threads.observe(100.0, 1) and four_threads.count == 3 and not tried
    assert four_threads.count == 4
    with pytest.raises(rg.SpecError, match=r"^threads=0: it needs to be at least 1$"):
        Threads(lambda: step, threads=0)


def test_measuring_does_not_change_the_run_and_a_resumed_run_keeps_its_number(tmp_path, four_threads):
    recipe = small(tmp_path, steps=2)
    run = Run(recipe, tmp_path / "out", "cpu")
    before = [p.clone() for p in run.model.parameters()], torch.get_rng_state(), run.trainer.stream.index
    with run.threads():
        assert set(run.trainer.threads.chosen.seconds) >= {1, 2}
    assert all(torch.equal(a, b) for a, b in zip(run.model.parameters(), before[0], strict=True))
    assert torch.equal(torch.get_rng_state(), before[1]) and run.trainer.stream.index == before[2]
    with run.threads(3):  # a number that is never measured: 1, 2 and 4 are
        assert run.trainer.threads.chosen.seconds == {}
        run.trainer.run()
    longer = Run(replace(recipe, settings=replace(recipe.settings, steps=3)), tmp_path / "out", "cpu")
    with longer.threads():
        longer.trainer.run()
        assert four_threads.count == 3
    assert four_threads.count == 4
