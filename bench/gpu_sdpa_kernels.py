"""PyTorch's attention kernels and ours on dense calls without gradients, on one GPU: new and repeated shapes.

    PYTHONPATH=src python3 bench/gpu_sdpa_kernels.py [--drawn SEED] [--out kernels.json]

On Hopper and Blackwell data-center GPUs PyTorch prefers cuDNN's kernel for 16-bit types, which builds a plan for
each new shape: sizes of the batch, heads, queries and keys. `first` is the wall time of the first call with a shape
(the median of three shapes, 8 queries and keys apart; of one query, one key apart), `again` that of a repeated call
(the GPU awaited after many calls, so that the slower of CPU and GPU counts), both in milliseconds. Outputs are
compared first.

cudnn      what F.scaled_dot_product_attention takes by itself
flash      PyTorch's FlashAttention-2, by its operator, which builds nothing
efficient  PyTorch's memory-efficient kernel, by its operator: the one that takes a mask without a plan
triton     ours: a plan for each new length
auto       what rg.attention chooses

--drawn: calls from a seed, as nobody chose them, instead of the fixed ones that estimates are fitted to.
"""

import argparse
import json
import random
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F
from origin import origin

import regard as rg

WHOLE = [
    ("causal", b, h, kv, n, n, d)
    for b, h, kv, d in ((1, 16, 16, 64), (1, 16, 16, 128), (8, 16, 16, 64), (2, 32, 8, 128), (1, 8, 8, 256))
    for n in (64, 200, 512, 1000, 2048, 4096, 8192)
    if b * n <= 16384
]
FULL = [("full", b, h, h, n, m, d) for b, h, d in ((1, 16, 64), (4, 16, 64), (1, 16, 128), (4, 16, 128))
        for n, m in ((64, 64), (197, 197), (512, 512), (2048, 2048), (64, 4096), (256, 8192))]  # fmt: skip
OF_ONE_QUERY = (1, 32, 8, 128), (8, 32, 8, 128), (32, 32, 8, 128), (1, 16, 16, 64), (8, 12, 12, 64)
DECODE = [("full", b, h, kv, 1, m, d) for b, h, kv, d in OF_ONE_QUERY for m in (300, 4000, 32000)]
OF_BIAS = (
    (1, 200, 200),
    (4, 200, 200),
    (1, 1000, 1000),
    (4, 1000, 1000),
    (1, 4096, 4096),
    (1, 1, 300),
    (8, 1, 4000),
)
MASKED = [("bias", b, 16, 16, n, m, 64) for b, n, m in OF_BIAS]
ROUNDS, SHAPES = 5, 3


def drawn(seed, count=60):
    """Prompts, encoders, chunks and cross-attention, one query over a cache, and additive masks."""
    r, cases = random.Random(seed), []
    while len(cases) < count:
        kind = r.choice(["causal", "causal", "full", "cross", "decode", "decode", "bias"])
        n, m = int(2 ** r.uniform(5, 13)), int(2 ** r.uniform(7, 15))
        n, m = {"cross": (min(n, 600), min(m, 8192)), "decode": (1, m)}.get(kind, (n, n))
        b, (h, kv), d = r.choice([1, 1, 2, 4, 8, 16]), r.choice([(8, 8), (16, 16), (32, 8), (12, 12)]), r.choice(
            [64, 64, 80, 96, 128, 128, 256])  # fmt: skip
        kv = h if kind == "bias" else kv
        if b * h * n * m <= 1 << 31 and (kind != "bias" or b * h * n * m <= 1 << 28):
            cases.append(({"cross": "full", "decode": "full"}.get(kind, kind), b, h, kv, n, m, d))
    return cases


def kernels(kind, heads):
    """name → (q, k, v, mask) → o; of the ones that take such a call."""
    causal, aten = kind == "causal", torch.ops.aten

    def efficient(q, k, v, mask):
        if k.shape[1] != heads:
            k, v = (x.repeat_interleave(heads // k.shape[1], 1) for x in (k, v))
        if mask is not None:
            m = mask.shape[-1]
            mask = F.pad(mask, (0, -m % 16))[..., :m].expand(*q.shape[:-1], m)
        return aten._scaled_dot_product_efficient_attention(q, k, v, mask, False, 0.0, causal)[0]

    named = {
        "cudnn": lambda q, k, v, mask: F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=causal, enable_gqa=k.shape[1] != heads
        ),
        "efficient": efficient,
    }
    pattern = rg.causal() if causal else rg.full()
    named["auto"] = lambda q, k, v, mask: rg.attention(q, k, v, pattern, bias=mask)
    if kind != "bias":
        named["flash"] = lambda q, k, v, mask: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[
            0
        ]
        named["triton"] = lambda q, k, v, mask: rg.attention(q, k, v, pattern, backend="triton")
    return named


def tensors(kind, b, h, kv, n, m, d):
    shapes = (b, h, n, d), (b, kv, m, d), (b, kv, m, d)
    made = [torch.randn(x, device="cuda", dtype=torch.bfloat16) for x in shapes]
    return *made, torch.randn(1, h, n, m, device="cuda", dtype=torch.bfloat16) if kind == "bias" else None


def took(run, count):
    torch.cuda.synchronize()
    begun = perf_counter()
    for _ in range(count):
        run()
    torch.cuda.synchronize()
    return 1e3 * (perf_counter() - begun) / count


def measured(case):
    kind, b, h, kv, n, m, d = case
    run, given = kernels(kind, h), tensors(*case)
    expected = run["cudnn"](*given).float()
    row = {
        "kind": kind,
        "batch": b,
        "heads": h,
        "kv_heads": kv,
        "n": n,
        "m": m,
        "d": d,
        "first": {},
        "again": {},
    }
    for name, fn in run.items():
        off = float((fn(*given).float() - expected).norm() / expected.norm())
        assert off < 1e-2, f"{name} differs by {off}"
    for index, (name, fn) in enumerate(run.items()):
        new = range(SHAPES * index + 1, SHAPES * (index + 1) + 1)  # shapes that no other kernel has seen
        more = [
            tensors(kind, b, h, kv, n if n == 1 else n + 8 * x, m + (x if n == 1 else 8 * x), d) for x in new
        ]
        row["first"][name] = median(took(lambda: fn(*x), 1) for x in more)  # noqa: B023 (called at once)
        count = max(3, min(50, int(10 / max(1e-2, took(lambda: fn(*given), 2)))))  # noqa: B023
        row["again"][name] = median(took(lambda: fn(*given), count) for _ in range(ROUNDS))  # noqa: B023
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--drawn", type=int, metavar="SEED")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    rows, fixed = [], (*WHOLE, *FULL, *DECODE, *MASKED)
    torch.manual_seed(0)
    with torch.no_grad():
        for case in fixed if options.drawn is None else drawn(options.drawn):
            rows.append(measured(case))
            text = " ".join(
                f"{x} {rows[-1]['first'][x]:.2f} {rows[-1]['again'][x]:.4f};" for x in rows[-1]["again"]
            )
            print(*case, text, flush=True)
            if options.out:
                table = {
                    **origin(),
                    "gpu": torch.cuda.get_device_name(0),
                    "seed": options.drawn,
                    "rows": rows,
                }
                with open(options.out, "w", encoding="utf-8") as file:
                    json.dump(table, file, indent=1)
    summary(rows)


def summary(rows):
    """auto beside what PyTorch takes by itself."""
    for when in ("first", "again"):
        ratios = sorted(row[when]["auto"] / row[when]["cudnn"] for row in rows)
        print(f"{when}: auto takes {ratios[0]:.3f} to {ratios[-1]:.2f} times as long as PyTorch's own choice, median "
              f"{median(ratios):.3f}; {sum(x > 1.1 for x in ratios)} of {len(ratios)} above 1.1")  # fmt: skip


if __name__ == "__main__":
    main()
