"""The time that a traced run would take on a machine, by its roofline.

A kernel takes the longer of two times, its FLOPs divided by the peak rate of its dtype and its bytes divided by the
memory bandwidth, and the time of the shortest kernel. On a GPU the host takes time for every operation, view and call
of a module before the kernel can start: kernels wait for the host, and the host runs ahead of them.
"""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from ..errors import SpecError
from ..machine import Roofline, time_call
from .memory.step import training_of
from .result import Cost
from .sizes import Request
from .subject import call, example, stepping
from .trace.tracer import Work

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

    seconds = property(lambda self: sum(self.phases.values()))
    bound = property(lambda e: "host" if sum(e.host.values()) > sum(e.device.values()) else "device")

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
            # Products of attention and of our kernels take longer than at the best rate; on a CPU all are alike.
            own = OWN.get(w.dtype, OWN["float32"])
            slower = {"attention": ATTENTION, "own": own} if roofline.host_s else {}
            compute = slower.get(w.kind, PRODUCT) * w.flops / roofline.rate(w.dtype)
            memory = MOVE * w.bytes / roofline.bytes_per_s
            seconds = LAUNCH * roofline.kernel_s + max(compute, memory)
            at_device = max(at_device, at_host) + seconds
            device[w.phase] = device.get(w.phase, 0.0) + seconds
            part = parts.setdefault(w.path, [0.0] * 6)
            for k, amount in enumerate((seconds, compute, memory, roofline.kernel_s, w.flops, w.bytes)):
                part[k] += amount
        ends[w.phase] = max(at_host, at_device)
    limits = ("compute", "memory", "launch")
    timed = [PartTime(k, p[0], limits[p[1:4].index(max(p[1:4]))], *p[4:]) for k, p in parts.items()]
    starts = [0.0, *ends.values()]
    phases = {phase: end - start for (phase, end), start in zip(ends.items(), starts)}
    return Estimate(roofline.machine, phases, device, host, tuple(sorted(timed, key=lambda p: -p.seconds)))


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
        return time_call(lambda: call(module, inputs), device)
