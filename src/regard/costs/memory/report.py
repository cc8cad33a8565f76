"""The memory of a model: weights, gradients, optimizer state, saved activations, peaks of training and inference.

All of it comes from running the module on meta tensors (trace/) and replaying what it allocates (allocator.py).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...errors import SpecError
from ..trace.attention import H200, Gpu
from ..trace.tracer import Trace, merged, tracing
from ..trace.twin import inputs_of, twin_of
from .allocator import Usage, replay
from .peak import Peak, peak_of
from .step import Step, TrainingStep, adapt, freeze, run_step

WORKSPACE = 33 << 20  # cuBLAS 32 MiB and cuBLASLt 1 MiB per thread that multiplies (H100, H200)


@dataclass(frozen=True)
class Memory:
    """Memory in bytes. `rows()` lists everything; `explain_peak()` says where the training peak is, in words."""

    weights: int
    one_attention: int = 0  # q, k, v, weights and outputs of one attention layer, for one batch row
    kv_cache: int = 0  # keys and values of all layers, for the whole batch
    inference_peak: int = 0  # of a forward pass without gradients
    prefill_peak: int = 0  # of a forward pass that fills a cache of keys and values
    decode_peak: int = 0  # of one more token with that cache
    workspace: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    master_weights: int = 0
    saved: dict[str, int] = field(default_factory=dict)  # for the backward pass, by module
    saved_by_method: dict[str, int] = field(
        default_factory=dict
    )  # by attention cores, for each kind of kernel
    training_peak: int = 0  # of a training step
    reserved: int = 0  # taken from the device for it, with the gaps of the allocator
    peak_part: str = ""  # the phase in which the training peak occurs
    between_steps: int = 0
    peak: Peak | None = field(default=None, repr=False, compare=False)
    formulas: Callable[[], dict[str, Any]] | None = field(default=None, repr=False, compare=False)
    step: Step | None = field(default=None, repr=False, compare=False)

    @property
    def saved_total(self) -> int:
        return sum(self.saved.values())

    def explain_peak(self) -> str:
        """The moment of the peak, what is alive there, and what would lower it, in words."""
        if self.peak is None:
            raise SpecError("there is no training peak to explain: pass train=True")
        return self.peak.explain()

    def rows(self) -> list[tuple[str, int]]:
        rows = [
            ("weights", self.weights),
            ("one attention, one batch row: q, k, v, weights, outputs", self.one_attention),
            ("key/value cache", self.kv_cache),
            ("cuBLAS workspaces", self.workspace),
            ("inference peak", self.inference_peak),
            ("prefill peak, with the cache", self.prefill_peak),
            ("decode peak, one token", self.decode_peak),
        ]
        if self.training_peak:
            rows += [
                ("gradients", self.gradients),
                ("optimizer state", self.optimizer_state),
                ("float32 master weights", self.master_weights),
                *((f"saved for backward: {part}", size) for part, size in self.saved.items()),
                ("saved for backward, total", self.saved_total),
                *(
                    (f"saved by attention cores, {method}", size)
                    for method, size in self.saved_by_method.items()
                ),
                (f"training peak, in {self.peak_part}", self.training_peak),
                ("taken from the device", self.reserved if self.reserved != self.training_peak else 0),
            ]
        return [(name, size) for name, size in rows if size]

    def plain(self) -> dict[str, Any]:
        left_out = ("formulas", "peak", "step")
        plain = {n: getattr(self, n) for n in Memory.__dataclass_fields__ if n not in left_out}
        peak = None if self.peak is None else self.peak.plain()
        return plain | {"saved_total": self.saved_total, "peak": peak}


@dataclass(frozen=True)
class Setting:
    """How a module is run: inputs, targets, dtype, training step, device."""

    given: tuple[tuple, dict]
    targets: Any = None
    dtype: torch.dtype = torch.float32
    training: TrainingStep | None = None
    device: str = "cpu"
    gpu: Gpu = H200


def traced(module: nn.Module, setting: Setting) -> tuple[Trace, nn.Module, Memory]:
    """The trace of a forward pass or of a training step, the module that ran, and the memory."""
    trace = Trace(setting.device, setting.gpu)
    twin = twin_of(module, trace, setting.dtype)
    given, targets = inputs_of(trace, (setting.given, setting.targets), setting.dtype)
    if setting.training is None:
        with tracing(trace), trace.modules_of(twin), torch.no_grad(), trace.meter.during("forward"):
            out = twin(*given[0], **given[1])
        del out
        return trace, twin, _inference(trace, twin)
    twin.train()
    checkpoint(twin, setting.training)
    freeze(twin, setting.training.frozen)
    if setting.training.lora:
        adapt(twin, setting.training.lora)
        for p in twin.parameters():
            trace.meter.track(p, "", "weight")
    with tracing(trace), trace.modules_of(twin), torch.enable_grad():
        step = run_step(trace, twin, given, targets, setting.training)
    return trace, twin, memory_of_step(step, setting.training)


def checkpoint(module: Any, training: TrainingStep) -> None:
    """Turn checkpointing on or off in a module that knows how."""
    wanted = training.checkpointing
    if wanted is None:
        return
    reentrant = {"gradient_checkpointing_kwargs": {"use_reentrant": wanted == "reentrant"}}
    if hasattr(module, "gradient_checkpointing_enable"):
        if wanted:
            module.gradient_checkpointing_enable(**reentrant)
        else:
            module.gradient_checkpointing_disable()
    elif wanted and not getattr(module, "spec", None):
        raise SpecError(
            f"{type(module).__name__} has no gradient_checkpointing_enable(); call torch.utils.checkpoint in its "
            f"forward, and leave checkpointing out here"
        )


def _weights(module: nn.Module) -> int:
    unique = {id(p): p for p in module.parameters()}
    return sum(p.numel() * p.element_size() for p in unique.values())


def usage(trace: Trace, begin: int, persistent: set[int], training: bool, limit: int | None = None) -> Usage:
    """Peak and reserved bytes of the step that begins at this event."""
    meter, device = trace.meter, trace.device
    sizes = [r.bytes for r in meter.records]
    workspaces = [WORKSPACE - SMALL_LT, SMALL_LT] * (1 + training) if device == "cuda" else []
    setup = [*meter.events[:begin], *((len(sizes) + i, 1) for i in range(len(workspaces)))]
    repeats = 2 if training and device == "cuda" else 1 if training else 0
    return replay([*sizes, *workspaces], setup, meter.events[begin:], persistent, device, repeats, limit)


SMALL_LT = 1 << 20


def _inference(trace: Trace, module: nn.Module) -> Memory:
    begin = next(
        (i for i, (k, _) in enumerate(trace.meter.events) if trace.meter.records[k].phase != "setup"), 0
    )
    used = usage(trace, begin, set(), training=False)
    workspace = WORKSPACE if trace.device == "cuda" else 0
    return Memory(_weights(module), inference_peak=used.peak, workspace=workspace, reserved=used.reserved)


def memory_of_step(step: Step, training: TrainingStep) -> Memory:
    meter = step.trace.meter
    size = meter.records
    used = usage(step.trace, step.begin, step.state, training=True)
    workspace = 2 * WORKSPACE if step.trace.device == "cuda" else 0

    def total(keys: set[int]) -> int:
        return sum(size[k].bytes for k in keys)

    masters = {k for k in step.state if size[k].phase == "setup"}
    saved: Counter[str] = Counter()
    for k in step.saved:
        saved[merged(size[k].path)] += size[k].bytes
    return Memory(
        total(step.weights),
        workspace=workspace,
        gradients=total(step.gradients),
        optimizer_state=total(step.state - masters),
        master_weights=total(masters),
        saved=dict(sorted(saved.items(), key=lambda kv: -kv[1])),
        training_peak=used.peak,
        reserved=used.reserved,
        peak_part=size[meter.events[step.begin + used.at][0]].phase,
        between_steps=total(step.weights | step.inputs | step.state) + workspace,
        peak=peak_of(step, used.at, used.peak, workspace),
        step=step,
    )
