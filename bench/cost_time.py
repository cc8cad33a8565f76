"""Is the estimated time the time taken? Attention and feed-forward layers, n from 1024 up, on a GPU.

`PYTHONPATH=src python3 bench/cost_time.py --measure times.json` measures the roofline and every layer (kernels
replayed from a CUDA graph); `--report times.json` estimates the same layers from the roofline and prints both.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch

import regard as rg
from regard.costs.entry import cost
from regard.costs.time import Estimate, Roofline, estimate, measure, time_call
from regard.nn.feed_forward import FeedForward

LENGTHS = (1024, 2048, 4096, 8192, 16384)
WIDTHS = ((512, 8), (1024, 8), (2048, 16))  # d_model, heads
MAX_FLOPS = {"bfloat16": 3e13, "float32": 3e12}  # larger layers are not timed


def cases() -> list[dict]:
    rows = []
    for dtype in ("bfloat16", "float32"):
        for n in LENGTHS:
            for b in (1, 8):
                for d, heads in WIDTHS:
                    for kind in ("attention full", "attention causal", "feed-forward"):
                        core = 0 if kind == "feed-forward" else 4 * n * n * d
                        if b * (16 * n * d * d + core) < MAX_FLOPS[dtype]:
                            rows.append(
                                {"kind": kind, "dtype": dtype, "n": n, "b": b, "d": d, "heads": heads}
                            )
    return rows


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
        return time_call(lambda: layer(x), "cuda")


def estimated(case: dict, roofline: Roofline) -> Estimate:
    declared = block(case)
    priced = cost(declared, n=case["n"], batch=case["b"], dtype=case["dtype"], device="cuda")
    start = "feed_forward/" if case["kind"] == "feed-forward" else "attention/"
    whole = estimate(priced, roofline)
    return Estimate(whole.machine, tuple(p for p in whole.parts if p.path.startswith(start)))


def report(data: dict) -> None:
    roofline = Roofline(**data["roofline"])
    print(f"```\n{roofline}\n```\n")
    print("| layer | dtype | b | n | d | estimated, ms | measured, ms | error | limit |")
    print("|---|---|--:|--:|--:|--:|--:|--:|---|")
    errors: dict[str, list[float]] = {}
    for row in data["rows"]:
        guess = estimated(row, roofline)
        error = guess.seconds / row["seconds"] - 1
        for group in ("all", row["kind"], row["dtype"]):
            errors.setdefault(group, []).append(abs(error))
        longest = guess.longest
        print(
            f"| {row['kind']} | {row['dtype']} | {row['b']} | {row['n']} | {row['d']} | {guess.seconds * 1e3:.4f} "
            f"| {row['seconds'] * 1e3:.4f} | {error:+.0%} | {longest.path.split('/')[-1]}: {longest.limit} |"
        )
    print("\n| group | rows | median error | worst |\n|---|--:|--:|--:|")
    for group, of_group in errors.items():
        print(f"| {group} | {len(of_group)} | {statistics.median(of_group):.1%} | {max(of_group):.1%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", type=Path)
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    if options.measure:
        data = {"roofline": json.loads(measure("cuda").json()), "rows": []}
        for case in cases():
            data["rows"].append(case | {"seconds": measured(case)})
            options.measure.write_text(
                json.dumps(data)
            )  # after each row, so that a run cut short is not lost
        print(len(data["rows"]), "layers measured")
    if options.report:
        report(json.loads(options.report.read_text()))


if __name__ == "__main__":
    main()
