"""A pattern per head: heads with equal patterns run as one call of theirs, and the results are put in order."""

from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..errors import ShapeError
from ..pattern import Pattern, per_head
from ..position import ByDistance
from .call import Bias, Call, Outputs, replaced


def check_heads(pattern: per_head, heads: int) -> None:
    """A pattern per head needs as many as there are query heads."""
    if len(pattern.patterns) != heads:
        raise ShapeError(
            f"per_head has {len(pattern.patterns)} patterns for {heads} query heads; give one for each head"
        )


def by_heads(call: Call, run: Callable[[Call], Outputs]) -> Outputs:
    """The results of all heads, in the order of the heads."""
    order: list[int] = []
    results: list[Outputs] = []
    for heads, part in parts(call):
        order += heads
        results.append(run(part))
    back = torch.tensor(order, device=call.q.device).argsort()
    o = torch.cat([o for o, _ in results], 1).index_select(1, back)
    logs = [lse for _, lse in results if lse is not None]
    return o, torch.cat(logs, 1).index_select(1, back) if len(logs) == len(results) else None


def parts(call: Call) -> Iterator[tuple[list[int], Call]]:
    """The query heads of each part, and the call of these heads alone, with one pattern."""
    assert isinstance(call.pattern, per_head)
    group = call.q.shape[1] // call.k.shape[1]
    for pattern, heads in launches(call.pattern.patterns, group):
        kv_heads = list(dict.fromkeys(head // group for head in heads))
        yield (
            heads,
            replaced(
                call,
                q=_heads(call.q, heads, 1),
                k=_heads(call.k, kv_heads, 1),
                v=_heads(call.v, kv_heads, 1),
                pattern=pattern,
                table=_broadcast_heads(call.table, heads),
                bias=_bias(call.bias, heads),
                sink_logits=None if call.sink_logits is None else _heads(call.sink_logits, heads, 0),
            ),
        )


def launches(patterns: tuple[Pattern, ...], group: int) -> list[tuple[Pattern, list[int]]]:
    """Heads that run together: of one pattern, and as many of them in each group of heads that share their keys."""
    together: dict[tuple[Pattern, int], list[int]] = defaultdict(list)
    for first in range(0, len(patterns), group):
        members: dict[Pattern, list[int]] = defaultdict(list)
        for head in range(first, first + group):
            members[patterns[head]].append(head)
        for pattern, heads in members.items():
            together[pattern, len(heads)] += heads
    return [(pattern, heads) for (pattern, _), heads in together.items()]


def _heads(x: Tensor, heads: list[int], axis: int) -> Tensor:
    """These heads: a view where they are evenly spaced."""
    step = heads[1] - heads[0] if len(heads) > 1 else 1
    if step > 0 and heads == list(range(heads[0], heads[-1] + 1, step)):
        return x.narrow(axis, heads[0], heads[-1] - heads[0] + 1)[
            (slice(None),) * axis + (slice(None, None, step),)
        ]
    return x.index_select(axis, torch.tensor(heads, device=x.device))


def _broadcast_heads(x: Tensor | None, heads: list[int]) -> Tensor | None:
    """The heads of a tensor that broadcasts to (b, h, n, m)."""
    return x if x is None or x.dim() < 3 or x.shape[-3] == 1 else _heads(x, heads, x.dim() - 3)


def _bias(bias: Bias, heads: list[int]) -> Bias:
    if not isinstance(bias, ByDistance):
        return _broadcast_heads(bias, heads)
    table, slopes = (None if x is None else _heads(x, heads, 0) for x in (bias.table, bias.slopes))
    return ByDistance(table, slopes)
