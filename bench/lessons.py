"""How long does each lesson take from the command line, and how long with a busy neighbor on one of the cores?

    python bench/lessons.py                      # all thirteen, idle and beside a busy process
    python bench/lessons.py T5 T13 --idle-only   # some of them; results are added to bench/results/lessons.json

A time is that of the whole command, `regard train T5`: imports, training, pictures and the page. The neighbor is one
process that keeps one core busy. Run it on an idle machine. It times other processes and asserts that each lesson
passed. On a machine with other jobs only the CPU seconds (with OMP_NUM_THREADS=1) are meaningful.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "lessons.json"
NUMBERS = [f"T{i}" for i in range(1, 14)]
SHORT = ("T1", "T3", "T5", "T9", "T11", "T13")  # these have to take less than 30 s each
MAX_SHORT, MAX_ALL, MAX_RATIO = 30.0, 480.0, 3.0


def timed(number: str, folder: Path) -> dict:
    """The seconds of `regard train`, of its trainings, and the threads they chose."""
    load, before = os.getloadavg()[0], resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    words = [sys.executable, "-m", "regard", "train", number, "--out", str(folder / number), "--json"]
    done = subprocess.run(words, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 1):
        sys.exit(done.stderr)
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["passed"], last["checks"]
    return {
        "seconds": round(seconds, 1),
        "cpu": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "load": round(load, 1),  # of the machine when it began: above 1, only the CPU seconds mean something
        "training": round(sum(t["seconds"] for t in last["trainings"]), 1),
        "threads": sorted({t["threads"] for t in last["trainings"]}),
        "machine": last["machine"],
    }


def busy() -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", "while True: pass"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lessons", nargs="*", default=NUMBERS)
    parser.add_argument("--idle-only", action="store_true")
    parser.add_argument("--busy-only", action="store_true")
    given = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for number in given.lessons:
        row = results.setdefault(number, {})
        with tempfile.TemporaryDirectory() as folder:
            if not given.busy_only:
                row["idle"] = timed(number, Path(folder))
            if not given.idle_only:
                neighbor = busy()
                try:
                    row["busy"] = timed(number, Path(folder))
                finally:
                    neighbor.kill()
                    neighbor.wait()
        row["date"], row["cores"] = time.strftime("%Y-%m-%d"), len(os.sched_getaffinity(0))
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(table({number: row}), flush=True)
    print("\n" + table(results))
    print(judged(results))


def table(results: dict) -> str:
    lines = []
    for number in (n for n in NUMBERS if n in results):
        idle, beside = results[number].get("idle"), results[number].get("busy")
        parts = [f"{number:>3}"]
        if idle:
            parts.append(f"idle {idle['seconds']:6.1f} s, CPU {idle.get('cpu', float('nan')):5.1f} s")
            parts.append(f"(training {idle['training']:5.1f} s, threads {idle['threads']})")
        if beside:
            parts.append(f"busy {beside['seconds']:6.1f} s")
        if idle and beside:
            parts.append(f"{beside['seconds'] / idle['seconds']:.2f} ×")
        lines.append("  ".join(parts))
    return "\n".join(lines)


def judged(results: dict) -> str:
    """Each limit, and the lessons that miss it."""
    idle = {n: r["idle"]["seconds"] for n, r in results.items() if "idle" in r}
    ratios = {n: r["busy"]["seconds"] / idle[n] for n, r in results.items() if "busy" in r and n in idle}
    slow = [n for n in SHORT if idle.get(n, 0) > MAX_SHORT]
    far = [n for n, ratio in ratios.items() if ratio > MAX_RATIO]
    total = sum(idle.values())
    return (
        f"{len(idle)} lessons: {total:.0f} s idle (at most {MAX_ALL:.0f}); over {MAX_SHORT:.0f} s: {slow or 'none'}; "
        f"over {MAX_RATIO:g} × beside a busy neighbor: {far or 'none'}"
    )


if __name__ == "__main__":
    main()
