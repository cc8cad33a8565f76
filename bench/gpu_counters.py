"""Which limit each kernel of a call meets, by the GPU's hardware counters: memory, its caches, or the tensor cores.

    PYTHONPATH=src python3 bench/gpu_counters.py [--rows w128 longnet …]

Needs NVIDIA's Nsight Compute (`ncu`). Every kernel of host.forward and host.backward is measured alone, with a cold
cache. `read`, `written`: megabytes from and to memory. `memory`, `L2`, `shared`, `tensor`, `issue`: the share of the
peak rate of the GPU's memory, its second-level cache, shared memory, the tensor cores and the issue of instructions.
A kernel with none of them near its peak waits for latencies: `waits for` names the reason that most warps give.
"""

import argparse
import csv
import subprocess
import sys

COUNTERS = {
    "us": "gpu__time_duration.sum",
    "read": "dram__bytes_read.sum",
    "written": "dram__bytes_write.sum",
    "memory": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "L2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "shared": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum.pct_of_peak_sustained_elapsed",
    "tensor": "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
}
REASONS = "long_scoreboard", "short_scoreboard", "barrier", "wait", "mio_throttle", "gmma", "not_selected"
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
UNITS = {"byte": 1e-6, "Kbyte": 1e-3, "Mbyte": 1.0, "Gbyte": 1e3, "ns": 1e-3, "us": 1.0, "ms": 1e3}


def rows() -> dict[str, tuple]:
    """Pattern, n, width, heads, batch."""
    import regard as rg

    sparse = rg.causal() & (rg.window(128) | rg.every(64))
    return {
        "w128": (sparse, 8192, 128, 16, 1),
        "w96": (sparse, 8192, 96, 16, 1),
        "w64": (sparse, 8192, 64, 12, 2),
        "w256": (sparse, 8192, 256, 16, 1),
        "window": (rg.causal() & rg.window(256), 32768, 128, 16, 1),
        "longnet": (
            rg.causal() & (rg.window(64) | rg.dilated(64, 8) | rg.dilated(64, 64)), 16384, 128, 16, 1,
        ),
        "strided": (rg.causal() & (rg.window(127) | rg.strided(128)), 65536, 128, 16, 1),
        "longformer": (rg.window(64) | rg.rows(64) | rg.every(64), 8192, 128, 16, 1),
        "dense": (rg.causal(), 8192, 128, 16, 1),
    }  # fmt: skip


def run(name: str) -> None:
    """Forward and backward, twice; the second time under the profiler."""
    import torch

    from regard.engine.call import Options
    from regard.engine.cuda import host
    from regard.engine.cuda.call import task

    pattern, n, d, heads, batch = rows()[name]
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(batch, heads, n, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    own = task(q, v, Options(pattern, 0, 1, d**-0.5))
    for profiled in (False, True):
        torch.cuda.synchronize()
        if profiled:
            torch.cuda.profiler.start()
        o, lse = host.forward(q, k, v, own)
        host.backward((q, k, v, o, lse), (do, None), own)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def counted(name: str) -> list[dict]:
    """The counters of each kernel, in order."""
    metrics = ",".join([*COUNTERS.values(), *map(STALL.format, REASONS)])
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--metrics", metrics, "--csv"]
    found = subprocess.run(
        [*command, sys.executable, __file__, "--run", name], capture_output=True, text=True, check=True
    )
    kernels: dict[str, dict] = {}
    for row in csv.DictReader(line for line in found.stdout.splitlines() if line.startswith('"')):
        one = kernels.setdefault(row["ID"], {"kernel": row["Kernel Name"]})
        value = float(row["Metric Value"].replace(",", "")) * UNITS.get(row["Metric Unit"], 1.0)
        one[row["Metric Name"]] = value
    return list(kernels.values())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", nargs="+", default=None)
    parser.add_argument("--run", help="forward and backward of one row, for the profiler")
    options = parser.parse_args()
    if options.run:
        run(options.run)
        return
    names = list(options.rows or rows())
    jobs = [subprocess.Popen([sys.executable, __file__, "--run", name]) for name in names]  # they compile
    assert not any(job.wait() for job in jobs), "a row did not run"
    print(f"{'row':11}{'kernel':18}" + "".join(f"{x:>9}" for x in COUNTERS) + "  waits for", flush=True)
    for name in names:
        for one in counted(name):
            reason = max(REASONS, key=lambda x: one.get(STALL.format(x), 0.0))
            numbers = "".join(f"{one.get(x, float('nan')):9.0f}" for x in COUNTERS.values())
            print(f"{name:11}{one['kernel'][:17]:18}{numbers}  {reason}", flush=True)


if __name__ == "__main__":
    main()
