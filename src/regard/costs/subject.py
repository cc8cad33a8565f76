"""What is priced and planned at any length and batch size: a declaration, or a model of Hugging Face."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from .. import spec
from ..errors import SpecError
from ..spec.base import require_known, require_positive
from .memory.runs import Run, Setting, run
from .memory.step import TrainingStep, training_of
from .sizes import Request, Size
from .trace.attention import H200, Gpu
from .trace.tracer import Work

HEADS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ForMaskedLM", "ForPreTraining", "MTModel")
CLASSIFIERS = ("ForImageClassification", "ForSequenceClassification", "ForAudioClassification")
NO_LIMIT, MAX_BATCH = 1 << 30, 1 << 24


@dataclass(frozen=True)
class Subject:
    """A declaration, or a module that has a Hugging Face configuration."""

    model: Any

    @staticmethod
    def of(model: Any) -> "Subject":
        model = spec.preset(model) if isinstance(model, str) else model
        model = build(model) if is_config(model) else getattr(model, "spec", model)
        if isinstance(model, spec.Spec) or (isinstance(model, nn.Module) and hasattr(model, "config")):
            return Subject(model)
        raise SpecError(
            f"cannot run {type(model).__name__} at other sizes: pass a declaration, the name of a preset, or a "
            f"Hugging Face configuration or model, whose inputs are known at any batch size"
        )

    @property
    def declared(self) -> bool:
        return isinstance(self.model, spec.Spec)

    @cached_property
    def module(self) -> nn.Module:
        """On meta tensors, if it is a declaration."""
        if not self.declared:
            return self.model
        with torch.device("meta"):
            return self.model.build()

    @property
    def tokens(self) -> int | None:
        """The length of an image model, which its image determines."""
        if self.declared:
            return getattr(self.model, "tokens", None)
        config: Any = self.module.config
        if getattr(self.module, "main_input_name", "") != "pixel_values" or hasattr(config, "vocab_size"):
            return None
        side, patch = _side(config), getattr(config, "patch_size", 1)
        return (side // (patch if isinstance(patch, int) else patch[0])) ** 2

    @property
    def max_n(self) -> int:
        """The number of positions of a learned table, if there is one."""
        if not self.declared:
            return getattr(self.module.config, "max_position_embeddings", None) or NO_LIMIT
        stack = self.model.decoder if isinstance(self.model, spec.EncoderDecoder) else self.model
        position = getattr(getattr(stack, "embedding", None), "position", None)
        table = getattr(position, "table", None)
        limited = isinstance(table, int) and getattr(position, "beyond", "") != "resample"
        return table if limited else NO_LIMIT  # type: ignore[return-value]

    def setting(
        self,
        size: Size,
        training: TrainingStep | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        gpu: Gpu = H200,
    ) -> Setting:
        """The model with inputs of this size."""
        if self.declared:
            targets = None if training is None else declared_targets(self.model, size)
            given: tuple[tuple, dict] = (declared_inputs(self.model, size, dtype), {})
        else:
            labels = training is not None and training.loss is None
            targets, given = None, ((), generated_inputs(self.module, size, labels))
        return Setting(self.module, given, targets, dtype, training, device, gpu, evaluate=training is None)

    def fits(self, request: Request, budget: int, vary: str = "batch") -> int:
        """The largest batch (or n, with `vary="n"`) whose peak is at most `budget` bytes; 0 if none fits.

        Found between traced runs, since memory grows with both. m follows n if the two are equal.
        """
        require_known("vary", vary, ("batch", "n"))
        require_positive("budget", budget)
        if vary == "n" and self.tokens is not None:
            raise SpecError("vary='n': the image size determines the number of patches; use vary='batch'")
        n, m, batch = request.size

        def at(x: int) -> Run:
            size = Size(n, m, x) if vary == "batch" else Size(x, x if m == n else m, batch)
            return run(self.setting(size, training_of(request.train), request.dtype, request.device))

        if vary == "batch":
            return largest_of(Runs(at, 1), budget, H200)
        return largest(lambda x: at(x).usage().peak, budget, self.max_n)


class Runs:
    """Runs of one kind of step at several sizes x: batches, or lengths.

    Between them the sizes of storages and the work are polynomials in x, as long as the runs allocate and free in the
    same order: lines in the batch (degree 1), parabolas in the length (2).
    """

    def __init__(self, traced: Callable[[int], Run], degree: int):
        self.traced, self.degree = traced, degree
        self.known: dict[int, Run] = {}

    def at(self, x: int) -> Run:
        if x not in self.known:
            self.known[x] = self.traced(x)
        return self.known[x]

    def peak(self, x: int, gpu: Gpu, ranks: int = 1, expandable: bool = False) -> int:
        """With the sizes of x, in the order of the nearest known run that runs alike."""
        nearest = self.known[min(self._near(x), key=lambda k: abs(k - x))]
        return nearest.usage(sizes=self.sizes(x, gpu), ranks=ranks, expandable=expandable).peak

    def reaches(self, x: int) -> bool:
        """Whether x is a known run, or lies between runs that decide it."""
        if x in self.known:
            return True
        near = self._near(x)
        return len(near) > self.degree and min(near) < x < max(near) and not self._begins(near)

    def sizes(self, x: int, gpu: Gpu) -> list[int]:
        """Bytes of every storage on this GPU."""
        near = self._near(x)
        runs = [self.known[k] for k in near]
        needs = runs[-1].trace.meter.needs
        if len(near) <= self.degree and x not in self.known:  # in proportion to what is not the model's
            run, size = runs[-1], near[-1]
            grow = ("saved for backward", "inputs", "key/value cache")
            constant = {k for k, kind in run.kinds.items() if kind not in grow}
            bytes_ = [r.bytes for r in run.trace.meter.records]
            return [b if k in constant else b * x // size for k, b in enumerate(bytes_)]
        found = _polynomial(near, [[r.bytes for r in run.trace.meter.records] for run in runs], x)
        for key, need in needs.items():
            sizes = _polynomial(near, [[*run.trace.meter.needs[key].sizes] for run in runs], x)
            found[key] = need._replace(sizes=tuple(sizes)).bytes(gpu)
        return found

    def work(self, x: int) -> list[Work]:
        """What the host and the device do."""
        near = self._near(x)
        works = [self.known[k].trace.work for k in near]
        flops = _polynomial(near, [[int(w.flops) for w in work] for work in works], x)
        moved = _polynomial(near, [[int(w.bytes) for w in work] for work in works], x)
        return [w._replace(flops=f, bytes=b) for w, f, b in zip(works[-1], flops, moved)]

    def _near(self, x: int) -> list[int]:
        """The known sizes that decide x: itself, or the nearest that run alike, with one above if there is one."""
        if x in self.known:
            return [x]
        above = sorted(k for k in self.known if k > x)[: self.degree]
        first = above[0] if above else max(self.known)
        alike = [k for k in self.known if self._alike(self.known[k], self.known[first])]
        nearest = sorted(alike, key=lambda k: abs(k - x))
        chosen = [first, *(k for k in nearest if k != first and (k < x or not above or self.degree > 1))]
        return sorted(chosen[: self.degree + 1])

    @staticmethod
    def _alike(a: Run, b: Run) -> bool:
        same = a.trace.meter.events == b.trace.meter.events and len(a.trace.work) == len(b.trace.work)
        return same and a.trace.meter.needs.keys() == b.trace.meter.needs.keys()

    def _begins(self, near: list[int]) -> bool:
        """Whether something is needed from some size on, which no polynomial tells."""
        needs = self.known[near[-1]].trace.meter.needs
        columns = zip(*(self.known[k].trace.meter.records for k in near))
        return any(
            len({r.bytes > 0 for r in column}) > 1 for k, column in enumerate(columns) if k not in needs
        )


def _polynomial(points: list[int], values: list[list[int]], x: int) -> list[int]:
    """Values at x of the polynomials through the values at the points."""
    if len(points) == 1:
        return values[0]
    total = torch.zeros(len(values[0]), dtype=torch.float64)
    for i, a in enumerate(points):
        weight = prod((x - b) / (a - b) for j, b in enumerate(points) if j != i)
        total += weight * torch.tensor(values[i], dtype=torch.float64)
    return total.round().long().tolist()


def largest_of(
    runs: Runs, budget: int, gpu: Gpu, ranks: int = 1, expandable: bool = False, limit: int = MAX_BATCH
) -> int:
    """The largest size up to the limit whose peak is at most the budget; 0 if none fits."""
    if not limit:
        return 0
    if not runs.known:
        runs.at(1)

    def peak(x: int) -> int:
        return runs.peak(x, gpu, ranks, expandable)

    for _ in range(6):
        x = largest(peak, budget, limit)
        if x <= 1 or runs.reaches(x):
            return x
        # A little above what is likely the largest, so that the next estimate lies between two runs.
        beyond = x if len(runs.known) == 1 else x // 8
        runs.at(min(x + beyond, limit) if x > max(runs.known) else x)
    while x and runs.at(x) and peak(x) > budget:  # exactly, where the run is known
        x -= max(1, x // 200)
    return x


def largest(peak: Callable[[int], int], budget: int, limit: int = NO_LIMIT) -> int:
    """The largest size up to `limit` whose peak is at most the budget, for a peak that grows with the size."""
    low, low_peak, size = 0, 0, 1
    high, high_peak = limit + 1, 0
    while high_peak <= budget and low < limit:  # an upper bound, by what the last size leaves free
        used = peak(size)
        if used > budget:
            high, high_peak = size, used
            break
        low, low_peak = size, used
        size = min(limit, low * min(64, max(2, 2 * budget // max(used, 1))))
    halve = False
    while high_peak > budget and high - low > 1:  # where the peak is a line, one or two steps suffice
        share = 0.5 if halve else (budget - low_peak) / (high_peak - low_peak)
        size = min(max(low + int((high - low) * share), low + 1), high - 1)
        used, before = peak(size), high - low
        if used <= budget:
            low, low_peak = size, used
        else:
            high, high_peak = size, used
        halve = high - low > before // 4
    return low


# -- declarations -------------------------------------------------------------------------------------------------


def declared_inputs(declared: Any, size: Size, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Inputs of the right shapes: ids, vectors or pixels; where a model has a context, that too."""

    def sequence(part: Any, length: int, width: int | None = None) -> Tensor:
        if isinstance(part, spec.Embedding) or getattr(part, "embedding", None) is not None:
            return torch.zeros(size.batch, length, dtype=torch.long)
        shape = (size.batch, length, part.d_model if width is None else width)
        return torch.empty(shape, dtype=dtype, device="meta")

    match declared:
        case spec.EncoderDecoder():
            return sequence(declared.encoder, size.m), sequence(declared.decoder, size.n)
        case spec.Recurrent():
            return tuple(torch.zeros(size.batch, length, dtype=torch.long) for length in (size.m, size.n))
        case spec.Vision():
            return (torch.empty(size.batch, declared.channels, *declared.image, dtype=dtype, device="meta"),)
    given = [sequence(declared, size.n)]
    inner = getattr(declared, "block", declared)
    cross = inner if isinstance(inner, spec.Attention) else getattr(inner, "cross", None)
    if cross is not None and (cross is not declared or cross.d_context is not None):
        given.append(sequence(cross, size.m, cross.sizes.d_context))
    return tuple(given)


def declared_targets(declared: Any, size: Size) -> Tensor | None:
    """Class or token ids, if the model has a head that scores them."""
    declared = declared.decoder if isinstance(declared, spec.EncoderDecoder) else declared
    match getattr(declared, "head", None):
        case spec.ClassifierHead():
            return torch.zeros(size.batch, dtype=torch.long)
        case spec.LanguageHead() | spec.MaskedHead():
            return torch.zeros(size.batch * size.n, dtype=torch.long)
    return None


# -- Hugging Face -------------------------------------------------------------------------------------------------


def is_config(model: Any) -> bool:
    return hasattr(model, "model_type") and hasattr(model, "to_dict") and not isinstance(model, nn.Module)


def build(config: Any) -> nn.Module:
    """The model of a configuration on meta tensors, of the architecture that it names if any."""
    try:
        import transformers
    except ModuleNotFoundError as missing:
        raise SpecError(
            "a Hugging Face configuration needs transformers: pip install 'regard[huggingface]'"
        ) from missing
    name = (getattr(config, "architectures", None) or [None])[0]
    kind = getattr(transformers, name, None) if name else None
    if name and kind is None:
        raise SpecError(
            f"transformers {transformers.__version__} has no {name}: upgrade it, or leave architectures out of the "
            f"configuration"
        )
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config) if kind is None else kind(config)
    return model.eval()


def generated_inputs(model: nn.Module, size: Size, labels: bool = False) -> dict[str, Tensor]:
    """Inputs of the right shapes: pixels, sound or token ids; for an encoder-decoder source and target ids.

    labels: also what the model's own loss compares with, where it has one.
    """
    config: Any = model.config
    main, name, batch = getattr(model, "main_input_name", "input_ids"), type(model).__name__, size.batch
    if main == "pixel_values" and not hasattr(config, "vocab_size"):
        given = {main: torch.empty(batch, config.num_channels, _side(config), _side(config), device="meta")}
        return given | ({"labels": _ids(batch)} if labels and name.endswith(CLASSIFIERS) else {})
    if main == "input_values":
        return {main: torch.empty(batch, size.n, device="meta")}
    encodes = bool(getattr(config, "is_encoder_decoder", False))
    given = {"input_ids": _ids(batch, size.m if encodes else size.n)}
    scored = labels and name.endswith(HEADS)
    if scored:
        given["labels"] = _ids(batch, size.n)
    elif labels and name.endswith(CLASSIFIERS):
        given["labels"] = _ids(batch)
    if encodes and not scored and "decoder_input_ids" in inspect.signature(model.forward).parameters:
        given["decoder_input_ids"] = _ids(batch, size.n)
    return given


def _side(config: Any) -> int:
    return config.image_size if isinstance(config.image_size, int) else config.image_size[0]


def _ids(*size: int) -> Tensor:
    return torch.ones(size, dtype=torch.long)
