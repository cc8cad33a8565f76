"""What nn/cached_rotation.py gains in training on a CPU: forward and backward of layers with rotary positions.

    PYTHONPATH=src python bench/train_layers.py [--rounds 40] [--write]

Each layer runs with its cached angles and with angles computed at each call, in turn, in float32; the figures are
medians, and the ratio is that of the second time to the first. Half a minute on two cores.
"""

import argparse
import json
import platform
import statistics
import time
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from unittest.mock import patch

import torch

import regard as rg
from regard.nn.position import Rotary

LAYERS = {
    "rotations, halves": (rg.Attention(128, heads=4, pattern=rg.causal(), position=rg.rope()), (12, 64, 128)),
    "rotations, interleaved": (
        rg.Attention(128, heads=4, pattern=rg.causal(), position=rg.rope(pairing="interleaved")),
        (12, 64, 128),
    ),
}


@contextmanager
def by_modules():
    turned = lambda self, x, start, step: self(x, start + step * torch.arange(x.shape[-2]))  # noqa: E731
    with patch.object(Rotary, "along", turned):
        yield


def once(module: torch.nn.Module, x: torch.Tensor) -> float:
    module.zero_grad(set_to_none=True)
    x.grad = None
    begun = time.perf_counter()
    module(x).sum().backward()
    return time.perf_counter() - begun


def measured(declared, shape: tuple[int, ...], rounds: int) -> dict[str, float]:
    module = declared.build()
    x = torch.randn(shape, requires_grad=True)
    ours, modules = [], []
    for _ in range(rounds):
        ours.append(once(module, x))
        with by_modules():
            modules.append(once(module, x))
    a, b = (1e3 * statistics.median(times[3:]) for times in (ours, modules))
    return {"ours_ms": a, "modules_ms": b, "ratio": b / a}


def main() -> None:
    ask = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ask.add_argument("--rounds", type=int, default=40)
    ask.add_argument("--threads", type=int, default=2)
    ask.add_argument("--write", action="store_true")
    given = ask.parse_args()
    torch.set_num_threads(given.threads)
    found = {}
    for name, (declared, shape) in LAYERS.items():
        found[name] = one = measured(declared, shape, given.rounds)
        print(
            f"{name:24} ours {one['ours_ms']:7.2f} ms   modules {one['modules_ms']:7.2f} ms   {one['ratio']:.2f} ×"
        )
    if given.write:
        about = {"date": str(date.today()), "torch": torch.__version__, "machine": platform.processor()}
        path = Path(__file__).parent / "results" / f"train_layers-{date.today()}.json"
        path.write_text(json.dumps({**about, "threads": given.threads, "layers": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
