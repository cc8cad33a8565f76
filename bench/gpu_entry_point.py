"""`rg.attention` on a GPU against SDPA and compiled FlexAttention: what a user gets, by the engine's own choice.

    PYTHONPATH=src python3 bench/gpu_entry_point.py --group dense table data short growth

dense   full and causal against the best backend of SDPA, forward and forward+backward
table   a learned table of distances, clipped at ±512, against FlexAttention with the same table: forward+backward
data    window(256), causal and packed documents against FlexAttention
short   n = 128 … 2048 against full SDPA and SDPA with the mask, and the CPU time of each
growth  time with n at a fixed density, and with density at a fixed n

Every comparison is first checked against float64, where that fits in memory. Times are medians of
`triton.testing.do_bench`, warm, with the cache cleared before each call; or of rounds in random order, where stated.
"""

import argparse
import json
import os
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
import torch.nn.functional as F
import triton
from gpu_patterns import BACKENDS, HEADS, bench, copy_rate, forward_backward, in_rounds, sdpa, tensors
from torch.nn.attention import sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import regard as rg
from regard.engine.call import Options
from regard.engine.cuda.call import task
from regard.engine.cuda.host import PreparedAttention
from regard.position import ByDistance

REACH = 512
CLOSE = 2e-2  # of bf16 against float64, for numbers about 1


def flex(block_mask=None, score_mod=None, options=None):
    """FlexAttention compiled afresh: after 8 recompilations it silently runs unfused."""
    torch._dynamo.reset()
    fn = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: fn(q, k, v, block_mask=block_mask, score_mod=score_mod, kernel_options=options)


def forward(fn, *x) -> float:
    with torch.no_grad():
        return bench(lambda: fn(*x))


def both(fn, q, k, v, do, *more) -> float:
    """Forward and backward; `more` are tensors that learn against q, k and v."""
    inputs = [*(x.detach().requires_grad_() for x in (q, k, v)), *more]
    return bench(lambda: torch.autograd.grad(fn(*inputs[:3]), inputs, do))


def against(ours, theirs, backward: bool, q, k, v, do) -> tuple[float, float]:
    """Milliseconds of both, in rounds of random order, because the clock rate varies by a few percent over time."""
    calls_by_name = {"ours": ours, "theirs": theirs}
    if backward:
        found = in_rounds({name: forward_backward(fn, q, k, v, do) for name, fn in calls_by_name.items()})
    else:
        with torch.no_grad():
            found = in_rounds({name: partial(fn, q, k, v) for name, fn in calls_by_name.items()})
    return found["ours"], found["theirs"]


def add_row(out: list, **row) -> None:
    out.append(row)
    print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{v}" for k, v in row.items()), flush=True)


def dense(out) -> None:
    print("\nfull and causal against the best backend of SDPA, in rounds, ms")
    for d in (128, 64):
        for n in (4096, 16384):
            q, k, v, do = tensors(n, d, 4)
            for pattern, causal in ((None, False), (rg.causal(), True)):
                for backward in (False, True):
                    _dense_row(out, n, d, pattern, causal, backward, (q, k, v, do))


def _dense_row(out, n, d, pattern, causal, backward, tensors) -> None:
    _, backend = sdpa(n, d, backward, causal)

    def theirs(q, k, v):
        with sdpa_kernel(BACKENDS[backend]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def ours(q, k, v):
        return rg.attention(q, k, v, pattern)

    a, b = against(ours, theirs, backward, *tensors)
    run = "forward+backward" if backward else "forward"
    add_row(out, group="dense", pattern="causal" if causal else "full", run=run, n=n, d=d, ours=a, sdpa=b,
         backend=backend, ratio=a / b)  # fmt: skip


def _table_mod(table):
    def add(score, b, h, i, j):
        return score + table[h, (j - i).clamp(-REACH, REACH) + REACH]

    return add


# With its default number of stages, FlexAttention needs more shared memory here than there is.
OPTIONS = ({"num_stages": 2}, {"num_stages": 1})


def table(out) -> None:
    print(f"\na learned table of distances clipped at ±{REACH}, forward+backward, ms")
    for d in (128, 64):
        weights = (0.5 * torch.randn(HEADS, 2 * REACH + 1, device="cuda")).requires_grad_()
        ours = lambda q, k, v, t=weights: rg.attention(q, k, v, bias=ByDistance(t))  # noqa: E731
        _same_table("ours", ours, weights, *tensors(1536, d, 4))
        q, k, v, do = tensors(8192, d, 4)
        row = {"ours": both(ours, q, k, v, do, weights), "ours_forward": forward(ours, q, k, v)}
        for options in OPTIONS:
            theirs = flex(score_mod=_table_mod(weights), options=options)
            try:
                _same_table("flex", theirs, weights, *tensors(1536, d, 4))
                theirs = flex(score_mod=_table_mod(weights), options=options)
                row |= {"flex": both(theirs, q, k, v, do, weights), "flex_forward": forward(theirs, q, k, v)}
                row |= {"options": options, "ratio": row["flex"] / row["ours"]}
                break
            except Exception as error:
                print(f"  FlexAttention with {options}: {repr(error)[:200]}", flush=True)
        add_row(out, group="table", n=8192, d=d, **row)


def _same_table(name, fn, weights, q, k, v, do) -> None:
    """o and all gradients against float64."""
    n = q.shape[2]
    at = torch.arange(n, device="cuda")
    wide = weights.detach().double().requires_grad_()
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    scores = exact[0] @ exact[1].mT * q.shape[-1] ** -0.5 + ByDistance(wide).dense(at, at)
    o = scores.softmax(-1) @ exact[2]
    ref = [o, *torch.autograd.grad(o, (*exact, wide), do.double())]
    x = [t.detach().requires_grad_() for t in (q, k, v)]
    o = fn(*x)
    got = [o, *torch.autograd.grad(o, (*x, weights), do)]
    off = [float((g.double() - r).norm() / r.norm()) for g, r in zip(got, ref)]
    print(f"  {name} n={n} d={q.shape[-1]}: o, dq, dk, dv, dtable are off by", *(f"{x:.1e}" for x in off))
    assert max(off) < CLOSE, off


def data(out) -> None:
    print("\nwindow, causal and documents against compiled FlexAttention, in rounds, ms")
    for d, cases in ((128, ("window(256)", "causal()", "documents")), (64, ("documents",))):
        for name in cases:
            n = 32768 if name == "window(256)" else 16384
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
            for backward in (False, True):
                a, b = against(ours, theirs, backward, q, k, v, do)
                run = "forward+backward" if backward else "forward"
                add_row(out, group="data", pattern=name, run=run, n=n, d=d, ours=a, flex=b, ratio=b / a)


def _cpu(fn) -> float:
    """Microseconds of the CPU a call, made back to back."""
    for _ in range(20):
        fn()
    torch.cuda.synchronize()
    begin = perf_counter()
    for _ in range(200):
        fn()
    took = perf_counter() - begin
    torch.cuda.synchronize()
    return 1e6 * took / 200


def short(out) -> None:
    print("\nshort calls against full and masked SDPA, in rounds, ms; CPU in microseconds")
    for n in (128, 256, 512, 1024, 2048):
        for pattern in (rg.causal() & (rg.window(32) | rg.every(16)), rg.dilated(8, 4)):
            for backward in (False, True):
                found, cpu = _short(n, 64, pattern, backward)
                best = min(found["full"], found["mask"])
                run = "forward+backward" if backward else "forward"
                choice = rg.explain(
                    pattern, n, heads=HEADS, dtype=torch.bfloat16, device="cuda", grad=backward
                )
                add_row(out, group="short", pattern=repr(pattern), run=run, n=n, d=64, chosen=choice.backend, **found,
                     ratio=found["auto"] / best, **{f"cpu_{k}": us for k, us in cpu.items()})  # fmt: skip


def _short(n: int, d: int, pattern, backward: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds and the CPU's microseconds of `rg.attention`, of our kernels whatever it would choose, of SDPA
    with a mask that is there already, and of SDPA over every pair, both as PyTorch runs them by itself."""
    q, k, v, do = tensors(n, d, 4)
    inputs = [x.requires_grad_(backward) for x in (q, k, v)]
    mask = torch.zeros(n, n, dtype=q.dtype, device="cuda")
    mask.masked_fill_(~pattern.allowed(n, device="cuda"), -torch.inf)
    prepared = PreparedAttention(task(q, v, Options(pattern, 0, 1, d**-0.5)), backward)
    calls_by_name = {
        "auto": lambda q, k, v: rg.attention(q, k, v, pattern),
        "kernels": prepared,
        "mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask),
        "full": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    }
    if backward:
        calls = {
            name: lambda fn=fn: torch.autograd.grad(fn(*inputs), inputs, do)
            for name, fn in calls_by_name.items()
        }
    else:
        calls = {name: lambda fn=fn: fn(q, k, v) for name, fn in calls_by_name.items()}
    wanted = calls["mask"]()
    for name in ("auto", "kernels"):
        assert all(torch.allclose(a, b, atol=0.05, rtol=0.05) for a, b in zip(calls[name](), wanted)), name
    cpu = {name: _cpu(fn) for name, fn in calls.items()}
    return in_rounds(calls), cpu


def growth(out) -> None:
    print("\ntime with n at about 1 % of the pairs, and with density at n = 32768; d = 64, ms")
    cases = [(n, rg.window(n // 400) | rg.every(200), "n") for n in (8192, 16384, 32768, 65536)]
    cases += [(32768, rg.window(64) | rg.every(k), "density") for k in (512, 256, 128, 64, 32)]
    for n, pattern, along in cases:
        q, k, v, do = tensors(n, 64, 4)
        ours = lambda q, k, v, p=pattern: rg.attention(q, k, v, p, backend="triton")  # noqa: E731
        count = pattern.count(n)
        a, b = forward(ours, q, k, v), bench(forward_backward(ours, q, k, v, do))
        gigapairs = HEADS * count / 1e9
        add_row(out, group="growth", along=along, pattern=repr(pattern), n=n, density=count / n**2, forward=a, both=b,
             forward_a_gigapair=a / gigapairs, both_a_gigapair=b / gigapairs)  # fmt: skip


GROUPS = {"dense": dense, "table": table, "data": data, "short": short, "growth": growth}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--group", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    options = parser.parse_args()
    torch.manual_seed(0)
    out: list[dict] = []
    versions = f"torch {torch.__version__}, triton {triton.__version__}, {torch.cuda.get_device_name(0)}"
    print(f"{versions}; copy {copy_rate() / 1e9:.2f} TB/s")
    for group in options.group:
        try:
            GROUPS[group](out)
        except Exception as error:  # the other groups still run
            print(f"{group} FAILED: {error!r}"[:600], flush=True)
            out.append({"group": group, "failed": repr(error)[:600]})
        if folder := os.environ.get("OUT"):
            Path(folder, "gpu_entry_point.json").write_text(
                json.dumps({"versions": versions, "rows": out}, indent=1)
            )


if __name__ == "__main__":
    main()
