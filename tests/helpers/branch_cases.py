"""Branch ends under Triton's interpreter, in a process of their own: one line of JSON per case.

    TRITON_INTERPRET=1 python branch_cases.py

Each gives the largest errors of the outputs and of every gradient against float64, with the sampled dropout mask.
"""

import json
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard as rg
from regard.nn import branch_end, branch_kernel
from regard.training.loop.trainer import fuse_branch_ends
from regard.training.recipes.tasks import Translation

CASES = {  # rows, width, norm, dropout
    "layer norm": (7, 20, nn.LayerNorm(20), 0.0),
    "layer norm, dropout": (37, 24, nn.LayerNorm(24), 0.3),
    "layer norm without bias, dropout": (5, 3, nn.LayerNorm(3, bias=False), 0.5),
    "layer norm without weights": (5, 9, nn.LayerNorm(9, elementwise_affine=False), 0.2),
    "rms norm, dropout": (11, 33, nn.RMSNorm(33, 1e-5), 0.1),
}


def exact_norm(norm: nn.Module, x: Tensor, parameters: list[Tensor]) -> Tensor:
    if isinstance(norm, nn.RMSNorm):
        return x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * parameters[0]
    return F.layer_norm(x, x.shape[-1:], *[*parameters, None, None][:2], eps=norm.eps)


def case(rows: int, width: int, norm: nn.Module, p: float) -> dict:
    torch.manual_seed(rows)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x, y = (torch.randn(1, rows, width, requires_grad=True) for _ in range(2))
    state = torch.get_rng_state()
    total, out = branch_end.branch_end(x, y, norm, p, torch.float32)
    torch.set_rng_state(state)
    # With x = 0 and y = 1 the sum is the mask itself.
    zeros, ones = torch.zeros(1, rows, width), torch.ones(1, rows, width)
    mask = branch_end.branch_end(zeros, ones, norm, p, torch.float32)[0].detach().double()
    given = [x, y, *norm.parameters()]
    true = [t.detach().double().requires_grad_() for t in given]
    exact_total = true[0] + mask * true[1]
    exact_out = exact_norm(norm, exact_total, true[2:])
    d_total, d_out = torch.randn_like(total), torch.randn_like(out)
    grads = torch.autograd.grad([total, out], given, [d_total, d_out])
    exact = torch.autograd.grad([exact_total, exact_out], true, [d_total.double(), d_out.double()])
    alone = torch.autograd.grad(branch_end.branch_end(x, y, norm, 0.0, torch.float32)[1], given, d_out)
    exact_alone = torch.autograd.grad(exact_norm(norm, true[0] + true[1], true[2:]), true, d_out.double())
    pairs = [(total, exact_total), (out, exact_out), *zip(grads, exact), *zip(alone, exact_alone)]
    errors = [float((a - b).detach().abs().max()) for a, b in pairs]
    kept = float((mask > 0).double().mean())
    return {"errors": errors, "kept": kept, "factor": float(mask.max()) * (1 - p)}


def relu() -> dict:
    torch.manual_seed(3)
    x = torch.randn(3, 700, requires_grad=True)
    out = branch_end.relu_dropout(x, 0.4)
    mask = ((out > 0) | (x <= 0)).double()
    grad = torch.randn_like(out)
    (dx,) = torch.autograd.grad(out, x, grad)
    exact = x.detach().double().relu() * mask / 0.6
    exact_dx = grad.double() * (x > 0) * mask / 0.6
    errors = [float((a - b).detach().abs().max()) for a, b in ((out, exact), (dx, exact_dx))]
    return {"errors": errors, "kept": float(mask[x > 0].mean())}


def model(norm_at: str, dropout: float) -> dict:
    """A translator's losses and gradients with fused ends and without. dropout: 0, or too small to drop any."""
    torch.manual_seed(11)
    embedding, mlp = rg.Embedding(13, 24), rg.FeedForward(40, dropout=dropout)
    own, past = rg.Attention(24, heads=3), rg.Attention(24, heads=3, pattern=rg.causal())
    options = {"norm_at": norm_at, "dropout": dropout}
    encoder = rg.Encoder(rg.Block(own, mlp, **options), 2, embedding=embedding)
    decoder = rg.Block(past, mlp, cross=own, **options)
    built = rg.EncoderDecoder(
        encoder, rg.Decoder(decoder, 1, embedding=embedding, head=rg.LanguageHead()), share_embedding=True
    ).build()
    task = Translation(built, 0.1)
    source, target, wanted = torch.randint(4, 13, (3, 2, 7))
    given = (source, torch.tensor([7, 3]), target, wanted)
    calls = []

    def run() -> list[Tensor]:
        loss, plain = task(*given)
        return [loss, plain, *torch.autograd.grad(loss, list(task.parameters()))]

    usual = run()
    fuse_branch_ends(task, True)
    real = branch_kernel.branch_end

    def counted(*arguments):
        calls.append(1)
        return real(*arguments)

    with (
        mock.patch.object(branch_end, "on_gpu", lambda x: True),
        mock.patch.object(branch_kernel, "branch_end", counted),
    ):
        ours = run()
    pairs = [(a.detach(), b.detach()) for a, b in zip(ours, usual, strict=True)]
    errors = [float((a - b).abs().max() / (1 + b.abs().max())) for a, b in pairs]
    return {"errors": [max(errors)], "calls": len(calls)}


def main() -> None:
    branch_kernel.ENTRIES, branch_kernel.PROGRAMS = 64, 3  # several tiles and programs
    for name, arguments in CASES.items():
        print(json.dumps({"name": name, **case(*arguments)}))
    print(json.dumps({"name": "relu", **relu()}))
    print(json.dumps({"name": "a model, pre-norm", **model("pre", 1e-9)}))
    print(json.dumps({"name": "a model, post-norm", **model("post", 0.0)}))


if __name__ == "__main__":
    main()
