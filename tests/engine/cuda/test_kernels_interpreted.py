"""The Triton kernels without a GPU: some fifty small cases under Triton's interpreter, in a process of its own.

In float32 and float16 the interpreter computes as a GPU does, but for rounding. Its bfloat16 is silently wrong: for
that, see test_gpu.py.
"""

import importlib.util
from itertools import product

import pytest
import torch

from kernel_cases import BRIEF, SMALL, TWICE, complaints, outcomes
from regard.errors import BackendError
from regard.pattern import causal

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def told():
    return outcomes([*SMALL, *BRIEF], "cpu", processes=2)


@pytest.mark.parametrize("name", [case.name for case in [*SMALL, *BRIEF]])
def test_o_lse_and_gradients_are_as_exact_as_plain_pytorch(told, name):
    assert not complaints(told[name])


@pytest.mark.parametrize("name", TWICE)
def test_a_second_run_gives_the_same_bits(told, name):
    assert told[name]["same"]


@pytest.mark.parametrize("name", TWICE)
def test_a_remembered_call_gives_the_same_bits(told, name):
    assert told[name]["again"]


@pytest.mark.parametrize("case", [*SMALL, *BRIEF], ids=lambda case: case.name)
def test_short_calls_go_backward_by_one_launch_unless_a_configuration_is_given(told, case):
    assert told[case.name]["brief"] == case.stored


def test_the_cases_take_every_branch_of_the_kernels(told):
    taken = {branch for one in told.values() for branch in one.get("branches", ())}
    ways = [f"{length}, {place}" for length, place in product(("whole", "split"), ("first", "goes on"))]
    ways += ["keeps all", "keeps some", "1 segments", "2 segments", "3 segments", "full", "ragged"]
    assert {f"{direction}, {way}" for direction, way in product(("by rows", "by keys"), ways)} <= taken


def heads(n, m, d_k=4, d_v=3, dtype=torch.float32):
    return (torch.zeros(1, 2, *s, dtype=dtype) for s in ((n, d_k), (m, d_k), (m, d_v)))


def attend(q, k, v):
    from regard.engine import cuda as kernels

    return kernels.attend(q, k, v, kernels.task(q, v, (causal(), 0, 1, 0.5)))


@pytest.mark.parametrize("n, m", [(0, 5), (5, 0), (0, 0)])
def test_no_query_or_no_key_gives_zeros_and_minus_infinity(n, m):
    o, lse = attend(*heads(n, m))
    assert torch.equal(o, torch.zeros(1, 2, n, 3))
    assert torch.equal(lse, torch.full((1, 2, n), -torch.inf))


def test_a_head_too_wide_is_refused_by_name():
    with pytest.raises(BackendError) as caught:
        attend(*heads(5, 5, d_v=257))
    assert str(caught.value) == ("a head of width 257 does not fit the Triton kernels, which hold up to 256")


@pytest.mark.parametrize(
    "dtypes",
    [(torch.float64,) * 3, (torch.float32, torch.float16, torch.float32)],
)
def test_a_dtype_the_kernels_do_not_hold_is_refused_by_name(dtypes):
    q, k, v = (x.to(dtype) for x, dtype in zip(heads(5, 5), dtypes))
    with pytest.raises(BackendError) as caught:
        attend(q, k, v)
    assert str(caught.value) == (
        "the Triton kernels take float32, float16 or bfloat16, one for all; q, k, v are "
        + ", ".join(map(str, dtypes))
    )
