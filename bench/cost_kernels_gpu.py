# ruff: noqa: B023 (each call runs before the loop goes on)
"""What do kernels allocate while they run? The workspace of single operations on a GPU, and the choice of SDPA.

`PYTHONPATH=src python3 bench/cost_kernels_gpu.py OUT.json`: for each operation the bytes at its peak beyond its
results; for attention also the kernel that PyTorch chooses, and what it saves. The numbers of costs/trace/kernels.py.
"""

import json
import sys
import time
from itertools import chain

import torch
import torch.nn.functional as F

import regard as rg

CUDA = "cuda"


def extra(call):
    """(bytes of the results, bytes beyond them at the peak), after one call that warms up."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = call()
    torch.cuda.synchronize()
    kept, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    requested = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    del out
    return kept, peak - kept, requested


def operations():
    for dtype in (torch.float32, torch.bfloat16):
        for rows, columns in (
            (512, 256),
            (3000, 768),
            (7168, 640),
            (4096, 3072),
            (12288, 1000),
            (2000, 50257),
        ):
            x = torch.randn(rows, columns, device=CUDA).to(dtype)
            w, b = torch.randn(columns, device=CUDA).to(dtype), torch.randn(columns, device=CUDA).to(dtype)
            size = [rows, columns, str(dtype)]
            yield "sum0", size, lambda: x.sum(0)
            yield "sum_all", size, lambda: x.sum()
            yield "mean", size, lambda: x.mean()
            yield "softmax", size, lambda: x.softmax(-1)
            yield "log_softmax", size, lambda: x.log_softmax(-1)
            if columns < 4000:
                mean, rstd = torch.randn(rows, 1, device=CUDA), torch.randn(rows, 1, device=CUDA)
                shape = [columns]
                yield (
                    "layer_norm_backward",
                    size,
                    lambda: torch.ops.aten.native_layer_norm_backward(
                        x,
                        x,
                        shape,
                        mean,
                        rstd,
                        w.float() if dtype == torch.float32 else w,
                        b,
                        [True, True, True],
                    ),
                )
                yield "rms_norm", size, lambda: torch.ops.aten._fused_rms_norm(x, shape, w, 1e-6)
                yield (
                    "rms_norm_backward",
                    size,
                    lambda: torch.ops.aten._fused_rms_norm_backward(x, x, shape, rstd, w, [True, True]),
                )
                y = torch.randn(512, columns, device=CUDA).to(dtype)
                yield "mm", size, lambda: x @ y.T
                yield "mm_t", size, lambda: x.T @ x[:, :64]
                bias = torch.randn(512, device=CUDA).to(dtype)
                yield "addmm", size, lambda: F.linear(x, y, bias)
            yield "cumsum", size, lambda: x.cumsum(0)
            yield "topk", size, lambda: x[:, : min(columns, 64)].topk(2, -1)


def gathers_and_convolutions():
    for rows, vocab, d in (
        (700, 1000, 64),
        (3000, 5000, 320),
        (3073, 500, 320),
        (6000, 32000, 512),
        (20000, 997, 256),
    ):
        grad = torch.randn(rows, d, device=CUDA)
        ids = torch.randint(0, vocab, (rows,), device=CUDA)
        yield (
            "embedding_backward",
            [rows, vocab, d],
            lambda: torch.ops.aten.embedding_dense_backward(grad, ids, vocab, -1, False),
        )
        table = torch.zeros(vocab, d, device=CUDA)
        yield "index_put", [rows, vocab, d], lambda: table.index_put((ids,), grad, accumulate=True)
    for b, c, side, patch, d in ((8, 3, 224, 16, 384), (32, 3, 96, 8, 192)):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(b, c, side, side, device=CUDA).to(dtype)
            conv = torch.nn.Conv2d(c, d, patch, patch, device=CUDA, dtype=dtype)
            yield "conv", [b, c, side, patch, d, str(dtype)], lambda: conv(x)
            out = conv(x).detach()
            yield (
                "conv_backward",
                [b, c, side, patch, d, str(dtype)],
                lambda: torch.ops.aten.convolution_backward(
                    out,
                    x,
                    conv.weight,
                    [d],
                    [patch] * 2,
                    [0, 0],
                    [1, 1],
                    False,
                    [0, 0],
                    1,
                    [False, True, True],
                ),
            )


def attention():
    """(facts, kernel chosen, bytes saved, bytes at the backward's peak beyond the gradients)."""
    names = ("math", "flash", "efficient", "override", "cudnn", "overrideable")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for b, h, h_kv, n, m, d, d_v, mask, causal, dropout in (
            (4, 8, 8, 300, 300, 64, 64, None, True, 0.0),
            (4, 8, 8, 300, 300, 64, 64, None, False, 0.0),
            (4, 10, 2, 700, 700, 64, 64, None, True, 0.0),
            (4, 10, 2, 700, 700, 32, 32, None, True, 0.0),
            (4, 8, 8, 300, 300, 64, 64, None, True, 0.1),
            (4, 8, 8, 300, 300, 40, 40, None, True, 0.0),
            (4, 8, 8, 300, 300, 20, 20, None, True, 0.0),
            (4, 8, 8, 300, 300, 18, 18, None, True, 0.0),
            (4, 8, 8, 300, 300, 160, 160, None, True, 0.0),
            (4, 8, 8, 300, 300, 256, 256, None, True, 0.0),
            (4, 8, 8, 300, 300, 64, 32, None, True, 0.0),
            (4, 8, 8, 300, 500, 64, 64, None, False, 0.0),
            (4, 8, 8, 300, 500, 64, 64, None, True, 0.0),
            (4, 8, 8, 1, 500, 64, 64, None, False, 0.0),
            (4, 8, 8, 300, 300, 64, 64, "bool", False, 0.0),
            (4, 8, 8, 300, 300, 64, 64, "float", False, 0.0),
            (4, 8, 8, 300, 300, 64, 64, "full", False, 0.0),
            (4, 8, 8, 300, 300, 64, 64, "trained", False, 0.0),
            (4, 8, 2, 300, 300, 64, 64, "bool", False, 0.0),
            (4, 8, 8, 300, 300, 64, 64, "float", False, 0.1),
            (4, 8, 8, 1000, 1000, 64, 64, None, True, 0.0),
            (4, 8, 8, 2048, 2048, 128, 128, None, True, 0.0),
            (4, 8, 2, 1000, 1000, 128, 128, None, True, 0.0),
        ):
            q = torch.randn(b, n, h, d, device=CUDA, dtype=dtype).transpose(1, 2).requires_grad_()
            k = torch.randn(b, m, h_kv, d, device=CUDA, dtype=dtype).transpose(1, 2).requires_grad_()
            v = torch.randn(b, m, h_kv, d_v, device=CUDA, dtype=dtype).transpose(1, 2).requires_grad_()
            given = {"dropout_p": dropout, "is_causal": causal, "enable_gqa": h != h_kv}
            shape = (b, h, n, m) if mask == "full" else (1, 1, n, m)
            if mask is not None:
                table = torch.rand(shape, device=CUDA) > 0.2
                given["attn_mask"] = table if mask == "bool" else torch.zeros(shape, device=CUDA, dtype=dtype)
                given["attn_mask"].requires_grad_(mask == "trained")
            facts = [str(dtype), b, h, h_kv, n, m, d, d_v, mask, causal, dropout]
            try:
                choice = torch._fused_sdp_choice(q, k, v, **given)
                F.scaled_dot_product_attention(q, k, v, **given).sum().backward()
                q.grad = k.grad = v.grad = None
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                o = F.scaled_dot_product_attention(q, k, v, **given)
                saved, peak_forward = (
                    torch.cuda.memory_allocated() - before,
                    torch.cuda.max_memory_allocated() - before,
                )
                grad = torch.empty_like(o)
                with torch.no_grad():
                    grad.zero_()
                at = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                o.backward(grad)
                peak = torch.cuda.max_memory_allocated() - at
                yield [
                    *facts,
                    names[choice],
                    type(o.grad_fn).__name__,
                    list(o.stride()),
                    saved,
                    peak_forward,
                    peak,
                ]
            except Exception as e:
                yield [*facts, "error", str(e)[:120]]
            del q, k, v, given


def patterns():
    """Saved bytes and the backward's peak of our own kernels."""
    for dtype in (torch.float32, torch.bfloat16):
        for b, h, h_kv, n, d, pattern in (
            (2, 8, 8, 4096, 64, rg.causal() & (rg.window(128) | rg.every(64))),
            (4, 8, 2, 1500, 64, rg.causal() & rg.window(256)),
            (4, 6, 6, 700, 40, rg.causal() & rg.window(100)),
            (2, 4, 4, 1000, 128, rg.window(64)),
            (8, 4, 2, 300, 32, rg.causal() & rg.window(32)),
        ):
            q = torch.randn(b, n, h, d, device=CUDA, dtype=dtype).transpose(1, 2).requires_grad_()
            k, v = (
                torch.randn(b, n, h_kv, d, device=CUDA, dtype=dtype).transpose(1, 2).requires_grad_()
                for _ in range(2)
            )
            for _ in range(2):
                rg.attention(q, k, v, pattern).sum().backward()
                q.grad = k.grad = v.grad = None
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            o = rg.attention(q, k, v, pattern)
            saved, peak_forward = (
                torch.cuda.memory_allocated() - before,
                torch.cuda.max_memory_allocated() - before,
            )
            grad = torch.zeros_like(o)
            at = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            o.backward(grad)
            by = rg.explain(q, k, v, pattern)
            yield [str(dtype), b, h, h_kv, n, d, repr(pattern), by.backend, by.variant, list(o.stride()), saved,
                   peak_forward, torch.cuda.max_memory_allocated() - at]  # fmt: skip


def main() -> None:
    start = time.perf_counter()
    rows = {"operations": [], "attention": [], "patterns": [], "torch": torch.__version__}
    rows["autocast"] = [
        n for n in torch._C._dispatch_get_all_op_names()
        if torch._C._dispatch_has_kernel_for_dispatch_key(n, "AutocastCUDA")
    ]  # fmt: skip
    for name, size, call in chain(operations(), gathers_and_convolutions()):
        try:
            rows["operations"].append([name, size, *extra(call)])
        except Exception as e:
            rows["operations"].append([name, size, "error", str(e)[:150]])
    rows["attention"] = list(attention())
    rows["patterns"] = list(patterns())
    rows["seconds"] = time.perf_counter() - start
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(rows, file)
    print(rows["seconds"], len(rows["operations"]))


if __name__ == "__main__":
    main()
