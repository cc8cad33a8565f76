"""Calls drawn by a seed, as users bring them: is what `auto` chooses the fastest backend?

    PYTHONPATH=src python3 bench/auto_choice.py --device cpu --cases 60
    PYTHONPATH=src:$HOME/wheels:… python3 bench/auto_choice.py --device cuda --cases 60 --flex 3 --out choices.json
    PYTHONPATH=src python3 bench/auto_choice.py --device cuda --dense --out dense.json     # to fit the estimates
    PYTHONPATH=src:$HOME/wheels:… python3 bench/auto_choice.py --device cuda --documents --out documents.json

Each case is one call: whole sequences, short ones, one query or a chunk over a cache, cross attention; dense and
sparse patterns, packed documents, grids; grouped heads, two widths, padded batches, softcap, sinks, a bias; with and
without the backward pass. Every backend that takes it runs by name: results and gradients are compared with those of
auto, and the times too, beside PyTorch's function as users call it (`pytorch`) where the call is dense, in rounds of
random order (wall time per call, the GPU awaited only at the end of a round, so that the slower of CPU and GPU
counts). `regret` is auto's time / the least. On CUDA kernels are compiled by twelve processes first; FlexAttention,
which compiles for ten seconds, takes part in every Nth case (--flex), and where auto chooses it.
"""

import argparse
import json
import random
import subprocess
import sys
from itertools import product
from statistics import median
from time import perf_counter

PROCESSES, ROUNDS = 12, 5
NAMES = "sdpa", "tiles", "triton", "flash4", "flex"
MOST_PAIRS = {"cpu": 1 << 25, "cuda": 1 << 31}  # of all heads: SDPA with a mask holds as many numbers


def drawn(seed, count, device):
    """Cases as dicts of names and numbers, which can be stored."""
    cases, r = [], random.Random(seed)
    while len(cases) < count:
        case = _one(r, device)
        if case["batch"] * case["heads"] * case["n"] * case["m"] <= MOST_PAIRS[device]:
            cases.append(case)
    return cases


def dense(device):
    """Every pair or every past one, by dtype, width and kind of call: what estimates of dense calls are fitted to."""
    shapes = [  # kind, batch, heads, key heads, n, m, with backward
        ("decode", 1, 32, 8, 1, 16384, False), ("decode", 8, 32, 8, 1, 4096, False),
        ("decode", 4, 12, 12, 1, 8192, False), ("chunk", 1, 8, 8, 64, 8192, False),
        ("chunk", 1, 32, 8, 64, 8192, False), ("cross", 4, 16, 16, 300, 2048, False),
        ("cross", 4, 16, 16, 300, 2048, True),
        *(("whole", b, 16, 16, n, n, grad)
          for b, n in ((8, 128), (2, 512), (2, 1024), (1, 2048), (1, 4096), (2, 4096)) for grad in (False, True)),
    ]  # fmt: skip
    names = "kind", "batch", "heads", "kv_heads", "n", "m", "grad"
    kinds = ("bfloat16", "float32") if device == "cuda" else ("float32",)
    widths = (32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)
    cases = []
    for dtype, (d_k, d_v), shape in product(kinds, widths, shapes):
        pattern = "causal()" if shape[0] == "whole" else "full()"
        named = {"dtype": dtype, "width": d_k, "width_v": d_v, "pattern": pattern, "term": "none"}
        cases.append(dict(zip(names, shape)) | named)
    return cases


def documents(device):
    """Packed documents by number, width and band: what their estimates are fitted to."""
    lengths = (2048, 8192, 16384, 32768) if device == "cuda" else (1024,)
    named = {"kind": "whole", "dtype": "bfloat16" if device == "cuda" else "float32", "term": "none"}
    cases = []
    for width, n, count, grad in product((128, 64, 96), lengths, (4, 16, 64), (False, True)):
        bands = ["causal() & "]
        bands += ["", "causal() & window(256) & "] if width != 96 and n == 16384 else []
        for band, batch in [(x, 1) for x in bands] + [(bands[0], 4)] * (n == 8192):
            shape = {"batch": batch, "heads": 16, "kv_heads": 16, "n": n, "m": n, "grad": grad}
            pattern = {"width": width, "width_v": width, "pattern": f"{band}documents({count})"}
            cases.append(named | shape | pattern)
    return cases


def _one(r, device):
    gpu = device == "cuda"
    kind = r.choice(["whole", "whole", "whole", "short", "decode", "chunk", "cross"])
    sizes = [2048, 3000, 4096, 8192, 16384] if gpu else [512, 1000, 1024, 2048, 4096]
    m = r.choice([64, 100, 128, 197, 256, 384, 512] if kind == "short" else sizes)
    n = {"decode": 1, "chunk": r.choice([16, 64, 128, 256]), "cross": r.choice([64, 197, 300, 512])}.get(
        kind, m
    )
    heads = r.choice([8, 12, 16, 32] if gpu else [4, 8, 12])
    width = r.choice([32, 64, 64, 80, 96, 128, 128, 192, 256] if gpu else [16, 32, 64, 64, 80, 128])
    dtype = r.choice(["bfloat16"] * 5 + ["float16", "float32"] if gpu else ["float32"] * 4 + ["float64"])
    case = {
        "kind": kind, "n": n, "m": m, "heads": heads, "kv_heads": r.choice([heads, heads, heads // 4]),
        "width": width, "width_v": 128 if width == 192 and r.random() < 0.5 else width, "dtype": dtype,
        "batch": r.choice([1, 1, 2, 4, 8, 32] if kind in ("short", "decode") else [1, 1, 2, 4]),
        "grad": kind not in ("decode", "chunk") and r.random() < 0.6,
    }  # fmt: skip
    case["pattern"] = "full()" if kind == "cross" and r.random() < 0.7 else _pattern(r, kind, n, m)
    case["term"] = r.choice(["none"] * 6 + ["softcap", "sink", "lengths", "left", "slopes", "table"])
    return case


def _pattern(r, kind, n, m):
    near = r.choice([7, 16, 64, 128, 256, 512])
    words = [
        "full()", "causal()", "causal()", "causal()", f"causal() & window({near})", f"window({near})",
        f"causal() & (window({near}) | sinks({r.choice([4, 16, 64])}))",
        f"causal() & (window({near}) | every({r.choice([16, 32, 64, 100])}))",
        f"window({near}) | every({r.choice([16, 64, 128])})",
        f"causal() & strided({r.choice([8, 64])})", f"causal() & blocks({r.choice([64, 100, 512])})",
        f"causal() & (dilated({r.choice([16, 64])}, {r.choice([2, 8])}) | window({near}))",
        f"causal() | prefix({r.choice([16, 100, 256])})",
        f"window({near}) | rows({r.choice([1, 16])}) | every({r.choice([64, 256])})",
    ]  # fmt: skip
    if kind == "whole":
        words += [f"causal() & documents({r.randint(2, 60)})", f"documents({r.randint(2, 20)})"]
        side = int(m**0.5)
        words += [f"neighborhood(({side}, {side}), {r.choice([3, 7, 13])})"] if side * side == m else []
    return r.choice(words)


def tensors_and_options(case, device):
    import torch

    import regard as rg

    g = torch.Generator(device).manual_seed(0)
    dtype, b, m = getattr(torch, case["dtype"]), case["batch"], case["m"]
    shapes = (
        (case["heads"], case["n"], case["width"]), (case["kv_heads"], m, case["width"]),
        (case["kv_heads"], m, case["width_v"]), (case["heads"], case["n"], case["width_v"]),
    )  # fmt: skip
    made = [torch.randn(b, *x, device=device, dtype=dtype, generator=g) for x in shapes]

    def documents(count):
        ends = sorted(random.Random(count).sample(range(1, m), count - 1))
        return rg.documents(torch.bucketize(torch.arange(m), torch.tensor(ends), right=True).to(device))

    words = {name: getattr(rg, name) for name in rg.pattern.__all__ if hasattr(rg, name)}
    options = {"pattern": eval(case["pattern"], words | {"documents": documents})}
    heads, drawn = case["heads"], torch.randint(m // 4, m + 1, (b,), device=device, generator=g)
    options |= {
        "none": dict,
        "softcap": lambda: {"softcap": 30.0},
        "sink": lambda: {"sink_logits": torch.randn(heads, device=device, generator=g).to(dtype)},
        "lengths": lambda: {"lengths": drawn},
        "left": lambda: {"lengths": torch.stack([m - drawn, torch.full_like(drawn, m)], 1)},
        "slopes": lambda: {"bias": rg.ByDistance(slopes=torch.rand(heads, device=device, generator=g).to(dtype))},
        "table": lambda: {"bias": rg.ByDistance(torch.randn(heads, 65, device=device, generator=g).to(dtype))},
    }[case["term"]]()  # fmt: skip
    return made, options


def calls_of(case, device, names):
    """What auto explains, and a call by each of these names that takes it; all have run once."""
    import torch

    import regard as rg

    (q, k, v, do), options = tensors_and_options(case, device)
    if case["grad"]:
        q, k, v = (x.requires_grad_() for x in (q, k, v))
    explained = rg.explain(q, k, v, **options)

    def call(name):
        def run():
            if case["grad"]:
                o = rg.attention(q, k, v, **options, backend=name)
                return o.detach(), *torch.autograd.grad(o, (q, k, v), do)
            with torch.no_grad():
                return (rg.attention(q, k, v, **options, backend=name),)

        return run

    calls, refused, first, error = {}, {}, None, {}
    for name in ("auto", *dict.fromkeys([*names, explained.backend])):
        try:
            found = call(name)()
        except rg.BackendError as why:
            refused[name] = str(why)
            continue
        except torch.OutOfMemoryError as why:
            refused[name] = str(why)[:80]
            torch.cuda.empty_cache()
            continue
        first = first or found
        error[name] = max(_off(x, y) for x, y in zip(found, first))
        calls[name] = call(name)
    if device == "cuda" and case["term"] == "none" and case["dtype"] != "float32" and _is_dense(case):
        calls["pytorch"] = _pytorch(case, (q, k, v), do)
        error["pytorch"] = max(_off(x, y) for x, y in zip(calls["pytorch"](), first))
    return explained, calls, refused, error


def _is_dense(case):
    """Whether PyTorch's function computes this call without a mask."""
    return case["pattern"] == "full()" or (case["pattern"] == "causal()" and case["n"] in (1, case["m"]))


def _pytorch(case, tensors, do):
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    options = {"is_causal": case["pattern"] == "causal()" and case["n"] > 1}
    options["enable_gqa"] = case["heads"] != case["kv_heads"]

    def run():
        with torch.set_grad_enabled(case["grad"]):
            o = scaled_dot_product_attention(*tensors, **options)
            return (o.detach(), *torch.autograd.grad(o, tensors, do)) if case["grad"] else (o,)

    return run


def _off(x, y):
    size = y.double().norm()
    return float((x.double() - y.double()).norm() / size) if size else float(x.double().norm())


def measured(case, device, names):
    import torch

    explained, calls, refused, error = calls_of(case, device, names)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def took(run, count):
        wait()
        begun = perf_counter()
        for _ in range(count):
            run()
        wait()
        return (perf_counter() - begun) / count

    counts = {name: max(2, min(50, int(0.02 / max(1e-5, took(run, 2))))) for name, run in calls.items()}
    times, order = {name: [] for name in calls}, list(calls)
    for _ in range(ROUNDS):
        random.shuffle(order)
        for name in order:
            times[name].append(took(calls[name], counts[name]))
    ms = {name: 1e3 * median(x) for name, x in times.items()}
    regret = ms["auto"] / min(ms.values())
    chosen = {"backend": explained.backend, "variant": explained.variant}
    return case | chosen | {"ms": ms, "regret": regret, "off": error, "refused": refused}


def shown(row):
    times = " ".join(f"{name} {ms:.3f}" for name, ms in row["ms"].items() if name != "auto")
    shape = f"b {row['batch']} h {row['heads']}/{row['kv_heads']} n {row['n']} m {row['m']} d {row['width']}"
    shape += "" if row["width"] == row["width_v"] else f"/{row['width_v']}"
    what = f"{row['pattern']} {row['term']} {shape} {row['dtype']}{' grad' if row['grad'] else ''}"
    off = max(row["off"].values())
    return f"{row['regret']:5.2f} auto {row['ms']['auto']:.3f} = {row['backend']}; {times}; off {off:.0e}; {what}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=1811)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--dense", action="store_true", help="not drawn: dense calls of every kind and width")
    parser.add_argument("--documents", action="store_true", help="not drawn: packed documents")
    parser.add_argument("--flex", type=int, default=0, metavar="N", help="FlexAttention in every Nth case")
    parser.add_argument(
        "--backends", nargs="+", choices=NAMES, default=NAMES, help="beside the one that auto chooses"
    )
    parser.add_argument("--compile", type=int, help="only run every twelfth case once, from this one on")
    parser.add_argument("--limit", type=float, default=400, help="seconds after which no case is begun")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    begun, cases = perf_counter(), drawn(options.seed, options.cases, options.device)
    cases = dense(options.device) if options.dense else cases
    cases = documents(options.device) if options.documents else cases
    others = tuple(name for name in options.backends if name != "flex")
    names = [
        (*others, "flex") if options.flex and at % options.flex == 0 else others for at in range(len(cases))
    ]
    if options.compile is not None:
        for at in range(options.compile, len(cases), PROCESSES):
            try:
                calls_of(cases[at], options.device, names[at])
            except Exception as error:
                print(f"case {at}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return
    if options.device == "cuda":
        command = [sys.executable, *sys.argv, "--compile"]
        workers = [subprocess.Popen([*command, str(first)]) for first in range(PROCESSES)]
        for worker in workers:
            try:
                worker.wait(max(1, options.limit / 2 - (perf_counter() - begun)))
            except subprocess.TimeoutExpired:
                worker.kill()
        print(f"compiled in {perf_counter() - begun:.0f} s", flush=True)
    rows = []
    for at, case in enumerate(cases):
        if perf_counter() - begun > options.limit:
            print(f"stopped after {at} of {len(cases)} cases")
            break
        try:
            rows.append(measured(case, options.device, names[at]))
            print(f"{at:3} {shown(rows[-1])}", flush=True)
        except Exception as error:
            print(f"{at:3} FAILED {case}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        if options.out:
            with open(options.out, "w", encoding="utf-8") as file:
                json.dump(
                    {"seed": options.seed, "device": _device(options.device), "rows": rows}, file, indent=1
                )
    regrets = sorted(row["regret"] for row in rows)
    shares = ", ".join(
        f"{sum(x <= limit for x in regrets)} within {limit} ×" for limit in (1.05, 1.1, 1.25, 2)
    )
    print(f"{len(rows)} cases: median {median(regrets):.2f}, worst {regrets[-1]:.2f}; {shares}")


def _device(name):
    import torch

    return f"{torch.cuda.get_device_name(0) if name == 'cuda' else 'CPU'}, torch {torch.__version__}"


if __name__ == "__main__":
    main()
