"""What packing saves on a CPU: documents in one row, each computed separately, against masked and full SDPA.

ratio = time of SDPA / our time, forward + backward; medians of interleaved rounds, after a check that results are
equal.

PYTHONPATH=src python bench/cpu_documents.py --write          (--busy on a machine with other jobs)
"""

import torch
from cpu_patterns import HEADS, WIDTH, Case, interleaved, run, say
from torch import Tensor

from regard.engine.attention import attention
from regard.engine.cpu.documents import layouts
from regard.pattern import Pattern, causal, documents

DRAWN = torch.Generator().manual_seed(0)
SETS: dict[str, list[int]] = {  # each of 4096 positions in all
    "32 of 128": [128] * 32,
    "8 of 512": [512] * 8,
    "2 of 2048": [2048] * 2,
    "of 16 to 400": [],
    "of 1 to 40": [],
}
N = 4096


def drawn(low: int, high: int) -> list[int]:
    """Lengths drawn uniformly from low to high; the last one is cut to fill the row."""
    found: list[int] = []
    while sum(found) < N:
        found.append(int(torch.randint(low, high + 1, (), generator=DRAWN)))
    return [*found[:-1], N - sum(found[:-1])]


SETS |= {"of 16 to 400": drawn(16, 400), "of 1 to 40": drawn(1, 40)}


class Packed(Case):
    """Documents of one row with `attention`; masked SDPA gets a precomputed mask, ours plans once."""

    def __init__(self, pattern: Pattern, n: int):
        torch.manual_seed(0)
        self.pattern, self.n, self.grad = pattern, n, True
        self.inputs = [torch.randn(1, HEADS, n, WIDTH, requires_grad=True) for _ in range(3)]
        self.out = torch.randn(1, HEADS, n, WIDTH)

    def ours(self) -> Tensor:
        return attention(*self.inputs, self.pattern, backend="tiles")


def documents_group(rounds: int) -> list[dict]:
    found = []
    for name, counts in SETS.items():
        ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        for pattern, also in ((documents(ids), ""), (documents(ids) & causal(), " & causal()")):
            case = Packed(pattern, N)
            worst = case.check()
            times = interleaved(
                {method: case.run(getattr(case, method)) for method in ("ours", "masked", "full")}, rounds
            )
            t = {method: x["median"] for method, x in times.items()}
            (layout,) = layouts(pattern, N, N) or ()
            row = {"documents": name + also, "n": N, "difference": worst, "ms": times}
            row |= {"computed": layout.computed, "calls": len(layout.groups)}
            row |= {"vs masked": t["masked"] / t["ours"], "vs full": t["full"] / t["ours"]}
            found.append(row)
            say(
                f"{name + also:24}  {len(layout.groups):4} calls  ours {t['ours']:7.1f} ms  "
                f"masked {t['masked']:7.1f} ms = {row['vs masked']:5.1f} ×  "
                f"full {t['full']:7.1f} ms = {row['vs full']:5.1f} ×  "
                f"(all pairs / computed {N * N / layout.computed:5.1f})"
            )
    return found


if __name__ == "__main__":
    run({"documents": documents_group}, "cpu_documents")
