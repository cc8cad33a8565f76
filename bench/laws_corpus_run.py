"""How many faulty attentions of laws_corpus `check` catches, with which cause, and how often it is wrong.

python bench/laws_corpus_run.py --out bench/results/laws_corpus.json      # everything, two processes
python bench/laws_corpus_run.py --only varlen --cases 8                   # of these names, or of this file of fresh/
python bench/laws_corpus_run.py --rows rows.jsonl --minutes 5             # in pieces: finished rows are not run again
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
sys.path.insert(0, str(Path(__file__).parent))
from origin import origin


def run(task):
    """One entry: whether something was reported, the cause, and the time."""
    import torch

    torch.set_num_threads(1)
    from laws_corpus import load

    from regard.errors import SpecError
    from regard.laws import Budget, check

    entry, cases, laws = task
    began, used = time.perf_counter(), time.process_time()
    row = {"name": entry.name, "family": entry.family, "set": entry.set}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            verdict = check(load(entry), laws, Budget(cases=cases))
        except SpecError as e:
            return row | {"exit": 2, "error": str(e), "seconds": time.perf_counter() - began}
    cause = verdict.cause
    return row | {
        "exit": verdict.exit_code,
        "cause": None if cause is None else cause.family,
        "words": None if cause is None else cause.headline,
        "broken": [o.law.number for o in verdict.broken],
        "first": verdict.broken[0].message if verdict.broken else "",
        "failure": verdict.failure,
        "notes": list(verdict.target.notes),
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - used,
    }


def same_cause(row) -> bool:
    """Whether the named cause is one of those that the author of the fault accepts."""
    named = row.get("cause") or ""
    return any(named == each or (each and named.startswith(each)) for each in row["family"].split("|"))


def summary(rows) -> dict:
    faulty, right = [r for r in rows if r["family"]], [r for r in rows if not r["family"]]
    caught = [r for r in faulty if r["exit"] == 1]
    named = [r for r in caught if same_cause(r)]
    times = sorted(r["seconds"] for r in rows)
    used = sorted(r["cpu_seconds"] for r in rows if "cpu_seconds" in r) or [0.0]
    return {
        "faulty": len(faulty),
        "caught": len(caught),
        "right cause": len(named),
        "right ones": len(right),
        "false alarms": len([r for r in right if r["exit"] != 0]),
        "seconds, median": round(times[len(times) // 2], 2),
        "seconds, longest": round(times[-1], 2),
        "processor seconds, median": round(used[len(used) // 2], 2),
        "processor seconds, longest": round(used[-1], 2),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--laws", default="", help="only these laws, for a quick look")
    parser.add_argument(
        "--set", default="", help="tuned, issues, reports, buffers or fresh; all unless given"
    )
    parser.add_argument("--right", action="store_true")
    parser.add_argument("--generated", type=int, metavar="SEED", help="those of generated.py instead")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument(
        "--rows", type=Path, help="one JSON object per line, appended; what is there is not run again"
    )
    parser.add_argument("--minutes", type=float, help="stop after this many minutes; needs --rows")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from laws_corpus import entries, generated

    chosen = entries() if options.generated is None else generated.entries(options.generated)
    chosen = [
        e
        for e in chosen
        if (options.only in e.name or e.source.startswith(options.only + ":"))
        and options.set in ("", e.set)
        and (not options.right or not e.family)
    ][:: options.every]
    rows = []
    if options.rows and options.rows.exists():
        names = {e.name for e in chosen}
        rows = [json.loads(line) for line in options.rows.read_text("utf-8").splitlines()]
        rows = [row for row in rows if row["name"] in names]
        chosen = [e for e in chosen if e.name not in {row["name"] for row in rows}]
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=40) as pool:
        for row in pool.imap(run, [(e, options.cases, options.laws.split() or None) for e in chosen]):
            if options.minutes and time.monotonic() - began > 60 * options.minutes:
                break  # the pool ends with this block; its last rows are run again next time
            rows.append(row)
            if options.rows:
                with options.rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
            bad = row["exit"] != 0 if not row["family"] else row["exit"] != 1
            off = row["family"] and not bad and not same_cause(row)
            if bad or off:
                mark = "FALSE ALARM" if not row["family"] else "MISSED" if bad else "OTHER CAUSE"
                detail = row.get("words") or row.get("error") or row.get("first") or row.get("failure")
                print(
                    f"{mark}: {row['name']} [{row['family']}] → {row.get('cause')}: {detail} {row.get('broken', '')}",
                    flush=True,
                )
    figures = {
        name: summary([r for r in rows if r["set"] == name]) for name in dict.fromkeys(r["set"] for r in rows)
    }
    print(json.dumps(figures, indent=1))
    if options.out:
        machine = {**origin(), "processes": options.processes, "cases": options.cases}
        machine |= {} if options.generated is None else {"seed": options.generated}
        missed = [r["name"] for r in rows if r["family"] and r["exit"] != 1]
        text = json.dumps(
            {"summary": figures, **machine, "missed": missed, "rows": rows}, indent=1, ensure_ascii=False
        )
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
