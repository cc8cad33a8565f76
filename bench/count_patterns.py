"""How long does an exact count take? All combinations of up to three words at n = 10⁶; the limit is 50 ms.

    python bench/count_patterns.py [n]
    python bench/count_patterns.py --random 200 --seed 27 --out bench/results/count_random.json

First, each count is compared with the sum of its row counts. `--random`: compositions of up to 15 words with random
numbers and periods, once at n = 10⁶; each is counted exactly, or an error names the limit, and at n = 97 its count
equals the sum of its mask.
"""

import argparse
import json
import platform
import random
import statistics
import time
import timeit
from itertools import combinations, product
from pathlib import Path

import numpy as np

from regard.errors import RegardError
from regard.pattern import (
    Pattern,
    blocks,
    causal,
    dilated,
    every,
    full,
    prefix,
    rows,
    sinks,
    strided,
    window,
)

USUAL = [
    full(),
    causal(),
    window(128),
    dilated(64, 16),
    every(64),
    strided(128),
    rows(48),
    sinks(4),
    prefix(1000),
    blocks(256),
]
# Steps without a common factor: no period comes round before the rows end.
AWKWARD = [
    full(),
    causal(),
    window(1000, 77),
    dilated(64, 1013),
    every(997, 5),
    strided(1009),
    rows(991, 8),
    sinks(101),
    prefix(500_000),
    blocks(1021),
]
JOINS = {
    "x & y & z": lambda x, y, z: x & y & z,
    "x & (y | z)": lambda x, y, z: x & (y | z),
    "x | y | z": lambda x, y, z: x | y | z,
    "x - (y & z)": lambda x, y, z: x - (y & z),
}


def time_all(words: list[Pattern], n: int) -> dict[Pattern, float]:
    """Milliseconds of one count, the least of three, for every join of up to three of the words."""
    taken = {}
    triples = [(*c, *c[-1:] * (3 - size)) for size in (1, 2, 3) for c in combinations(words, size)]
    for (name, join), triple in product(JOINS.items(), triples):
        p = join(*triple)
        pairs, taken[p] = p.count(n), min(timeit.repeat(lambda p=p: p.count(n), number=1, repeat=3)) * 1e3
        if name == "x & (y | z)" and pairs != (by_rows := int(p.row_counts(n).sum())):
            raise SystemExit(f"{p!r}: {pairs} pairs counted, {by_rows} by rows")
    return taken


def composed(rng: random.Random, words: int) -> Pattern:
    """Words with random numbers, joined two at a time in random order."""

    def number() -> int:
        return rng.choice((rng.randrange(1, 20), rng.randrange(1, 2000), rng.randrange(1, 10**6)))

    def word() -> Pattern:
        a, b = number(), number()
        made = (
            causal(),
            window(a),
            window(a, b),
            dilated(a, b),
            every(a),
            every(a, b % a),
            strided(a),
            rows(a),
        )
        return rng.choice((*made, sinks(a), prefix(a), blocks(a)))

    parts = [word() for _ in range(words)]
    while len(parts) > 1:
        x, y = parts.pop(rng.randrange(len(parts))), parts.pop(rng.randrange(len(parts)))
        parts.append(rng.choice((x & y, x | y, x - y, ~x & y)))
    return parts[0]


def time_random(count: int, seed: int, n: int) -> list[dict]:
    """Processor seconds of the first count of each pattern."""
    rng, results = random.Random(seed), []
    for _ in range(count):
        words = rng.randrange(1, 16)
        p, start = composed(rng, words), time.process_time()
        row = {"words": words, "pattern": repr(p)}
        try:
            row["pairs"] = str(p.count(n))
        except RegardError as error:
            row["refused"] = str(error)
        row["seconds"] = round(time.process_time() - start, 4)
        if "pairs" in row and p.count(97) != int(p.allowed(97).sum()):
            raise SystemExit(f"{p!r}: the count at n = 97 differs from its mask")
        results.append(row)
    return results


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("n", type=int, nargs="?", default=10**6)
    options.add_argument("--random", type=int, metavar="COUNT")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    n = given.n
    machine = platform.processor() or platform.machine()
    print(f"{machine}, Python {platform.python_version()}, numpy {np.__version__}, n = {n}")
    if given.random:
        rows_of = sorted(time_random(given.random, given.seed, n), key=lambda row: -row["seconds"])
        seconds = [row["seconds"] for row in rows_of]
        figures = {
            "patterns": len(rows_of), "n": n, "seed": given.seed, "refused": sum("refused" in row for row in rows_of),
            "median_s": statistics.median(seconds), "longest_s": seconds[0], "machine": machine,
            "python": platform.python_version(), "numpy": np.__version__,
        }  # fmt: skip
        print(json.dumps(figures))
        for row in rows_of[:5]:
            print(
                f"{row['seconds']:9.3f} s  {row['words']} words  {row.get('refused', row['pattern'])[:200]}"
            )
        if given.out:
            given.out.write_text(
                json.dumps({**figures, "slowest": rows_of[:10]}, indent=1) + "\n", encoding="utf-8"
            )
        return
    for name, words in (("usual steps", USUAL), ("steps without a common factor", AWKWARD)):
        taken = time_all(words, n)
        worst = sorted(taken, key=taken.__getitem__, reverse=True)
        rule = "under" if taken[worst[0]] < 50 else "NOT under"
        print(
            f"{name}: {len(taken)} patterns, median {statistics.median(taken.values()):.3f} ms, {rule} 50 ms"
        )
        for p in worst[:5]:
            print(f"{taken[p]:9.3f} ms  {p!r}")


if __name__ == "__main__":
    main()
