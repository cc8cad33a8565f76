"""The memory of a model: weights, gradients, optimizer state, saved activations, peaks of training and inference.

All of it comes from running the module on meta tensors (runs.py) and replaying what it allocates (allocator.py).
"""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ...errors import SpecError
from ..trace.nested import tensors_in
from ..trace.tracer import merged
from .allocator import Usage
from .peak import OUTSIDE, Peak, peak_of, readable
from .runs import Run, Setting, generates, run

NO_CACHE = "none: this model does not decode with a cache of keys and values"


@dataclass(frozen=True)
class AttentionFacts:
    """What a declared attention determines by formula, in bytes."""

    one_attention: int = 0  # q, k, v, weights and outputs of one attention layer, for one batch row
    kv_cache: int = 0  # keys and values of all layers, for the whole batch
    saved_by_method: dict[str, int] = field(
        default_factory=dict
    )  # by attention cores, for each kind of kernel
    formulas: Callable[[], dict[str, Any]] | None = field(default=None, repr=False)


class Memory:
    """Memory in bytes. `rows()` lists everything; `explain_peak()` says where the peak is, in words.

    Each run on meta tensors takes place when one of its numbers is first read.
    """

    def __init__(self, setting: Setting, facts: AttentionFacts | None = None, main: Run | None = None):
        self.setting, self.facts = setting, facts or AttentionFacts()
        if main is not None:
            self.main = main

    @cached_property
    def main(self) -> Run:
        """The training step if there is one, else the forward pass."""
        return run(self.setting)

    @cached_property
    def usage(self) -> Usage:
        return self.main.usage()

    @cached_property
    def _inference(self) -> Usage:
        if not self.trains:
            return self.usage
        return run(self.setting.inference).usage()

    @cached_property
    def generation(self) -> Run | None:
        """A prompt and one more token with a cache; None if the model has none."""
        setting = replace(self.setting.inference, cached=True)
        long = any(x.dim() > 1 and x.shape[1] > 1 for x in tensors_in(setting.given))
        return run(setting) if long and generates(setting.module) else None

    @cached_property
    def _generated(self) -> dict[str, int]:
        return {} if self.generation is None else self.generation.usage().by_phase

    @property
    def trains(self) -> bool:
        return self.setting.training is not None

    @property
    def weights(self) -> int:
        unique = {id(p): p for p in self.main.module.parameters()}
        return sum(p.numel() * p.element_size() for p in unique.values())

    @property
    def inference_peak(self) -> int:
        """Of a forward pass without gradients."""
        return self._inference.peak

    @property
    def prefill_peak(self) -> int | None:
        """Of a prompt of n − 1 tokens that fills a cache of keys and values; None without a cache."""
        return self._generated.get("prefill")

    @property
    def decode_peak(self) -> int | None:
        """Of the next token with that cache."""
        return self._generated.get("decode")

    @property
    def kv_cache(self) -> int | None:
        """Keys and values of all layers: by formula of a declaration, else as traced."""
        if self.facts.kv_cache or self.generation is None:
            return self.facts.kv_cache or None
        return self.generation.bytes("key/value cache")

    @property
    def one_attention(self) -> int:
        return self.facts.one_attention

    @property
    def saved_by_method(self) -> dict[str, int]:
        return self.facts.saved_by_method if self.trains else {}

    @property
    def formulas(self) -> Callable[[], dict[str, Any]] | None:
        return self.facts.formulas

    @property
    def workspace(self) -> int:
        return sum(self.main.workspaces)

    @property
    def gradients(self) -> int:
        return self.main.bytes("gradients")

    @property
    def optimizer_state(self) -> int:
        return self.main.bytes("optimizer state")

    @property
    def master_weights(self) -> int:
        return self.main.bytes("master weights")

    @cached_property
    def saved(self) -> dict[str, int]:
        """Saved for the backward pass, by module, largest first."""
        records, saved = self.main.trace.meter.records, Counter[str]()
        for k in self.main.keys("saved for backward"):
            saved[merged(records[k].path)] += records[k].bytes
        return dict(saved.most_common())

    @property
    def saved_total(self) -> int:
        return sum(self.saved.values())

    @property
    def training_peak(self) -> int | None:
        """Of a training step; None without one."""
        return self.usage.peak if self.trains else None

    @property
    def reserved(self) -> int:
        """Taken from the device for it, with the gaps of the allocator."""
        return self.usage.reserved

    @property
    def between_steps(self) -> int:
        kinds = ("weights", "inputs", "optimizer state", "master weights")
        return sum(map(self.main.bytes, kinds)) + self.workspace

    def per_rank(self, ranks: int, strategy: str = "fsdp") -> Usage:
        """Of one of several ranks: "fsdp" divides weights, gradients and optimizer state; "ddp" repeats them."""
        return self.main.usage(ranks=ranks, strategy=strategy)

    @cached_property
    def peak(self) -> Peak:
        """The moment of the peak of the training step, else of inference, and what is alive there."""
        return peak_of(self.main, self.usage)

    @property
    def peak_part(self) -> str:
        """The phase in which the peak occurs."""
        return self.peak.phase

    def explain_peak(self) -> str:
        """The moment of the peak, what is alive there, and what would lower it, in words."""
        words, training, kinds = self.peak.explain(), self.setting.training, self.peak.by_kind()
        if (
            training is None
            or training.checkpointing
            or max(kinds, key=lambda k: kinds[k]) != "saved for backward"
        ):
            return words
        with suppress(SpecError):  # a module that has no checkpointing
            training = replace(training, checkpointing=True)
            less = Memory(replace(self.setting, training=training)).training_peak
            if less is not None and less < self.usage.peak:
                words += f" Checkpointing each block would lower the peak to {readable(less)}, for a second forward."
        return words

    def rows(self) -> list[tuple[str, int | str]]:
        rows: list[tuple[str, int | str | None]] = [
            ("weights", self.weights),
            ("one attention, one batch row: q, k, v, weights, outputs", self.one_attention),
            ("key/value cache", self.kv_cache or NO_CACHE),
            ("cuBLAS workspaces", self.workspace),
            ("inference peak", self.inference_peak),
            ("prefill peak, a prompt of n − 1 tokens", self.prefill_peak),
            ("decode peak, the next token", self.decode_peak),
        ]
        if self.trains:
            rows += [
                ("gradients", self.gradients),
                ("optimizer state", self.optimizer_state),
                ("float32 master weights", self.master_weights),
                *((f"saved for backward: {part or OUTSIDE}", size) for part, size in self.saved.items()),
                ("saved for backward, total", self.saved_total),
                *(
                    (f"saved by attention cores, {method}", size)
                    for method, size in self.saved_by_method.items()
                ),
                (f"training peak, in {self.peak_part}", self.training_peak),
            ]
        rows.append(("taken from the device", self.reserved if self.reserved != self.usage.peak else 0))
        return [(name, size) for name, size in rows if size]

    def plain(self) -> dict[str, Any]:
        names = (
            "weights", "one_attention", "kv_cache", "inference_peak", "prefill_peak", "decode_peak", "workspace",
            "gradients", "optimizer_state", "master_weights", "saved", "saved_by_method", "training_peak", "reserved",
            "peak_part", "between_steps", "saved_total",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names} | {"peak": self.peak.plain()}

    def __repr__(self) -> str:
        peak = (
            f"training_peak={self.training_peak:,}"
            if self.trains
            else f"inference_peak={self.inference_peak:,}"
        )
        return f"Memory(weights={self.weights:,}, {peak})"
