"""What a machine can do at most, measured once and stored; and how long a cost would take there.

A part takes the longer of two times: its operations over the rate of matrix products in its dtype, and its bytes
over the rate of memory. Inside fused attention the softmax runs on the ordinary units, at the rate of float32, and
waits for the products. Every kernel takes at least what the shortest product takes, beside its work.
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
from .sizes import FUSED
from .tree import Amounts, Cost, Part

DTYPES = ("float32", "bfloat16", "float16")
CORE = ("scores", "scale", "softmax", "mixing", "bias", "position_scores")


@dataclass(frozen=True)
class Ceilings:
    """Matrix products a second by dtype, bytes a second, and the seconds of the shortest product."""

    machine: str
    operations_per_s: dict[str, float]
    bytes_per_s: float
    kernel_s: float
    measured: dict[str, str] = field(default_factory=dict)  # versions, date

    def __post_init__(self):
        rates = {"bytes_per_s": self.bytes_per_s, **self.operations_per_s}
        for name, rate in rates.items():
            if not rate > 0:
                raise SpecError(f"{name}={rate!r}: a rate above 0 is needed")

    def rate(self, dtype: str) -> float:
        if dtype not in self.operations_per_s:
            known = ", ".join(self.operations_per_s)
            raise SpecError(
                f"{self.machine} was not measured in {dtype}, only in {known}; run `regard bench machine`"
            )
        return self.operations_per_s[dtype]

    @property
    def balance(self) -> dict[str, float]:
        """Operations in the time of one byte: parts with fewer a byte wait for memory."""
        return {dtype: rate / self.bytes_per_s for dtype, rate in self.operations_per_s.items()}

    def json(self, indent: int | None = None) -> str:
        return json.dumps(asdict(self), indent=indent)

    def __str__(self) -> str:
        lines = [self.machine]
        lines += [f"  {rate / 1e9:11,.1f} GFLOP/s  {dtype}" for dtype, rate in self.operations_per_s.items()]
        lines += [f"  {self.bytes_per_s / 1e9:11,.1f} GB/s     memory, read and written"]
        lines += [f"  {self.kernel_s * 1e6:11,.2f} µs       the shortest product"]
        return "\n".join(lines)


# -- measuring ----------------------------------------------------------------------------------------------------


def measure(device: str = "cpu", size: int | None = None) -> Ceilings:
    """The ceilings of this machine: the best of a few large products and copies, on random data.

    On a CPU a product of 1024² takes milliseconds; a GPU gets 4096² and 8192².
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise SpecError("device='cuda': this machine has no GPU that PyTorch sees; use device='cpu'")
    if device not in ("cpu", "cuda"):
        raise SpecError(f"device={device!r} cannot be measured; use 'cpu' or 'cuda'")
    sizes = (size,) if size else (4096, 8192) if device == "cuda" else (1024,)
    operations = {
        dtype: max(_products(n, getattr(torch, dtype), device) for n in sizes)
        for dtype in DTYPES
        if device == "cuda" or dtype != "float16"  # the CPU has no fast products in it
    }
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU"
    threads = "" if device == "cuda" else f", {torch.get_num_threads()} threads"
    told = {"torch": str(torch.__version__), "date": time.strftime("%Y-%m-%d")}
    return Ceilings(name + threads, operations, _copies(device), _shortest(device), told)


def _products(n: int, dtype: torch.dtype, device: str) -> float:
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / seconds(lambda: a @ b, device, of=min)


def _copies(device: str) -> float:
    entries = 1 << (28 if device == "cuda" else 24)
    x = torch.randn(entries, device=device)
    y = torch.empty_like(x)
    # not a copy: a graph replays that by another engine, at two thirds of the rate
    return 2 * x.numel() * x.element_size() / seconds(lambda: torch.neg(x, out=y), device, of=min)


def _shortest(device: str) -> float:
    """A product too small to count, one after the other."""
    x, many = torch.randn(64, 64, device=device), 50

    def chain() -> None:
        y = x
        for _ in range(many):
            y = x @ y

    return seconds(chain, device, of=min) / many


def seconds(
    call: Callable[[], Any],
    device: str,
    repeats: int = 10,
    of: Callable[[list[float]], float] = median,
) -> float:
    """The time of a call, warm: the median of some. On a GPU kernels are replayed from a graph, without Python."""
    for _ in range(3):
        call()
    if device != "cuda":
        return of([_timed(call) for _ in range(repeats)])
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
    return of(times[2:])


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# -- storing ------------------------------------------------------------------------------------------------------


def place(path: str | Path | None = None) -> Path:
    """Where ceilings are stored: as given, as $REGARD_MACHINE says, or in the user's cache folder."""
    if path is not None:
        return Path(path)
    if named := os.environ.get("REGARD_MACHINE"):
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "regard" / "machine.json"


def store(ceilings: Ceilings, path: str | Path | None = None) -> Path:
    where = place(path)
    where.parent.mkdir(parents=True, exist_ok=True)
    where.write_text(ceilings.json(indent=1), encoding="utf-8")
    return where


def stored(path: str | Path | None = None) -> Ceilings | None:
    """What `regard bench machine` stored; None if it never ran."""
    where = place(path)
    if not where.exists():
        return None
    try:
        return Ceilings(**json.loads(where.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, TypeError) as e:
        raise FormatError(f"{where} does not hold ceilings; run `regard bench machine` again ({e})") from e


# -- estimating ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PartTime:
    """How long a part takes, all of its kind together, and what it waits for."""

    path: str
    seconds: float
    limit: str  # operations, bytes or start


@dataclass(frozen=True)
class Estimate:
    """How long a cost takes on a machine, part by part."""

    machine: str
    parts: tuple[PartTime, ...]
    measured: float | None = None  # seconds, where it was also run

    @property
    def seconds(self) -> float:
        return sum(p.seconds for p in self.parts)

    @property
    def longest(self) -> PartTime:
        return max(self.parts, key=lambda p: p.seconds)

    def plain(self) -> dict[str, Any]:
        return {"seconds": self.seconds, **asdict(self)}

    def __str__(self) -> str:
        wide = max((len(p.path) for p in self.parts), default=0)
        told = [f"estimated on {self.machine}: {self.seconds * 1e3:.3f} ms"]
        if self.measured is not None:
            off = self.seconds / self.measured - 1
            told.append(f"measured: {self.measured * 1e3:.3f} ms (estimate {off:+.0%})")
        told += [f"  {p.path:<{wide}}  {p.seconds * 1e3:9.4f} ms  {p.limit}" for p in self.parts]
        return "\n".join(told)


def estimate(cost: Cost, ceilings: Ceilings, dtype: str | None = None, backward: bool = False) -> Estimate:
    """The time of a forward pass (or of both passes), from operations, bytes and two rates."""
    dtype = dtype or str(cost.sizes.get("dtype", "float32")).removeprefix("torch.")
    if dtype not in DTYPES:
        raise SpecError(f"dtype={dtype!r}: ceilings are measured for {', '.join(DTYPES)}")
    fused = {p.where for p in cost.pairs if p.backend in FUSED or p.backend == "fused"}
    parts = tuple(
        _time(path, amounts, times, ceilings, dtype, backward)
        for path, amounts, times in _kernels(cost.tree, fused)
        if amounts != Amounts()
    )
    return Estimate(ceilings.machine, parts)


def _kernels(tree: Part, fused: set[str]) -> list[tuple[str, Amounts, int]]:
    """What runs as one kernel: each term, but a fused core together. Amounts are of one, times how many run."""
    found: list[tuple[str, Amounts, int]] = []

    def down(part: Part, path: str, times: int) -> None:
        times *= part.times
        core = [p for p in part.parts if p.name in CORE]
        if core and (path in fused or (not path and fused)):  # a lone attention is the whole tree
            found.append((f"{path}/core" if path else "core", sum((p.total for p in core), Amounts()), times))
            rest = [p for p in part.parts if p not in core]
        else:
            rest = list(part.parts)
        own = part.own
        if own.executed or own.bytes:
            found.append((path or part.name, own, times))
        for p in rest:
            down(p, f"{path}/{p.name}" if path else p.name, times)

    down(tree, "", 1)
    return found


def _time(
    path: str, amounts: Amounts, times: int, ceilings: Ceilings, dtype: str, backward: bool
) -> PartTime:
    executed = amounts.executed + (amounts.executed_backward if backward else 0)
    passes = 3 if backward else 1
    computing = executed / ceilings.rate(dtype)
    if executed and amounts.other:  # softmax, between two products of a fused kernel
        computing += passes * amounts.other / ceilings.rate("float32")
    moving = passes * amounts.bytes / ceilings.bytes_per_s
    starting = passes * ceilings.kernel_s if executed or amounts.bytes else 0.0
    _, limit = max((computing, "operations"), (moving, "bytes"), (starting, "start"))
    return PartTime(path, times * (starting + max(computing, moving)), limit)


def measured(spec: Any, n: int, m: int, batch: int, dtype: torch.dtype, device: str, train: bool) -> float:
    """Seconds of the built module on this machine, for an attention, a block or a model of tokens."""
    from .. import spec as specs

    with torch.device(device):
        module = spec.build().to(dtype)
    given = _examples(spec, specs, n, m, batch, dtype, device)

    def forward() -> Any:
        with torch.no_grad():
            return module(*given)

    if not train:
        return seconds(forward, device)
    out = forward()
    grad = torch.randn_like(out)

    def both() -> None:
        module(*given).backward(grad)

    return seconds(both, device) if device == "cpu" else _eagerly(both)


def _eagerly(call: Callable[[], Any], repeats: int = 10) -> float:
    """The time of calls one after the other on a GPU, launches included: gradients do not fit into a graph here."""
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


def _examples(
    spec: Any, specs: Any, n: int, m: int, batch: int, dtype: torch.dtype, device: str
) -> list[torch.Tensor]:
    def one(part: Any, length: int) -> torch.Tensor:
        if getattr(part, "embedding", None) is not None:
            return torch.randint(0, part.embedding.vocab, (batch, length), device=device)
        return torch.randn(batch, length, part.d_model, device=device).to(dtype)

    match spec:
        case specs.EncoderDecoder():
            return [one(spec.encoder, m), one(spec.decoder, n)]
        case specs.Vision():
            return [torch.randn(batch, spec.channels, *spec.image, device=device).to(dtype)]
    return [one(spec, n)]
