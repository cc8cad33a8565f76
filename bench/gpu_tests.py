"""All tests that need a GPU, in several processes at the same time, and a table of their outcomes.

    python3 bench/gpu_tests.py --out gpu_tests.txt      # on a machine with a CUDA device
    python3 bench/gpu_tests.py --only terms documents   # some groups

Most of the time goes into compiling kernels. Each group of tests is divided among processes by the number of a test,
except test_gpu.py, whose cases are computed by processes of its own. As a pytest plugin (-p gpu_tests) this file
keeps the tests of one process.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).parents[1]
GROUPS = {  # its tests, and the number of processes
    "gpu": ("tests/engine/gpu/test_gpu.py", 1),
    "terms": ("tests/engine/gpu/test_gpu_terms.py", 4),
    "documents": ("tests/engine/gpu/test_gpu_documents.py", 2),
    "flex": ("tests/engine/gpu/test_gpu_flex.py", 2),
    "sdpa": ("tests/engine/gpu/test_gpu_sdpa.py", 1),
    "explain": ("tests/engine/gpu/test_gpu_explain.py", 1),
    "training": ("tests/training/gpu", 4),
    "huggingface": ("tests/interop/test_huggingface_gpu.py", 1),
}
PART = "REGARD_TEST_PART"  # "2/4": every fourth test, from the third on
COUNTED = re.compile(r"(\d+) (passed|failed|skipped|error|deselected)")


def pytest_collection_modifyitems(config, items):
    nth, of = map(int, os.environ[PART].split("/"))
    config.hook.pytest_deselected(items=[x for at, x in enumerate(items) if at % of != nth])
    items[:] = items[nth::of]


def started(tests, nth, of, logs):
    paths = ROOT / "src", ROOT / "tests/helpers", ROOT / "bench", os.environ.get("PYTHONPATH", "")
    env = {**os.environ, PART: f"{nth}/{of}", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    # A test that hangs shows where: its name is the last one of the log, and its stack follows after two minutes.
    command = [sys.executable, "-m", "pytest", "-v", "-o", "faulthandler_timeout=120", "-p", "gpu_tests"]
    command += ["-m", "not long", "--tb=short", tests]
    path = logs / f"{Path(tests).stem}-{nth}.log"
    with path.open("w", encoding="utf-8") as log:
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT), path


def progress(log):
    """How many tests of a process had passed, and which one it was in."""
    tests = [line for line in log.read_text(encoding="utf-8").splitlines() if "::" in line]
    passed = sum(" PASSED" in line for line in tests)
    return f"    {passed} passed, then stopped in {tests[-1].strip() if tests else 'the collection'}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), help="groups of tests")
    parser.add_argument("--limit", type=float, default=560, help="seconds after which tests are stopped")
    parser.add_argument("--logs", default="/tmp", help="a folder for the output of pytest")
    parser.add_argument("--out", help="a file for the table")
    options = parser.parse_args()
    begun, running = perf_counter(), {}
    for name in options.only:
        tests, of = GROUPS[name]
        running[name] = [started(tests, nth, of, Path(options.logs)) for nth in range(of)]
    lines, failures = [], []
    for name, processes in running.items():
        counts, stopped = {}, []
        for process, log in processes:
            try:
                process.wait(max(1, options.limit - (perf_counter() - begun)))
            except subprocess.TimeoutExpired:
                process.kill()
                stopped.append(progress(log))
            text = log.read_text(encoding="utf-8")
            for count, what in COUNTED.findall(text.strip().rsplit("\n", 1)[-1]):
                counts[what] = counts.get(what, 0) + int(count)
            named = [x for x in text.splitlines() if x.startswith(("FAILED", "ERROR"))]
            # A process that was stopped or crashed names no test; 5: it has none to run.
            crashed = process.wait() not in (0, 5) and not named
            failures += [f"FAILED {name}: exit status {process.returncode}, see {log}"] if crashed else named
        counts.pop("deselected", None)
        summary = ", ".join(f"{count} {what}" for what, count in counts.items())
        stop = f"; {len(stopped)} of {len(processes)} processes were stopped" if stopped else ""
        lines += [f"{name:12} {summary}{stop}; after {perf_counter() - begun:.0f} s", *stopped]
        print("\n".join(lines[-1 - len(stopped) :]), flush=True)
    print("\n".join(failures), flush=True)
    if options.out:
        Path(options.out).write_text("\n".join([*lines, *failures, ""]), encoding="utf-8")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
