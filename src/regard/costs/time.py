"""The roofline of a machine, measured once and stored, and the time that a cost would take there.

A part takes the longer of two times: its FLOPs divided by the peak rate of matrix products in its dtype, and its
bytes divided by the memory bandwidth. Inside fused attention the softmax runs at the float32 rate and does not
overlap the products. Every kernel also takes the time of the shortest product, its launch overhead.
"""

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ..errors import FormatError, SpecError
from ..spec import EncoderDecoder, Vision
from .flops.pairs import FUSED
from .sizes import Request
from .tree import Amounts, Cost, Part

DTYPES = ("float32", "bfloat16", "float16")
# Fitted to steps of 21 models on an H200 (median error 18 %, worst 60 %): kernels take longer than at the best rates,
# and the host needs more for an operation of a model, with its views and Python, than for one in a chain.
KERNEL_TIME, HOST_TIME = 1.3, 2.6
CORE = ("scores", "scale", "softmax", "mixing", "bias", "position_scores")


@dataclass(frozen=True)
class Roofline:
    """Peak FLOP/s of matrix products by dtype, memory bandwidth, and the time of the shortest product."""

    machine: str
    flops_per_s: dict[str, float]
    bytes_per_s: float
    kernel_s: float
    measured: dict[str, str] = field(default_factory=dict)  # versions, date
    host_s: float = 0.0  # of one operation on the CPU that launches it; 0 where kernels run on the CPU itself

    def __post_init__(self):
        rates = {"bytes_per_s": self.bytes_per_s, **self.flops_per_s}
        for name, rate in rates.items():
            if not rate > 0:
                raise SpecError(f"{name}={rate!r} is not a positive rate")

    def rate(self, dtype: str) -> float:
        if dtype not in self.flops_per_s:
            known = ", ".join(self.flops_per_s)
            raise SpecError(
                f"{self.machine} was measured in {known} but not in {dtype}; run `regard bench machine`"
            )
        return self.flops_per_s[dtype]

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


# -- measuring ----------------------------------------------------------------------------------------------------


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
        dtype: max(_product_rate(n, getattr(torch, dtype), device) for n in sizes)
        for dtype in DTYPES
        if device == "cuda" or dtype != "float16"  # CPUs have no fast float16 products
    }
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU"
    threads = "" if device == "cuda" else f", {torch.get_num_threads()} threads"
    versions = {"torch": str(torch.__version__), "date": time.strftime("%Y-%m-%d")}
    host_s = _host_time() if device == "cuda" else 0.0
    return Roofline(
        name + threads, flops_per_s, _bandwidth(device), _shortest_product(device), versions, host_s
    )


def _host_time() -> float:
    """Seconds that the CPU needs for one operation that saves something for the backward pass."""
    x = torch.randn(8, 8, device="cuda", requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(200):
            y = y.tanh()

    chain()
    torch.cuda.synchronize()
    return min(_timed(chain) for _ in range(5)) / 200


def _product_rate(n: int, dtype: torch.dtype, device: str) -> float:
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / time_call(lambda: a @ b, device, reduce=min)


def _bandwidth(device: str) -> float:
    entries = 1 << (28 if device == "cuda" else 24)
    x = torch.randn(entries, device=device)
    y = torch.empty_like(x)
    # Not a copy: a CUDA graph replays copies on another engine, at two thirds of the rate.
    return 2 * x.numel() * x.element_size() / time_call(lambda: torch.neg(x, out=y), device, reduce=min)


def _shortest_product(device: str) -> float:
    """The time of a 64 × 64 product, from a chain of dependent ones."""
    x, count = torch.randn(64, 64, device=device), 50

    def chain() -> None:
        y = x
        for _ in range(count):
            y = x @ y

    return time_call(chain, device, reduce=min) / count


def time_call(
    call: Callable[[], Any],
    device: str,
    repeats: int = 10,
    reduce: Callable[[list[float]], float] = median,
) -> float:
    """Seconds per call after warm-up, by default the median. On a GPU a CUDA graph is replayed, without Python."""
    for _ in range(3):
        call()
    if device != "cuda":
        return reduce([_timed(call) for _ in range(repeats)])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return reduce(times[2:])


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# -- storing ------------------------------------------------------------------------------------------------------


def roofline_path(path: str | Path | None = None) -> Path:
    """The file of the stored roofline: `path`, else $REGARD_MACHINE, else one in the user's cache folder."""
    if path is not None:
        return Path(path)
    if from_environment := os.environ.get("REGARD_MACHINE"):
        return Path(from_environment)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "regard" / "machine.json"


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


# -- estimating ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PartTime:
    """The time of a part over all its copies, and its limit."""

    path: str
    seconds: float
    limit: str  # compute, memory or launch


@dataclass(frozen=True)
class Estimate:
    """The estimated time of a cost on a machine, part by part."""

    machine: str
    parts: tuple[PartTime, ...]
    measured: float | None = None  # seconds, if it was also run

    @property
    def seconds(self) -> float:
        return sum(p.seconds for p in self.parts)

    @property
    def longest(self) -> PartTime:
        return max(self.parts, key=lambda p: p.seconds)

    def plain(self) -> dict[str, Any]:
        return {"seconds": self.seconds, **asdict(self)}

    def __str__(self) -> str:
        width = max((len(p.path) for p in self.parts), default=0)
        lines = [f"estimated on {self.machine}: {self.seconds * 1e3:.3f} ms"]
        if self.measured is not None:
            error = self.seconds / self.measured - 1
            lines.append(f"measured: {self.measured * 1e3:.3f} ms (estimate {error:+.0%})")
        lines += [f"  {p.path:<{width}}  {p.seconds * 1e3:9.4f} ms  {p.limit}" for p in self.parts]
        return "\n".join(lines)


def estimate(cost: Cost, roofline: Roofline, dtype: str | None = None, backward: bool = False) -> Estimate:
    """The time of a forward pass (or of forward and backward), by the roofline model."""
    dtype = dtype or str(cost.sizes.get("dtype", "float32")).removeprefix("torch.")
    if dtype not in DTYPES:
        raise SpecError(f"dtype={dtype!r}: rooflines are measured for {', '.join(DTYPES)}")
    fused = {p.path for p in cost.pairs if p.backend in FUSED or p.backend == "fused"}
    parts = tuple(
        _time(path, amounts, times, roofline, dtype, backward)
        for path, amounts, times in _kernels(cost.tree, fused)
        if amounts != Amounts()
    )
    return Estimate(roofline.machine, parts)


def _kernels(tree: Part, fused: set[str]) -> list[tuple[str, Amounts, int]]:
    """(path, amounts of one kernel, number of kernels): each term is a kernel, a fused attention core is one."""
    kernels: list[tuple[str, Amounts, int]] = []

    def descend(part: Part, path: str, times: int) -> None:
        times *= part.times
        core = [p for p in part.parts if p.name in CORE]
        if core and (path in fused or (not path and fused)):  # a single attention is the whole tree
            kernels.append(
                (f"{path}/core" if path else "core", sum((p.total for p in core), Amounts()), times)
            )
            rest = [p for p in part.parts if p not in core]
        else:
            rest = list(part.parts)
        own = part.own
        if own.executed_flops or own.bytes:
            kernels.append((path or part.name, own, times))
        for p in rest:
            descend(p, f"{path}/{p.name}" if path else p.name, times)

    descend(tree, "", 1)
    return kernels


def _time(
    path: str, amounts: Amounts, times: int, roofline: Roofline, dtype: str, backward: bool
) -> PartTime:
    flops = amounts.executed_flops + (amounts.executed_backward_flops if backward else 0)
    passes = 3 if backward else 1
    compute = flops / roofline.rate(dtype)
    if flops and amounts.elementwise_flops:  # softmax, between two products of a fused kernel
        compute += passes * amounts.elementwise_flops / roofline.rate("float32")
    memory = passes * amounts.bytes / roofline.bytes_per_s
    launch = passes * roofline.kernel_s if flops or amounts.bytes else 0.0
    _, limit = max((compute, "compute"), (memory, "memory"), (launch, "launch"))
    return PartTime(path, times * (launch + max(compute, memory)), limit)


@dataclass(frozen=True)
class StepTime:
    """The estimated time of a step by phase: its kernels on the device, and the host that launches them."""

    machine: str
    device: dict[str, float]  # phase → seconds
    host: dict[str, float]
    parts: tuple[PartTime, ...]  # kernels by module, longest first

    @property
    def seconds(self) -> float:
        """Host and device overlap: the slower one decides, phase by phase."""
        return sum(max(self.device[p], self.host.get(p, 0.0)) for p in self.device)

    @property
    def bound(self) -> str:
        return "host" if sum(self.host.values()) > sum(self.device.values()) else "device"

    def plain(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "bound": self.bound, **asdict(self)}

    def __str__(self) -> str:
        lines = [f"estimated on {self.machine}: {self.seconds * 1e3:.3f} ms, bound by the {self.bound}"]
        for phase, seconds in self.device.items():
            host = self.host.get(phase, 0.0)
            lines.append(
                f"  {phase:<10} {seconds * 1e3:9.3f} ms of kernels, {host * 1e3:9.3f} ms to launch them"
            )
        width = max((len(p.path) for p in self.parts[:12]), default=0)
        lines += [f"  {p.path:<{width}}  {p.seconds * 1e3:9.4f} ms  {p.limit}" for p in self.parts[:12]]
        return "\n".join(lines)


def step_time(work: list[tuple[str, str, Any, Any, str]], roofline: Roofline) -> StepTime:
    """The time of traced kernels. work: (phase, module, FLOPs, bytes, dtype) of each."""
    device: dict[str, float] = {}
    host: dict[str, float] = {}
    parts: dict[str, list[float]] = {}
    for phase, path, flops, moved, dtype in work:
        rate = roofline.flops_per_s.get(dtype) or roofline.flops_per_s["float32"]
        compute, memory = flops / rate, moved / roofline.bytes_per_s
        seconds = KERNEL_TIME * (roofline.kernel_s + max(compute, memory))
        device[phase] = device.get(phase, 0.0) + seconds
        host[phase] = host.get(phase, 0.0) + HOST_TIME * roofline.host_s
        part = parts.setdefault(path, [0.0, 0.0, 0.0, 0.0])
        for at, amount in enumerate((seconds, compute, memory, roofline.kernel_s)):
            part[at] += amount
    limits = ("compute", "memory", "launch")
    timed = [PartTime(path, p[0], limits[max(range(3), key=lambda k: p[1 + k])]) for path, p in parts.items()]
    ordered = tuple(sorted(timed, key=lambda p: -p.seconds))
    return StepTime(roofline.machine, device, host, ordered)


def measure_time(request: Request) -> float:
    """Seconds of the built module on this machine: a forward pass, or both passes if `request.train`."""
    device = request.device
    with torch.device(device):
        module = request.spec.build().to(request.dtype)
    inputs = _example_inputs(request)

    def forward() -> Any:
        with torch.no_grad():
            return module(*inputs)

    if not request.train:
        return time_call(forward, device)
    out = forward()
    grad = torch.randn_like(out)

    def both() -> None:
        module(*inputs).backward(grad)

    return time_call(both, device) if device == "cpu" else _time_eager(both)


def _time_eager(call: Callable[[], Any], repeats: int = 10) -> float:
    """Seconds per call on a GPU, launches included: this backward pass is not captured in a graph."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def _example_inputs(request: Request) -> list[torch.Tensor]:
    spec, batch, device = request.spec, request.batch, request.device

    def sequence(part: Any, length: int) -> torch.Tensor:
        if getattr(part, "embedding", None) is not None:
            return torch.randint(0, part.embedding.vocab, (batch, length), device=device)
        return torch.randn(batch, length, part.d_model, device=device).to(request.dtype)

    match spec:
        case EncoderDecoder():
            return [sequence(spec.encoder, request.m), sequence(spec.decoder, request.n)]
        case Vision():
            return [torch.randn(batch, spec.channels, *spec.image, device=device).to(request.dtype)]
    return [sequence(spec, request.n)]
