"""How long does an exact count take? All combinations of up to three words at n = 10⁶; the rule is 50 ms.

    python bench/count_patterns.py [n]

Parity first: each count equals the sum of its row counts.
"""

import platform
import statistics
import sys
import timeit
from itertools import combinations, product

import numpy as np

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


def main() -> None:
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 10**6
    machine = platform.processor() or platform.machine()
    print(f"{machine}, Python {platform.python_version()}, numpy {np.__version__}, n = {n}")
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
