"""Gauges of a run: how much of the machine it uses, how much memory, and what that machine is."""

import os
import platform
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ...costs.time import time_call


@dataclass(frozen=True)
class Meter:
    """What a stretch of training used. operations: products of both passes for one prediction; peak: a second."""

    operations: int | float
    peak: int | float
    device: torch.device

    def read(self, predicted: int, seconds: float) -> dict[str, Any]:
        """Model FLOP utilisation, padding and recomputation not counted, and the most memory held so far."""
        return {
            "mfu": round(self.operations * predicted / seconds / self.peak, 4),
            "memory": memory_used(self.device),
        }


@cache
def peak(device: str, dtype: str = "float32", threads: int = 0) -> float:
    """Operations a second of a large matrix product, measured here; `threads` only tells measurements apart."""
    n = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device).to(getattr(torch, dtype)) for _ in range(2))
    return 2 * n**3 / time_call(lambda: a @ b, device, reduce=min)


def memory_used(device: torch.device) -> int | None:
    """The most bytes held so far: of the process on a CPU, of tensors on a GPU; None where nobody counts."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def memory_there(device: torch.device) -> int | None:
    """Bytes that are free for this process; None where nobody says."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    about = Path("/proc/meminfo")
    if about.is_file():
        lines = dict(line.split(":", 1) for line in about.read_text().splitlines() if ":" in line)
        return 1024 * int(lines["MemAvailable"].split()[0])
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def machine(device: torch.device) -> dict[str, Any]:
    """What the machine is, and the versions of what runs on it."""
    told: dict[str, Any] = {"device": _name(device)}
    if device.type == "cpu":
        told["threads"] = torch.get_num_threads()
    told |= {
        "memory": memory_there(device),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "regard": version("regard"),
    }
    return told


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    about = Path("/proc/cpuinfo")
    lines = about.read_text(errors="replace").splitlines() if about.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
