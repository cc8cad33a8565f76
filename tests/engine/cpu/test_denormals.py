"""Compiling for the CPU turns denormal numbers off for the whole thread; regard turns them on again."""

import pytest
import torch

from regard.engine.cpu import denormals


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this CPU cannot flush them")
def test_denormals_are_afterwards_as_they_were_before():
    with denormals.preserved():
        torch.set_flush_denormal(True)
        assert denormals.flushed()
    assert not denormals.flushed()
    torch.set_flush_denormal(True)
    with denormals.preserved():
        pass
    assert denormals.flushed()
    torch.set_flush_denormal(False)
