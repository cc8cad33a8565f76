"""One machine, one result: the same instructions, the same threads, the same examples on every run."""

import gc
import os

# Before torch is imported: on some CPUs oneDNN's bfloat16 products end in an illegal instruction otherwise.
os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
# Threads that wait for others sleep: the core on which they would spin runs the other half of the tests.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from collections import Counter
from functools import wraps
from pathlib import Path

import jaxtyping
import pytest
import torch
from hypothesis import HealthCheck, settings

import class_sources
import shape_checks

class_sources.install()
shape_checks.install()  # before regard is imported

from regard import compat  # noqa: E402
from regard.pattern import KINDS  # noqa: E402

gc.disable()  # until all tests are collected: what is imported and collected stays
THREADS = torch.get_num_threads()  # of a new process
torch.set_num_threads(1)  # the tensors here are small, and the other core has other work

# `make long` looks further than `make test` has time for: 500.
settings.register_profile(
    "regard",
    derandomize=True,
    deadline=None,
    max_examples=int(os.environ.get("REGARD_EXAMPLES", "60")),
    suppress_health_check=[HealthCheck.too_slow],  # a busy machine is no bug
)
settings.load_profile("regard")


GARBAGE = 10_000, 20, 20  # Python's own thresholds take a tenth of the time of these tests
QUICK_CASES = 2  # of each parametrized test
CHECKED_EXAMPLES = 10  # of each law, where not all cases are shape-checked
CASE = pytest.StashKey[int]()  # the number of a case among those of its test, from 1


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help=f"{QUICK_CASES} cases per test, none marked slow")
    parser.addoption("--checked-cases", type=int, help="cases of each test whose calls are shape-checked")


@pytest.hookimpl(trylast=True)  # cases that -m leaves out are not counted
def pytest_collection_modifyitems(config, items):
    """`make quick`: the first cases of each parametrized test, without the tests marked slow."""
    seen, selected, deselected = Counter(), [], []
    for item in items:
        name = item.nodeid.split("[")[0]
        seen[name] += 1
        item.stash[CASE] = seen[name]
        slow = item.get_closest_marker("slow") is not None
        (deselected if slow or seen[name] > QUICK_CASES else selected).append(item)
    if config.getoption("--quick"):
        config.hook.pytest_deselected(items=deselected)
        items[:] = selected


def pytest_collection_finish():
    """What is there is not searched for garbage again."""
    gc.freeze()
    gc.set_threshold(*GARBAGE)
    gc.enable()


def pytest_unconfigure():
    """Triton's compiler complains about what is not freed at the end."""
    gc.unfreeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """With --checked-cases, shapes are checked in the first cases of each test, each kind of call once: the others
    call the same functions, and checking doubles the time of the engine's tests."""
    limit = item.config.getoption("--checked-cases")
    checked = limit is None or item.stash[CASE] <= limit
    jaxtyping.config.update("jaxtyping_disable", not checked)
    shape_checks.begin(once=limit is not None)
    if checked and limit is not None and getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
        item.obj.hypothesis.inner_test = check_first_examples(item.obj.hypothesis.inner_test)
    return (yield)


def check_first_examples(test):
    """The test of a law, whose shapes are checked in the first CHECKED_EXAMPLES examples."""
    count = 0

    @wraps(test)
    def run(*arguments, **named):
        nonlocal count
        count += 1
        jaxtyping.config.update("jaxtyping_disable", count > CHECKED_EXAMPLES)
        return test(*arguments, **named)

    return run


@pytest.fixture(autouse=True)
def denormals_as_they_were():
    """A test that compiles for the CPU must not change the numbers of those after it."""
    torch.set_flush_denormal(False)  # nor must what the tests of a module share, which is made before this
    with compat.denormals_preserved():
        yield


@pytest.fixture(autouse=True)
def words_as_they_were():
    """A word that a test or a page adds is unknown to the tests after it."""
    before = dict(KINDS)
    yield
    for name in set(KINDS) - set(before):
        del KINDS[name]


@pytest.fixture
def threads_of_a_new_process():
    return THREADS


@pytest.fixture(scope="module")
def browser():
    """A real one, where there is one."""
    chromium = Path("/usr/bin/chromium")
    if not chromium.exists():
        pytest.skip("no chromium here")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as running:
        one = running.chromium.launch(executable_path=str(chromium), args=["--no-sandbox"])
        yield one
        one.close()
