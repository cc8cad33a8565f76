"""From attention to a convolution: heads whose weights are a shift or a short kernel, within a tolerance."""

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from math import prod
from statistics import median
from typing import Any

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn

from .. import spec
from ..errors import ShapeError, SpecError
from ..nn.attention import MultiHeadAttention
from ..pattern import Pattern
from ..position import shaw
from .certificate import Certificate, Head
from .geometry import Geometry, Offset
from .lifting import Lifted
from .lowered import Kernels, Lowered, convolution
from .shifts import BORDERS, kernel_table, nearest_kernel, nearest_shifts, shift_distance, total_variation
from .split_heads import SplitHeads

ROUNDING = 1e-12  # of the float64 weights from which a bound for all inputs is computed


def lower(
    attention: nn.Module,
    data: Float[Tensor, "b ..."] | None = None,
    *,
    tolerance: int | float = 0.05,
    size: int | Offset | None = None,
    kernel: int = 7,
    pattern: Pattern | Tensor | None = None,
) -> Lowered:
    """The attention with every head that is a shift, or a short kernel, replaced by one convolution.

    A head is replaced if its weights are within `tolerance` of it in total variation: at every query and for all
    inputs if the scores depend only on positions; if they depend on content, in the mean over the queries of `data`
    (b, n, d_model). The other heads stay attention. `certificate` of the result has the kind of each head, its worst
    and mean distance, the error and the speed-up.

    size: of the sequence or grid, if neither the position nor the data determines it. kernel: the largest kernel size
    along an axis. pattern: what the attention is called with, in addition to its own. tolerance=0 is exact.
    """
    if not 0 <= tolerance < 1:
        raise SpecError(f"tolerance={tolerance} is not a total variation distance in [0, 1)")
    if isinstance(attention, Lifted):
        return _lower_lifted(attention, data, tolerance)
    if not isinstance(attention, MultiHeadAttention):
        raise SpecError(
            f"{type(attention).__name__} cannot be lowered; pass a layer built by rg.Attention or returned by "
            f"rg.lift, or use lower_all for all layers of a model"
        )
    return _lower_heads(attention, data, tolerance, size, kernel, pattern)


def lower_all(
    model: nn.Module, data: Float[Tensor, "b ..."], *, tolerance: int | float = 0.05, kernel: int = 7
) -> tuple[nn.Module, dict[str, Certificate]]:
    """A copy of the model with each self-attention lowered on its inputs for `data`, and the certificates by path.

    A layer that is called with more than its input and a pattern (a context, a bias, a cache) is not changed.
    """
    model = copy.deepcopy(model).eval()
    certificates = {}
    for path, (x, pattern) in _inputs(model, data).items():
        parent, _, name = path.rpartition(".")
        lowered = lower(model.get_submodule(path), x, tolerance=tolerance, kernel=kernel, pattern=pattern)
        setattr(model.get_submodule(parent), name, lowered)
        certificates[path] = lowered.certificate
    return model, certificates


@torch.no_grad()
def _inputs(model: nn.Module, data: Tensor) -> dict[str, tuple[Tensor, Any]]:
    """The input and the pattern of each self-attention."""
    inputs, hooks = {}, []

    def hook_for(path: str) -> Callable:
        def record(_module, args, kwargs):
            others = [*args[1:], *(value for name, value in kwargs.items() if name != "pattern")]
            if all(value is None or value is False for value in others):
                inputs[path] = (args[0], kwargs.get("pattern"))

        return record

    for path, part in model.named_modules():
        if isinstance(part, MultiHeadAttention):
            hooks.append(part.register_forward_pre_hook(hook_for(path), with_kwargs=True))
    try:
        model(data)
    finally:
        for hook in hooks:
            hook.remove()
    return inputs


def _lower_lifted(lifted: Lifted, data: Tensor | None, tolerance: int | float) -> Lowered:
    """Every head at its nearest integer offset; its weight elsewhere is bounded for every input (`leak`)."""
    geometry, missed = lifted.geometry, lifted.leak().tolist()
    spans = [geometry.span(axis) for axis in range(geometry.axes)]
    nearest = [tuple(map(int, o)) for o in lifted.center.detach().round().tolist()]
    in_window = [all(lo <= o <= hi for o, (lo, hi) in zip(offset, spans)) for offset in nearest]
    fixed = [h for h, t in enumerate(missed) if t <= tolerance and in_window[h]]
    others = [h for h in range(lifted.heads) if h not in fixed]
    taps, bias = lifted.taps.detach(), lifted.w_o.bias
    conv = rest = None
    if fixed:
        window = Geometry(
            tuple(nearest[h] for h in fixed), geometry.stride, geometry.border, geometry.mode, tuple(spans)
        )
        conv = convolution(window, taps[fixed], None if bias is None else bias.detach(), lifted.groups)
    if others:
        rest = _other_lifted(lifted, others, tuple(spans), keep_bias=not fixed)
    heads = tuple(
        Head(h, "shift" if h in fixed else "attention", nearest[h], int(h in fixed), missed[h], missed[h])
        for h in range(lifted.heads)
    )
    certified = _certified(taps[fixed], [missed[h] for h in fixed])
    facts = Certificate(heads, tolerance, None, geometry.mode, certified)
    if data is None:
        sizes = [max(8, 2 * (high - low + 1)) for low, high in spans]
        data = _normal(lifted.w_v.weight, 2, lifted.w_v.in_features, *sizes)
        facts = replace(facts, measured_on="standard normal inputs")
    return _with_certificate(Lowered(conv, None, rest, None), lifted, data, facts)


def _other_lifted(lifted: Lifted, heads: list[int], window: Any, keep_bias: bool) -> Lifted:
    geometry = lifted.geometry
    geometry = Geometry(
        tuple(geometry.offsets[h] for h in heads), geometry.stride, geometry.border, geometry.mode, window
    )
    bias = lifted.w_o.bias if keep_bias else None
    rest = Lifted(geometry, lifted.taps.detach()[heads], bias, sharpness=None if lifted.hard else 1.0)
    with torch.no_grad():
        rest.center.copy_(lifted.center[heads])
        rest.alpha.copy_(lifted.alpha[heads])
    return rest


def _lower_heads(
    attention: MultiHeadAttention,
    data: Tensor | None,
    tolerance: int | float,
    size: int | Offset | None,
    kernel: int,
    pattern: Pattern | Tensor | None,
) -> Lowered:
    content_free = _is_content_free(attention.spec)
    _check_declaration(attention.spec, data, tolerance, content_free)
    grid = _grid(attention.spec, data, size)
    weights = _weights(attention, data, grid, pattern, content_free)
    slack = ROUNDING if content_free else 0.0
    split = SplitHeads(attention)
    reduce = torch.max if content_free else torch.mean
    heads, kernels, border = _classify_heads(
        weights, grid, tolerance + slack, kernel, reduce, split.has_value_bias
    )
    shifts = [h.head for h in heads if h.kind == "shift"]
    others = [h.head for h in heads if h.kind == "attention"]
    bias = split.bias(shifts)
    conv = blur = None
    if shifts:
        conv = convolution(_same_size([heads[h].offset for h in shifts], border), split.taps[shifts], bias)
    if kernels:
        blur = _kernels(split, kernels, None if shifts else bias)
    rest = split.keep(others, grid, keep_bias=not (shifts or kernels)) if others else None
    fixed = [*shifts, *kernels]
    certified = _certified(split.taps[fixed], [heads[h].worst for h in fixed]) if content_free else None
    facts = Certificate(heads, tolerance, grid, border, certified)
    if data is None:
        data = _normal(attention.w_v.weight, 2, prod(grid), attention.spec.d_model)
        facts = replace(facts, measured_on="standard normal inputs")
    return _with_certificate(
        Lowered(conv, blur, rest, grid, pattern, others), attention, data, facts, pattern=pattern
    )


def _is_content_free(declared: spec.Attention) -> bool:
    """Whether the weights do not depend on the content."""
    return declared.score == "position" or declared.factor == 0


def _check_declaration(
    declared: spec.Attention, data: Tensor | None, tolerance: int | float, content_free: bool
) -> None:
    if isinstance(declared.position, shaw) and declared.position.values:
        raise SpecError(
            f"{declared.position!r} adds vectors to the values, which a convolution cannot express; use values=False"
        )
    if declared.d_context not in (None, declared.d_model):
        raise SpecError(
            f"d_context={declared.d_context} differs from d_model={declared.d_model}; "
            f"only self-attention can be lowered"
        )
    if content_free:
        return
    if declared.position is None and data is None:
        raise SpecError(
            "the scores of an attention without a position encoding depend only on content; declare one, for example "
            "position=rg.quadratic(), or pass data= if positions are added to its input"
        )
    if data is None:
        raise SpecError(
            f"score={declared.score!r} depends on content, so no distance holds for all inputs; pass data= to "
            f"measure it, or declare score='position'"
        )
    if tolerance == 0:
        raise SpecError(
            f"tolerance=0 is not possible with score={declared.score!r}, which depends on content; use a positive "
            f"tolerance, or declare score='position'"
        )


def _grid(declared: spec.Attention, data: Tensor | None, size: int | Offset | None) -> Offset:
    own = getattr(declared.position, "grid", None)
    if own is not None:
        return own
    if size is None and data is None:
        raise SpecError(
            f"the length of the sequence does not follow from position={declared.position!r}; pass size=n"
        )
    if size is None:
        assert data is not None
        return (data.shape[1],)
    return (size,) if isinstance(size, int) else tuple(size)


@torch.no_grad()
def _weights(
    attention: MultiHeadAttention,
    data: Tensor | None,
    grid: Offset,
    pattern: Pattern | Tensor | None,
    content_free: bool,
) -> Float[Tensor, "b h n n"]:
    """The weights: in float64 and for all inputs if they do not depend on content, else on the data."""
    n = prod(grid)
    if data is not None and data.shape[1] != n:
        raise ShapeError(f"data has {data.shape[1]} positions on a grid of {grid}; expected {n}")
    attention = copy.deepcopy(attention).eval()
    if content_free or data is None:
        attention = attention.double()
        data = attention.w_v.weight.new_zeros(1, n, attention.spec.d_model)
    return attention(data, pattern=pattern, return_weights=True)[1]


def _classify_heads(
    weights: Float[Tensor, "b h n n"],
    grid: Offset,
    tolerance: float,
    max_kernel: int,
    reduce: Callable[[Tensor], Tensor],
    value_bias: bool,
) -> tuple[tuple[Head, ...], dict[int, tuple[tuple[Offset, ...], Tensor]], str]:
    """The kind of each head: a shift if one is near enough, else the smallest kernel that is, else attention.

    reduce: the distance of a head from those of its rows: the largest or the mean.
    """
    near = nearest_shifts(weights, grid)
    distances = {border: _shift_distances(weights, grid, near.offset, border) for border in BORDERS}
    # One convolution has one border: the one with the most shifts. With zero padding W_V's bias would still be added.
    border = max(
        BORDERS, key=lambda border: sum(bool(reduce(rows) <= tolerance) for rows in distances[border])
    )
    border = "replicate" if value_bias else border
    heads, kernels = [], {}
    for h, offset in enumerate(near.offset):
        rows = distances[border][h]
        kind, taps = ("shift", 1) if reduce(rows) <= tolerance else ("attention", 0)
        for side in range(2, max_kernel + 1) if kind == "attention" else ():
            offsets, shares = nearest_kernel(weights[:, h], grid, offset, side)
            gap = total_variation(weights[:, h], kernel_table(grid, offsets, shares))
            if reduce(gap) <= tolerance:
                kind, taps, rows, kernels[h] = "kernel", len(offsets), gap, (offsets, shares)
                break
        heads.append(Head(h, kind, offset, taps, rows.max().item(), rows.mean().item()))
    return tuple(heads), kernels, border


def _shift_distances(
    weights: Float[Tensor, "b h n n"], grid: Offset, shifts: tuple[Offset, ...], border: str
) -> list[Float[Tensor, "b n"]]:
    return [shift_distance(weights[:, h], grid, offset, border) for h, offset in enumerate(shifts)]


def _same_size(offsets: list[Offset], mode: str) -> Geometry:
    """The geometry with these offsets and one output per input."""
    spans = tuple((min(0, *along), max(0, *along)) for along in zip(*offsets))
    border = tuple((-low, high) for low, high in spans)
    return Geometry(tuple(offsets), (1,) * len(spans), border, mode, spans)


def _kernels(
    split: SplitHeads, kernels: dict[int, tuple[tuple[Offset, ...], Tensor]], bias: Tensor | None
) -> Kernels:
    """One box that contains all kernels, with one kernel per head."""
    heads = list(kernels)
    all_offsets = [offset for offsets, _ in kernels.values() for offset in offsets]
    low = tuple(map(min, zip(*all_offsets)))
    sides = [high - lo + 1 for high, lo in zip(map(max, zip(*all_offsets)), low)]
    box = torch.zeros(len(heads), *sides, dtype=torch.float64)
    for row, (offsets, shares) in zip(box, kernels.values()):
        for offset, share in zip(offsets, shares.tolist()):
            row[tuple(o - lo for o, lo in zip(offset, low))] = share
    values = None if split.value_bias is None else split.value_bias[heads]
    return Kernels(split.into[heads], split.out[heads], values, bias, box.to(split.into), low)


def _certified(taps: Float[Tensor, "h o c"], distances: list[float]) -> float:
    """Σ_h TV_h Σ_c ∣W_h∣ of the worst output: times the range of the input, a bound on the error."""
    if not distances:
        return 0.0
    missed = torch.tensor(distances, dtype=torch.float64, device=taps.device)
    return float(einsum(taps.double().abs(), missed, "h o c, h -> o").max())


@torch.no_grad()
def _with_certificate(
    lowered: Lowered, original: nn.Module, data: Tensor, certificate: Certificate, **options: Any
) -> Lowered:
    """The lowered module with its certificate, completed by the error and the speed-up on the data."""
    old, new = copy.deepcopy(original).eval(), copy.deepcopy(lowered).eval()
    error = (new(data, **options) - old(data, **options)).abs().max().item()
    few = data[:8]
    ratio = _time(lambda: old(few, **options)) / _time(lambda: new(few, **options))
    lowered.certificate = replace(certificate, measured=error, speed_up=ratio)
    return lowered.train(original.training)


def _time(run: Callable[[], Any], rounds: int = 3) -> float:
    run()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times)


def _normal(like: Tensor, *shape: int) -> Tensor:
    rng = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=rng).to(like)
