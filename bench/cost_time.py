"""Is the estimated time the time taken? Attention and feed-forward layers, n from 1024 up, on a GPU.

`PYTHONPATH=src python3 bench/cost_time.py --measure times.json` measures the two ceilings and every layer (kernels
replayed from a graph); `--report times.json` estimates the same layers from the ceilings alone and prints both.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch

import regard as rg
from regard.costs.entry import cost
from regard.costs.time import Ceilings, Estimate, estimate, measure, seconds
from regard.nn.feed_forward import FeedForward

LENGTHS = (1024, 2048, 4096, 8192, 16384)
WIDTHS = ((512, 8), (1024, 8), (2048, 16))  # d_model, heads
MOST = {"bfloat16": 3e13, "float32": 3e12}  # operations of a layer that is still timed


def cases() -> list[dict]:
    found = []
    for dtype in ("bfloat16", "float32"):
        for n in LENGTHS:
            for b in (1, 8):
                for d, heads in WIDTHS:
                    for kind in ("attention full", "attention causal", "feed-forward"):
                        core = 0 if kind == "feed-forward" else 4 * n * n * d
                        if b * (16 * n * d * d + core) < MOST[dtype]:
                            found.append(
                                {"kind": kind, "dtype": dtype, "n": n, "b": b, "d": d, "heads": heads}
                            )
    return found


def block(case: dict) -> rg.Block:
    pattern = rg.causal() if case["kind"] == "attention causal" else rg.full()
    return rg.Block(
        rg.Attention(case["d"], heads=case["heads"], pattern=pattern),
        rg.FeedForward(4 * case["d"], activation="gelu"),
    )


def measured(case: dict) -> float:
    declared, dtype = block(case), getattr(torch, case["dtype"])
    with torch.device("cuda"):
        if case["kind"] == "feed-forward":
            layer = FeedForward(declared.feed_forward, case["d"]).to(dtype)
        else:
            layer = declared.attention.build().to(dtype)
        x = torch.randn(case["b"], case["n"], case["d"]).to(dtype)
    with torch.no_grad():
        return seconds(lambda: layer(x), "cuda")


def estimated(case: dict, ceilings: Ceilings) -> Estimate:
    declared = block(case)
    priced = cost(declared, n=case["n"], batch=case["b"], dtype=case["dtype"], device="cuda")
    start = "feed_forward/" if case["kind"] == "feed-forward" else "attention/"
    whole = estimate(priced, ceilings)
    return Estimate(whole.machine, tuple(p for p in whole.parts if p.path.startswith(start)))


def report(data: dict) -> None:
    ceilings = Ceilings(**data["ceilings"])
    print(f"```\n{ceilings}\n```\n")
    print("| layer | dtype | b | n | d | estimated, ms | measured, ms | error | waits for |")
    print("|---|---|--:|--:|--:|--:|--:|--:|---|")
    errors: dict[str, list[float]] = {}
    for row in data["rows"]:
        guess = estimated(row, ceilings)
        off = guess.seconds / row["seconds"] - 1
        for group in ("all", row["kind"], row["dtype"]):
            errors.setdefault(group, []).append(abs(off))
        longest = guess.longest
        print(
            f"| {row['kind']} | {row['dtype']} | {row['b']} | {row['n']} | {row['d']} | {guess.seconds * 1e3:.4f} "
            f"| {row['seconds'] * 1e3:.4f} | {off:+.0%} | {longest.path.split('/')[-1]}: {longest.limit} |"
        )
    print("\n| group | rows | median error | worst |\n|---|--:|--:|--:|")
    for group, off in errors.items():
        print(f"| {group} | {len(off)} | {statistics.median(off):.1%} | {max(off):.1%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", type=Path)
    parser.add_argument("--report", type=Path)
    given = parser.parse_args()
    if given.measure:
        data = {"ceilings": json.loads(measure("cuda").json()), "rows": []}
        for case in cases():
            data["rows"].append(case | {"seconds": measured(case)})
            given.measure.write_text(json.dumps(data))  # what is there, comes back
        print(len(data["rows"]), "layers measured")
    if given.report:
        report(json.loads(given.report.read_text()))


if __name__ == "__main__":
    main()
