"""No false alarm: every law on the formula, on rg.attention and on our parts, over many cases a law.

    python bench/laws_long.py                 # 10,000 cases a law, about 40 minutes on two idle cores
    python bench/laws_long.py --cases 200     # a minute

Sampled laws take 20 fixed seeds. Prints one line a law and target, and stores each in bench/results/ as it comes:
started again on the same day with as many cases, it goes on after the last line.
"""

import argparse
import datetime
import multiprocessing
import platform
import sys
from pathlib import Path

import torch

from regard.laws import LAWS, Budget, adapters, law, try_law
from regard.laws.checker import probe_target
from regard.laws.controls.functions import formula
from regard.laws.parts import ours

RESULTS = Path(__file__).parent / "results"


def targets():
    return {"formula": formula(), "rg.attention": adapters.regard_function(), **{p.name: p for p in ours()}}


def one_law(job: tuple[str, str, int]) -> str:
    name, number, cases = job
    torch.set_num_threads(1)
    target = targets()[name]
    found, why = probe_target(target)
    o = try_law(law(number), target, Budget(cases=cases, seconds=7200.0, seeds=20), found=found, why=why)
    told = f"{o.status:12} {o.cases:6} cases  worst {o.worst:.1e} of {o.tolerance:.0e}  {o.seconds:7.1f} s"
    return f"{_named(job)}{told}  {o.said if o.failed else ''}".rstrip()


def _named(job: tuple[str, str, int]) -> str:
    return f"{job[0][:24]:24} {job[1]} {law(job[1]).name:30} "


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--cases", type=int, default=10_000)
    asked.add_argument("--processes", type=int, default=2)
    given = asked.parse_args()
    jobs = []
    for name, target in targets().items():
        about = [one.number for one in LAWS if target.kind in one.on and one.number != "L55"]
        jobs += [(name, number, given.cases) for number in about]
    day = datetime.date.today()
    stored = RESULTS / f"laws_long-{day}.txt"
    head = f"# {day} {platform.machine()} torch {torch.__version__}, {given.cases} cases a law"
    lines = stored.read_text(encoding="utf-8").splitlines() if stored.is_file() else []
    lines = lines if lines[:1] == [head] else [head]
    jobs = [job for job in jobs if not any(line.startswith(_named(job)) for line in lines)]
    RESULTS.mkdir(exist_ok=True)
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        for line in pool.imap_unordered(one_law, jobs):
            print(line, flush=True)
            lines.append(line)
            stored.write_text("\n".join(lines) + "\n", encoding="utf-8")
    told = [line for line in lines if not line.startswith("#")]
    bad = [line for line in told if " broken " in line or " raised " in line or " too slow " in line]
    lines = [head, *sorted(told), f"# {len(told)} laws and targets, {len(bad)} not as they should be"]
    print(lines[-1])
    stored.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
