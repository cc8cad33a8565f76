"""Random modules of PyTorch, drawn by a seed: `from_torch` takes each of them, with equal outputs."""

import random

import pytest
import torch
from torch import nn

import regard as rg
from regard.interop import from_torch
from regard.interop.torch_specs import ACTIVATIONS

CONFIGURATIONS = 90
KINDS = ("attention", "encoder layer", "decoder layer", "encoder", "decoder", "transformer")


def attention(draw: random.Random, heads: int, width: int, **more) -> nn.MultiheadAttention:
    given = {
        "bias": draw.random() < 0.7,
        "add_bias_kv": draw.random() < 0.3,
        "add_zero_attn": draw.random() < 0.3,
    }
    return nn.MultiheadAttention(heads * width, heads, batch_first=True, **given, **more)


def layer(draw: random.Random, heads: int, width: int, crosses: bool) -> nn.Module:
    kind = nn.TransformerDecoderLayer if crosses else nn.TransformerEncoderLayer
    d, bias = heads * width, draw.random() < 0.7
    activation = ACTIVATIONS[draw.choice(sorted(ACTIVATIONS))]
    made = kind(d, heads, draw.randint(5, 19), 0.0, activation, 1e-5, True, draw.random() < 0.5, bias)
    names = [f"norm{k + 1}" for k in range(3 if crosses else 2)]
    norms = draw.choice(["as made", "other eps", "rms"])
    for name in names if norms != "as made" else ():
        eps = draw.choice([1e-6, 1e-3, 0.1])
        setattr(made, name, nn.RMSNorm(d, eps) if norms == "rms" else nn.LayerNorm(d, eps, bias=bias))
    if draw.random() < 0.5:
        made.self_attn = attention(draw, heads, width)
    return made


def module(draw: random.Random, kind: str) -> tuple[nn.Module, int]:
    """A module and the width of its inputs."""
    heads, width, count = draw.randint(1, 4), draw.randint(2, 5), draw.randint(1, 2)
    d, crosses = heads * width, kind in ("decoder layer", "decoder")
    if kind == "attention":
        widths = {} if draw.random() < 0.5 else {"kdim": draw.randint(3, 9), "vdim": draw.randint(3, 9)}
        return attention(draw, heads, width, **widths), d
    if kind == "transformer":
        first, second = draw.random() < 0.5, draw.choice(sorted(ACTIVATIONS))
        return nn.Transformer(
            d, heads, count, 1, 11, 0.0, ACTIVATIONS[second], None, None, 1e-5, True, first
        ), d
    one = layer(draw, heads, width, crosses)
    if kind.endswith("layer"):
        return one, d
    norm = draw.choice([None, type(one.norm1)(d, draw.choice([1e-5, 1e-2]))])
    if norm is not None and isinstance(norm, nn.LayerNorm) and one.norm1.bias is None:
        norm = nn.LayerNorm(d, 1e-2, bias=False)
    if crosses:
        return nn.TransformerDecoder(one, count, norm), d
    return nn.TransformerEncoder(one, count, norm, enable_nested_tensor=False), d


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("kind", KINDS)
def test_random_modules_are_taken_with_equal_outputs(kind):
    draw = random.Random(f"24 {kind}")
    for _ in range(CONFIGURATIONS // len(KINDS)):
        torch.manual_seed(draw.randrange(1 << 20))
        theirs, d = module(draw, kind)
        theirs = theirs.double().train()  # the fast path of eval mode takes no RMSNorm
        with torch.no_grad():
            for p in theirs.parameters():
                p.add_(0.1 * torch.randn_like(p))
        causal, n, m = draw.random() < 0.5, draw.randint(2, 9), draw.randint(2, 9)
        ours = from_torch(theirs, pattern=rg.causal() if causal else rg.full())
        hidden = ~rg.causal().allowed(n) if causal else None
        x, c = torch.randn(2, n, d, dtype=torch.float64), torch.randn(2, m, d, dtype=torch.float64)
        if kind == "attention":
            k, v = (torch.randn(2, n, w, dtype=torch.float64) for w in (theirs.kdim, theirs.vdim))
            k, v = (x if theirs._qkv_same_embed_dim else k), (x if theirs._qkv_same_embed_dim else v)
            expected = theirs(x, k, v, attn_mask=hidden, need_weights=False)[0]
            found = ours(x, k, values=v)
        elif kind == "transformer":
            expected, found = theirs(c, x, tgt_mask=hidden), ours(c, x)
        elif kind.startswith("decoder"):
            expected, found = theirs(x, c, tgt_mask=hidden, tgt_is_causal=False), ours(x, c)
        else:
            # PyTorch's hint is_causal, which a stack finds by itself, would hide the keys that it adds at the end.
            mask = {"src_mask": hidden} if kind == "encoder layer" else {"mask": hidden}
            expected, found = theirs(x, **mask, is_causal=False), ours(x)
        assert torch.allclose(found, expected, rtol=1e-10, atol=1e-10), theirs
