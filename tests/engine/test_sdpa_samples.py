"""PyTorch's own sample inputs of scaled_dot_product_attention, through rg.attention."""

import pytest
import torch
from torch.testing import assert_close

import regard as rg

SDPA = torch.nn.functional.scaled_dot_product_attention


def through_regard(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """The same call in regard's words: bool masks are patterns, others a bias; is_causal is top left."""
    pattern, bias, at = None, None, None
    if is_causal:
        pattern, at = rg.causal(), 0
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        pattern = attn_mask
    elif attn_mask is not None:
        bias = attn_mask
    return rg.attention(q, k, v, pattern, bias=bias, at=at, dropout_p=dropout_p, scale=scale)


def samples():
    methods = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    (info,) = (op for op in methods.op_db if op.name == "nn.functional.scaled_dot_product_attention")
    return list(info.sample_inputs("cpu", torch.float64, requires_grad=True))


@pytest.mark.long  # the samples take 12 s to import
def test_every_sample_of_pytorch_is_taken_and_equal():
    ran = 0
    for sample in samples():
        options = dict(sample.kwargs)
        if options.get("dropout_p"):
            options["dropout_p"] = 0.0  # two generators do not drop the same weights
        q, k, v = sample.input, *sample.args[:2]
        options |= dict(zip(("attn_mask",), sample.args[2:]))
        found, right = through_regard(q, k, v, **options), SDPA(q, k, v, **options)
        where = f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}, {list(options)}"
        assert_close(found, right, msg=lambda text, where=where: f"{where}: {text}")
        grads = [torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (found, right)]
        assert_close(*grads, msg=lambda text, where=where: f"gradients of {where}: {text}")
        ran += 1
    assert ran >= 20
