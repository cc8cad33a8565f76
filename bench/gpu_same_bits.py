"""Do the kernels give the same bits every time? Calls of the GPU tests, repeated many times, on one GPU.

    PYTHONPATH=src:tests/helpers python3 bench/gpu_same_bits.py --calls 2000 --processes 8 --out same_bits.json
    PYTHONPATH=src:tests/helpers python3 bench/gpu_same_bits.py --only "d = 256, float16, steep"

Each process repeats every case with the same tensors, and compares o, lse, dq, dk and dv with those of its first
call. Where a result differs, the output names it, its rows and how far it is off: rows of one tile point to its
program, those of all tiles of a head to a launch. Several processes share the GPU, so that programs run at other
moments. It was written when one test failed once in such a run: a fault of the test (`gpu_tests-2026-11-19.txt`).
"""

import argparse
import json
import subprocess
import sys
import time

import torch

from kernel_cases import LONG, ON_GPU, OUTPUTS, bias, options, row_extras, tensors
from regard.engine.cuda import host
from regard.engine.cuda.call import task


def results(case, made, given, extras):
    q, k, v, do, dlse = given
    o, lse = host.forward(q, k, v, made, extras)
    grads = host.backward((q, k, v, o, lse), (do, dlse), made, extras, False)[:3]
    return [o, lse, *grads]


def differences(case, calls, seconds):
    """How often each result differed, and where it did the first time."""
    given, extras = tensors(case, "cuda"), row_extras(case, "cuda")
    made = task(given[0], given[2], options(case), extras)
    first = results(case, made, given, extras)
    counts, where, done = dict.fromkeys(OUTPUTS, 0), {}, 0
    end = time.monotonic() + seconds
    while done < calls and time.monotonic() < end:
        found = [results(case, made, given, extras) for _ in range(8)]
        same = torch.stack([(x == y).all() for each in found for x, y in zip(each, first)]).view(8, -1).cpu()
        done += 8
        for at, nth in (~same).nonzero().tolist():
            name, x, y = OUTPUTS[nth], found[at][nth], first[nth]
            counts[name] += 1
            if name not in where:
                rows = (x != y).reshape(*x.shape[:3], -1).any(-1).nonzero()
                off = float((x.double() - y.double()).abs().max())
                where[name] = {"rows": len(rows), "first": rows[:12].tolist(), "off": off}
    return {"case": case.name, "calls": done, "different": counts, "where": where}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="a part of the names of cases")
    parser.add_argument("--calls", type=int, default=2000, help="of each case and process")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each case")
    parser.add_argument("--processes", type=int, default=1, help="that run at the same time")
    parser.add_argument("--out", help="a file for the results of this process")
    o = parser.parse_args()
    others = []
    if o.processes > 1:
        arguments = "--only", o.only, "--calls", str(o.calls), "--seconds", str(o.seconds)
        command = [sys.executable, __file__, *arguments]
        others = [subprocess.Popen(command) for _ in range(o.processes - 1)]
    found = []
    for case in ON_GPU:
        if case.n < LONG or o.only not in case.name or case.dropout_p or bias(case, "cuda", torch.float32):
            continue
        found.append(differences(case, o.calls, o.seconds))
        print(json.dumps(found[-1]), flush=True)
        if o.out:
            with open(o.out, "w", encoding="utf-8") as file:
                json.dump(found, file, indent=1)
    wrong = any(any(x["different"].values()) for x in found) + sum(x.wait() for x in others)
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
