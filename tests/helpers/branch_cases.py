"""Branch ends and rotations under Triton's interpreter, in a process of their own: one line of JSON per case.

    TRITON_INTERPRET=1 python branch_cases.py

Each gives the largest errors of the outputs and of every gradient against float64, with the sampled dropout mask.
"""

import json
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard as rg
from interpreter import quicken
from regard.nn import branch_end, branch_kernel, rotation_kernel
from regard.nn.packed import Copies, Packed
from regard.nn.position import build
from regard.training.loop.trainer import fuse_branch_ends
from regard.training.recipes.tasks import Translation

CASES = {  # rows, width, norm, dropout
    "layer norm": (7, 20, nn.LayerNorm(20), 0.0),
    "layer norm, dropout": (13, 24, nn.LayerNorm(24), 0.3),
    "layer norm without bias, dropout": (5, 3, nn.LayerNorm(3, bias=False), 0.5),
    "layer norm without weights": (5, 9, nn.LayerNorm(9, elementwise_affine=False), 0.2),
    "rms norm, dropout": (7, 33, nn.RMSNorm(33, 1e-5), 0.1),
}


ROTATIONS = {  # pairing, fraction of the columns, the columns of a position in memory; 0: heads are outside
    "interleaved pairs": ("interleaved", 1.0, 60),
    "half of the interleaved pairs": ("interleaved", 0.5, 0),
    "pairs of halves": ("halves", 1.0, 0),
    "three tenths of the columns": ("halves", 0.3, 60),
    "the queries of a product of queries, keys and values": ("interleaved", 1.0, 180),
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
    y_bias = torch.randn(width, requires_grad=True)
    state = torch.get_rng_state()
    total, out = branch_end.branch_end(x, y, norm, p, torch.float32, y_bias)
    torch.set_rng_state(state)
    # With x = 0 and y = 1 the sum is the mask itself.
    zeros, ones = torch.zeros(1, rows, width), torch.ones(1, rows, width)
    mask = branch_end.branch_end(zeros, ones, norm, p, torch.float32)[0].detach().double()
    given = [x, y, y_bias, *norm.parameters()]
    true = [t.detach().double().requires_grad_() for t in given]
    exact_total = true[0] + mask * (true[1] + true[2])
    exact_out = exact_norm(norm, exact_total, true[3:])
    d_total, d_out = torch.randn_like(total), torch.randn_like(out)
    grads = torch.autograd.grad([total, out], given, [d_total, d_out])
    exact = torch.autograd.grad([exact_total, exact_out], true, [d_total.double(), d_out.double()])
    state = torch.get_rng_state()
    begun = branch_end.branch_end(None, y, norm, p, torch.float32)
    torch.set_rng_state(state)
    mask = branch_end.branch_end(zeros, ones, norm, p, torch.float32)[0].detach().double()
    begins, true_begins = [y, *norm.parameters()], [true[1], *true[3:]]
    exact_begun = mask * true[1], exact_norm(norm, mask * true[1], true[3:])
    d_begun = torch.autograd.grad(begun, begins, [d_total, d_out])
    exact_d_begun = torch.autograd.grad(exact_begun, true_begins, [d_total.double(), d_out.double()])
    del given[2], true[2]
    alone = torch.autograd.grad(branch_end.branch_end(x, y, norm, 0.0, torch.float32)[1], given, d_out)
    exact_alone = torch.autograd.grad(exact_norm(norm, true[0] + true[1], true[2:]), true, d_out.double())
    pairs = [(total, exact_total), (out, exact_out), *zip(grads, exact), *zip(alone, exact_alone)]
    pairs += [*zip(begun, exact_begun), *zip(d_begun, exact_d_begun)]
    errors = [float((a - b).detach().abs().max()) for a, b in pairs]
    kept = float((mask > 0).double().mean())
    return {"errors": errors, "kept": kept, "factor": float(mask.max()) * (1 - round(p * 65536) / 65536)}


def relu(p: float) -> dict:
    torch.manual_seed(3)
    x, bias = torch.randn(3, 700, requires_grad=True), torch.randn(700, requires_grad=True)
    out = branch_end.relu_dropout(x, p, bias)
    inner = (x + bias).detach().double()
    mask = ((out > 0) | (inner <= 0)).double()
    grad = torch.randn_like(out)
    dx, d_bias = torch.autograd.grad(out, [x, bias], grad)
    factor = mask * 65536 / (65536 - round(p * 65536))  # p is a multiple of 1/65,536
    exact_dx = grad.double() * (inner > 0) * factor
    pairs = (out, inner.relu() * factor), (dx, exact_dx), (d_bias, exact_dx.sum(0))
    return {
        "errors": [float((a - b).detach().abs().max()) for a, b in pairs],
        "kept": float(mask[inner > 0].mean()),
    }


def packed(biased: bool) -> dict:
    """Two layers as one product of a copy, whose gradients are those of the layers' own parameters."""
    torch.manual_seed(5)
    layers = [nn.Linear(6, width, bias=biased) for width in (9, 700)]
    copy = Packed(layers, torch.float32)
    for target, source in copy.copies():
        target.copy_(source.detach())
    x = torch.randn(2, 11, 6, requires_grad=True)
    given = [x, *(p for layer in layers for p in layer.parameters())]
    usual = torch.cat([layer(x) for layer in layers], -1)
    ours, grad = copy(x), torch.randn_like(usual)
    grads = (torch.autograd.grad(out, given, grad) for out in (ours, usual))
    alone = copy(x, adds_bias=False) + (torch.cat([layer.bias for layer in layers]) if biased else 0)
    pairs = [(ours, usual), (alone, usual), *zip(*grads, strict=True)]
    return {"errors": [float((a - b).detach().abs().max()) / 10 for a, b in pairs]}


def rotation(pairing: str, fraction: float, columns: int) -> dict:
    """A rotary position with the kernel, beside the formula in float64; gradients and gradients of those."""
    torch.manual_seed(7)
    module = build(rg.rope(100.0, pairing=pairing, fraction=fraction), d_k=20)
    module.fuses = True
    x = torch.randn(2, 3, 7, 20)
    if columns:
        x = torch.randn(2, 7, columns)[..., :60].unflatten(-1, (3, 20)).transpose(1, 2)
    x.requires_grad_()
    with mock.patch.object(branch_end, "on_gpu", lambda x: True):
        out = module.along(x, 5, 3)
    true = x.detach().double().requires_grad_()
    exact = module(true, 5 + 3 * torch.arange(7))
    grad = torch.randn(2, 3, 7, 20, requires_grad=True)
    (dx,) = torch.autograd.grad(out, x, grad, create_graph=True)
    (exact_dx,) = torch.autograd.grad(exact, true, grad.double())
    (again,) = torch.autograd.grad(dx, grad, x.detach())  # rotated back: the gradient of the gradient
    pairs = (out, exact), (dx, exact_dx), (again, exact)
    return {"errors": [float((a - b).detach().abs().max()) for a, b in pairs]}


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
        Copies(task, torch.float32).used(),
    ):
        ours = run()
    assert not any(getattr(module, "packed", None) for module in task.modules())
    pairs = [(a.detach(), b.detach()) for a, b in zip(ours, usual, strict=True)]
    errors = [float((a - b).abs().max() / (1 + b.abs().max())) for a, b in pairs]
    return {"errors": [max(errors)], "calls": len(calls)}


def main() -> None:
    quicken()
    branch_kernel.ENTRIES, branch_kernel.PROGRAMS = 64, 3  # several tiles and programs
    branch_kernel.END_BACKWARD, branch_kernel.SUM_ROWS = (64, 4, 3), 2
    for name, arguments in CASES.items():
        print(json.dumps({"name": name, **case(*arguments)}))
    print(json.dumps({"name": "relu", **relu(0.4)}))
    print(json.dumps({"name": "relu without dropout", **relu(0.0)}))
    print(json.dumps({"name": "packed", **packed(True)}))
    print(json.dumps({"name": "packed without biases", **packed(False)}))
    rotation_kernel.ENTRIES = 128  # several tiles
    for name, arguments in ROTATIONS.items():
        print(json.dumps({"name": name, **rotation(*arguments)}))
    print(json.dumps({"name": "a model, pre-norm", **model("pre", 1e-9)}))
    print(json.dumps({"name": "a model, post-norm", **model("post", 0.0)}))


if __name__ == "__main__":
    main()
