"""Marked pairs of tokens, such as a verb and its subject: the weight from the first on the second."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import ShapeError, SpecError
from .calls import AttentionCall

Relations = Mapping[str, Sequence[Any]]


class MarkedPair(NamedTuple):
    """A query and the key that it relates to, as indices or as words; batch None means every row of the batch."""

    batch: int | None
    query: int | str
    key: int | str


def read(relations: Relations) -> dict[str, tuple[MarkedPair, ...]]:
    """{"agreement": [("[MASK]", "cats")], "coreference": [(0, 7, 1)]}: (query, key) or (batch row, query, key)."""
    marked = {}
    for name, pairs in relations.items():
        if isinstance(pairs, str) or not all(isinstance(p, Sequence) and len(p) in (2, 3) for p in pairs):
            raise SpecError(
                f"relations[{name!r}] is {pairs!r}; it needs a list of (query, key) or (batch row, query, key), as "
                f"indices or as words"
            )
        marked[name] = tuple(MarkedPair(*((None, *p) if len(p) == 2 else p)) for p in pairs)
    return marked


def related_weights(
    call: AttentionCall, marked: Mapping[str, tuple[MarkedPair, ...]]
) -> dict[str, Float[Tensor, " h"]]:
    """For each relation and head: the weight on the related keys, averaged over the queries that have one.

    Relations are between tokens of one sequence, so cross-attention has none. A word stands for all of its
    occurrences, in the batch rows that contain both words.
    """
    if call.role != "self":
        return {}
    weights = {}
    for name, pairs in marked.items():
        found = {(b, i, j) for pair in pairs for b, i, j in _resolved(call, pair)}
        queries = sorted({(b, i) for b, i, _ in found})
        if not queries:
            continue
        total = torch.zeros(call.heads, dtype=torch.float64)
        for b, i in queries:
            keys = [j for c, k, j in found if (c, k) == (b, i)]
            total += call.weights(None, [i], b)[:, 0, keys].sum(-1).double().cpu()
        weights[name] = total / len(queries)
    return weights


def check(calls: Sequence[AttentionCall], marked: Mapping[str, tuple[MarkedPair, ...]]) -> None:
    """An error for a pair that no self-attention has: a misspelled word must not pass as a weight of zero."""
    within = [c for c in calls if c.role == "self"]
    for name, pairs in marked.items():
        for pair in pairs:
            if not any(_resolved(c, pair) for c in within):
                where = "any batch row" if pair.batch is None else f"batch row {pair.batch}"
                raise ShapeError(
                    f"relations[{name!r}]: no self-attention has both {pair.query!r} and {pair.key!r} in {where}; "
                    f"give the tokens' names as tokens=…, or use indices"
                )


def _resolved(call: AttentionCall, pair: MarkedPair) -> list[tuple[int, int, int]]:
    if pair.batch is not None and not 0 <= pair.batch < call.b:
        raise ShapeError(f"relation {tuple(pair)}: there are {call.b} batch rows, 0 to {call.b - 1}")
    rows = range(call.b) if pair.batch is None else [pair.batch]
    return [
        (b, i, j)
        for b in rows
        for i in _indices(pair.query, call.queries[b], call.n)
        for j in _indices(pair.key, call.keys[b], call.m)
    ]


def _indices(token: int | str, names: tuple[str, ...], count: int) -> list[int]:
    if isinstance(token, str):
        return [i for i, name in enumerate(names) if name.strip() == token]
    if not 0 <= token < count:
        raise ShapeError(f"a relation names token {token}; there are {count}, 0 to {count - 1}")
    return [token]
