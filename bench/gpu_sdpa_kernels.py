"""PyTorch's attention kernels and ours on dense calls without gradients, on one GPU: new and repeated shapes.

    PYTHONPATH=src python3 bench/gpu_sdpa_kernels.py [--out kernels.json]

On Hopper and Blackwell data-center GPUs PyTorch prefers cuDNN's kernel for 16-bit types, which builds a plan for
each new shape: sizes of the batch, heads, queries and keys. `first` is the wall time of the first call with a shape
(the median of three shapes, 8 queries and keys apart; of one query, one key apart), `again` that of a repeated call
(the GPU awaited after many calls, so that the slower of CPU and GPU counts), both in milliseconds. Outputs are
compared first.

cudnn      what F.scaled_dot_product_attention takes by itself
flash      PyTorch's FlashAttention-2, by its operator, which builds nothing
efficient  PyTorch's memory-efficient kernel, by its operator: the one that takes a mask without a plan
triton     ours: a plan for each new length
"""

import argparse
import json
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
    if kind != "bias":
        pattern = rg.causal() if causal else rg.full()
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
    for name, fn in run.items():
        more = [tensors(kind, b, h, kv, n if n == 1 else n + 8 * x, m + (x if n == 1 else 8 * x), d)
                for x in range(1, SHAPES + 1)]  # fmt: skip
        row["first"][name] = median(took(lambda: fn(*x), 1) for x in more)  # noqa: B023 (called at once)
        count = max(3, min(50, int(10 / max(1e-2, took(lambda: fn(*given), 2)))))  # noqa: B023
        row["again"][name] = median(took(lambda: fn(*given), count) for _ in range(ROUNDS))  # noqa: B023
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    rows = []
    torch.manual_seed(0)
    with torch.no_grad():
        for case in (*WHOLE, *FULL, *DECODE, *MASKED):
            rows.append(measured(case))
            text = " ".join(
                f"{x} {rows[-1]['first'][x]:.2f} {rows[-1]['again'][x]:.4f};" for x in rows[-1]["again"]
            )
            print(*case, text, flush=True)
            if options.out:
                table = {**origin(), "gpu": torch.cuda.get_device_name(0), "rows": rows}
                with open(options.out, "w", encoding="utf-8") as file:
                    json.dump(table, file, indent=1)


if __name__ == "__main__":
    main()
