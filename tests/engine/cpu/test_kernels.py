"""PyTorch's fused CPU attention as it is corrected here, and its replacement by products."""

from math import inf

import torch

from regard import compat
from regard.engine.cpu import kernels
from tile_cases import tensors


def added(allowed):
    """What is added to the scores."""
    return torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -inf)


def test_the_op_as_it_is_corrected_here():
    """An empty row has −∞ and zeros; no queries and no keys do not end the process."""
    q, k, v = (x.detach() for x in tensors(n=3))
    allowed = torch.tensor([[True, True, False], [False] * 3, [True] * 3])
    o, lse = kernels.fused_forward(q, k, v, 1.0, added(allowed), empty=~allowed.any(-1))
    assert (lse[:, :, 1] == -inf).all() and not o[:, :, 1].any() and lse[:, :, ::2].isfinite().all()
    assert kernels.fused_forward(q, k[:, :, :0], v[:, :, :0], 1.0)[0].shape == (2, 2, 3, 3)
    nothing = q[:, :, :0], k, v, o[:, :, :0], lse[:, :, :0]
    for got, x in zip(kernels.fused_backward(o[:, :, :0], nothing, 1.0), "qkv"):
        assert not got.any(), x


def test_without_the_private_op_products_give_the_same(monkeypatch):
    q, k, v = (x.detach() for x in tensors(n=7, h=4))
    allowed = torch.ones(7, 7, dtype=torch.bool).tril()
    allowed[2] = False

    def both():
        o, lse = kernels.fused_forward(q, k, v, 0.4, added(allowed), empty=~allowed.any(-1))
        of = q, k, v, o, lse.masked_fill(lse == -inf, inf)
        return o, lse, *kernels.fused_backward(o + 1, of, 0.4, added(allowed))

    fused = both()
    monkeypatch.setattr(compat, "flash_forward", compat._flash_by_products)
    monkeypatch.setattr(compat, "flash_backward", compat._flash_backward_by_products)
    for a, b in zip(fused, both()):
        torch.testing.assert_close(a, b)
