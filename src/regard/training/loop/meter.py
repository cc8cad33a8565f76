"""Measurements of a run: model FLOP utilization, memory, and a description of the machine."""

import os
import platform
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ...machine import product_rate


@dataclass(frozen=True)
class Meter:
    """FLOP utilization and memory of training. flops: matrix products of both passes per prediction."""

    flops: int | float
    peak: int | float  # FLOP/s
    device: torch.device

    def read(self, predicted: int, seconds: float) -> dict[str, Any]:
        """Model FLOP utilization, without padding and recomputation, and the peak memory so far."""
        return {
            "mfu": round(self.flops * predicted / seconds / self.peak, 4),
            "memory": memory_used(self.device),
        }


@cache
def peak(device: str, dtype: str = "float32", threads: int = 0) -> float:
    """FLOP/s of a large matrix product, measured; `threads` is only part of the cache key."""
    return product_rate(8192 if device == "cuda" else 1024, getattr(torch, dtype), device)


def memory_used(device: torch.device) -> int | None:
    """Peak bytes so far: of the process on a CPU, of tensors on a GPU; None where the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def memory_free(device: torch.device) -> int | None:
    """Bytes that are free for this process; None where the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        return 1024 * int(lines["MemAvailable"].split()[0])
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def machine(device: torch.device) -> dict[str, Any]:
    """The device, the system, and the versions of the software."""
    import regard  # for its version, also where the package is on the path but not installed

    described: dict[str, Any] = {"device": _name(device)}
    if device.type == "cpu":
        described["threads"] = torch.get_num_threads()
    described |= {
        "memory": memory_free(device),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "regard": regard.__version__,
    }
    return described


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
