"""On a GPU, too, what `explain` names is what runs: backends by their entry points, variants by the kernels launched.

PYTHONPATH=src:tests/helpers python3 -m pytest tests/engine/gpu/test_gpu_explain.py -q -n 4

300 calls; with -m 'not long', the first 40.
"""

import importlib.util
from contextlib import ExitStack
from unittest import mock

import pytest
import torch

from random_calls import observed, random_call
from regard.engine import backends
from regard.engine.attention import attention
from regard.engine.explain import explain

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]


@pytest.fixture
def launched():
    """A list that receives what is launched: module and name of each kernel, and whether it runs on lists of members.

    One patch for the whole test: a prepared call keeps the method that it was prepared with.
    """
    from regard.engine.cuda.prepared import PREPARED, Launch, Program

    modules = []

    def module(launch):
        listed = getattr(getattr(launch.sizes.get("S"), "LISTED", False), "value", False)
        kernel = getattr(launch.kernel, "fn", launch.kernel)
        return f"{kernel.__module__}.{kernel.__name__}" + (", lists" if listed else "")

    def noting(real, launches):
        def run(self, *given):
            modules.extend(map(module, launches(self)))
            return real(self, *given)

        return run

    PREPARED.clear()
    backends.PREPARED.clear()
    alone, of_program = (lambda one: [one]), (lambda program: [launch for launch, *_ in program.launches])
    with ExitStack() as stack:
        for kind, name, launches in (
            (Launch, "__call__", alone),
            (Program, "run", of_program),
        ):
            stack.enter_context(mock.patch.object(kind, name, noting(getattr(kind, name), launches)))
        yield modules
    PREPARED.clear()
    backends.PREPARED.clear()


def take(modules):
    """What has been launched since the last time."""
    taken = modules[:]
    modules.clear()
    return taken


def variant(forward, backward, grad, n):
    """The variant of triton that these kernels are."""
    names = ["Hopper" if any(".hopper." in module for module in forward) else "general kernels"]
    if any(module.endswith(".decode_kernel") for module in forward):
        names = ["one query" if n == 1 else "few queries"]
    if grad and any(module.endswith(", lists") for module in backward):
        names.append("one-launch backward")
    return ", ".join(names)


SEEDS = [range(40), *(pytest.param(range(a, a + 65), marks=pytest.mark.long) for a in range(40, 300, 65))]


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_what_is_explained_is_what_runs(seeds, launched):
    met = set()
    for seed in seeds:
        given, options = random_call(seed, "cuda")
        result = explain(*given, **options)
        met.add(result.backend)
        grad = given[0].requires_grad
        for _ in range(2):
            with observed() as ran:
                out = attention(*given, **options)
            forward = take(launched)
            if grad:
                o = out[0] if isinstance(out, tuple) else out
                torch.autograd.grad(o.float().sum(), given[:3], allow_unused=True)
            backward = take(launched)
            if result.backend == "triton":
                # A pattern without a pair at this size may launch nothing.
                assert not ran and (forward or not result.needed), (seed, given[3], options)
                if result.needed:
                    assert variant(forward, backward, grad, given[0].shape[-2]) == result.variant, (
                        seed,
                        given[3],
                        options,
                    )
            else:
                assert set(ran) == {f"{result.backend}, {result.variant}"}, (seed, given[3], options)
                assert not forward
    assert {"sdpa", "triton"} <= met
