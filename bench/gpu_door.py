"""`rg.attention` on a GPU beside SDPA and compiled FlexAttention: what a user gets, by the engine's own choice.

    PYTHONPATH=src python3 bench/gpu_door.py --group dense table data short growth

dense   full and causal beside the best backend of SDPA, forward and forward+backward
table   a learned table of distances, clipped at ±512, beside FlexAttention with the same table: forward+backward
data    window(256), causal and packed documents beside FlexAttention
short   n = 128 … 2048 beside the faster of full and masked SDPA
growth  time with n at a fixed density, and with density at a fixed n

Every comparison is held against float64 first, where that is small enough to make. Times are medians of
`triton.testing.do_bench`, warm, the cache cleared before each call.
"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from gpu_patterns import HEADS, bench, both_ways, copy_rate, sdpa, tensors
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import regard as rg
from regard.position import ByDistance

REACH = 512
CLOSE = 2e-2  # of bf16 beside float64, for numbers about 1


def flex(block_mask=None, score_mod=None):
    """Compiled afresh: past 8 recompilations it runs unfused without a word."""
    torch._dynamo.reset()
    fn = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: fn(q, k, v, block_mask=block_mask, score_mod=score_mod)


def forward(fn, *x) -> float:
    with torch.no_grad():
        return bench(lambda: fn(*x))


def both(fn, q, k, v, do, *more) -> float:
    """Forward and backward; `more` are tensors that learn beside q, k and v."""
    inputs = [*(x.detach().requires_grad_() for x in (q, k, v)), *more]
    return bench(lambda: torch.autograd.grad(fn(*inputs[:3]), inputs, do))


def tell(out: list, **row) -> None:
    out.append(row)
    print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{v}" for k, v in row.items()), flush=True)


def dense(out) -> None:
    print("\nfull and causal beside the best backend of SDPA, ms")
    for d in (128, 64):
        for n in (4096, 16384):
            q, k, v, do = tensors(n, d, 4)
            for pattern, causal in ((None, False), (rg.causal(), True)):
                for way in ("forward", "forward+backward"):
                    backward = way != "forward"
                    theirs, backend = sdpa(n, d, backward, causal)
                    ours = lambda q, k, v, p=pattern: rg.attention(q, k, v, p)  # noqa: E731
                    time = bench(both_ways(ours, q, k, v, do)) if backward else forward(ours, q, k, v)
                    name = "causal" if causal else "full"
                    tell(out, group="dense", pattern=name, way=way, n=n, d=d, ours=time, sdpa=theirs,
                         backend=backend, ratio=time / theirs)  # fmt: skip


def _table_mod(table):
    def add(score, b, h, i, j):
        return score + table[h, (j - i).clamp(-REACH, REACH) + REACH]

    return add


def table(out) -> None:
    print(f"\na learned table of distances clipped at ±{REACH}, forward+backward, ms")
    for d in (128, 64):
        weights = (0.5 * torch.randn(HEADS, 2 * REACH + 1, device="cuda")).requires_grad_()
        for n, timed in ((1536, False), (8192, True)):
            q, k, v, do = tensors(n, d, 4)
            ours = lambda q, k, v, t=weights: rg.attention(q, k, v, bias=ByDistance(t))  # noqa: E731
            theirs = flex(score_mod=_table_mod(weights))
            if not timed:
                _same_table(ours, theirs, weights, q, k, v, do)
                continue
            ours_ms = both(ours, q, k, v, do, weights)
            row = {"ours_forward": forward(ours, q, k, v), "flex_forward": forward(theirs, q, k, v)}
            try:
                flex_ms = both(theirs, q, k, v, do, weights)
            except Exception as error:
                print("FlexAttention:", repr(error)[:300])
                flex_ms = float("nan")
            tell(out, group="table", n=n, d=d, ours=ours_ms, flex=flex_ms, ratio=flex_ms / ours_ms, **row)


def _same_table(ours, theirs, weights, q, k, v, do) -> None:
    """o and all gradients of both beside float64."""
    n = q.shape[2]
    at = torch.arange(n, device="cuda")
    wide = weights.detach().double().requires_grad_()
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    scores = exact[0] @ exact[1].mT * q.shape[-1] ** -0.5 + ByDistance(wide).dense(at, at)
    o = scores.softmax(-1) @ exact[2]
    ref = [o, *torch.autograd.grad(o, (*exact, wide), do.double())]
    for name, fn in (("ours", ours), ("flex", theirs)):
        try:
            x = [t.detach().requires_grad_() for t in (q, k, v)]
            o = fn(*x)
            got = [o, *torch.autograd.grad(o, (*x, weights), do)]
        except Exception as error:
            print(f"  {name}: {repr(error)[:300]}")
            continue
        off = [float((g.double() - r).norm() / r.norm()) for g, r in zip(got, ref)]
        print(f"  {name} n={n} d={q.shape[-1]}: o, dq, dk, dv, dtable are off by", *(f"{x:.1e}" for x in off))
        assert name == "flex" or max(off) < CLOSE, off


def data(out) -> None:
    print("\nwindow, causal and documents beside compiled FlexAttention, ms")
    for d in (128, 64):
        for name, n in (("window(256)", 32768), ("causal()", 16384), ("documents", 16384)):
            if name == "documents":
                cuts = torch.randperm(n, generator=torch.Generator().manual_seed(0))[:15]
                ids = torch.bincount(cuts, minlength=n).cumsum(0).cuda()  # 16 documents of random lengths
                pattern, mod = rg.documents(ids), lambda b, h, i, j, ids=ids: ids[i] == ids[j]
            else:
                pattern = rg.window(256) if name == "window(256)" else rg.causal()
                mod = lambda b, h, i, j, p=pattern: p.allows(i, j)  # noqa: E731
            q, k, v, do = tensors(n, d, 4)
            theirs = flex(create_block_mask(mod, None, None, n, n, device="cuda"))
            ours = lambda q, k, v, p=pattern: rg.attention(q, k, v, p)  # noqa: E731
            with torch.no_grad():
                off = float((ours(q, k, v) - theirs(q, k, v)).abs().max())
            assert off < 0.1, off
            for way, time in (("forward", forward), ("forward+backward", both)):
                more = () if way == "forward" else (do,)
                a, b = time(ours, q, k, v, *more), time(theirs, q, k, v, *more)
                tell(out, group="data", pattern=name, way=way, n=n, d=d, ours=a, flex=b, ratio=b / a)


def _quickest(n: int, d: int, mask, backward: bool) -> tuple[float, str]:
    """The faster of SDPA over every pair, by each backend, and over a mask that is there already."""
    best = sdpa(n, d, backward)
    q, k, v, do = tensors(n, d, 4)
    for name in ("EFFICIENT_ATTENTION", "CUDNN_ATTENTION"):
        try:
            with sdpa_kernel(getattr(SDPBackend, name)):
                fn = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask)  # noqa: E731
                time = bench(both_ways(fn, q, k, v, do)) if backward else forward(fn, q, k, v)
        except RuntimeError:
            continue
        best = min(best, (time, f"masked {name}"))
    return best


def short(out) -> None:
    print("\nshort calls beside the faster of full and masked SDPA, ms")
    for n in (128, 256, 512, 1024, 2048):
        for pattern in (rg.causal() & (rg.window(32) | rg.every(16)), rg.window(64), rg.dilated(8, 4)):
            mask = pattern.allowed(n, device="cuda")
            for way in ("forward", "forward+backward"):
                backward = way != "forward"
                q, k, v, do = tensors(n, 64, 4)
                ours = lambda q, k, v, p=pattern: rg.attention(q, k, v, p)  # noqa: E731
                theirs, which = _quickest(n, 64, mask, backward)
                time = bench(both_ways(ours, q, k, v, do)) if backward else forward(ours, q, k, v)
                tell(out, group="short", pattern=repr(pattern), way=way, n=n, d=64, ours=time, sdpa=theirs,
                     which=which, ratio=time / theirs)  # fmt: skip


def growth(out) -> None:
    print("\ntime with n at about 1 % of the pairs, and with density at n = 32768; d = 64, ms")
    cases = [(n, rg.window(n // 400) | rg.every(200), "n") for n in (8192, 16384, 32768, 65536)]
    cases += [(32768, rg.window(64) | rg.every(k), "density") for k in (512, 256, 128, 64, 32)]
    for n, pattern, along in cases:
        q, k, v, do = tensors(n, 64, 4)
        ours = lambda q, k, v, p=pattern: rg.attention(q, k, v, p, backend="progressions")  # noqa: E731
        count = pattern.count(n)
        a, b = forward(ours, q, k, v), bench(both_ways(ours, q, k, v, do))
        gigapairs = HEADS * count / 1e9
        tell(out, group="growth", along=along, pattern=repr(pattern), n=n, density=count / n**2, forward=a, both=b,
             forward_a_gigapair=a / gigapairs, both_a_gigapair=b / gigapairs)  # fmt: skip


GROUPS = {"dense": dense, "table": table, "data": data, "short": short, "growth": growth}


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--group", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    asked = ask.parse_args()
    torch.manual_seed(0)
    out: list[dict] = []
    versions = f"torch {torch.__version__}, triton {triton.__version__}, {torch.cuda.get_device_name(0)}"
    print(f"{versions}; copy {copy_rate() / 1e9:.2f} TB/s")
    for group in asked.group:
        try:
            GROUPS[group](out)
        except Exception as error:  # the other groups still have their say
            print(f"{group} FAILED: {error!r}"[:600], flush=True)
            out.append({"group": group, "failed": repr(error)[:600]})
        if folder := os.environ.get("OUT"):
            Path(folder, "gpu_door.json").write_text(
                json.dumps({"versions": versions, "rows": out}, indent=1)
            )


if __name__ == "__main__":
    main()
