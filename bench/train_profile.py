"""Where the GPU time of a training step of transformer-base goes: kernels by time, next to their hardware limits.

    PYTHONPATH=src python3 bench/train_profile.py --out FILE            # about a minute and a half on an H200
    PYTHONPATH=src python3 bench/train_profile.py --sides ours --tune   # also times kernels with other tile sizes

The step is that of train_h200.py. One line per kernel: launches and milliseconds per step. For kernels that this file
lists, the lower limit is shown: bytes over 4.8 TB/s, or FLOPs over 989 TFLOP/s, both of an H200.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from torch import Tensor
from train_gpu_updates import launch_latency
from train_h200 import DROPOUT, SIDES, Size

from regard.nn import branch_kernel
from regard.training.loop import cross_entropy_kernel
from regard.training.loop.meter import machine

BYTES, FLOPS = 4.8e12, 989e12


def floors(size: Size) -> dict[str, float]:
    """Milliseconds a step that the named kernels need at least; the residual stream is float32, the rest 16 bits."""
    rows, d, layers = size.pairs * size.length, size.d_model, size.layers
    one = rows * d * 2  # bytes of a 16-bit activation
    ends, attentions, own, cross = 5 * layers, 3 * layers, 2 * layers, layers
    by_bytes = {
        "branch_end_kernel": ends * 6 * one,
        "branch_end_backward_kernel": ends * 8 * one,
        "relu_dropout_kernel": 2 * layers * 2 * one * size.d_ff / d,
        "relu_dropout_backward_kernel": 2 * layers * 3 * one * size.d_ff / d,
        "column_sums_kernel": attentions * 3 * one,
        "forward_kernel": attentions * 4 * one,
        "backward_kernel": (own * 7 + cross * 7) * one,
        "cross_entropy_kernel": 2 * 2 * rows * size.vocab,
    }
    return {name: 1e3 * b / BYTES for name, b in by_bytes.items()} | {"products": 1e3 * size.flops / FLOPS}


def is_product(name: str) -> bool:
    return any(part in name for part in ("nvjet", "gemm", "cutlass", "splitK", "cublasLt"))


def profiled(step: Callable[[], Tensor], steps: int = 5) -> list[tuple[str, float, float]]:
    """(kernel, launches, milliseconds) a step, longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    found = [(e.key, e.count / steps, e.self_device_time_total / 1e3 / steps) for e in seen.key_averages()]
    return sorted((row for row in found if row[2] > 0), key=lambda row: -row[2])


def show(name: str, rows: list[tuple[str, float, float]], size: Size, top: int) -> None:
    known = floors(size)
    products = [row for row in rows if is_product(row[0])]
    total = sum(ms for *_, ms in rows)
    print(f"\n{name}: {total:.2f} ms of kernels a step, {sum(n for _, n, _ in rows):.0f} launches")
    print(
        f"  products: {sum(n for _, n, _ in products):.0f} launches, {sum(ms for *_, ms in products):.2f} ms, "
        f"floor {known['products']:.2f}"
    )
    for kernel, count, ms in rows[:top]:
        floor = known.get(kernel)
        print(
            f"  {ms:8.3f} ms {count:6.1f} ×  {'' if floor is None else f'(floor {floor:.2f}) '}{kernel[:110]}"
        )


def gpu_ms(f: Callable[[], object], calls: int = 10, repeats: int = 5) -> float:
    """The median milliseconds of a call, of those in a CUDA graph: without the host's part."""
    for _ in range(3):
        f()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            f()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, stop in pairs:
        start.record()
        graph.replay()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairs) / calls


def tuned(size: Size) -> dict:
    """Milliseconds of our kernels with other tiles."""
    rows, d, wide = size.pairs * size.length, size.d_model, size.d_ff
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    seed, weight = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.ones(d, device="cuda")
    x, y, g = torch.randn(rows, d, device="cuda"), torch.randn(rows, d, **kind), torch.randn(rows, d, **kind)
    h = torch.randn(rows, wide, **kind)
    factors, found = [0.1, 1e-5, 0.0, 1.0], {}
    norm, before = (
        (weight, weight, weight),
        (branch_kernel.END_BACKWARD, branch_kernel.ENTRIES, branch_kernel.PROGRAMS),
    )
    total, _, statistics_ = branch_kernel.branch_end(x, y, norm, seed, factors, torch.bfloat16)

    def end_backward() -> None:
        branch_kernel.branch_end_backward([g, x], total, statistics_, weight, seed, factors, torch.bfloat16)

    for chosen in ((512, 1, 1056), (512, 1, 2112), (1024, 1, 1056), (1024, 2, 528), (1024, 2, 1056), (2048, 2, 528),
                   (2048, 4, 264), (2048, 4, 528), (4096, 4, 264), (4096, 8, 264), (4096, 8, 528)):  # fmt: skip
        branch_kernel.END_BACKWARD = chosen
        found[f"branch end backward, {chosen}"] = gpu_ms(end_backward)
    for entries, programs in ((2048, 528), (2048, 1056), (4096, 528), (4096, 1056)):
        branch_kernel.ENTRIES, branch_kernel.PROGRAMS = entries, programs
        what = f"{entries} entries, {programs} programs"
        found[f"relu dropout backward, {what}"] = gpu_ms(
            lambda: branch_kernel.relu_dropout_backward(h, h, 0.1)
        )
        found[f"column sums, {what}"] = gpu_ms(lambda: branch_kernel.column_sums(h))
    branch_kernel.END_BACKWARD, branch_kernel.ENTRIES, branch_kernel.PROGRAMS = before
    sums = torch.randn(528, 3 * d, device="cuda")
    for chosen in ((16, 64), (16, 128), (32, 128), (8, 256)):
        branch_kernel.SUM_COLUMNS, branch_kernel.SUM_ROWS = chosen
        found[f"sums of 528 programs, {chosen}"] = gpu_ms(lambda: branch_kernel._summed(sums))
    branch_kernel.SUM_COLUMNS, branch_kernel.SUM_ROWS = 8, 256
    del x, g, h, total
    logits, target = torch.randn(8192, size.vocab, **kind), torch.randint(size.vocab, (8192,), device="cuda")
    for block, warps in ((2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16)):
        cross_entropy_kernel.BLOCK, cross_entropy_kernel.WARPS = block, warps
        run = lambda: cross_entropy_kernel.cross_entropy_(logits, target, None, 0.1, -100, True)  # noqa: E731
        found[f"cross-entropy of 8192 rows, block {block}, {warps} warps"] = gpu_ms(run)
    cross_entropy_kernel.BLOCK, cross_entropy_kernel.WARPS = 4096, 8
    states, table = torch.randn(8192, d, **kind), torch.randn(size.vocab, d, **kind)
    for part in (512, 1024, 2048, 8192):

        def in_parts(part: int = part) -> None:
            for i in range(0, 8192, part):
                torch.mm(states[i : i + part], table.T, out=logits[i : i + part])
                cross_entropy_kernel.cross_entropy_(
                    logits[i : i + part], target[i : i + part], None, 0.1, -100, True
                )

        found[f"logits and cross-entropy of 8192 rows, {part} at once"] = gpu_ms(in_parts)
    del logits
    return {k: v if isinstance(v, str) else round(v, 4) for k, v in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sides", nargs="*", default=["theirs", "ours", "ours, not compiled"])
    parser.add_argument("--top", type=int, default=25)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    size, result = Size(), {"date": str(date.today()), "machine": machine(torch.device("cuda"))}
    result["launch_latency_us"] = round(launch_latency("cuda"), 2)
    result["floors_ms"] = {k: round(v, 3) for k, v in floors(size).items()}
    if given.tune:
        result["tuned"] = tuned(size)
        print("\n".join(f"{name}: {value}" for name, value in result["tuned"].items()), flush=True)
    for name in given.sides:
        torch.manual_seed(0)
        torch._dynamo.reset()
        step = SIDES[name](size, DROPOUT, "cuda")
        for _ in range(5):
            step()
        rows = profiled(step)
        show(name, rows, size, given.top)
        result[name] = [(kernel[:200], round(n, 2), round(ms, 4)) for kernel, n, ms in rows]
        if given.out:
            given.out.write_text(json.dumps(result, indent=1) + "\n")
        del step
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
