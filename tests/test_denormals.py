"""Compiling for the CPU turns denormal numbers off for the whole thread; regard turns them on again."""

import pytest
import torch

import regard as rg
from regard.engine import denormals


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this CPU cannot flush them")
def test_denormals_are_afterwards_as_they_were_before():
    with denormals.kept():
        torch.set_flush_denormal(True)
        assert denormals.flushed()
    assert not denormals.flushed()
    torch.set_flush_denormal(True)
    with denormals.kept():
        pass
    assert denormals.flushed()
    torch.set_flush_denormal(False)


@pytest.mark.compiled
def test_the_law_of_compiled_code_leaves_them_alone():
    assert not denormals.flushed()
    assert rg.check(rg.attention, laws=["L55"], budget=2)["L55"].status == "holds"
    assert not denormals.flushed()
