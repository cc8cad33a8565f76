"""Queries whose positions differ by batch row, and few queries after many keys, on one GPU: without a plan.

    PYTHONPATH=src:bench python3 bench/gpu_few_queries.py --out few.json

32 query heads and 8 key heads of 128, bf16; a batch row has its own offset, drawn by a seed, and keys up to there.
Speculative decoding and chunked prefilling are like this. Peers: PyTorch's attention with a mask that was made before
(it reads all m keys), the same with the mask made in the call, and, forward, on the keys that the rows need (a loop
over batch rows with slices, dense; only where the pattern is causal). GPU time of a replayed graph where the call can
be captured, else that of the call; medians of rounds in random order. Results are compared before they are timed.

--drawn SEED: calls that nobody chose, from a seed: patterns, heads, widths, batches, lengths. One query also beside
PyTorch's attention over only the keys that each row needs, copied together beforehand.

--memory: the peak memory of calls that no kernel runs, at twice the length each time.
"""

import argparse
import json
import random
import time
from statistics import geometric_mean
from unittest import mock

import torch
import torch.nn.functional as F
from gpu_peers import both, graph_of, off, times

import regard as rg
from regard.engine import backends
from regard.engine.cuda import call as cuda_call
from regard.engine.cuda import prepared

BF16 = torch.bfloat16
RECENT = rg.causal() & (rg.window(1024) | rg.sinks(4))
PATTERNS = {
    "recent": RECENT,
    "causal": rg.causal(),
    "strided": rg.causal() & (rg.window(127) | rg.strided(128)),
}
# pattern, batch, n, m, with gradients
ROWS = [
    *(
        ("recent", b, n, 32768, False)
        for b, n in ((1, 4), (8, 4), (32, 1), (32, 4), (8, 16), (8, 64), (4, 512))
    ),
    *(("causal", b, n, 32768, False) for b, n in ((8, 4), (8, 64), (4, 512))),
    ("strided", 8, 4, 32768, False),
    ("recent", 8, 64, 8192, True),
    ("recent", 4, 512, 8192, True),
    ("causal", 4, 512, 8192, True),
]


def drawn(seed, count):
    """Calls as `row` takes them."""
    rng = random.Random(seed)
    words = [
        lambda: rg.window(rng.choice((31, 128, 400, 1023, 2500))),
        lambda: rg.sinks(rng.choice((1, 4, 33))),
        lambda: rg.every(rng.choice((7, 16, 64, 100))),
        lambda: rg.strided(rng.choice((5, 32, 128))),
        lambda: rg.dilated(rng.choice((8, 64)), rng.choice((4, 30))),
        lambda: rg.prefix(rng.choice((100, 777))),
        lambda: rg.blocks(rng.choice((100, 512))),
    ]
    calls = []
    while len(calls) < count:
        b, n, m = (
            rng.choice((1, 2, 5, 8, 19, 32)),
            rng.choice((1, 1, 1, 2, 4, 7, 16, 64, 300)),
            rng.randint(700, 50_000),
        )
        h, h_kv = rng.choice(((32, 8), (32, 4), (16, 16), (24, 8), (8, 1)))
        d, grad = rng.choice((64, 64, 80, 128, 128, 256)), n >= 16 and rng.random() < 0.4
        union = rng.sample(words, rng.randint(1, 3))
        pattern = rg.causal() & (union[0]() if len(union) == 1 else rg.window(50) | union[0]() | union[1]())
        if b * h * n * m <= 1 << 29 and m >= 8 * n:  # the formula holds a number for each pair
            calls.append((pattern, b, n, m, grad, (h, h_kv, d), len(calls)))
    return calls


def row(pattern, b, n, m, grad, heads=(32, 8, 128), seed=0):
    h, h_kv, d = heads
    g = torch.Generator("cuda").manual_seed(seed)
    shapes = (b, h, n, d), (b, h_kv, m, d), (b, h_kv, m, d)
    q, k, v = (torch.randn(s, device="cuda", dtype=BF16, generator=g) for s in shapes)
    do = torch.randn_like(q)
    at = torch.randint(m // 2, m - n + 1, (b,), device="cuda", generator=g)
    mask = pattern.allowed(n, m, at, "cuda")
    calls = {
        "regard": lambda q, k, v: rg.attention(q, k, v, pattern, at=at),
        "a mask made before": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True),
        "sdpa": lambda q, k, v: rg.attention(q, k, v, pattern, at=at, backend="sdpa"),
    }
    if n == 1:  # each row's keys first, then others, which are hidden
        seen = mask.view(b, m)
        order = seen.int().sort(dim=1, descending=True, stable=True).indices[:, : int(seen.sum(1).max())]
        own = order[:, None, :, None].expand(b, h_kv, -1, d)
        own_k, own_v, own_mask = k.gather(2, own), v.gather(2, own), seen.gather(1, order)[:, None, None]
        own_mask = None if own_mask.all() else own_mask
        copied = lambda q, k, v: F.scaled_dot_product_attention(q, own_k, own_v, own_mask, enable_gqa=True)  # noqa: E731
        calls["its keys copied before"] = copied
    if isinstance(pattern, rg.causal) and not grad:
        ends = (at + n).tolist()

        def slices(q, k, v):
            parts = []
            for i, end in enumerate(ends):
                rows = q[i : i + 1], k[i : i + 1, :, :end], v[i : i + 1, :, :end]
                cut = mask[i : i + 1, :, :, :end]
                parts.append(F.scaled_dot_product_attention(*rows, cut, enable_gqa=True))
            return torch.cat(parts)

        calls["slices"] = slices
    explained = rg.explain(q, k, v, pattern, at=at)
    want = rg.attention(q.float(), k.float(), v.float(), pattern, at=at, backend="reference")
    made, errors = {}, {}
    for which, attend in calls.items():
        errors[which] = off(attend(q, k, v), want)
        fn = both(attend, (q, k, v), do) if grad else lambda attend=attend: attend(q, k, v)
        made[which] = graph_of(fn) or fn
    found = {which: round(ms, 4) for which, ms in times(made).items()}
    visited = rg.explain(q, k, v, pattern, at=at).computed
    return {
        "pattern": repr(pattern), "batch": b, "n": n, "m": m, "heads": heads, "backward": grad, "ms": found,
        "visited": visited, "backend": f"{explained.backend} ({explained.variant})",
        "off": {x: f"{y:.1e}" for x, y in errors.items()},
    }  # fmt: skip


def new_lengths(n, steps=24):
    """Seconds of calls of n queries at the end of a sequence that grows: the first call at each length."""
    k = torch.randn(1, 8, 32768 + n * steps, 128, device="cuda", dtype=BF16)
    q = torch.randn(1, 32, n, 128, device="cuda", dtype=BF16)
    found = []
    for cache in (backends.PREPARED, prepared.PREPARED):
        cache.clear()
    for step in range(steps):
        m = 32768 + n * step
        torch.cuda.synchronize()
        begin = time.perf_counter()
        rg.attention(q, k[:, :, :m], k[:, :, :m], RECENT)
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return round(1e6 * sorted(found[4:])[len(found[4:]) // 2])


def peak(run):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, begin = torch.cuda.memory_allocated(), time.perf_counter()
    run()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20), round(time.perf_counter() - begin, 3)


def memory(n):
    def tensors(d=64, dtype=torch.float32, h=4):
        return [torch.randn(1, h, n, d, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]

    def first(pattern, **options):
        given = tensors(**{x: options.pop(x) for x in ("d", "dtype") if x in options})
        return lambda: torch.autograd.grad(rg.attention(*given, pattern, **options).sum(), given)

    def second():
        given = tensors(dtype=BF16)
        o = rg.attention(*given, RECENT)
        (dq,) = torch.autograd.grad(o.float().square().sum(), given[:1], create_graph=True)
        torch.autograd.grad(dq.float().square().sum(), given)

    no_plan = ~rg.every(7) & ~rg.every(11) & ~rg.every(13) & ~rg.window(3)
    calls = {
        "float64": first(rg.causal() & rg.window(512), dtype=torch.float64),
        "head dimension 320, bf16": first(rg.causal() & rg.window(512), d=320, dtype=BF16),
        "no plan, bf16": first(no_plan, dtype=BF16),
        "scale=inf": first(rg.causal(), scale=float("inf")),
        "second derivatives, bf16": second,
    }
    return {name: dict(zip(("MiB", "s"), peak(run))) for name, run in calls.items()}


def time_them(calls, results, options):
    begin = time.time()
    for call in calls:
        if options.drawn is not None and time.time() - begin > options.seconds:
            break
        results["rows"].append(row(*call))
        print(json.dumps(results["rows"][-1]), flush=True)
        torch.cuda.empty_cache()
        write(results, options)
    for kind in ("a mask made before", "its keys copied before"):
        ratios = [x["ms"]["regard"] / x["ms"][kind] for x in results["rows"] if kind in x["ms"]]
        if ratios:
            results[f"time relative to {kind}"] = ends = [
                round(f(ratios), 3) for f in (min, geometric_mean, max)
            ]
            print(kind, len(ratios), "calls; lowest, geometric mean and highest ratio:", *ends, flush=True)
    write(results, options)


def write(results, options):
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", help="a file for the results")
    parser.add_argument("--memory", action="store_true", help="the peak memory of calls without a kernel")
    parser.add_argument("--rows", type=int, nargs="+", default=range(len(ROWS)), help="numbers of rows")
    parser.add_argument("--drawn", type=int, help="a seed: draw calls instead")
    parser.add_argument("--calls", type=int, default=32, help="how many to draw")
    parser.add_argument(
        "--seconds", type=float, default=300, help="no row begins later than this, with --drawn"
    )
    options = parser.parse_args()
    results = {"versions": f"torch {torch.__version__}, {torch.cuda.get_device_name()}", "rows": []}
    if options.drawn is not None:
        results |= {"seed": options.drawn}
        time_them(drawn(options.drawn, options.calls), results, options)
        return
    chosen = (ROWS[nth] for nth in options.rows)
    time_them([(PATTERNS[name], *sizes) for name, *sizes in chosen], results, options)
    with_plan = {}
    for n in (4, 8):
        without = new_lengths(n)
        with mock.patch.object(cuda_call, "MIN_KEYS", 1 << 40):
            with_plan[n] = {"microseconds": without, "with a plan": new_lengths(n)}
    with_plan[1] = {"microseconds": new_lengths(1)}
    results["first call at each length"] = with_plan
    print(json.dumps(with_plan), flush=True)
    if options.memory:
        results["memory"] = {}
        for n in (8192, 16384, 32768):
            results["memory"][n] = memory(n)
            print(n, json.dumps(results["memory"][n]), flush=True)
            torch.cuda.empty_cache()
    write(results, options)


if __name__ == "__main__":
    main()
