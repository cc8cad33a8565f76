"""Compiling for the CPU turns denormal numbers off for the whole thread; regard turns them on again."""

import pytest
import torch

from regard import compat


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this CPU cannot flush them")
def test_the_denormal_mode_is_restored():
    with compat.denormals_preserved():
        torch.set_flush_denormal(True)
        assert compat.denormals_flushed()
    assert not compat.denormals_flushed()
    torch.set_flush_denormal(True)
    with compat.denormals_preserved():
        pass
    assert compat.denormals_flushed()
    torch.set_flush_denormal(False)
