"""The constants of regard.costs.time, fitted to measured training steps; held-out rows are compared separately.

    PYTHONPATH=src:bench python3 bench/cost_fit.py --rows A.json B.json --held C.json [--cache work.json]

The files are those of bench/cost_gpu.py (kinds `time` and `fit`): seconds of a step, of the host alone, and of all
kernels where the profiler ran. Every model is generated again from its seed and traced here; held-out rows do not
enter the fit. The fit minimizes the relative error of three times of each row: step, host and kernels. Errors beyond
SCALE_OF_LOSS count linearly, for rows that were disturbed, and a weak prior (a factor of two) keeps constants that
only few rows determine near their present values. Host times are used only if the host does not wait for the kernels.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy
from cost_gpu import FIT_SEED, SCALE
from cost_models import cases, described, predicted
from scipy.optimize import least_squares

from regard.costs import time as machines
from regard.costs.trace.tracer import Work

TABLES = {"HOST": machines.HOST, "REPEATED": machines.REPEATED, "BACKWARD": machines.BACKWARD}
SCALARS = ("PRODUCT", "ATTENTION", "MOVE", "LAUNCH")
PRIOR, SCALE_OF_LOSS = 0.7, 0.15  # of log constants; relative errors beyond it count linearly


def rows_of(files: list[Path], cache: dict[str, Any]) -> list[dict[str, Any]]:
    """Measured rows with the traced work of their models."""
    rows = []
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        for kind, seed in (("time", found["seed"]), ("fit", FIT_SEED)):
            for i, case in enumerate(cases(seed, 40, SCALE)):
                row = found.get(f"{kind} {i}", {})
                if "seconds" not in row:
                    continue
                key = f"{seed} {i}"
                if key not in cache:
                    work = predicted(case, "cuda").memory.main.trace.work
                    cache[key] = [[w.phase, "", *w[2:]] for w in work]
                assert row["model"] == described(case), row["model"]
                machine = machines.Roofline(**found["roofline"])
                rows.append(row | {"work": [Work(*w) for w in cache[key]], "machine": machine})
    return rows


def constants() -> dict[tuple[str, str], float]:
    """Today's values: (table or "", name) → value."""
    values = {("", name): getattr(machines, name) for name in SCALARS}
    values |= {("OWN", dtype): machines.OWN[dtype] for dtype in ("float32", "bfloat16")}
    for name, table in TABLES.items():
        values |= {(name, kind): v for kind, v in table.items()}
    shared = [k for k in machines.REPEATED if machines.REPEATED[k] == machines.HOST.get(k)]
    return {key: v for key, v in values.items() if not (key[0] == "REPEATED" and key[1] in shared)}


def install(values: dict[tuple[str, str], float]) -> None:
    for (table, name), v in values.items():
        if not table:
            setattr(machines, name, v)
        else:
            getattr(machines, table)[name] = v
    machines.OWN["float16"] = machines.OWN["bfloat16"]
    for kind, v in machines.HOST.items():
        if ("REPEATED", kind) not in values:
            machines.REPEATED[kind] = v


def errors(row: dict[str, Any]) -> dict[str, float]:
    """Relative errors of the step, of the host, of the kernels, where they were measured."""
    guess = machines.time_of(row["work"], row["machine"])
    found = {"step": guess.seconds / row["seconds"] - 1}
    device, host = sum(guess.device.values()), sum(guess.host.values())
    if row.get("busy", device) < 0.7 * row["host"]:
        found["host"] = host / row["host"] - 1
    if "busy" in row:
        found["kernels"] = device / row["busy"] - 1
    return found


def fit(rows: list[dict[str, Any]]) -> dict[tuple[str, str], float]:
    start = constants()
    keys, center = list(start), numpy.log(list(start.values()))

    def residuals(logs: numpy.ndarray) -> numpy.ndarray:
        install(dict(zip(keys, numpy.exp(logs))))
        measured = [e for row in rows for e in errors(row).values()]
        return numpy.array([*measured, *(SCALE_OF_LOSS * (logs - center) / PRIOR)])

    found = least_squares(
        residuals, center, loss="soft_l1", f_scale=SCALE_OF_LOSS, diff_step=0.02, max_nfev=8
    )
    values = dict(zip(keys, (float(v) for v in numpy.exp(found.x))))
    install(values)
    return values


def table(title: str, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    print(f"\n## {title}\n\n| model | step | host | kernels |\n|---|--:|--:|--:|")
    collected: dict[str, list[float]] = {}
    for row in rows:
        found = errors(row)
        for kind, e in found.items():
            collected.setdefault(kind, []).append(abs(e))
        cells = " | ".join(f"{found[k]:+.0%}" if k in found else "" for k in ("step", "host", "kernels"))
        print(f"| {row['model']} | {cells} |")
    for kind, sizes in collected.items():
        print(f"\n{kind}: {len(sizes)} rows, median {statistics.median(sizes):.1%}, worst {max(sizes):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, nargs="+", required=True, help="files to whose rows is fitted")
    parser.add_argument("--held", type=Path, nargs="*", default=[], help="files that are only compared")
    parser.add_argument("--cache", type=Path, help="traced work of the models, kept from call to call")
    parser.add_argument("--as-they-are", action="store_true", help="no fit: compare today's constants")
    options = parser.parse_args()
    cache = json.loads(options.cache.read_text()) if options.cache and options.cache.exists() else {}
    rows, held = rows_of(options.rows, cache), rows_of(options.held, cache)
    if options.cache:
        options.cache.write_text(json.dumps(cache), encoding="utf-8")
    if not options.as_they_are:
        for (name, kind), value in fit(rows).items():
            print(f"{name or kind}{f'[{kind!r}]' if name else ''} = {value:.3g}")
    table("Compared" if options.as_they_are else "Rows of the fit", rows)
    table("Held out", held)


if __name__ == "__main__":
    main()
