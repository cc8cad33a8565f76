"""No false alarms: every law on the reference, on rg.attention and on the parts of regard, over many cases.

    python bench/laws_long.py                 # 10,000 cases per law, about 40 minutes on two idle cores
    python bench/laws_long.py --cases 200     # a minute

Sampled laws take 20 fixed seeds. Prints one line per law and target and stores it at once in bench/results/. Started
again on the same day with the same number of cases, it continues after the last line.
"""

import argparse
import datetime
import multiprocessing
import platform
import sys
from pathlib import Path

import torch

from regard.laws import LAWS, Budget, adapters, law, try_law
from regard.laws.controls import reference_function
from regard.laws.parts import own_parts

RESULTS = Path(__file__).parent / "results"
SECONDS, SEEDS = 7200.0, 20  # of one law


def targets():
    return {
        "reference": reference_function(),
        "rg.attention": adapters.regard_function(),
        **{p.name: p for p in own_parts()},
    }


def one_law(job: tuple[str, str, int]) -> str:
    name, number, cases = job
    torch.set_num_threads(1)
    target = targets()[name]
    # One law takes at most a quarter of the total.
    o = try_law(law(number), target, Budget(cases=cases, seconds=SECONDS, seeds=SEEDS, total=4 * SECONDS))
    result = f"{o.status:12} {o.cases:6} cases  worst {o.worst:.1e} of {o.tolerance:.0e}  {o.seconds:7.1f} s"
    fewer = "fewer cases than requested" if o.status == "holds" and o.cases not in (cases, SEEDS) else ""
    return f"{_prefix(job)}{result}  {o.message if o.failed else fewer}".rstrip()


def _prefix(job: tuple[str, str, int]) -> str:
    return f"{job[0][:24]:24} {job[1]} {law(job[1]).name:30} "


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    jobs = []
    for name, target in targets().items():
        numbers = [one.number for one in LAWS if target.kind in one.trials and one.number != "L55"]
        jobs += [(name, number, arguments.cases) for number in numbers]
    day = datetime.date.today()
    stored = RESULTS / f"laws_long-{day}.txt"
    head = f"# {day} {platform.machine()} torch {torch.__version__}, {arguments.cases} cases a law"
    lines = stored.read_text(encoding="utf-8").splitlines() if stored.is_file() else []
    lines = lines if lines[:1] == [head] else [head]
    jobs = [job for job in jobs if not any(line.startswith(_prefix(job)) for line in lines)]
    RESULTS.mkdir(exist_ok=True)
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        for line in pool.imap_unordered(one_law, jobs):
            print(line, flush=True)
            lines.append(line)
            stored.write_text("\n".join(lines) + "\n", encoding="utf-8")
    results = [line for line in lines if not line.startswith("#")]
    signs = " broken ", " raised ", " too slow ", " fewer cases than requested"
    bad = [line for line in results if any(sign in line for sign in signs)]
    summary = f"# {len(results)} pairs of law and target, {len(bad)} do not hold over all cases"
    lines = [head, *sorted(results), summary]
    print(summary)
    stored.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
