"""All laws, in the order of their numbers."""

from ..errors import SpecError, nearest
from . import (
    calls,
    convolutions,
    counts,
    isolation,
    masks,
    models,
    norms,
    numerics,
    order,
    positions,
    promises,
    scores,
    softmax,
    together,
    training,
    ways,
)
from .law import Law

THEMES = (
    softmax,
    scores,
    ways,
    order,
    positions,
    convolutions,
    masks,
    isolation,
    calls,
    models,
    norms,
    training,
    counts,
    numerics,
    together,
    promises,
)
LAWS: tuple[Law, ...] = tuple(
    sorted((one for theme in THEMES for one in theme.LAWS), key=lambda one: one.number)
)


def law(name: str) -> Law:
    """A law by its number or its name.

    >>> law("L29").name
    'causality'
    """
    for one in LAWS:
        if name.lower() in (one.number.lower(), one.name.lower()):
            return one
    raise SpecError(
        f"no law is called {name!r}; {nearest(name, [n for one in LAWS for n in (one.number, one.name)])}"
    )
