"""How far information travels through a stack of layers: a bound, and the exact set of inputs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from ..errors import SpecError
from ..pattern import Pattern, causal
from ..spec.base import require_positive


@dataclass(frozen=True)
class ReceptiveField:
    """The number of inputs an output can depend on if each head attends to one position, with residuals."""

    bound: int  # (heads + 1)^layers
    clipped: int  # the bound, limited by the number of positions
    neighbors: int  # if the heads attend 1, 2, …, heads positions back in every layer: heads · layers + 1


def receptive_field(heads: int, layers: int, length: int | None = None) -> ReceptiveField:
    """The bound counts the position itself; shifts of c · (heads + 1)^l, c = 1 … heads, in layer l reach it.

    >>> receptive_field(8, 3, length=512)
    ReceptiveField(bound=729, clipped=512, neighbors=25)
    """
    require_positive("heads", heads)
    require_positive("layers", layers)
    bound, near = (heads + 1) ** layers, heads * layers + 1
    if length is None:
        return ReceptiveField(bound, bound, near)
    require_positive("length", length)
    return ReceptiveField(bound, min(length, bound), min(length, near))


def receptive_set(at: int, shifts: Sequence[Iterable[int]], length: int | None = None) -> frozenset[int]:
    """The exact set of inputs of position `at`, if layer l attends to the position itself and shifts[l] back.

    The last entry of `shifts` is the layer nearest to the output. Positions outside 0 … length − 1 are left out.

    >>> sorted(receptive_set(10, [[1, 2], [3, 6]]))
    [2, 3, 4, 5, 6, 7, 8, 9, 10]
    >>> sorted(receptive_set(1, [[1], [1], [1]]))
    [0, 1]
    """
    inputs = {at}
    for layer in reversed(shifts):
        inputs |= {i - s for i in inputs for s in tuple(layer)}
        inputs = {i for i in inputs if i >= 0 and (length is None or i < length)}
    return frozenset(inputs)


def dependencies(pattern: Pattern, n: int, layers: int = 1, residual: bool = True) -> Bool[Tensor, "n n"]:
    """Entry (i, j): whether output i depends on input j after this many layers. The boolean power of the pattern."""
    require_positive("n", n)
    require_positive("layers", layers)
    power = _one_layer(pattern, n, residual)
    result = torch.eye(n, dtype=torch.bool)
    while layers:  # exponentiation by squaring
        if layers & 1:
            result = _compose(result, power)
        power, layers = _compose(power, power), layers >> 1
    return result


def layers_to_connect(pattern: Pattern, n: int, residual: bool = True) -> int:
    """The number of layers after which every output depends on every input (if causal: on every earlier input).

    >>> from regard.pattern import every, window
    >>> layers_to_connect(window(2), 16), layers_to_connect(window(2) | every(4), 16)
    (8, 3)
    """
    require_positive("n", n)
    powers = [_one_layer(pattern, n, residual)]
    goal = causal().allowed(n) if (pattern - causal()).count(n) == 0 else torch.ones(n, n, dtype=torch.bool)
    while not torch.equal(powers[-1] | ~goal, goal | ~goal):
        if 1 << len(powers) > 2 * n:
            raise SpecError(f"{pattern!r} never connects all {n} positions, whatever the number of layers")
        powers.append(_compose(powers[-1], powers[-1]))
    layers, reached = 0, torch.eye(n, dtype=torch.bool)
    for k in reversed(range(len(powers))):  # the largest number of layers that does not connect, plus one
        further = _compose(reached, powers[k])
        if not torch.equal(further & goal, goal):
            layers, reached = layers + (1 << k), further
    return layers + 1


def _one_layer(pattern: Pattern, n: int, residual: bool) -> Bool[Tensor, "n n"]:
    allowed = pattern.allowed(n)
    return allowed | torch.eye(n, dtype=torch.bool) if residual else allowed.clone()


def _compose(a: Bool[Tensor, "n k"], b: Bool[Tensor, "k m"]) -> Bool[Tensor, "n m"]:
    return (a.float() @ b.float()) > 0
