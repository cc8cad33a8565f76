"""Rows that were weak before 0.2, on one GPU: decoding, global tokens, strides, head widths, score terms, CPU time.

    PYTHONPATH=src python3 bench/gpu_rows.py [--group decode patterns terms short host] [--flex]

decode    one query of 32/8 heads of 128 over 32,768 keys, against SDPA on the keys that it needs, sliced beforehand
patterns  forward and forward+backward; `realised` as in gpu_patterns.py: the time of SDPA over all pairs × the share
          of pairs needed, or that of reading and writing q, k, v and o if it is longer, over our time. `copy` is a
          copy of as many bytes by PyTorch, timed in the same way, starting with a cache full of unwritten zeros
terms     softcap and sink logits beside the same call without
short     microseconds of the backward pass by one launch and by several, of the GPU and of the CPU; forward and
          backward of few heads past one launch, by `triton` and by `sdpa` with its mask
host      microseconds of CPU time per prepared call, forward and backward, next to an autograd.Function that computes
          nothing and to SDPA. `backward_us` is what one more call in a chain adds to a backward pass; autograd hands
          a pass of any length to its own thread once, which `pass_us` includes. Each call of a chain has its own
          keys and values, as a layer has: otherwise autograd would add up their gradients, two launches per call

`wall` is the time of one call under CUDA events, `busy` that of the same launches replayed as a CUDA graph. Medians,
the cache cleared before each call. Results are compared with another backend of the same call first.
"""

import argparse
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from unittest import mock

import torch
import torch.nn.functional as F
import triton
from gpu_patterns import copy_rate

import regard as rg

BF16 = torch.bfloat16
DECODE = rg.causal() & (rg.window(1024) | rg.sinks(4))
SPARSE = rg.causal() & (rg.window(128) | rg.every(64))
PATTERNS = [  # pattern, n, width, heads, batch
    (rg.causal() & (rg.window(127) | rg.strided(128)), 65536, 128, 16, 1),
    (rg.window(64) | rg.rows(64) | rg.every(64), 8192, 128, 16, 1),
    (rg.causal() & (rg.window(64) | rg.dilated(64, 8) | rg.dilated(64, 64)), 16384, 128, 16, 1),
    (SPARSE, 8192, 96, 16, 1),
    (SPARSE, 8192, 80, 16, 1),
    (SPARSE, 8192, 256, 16, 1),
    (SPARSE, 8192, 64, 12, 2),
    (SPARSE, 8192, 128, 16, 1),
    (rg.causal() & rg.window(256), 32768, 128, 16, 1),
    (rg.causal() & (rg.window(1024) | rg.sinks(16)), 32768, 128, 16, 1),
    (rg.causal() | rg.prefix(2048), 16384, 128, 16, 1),
    (rg.neighborhood((64, 64), 7), 4096, 128, 16, 1),
    (rg.neighborhood((16, 16, 16), 5), 4096, 128, 16, 1),
]


def wall(fn, times: int = 20) -> float:
    """Median milliseconds under CUDA events, the cache cleared before each call."""
    clear = torch.empty(1 << 26, dtype=torch.int, device="cuda")
    pairs = []
    for _ in range(times + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        clear.zero_()
        begin.record()
        fn()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in pairs[3:])


def captured(fn):
    """A CUDA graph of the call; None if it cannot be captured."""
    try:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                fn()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fn()
    except Exception as error:
        print("  no graph:", repr(error)[:120], flush=True)
        return None
    return graph


def busy(fn) -> float | None:
    """As `wall`, for a CUDA graph of the call."""
    graph = captured(fn)
    return None if graph is None else wall(graph.replay)


def in_turn(fn) -> tuple[float, float | None]:
    """`wall` and `busy`, measured alternately, so that the GPU has the same clock rates for both."""
    graph = captured(fn)
    rounds = [(wall(fn, 7), 0.0 if graph is None else wall(graph.replay, 7)) for _ in range(3)]
    walls, busies = zip(*rounds)
    return median(walls), None if graph is None else median(busies)


def cpu(fn, calls: int = 100) -> float:
    """Microseconds of the CPU a call, made back to back."""
    for _ in range(10):
        fn()
    torch.cuda.synchronize()
    begin = perf_counter()
    for _ in range(calls):
        fn()
    took = perf_counter() - begin
    torch.cuda.synchronize()
    return 1e6 * took / calls


def cpu_of_one(fn, calls: int = 30) -> float:
    """The same of a call that finds the GPU idle, the median: of many back to back, the CPU would wait once the queue
    of launches (1,024) is full."""
    times = []
    for _ in range(calls + 5):
        torch.cuda.synchronize()
        begin = perf_counter()
        fn()
        times.append(perf_counter() - begin)
    return 1e6 * median(times[5:])


def both(attend, q, k, v, do, *more):
    inputs = [*(x.detach().requires_grad_() for x in (q, k, v)), *more]
    return lambda: torch.autograd.grad(attend(*inputs[:3]), inputs, do)


def off(x, y) -> float:
    return float((x.float() - y.float()).norm() / y.float().norm())


def add(out: list, **row) -> None:
    out.append(row)
    print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{v}" for k, v in row.items()), flush=True)


def decode(out: list, rate: float, flex: bool) -> None:
    for batch in (1, 8, 32):
        decode_row(out, batch, 32768)


def decode_row(out: list, batch: int, m: int) -> None:
    shapes = (batch, 32, 1, 128), (batch, 8, m, 128), (batch, 8, m, 128)
    q, k, v = (torch.randn(s, device="cuda", dtype=BF16) for s in shapes)
    near = torch.cat([torch.arange(4), torch.arange(m - 1025, m)]).cuda()
    few_k, few_v = k[:, :, near].contiguous(), v[:, :, near].contiguous()
    at = torch.randint(m // 2, m, (batch,), device="cuda")
    end = at + 1
    calls = {
        "ours": lambda: rg.attention(q, k, v, DECODE),
        "sdpa_sliced": lambda: F.scaled_dot_product_attention(q, few_k, few_v, enable_gqa=True),
        "ours_lengths": lambda: rg.attention(q, k, v, DECODE, lengths=at),
        "ours_row_at": lambda: rg.attention(q, k, v, DECODE, at=at, lengths=end),
    }
    with torch.no_grad():
        error = off(calls["ours"](), calls["sdpa_sliced"]())
        rows = off(calls["ours_row_at"](), rg.attention(q, k, v, DECODE, at=at, backend="reference"))
        assert max(error, rows) < 2e-2, (error, rows)
        row = {}
        for name, fn in calls.items():
            row |= {f"{name}_wall": wall(fn, 40), f"{name}_busy": busy(fn), f"{name}_cpu_us": cpu(fn)}
        row["variant"] = rg.explain(q, k, v, DECODE).variant
        row["ratio_busy"] = row["ours_busy"] / row["sdpa_sliced_busy"]
        row["ratio_wall"] = row["ours_wall"] / row["sdpa_sliced_wall"]
    add(out, group="decode", batch=batch, off=error, **row)


def patterns(out: list, rate: float, flex: bool) -> None:
    for pattern, n, d, heads, batch in PATTERNS:
        torch.manual_seed(0)
        q, k, v, do = (torch.randn(batch, heads, n, d, device="cuda", dtype=BF16) for _ in range(4))
        ours = lambda q, k, v, p=pattern: rg.attention(q, k, v, p, backend="triton")  # noqa: E731
        step = both(ours, q, k, v, do)
        with torch.no_grad():
            forward = lambda q=q, k=k, v=v, ours=ours: ours(q, k, v)  # noqa: E731
            forward()
            f_wall, f_busy = in_turn(forward)
            last = slice(n - 256, n)  # the last queries against the formula
            exact = rg.attention(q[:1, :2, last].float(), k[:1, :2].float(), v[:1, :2].float(), pattern,
                                 backend="reference")  # fmt: skip
            error = off(forward()[:1, :2, last], exact)
        assert error < 2e-2, error
        step()
        b_wall, b_busy = in_turn(step)
        with torch.no_grad():
            full_forward = wall(partial(F.scaled_dot_product_attention, q, k, v), 5)
        full_both = wall(both(F.scaled_dot_product_attention, q, k, v, do), 5)
        part, by_bytes = pattern.count(n) / n**2, 4 * q.numel() * q.element_size() / rate
        row = {"forward_wall": f_wall, "forward_busy": f_busy, "both_wall": b_wall, "both_busy": b_busy}
        row |= {"sdpa_full_forward": full_forward, "sdpa_full_both": full_both}
        half = torch.stack([q, k])
        row["copy"] = wall(partial(torch.empty_like(half).copy_, half))
        for name, full, bytes_ms in (("forward", full_forward, by_bytes), ("both", full_both, 3 * by_bytes)):
            for kind in ("wall", "busy"):
                if row[f"{name}_{kind}"] is not None:
                    row[f"realised_{name}_{kind}"] = max(full * part, bytes_ms) / row[f"{name}_{kind}"]
        row["variant"] = rg.explain(q, k, v, pattern, backend="triton").variant
        if flex:
            row |= flex_times(pattern, n, q, k, v, do)
        add(
            out, group="patterns", pattern=repr(pattern), n=n, d=d, heads=heads, batch=batch, off=error, **row
        )


def flex_times(pattern, n, q, k, v, do) -> dict:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    mask = create_block_mask(lambda b, h, i, j: pattern.allows(i, j), None, None, n, n, device="cuda")
    fn = torch.compile(flex_attention, dynamic=False)
    attend = lambda q, k, v: fn(q, k, v, block_mask=mask)  # noqa: E731
    try:
        with torch.no_grad():
            forward = lambda: attend(q, k, v)  # noqa: E731
            forward()
            f = wall(forward)
        step = both(attend, q, k, v, do)
        step()
        return {"flex_forward_wall": f, "flex_both_wall": wall(step)}
    except Exception as error:
        return {"flex": repr(error)[:120]}


def terms(out: list, rate: float, flex: bool) -> None:
    for pattern, n in ((SPARSE, 16384), (rg.causal(), 8192)):
        q, k, v, do = (torch.randn(1, 16, n, 128, device="cuda", dtype=BF16) for _ in range(4))
        sink = torch.randn(16, device="cuda", requires_grad=True)
        for name, given in (
            ("plain", {}), ("sink_logits", {"sink_logits": sink}), ("softcap", {"softcap": 30.0}),
        ):  # fmt: skip
            attend = lambda q, k, v, p=pattern, g=given: rg.attention(q, k, v, p, **g)  # noqa: E731
            step = both(attend, q, k, v, do)
            with torch.no_grad():
                forward = lambda a=attend, q=q, k=k, v=v: a(q, k, v)  # noqa: E731
                forward()
                f = wall(forward)
            step()
            found = rg.explain(q, k, v, pattern, **given)
            add(out, group="terms", pattern=repr(pattern), n=n, term=name, forward_wall=f, both_wall=wall(step),
                both_busy=busy(step), runs=f"{found.backend}, {found.variant}")  # fmt: skip


def short(out: list, rate: float, flex: bool) -> None:
    from regard.engine.call import Options
    from regard.engine.cuda import host
    from regard.engine.cuda.call import task

    pattern = rg.causal() & (rg.window(32) | rg.every(16))
    for n, d, heads in ((512, 64, 16), (1024, 64, 16), (2048, 64, 16), (1024, 128, 16), (2048, 128, 16)):
        q, k, v, do = (torch.randn(1, heads, n, d, device="cuda", dtype=BF16) for _ in range(4))
        row, made = {}, {}
        for name, one in (("one_launch", True), ("apart", False)):
            with mock.patch("regard.engine.cuda.call.one_launch", lambda *_, one=one: one):
                own = replace(task(q, v, Options(pattern, 0, 1, d**-0.5)))  # prepared anew
                saved = (q, k, v, *host.forward(q, k, v, own))
                backward = partial(host.backward, saved, (do, None), own)
                made[name] = backward()[:3]
                row |= {f"{name}_us": 1e3 * wall(backward), f"{name}_cpu_us": cpu(backward)}
        assert max(map(off, *made.values())) < 1e-2
        add(out, group="short", pattern=repr(pattern), n=n, d=d, heads=heads, **row)
    for n, d, heads in ((2304, 64, 4), (3072, 64, 2), (2304, 128, 8)):
        q, k, v, do = (torch.randn(1, heads, n, d, device="cuda", dtype=BF16) for _ in range(4))
        row = {}
        for name in ("triton", "sdpa"):
            step = both(partial(rg.attention, pattern=SPARSE, backend=name), q, k, v, do)
            step()
            row |= {f"{name}_us": 1e3 * wall(step), f"{name}_cpu_us": cpu(step)}
        add(out, group="short", pattern=repr(SPARSE), n=n, d=d, heads=heads, **row)


def host(out: list, rate: float, flex: bool) -> None:
    for n, d, heads, batch in ((1024, 64, 16, 1), (2304, 64, 4, 1), (8192, 64, 12, 2), (8192, 128, 16, 1)):
        host_row(out, n, d, heads, batch)


def host_row(out: list, n: int, d: int, heads: int, batch: int) -> None:
    q, k, v, do = (torch.randn(batch, heads, n, d, device="cuda", dtype=BF16) for _ in range(4))
    calls = {
        "ours": lambda q, k, v: rg.attention(q, k, v, SPARSE),
        "nothing": Nothing.apply,
        "sdpa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    }
    row = {}
    for name, attend in calls.items():
        with torch.no_grad():
            row[f"{name}_forward_us"] = cpu(lambda a=attend: a(q, k, v))
        first, *others = (x.detach().requires_grad_() for x in (q, *(k, v) * CHAIN))

        def chain(count, attend=attend, first=first, others=others):
            o = first
            for at in range(count):
                o = attend(o, *others[2 * at : 2 * at + 2])
            return o

        def gradients(count, chain=chain, first=first, others=others):
            return torch.autograd.grad(chain(count), [first, *others[: 2 * count]], do)

        forward = [cpu_of_one(partial(chain, count)) for count in (1, CHAIN)]
        both = [cpu_of_one(partial(gradients, count)) for count in (1, CHAIN)]
        row[f"{name}_forward_with_grad_us"] = forward[0]
        row[f"{name}_pass_us"] = both[0] - forward[0]
        row[f"{name}_backward_us"] = (both[1] - both[0] - forward[1] + forward[0]) / (CHAIN - 1)
    add(out, group="host", pattern=repr(SPARSE), n=n, d=d, heads=heads, batch=batch, **row)


CHAIN = 9


class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return q.view_as(q)

    @staticmethod
    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors
        return q.view_as(q), k.view_as(k), v.view_as(v)


GROUPS = {"decode": decode, "patterns": patterns, "terms": terms, "short": short, "host": host}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--group", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument(
        "--flex", action="store_true", help="FlexAttention beside each pattern; compiling takes minutes"
    )
    options = parser.parse_args()
    rate = copy_rate()
    versions = f"torch {torch.__version__}, triton {triton.__version__}, {torch.cuda.get_device_name(0)}"
    print(f"{versions}; copy {rate / 1e9:.2f} TB/s", flush=True)
    out: list[dict] = []
    for name in options.group:
        try:
            GROUPS[name](out, rate, options.flex)
        except Exception as error:  # the other groups still run
            add(out, group=name, failed=repr(error)[:600])
        if folder := os.environ.get("OUT"):
            result = {"versions": versions, "copy_bytes_per_ms": rate, "rows": out}
            Path(folder, "gpu_rows.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
