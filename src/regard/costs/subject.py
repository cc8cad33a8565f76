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
from ..errors import RegardError, SpecError
from ..nested import map_leaves, name_of, required
from ..nn.example_inputs import example_inputs, example_targets
from ..spec.base import require_known, require_positive
from .memory.runs import Run, Setting, prompt, run
from .memory.step import Optimizer, TrainingStep, autocast_region, loss_of, prepare, training_of
from .sizes import Request, Size
from .trace.attention import H200, Gpu
from .trace.tracer import Work

HEADS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ForMaskedLM", "ForPreTraining", "MTModel")
# transformers' tables of model classes, in the order in which a configuration without architectures is looked up.
TABLES = ["SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT", "CAUSAL_LM", "IMAGE_CLASSIFICATION"]
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

    declared = property(lambda self: isinstance(self.model, spec.Spec))

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
        if self.declared or not reads_pixels(self.model):
            return getattr(self.model, "tokens", None)
        config: Any = self.module.config
        return (_side(config.image_size) // _side(getattr(config, "patch_size", 1))) ** 2

    @property
    def max_n(self) -> int:
        """The number of positions of a learned table, if there is one."""
        if not self.declared:
            return getattr(self.module.config, "max_position_embeddings", None) or NO_LIMIT
        stack = getattr(self.model, "decoder", self.model)
        position = getattr(getattr(stack, "embedding", None), "position", None)
        table = None if getattr(position, "beyond", "") == "resample" else getattr(position, "table", None)
        return table if isinstance(table, int) else NO_LIMIT

    def setting(self, size: Size, training: TrainingStep | None = None, **where: Any) -> Setting:
        """The model with inputs of this size. where: dtype, device, gpu."""
        if self.declared:
            targets = None if training is None else example_targets(self.model, size.n, size.batch)
            inputs = example_inputs(self.model, *size, where.get("dtype", torch.float32))
            given: tuple[tuple, dict] = (inputs, {})
        else:
            labels = training is not None and training.loss is None
            targets, given = None, ((), generated_inputs(self.module, size, labels))
        return Setting(self.module, given, targets, training=training, evaluate=training is None, **where)

    def setting_of(self, request: Request, size: Size | None = None) -> Setting:
        """The model as requested, or at another size."""
        where = {"dtype": request.dtype, "device": request.device}
        return self.setting(size or request.size, training_of(request.train), **where)

    def fits(self, request: Request, budget: int, vary: str = "batch") -> int:
        """The largest batch, or n (with m, if the two are equal), whose peak is at most `budget` bytes; 0 if none."""
        require_known("vary", vary, ("batch", "n"))
        require_positive("budget", budget)
        if vary == "n" and self.tokens is not None:
            raise SpecError("vary='n': the image size determines the number of patches; use vary='batch'")
        n, m, batch = request.size

        def at(x: int) -> Run:
            size = Size(n, m, x) if vary == "batch" else Size(x, x if m == n else m, batch)
            return run(self.setting_of(request, size))

        if vary == "n":
            return largest(lambda x: at(x).usage().peak, budget, self.max_n)
        runs = Runs(at, 1)
        return runs.largest(lambda x: runs.peak(x, H200), budget, MAX_BATCH)


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

    def largest(self, peak: Callable[[int], int], budget: int, limit: int, check: bool = False) -> int:
        """The largest size up to the limit whose peak is at most the budget; 0 if none fits. check: trace it too."""
        if not limit:
            return 0
        if not self.known:
            self.at(1)
        for _ in range(6):
            x = largest(peak, budget, limit)
            if x <= 1 or self.reaches(x):
                break
            # A little above what is likely the largest, so that the next estimate lies between two runs.
            beyond = x if len(self.known) == 1 else x // 8
            self.at(min(x + beyond, limit) if x > max(self.known) else x)
        else:
            check = True
        while check and x and self.at(x) and peak(x) > budget:  # the peak of a known run is exact
            x -= max(1, x // 200)
        return x

    def reaches(self, x: int) -> bool:
        """Whether x is a known run, or lies between runs that decide it."""
        if x in self.known:
            return True
        near = self._near(x)
        if len(near) <= self.degree or not min(near) < x < max(near):
            return False
        # No polynomial describes a storage that is needed only from some size on.
        meters = [self.known[k].trace.meter for k in near]
        columns = enumerate(zip(*([r.bytes > 0 for r in meter.records] for meter in meters)))
        return all(len(set(column)) == 1 or k in meters[-1].needs for k, column in columns)

    def sizes(self, x: int, gpu: Gpu) -> list[int]:
        """Bytes of every storage on this GPU."""
        near = self._near(x)
        meters = [self.known[k].trace.meter for k in near]
        sizes = [[r.bytes for r in meter.records] for meter in meters]
        if len(near) <= self.degree and x not in self.known:  # all grow in proportion but the model's own
            grow, kinds = ("saved for backward", "inputs", "key/value cache"), self.known[near[-1]].kinds
            constant = {k for k, kind in kinds.items() if kind not in grow}
            return [b if k in constant else b * x // near[-1] for k, b in enumerate(sizes[-1])]
        found = _polynomial(near, sizes, x)
        for key, need in meters[-1].needs.items():
            arguments = _polynomial(near, [[*meter.needs[key].sizes] for meter in meters], x)
            found[key] = need._replace(sizes=tuple(arguments)).bytes(gpu)
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

        def order(k: int) -> tuple:
            trace = self.known[k].trace
            return trace.meter.events, trace.meter.needs.keys(), len(trace.work)

        above = [k for k in self.known if k > x]
        first = min(above) if above else max(self.known)
        others = sorted((k for k in self.known if k != first), key=lambda k: abs(k - x))
        alike = [k for k in others if (k < x or not above or self.degree > 1) and order(k) == order(first)]
        return sorted([first, *alike[: self.degree]])


def _polynomial(points: list[int], values: list[list[int]], x: int) -> list[int]:
    """Values at x of the polynomials through the values at the points."""
    if len(points) == 1:
        return values[0]
    weights = [prod((x - b) / (a - b) for b in points if b != a) for a in points]
    columns = torch.tensor(values, dtype=torch.float64)
    return (torch.tensor(weights, dtype=torch.float64) @ columns).round().long().tolist()


def largest(peak: Callable[[int], int], budget: int, limit: int = NO_LIMIT) -> int:
    """The largest size up to `limit` whose peak is at most the budget, for a peak that grows with the size."""
    low, low_peak, high, high_peak, halve = 0, 0, limit + 1, 0, False
    while high - low > 1:
        if not high_peak:  # an upper bound, by what the last size leaves free
            size = min(limit, max(1, low * min(64, max(2, 2 * budget // max(low_peak, 1)))))
        else:  # where the peak is a line, one or two steps suffice
            share = 0.5 if halve else (budget - low_peak) / (high_peak - low_peak)
            size = min(max(low + int((high - low) * share), low + 1), high - 1)
        used, before, bounded = peak(size), high - low, bool(high_peak)
        if used <= budget:
            low, low_peak = size, used
        else:
            high, high_peak = size, used
        halve = bounded and high - low > before // 4
    return low


def built(build: Any) -> Any:
    """What a function without arguments returns, on meta tensors; a model, a configuration or a name as it is."""
    if isinstance(build, spec.Spec | nn.Module) or is_config(build) or not callable(build):
        return build
    needed = required(build)
    if needed:
        raise SpecError(
            f"{name_of(build)} needs {', '.join(needed)}: pass example inputs, rg.cost(f, *inputs), or a function "
            f"without arguments that returns a model"
        )
    try:
        with torch.device("meta"):
            return build()
    except RegardError:
        raise
    except Exception as e:
        raise SpecError(f"{name_of(build)}() fails on meta tensors: {type(e).__name__}: {e}") from e


# -- Hugging Face -------------------------------------------------------------------------------------------------


def is_config(model: Any) -> bool:
    return hasattr(model, "model_type") and hasattr(model, "to_dict") and not isinstance(model, nn.Module)


def build(config: Any) -> nn.Module:
    """The model of a configuration on meta tensors: of the class that it names, else that of its family."""
    import transformers  # which made the configuration

    name = (getattr(config, "architectures", None) or [None])[0]
    kind = getattr(transformers, name, None) if name else _head_class(config, transformers)
    if kind is None:
        raise SpecError(
            f"transformers {transformers.__version__} has no {name}: upgrade it, or leave architectures out of the "
            f"configuration"
        )
    with torch.device("meta"):
        return kind(config).eval()


def _head_class(config: Any, transformers: Any) -> Any:
    """The language model or image classifier of this family, or its base model if it has neither."""
    tables = ["CAUSAL_LM", *TABLES] if getattr(config, "is_decoder", False) else TABLES
    for name in tables:
        table = getattr(transformers, f"MODEL_FOR_{name}_MAPPING", {})
        if type(config) in table:
            kind = table[type(config)]
            return kind[0] if isinstance(kind, tuple) else kind
    return transformers.AutoModel.from_config


def class_note(model: Any, built: Any) -> tuple[str, ...]:
    """Which class a configuration became."""
    text = f"the configuration is built as {name_of(built)}; config.architectures = [...] names another class"
    return (text,) if is_config(model) else ()


def generated_inputs(model: nn.Module, size: Size, labels: bool = False) -> dict[str, Tensor]:
    """Inputs of the right shapes: pixels, sound or token ids. labels: also what the model's own loss compares."""
    config: Any = model.config
    main, name, batch = getattr(model, "main_input_name", "input_ids"), type(model).__name__, size.batch
    if main == "input_values":
        return {main: torch.empty(batch, size.n, device="meta")}
    classes = {"labels": _ids(batch)} if labels and name.endswith(CLASSIFIERS) else {}
    if reads_pixels(model):
        side = _side(config.image_size)
        return {main: torch.empty(batch, config.num_channels, side, side, device="meta")} | classes
    encodes = bool(getattr(config, "is_encoder_decoder", False))
    given = {"input_ids": _ids(batch, size.m if encodes else size.n)}
    if labels and name.endswith(HEADS):
        classes = {"labels": _ids(batch, size.n)}
        # The model shifts the labels to get the decoder's input, if it knows the first token.
        encodes = encodes and getattr(config, "decoder_start_token_id", None) is None
    if encodes and "decoder_input_ids" in inspect.signature(model.forward).parameters:
        given["decoder_input_ids"] = _ids(batch, size.n)
    return given | classes


def reads_pixels(model: Any) -> bool:
    return getattr(model, "main_input_name", "") == "pixel_values" and not hasattr(model.config, "vocab_size")


def _side(size: Any) -> int:
    return size if isinstance(size, int) else size[0]


def _ids(*size: int) -> Tensor:
    return torch.ones(size, dtype=torch.long)


# -- the same step on real tensors, which the code that `rg.plan` prints calls -------------------------------------


def example(model: Any, n: int, batch: int, device: str = "", m: int | None = None) -> tuple[Any, Any]:
    """Inputs of a declaration or a Hugging Face model on the device (a GPU if there is one), and any targets."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    subject = Subject(model)
    length = subject.tokens or n
    setting = subject.setting(Size(length, m or length, batch), TrainingStep())

    def real(x: Any) -> Any:
        is_float = x is not None and x.is_floating_point()
        return torch.randn_like(x, device=device) if is_float else x if x is None else x.to(device)

    (args, named), targets = map_leaves(real, (setting.given, setting.targets))
    return named or args, targets


def call(model: nn.Module, inputs: Any) -> Any:
    """The output for positional or named inputs."""
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def generate_one(model: nn.Module, inputs: Any) -> None:
    """A prompt of all tokens but the last, and the last one with the cache of keys and values."""
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    with torch.no_grad():
        prompt(model, args, kwargs)()


def join_ranks() -> None:
    """Join the processes that torchrun started, each on a device of its own."""
    cuda = torch.cuda.is_available()
    torch.distributed.init_process_group("nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(torch.distributed.get_rank() % torch.cuda.device_count())


def shard(model: nn.Module) -> None:
    """FSDP2: every module of a list of modules by itself, then the rest."""
    from torch.distributed.fsdp import fully_shard

    blocks = [block for inner in model.modules() if isinstance(inner, nn.ModuleList) for block in inner]
    for module in (*blocks, model):
        fully_shard(module)


def stepping(model: nn.Module, inputs: Any, targets: Any, training: TrainingStep) -> Callable[[], float]:
    """() → the loss of one training step with these options."""
    prepare(model, training)
    device = next(model.parameters()).device.type
    optimizer = Optimizer(model, training, device)

    def step() -> float:
        for _ in range(training.accumulate):
            with autocast_region(training, device):
                loss = loss_of(call(model, inputs), targets, training)
            loss.backward()
        optimizer.step()
        model.zero_grad()
        return float(loss.detach())

    return step
