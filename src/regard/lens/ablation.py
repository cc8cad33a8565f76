"""Ablation: how the output changes when a head or a key is removed.

A large weight does not prove influence: the value may be small, or a later layer may undo the effect.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import RegardError, ShapeError, SpecError
from .calls import AttentionCall, QueryKeyScores, Source
from .intercept import ChangeOutput, InterceptedCall, intercept
from .process_wide import WITHOUT_FAST_PATH
from .run_model import first_tensor, run
from .score_mods import Region

Loss = Callable[[Any], float | Tensor]
ROWS = 256  # queries whose weights are in memory at a time


def remove_head(model: Any, inputs: Any, layer: int, head: int, loss: Loss | None = None) -> float:
    """‖o′ − o‖ / ‖o‖ of the model's output when one head outputs zeros; with a loss, the increase of the loss."""
    return _effect(model, inputs, loss, _without_head_of(layer, head))


def remove_heads(
    model: Any, inputs: Any, calls: Sequence[AttentionCall], loss: Loss | None = None
) -> dict[tuple[int, int], float]:
    """`remove_head` for every head of these calls: one forward pass each."""
    before = unchanged(model, inputs, loss)
    return {
        (call.layer, head): _difference(before, _run(model, inputs, _without_head_of(call.layer, head)), loss)
        for call in calls
        for head in range(call.heads)
    }


def _without_head_of(layer: int, head: int) -> ChangeOutput:
    return lambda at, out, _: _without_head(out, head) if at == layer else out


def remove_key(
    model: Any,
    inputs: Any,
    key: int,
    layers: Collection[int],
    head: int | None = None,
    loss: Loss | None = None,
) -> float:
    """The same if no query may attend to `key`, in these layers, in one head or all."""
    return _effect(model, inputs, loss, _without_key_of(key, layers, head))


def _without_key_of(key: int, layers: Collection[int], head: int | None) -> ChangeOutput:
    return lambda at, out, source: _without_key(out, source, key, head) if at in layers else out


def _effect(model: Any, inputs: Any, loss: Loss | None, change: ChangeOutput) -> float:
    return _difference(unchanged(model, inputs, loss), _run(model, inputs, change), loss)


def unchanged(model: Any, inputs: Any, loss: Loss | None = None) -> Any:
    """The model's output with nothing removed. A second run has to repeat it: effects are differences of runs."""
    first, second = (_run(model, inputs, None) for _ in range(2))
    out = first_tensor(first) if loss is None else torch.tensor(_value(loss, first))
    moved = abs(_difference(first, second, loss))
    if moved > torch.finfo(out.dtype).eps ** 0.5 * (1.0 if loss is None else max(abs(float(out)), 1.0)):
        raise RegardError(
            f"two equal runs of {type(model).__name__} differ by {moved:.2g}, so the effect of a removal cannot be "
            "measured: use model.eval() if it has dropout; if it changes its inputs or a cache, look at a function "
            "that gives it a copy, such as lambda ids: model(ids, past_key_values=copy.deepcopy(cache))"
        )
    return first


def _run(model: Any, inputs: Any, change: ChangeOutput | None) -> Any:
    """The model's output with `change` applied to the output of each attention.

    PyTorch's fast path is off: it has no separate attention output that could be changed.
    """
    calls: list[InterceptedCall] = []
    with torch.no_grad(), WITHOUT_FAST_PATH, intercept(model, calls.append, change):
        return run(model, inputs)


def _difference(before: Any, after: Any, loss: Loss | None) -> float:
    if loss is not None:
        return _value(loss, after) - _value(loss, before)
    o, changed = first_tensor(before).double(), first_tensor(after).double()
    if o.shape != changed.shape:
        raise RegardError(
            f"the model gives outputs of different shapes in two runs: {tuple(o.shape)} and {tuple(changed.shape)}"
        )
    return float((changed - o).norm() / o.norm().clamp(min=1e-30))


def _value(loss: Loss, out: Any) -> float:
    value = loss(out)
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as e:
        of = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        raise SpecError(f"the loss returned a {type(value).__name__}{of}; it has to return one number") from e


def _without_head(o: Float[Tensor, "b h n d_v"], head: int) -> Float[Tensor, "b h n d_v"]:
    if not 0 <= head < o.shape[1]:
        raise ShapeError(f"head {head}: this attention has {o.shape[1]} heads, 0 to {o.shape[1] - 1}")
    o = o.clone()
    o[:, head] = 0
    return o


def _without_key(
    o: Float[Tensor, "b h n d_v"], source: Source, key: int, head: int | None
) -> Float[Tensor, "b h n d_v"]:
    """softmax over the other keys and the sink, if there is one; zeros where there is no other key."""
    b, h, n, m = source.shape
    if source.v is None:
        raise RegardError(
            "the values of this attention were not recorded, so a key cannot be removed from it"
        )
    heads = list(range(h)) if head is None else [head]
    has_sink = isinstance(source, QueryKeyScores) and source.sink_logits is not None
    o = o.clone()
    v = source.v.to(torch.float32) if source.v.dtype.itemsize < 4 else source.v
    for batch in range(b):
        values = v[batch, [g // (h // v.shape[1]) for g in heads]]
        for start in range(0, n, ROWS):
            rows = slice(start, min(start + ROWS, n))
            weights = source.weights(Region(batch, heads, rows, m)).to(values.dtype)
            sink = 1 - weights.sum(-1, keepdim=True) if has_sink else 0.0
            weights[..., key] = 0
            total = weights.sum(-1, keepdim=True) + sink
            mean = torch.where(total > 0, weights / total.clamp(min=1e-30), 0.0) @ values
            o[batch, heads, rows] = mean.to(o.dtype)
    return o
