"""The kernels of a training step under Triton's interpreter, in a process of their own: one line of JSON a case.

    TRITON_INTERPRET=1 python fused_qkv_cases.py

Each gives the largest errors beside float64, of the output and of every gradient.
"""

import json
import sys
from unittest import mock

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

import regard as rg
from interpreter import quicken
from regard import reference
from regard.engine import fused_qkv
from regard.engine.fused_qkv import Options
from regard.training.loop import loss_cuda
from regard.training.recipes.tasks import Translation

NAN = float("nan")
OWN = Options(4, 2, 5, 3, True, 0.3)
ATTENDS = {  # b, n, m (None: over itself), lengths, dtype
    "over itself, causal, in groups": (OWN, 2, 7, None, None, torch.float32),
    "over a context with hidden keys": (
        Options(2, 2, 16, 16, False, 0.5),
        3,
        19,
        23,
        (0, 9, 23),
        torch.float32,
    ),
    "in half precision, with lengths": (OWN._replace(d_k=24), 2, 33, None, (33, 5), torch.float16),
    "with dropout": (Options(2, 1, 16, 16, False, 0.25, 0.3), 2, 13, None, None, torch.float32),
}
LOSSES = {  # chunk, smoothing, bias
    "plain": (1024, 0.0, False),
    "smoothed, in chunks": (7, 0.1, False),
    "with a bias, by the token": (1, 0.1, True),
}


def heads(x: Tensor, c: Tensor | None, a: Options) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of a fused projection, the heads of a group side by side."""
    q, rest = x[..., : a.heads * a.d_k], x[..., a.heads * a.d_k :]
    k, v = (rest if c is None else c).split([a.kv_heads * a.d_k, a.kv_heads * a.d_v], -1)
    k, v = (repeat(t, "b m (h d) -> b (h g) m d", h=a.kv_heads, g=a.heads // a.kv_heads) for t in (k, v))
    return rearrange(q, "b n (h d) -> b h n d", h=a.heads), k, v


def formula(x: Tensor, c: Tensor | None, lengths: Tensor | None, a: Options, stays: Tensor | None) -> Tensor:
    q, k, v = heads(x, c, a)
    allowed = torch.ones(len(q), 1, q.shape[2], k.shape[2], dtype=torch.bool)
    if a.causal:
        allowed = allowed.tril()
    if lengths is not None:
        seen = torch.arange(k.shape[2]) < lengths[:, None]
        allowed = allowed & seen[:, None, None]
        k, v = (t.masked_fill(~seen[:, None, :, None], 0.0) for t in (k, v))
    weights = reference.attend(q, k, v, allowed, scale=a.scale).weights
    weights = weights if stays is None else weights * stays
    return rearrange(weights @ v, "b h n d -> b n (h d)")


def whose(x: Tensor, seed: Tensor, a: Options) -> Tensor:
    """0, or 1 / (1 − p), for each weight: with equal keys, what one key after the other gives is that times 1/n."""
    n, first = x.shape[1], a.heads * a.d_k + a.kv_heads * a.d_k
    kept = []
    for j in range(n):
        one = torch.zeros_like(x)
        one[:, j, first:] = n
        o = torch.ops.regard.fused_qkv(one, None, None, seed, *a)
        kept.append(rearrange(o, "b n (h d) -> b h n d", h=a.heads)[..., 0])
    return torch.stack(kept, -1)


def attend(asked: Options, b: int, n: int, m: int | None, lengths, dtype: torch.dtype) -> dict:
    torch.manual_seed(n)
    own = asked.kv_heads * (asked.d_k + asked.d_v)
    x = torch.randn(b, n, asked.heads * asked.d_k + (0 if m else own), dtype=dtype)
    c = torch.randn(b, m, own, dtype=dtype) if m else None
    lengths = None if lengths is None else torch.tensor(lengths)
    true = [t.double().requires_grad_() for t in (x, c) if t is not None]
    if c is not None and lengths is not None:
        c[torch.arange(m) >= lengths[:, None]] = NAN  # hidden, whatever it is
    given = [t.requires_grad_() for t in (x, c) if t is not None]
    state = torch.get_rng_state()
    o = fused_qkv.attend(x, c, lengths, asked)
    grad = torch.randn_like(o)
    torch.set_rng_state(state)
    seed = torch.randint(2**31 - 1, (1,)) if asked.dropout_p else None
    stays = None if seed is None else whose(x.detach(), seed, asked).double()
    wanted = formula(true[0], true[1] if m else None, lengths, asked, stays)
    differences = [float((o - wanted).detach().abs().max())]
    for fast, slow in zip(
        torch.autograd.grad(o, given, grad), torch.autograd.grad(wanted, true, grad.double())
    ):
        differences.append(float((fast - slow).abs().max()))
    stayed = None if stays is None else float((stays > 0).double().mean())
    return {"errors": differences, "stayed": stayed}


def layer(context: bool) -> dict:
    """A layer with a fused projection, compared with the same layer without."""
    torch.manual_seed(3)
    declared = rg.Attention(
        24, heads=3, pattern=rg.full() if context else rg.causal(), d_context=17 if context else None
    )
    module = declared.build()
    x = torch.randn(2, 11, 24)
    c = torch.randn(2, 13, 17) if context else None
    lengths = torch.tensor([13, 4]) if context else None
    given = list(module.parameters())
    ours = module._output(module._fused(x, c, lengths), True)
    usual = module(x, c, lengths=lengths)
    grad = torch.randn_like(ours)
    pairs = zip(torch.autograd.grad(ours, given, grad), torch.autograd.grad(usual, given, grad), strict=True)
    return {"errors": [float((a - b).abs().max()) for a, b in [(ours, usual), *pairs]]}


def loss(chunk: int, smoothing: float, biased: bool) -> dict:
    torch.manual_seed(5)
    states, table = torch.randn(13, 5, requires_grad=True), torch.randn(11, 5, requires_grad=True)
    bias = torch.randn(11, requires_grad=True) if biased else None
    y = torch.randint(11, (13,))
    y[::4] = -100
    given = [t for t in (states, table, bias) if t is not None]
    ours, plain = loss_cuda.cross_entropy(states, table, y, bias, smoothing, chunk)
    logits = F.linear(*(None if t is None else t.double() for t in (states, table, bias)))
    true = F.cross_entropy(logits, y, label_smoothing=smoothing, reduction="sum")
    pairs = [(ours, true), (plain, F.cross_entropy(logits, y, reduction="sum"))]
    pairs += zip(torch.autograd.grad(ours / 7, given), torch.autograd.grad(true / 7, given), strict=True)
    with torch.no_grad():
        pairs += [(loss_cuda.cross_entropy(states, table, y, bias, smoothing, chunk)[0], true)]
    return {"errors": [float((a - b).detach().abs().max()) for a, b in pairs]}


def model() -> dict:
    """A translator's loss and gradients with all these kernels, compared with those without."""
    torch.manual_seed(11)
    embedding, mlp = rg.Embedding(13, 24), rg.FeedForward(40)
    own, past = rg.Attention(24, heads=3), rg.Attention(24, heads=3, pattern=rg.causal())
    encoder = rg.Encoder(rg.Block(own, mlp, norm_at="pre"), 1, embedding=embedding)
    decoder = rg.Block(past, mlp, cross=own, norm_at="pre")
    built = rg.EncoderDecoder(
        encoder, rg.Decoder(decoder, 1, embedding=embedding, head=rg.LanguageHead()), share_embedding=True
    ).build()
    task = Translation(built, 0.1)
    source, target, wanted = torch.randint(4, 13, (3, 2, 7))
    wanted[1, 5:] = -100
    given = {
        "source": source,
        "source_lengths": torch.tensor([7, 3]),
        "target": target,
        "targets": wanted,
    }

    def run() -> list[Tensor]:
        loss, plain = task(**given)
        return [loss, plain, *torch.autograd.grad(loss, list(task.parameters()))]

    usual = run()
    with (
        mock.patch.object(torch.Tensor, "is_cuda", True),
        mock.patch.object(fused_qkv, "fits", lambda *given: True),
    ):
        ours = run()
    return {
        "errors": [float((a - b).detach().abs().max() / (1 + b.abs().max())) for a, b in zip(ours, usual)]
    }


def main() -> None:
    quicken()
    from regard.training.loop import cross_entropy_kernel

    cross_entropy_kernel.BLOCK = 4  # several blocks per row
    for name, case in ATTENDS.items():
        print(json.dumps({"name": name, **attend(*case)}))
    for name, context in (("a layer over itself", False), ("a layer over a context", True)):
        print(json.dumps({"name": name, **layer(context)}))
    print(json.dumps({"name": "a whole model", **model()}))
    for name, case in LOSSES.items():
        print(json.dumps({"name": name, **loss(*case)}))


if __name__ == "__main__":
    sys.exit(main())
