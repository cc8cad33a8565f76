"""Parameters equal the tensors built, FLOPs equal those of PyTorch's counter, and nothing is allocated."""

import warnings

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

import cost_witness as witness
import new_process
import regard as rg
from cost_strategies import specs
from regard.costs import cost

random_specs = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
# The shape checker samples a random item of a tuple, also while a strategy declares a spec.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
MASKS = (rg.causal(), rg.window(2), rg.causal() & (rg.window(1) | rg.every(3)), rg.strided(4), rg.blocks(5))


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rg.EmptyRowWarning)
        yield


@settings(random_specs)
@given(specs)
@pytest.mark.ledger("S2.1.2.1", "S2.1.2.3")
def test_the_parameters_of_any_declaration_are_those_of_its_tensors(spec):
    assert witness.priced(spec).total.parameters == witness.parameters(spec)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.long) if n == "transformer-big" else n for n in rg.presets()],
)
@pytest.mark.ledger("S0.Q2a.5", "S2.1.2.5", "S2.1.2.6", "S0.Q2a.10", "S3.Q2c.6", "S1.Q2b.3")
def test_a_preset_has_the_parameters_of_its_tensors_and_the_flops_of_the_counter(name):
    """Forward and backward, with PyTorch's SDPA as plain matrix products."""
    spec = rg.preset(name)
    result, model = witness.priced(spec, train=True).total, witness.built(spec)
    assert result.parameters == sum(p.numel() for p in model.parameters())
    seen = witness.flops(spec, model)
    assert (result.executed_flops, result.executed_backward_flops) == seen
    assert seen[0] > 0 and seen[1] > seen[0]


@pytest.mark.parametrize(
    "name",
    [n if n.startswith("tiny") else pytest.param(n, marks=pytest.mark.long) for n in rg.presets()],
)
def test_a_preset_has_the_same_flops_by_the_reference_backend(name):
    spec = rg.preset(name)
    result = witness.priced(spec, train=True).total
    with witness.reference_backend():
        assert witness.flops(spec) == (result.executed_flops, result.executed_backward_flops)


@pytest.mark.parametrize("pattern", MASKS, ids=repr)
def test_a_mask_saves_no_executed_flops_on_the_decomposed_path(pattern):
    spec = rg.Attention(60, heads=4, kv_heads=2, pattern=pattern)
    result = cost(spec, n=witness.N, batch=witness.B, backend="reference").total
    assert (result.executed_flops, result.executed_backward_flops) == witness.flops(spec)
    core = 2 * 60 * witness.B  # scores or mixing of one pair, over all heads and batch rows
    pairs = int(pattern.allowed(witness.N).sum())
    assert result.executed_flops - result.flops == 2 * core * (witness.N**2 - pairs)
    assert result.executed_backward_flops - result.backward_flops == 4 * core * (witness.N**2 - pairs)


@settings(random_specs, max_examples=15)
@given(specs)
def test_the_flops_of_any_declaration_are_those_of_the_counter(spec):
    check_operations(spec)


@pytest.mark.long
@settings(random_specs, max_examples=1000)
@given(specs)
def test_the_flops_of_a_thousand_declarations_are_those_of_the_counter(spec):
    check_operations(spec)


def check_operations(spec):
    assume(not isinstance(spec, rg.Embedding))
    result = witness.priced(spec, train=True)
    with witness.reference_backend():
        seen = witness.flops(spec)
    surplus = _counted_as_dense(spec, result)
    assert (result.total.executed_flops, result.total.executed_backward_flops + surplus) == seen


def _counted_as_dense(spec, result) -> int:
    """PyTorch's counter counts the weight gradient of a depthwise convolution as if it were dense."""
    if not isinstance(spec, rg.Convolutional) or not spec.separable:
        return 0
    return (spec.d_model - 1) * spec.layers * result["layer/depthwise"].total.executed_flops


@pytest.mark.parametrize(
    "spec", [rg.Attention(60, heads=4, dropout=0.1), rg.Attention(60, dropout=0.2, heads=5)]
)
def test_with_dropout_of_the_weights_the_reference_backend_mixes_twice(spec):
    result = cost(spec, n=witness.N, batch=witness.B, train=True, backend="reference").total
    with witness.reference_backend():
        assert witness.flops(spec) == (result.executed_flops, result.executed_backward_flops)


def test_a_fused_backend_recomputes_the_scores_in_the_backward_pass():
    spec = rg.Attention(64, heads=4)
    plain, fused = (
        cost(spec, n=32, train=True, backend=name)["scores"].total for name in ("reference", "sdpa")
    )
    assert (
        plain.executed_backward_flops
        == plain.backward_flops
        == fused.backward_flops
        == 2 * plain.executed_flops
    )
    assert fused.executed_backward_flops == 3 * fused.executed_flops


TIMING = """
import sys, time
from regard.costs import cost
for name in sys.argv[1:]:
    n = {"vit-b16": None, "tiny-vit": None, "bert-base": 512, "tiny-bert": 128}.get(name, 1024)
    start = time.process_time()
    result = cost(name, n=n)
    assert f"{result.parameters:,}" in str(result)
    assert cost(name, n=n, train=True).total.backward_flops > result.flops
    print(name, time.process_time() - start)
"""


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["gpt2", "transformer-base", "vit-b16"], id="three"),
        pytest.param(rg.presets(), id="all", marks=pytest.mark.long),
    ],
)
def test_a_preset_is_priced_and_printed_in_half_a_second_after_import(names):
    """In a separate process: no shape checker, empty caches."""
    done = new_process.run(TIMING, *names)
    assert done.returncode == 0, done.stderr
    seconds = dict(line.split() for line in done.stdout.splitlines())
    assert list(seconds) == names
    assert not {name: s for name, s in seconds.items() if float(s) >= 0.5}


def test_no_weight_is_allocated_while_pricing(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a tensor was allocated")

    monkeypatch.setattr(torch, "empty", refuse)
    monkeypatch.setattr(torch.nn, "Linear", refuse)
    assert cost("gpt2", n=256).parameters == 124_439_808
