"""The Triton kernels on a GPU, with their stored configurations, in bfloat16, float16 and float32.

    PYTHONPATH=src:tests python3 -m pytest tests/test_gpu.py -q

Most of the time goes into compiling, so the cases are dealt to several processes.
"""

import importlib.util
import os

import pytest
import torch

from kernel_cases import ON_GPU, complaints, outcomes
from regard.errors import BackendError
from regard.pattern import causal

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]


@pytest.fixture(scope="module")
def told():
    return outcomes(ON_GPU, "cuda", processes=min(12, os.cpu_count() or 1))


@pytest.mark.parametrize("name", [case.name for case in ON_GPU])
def test_o_lse_and_gradients_are_as_exact_as_plain_pytorch(told, name):
    assert not complaints(told[name])


@pytest.mark.parametrize("name", [case.name for case in ON_GPU])
def test_a_second_run_gives_the_same_bits(told, name):
    assert told[name].get("same"), told[name].get("failure", "the bits differ")


def test_tensors_on_two_devices_are_refused_by_name():
    from regard.engine import kernels

    q, k, v = (torch.zeros(1, 1, 5, 4, device=device) for device in ("cuda", "cpu", "cuda"))
    with pytest.raises(BackendError) as caught:
        kernels.attend(q, k, v, causal(), 0)
    assert str(caught.value) == f"q, k, v lie on {q.device}, cpu, {q.device}: move them to one device"
