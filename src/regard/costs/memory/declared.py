"""The memory of a declared model: its module is built on meta tensors and run like any other."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ... import spec
from ...errors import SpecError
from ..sizes import Request, Symbols
from .report import Memory, Setting, traced
from .step import TrainingStep, training_of

WITHOUT_WIDTH = (spec.Mixing,)


def memory_of(request: Request) -> Memory | None:
    """The memory of a declared model at these sizes; None for declarations that are no module by themselves."""
    if isinstance(request.spec, WITHOUT_WIDTH):
        return None
    return _memory(replace(request, train=training_of(request.train) or False))


@lru_cache(maxsize=32)
def _memory(request: Request) -> Memory:
    training = request.train or None
    memory = _traced(request, None)
    memory = replace(
        memory,
        one_attention=_or_zero(one_attention, request) * request.itemsize,
        kv_cache=_or_zero(kv_cache, request),
        formulas=lambda: formulas(request),
    )
    if isinstance(training, TrainingStep):
        step = _traced(request, training)
        memory = replace(
            step,
            one_attention=memory.one_attention,
            kv_cache=memory.kv_cache,
            inference_peak=memory.inference_peak,
            saved_by_method=_or_zero(lambda r: attention_cores(r), request) or {},
            formulas=memory.formulas,
        )
    return memory


def _traced(request: Request, training: TrainingStep | None) -> Memory:
    module = module_of(request.spec, None if training is None else training.checkpointing)
    module.train(training is not None)
    given = example_inputs(request)
    targets = None if training is None else targets_of(request)
    setting = Setting((given, {}), targets, request.dtype, training, request.device)
    return traced(module, setting)[2]


def _or_zero(read: Callable[[Request], Any], request: Request) -> Any:
    """A fact of attention, for models that have one."""
    return (
        0 if isinstance(request.spec, spec.Recurrent | spec.Convolutional | spec.Embedding) else read(request)
    )


def module_of(declared: Any, checkpointing: bool | str | None) -> nn.Module:
    """The module on meta tensors, each block checkpointed or not, or as declared."""
    if checkpointing is not None:
        declared = with_checkpoint(declared, bool(checkpointing))
    with torch.device("meta"):
        return declared.build()


def with_checkpoint(declared: Any, on: bool) -> Any:
    """The same model with each block recomputed in the backward pass, or not."""
    match declared:
        case spec.EncoderDecoder():
            sides = {s: with_checkpoint(getattr(declared, s), on) for s in ("encoder", "decoder")}
            return replace(declared, **sides)
        case spec.Vision():
            return replace(declared, encoder=with_checkpoint(declared.encoder, on))
        case spec.Encoder() | spec.Decoder():
            return replace(declared, checkpoint=on)
    return declared


def example_inputs(request: Request, device: str = "cpu") -> tuple[Tensor, ...]:
    """Inputs of the right shapes: ids, vectors or pixels; where a model has a context, that too."""
    declared: Any = request.spec
    b = request.batch

    def sequence(part: Any, length: int, width: int | None = None) -> Tensor:
        if isinstance(part, spec.Embedding) or getattr(part, "embedding", None) is not None:
            return torch.zeros(b, length, dtype=torch.long, device=device)
        size = (b, length, part.d_model if width is None else width)
        return torch.empty(size, dtype=request.dtype, device="meta" if device == "cpu" else device)

    match declared:
        case spec.EncoderDecoder():
            return sequence(declared.encoder, request.m), sequence(declared.decoder, request.n)
        case spec.Vision():
            size = (b, declared.channels, *declared.image)
            return (torch.empty(size, dtype=request.dtype, device="meta" if device == "cpu" else device),)
    given = [sequence(declared, request.n)]
    inner = getattr(declared, "block", declared)
    cross = inner if isinstance(inner, spec.Attention) else getattr(inner, "cross", None)
    if cross is not None and (cross is not declared or cross.d_context is not None):
        given.append(sequence(cross, request.m, cross.sizes.d_context))
    return tuple(given)


def targets_of(request: Request) -> Tensor | None:
    """Class or token ids, if the model has a head that scores them."""
    declared: Any = request.spec
    declared = declared.decoder if isinstance(declared, spec.EncoderDecoder) else declared
    match getattr(declared, "head", None):
        case spec.ClassifierHead():
            return torch.zeros(request.batch, dtype=torch.long)
        case spec.LanguageHead() | spec.MaskedHead():
            return torch.zeros(request.batch * request.n, dtype=torch.long)
    return None


# -- what has a formula -------------------------------------------------------------------------------------------


def attention_of(declared: Any) -> spec.Attention:
    """The self-attention of a model's (last) stack."""
    while not isinstance(declared, spec.Attention):
        declared = getattr(declared, "decoder", None) or getattr(declared, "encoder", None) or declared
        declared = getattr(declared, "block", declared)
        declared = getattr(declared, "attention", declared)
    return declared


def one_attention(request: Request) -> int:
    """Values of one attention layer for one batch row: q, k, v, the weights, the outputs of the heads."""
    inner = attention_of(request.spec)
    s, n = inner.sizes, request.n
    m = request.m if inner is request.spec else n
    return s.heads * n * s.d_k + s.kv_heads * m * (s.d_k + s.d_v) + s.heads * n * m + s.heads * n * s.d_v


def kv_cache(request: Request) -> int:
    """Bytes of keys and values of every layer for n positions; with cross-attention also those of the context."""
    declared: Any = request.spec
    declared = declared.decoder if isinstance(declared, spec.EncoderDecoder) else declared
    declared = declared.encoder if isinstance(declared, spec.Vision) else declared
    block = getattr(declared, "block", declared)

    def one_row(a: spec.Attention, length: int) -> int:
        return a.sizes.kv_heads * length * (a.sizes.d_k + a.sizes.d_v)

    own = block if isinstance(block, spec.Attention) else block.attention
    cross = getattr(block, "cross", None)
    values = one_row(own, request.m if own is request.spec else request.n)
    values += 0 if cross is None else one_row(cross, request.m)
    return values * getattr(declared, "layers", 1) * request.batch * request.itemsize


def declared_rows(request: Request) -> list[tuple[str, int]]:
    """What is known of the memory without running anything: rows of `Memory.rows`."""
    if isinstance(request.spec, WITHOUT_WIDTH):
        return []
    one, cache = (_or_zero(f, request) for f in (one_attention, kv_cache))
    return Memory(0, one * request.itemsize, cache).rows()


def core_terms(b: Any, n: Any, m: Any, s: Any, layers: Any, size: int) -> dict[str, Any]:
    """Bytes that the self-attention cores save: q, k and v, and the weights, or the output and a log-sum-exp."""
    projected = s.heads * n * s.d_k + s.kv_heads * m * (s.d_k + s.d_v)
    stored = projected + s.heads * n * m
    return {
        "weights stored": layers * b * size * stored,
        "weights streamed": layers
        * b
        * (size * (projected + s.heads * n * s.d_v) + max(size, 4) * s.heads * n),
    }


def attention_cores(request: Request) -> dict[str, int]:
    """Bytes that the self-attention cores of the (last) stack save for the backward pass, by kind of kernel."""
    inner = attention_of(request.spec)
    m = request.m if inner is request.spec else request.n
    size = request.compute_dtype.itemsize
    return core_terms(request.batch, request.n, m, inner.sizes, layers_of(request.spec), size)


def formulas(request: Request) -> dict[str, Any]:
    """The same as sympy expressions in b, n, m, the widths and the number of layers."""
    reader, inner = Symbols(), attention_of(request.spec)
    n = reader.size("n", request.n)
    m = reader.size("m", request.m) if inner is request.spec and request.m != request.n else n
    layers = layers_of(request.spec)
    count = reader.size("layers", layers) if layers > 1 else 1
    b, size = reader.size("b", request.batch), request.compute_dtype.itemsize
    return {k: v.expand() for k, v in core_terms(b, n, m, reader.attention(inner), count, size).items()}


def layers_of(declared: Any) -> int:
    declared = declared.decoder if isinstance(declared, spec.EncoderDecoder) else declared
    declared = declared.encoder if isinstance(declared, spec.Vision) else declared
    return getattr(declared, "layers", 1)


# -- what fits ----------------------------------------------------------------------------------------------------


def peak_memory(request: Request) -> int:
    """Peak bytes: of a training step if `train` is set, else of inference."""
    memory = memory_of(request)
    if memory is None:
        raise SpecError(
            f"memory is not modeled for {type(request.spec).__name__}; use a model, a block or an attention"
        )
    return memory.training_peak or memory.inference_peak


def fits(request: Request, budget: int, vary: str = "batch") -> int:
    """The largest batch (or n, with `vary="n"`) whose peak memory is at most `budget` bytes; 0 if none fits.

    Found by interpolation and bisection, since memory grows with both. m follows n if the two are equal.
    """
    if vary not in ("batch", "n"):
        raise SpecError(f"vary={vary!r} is unknown; use 'batch' or 'n'")
    if budget < 1:
        raise SpecError(f"budget={budget} is not a positive number of bytes")
    if vary == "n" and isinstance(request.spec, spec.Vision):
        raise SpecError("vary='n': the image size determines the number of patches; use vary='batch'")

    def peak(size: int) -> int:
        if vary == "batch":
            return peak_memory(replace(request, batch=size))
        return peak_memory(replace(request, n=size, m=size if request.m == request.n else request.m))

    return largest(peak, budget, _max_length(request.spec) if vary == "n" else 1 << 30)


def largest(peak: Callable[[int], int], budget: int, limit: int = 1 << 30) -> int:
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


def _max_length(declared: Any) -> int:
    """The number of positions of a learned table, if there is one."""
    declared = declared.decoder if isinstance(declared, spec.EncoderDecoder) else declared
    position = getattr(getattr(declared, "embedding", None), "position", None)
    table = getattr(position, "table", None)
    return table if isinstance(table, int) and getattr(position, "beyond", "") != "resample" else 1 << 30
