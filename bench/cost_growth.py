"""How the time of each layer type grows with length on this machine, beside the exponent of its FLOPs.

    python bench/cost_growth.py [--json FILE]        about two minutes on two idle cores

Each layer is run as it is declared, forward, batch 1, float32; the best of several runs.
"""

import argparse
import json
import platform
from pathlib import Path

import torch

from regard.costs import compare

LENGTHS = (512, 1024, 2048, 4096)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    processor = platform.processor() or platform.machine()
    machine = f"{processor}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    print(machine)
    comparisons = {d: compare(1000, d, measure=LENGTHS) for d in (64, 512)}
    for comparison in comparisons.values():
        print(f"\n{comparison}")
    if options.json:
        data = {"machine": machine, "widths": {d: json.loads(c.json()) for d, c in comparisons.items()}}
        options.json.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
