"""The rates of this machine: matrix products, memory bandwidth, launches. Measured once, stored, read again."""

import json
import math
import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

import torch

from .errors import FormatError, SpecError

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Roofline:
    """Peak FLOP/s of matrix products by dtype, memory bandwidth, and the time of the shortest product."""

    machine: str
    flops_per_s: dict[str, float]
    bytes_per_s: float
    kernel_s: float
    measured: dict[str, str] = field(default_factory=dict)  # versions, date
    host_s: float = 0.0  # time of the CPU to launch one operation; 0 where kernels run on the CPU itself

    def __post_init__(self):
        rates = {"bytes_per_s": self.bytes_per_s, **self.flops_per_s}
        for name, rate in rates.items():
            if not rate > 0:
                raise SpecError(f"{name}={rate!r} is not a positive rate")

    def rate(self, dtype: str) -> float:
        """FLOP/s of products in this dtype; what was not measured runs as float32 does, float64 at half of it."""
        return self.flops_per_s.get(dtype, self.flops_per_s["float32"] / (2 if dtype == "float64" else 1))

    @property
    def balance(self) -> dict[str, float]:
        """Machine balance in FLOP/byte, by dtype: parts with a lower arithmetic intensity are memory-bound."""
        return {dtype: rate / self.bytes_per_s for dtype, rate in self.flops_per_s.items()}

    def json(self, indent: int | None = None) -> str:
        return json.dumps(asdict(self), indent=indent)

    def __str__(self) -> str:
        lines = [self.machine]
        lines += [f"  {rate / 1e9:11,.1f} GFLOP/s  {dtype}" for dtype, rate in self.flops_per_s.items()]
        lines += [f"  {self.bytes_per_s / 1e9:11,.1f} GB/s     memory bandwidth (read + write)"]
        lines += [f"  {self.kernel_s * 1e6:11,.2f} µs       shortest product"]
        return "\n".join(lines)


def measure(device: str = "cpu", size: int | None = None) -> Roofline:
    """The roofline of this machine: the best of a few large products and copies, on random data.

    size: side of the square matrices; by default 1024 on a CPU, 4096 and 8192 on a GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise SpecError("device='cuda': PyTorch finds no GPU on this machine; use device='cpu'")
    if device not in ("cpu", "cuda"):
        raise SpecError(f"device={device!r} cannot be measured; use 'cpu' or 'cuda'")
    sizes = (size,) if size else (4096, 8192) if device == "cuda" else (1024,)
    flops_per_s = {
        dtype: max(product_rate(n, getattr(torch, dtype), device) for n in sizes)
        for dtype in DTYPES
        if device == "cuda" or dtype != "float16"  # CPUs have no fast float16 products
    }
    name, host_s = f"{platform.machine()} CPU, {torch.get_num_threads()} threads", 0.0
    if device == "cuda":
        name, host_s = torch.cuda.get_device_name(), _host_time()
    versions = {"torch": str(torch.__version__), "date": time.strftime("%Y-%m-%d")}
    return Roofline(name, flops_per_s, _bandwidth(device), _shortest_product(device), versions, host_s)


def _host_time() -> float:
    """Seconds that the CPU needs for one operation that saves something for the backward pass."""
    chain = _chain(torch.tanh, torch.randn(8, 8, device="cuda", requires_grad=True), 200)
    chain()
    torch.cuda.synchronize()
    return min(_timed(chain) for _ in range(5)) / 200


def _chain(step: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, count: int) -> Callable[[], None]:
    """Dependent operations, one after the other."""

    def run() -> None:
        y = x
        for _ in range(count):
            y = step(y)

    return run


def product_rate(n: int, dtype: torch.dtype, device: str) -> float:
    """FLOP/s of a product of n × n matrices."""
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / time_call(lambda: a @ b, device, reduce=min)


def _bandwidth(device: str) -> float:
    entries = 1 << (28 if device == "cuda" else 24)
    x = torch.randn(entries, device=device)
    y = torch.empty_like(x)
    # A negation, because a CUDA graph replays copies on another engine, at two thirds of the rate.
    return 2 * x.nbytes / time_call(lambda: torch.neg(x, out=y), device, reduce=min)


def _shortest_product(device: str) -> float:
    """The time of a 64 × 64 product, from a chain of dependent ones."""
    x = torch.randn(64, 64, device=device)
    return time_call(_chain(lambda y: x @ y, x, 50), device, reduce=min) / 50


def time_call(
    call: Callable[[], Any],
    device: str,
    repeats: int = 10,
    reduce: Callable[[list[float]], float] = median,
    graph: bool = True,
) -> float:
    """Seconds per call after warm-up, by default the median. On a GPU a CUDA graph is replayed, without Python."""
    for _ in range(3):
        call()
    if device != "cuda":
        return reduce([_timed(call) for _ in range(repeats)])
    torch.cuda.synchronize()
    if not graph:  # the time includes the launches
        return reduce([_timed(call, torch.cuda.synchronize) for _ in range(repeats)])
    replayed = torch.cuda.CUDAGraph()
    with torch.cuda.graph(replayed):
        call()
    times = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replayed.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return reduce(times[2:])


def _timed(call: Callable[[], Any], then: Callable[[], Any] = int) -> float:
    start = time.perf_counter()
    call()
    then()
    return time.perf_counter() - start


def roofline_path(path: str | Path | None = None) -> Path:
    """The file of the stored roofline: `path`, else $REGARD_MACHINE, else one in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(path or os.environ.get("REGARD_MACHINE") or Path(cache) / "regard" / "machine.json")


def save_roofline(roofline: Roofline, path: str | Path | None = None) -> Path:
    file = roofline_path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(roofline.json(indent=1), encoding="utf-8")
    return file


def load_roofline(path: str | Path | None = None) -> Roofline | None:
    """The roofline that `regard bench machine` stored; None if it has not run."""
    file = roofline_path(path)
    if not file.exists():
        return None
    try:
        return Roofline(**json.loads(file.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, TypeError) as e:
        raise FormatError(f"{file} is not a stored roofline; run `regard bench machine` again ({e})") from e


def slope(xs: Sequence[int | float], ys: Sequence[int | float]) -> float:
    """The exponent p of y = c · xᵖ, by least squares on the logarithms.

    >>> round(slope([1, 2, 4], [3, 12, 48]), 6)
    2.0
    """
    return linear_regression([math.log(x) for x in xs], [math.log(y) for y in ys]).slope


# Amounts, as people write them.

UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def bytes_of(text: str) -> int:
    """80GB is 80 · 10⁹ bytes, 80GiB 80 · 2³⁰.

    >>> bytes_of("1.5GiB"), bytes_of("80GB"), bytes_of("4096")
    (1610612736, 80000000000, 4096)
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?i?)b?\s*", text.lower())
    if match is None or match[2] not in UNITS:
        raise SpecError(f"{text!r} is not an amount of memory; use 80GB, 24GiB or a number of bytes")
    return int(float(match[1]) * UNITS[match[2]])


def readable(size: int | float) -> str:
    """Bytes in the largest unit of which there is at least one.

    >>> readable(3 << 29), readable(1536), readable(10)
    ('1.50 GiB', '1.50 KiB', '10 bytes')
    """
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size:,} bytes"


def short(amount: Any) -> str:
    """A number with three digits and a prefix.

    >>> short(124_439_808), short(950)
    ('124 M', '950')
    """
    for unit, name in ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if amount >= unit:
            return f"{amount / unit:.3g} {name}"
    return f"{amount}"
