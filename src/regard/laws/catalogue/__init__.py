"""All laws, sorted by their numbers. Each module holds the laws of one subject."""

from ...errors import SpecError, nearest
from ..law import Law
from . import (
    convolutions,
    counts,
    decoding,
    definition,
    equivalences,
    invariances,
    isolation,
    masks,
    models,
    norms,
    numerics,
    option_pairs,
    order,
    positions,
    promises,
    receptive_fields,
    score_terms,
    scores,
    softmax,
    training,
)

SUBJECTS = (
    softmax,
    scores,
    score_terms,
    equivalences,
    order,
    positions,
    convolutions,
    masks,
    isolation,
    invariances,
    decoding,
    receptive_fields,
    models,
    norms,
    training,
    counts,
    numerics,
    option_pairs,
    definition,
    promises,
)
LAWS: tuple[Law, ...] = tuple(
    sorted((law for subject in SUBJECTS for law in subject.LAWS), key=lambda law: law.number)
)

_SUBJECT = {law.number: subject.__name__.rpartition(".")[2] for subject in SUBJECTS for law in subject.LAWS}


def subject_of(law: Law) -> str:
    """The subject that a law belongs to, in words; "your own" for one that is not of this catalogue.

    >>> subject_of(law("L29"))
    'masks'
    """
    return _SUBJECT.get(law.number, "your own").replace("_", " ")


def law(name: str) -> Law:
    """A law by its number or its name.

    >>> law("L29").name
    'causality'
    """
    for candidate in LAWS:
        if name.lower() in (candidate.number.lower(), candidate.name.lower()):
            return candidate
    names = [n for candidate in LAWS for n in (candidate.number, candidate.name)]
    raise SpecError(f"no law is called {name!r}; {nearest(name, names)}")
