"""The cost of a declaration according to PyTorch: its tensors, and its FLOP counter on the decomposed path.

The decomposed path: modules and inputs live on the meta device, where attention runs as plain matrix products
(PyTorch's SDPA there is its math form); `plainly` makes regard's own formula run instead.
"""

from contextlib import contextmanager
from unittest import mock

import torch
from torch.utils.flop_counter import FlopCounterMode

import regard as rg
from regard.costs.entry import has_context
from regard.costs.flops.models import build_tree
from regard.costs.sizes import Request
from regard.costs.tree import Part
from regard.engine import attention as engine
from regard.engine.backends import TABLE

B, N, M = 2, 13, 11


def sizes(spec):
    """The lengths that `inputs` have, as `cost` takes them."""
    if isinstance(spec, rg.Vision):
        return {"batch": B}
    across = has_context(spec) and not (isinstance(spec, rg.Attention) and spec.d_context is None)
    return {"n": N, "batch": B} | ({"m": M} if across else {})


def priced(spec, train=False, by=None) -> Part:
    """The tree of the decomposed path, without memory and analysis, which hundreds of examples could not afford."""
    lengths = sizes(spec)
    n = lengths.get("n") or spec.tokens
    request = Request(spec, n, lengths.get("m", n), B, train=train, backend="reference")
    return build_tree(request, by)[0]


def built(spec):
    with torch.device("meta"):
        return spec.build()


def parameters(spec) -> int:
    return sum(p.numel() for p in built(spec).parameters())


def inputs(spec):
    def ids(n):
        return torch.zeros(B, n, dtype=torch.long, device="meta")

    def vectors(n, d):
        return torch.zeros(B, n, d, device="meta", requires_grad=True)

    match spec:
        case rg.EncoderDecoder() | rg.Recurrent():
            return ids(M), ids(N)
        case rg.Vision():
            return (torch.zeros(B, spec.channels, *spec.image, device="meta"),)
        case rg.Encoder() | rg.Decoder():
            x, block = vectors(N, spec.d_model) if spec.embedding is None else ids(N), spec.block
            return (x,) if block.cross is None else (x, vectors(M, block.cross.sizes.d_context))
        case rg.Block():
            x = vectors(N, spec.d_model)
            return (x,) if spec.cross is None else (x, vectors(M, spec.cross.sizes.d_context))
        case rg.Attention(d_context=None):
            return (vectors(N, spec.d_model),)
        case rg.Attention():
            return vectors(N, spec.d_model), vectors(M, spec.d_context)
        case rg.Convolutional():
            return (vectors(N, spec.d_model) if spec.vocab is None else ids(N),)
        case rg.Embedding():
            return (ids(N),)
    raise AssertionError(spec)


@contextmanager
def reference_backend():
    """Attention by regard's own formula, step by step."""
    with mock.patch.object(engine, "choose", lambda f, backend="auto": TABLE["reference"].prepare(f)):
        yield


def flops(spec, model=None) -> tuple[int, int]:
    """(forward, backward) according to the counter."""
    model = (model or built(spec)).train()
    with FlopCounterMode(display=False) as forward:
        out = model(*inputs(spec))
    with FlopCounterMode(display=False) as backward:
        if out.requires_grad:
            out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()
