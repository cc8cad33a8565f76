"""A bias by distance on a CPU: tiles with gradients by diagonals, against SDPA with a gathered bias.

ratio = time of SDPA (its math path, if the bias is trained) / our time; medians of interleaved rounds, after a check
that the results are equal.

PYTHONPATH=src python bench/cpu_bias.py --write
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import cpu_patterns
import torch
import torch.nn.functional as F
from cpu_patterns import HEADS, WIDTH, interleaved, resident, say
from torch import Tensor

from regard.engine.attention import attention
from regard.pattern import causal, full, window
from regard.position import ByDistance


class Case:
    """A table of 2n − 1 distances per head, and q, k, v; all of them require gradients."""

    def __init__(self, n: int, pattern=None):
        torch.manual_seed(0)
        self.n, self.pattern = n, full() if pattern is None else pattern
        self.table = torch.randn(HEADS, 2 * n - 1, requires_grad=True)
        self.inputs = [torch.randn(1, HEADS, n, WIDTH, requires_grad=True) for _ in range(3)]
        self.out = torch.randn(1, HEADS, n, WIDTH)
        self.at = torch.arange(n) - torch.arange(n)[:, None] + n - 1

    def ours(self) -> Tensor:
        return attention(*self.inputs, self.pattern, bias=ByDistance(self.table), backend="tiles")

    def theirs(self) -> Tensor:
        """As a user would: gather the bias and pass it to SDPA, whose math path runs if it needs a gradient."""
        bias = self.table[:, self.at]
        if not isinstance(self.pattern, full):
            bias = bias.masked_fill(~self.pattern.allowed(self.n), -torch.inf)
        return F.scaled_dot_product_attention(*self.inputs, attn_mask=bias[None])

    def grads(self, method) -> tuple[Tensor, ...]:
        return torch.autograd.grad(method(), (*self.inputs, self.table), self.out)

    def check(self) -> float:
        pairs = zip((self.ours(), *self.grads(self.ours)), (self.theirs(), *self.grads(self.theirs)))
        worst = max(float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in pairs)
        assert worst < 1e-4, f"off by {worst}"
        return worst


def time_group(rounds: int) -> list[dict]:
    found = []
    for n, pattern in ((1024, full()), (2048, full()), (2048, causal()), (2048, window(128))):
        case = Case(n, pattern)
        worst = case.check()
        times = interleaved(
            {"ours": lambda c=case: c.grads(c.ours), "math": lambda c=case: c.grads(c.theirs)}, rounds
        )
        ratio = times["math"]["median"] / times["ours"]["median"]
        found.append({"pattern": repr(pattern), "n": n, "difference": worst, "ms": times, "ratio": ratio})
        say(
            f"{pattern!r:12} n={n:5}  ours {times['ours']['median']:8.1f} ms  math {times['math']['median']:8.1f} ms"
            f" = {ratio:.2f} ×"
        )
    return found


def fixed_group(rounds: int) -> list[dict]:
    """A fixed bias by distance (ALiBi slopes): `attention` against SDPA with the bias gathered in each call, as its
    distances change with the length, and against SDPA with a precomputed bias."""
    found = []
    slopes = ByDistance(slopes=2.0 ** -torch.arange(1, HEADS + 1))
    for n in (128, 256, 512, 1024, 2048):
        for pattern in (causal(), causal() & window(64)):
            for learns in (False, True):
                found.append(_fixed(n, pattern, slopes, learns, rounds))
    return found


def _fixed(n: int, pattern, slopes: ByDistance, learns: bool, rounds: int) -> dict:
    torch.manual_seed(0)
    inputs = [torch.randn(1, HEADS, n, WIDTH, requires_grad=learns) for _ in range(3)]
    at, out = torch.arange(n), torch.randn(1, HEADS, n, WIDTH)

    def made() -> Tensor:
        return slopes.dense(at, at).masked_fill(~pattern.allowed(n), -torch.inf)[None]

    ready = made()
    methods = {
        "ours": lambda: attention(*inputs, pattern, bias=slopes),
        "gathered": lambda: F.scaled_dot_product_attention(*inputs, attn_mask=made()),
        "ready": lambda: F.scaled_dot_product_attention(*inputs, attn_mask=ready),
    }
    assert float((methods["ours"]() - methods["ready"]()).detach().abs().max()) < 1e-4
    calls = {
        k: lambda f=f: torch.autograd.grad(f(), inputs, out) if learns else f() for k, f in methods.items()
    }
    times = interleaved(calls, rounds)
    ms = {k: times[k]["median"] for k in methods}
    passes = "forward+backward" if learns else "forward"
    say(
        f"{pattern!r:22} n={n:5} {passes:16}  ours {ms['ours']:7.2f} ms  gathered {ms['gathered']:7.2f} ms"
        f" = {ms['gathered'] / ms['ours']:5.2f} ×  ready {ms['ready']:7.2f} ms = {ms['ready'] / ms['ours']:5.2f} ×"
    )
    return {"pattern": repr(pattern), "n": n, "passes": passes, "ms": times}


def memory_group(rounds: int) -> list[dict]:
    """Extra memory of one forward + backward, each method in a process of its own."""
    found = []
    for method, n in (("ours", 2048), ("theirs", 2048), ("ours", 4096), ("ours", 8192)):
        call = [sys.executable, __file__, "--memory", method, str(n)]
        out = subprocess.run(call, capture_output=True, text=True, check=True)
        found.append(json.loads(out.stdout.splitlines()[-1]))
        say(f"{method:7} n={n:5}: {found[-1]['extra MiB']:7.0f} MiB over the tensors and their gradients")
    return found


def memory(method: str, n: int) -> None:
    small = Case(128)  # what PyTorch allocates once and for all
    small.grads(getattr(small, method))
    case = Case(n)
    spare = [torch.zeros_like(x).fill_(1.0) for x in (*case.inputs, case.table, case.out)]
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = resident()
    del spare
    case.grads(getattr(case, method))
    print(json.dumps({"method": method, "n": n, "extra MiB": resident() - before}))


if __name__ == "__main__":
    if "--memory" in sys.argv:
        torch.set_num_threads(cpu_patterns.THREADS)
        memory(sys.argv[2], int(sys.argv[3]))
    else:
        begun = time.perf_counter()
        cpu_patterns.run({"time": time_group, "fixed": fixed_group, "memory": memory_group}, "cpu_bias")
        say(f"{time.perf_counter() - begun:.0f} s in all")
