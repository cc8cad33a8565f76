"""Does an argument that changes nothing cost anything? Times of calls with it over calls without it, interleaved.

    python bench/noop_arguments.py [--rounds 30] [--positions 64 256 512]

The query offset at its default value, lengths of all keys, the default scale, pattern=full() and a bool tensor of
ones are removed before a backend is chosen. Bits are compared first; then the CPU time of this thread is measured, as
the machine may be busy. The limit is a ratio of 1.10 in every row.
"""

import argparse
import statistics
import time

import torch

import regard as rg

SHAPES = [(1, 8, 64, 64), (1, 8, 256, 64), (4, 8, 512, 64)]  # batch, heads, positions, width


def cases(b: int, n: int, d: int) -> dict[str, tuple[rg.Pattern | None, dict]]:
    sparse = rg.causal() & (rg.window(16) | rg.every(32))
    return {
        "at = 0": (sparse, {"at": 0}),
        "at = (0, 1)": (sparse, {"at": (0, 1)}),
        "at per row": (sparse, {"at": torch.zeros(b, dtype=torch.int64)}),
        "lengths = m": (sparse, {"lengths": torch.full((b,), n)}),
        "scale = 1/√d_k": (sparse, {"scale": d**-0.5}),
        "dropout_p = 0": (sparse, {"dropout_p": 0}),
        "pattern = full()": (None, {"pattern": rg.full()}),
        "ones (n, m)": (None, {"pattern": torch.ones(n, n, dtype=torch.bool)}),
        "ones (b, 1, 1, m)": (None, {"pattern": torch.ones(b, 1, 1, n, dtype=torch.bool)}),
    }


def run(inputs: list[torch.Tensor], options: dict) -> torch.Tensor:
    o = rg.attention(*inputs, **options)
    if inputs[0].requires_grad:
        torch.autograd.grad(o, inputs, torch.ones_like(o))
    return o


def compare(inputs: list[torch.Tensor], plain: dict, said: dict, rounds: int) -> float:
    assert torch.equal(run(inputs, plain), run(inputs, said))
    repeats = max(1, int(3e6 / inputs[0].numel()))
    taken: dict[str, list[float]] = {"plain": [], "said": []}
    for turn in range(rounds):
        order = [("plain", plain), ("said", said)]
        for name, options in order if turn % 2 else reversed(order):
            begun = time.thread_time()
            for _ in range(repeats):
                run(inputs, options)
            taken[name].append(time.thread_time() - begun)
    return statistics.median(a / b for a, b in zip(taken["said"], taken["plain"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--positions", type=int, nargs="+", default=[n for _, _, n, _ in SHAPES])
    options = parser.parse_args()
    rounds = options.rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(
        f"torch {torch.__version__}, one thread, {rounds} rounds; time with the argument over time without it"
    )
    worst = 0.0
    for b, h, n, d in (shape for shape in SHAPES if shape[2] in options.positions):
        for grad in (False, True):
            inputs = [torch.randn(b, h, n, d, requires_grad=grad) for _ in range(3)]
            for name, (pattern, said) in cases(b, n, d).items():
                plain = {} if pattern is None else {"pattern": pattern}
                ratio = compare(inputs, plain, {**plain, **said}, rounds)
                worst = max(worst, ratio)
                passes = "forward+backward" if grad else "forward"
                print(f"b={b} h={h} n={n:4} {passes:16} {name:20} {ratio:5.2f} ×", flush=True)
    print(f"worst: {worst:.2f} ×")


if __name__ == "__main__":
    main()
