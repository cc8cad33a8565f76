"""How far a stack of layers sees: the bound, and the exact set."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from ..errors import SpecError
from ..pattern import Pattern, causal
from .declaration import need_whole


@dataclass(frozen=True)
class ReceptiveField:
    """Inputs an output can depend on when each head looks at one position and the residual keeps its own."""

    bound: int  # (heads + 1)^layers
    clipped: int  # no more than there are positions
    neighbours: int  # where heads look 1, 2, …, heads back in every layer: heads · layers + 1


def receptive_field(heads: int, layers: int, length: int | None = None) -> ReceptiveField:
    """The bound counts the node itself; it is reached by shifts c · (heads + 1)^l, c = 1 … heads, in layer l.

    >>> receptive_field(8, 3, length=512)
    ReceptiveField(bound=729, clipped=512, neighbours=25)
    """
    need_whole("heads", heads)
    need_whole("layers", layers)
    bound, near = (heads + 1) ** layers, heads * layers + 1
    if length is None:
        return ReceptiveField(bound, bound, near)
    need_whole("length", length)
    return ReceptiveField(bound, min(length, bound), min(length, near))


def receptive_set(at: int, shifts: Sequence[Iterable[int]], length: int | None = None) -> frozenset[int]:
    """The positions that position `at` depends on, exactly; layer l looks back by each of shifts[l], and at itself.

    The last of `shifts` is the layer nearest the output. Positions below 0, or at `length` and past it, are none.

    >>> sorted(receptive_set(10, [[1, 2], [3, 6]]))
    [2, 3, 4, 5, 6, 7, 8, 9, 10]
    >>> sorted(receptive_set(1, [[1], [1], [1]]))
    [0, 1]
    """
    seen = {at}
    for back in reversed(shifts):
        seen |= {i - s for i in seen for s in tuple(back)}
        seen = {i for i in seen if i >= 0 and (length is None or i < length)}
    return frozenset(seen)


def sees(pattern: Pattern, n: int, layers: int = 1, residual: bool = True) -> Bool[Tensor, "n n"]:
    """Which inputs each output depends on after so many layers of one pattern: its boolean power."""
    need_whole("n", n)
    need_whole("layers", layers)
    step = _step(pattern, n, residual)
    out = torch.eye(n, dtype=torch.bool)
    while layers:  # a power by squares
        if layers & 1:
            out = _then(out, step)
        step, layers = _then(step, step), layers >> 1
    return out


def layers_to_connect(pattern: Pattern, n: int, residual: bool = True) -> int:
    """The least number of layers after which every output depends on every input (where causal: on all its past).

    >>> from regard.pattern import every, window
    >>> layers_to_connect(window(2), 16), layers_to_connect(window(2) | every(4), 16)
    (8, 3)
    """
    need_whole("n", n)
    powers = [_step(pattern, n, residual)]
    goal = causal().allowed(n) if (pattern - causal()).count(n) == 0 else torch.ones(n, n, dtype=torch.bool)
    while not torch.equal(powers[-1] | ~goal, goal | ~goal):
        if 1 << len(powers) > 2 * n:
            raise SpecError(f"{pattern!r} never connects all {n} positions, however many layers there are")
        powers.append(_then(powers[-1], powers[-1]))
    layers, seen = 0, torch.eye(n, dtype=torch.bool)
    for k in reversed(range(len(powers))):  # the largest number that does not connect, then one more
        further = _then(seen, powers[k])
        if not torch.equal(further & goal, goal):
            layers, seen = layers + (1 << k), further
    return layers + 1


def _step(pattern: Pattern, n: int, residual: bool) -> Bool[Tensor, "n n"]:
    allowed = pattern.allowed(n)
    return allowed | torch.eye(n, dtype=torch.bool) if residual else allowed.clone()


def _then(a: Bool[Tensor, "n k"], b: Bool[Tensor, "k m"]) -> Bool[Tensor, "n m"]:
    return (a.float() @ b.float()) > 0
