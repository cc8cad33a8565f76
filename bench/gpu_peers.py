"""regard against FlashAttention-4, cuDNN's Flex Attention and FlexAttention (Triton, FLASH) on one GPU, in one run.

    PYTHONPATH=src:$HOME/wheels:$HOME/wheels/nvidia_cutlass_dsl/dsl_packages python3 bench/gpu_peers.py

Every row is a process: it compiles its kernels in parallel with the other rows, compares all results and gradients,
and then waits; the rows are timed one after the other, each alone on the GPU, with its contestants in rounds of
random order. `wall` is the time of one call by CUDA events, with the cache cleared before; `busy` that of the same
launches replayed as a CUDA graph, for calls under 5 ms. Peers get tensors in the layout that they prefer, and
precomputed masks. FlexAttention's forward runs with gradients enabled, which saves a compilation: it also writes the
log-sum-exp. `realised` is defined as in gpu_patterns.py. What is not ready at the deadline, or fails, is listed and
skipped.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

import regard as rg
from regard.engine import flash4

BF16 = torch.bfloat16
c, w, every = rg.causal, rg.window, rg.every
SPARSE = c() & (w(128) | every(64))
FIRST = [  # pattern, n; in order of importance
    (c(), 16384),
    (c() & w(256), 32768),
    (w(256), 32768),
    (c() & (w(1024) | rg.sinks(16)), 32768),
    (c() | rg.prefix(2048), 16384),
    (c() & rg.blocks(512), 16384),
    (w(128) | every(64), 16384),
]
SECOND = [
    (c() & (w(127) | rg.strided(128)), 65536),
    (w(64) | rg.rows(64) | every(64), 8192),
    (c() & (w(64) | rg.dilated(64, 8) | rg.dilated(64, 64)), 16384),
]
SHAPES = ((64, 64), 7), ((64, 64), 13), ((16, 32, 32), (3, 7, 7)), ((16, 16, 16), 5)
GRIDS = [rg.neighborhood(*shape) for shape in SHAPES]
NATTEN = [  # those of which NATTEN's documentation has times on an H100: FLUX, Hunyuan Video; 24 heads of 128
    rg.neighborhood((256, 256), 80, border="shifted"),
    rg.neighborhood((30, 48, 80), (18, 24, 24), border="shifted"),
]
ODD = [  # no box of 64 queries divides them; the first is a video of Wan 2.1
    rg.neighborhood((21, 45, 80), (7, 15, 15), border="shifted"),
    rg.neighborhood((127, 127), 13, border="shifted"),
    rg.neighborhood((13, 30, 45), (5, 9, 9)),
]


def packed(mean, n=16384, fixed=False):
    """Causal documents: of this length, or of random lengths with this mean; ids on the host until a row runs."""
    rng, lengths = random.Random(6), []
    while sum(lengths) < n:
        drawn = mean if fixed else 1 + int(rng.expovariate(1 / mean))
        lengths.append(min(drawn, n - sum(lengths)))
    return rg.documents(torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))) & c()


PACKED = packed(400), packed(2000), packed(512, fixed=True)
ROWS = [  # pattern, n, width, heads, batch
    *((p, n, 128, 16, 1) for p, n in FIRST + SECOND),
    *((p, n, 64, 16, 1) for p, n in FIRST),
    *((g, g.size, 128, 16, 1) for g in GRIDS),
    *((SPARSE, 8192, d, 16, 1) for d in (128, 96, 80, 256)),
    (SPARSE, 8192, 64, 12, 2),
    *((p, n, 64, 16, 1) for p, n in SECOND),
    *((g, g.size, 64, 16, 1) for g in GRIDS),
    *((g, g.size, 128, 24, 1) for g in NATTEN),
    *((g, g.size, 128, 12, 1) for g in ODD),
    *((p, 16384, d, 16, 1) for d in (128, 64) for p in PACKED),
]
ROUNDS = 3
LONG = 5.0  # milliseconds from which on the launches hide what the CPU does: no graph is measured
PACKAGES = "torch triton flash-attn-4 nvidia-cutlass-dsl nvidia-cudnn-frontend"


# The implementations that a row compares: each returns attend(q, k, v) and the layout of its tensors.


def ours(row, **options):
    return lambda q, k, v: rg.attention(q, k, v, row[0], **options)


def flash_attention_4(row, **options):
    from flash_attn.cute import flash_attn_func

    (part,) = flash4.parts_of(row[0], row[1], row[1], 0)
    return lambda q, k, v: flash_attn_func(q, k, v, window_size=(part.left, part.right), **options)[0]


def flash_attention_4_documents(row, **options):
    """By the ends of documents, each a sequence of its own."""
    from inspect import signature

    from flash_attn.cute import flash_attn_varlen_func

    lengths = torch.bincount(ids_of(row[0]))
    ends = F.pad(lengths.cumsum(0), (1, 0)).int().cuda()
    options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "causal": True}
    known = signature(flash_attn_varlen_func).parameters
    longest = {name: int(lengths.max()) for name in ("max_seqlen_q", "max_seqlen_k") if name in known}
    return lambda q, k, v: flash_attn_varlen_func(q[0], k[0], v[0], **options, **longest)[0][None]


def cudnn_flex(row):
    from cudnn.flex_attention import create_mask_plan, flex_attn_func

    pattern, n, d, heads, batch = row
    likes = (torch.randn(batch, n, heads, d, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3))
    plan = create_mask_plan(intervals(pattern, n), *likes)
    return lambda q, k, v: flex_attn_func(q, k, v, mask_plan=plan)


def flex(row, backend=None):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    pattern, n = row[:2]
    if (ids := ids_of(pattern)) is not None:  # as its users write it
        causal_documents = lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)  # noqa: E731
        mask = create_block_mask(causal_documents, None, None, n, n, device="cuda")
    elif n <= 32768:
        mask = create_block_mask(lambda b, h, i, j: pattern.allows(i, j), None, None, n, n, device="cuda")
    else:  # PyTorch's function would make an n × n table
        mask = pattern.block_mask(n, device="cuda")
    torch.cuda.empty_cache()
    options = {"kernel_options": {"BACKEND": backend}} if backend else {}
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, **options)


def flex_narrow(row):
    """Blocks of 64 keys: fewer pairs where a pattern is narrow."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    pattern, n = row[:2]
    mask_mod = lambda b, h, i, j: pattern.allows(i, j)  # noqa: E731
    mask = create_block_mask(mask_mod, None, None, n, n, device="cuda", BLOCK_SIZE=(128, 64))
    torch.cuda.empty_cache()
    compiled = torch.compile(flex_attention, dynamic=False)
    return partial(compiled, block_mask=mask, kernel_options={"BLOCK_M": 128, "BLOCK_N": 64})


def contestants(row):
    """(name, positions before heads?, make)."""
    yield "regard", False, lambda: ours(row)
    if not row[0].has_data or ids_of(row[0]) is not None:
        yield "triton", False, lambda: ours(row, backend="triton")
    if isinstance(row[0], c):
        yield "sdpa", False, lambda: ours(row, backend="sdpa")
    parts = flash4.parts_of(row[0], row[1], row[1], 0)
    if parts:
        yield "flash4", False, lambda: ours(row, backend="flash4")
    if len(parts) == 1:
        yield "FlashAttention-4", True, lambda: flash_attention_4(row)
        yield "FlashAttention-4 same bits", True, lambda: flash_attention_4(row, deterministic=True)
    if ids_of(row[0]) is not None:
        yield "flex", False, lambda: ours(row, backend="flex")
        yield "FlashAttention-4", True, lambda: flash_attention_4_documents(row)
        yield "FlashAttention-4 same bits", True, lambda: flash_attention_4_documents(row, deterministic=True)
    if isinstance(row[0], rg.neighborhood) and row[1] <= 16384:
        yield "blocks of 64 keys", False, lambda: flex_narrow(row)
    yield "cuDNN flex", True, lambda: cudnn_flex(row)
    yield "FlexAttention", False, lambda: flex(row)
    yield "FlexAttention FLASH", False, lambda: flex(row, "FLASH")


def ids_of(pattern):
    """The ids of a pattern with documents; None for others."""
    return next((word.ids for word in pattern.leaves() if isinstance(word, rg.documents)), None)


def needed(pattern, n):
    """The pairs of one head."""
    if (ids := ids_of(pattern)) is None:
        return pattern.count(n)
    lengths = torch.bincount(ids)
    return int((lengths * (lengths + 1) // 2).sum())


def intervals(pattern, n):
    """The keys of each query as ends of intervals, [0, F0) ∪ [F1, F2) ∪ …, one column a query."""
    ends = []
    for first in range(0, n, 1024):
        i = torch.arange(first, min(first + 1024, n), device="cuda")[:, None]
        allowed = pattern.allows(i, torch.arange(n, device="cuda")[None]).expand(len(i), n)
        none = torch.zeros(len(i), 1, dtype=torch.bool, device="cuda")
        changes = torch.cat([allowed, none], 1) != torch.cat([none, allowed], 1)
        at = changes.nonzero()
        begins_at_0 = changes[:, 0]
        place = torch.arange(len(at), device="cuda") - (changes.sum(1).cumsum(0) - changes.sum(1))[at[:, 0]]
        column = place + torch.where(begins_at_0, -1, 1)[at[:, 0]]  # an interval at 0 needs no begin
        keep = column >= 0
        wide = int(column.max()) + 1
        table = torch.full((len(i), wide), n, dtype=torch.int32, device="cuda")
        table[~begins_at_0, 0] = 0
        table[at[keep, 0], column[keep]] = at[keep, 1].int()
        ends.append(table)
    wide = max(t.shape[1] for t in ends)
    wide += 1 - wide % 2
    ends = [F.pad(t, (0, wide - t.shape[1]), value=n) for t in ends]
    return torch.cat(ends).T.contiguous()[None]


# Timing.


def both(attend, tensors, do):
    inputs = [x.detach().requires_grad_() for x in tensors]
    return lambda: torch.autograd.grad(attend(*inputs), inputs, do)


def graph_of(fn):
    """The call as a CUDA graph; None where it cannot be captured."""
    try:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):
                fn()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fn()
        return graph.replay
    except Exception as error:
        print("  no graph:", repr(error)[:100], flush=True)
        torch.cuda.synchronize()
        return None


def timed(fn, clear, calls):
    pairs = []
    for _ in range(calls + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        clear.zero_()
        begin.record()
        fn()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairs[1:]]


def times(calls):
    """The median milliseconds of each call, measured in rounds of random order."""
    clear = torch.empty(1 << 26, dtype=torch.int, device="cuda")
    found = {name: [] for name in calls}
    repeats = {name: max(1, min(8, int(20 / max(*timed(fn, clear, 2), 0.01)))) for name, fn in calls.items()}
    order = list(calls)
    for _ in range(ROUNDS):
        random.shuffle(order)
        for name in order:
            found[name] += timed(calls[name], clear, repeats[name])
    return {name: median(values) for name, values in found.items()}


def off(x, y):
    return float((x.float() - y.float()).norm() / y.float().norm())


def compiled_and_compared(row, tensors, deadline, only):
    """The calls of each contestant, forward and both passes; the results of the first; errors and failures."""
    q, k, v, do = tensors
    turned = [x.transpose(1, 2).contiguous() for x in tensors]
    forward, step, expected, errors, failed = {}, {}, None, {}, {}
    for name, is_turned, make in contestants(row):
        if only and (name.lower().startswith("flex") != (only == "flex") or name == "cuDNN flex"):
            continue
        if any(name.startswith(word) for word in os.environ.get("WITHOUT", "").split()):
            failed[name] = "left out"
            continue
        if time.time() > deadline:
            failed[name] = "not compiled before the deadline"
            continue
        try:
            attend = make()
            *qkv, grad = turned if is_turned else (q, k, v, do)
            qkv = [x.detach().requires_grad_(name.startswith("FlexAttention")) for x in qkv]
            found = [attend(*qkv).detach()]
            if " of 64 " not in name:
                step[name] = both(attend, qkv, grad)
                found += step[name]()
            found = [x.transpose(1, 2) for x in found] if is_turned else found
            expected = expected or found
            errors[name] = max(off(x, y) for x, y in zip(found, expected))
            assert errors[name] < 2e-2, f"differs by {errors[name]}"
            forward[name] = lambda a=attend, x=qkv: a(*x)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:300]
            step.pop(name, None)
        print(f"{name}: {failed.get(name, 'ready')}", flush=True)
    return forward, step, expected, {"off": errors, "failed": failed}


def worker(index, folder, deadline, only):
    row = pattern, n, d, heads, batch = ROWS[index]
    if (ids := ids_of(pattern)) is not None:
        row = pattern, *_ = rg.documents(ids.cuda()) & c(), *row[1:]
    torch.manual_seed(index)
    random.seed(index)
    tensors = q, k, v, do = [torch.randn(batch, heads, n, d, device="cuda", dtype=BF16) for _ in range(4)]
    name = repr(pattern)
    if ids is not None:
        lengths = sorted(torch.bincount(ids).tolist())
        name = f"{len(lengths)} documents of {lengths[0]} to {lengths[-1]} & causal()"
    result = {"pattern": name, "n": n, "d": d, "heads": heads, "batch": batch}
    result["needed"] = needed(pattern, n) / n**2
    forward, step, expected, more = compiled_and_compared(row, tensors, deadline, only)
    if only:
        return
    result |= more
    explained = rg.explain(q, k, v, pattern)
    result["runs"] = f"{explained.backend}, {explained.variant}"
    result["computed"] = explained.computed / n**2
    last = slice(n - 256, n)  # the last queries against the formula
    exact = rg.attention(
        q[:1, :2, last].float(), k[:1, :2].float(), v[:1, :2].float(), pattern, backend="reference"
    )
    result["off"]["formula"] = off(expected[0][:1, :2, last], exact)
    del expected, exact
    torch.cuda.empty_cache()
    Path(folder, f"{index}.ready").touch()
    while not Path(folder, f"{index}.go").exists():
        if time.time() > deadline + 300:
            return
        time.sleep(0.05)
    dense = F.scaled_dot_product_attention
    calls = {("full SDPA", "forward"): lambda: dense(q, k, v)}
    if n <= 65536 and heads <= 16:  # else it takes seconds
        calls["full SDPA", "both"] = both(dense, (q, k, v), do)
    calls |= {(name, "forward"): fn for name, fn in forward.items()}
    calls |= {(name, "both"): fn for name, fn in step.items()}
    result["ms"] = {f"{name} {kind} wall": ms for (name, kind), ms in times(calls).items()}
    Path(folder, f"{index}.json").write_text(json.dumps(result))
    short = [key for key in calls if key[0] != "full SDPA" and result["ms"][" ".join([*key, "wall"])] < LONG]
    graphs = {key: graph_of(calls[key]) for key in short}
    found = times({key: graph for key, graph in graphs.items() if graph is not None})
    result["ms"] |= {f"{name} {kind} busy": ms for (name, kind), ms in found.items()}
    Path(folder, f"{index}.json").write_text(json.dumps(result))


# The table.


def table_row(result, rate):
    """One line: forward / both, busy where it was measured, and what is realised of ours."""
    ms, cells = result["ms"], []
    for name in dict.fromkeys(key.rsplit(" ", 2)[0] for key in ms):
        if name == "full SDPA":
            continue
        wall = [ms.get(f"{name} {kind} wall") for kind in ("forward", "both")]
        values = [ms.get(f"{name} {kind} busy", w) for kind, w in zip(("forward", "both"), wall)]
        shown = [" / ".join(f"{x:.3f}" if x else "–" for x in pair) for pair in (values, wall)]
        cells.append(f"{name} {shown[0]} (wall {shown[1]})")
    bytes_ms = 4 * 2 * result["batch"] * result["heads"] * result["n"] * result["d"] / rate
    share = result["needed"]
    for kind, factor in (("forward", 1), ("both", 3)):
        if f"full SDPA {kind} wall" not in ms:
            continue
        limit = max(ms[f"full SDPA {kind} wall"] * share, factor * bytes_ms)
        for how in ("busy", "wall"):
            if (took := ms.get(f"regard {kind} {how}")) is not None:
                result[f"realised {kind} {how}"] = limit / took
    both_kinds = [
        result.get(f"realised {k} busy", result.get(f"realised {k} wall", 0)) for k in ("forward", "both")
    ]
    realised = " / ".join(f"{x:.2f}" for x in both_kinds)
    where = f"{result['pattern']} n={result['n']} d={result['d']} h={result['heads']} b={result['batch']}"
    return f"{where} [{result['runs']}] realised {realised}: " + "; ".join(cells)


def copy_rate():
    """Bytes per millisecond of a large copy on the device, read and written."""
    x = torch.empty(1 << 28, dtype=torch.int, device="cuda")
    y = torch.empty_like(x)
    clear = torch.empty(1 << 20, dtype=torch.int, device="cuda")
    return 2 * x.numel() * 4 / median(timed(lambda: y.copy_(x), clear, 5))


def started(index, folder, deadline, only):
    """A process for one row. The first rows come first where there are fewer cores."""
    given = ["--worker", str(index), "--folder", str(folder), "--deadline", str(deadline), "--only", only]
    command = ["nice", "-n", str(min(index % 10, 15)), sys.executable, __file__, *given]
    with Path(folder, f"{index}{only}.log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def wait_for(processes, end):
    """The rows that are neither ready nor through at the end; their processes are ended."""
    while time.time() < end:
        if not (
            waiting := [i for i, (p, ready) in processes.items() if p.poll() is None and not ready.exists()]
        ):
            return []
        time.sleep(0.2)
    for i in waiting:  # one that still compiles would disturb the others
        processes[i][0].kill()
    return waiting


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", type=int)
    parser.add_argument("--only", default="", help="of a worker, for --warm: flex, or rest")
    parser.add_argument("--folder", default=os.environ.get("RESULT", "."))
    parser.add_argument("--deadline", type=float)
    parser.add_argument("--warm", type=float, help="so many seconds: only fill the caches of the compilers")
    parser.add_argument("--compile", type=float, default=190, help="seconds for compiling and comparing")
    parser.add_argument("--seconds", type=float, default=330, help="of the whole run")
    parser.add_argument("--rows", type=int, nargs="*", default=list(range(len(ROWS))))
    parser.add_argument("--without", help="how the names of contestants begin that are left out")
    options = parser.parse_args()
    if options.worker is not None:
        worker(options.worker, options.folder, options.deadline, options.only)
        return
    begin = time.time()
    folder = Path(options.folder, "gpu_peers")
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["WITHOUT"] = options.without or ""
    if options.warm:
        end, never = begin + options.warm, Path(folder, "never")
        jobs = {
            (i, kind): (started(i, folder, end, kind), never)
            for kind in (("rest",) if "Flex" in (options.without or "") else ("flex", "rest"))
            for i in options.rows
        }
        print(f"not warm: {wait_for(jobs, end)}; {time.time() - begin:.0f} s")
        return
    rate, deadline = copy_rate(), begin + options.compile
    torch.cuda.empty_cache()
    jobs = {i: (started(i, folder, deadline, ""), Path(folder, f"{i}.ready")) for i in options.rows}
    late = wait_for(jobs, deadline + 25)
    print(f"{time.time() - begin:.0f} s: compiled and compared; not ready: {late}", flush=True)
    installed = {p: metadata.version(p) for p in PACKAGES.split() if _there(p)}
    everything = {
        "device": torch.cuda.get_device_name(0),
        "versions": installed,
        "bytes_per_ms": rate,
        "rows": [],
    }
    for index, (process, _) in jobs.items():
        if process.poll() is None and time.time() < begin + options.seconds:
            Path(folder, f"{index}.go").touch()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
        process.kill()
        if (found := Path(folder, f"{index}.json")).exists():
            result = json.loads(found.read_text())
            print(table_row(result, rate), flush=True)
            everything["rows"].append(result)
            Path(options.folder, "gpu_peers.json").write_text(json.dumps(everything, indent=1))
        else:
            print(f"row {index} {ROWS[index]} gave nothing: see {index}.log", flush=True)
    print(f"{time.time() - begin:.0f} s", flush=True)


def _there(package):
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


if __name__ == "__main__":
    main()
