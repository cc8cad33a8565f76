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
from .frame import Frame, Offset
from .lifting import Lifted
from .lowered import Kernels, Lowered, convolution
from .parts import Parts
from .shifts import BORDERS, kernel_table, nearest_kernel, nearest_shifts, shift_distance, total_variation

ROUNDING = 1e-12  # of weights in float64, which are what a bound for all inputs is made from


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

    A head is replaced where its weights are within `tolerance` of it in total variation: at every query and for all
    inputs where the scores are of position alone; where they depend on content, in the mean over the queries of the
    `data` (b, n, d_model). The rest stays attention. The result's `certificate` says what became of each head, its
    worst and mean distance, the error and the speed-up.

    size: of the sequence or grid, where neither the position nor the data tells. kernel: taps along an axis that a
    head may take at most. pattern: what the attention is called with beside its own. tolerance=0 is exact.
    """
    if not 0 <= tolerance < 1:
        raise SpecError(f"tolerance={tolerance} is a distance of distributions: use one in [0, 1)")
    if isinstance(attention, Lifted):
        return _lower_lifted(attention, data, tolerance)
    if not isinstance(attention, MultiHeadAttention):
        raise SpecError(
            f"{type(attention).__name__} is no attention that can be lowered; give a layer that rg.Attention built, "
            f"or what rg.lift gave (lower_all does every layer of a model)"
        )
    return _lower_heads(attention, data, tolerance, size, kernel, pattern)


def lower_all(
    model: nn.Module, data: Float[Tensor, "b ..."], *, tolerance: int | float = 0.05, kernel: int = 7
) -> tuple[nn.Module, dict[str, Certificate]]:
    """A copy of the model with each self-attention lowered on what reaches it from the data, by its path.

    A layer that is called with more than its input and a pattern (a context, a bias, a cache) stays as it is.
    """
    model = copy.deepcopy(model).eval()
    found = {}
    for path, (x, pattern) in _inputs(model, data).items():
        around, _, name = path.rpartition(".")
        lowered = lower(model.get_submodule(path), x, tolerance=tolerance, kernel=kernel, pattern=pattern)
        setattr(model.get_submodule(around), name, lowered)
        found[path] = lowered.certificate
    return model, found


@torch.no_grad()
def _inputs(model: nn.Module, data: Tensor) -> dict[str, tuple[Tensor, Any]]:
    """What each self-attention is called with, and its pattern."""
    seen, hooks = {}, []

    def watch(path: str) -> Callable:
        def keep(_module, given, named):
            others = [*given[1:], *(value for name, value in named.items() if name != "pattern")]
            if all(value is None or value is False for value in others):
                seen[path] = (given[0], named.get("pattern"))

        return keep

    for path, part in model.named_modules():
        if isinstance(part, MultiHeadAttention):
            hooks.append(part.register_forward_pre_hook(watch(path), with_kwargs=True))
    try:
        model(data)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _lower_lifted(lifted: Lifted, data: Tensor | None, tolerance: int | float) -> Lowered:
    """Every head at its nearest whole offset; what it misses there is known for every input (`leak`)."""
    place, missed = lifted.frame, lifted.leak().tolist()
    spans = [place.span(axis) for axis in range(place.axes)]
    nearest = [tuple(map(int, o)) for o in lifted.centre.detach().round().tolist()]
    at_hand = [all(lo <= o <= hi for o, (lo, hi) in zip(offset, spans)) for offset in nearest]
    fixed = [h for h, t in enumerate(missed) if t <= tolerance and at_hand[h]]
    others = [h for h in range(lifted.heads) if h not in fixed]
    taps, bias = lifted.taps.detach(), lifted.w_o.bias
    conv = rest = None
    if fixed:
        window = Frame(tuple(nearest[h] for h in fixed), place.stride, place.border, place.mode, tuple(spans))
        conv = convolution(window, taps[fixed], None if bias is None else bias.detach(), lifted.groups)
    if others:
        rest = _other_lifted(lifted, others, tuple(spans), keep_bias=not fixed)
    heads = tuple(
        Head(h, "shift" if h in fixed else "attention", nearest[h], int(h in fixed), missed[h], missed[h])
        for h in range(lifted.heads)
    )
    certified = _certified(taps[fixed], [missed[h] for h in fixed])
    facts = Certificate(heads, tolerance, None, place.mode, certified)
    if data is None:
        sizes = [max(8, 2 * (high - low + 1)) for low, high in spans]
        data = _normal(lifted.w_v.weight, 2, lifted.w_v.in_features, *sizes)
        facts = replace(facts, measured_on="standard normal inputs")
    return _measured(Lowered(conv, None, rest, None), lifted, data, facts)


def _other_lifted(lifted: Lifted, heads: list[int], window: Any, keep_bias: bool) -> Lifted:
    place = lifted.frame
    frame = Frame(tuple(place.offsets[h] for h in heads), place.stride, place.border, place.mode, window)
    bias = lifted.w_o.bias if keep_bias else None
    rest = Lifted(frame, lifted.taps.detach()[heads], bias, sharpness=None if lifted.hard else 1.0)
    with torch.no_grad():
        rest.centre.copy_(lifted.centre[heads])
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
    of_position = _of_position(attention.spec)
    _refuse(attention.spec, data, tolerance, of_position)
    grid = _grid(attention.spec, data, size)
    weights = _weights(attention, data, grid, pattern, of_position)
    slack = ROUNDING if of_position else 0.0
    parts = Parts(attention)
    far = torch.max if of_position else torch.mean
    heads, kernels, border = _judge(weights, grid, tolerance + slack, kernel, far, parts.has_value_bias)
    shifts = [h.head for h in heads if h.became == "shift"]
    others = [h.head for h in heads if h.became == "attention"]
    bias = parts.bias(shifts)
    conv = blur = None
    if shifts:
        conv = convolution(_frame([heads[h].offset for h in shifts], border), parts.taps[shifts], bias)
    if kernels:
        blur = _kernels(parts, kernels, None if shifts else bias)
    rest = parts.keep(others, grid, keep_bias=not (shifts or kernels)) if others else None
    fixed = [*shifts, *kernels]
    certified = _certified(parts.taps[fixed], [heads[h].worst for h in fixed]) if of_position else None
    facts = Certificate(heads, tolerance, grid, border, certified)
    if data is None:
        data = _normal(attention.w_v.weight, 2, prod(grid), attention.spec.d_model)
        facts = replace(facts, measured_on="standard normal inputs")
    return _measured(Lowered(conv, blur, rest, grid, pattern), attention, data, facts, pattern=pattern)


def _of_position(declared: spec.Attention) -> bool:
    """Whether no content enters the weights."""
    return declared.score == "position" or declared.factor == 0


def _refuse(declared: spec.Attention, data: Tensor | None, tolerance: int | float, of_position: bool) -> None:
    if isinstance(declared.position, shaw) and declared.position.values:
        raise SpecError(f"{declared.position!r} adds to the values what no convolution of the input does")
    if declared.d_context not in (None, declared.d_model):
        raise SpecError(
            f"d_context={declared.d_context} and d_model={declared.d_model}: an attention to something else has no "
            f"offsets; give self-attention"
        )
    if of_position:
        return
    if declared.position is None and data is None:
        raise SpecError(
            "an attention without positions looks at content alone, and no head of it is a shift; declare one, as "
            "position=rg.quadratic(), or give data= if positions are added to its input"
        )
    if data is None:
        raise SpecError(
            f"score={declared.score!r} depends on content, so no distance holds for all inputs; give data= to "
            f"measure it, or declare score='position'"
        )
    if tolerance == 0:
        raise SpecError(
            f"tolerance=0 is exact, and score={declared.score!r} depends on content; give a tolerance above 0, or "
            f"declare score='position'"
        )


def _grid(declared: spec.Attention, data: Tensor | None, size: int | Offset | None) -> Offset:
    own = getattr(declared.position, "grid", None)
    if own is not None:
        return own
    if size is None and data is None:
        raise SpecError(f"{declared.position!r} does not tell how long the sequence is; give size=n")
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
    of_position: bool,
) -> Float[Tensor, "b h n n"]:
    """What the heads look at: for all inputs alike in float64, or on the data."""
    n = prod(grid)
    if data is not None and data.shape[1] != n:
        raise ShapeError(f"data of {data.shape[1]} positions on a grid of {grid}; {n} are needed")
    attention = copy.deepcopy(attention).eval()
    if of_position or data is None:
        attention = attention.double()
        data = attention.w_v.weight.new_zeros(1, n, attention.spec.d_model)
    return attention(data, pattern=pattern, return_weights=True)[1]


def _judge(
    weights: Float[Tensor, "b h n n"],
    grid: Offset,
    tolerance: float,
    most: int,
    far: Callable[[Tensor], Tensor],
    value_bias: bool,
) -> tuple[tuple[Head, ...], dict[int, tuple[tuple[Offset, ...], Tensor]], str]:
    """What each head becomes: a shift if one is near enough, else the smallest kernel that is, else attention.

    far: which distance of the rows counts, the largest or the mean.
    """
    near = nearest_shifts(weights, grid)
    apart = {border: _apart(weights, grid, near.offset, border) for border in BORDERS}
    # One convolution has one border: that of the most shifts. Past zeros it would still add W_V's bias.
    border = max(BORDERS, key=lambda border: sum(bool(far(rows) <= tolerance) for rows in apart[border]))
    border = "replicate" if value_bias else border
    heads, kernels = [], {}
    for h, offset in enumerate(near.offset):
        rows = apart[border][h]
        became, taps = ("shift", 1) if far(rows) <= tolerance else ("attention", 0)
        for side in range(2, most + 1) if became == "attention" else ():
            offsets, shares = nearest_kernel(weights[:, h], grid, offset, side)
            gap = total_variation(weights[:, h], kernel_table(grid, offsets, shares))
            if far(gap) <= tolerance:
                became, taps, rows, kernels[h] = "kernel", len(offsets), gap, (offsets, shares)
                break
        heads.append(Head(h, became, offset, taps, rows.max().item(), rows.mean().item()))
    return tuple(heads), kernels, border


def _apart(
    weights: Float[Tensor, "b h n n"], grid: Offset, shifts: tuple[Offset, ...], border: str
) -> list[Float[Tensor, "b n"]]:
    return [shift_distance(weights[:, h], grid, offset, border) for h, offset in enumerate(shifts)]


def _frame(offsets: list[Offset], mode: str) -> Frame:
    """Around the query itself: as many outputs as inputs."""
    spans = tuple((min(0, *along), max(0, *along)) for along in zip(*offsets))
    border = tuple((-low, high) for low, high in spans)
    return Frame(tuple(offsets), (1,) * len(spans), border, mode, spans)


def _kernels(
    parts: Parts, kernels: dict[int, tuple[tuple[Offset, ...], Tensor]], bias: Tensor | None
) -> Kernels:
    """One box of taps around all kernels, a head each."""
    heads = list(kernels)
    every = [offset for offsets, _ in kernels.values() for offset in offsets]
    low = tuple(map(min, zip(*every)))
    sides = [high - lo + 1 for high, lo in zip(map(max, zip(*every)), low)]
    box = torch.zeros(len(heads), *sides, dtype=torch.float64)
    for row, (offsets, shares) in zip(box, kernels.values()):
        for offset, share in zip(offsets, shares.tolist()):
            row[tuple(o - lo for o, lo in zip(offset, low))] = share
    values = None if parts.value_bias is None else parts.value_bias[heads]
    return Kernels(parts.into[heads], parts.out[heads], values, bias, box.to(parts.into), low)


def _certified(taps: Float[Tensor, "h o c"], apart: list[float]) -> float:
    """Σ_h TV_h Σ_c ∣W_h∣ of the worst output: times the range of the input, a bound of the error."""
    if not apart:
        return 0.0
    missed = torch.tensor(apart, dtype=torch.float64, device=taps.device)
    return float(einsum(taps.double().abs(), missed, "h o c, h -> o").max())


@torch.no_grad()
def _measured(lowered: Lowered, whole: nn.Module, data: Tensor, facts: Certificate, **given: Any) -> Lowered:
    """The lowered module with its certificate: the error and the time of both on the data."""
    old, new = copy.deepcopy(whole).eval(), copy.deepcopy(lowered).eval()
    error = (new(data, **given) - old(data, **given)).abs().max().item()
    some = data[:8]
    ratio = _seconds(lambda: old(some, **given)) / _seconds(lambda: new(some, **given))
    lowered.certificate = replace(facts, measured=error, speed_up=ratio)
    return lowered.train(whole.training)


def _seconds(run: Callable[[], Any], rounds: int = 3) -> float:
    run()
    taken = []
    for _ in range(rounds):
        begun = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begun)
    return median(taken)


def _normal(like: Tensor, *shape: int) -> Tensor:
    rng = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=rng).to(like)
