"""The Triton kernels without a GPU: small cases under Triton's interpreter, in processes of their own.

In float32 and float16 the interpreter computes as a GPU does, but for rounding. Its bfloat16 is silently wrong: for
that, see test_gpu.py.
"""

from itertools import product

import pytest
import torch

from kernel_cases import ON_GPU, OTHERS, PREPARED, REPEATED, SHORT, SMALL, bias, complaints, outcomes, tensors
from regard.engine.call import Extras, Options
from regard.pattern import causal
from triton_interpreter import needs_interpreter

pytestmark = needs_interpreter


@pytest.fixture(scope="module")
def results():
    return outcomes([*SMALL, *SHORT], "cpu")  # the other core has other tests


@pytest.mark.parametrize("name", [case.name for case in [*SMALL, *SHORT]])
def test_o_lse_and_gradients_are_as_exact_as_plain_pytorch(results, name):
    assert not complaints(results[name])


@pytest.fixture(scope="module")
def other_results():
    return outcomes(OTHERS, "cpu", processes=2)


@pytest.mark.long
@pytest.mark.parametrize("name", [case.name for case in OTHERS])
def test_o_lse_and_gradients_of_the_other_cases_are_as_exact(other_results, name):
    assert not complaints(other_results[name])


@pytest.mark.parametrize("name", REPEATED)
def test_a_second_run_gives_the_same_bits(results, name):
    assert results[name]["same"]


def test_the_tensors_of_a_case_do_not_depend_on_the_default_dtype():
    """A second run has another one: its bits are compared with those of the first (see `again`)."""
    steep = next(case for case in ON_GPU if case.steep)
    learned = next(case for case in ON_GPU if case.reach and case.slopes and not case.lengths)
    for case in (steep, learned):
        before = [*tensors(case, "cpu"), *bias(case, "cpu", torch.float64).values()]
        torch.set_default_dtype(torch.float16)
        try:
            after = [*tensors(case, "cpu"), *bias(case, "cpu", torch.float64).values()]
        finally:
            torch.set_default_dtype(torch.float32)
        assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize("name", PREPARED)
def test_a_prepared_call_gives_the_same_bits(results, name):
    assert results[name]["prepared"]


@pytest.mark.parametrize("case", [*SMALL, *SHORT], ids=lambda case: case.name)
def test_the_backward_pass_of_a_short_call_is_one_launch_unless_a_configuration_is_given(results, case):
    assert results[case.name]["one_launch"] == case.stored


def test_the_cases_take_every_branch_of_the_kernels(results):
    taken = {branch for one in results.values() for branch in one.get("branches", ())}
    branches = [f"{length}, {place}" for length, place in product(("whole", "split"), ("first", "goes on"))]
    branches += ["keeps all", "keeps some", "1 segments", "2 segments", "3 segments", "full", "ragged"]
    assert {f"{direction}, {one}" for direction, one in product(("by rows", "by keys"), branches)} <= taken


@pytest.mark.parametrize("n, m", [(0, 5), (5, 0), (0, 0)])
def test_no_query_or_no_key_gives_zeros_and_minus_infinity(n, m):
    from regard.engine.cuda import host
    from regard.engine.cuda.call import task

    q, k, v = (torch.zeros(1, 2, *shape) for shape in ((n, 4), (m, 4), (m, 3)))
    made = task(q, v, Options(causal(), 0, 1, 0.5))
    o, lse = host.forward(q, k, v, made)
    assert torch.equal(o, torch.zeros(1, 2, n, 3))
    assert torch.equal(lse, torch.full((1, 2, n), -torch.inf))
    *grads, of_table, of_slopes, of_sink = host.backward((q, k, v, o, lse), (torch.ones_like(o), None), made)
    assert all(map(torch.equal, grads, map(torch.zeros_like, (q, k, v)))) and len(grads) == 3
    assert of_table is of_slopes is of_sink is None


@pytest.mark.parametrize("b, n, m", [(0, 1, 19), (2, 0, 19), (2, 1, 0), (0, 0, 0)])
@pytest.mark.parametrize("by_row", [False, True])
def test_a_prepared_call_without_batch_rows_queries_or_keys_gives_zeros(b, n, m, by_row):
    from regard.engine.cuda import host
    from regard.engine.cuda.call import task

    q, k, v = (torch.ones(b, 2, *shape, requires_grad=True) for shape in ((n, 4), (m, 4), (m, 8)))
    prepared = host.PreparedAttention(task(q, v, Options(causal(), m - n, 1, 0.5)), True)
    rows = (None, torch.zeros(b, dtype=torch.int32), None) if by_row else ()
    for _ in range(2):
        o = prepared(q, k, v, *rows)
        assert torch.equal(o, torch.zeros(b, 2, n, 8))
        assert all(
            map(torch.equal, torch.autograd.grad(o.sum(), (q, k, v)), map(torch.zeros_like, (q, k, v)))
        )


def test_a_bias_and_a_sink_have_gradients_of_zero_where_there_is_no_query_and_no_key():
    from regard.engine.cuda import host
    from regard.engine.cuda.call import task

    q, k, v = (torch.zeros(1, 2, 0, d) for d in (4, 4, 3))
    terms = torch.ones(2, 3), torch.ones(2), torch.ones(2)
    extras = Extras(*terms[:2], lengths=torch.zeros(1, dtype=torch.int32), sink=terms[2])
    made = task(q, v, Options(causal(), 0, 1, 0.5), extras)
    saved = q, k, v, *host.forward(q, k, v, made, extras)
    grads = host.backward(saved, (torch.ones(1, 2, 0, 3), None), made, extras, bias_gradient=True)
    assert all(map(torch.equal, grads, map(torch.zeros_like, (q, k, v, *terms)))) and len(grads) == 6
