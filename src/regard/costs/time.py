"""The roofline of a machine, measured once and stored, and the time that a traced run would take there.

A kernel takes the longer of two times, its FLOPs divided by the peak rate of its dtype and its bytes divided by the
memory bandwidth, and the time of the shortest kernel. On a GPU the host takes time for every operation, view and call
of a module before the kernel can start: kernels wait for the host, and the host runs ahead of them.
"""

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from ..errors import FormatError, SpecError
from .memory.step import training_of
from .result import Cost
from .sizes import Request
from .subject import call as call_model
from .subject import example, stepping
from .trace.tracer import Work

DTYPES = ("float32", "bfloat16", "float16")
# Fitted to 44 training steps on an H200 by bench/cost_fit.py (kernels and host were measured apart). A kernel takes
# multiples of the best rate; OWN: kernels of this library on a GPU, which multiply float32 without tensor cores.
PRODUCT, ATTENTION, MOVE, LAUNCH = 1.16, 3.16, 0.995, 1.25
OWN = {"float32": 11.1, "bfloat16": 6.15, "float16": 6.15}
# Time of the host, in multiples of one operation in a chain: in the forward pass with its Python code, where
# a checkpoint repeats it, in the backward pass, for each tensor of a foreach optimizer, and for its step.
HOST = {"module": 2.9, "view": 0.425, "operation": 3.32, "attention": 5.42, "own": 16.8, "tensor": 0.241}
HOST |= {"step": 235}
REPEATED = {**HOST, "module": 11.3, "operation": 4.44}
BACKWARD = {"view": 0.18, "operation": 1.64, "attention": 4.17, "own": 17.3}


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
        dtype: max(_product_rate(n, getattr(torch, dtype), device) for n in sizes)
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


def _product_rate(n: int, dtype: torch.dtype, device: str) -> float:
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / time_call(lambda: a @ b, device, reduce=min)


def _bandwidth(device: str) -> float:
    entries = 1 << (28 if device == "cuda" else 24)
    x = torch.randn(entries, device=device)
    y = torch.empty_like(x)
    # A negation, because a CUDA graph replays copies on another engine, at two thirds of the rate.
    return 2 * x.numel() * x.element_size() / time_call(lambda: torch.neg(x, out=y), device, reduce=min)


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


class PartTime(NamedTuple):
    """The time of the kernels of a module over all its copies, their limit, their FLOPs and bytes."""

    path: str
    seconds: float
    limit: str  # compute, memory or launch
    flops: float
    bytes: float


@dataclass(frozen=True)
class Estimate:
    """The estimated time of a run by phase: its kernels, the host that launches them, and both overlapped."""

    machine: str
    phases: dict[str, float]  # forward, backward, optimizer; prefill, decode → seconds
    device: dict[str, float]
    host: dict[str, float]
    parts: tuple[PartTime, ...]  # kernels by module, longest first

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def bound(self) -> str:
        return "host" if sum(self.host.values()) > sum(self.device.values()) else "device"

    @property
    def longest(self) -> PartTime:
        return self.parts[0]

    def plain(self) -> dict[str, Any]:
        parts = [p._asdict() for p in self.parts]
        return {"seconds": self.seconds, "bound": self.bound, **asdict(self), "parts": parts}

    def __str__(self) -> str:
        lines = [f"estimated on {self.machine}: {self.seconds * 1e3:.3f} ms, bound by the {self.bound}"]
        for phase, seconds in self.phases.items():
            busy, host = self.device.get(phase, 0.0), self.host.get(phase, 0.0)
            launch = f", {host * 1e3:.3f} ms to launch them" if host else ""
            lines.append(f"  {phase:<10} {seconds * 1e3:9.3f} ms: {busy * 1e3:.3f} ms of kernels{launch}")
        shown = self.parts[:12]
        width = max((len(p.path) for p in shown), default=0)
        lines += [f"  {p.path or 'the model':<{width}}  {p.seconds * 1e3:9.4f} ms  {p.limit}" for p in shown]
        return "\n".join(lines)


def estimate(cost: Cost, roofline: Roofline, generation: bool = False) -> Estimate:
    """The time of a forward pass or a training step; generation: of a prompt and of one more token with a cache."""
    if cost.memory is None:
        raise SpecError(f"the time of {cost.name} is not known: it is not a module by itself")
    traced = cost.memory.generation if generation else cost.memory.main
    if traced is None:
        raise SpecError(f"the time of a token of {cost.name}: key/value cache {cost.memory.without_cache}")
    return time_of(traced.trace.work, roofline)


def time_of(work: list[Work], roofline: Roofline) -> Estimate:
    """The time of traced work: a kernel starts when the host has come to it and the last one is done."""
    device, host, ends = dict[str, float](), dict[str, float](), dict[str, float]()
    parts: dict[str, list[float]] = {}
    at_host = at_device = 0.0
    for w in work:
        table = REPEATED if w.again else BACKWARD if w.phase == "backward" else HOST
        waits = table[w.kind] + HOST["tensor"] * w.tensors
        waits += HOST["step"] if w.phase == "optimizer" and w.phase not in host else 0.0
        at_host += waits * roofline.host_s
        host[w.phase] = host.get(w.phase, 0.0) + waits * roofline.host_s
        if w.kind not in ("view", "module"):
            compute = _slower(w, roofline) * w.flops / roofline.rate(w.dtype)
            memory = MOVE * w.bytes / roofline.bytes_per_s
            seconds = LAUNCH * roofline.kernel_s + max(compute, memory)
            at_device = max(at_device, at_host) + seconds
            device[w.phase] = device.get(w.phase, 0.0) + seconds
            part = parts.setdefault(w.path, [0.0] * 6)
            for k, amount in enumerate((seconds, compute, memory, roofline.kernel_s, w.flops, w.bytes)):
                part[k] += amount
        ends[w.phase] = max(at_host, at_device)
    limits = ("compute", "memory", "launch")
    timed = [
        PartTime(path, p[0], limits[max(range(3), key=lambda k: p[1 + k])], p[4], p[5])
        for path, p in parts.items()
    ]
    starts = [0.0, *ends.values()]
    phases = {phase: end - start for (phase, end), start in zip(ends.items(), starts)}
    return Estimate(roofline.machine, phases, device, host, tuple(sorted(timed, key=lambda p: -p.seconds)))


def _slower(w: Work, roofline: Roofline) -> float:
    """How many times longer than at the best rate of products those of a kernel take; on a CPU all are alike."""
    if not roofline.host_s or w.kind == "operation":
        return PRODUCT
    return ATTENTION if w.kind == "attention" else OWN.get(w.dtype, OWN["float32"])


def measure_time(request: Request) -> float:
    """Seconds of the built module on this machine: a forward pass, or a training step if `request.train`."""
    device, training = request.device, training_of(request.train)
    with torch.device(device):
        module = request.spec.build().to(request.dtype)
    inputs, targets = example(request.spec, request.n, request.batch, device, request.m)
    if training is not None:
        return time_call(stepping(module, inputs, targets, training), device, graph=False)
    module.eval()
    with torch.no_grad():
        return time_call(lambda: call_model(module, inputs), device)
