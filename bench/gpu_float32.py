"""float32 on one GPU: products split into six on tensor cores against IEEE products, and SDPA with grouped heads.

    PYTHONPATH=src:bench python3 bench/gpu_float32.py --out float32.json

products  the Triton kernels with their stored configurations, split and IEEE, by turns: milliseconds forward and
          backward of a sparse pattern, and the largest error of o, dq, dk and dv against float64, as a share of what
          is allowed (twice that of the formula in float32, + 4 ulp); SDPA with the mask beside them
short     the same at n = 512, where the backward pass is one launch
groups    dense attention of grouped heads: SDPA by its formula (enable_gqa), what `auto` runs, the Triton kernels;
          with the peak memory of a call with gradients

Kernels are compiled by fourteen processes first.
"""

import argparse
import json
import subprocess
import sys
from statistics import median
from unittest import mock

import torch
import torch.nn.functional as F

import regard as rg
from regard.engine.call import Options
from regard.engine.cuda import call as stored
from regard.engine.cuda import host
from regard.engine.cuda.call import Config, Configs, task
from regard.engine.cuda.triton import forward as kernels

PATTERN = rg.causal() & (rg.window(128) | rg.every(64))
WIDTHS, PROCESSES = (32, 64, 128, 256), 14
OTHERS = {  # configurations that are compared with the stored ones: tile, block, warps, stages
    32: [(64, 64, 4, 2), (128, 32, 4, 2)],
    64: [(64, 64, 4, 2), (128, 32, 8, 2)],
    128: [(64, 16, 4, 2), (128, 16, 8, 1), (64, 32, 4, 1)],
    256: [(64, 16, 8, 1), (16, 16, 4, 1)],
}
SHORT = {
    32: [(32, 32, 4, 1), (64, 32, 4, 1)], 64: [(32, 32, 4, 1), (64, 32, 4, 1)],
    128: [(16, 32, 4, 1), (64, 16, 4, 1), (32, 32, 8, 1)], 256: [],
}  # fmt: skip


def prepared(d, n, heads, configs=None, split=True):
    """Inputs, and the forward and backward calls of the kernels, which have run."""
    g = torch.Generator("cuda").manual_seed(d)
    q, k, v, do = (torch.randn(1, heads, n, d, device="cuda", generator=g) for _ in range(4))
    copied = Configs(**{**vars(stored.SINGLE[d]), "split": None}) if not split else None
    own = task(q, v, Options(PATTERN, 0, 1, d**-0.5), configs=configs or copied)
    with mock.patch.object(kernels, "splits_float32", lambda device: split):
        o, lse = host.forward(q, k, v, own)
        host.backward((q, k, v, o, lse), (do, None), own)
    calls = lambda: host.forward(q, k, v, own), lambda: host.backward((q, k, v, o, lse), (do, None), own)
    return (q, k, v, do), calls


def contestants(d, short):
    one = lambda c: Configs(*[Config(*c)] * 3, one_launch=Config(*c) if short else None)  # noqa: E731
    yield "split", {}
    yield "IEEE", {"split": False}
    yield from ((f"split {c}", {"configs": one(c)}) for c in (SHORT if short else OTHERS)[d])


def times(calls, rounds=5):
    found = {name: [] for name in calls}
    for at in range(rounds + 1):
        for name, run in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            if at:
                found[name].append(begin.elapsed_time(end))
    return {name: round(median(x), 4) for name, x in found.items()}


def gradients(attend, inputs, do):
    inputs = [x.detach().requires_grad_() for x in inputs]
    o = attend(*inputs)
    return [o.detach(), *torch.autograd.grad(o, inputs, do)]


def errors(d, **how):
    """Shares of the allowed error of o, dq, dk and dv at n = 1000."""
    (q, k, v, do), (forward, backward) = prepared(d, 1000, 4, **how)
    allowed = PATTERN.allowed(1000, device="cuda")

    def formula(q, k, v):
        scores = (q @ k.mT * d**-0.5).masked_fill(~allowed, -torch.inf)
        return scores.softmax(-1) @ v

    exact = gradients(formula, [x.double() for x in (q, k, v)], do.double())
    plain = gradients(formula, (q, k, v), do)
    found, shares = [forward()[0], *backward()[:3]], []
    for f, p, r in zip(found, plain, exact):
        limit = 2 * (p.double() - r).abs().max() + 4 * torch.finfo(torch.float32).eps * r.abs().max()
        shares.append(round(float((f.double() - r).abs().max() / limit), 3))
    return shares


def products(d, n=8192, heads=8):
    calls, row = (
        {},
        {"group": "short" if n <= 1024 else "products", "d": d, "n": n, "heads": heads, "errors": {}},
    )
    for name, how in contestants(d, n <= 1024):
        try:
            inputs, (forward, backward) = prepared(d, n, heads, **how)
            row["errors"][name] = errors(d, **how)
            calls |= {f"{name} forward": forward, f"{name} backward": backward}
        except Exception as error:
            row.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"[:120]
    q, k, v, do = inputs
    mask = torch.zeros(1, 1, n, n, device="cuda").masked_fill_(~PATTERN.allowed(n, device="cuda"), -torch.inf)
    calls["SDPA, masked, both"] = lambda: gradients(
        lambda *x: F.scaled_dot_product_attention(*x, mask), (q, k, v), do
    )
    return row | {"ms": times(calls)}


def groups(d, n=4096):
    g = torch.Generator("cuda").manual_seed(d)
    q, k, v, do = (torch.randn(1, h, n, d, device="cuda", generator=g) for h in (16, 4, 4, 16))
    calls, peaks = {}, {}
    for name, attend in {
        "SDPA's formula": lambda *x: F.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True),
        "regard": lambda *x: rg.attention(*x, rg.causal()),
        "triton": lambda *x: rg.attention(*x, rg.causal(), backend="triton"),
    }.items():
        both = lambda attend=attend: gradients(attend, (q, k, v), do)  # noqa: E731
        both()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        both()
        peaks[name] = (torch.cuda.max_memory_allocated() - before) >> 20
        calls |= {f"{name} both": both}
    return {"group": "groups", "d": d, "n": n, "heads": "16 of 4", "ms": times(calls), "peak_MiB": peaks}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--compile", type=int, help="only compile every 14th of the kernels, from this one on"
    )
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    if options.compile is not None:
        kinds = [(d, n, how) for d in WIDTHS for n in (512, 8192) for _, how in contestants(d, n == 512)]
        for d, n, how in kinds[options.compile :: PROCESSES]:
            try:
                prepared(d, n, 8, **how)
            except Exception as error:
                print(type(error).__name__, str(error)[:100], flush=True)
        return
    command = [sys.executable, *sys.argv, "--compile"]
    for worker in [subprocess.Popen([*command, str(at)]) for at in range(PROCESSES)]:
        worker.wait()
    rows = []
    for make in (products, lambda d: products(d, 512, 32), groups):
        for d in WIDTHS:
            rows.append(make(d))
            print(json.dumps(rows[-1]), flush=True)
    if options.out:
        about = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__}
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(about | {"rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
