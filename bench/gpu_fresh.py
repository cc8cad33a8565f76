"""Patterns, lengths, widths and heads drawn by a seed: how much of the GPU's rate forward and backward reach.

    PYTHONPATH=src python3 bench/gpu_fresh.py --seed 90210 --cases 40 > now.txt
    python3 bench/gpu_fresh.py --compare before.txt now.txt
    PYTHONPATH=src:tests/helpers python3 bench/gpu_fresh.py --kernels     how many kernels; needs no GPU

Per case, one line: the share of the limit, forward and forward + backward; milliseconds (a CUDA graph of the calls of
`host`, medians, cache cleared); the case. The limit is 620 TFLOP/s forward (560 with the backward pass) over the
pairs needed, or 4.25 TB/s over q, k, v, o (3.5 times that with the backward pass), if it is longer: the same formula
for every tree, so that two trees can be compared on cases that neither was tuned on. For another tree, set PYTHONPATH
to its `src`. Kernels are compiled by twelve processes first.
"""

import argparse
import math
import random
import re
import subprocess
import sys

WORDS = {  # and how they are drawn
    "window": ([16, 31, 64, 100, 128, 256, 512, 1024],),
    "every": ([16, 32, 50, 64, 128],),
    "strided": ([16, 32, 64, 100, 128],),
    "dilated": ([16, 32, 64], [2, 4, 8, 16]),
    "sinks": ([4, 16, 64, 100],),
    "rows": ([32, 64, 100],),
    "blocks": ([64, 100, 128, 256, 512],),
    "prefix": ([64, 100, 256],),
}
LENGTHS = [2048, 3000, 4096, 4096, 6000, 8192, 8192, 12288]
WIDTHS = [64, 64, 80, 96, 128, 128, 192, 256]
FORWARD, BOTH, COPY = 620e12, 560e12, 4.25e12
PROCESSES = 12


def drawn(seed: int, count: int) -> list[tuple]:
    """(pattern, n, width, heads, key heads, batch), of patterns that need less than half of all pairs."""
    import regard as rg

    choose = random.Random(seed)

    def word():
        name = choose.choice(["window", *WORDS])
        return getattr(rg, name)(*map(choose.choice, WORDS[name]))

    cases: list[tuple] = []
    while len(cases) < count:
        pattern = word()
        for _ in range(choose.choice([0, 1, 1, 2])):
            pattern = pattern | word()
        if choose.random() < 0.65:
            pattern = rg.causal() & pattern
        n, width, heads = choose.choice(LENGTHS), choose.choice(WIDTHS), choose.choice([8, 12, 16, 32])
        kv_heads, batch = choose.choice([heads, heads, heads // 4]), choose.choice([1, 1, 2])
        if 2 * pattern.count(n, n) < n * n:
            cases.append((pattern, n, width, heads, kv_heads, batch))
    return cases


def calls(case: tuple):
    """The forward and the backward call of a case, both of which have run."""
    import torch

    from regard.engine.call import Options
    from regard.engine.cuda import host
    from regard.engine.cuda.call import task

    pattern, n, width, heads, kv_heads, batch = case
    q, k, v, do = (
        torch.randn(batch, h, n, width, device="cuda", dtype=torch.bfloat16)
        for h in (heads, kv_heads, kv_heads, heads)
    )
    own = task(q, v, Options(pattern, 0, 1, width**-0.5))
    o, lse = host.forward(q, k, v, own)
    host.backward((q, k, v, o, lse), (do, None), own)
    torch.cuda.synchronize()
    return (
        lambda: host.forward(q, k, v, own),
        lambda: host.backward((q, k, v, o, lse), (do, None), own),
    )


def measured(case: tuple) -> str:
    from gpu_rows import busy

    forward, backward = map(busy, calls(case))
    assert forward and backward, "a call could not be captured"
    pattern, n, width, heads, kv_heads, batch = case
    both, pairs = forward + backward, pattern.count(n, n)
    flops, size = 4 * width * batch * heads * pairs, 4 * batch * n * width * (heads + kv_heads)
    limits = max(flops / FORWARD, size / COPY), max(3.5 * flops / BOTH, 3.5 * size / COPY)
    shares = (f"{1e3 * limit / ms:.2f}" for limit, ms in zip(limits, (forward, both)))
    what = f"n {n} d {width} h {heads}/{kv_heads} b {batch} share {pairs / n / n:.3f} {pattern}"
    return f"{' '.join(shares)} f {forward:.4f} fb {both:.4f} {what}"


def read(path: str) -> dict[str, tuple[float, ...]]:
    line = re.compile(r"([\d.]+) ([\d.]+) f ([\d.]+) fb ([\d.]+) (n .*)")
    with open(path) as lines:
        found = [line.match(x.strip()) for x in lines]
    return {x[5]: tuple(map(float, x.groups()[:4])) for x in found if x}


def compare(before: str, now: str) -> None:
    """How many times faster each case is that both files have."""
    old, new = read(before), read(now)
    ratios = {
        case: (old[case][2] / x[2], (old[case][3] - old[case][2]) / (x[3] - x[2]))
        for case, x in new.items()
        if case in old
    }
    for case, (f, b) in sorted(ratios.items(), key=lambda x: x[1][1]):
        print(f"{f:.2f} {b:.2f} now {new[case][0]:.2f} {new[case][1]:.2f} {case}")
    for name, column in zip(("forward", "backward"), zip(*ratios.values())):
        mean = math.exp(sum(map(math.log, column)) / len(column))
        print(f"{name}: {len(column)} cases, mean {mean:.3f} ×, {min(column):.2f} to {max(column):.2f}")


def count_kernels(seeds: tuple[tuple[int, int], ...] = ((90210, 40), (4117, 60))) -> None:
    """The launches of the Hopper kernels, and how many different kernels they are, as Triton compiles them."""
    from modeled_gpu import Case, modeled_gpu
    from regard.engine.cuda import launches

    def text(value) -> str:  # a function of the pattern: its code
        code = getattr(value, "__code__", None)
        return repr(value) if code is None else f"{code.co_code!r} {code.co_consts}"

    found = []
    for pattern, n, d, h, h_kv, b in [case for seed in seeds for case in drawn(*seed)]:
        call = Case(pattern, n, d=d, b=b, h=h, h_kv=h_kv).call
        with modeled_gpu(396):
            _, forward = launches.forward(call._replace(tensors=call.tensors[:3]))
            _, backward = launches.hopper_backward(call)
        for launch, _ in forward.launches + backward.launches:
            if "S" in launch.sizes:
                found.append((launch.kernel.__name__, *map(text, launch.sizes["S"])))
    print(f"{len(found)} launches, {len(set(found))} kernels")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=90210)
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--compile", type=int, help="only compile every twelfth case from this one on")
    parser.add_argument("--kernels", action="store_true", help="count kernels of two seeds, without a GPU")
    parser.add_argument("--compare", nargs=2, metavar=("BEFORE", "NOW"))
    options = parser.parse_args()
    if options.compare:
        compare(*options.compare)
        return
    if options.kernels:
        count_kernels()
        return
    cases = drawn(options.seed, options.cases)
    if options.compile is not None:
        for case in cases[options.compile :: PROCESSES]:
            calls(case)
        return
    command = [
        sys.executable,
        __file__,
        "--seed",
        str(options.seed),
        "--cases",
        str(options.cases),
        "--compile",
    ]
    jobs = [subprocess.Popen([*command, str(at)]) for at in range(PROCESSES)]
    assert not any(job.wait() for job in jobs), "a case did not run"
    for case in cases:
        print(measured(case), flush=True)


if __name__ == "__main__":
    main()
