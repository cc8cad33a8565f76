"""How long `regard --version`, `regard --help` and the help of each command take: the median of 11 processes.

python bench/cli_help.py [RESULT.json]    # the limit is 0.4 s; run it on an idle machine
"""

import json
import platform
import statistics
import subprocess
import sys
import time

COMMANDS = ("presets", "show", "explain", "cost", "plan", "check", "look", "train", "report", "translate")
COMMANDS += ("export", "bench", "serve")
REPEATS = 11
ALLOWED = 0.4


def measure(words: list[str]) -> dict[str, float]:
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "regard", *words], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - began)
    return {"median": statistics.median(times), "first": times[0], "largest": max(times)}


def main() -> None:
    lines = [["--version"], ["--help"], *([c, "--help"] for c in COMMANDS)]
    found = {" ".join(words): measure(words) for words in lines}
    for name, each in found.items():
        late = "" if each["median"] < ALLOWED else "  over"
        print(
            f"{name:<18} median {each['median']:.3f} s, first {each['first']:.3f}, most {each['largest']:.3f}{late}"
        )
    machine = {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "cpu": platform.processor(),
    }
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as file:
            json.dump(
                {"machine": machine, "repeats": REPEATS, "allowed": ALLOWED, "seconds": found}, file, indent=1
            )


if __name__ == "__main__":
    main()
