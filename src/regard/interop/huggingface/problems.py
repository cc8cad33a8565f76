"""A mask of transformers and a pattern of the user's as calls of `rg.attention`, without an n × m table."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...pattern import Both, Not, Pattern, causal, documents, full, window
from ...pattern.clauses import conjuncts
from .lazy_mask import Mask, starts_of_rows


@dataclass(frozen=True, eq=False)
class Problem:
    """The arguments of one call of `rg.attention`, for all batch rows or for some of them."""

    pattern: Pattern | Tensor | None
    at: int | None = None
    lengths: Tensor | None = None
    rows: list[int] | None = None  # the batch rows; None: all
    keys: tuple[int, int] | None = None  # the keys present, first and one past the last; None: all
    first: int = 0  # queries before this one have no allowed key
    last: int | None = None  # one past the last query; the queries after it are in a problem of their own
    follows: bool = False  # these are the queries after the end of the rows of the problem before
    index: Tensor | None = None  # the keys present, one by one
    by_tiles: bool = False  # without a table, also where a table would be about as fast

    @property
    def holds_no_tensor(self) -> bool:
        whole = self.lengths is None and self.index is None
        return whole and (self.pattern is None or getattr(self.pattern, "text", None) is not None)


def problems_of(mask: Mask, user: Pattern | None, device: torch.device) -> list[Problem]:
    """The calls that compute a mask together with the user's pattern, without an n × m table where there is one.

    Layers of one forward that have the same mask and pattern share those that hold no tensors. Tables would stay
    until the forward ends, and a recomputation (checkpoints) has to run the operations that the forward ran.
    """
    if torch.compiler.is_compiling():
        return _problems(mask, user, device)
    key = "problems" if user is None else user.text  # no text: it holds tensors
    found = mask.memo.get(key)
    if found is None:
        found = _problems(mask, user, device)
        if key is not None and all(p.holds_no_tensor for p in found):
            mask.memo[key] = found
    return found


def _problems(mask: Mask, user: Pattern | None, device: torch.device) -> list[Problem]:
    if mask.dense is not None:
        return [Problem(_with_user(mask.dense, mask, user))]
    if user is None and mask.keys is None and mask.held is None and isinstance(mask.pattern, full):
        return [Problem(None)]
    one = mask.n == 1 and (mask.keys is not None or user is not None or not isinstance(mask.pattern, causal))
    if mask.held is not None or one:
        return [_row_problem(mask, user, device)]
    if mask.counted is not None and user is not None and user.shift_period != 1:
        own = _within_documents(mask.pattern)  # of the model, which counts from the first key of the row
        if mask.keys is None and not mask.origin and not own.has_data and own.shift_period == 1:
            return _document_problems(mask, together(own, user))
        return [Problem(allowed(mask, user, device))]
    pattern = together(mask.pattern, user)
    if mask.origin and not _shiftable(user, mask.origin):
        return [Problem(allowed(mask, user, device))]
    last = mask.at + mask.n  # one past the position of the last query
    keys = (0, last) if 0 < last < mask.m and is_causal(pattern) else None
    if keys is not None:
        pattern = _sliced(pattern, None, 0, last)
    if mask.keys is None:
        # The default offset is None: an engine call that names none is found faster.
        at = None if last == mask.m and mask.at >= 0 else mask.at
        return [Problem(pattern, at, keys=keys, by_tiles=pattern.has_data)]
    if isinstance(pattern, full):
        return [Problem(mask.keys[:, None, None, :])]
    if mask.ranges is None:
        return [Problem(allowed(mask, user, device))]
    starts, stops = mask.ranges
    if any(starts) or isinstance(pattern, causal):
        return _row_problems(mask, pattern, starts, stops)
    lengths = torch.tensor(stops if keys is None else [min(stop, last) for stop in stops], device=device)
    return [Problem(pattern, mask.at, lengths, keys=keys, by_tiles=True)]


def _row_problems(mask: Mask, pattern: Pattern, starts: list[int], stops: list[int]) -> list[Problem]:
    """Padding: the batch rows with the same real keys run together, without the other keys.

    Queries before the first real key have no key. Those after the last one see, if all past keys are allowed, all
    real keys: a problem of their own, so that both are dense.
    """
    groups: dict[tuple[int, int], list[int] | None] = {}
    for row, bounds in enumerate(zip(starts, stops)):
        groups.setdefault(bounds, []).append(row)  # type: ignore[union-attr]
    if len(groups) == 1:
        groups = dict.fromkeys(groups)
    behind, dense = is_causal(pattern), isinstance(pattern, causal)
    problems = []
    for (start, stop), rows in groups.items():
        if behind:
            stop = min(stop, max(start, mask.at + mask.n))
        first = min(mask.n, max(0, start - mask.at)) if behind else 0
        beyond = max(first, stop - mask.at)  # the first query after the last real key
        here = _sliced(pattern, rows, start, stop)
        at = mask.at + first - start
        if not dense or beyond >= mask.n or stop == start:
            problems.append(Problem(here, at, None, rows, (start, stop), first))
            continue
        if beyond > first:
            problems.append(Problem(here, at, None, rows, (start, stop), first, beyond))
        problems.append(Problem(None, None, None, rows, (start, stop), beyond, follows=beyond > first))
    return problems


def _document_problems(mask: Mask, pattern: Pattern) -> list[Problem]:
    """Packed documents and a pattern that names positions (sinks, every, blocks): each document by itself."""
    assert mask.counted is not None
    problems = []
    for row, positions in enumerate(mask.counted[1]):
        starts = (positions == 0).nonzero()[:, 0].tolist()
        rows = None if mask.batch == 1 else [row]
        for start, stop in zip(starts, [*starts[1:], None]):
            keys = (start, mask.m if stop is None else stop)
            problems.append(Problem(pattern, 0, None, rows, keys, start, stop, follows=start > 0))
    return problems


def _within_documents(pattern: Pattern) -> Pattern:
    """What the pattern of a mask means between tokens of one document."""
    if isinstance(pattern, documents):
        return full()
    if isinstance(pattern, Both):
        return together(_within_documents(pattern.left), _within_documents(pattern.right))
    return pattern


def _sliced(pattern: Pattern, rows: list[int] | None, start: int, stop: int) -> Pattern:
    """The pattern over keys start … stop − 1 of these batch rows, positions counted from start."""
    if not pattern.has_data:
        return pattern

    def leaf(word: Pattern) -> Pattern:
        if not isinstance(word, documents):
            return word
        ids = word.ids
        if rows is not None and ids.dim() > 1 and ids.shape[0] > 1:
            ids = ids[torch.tensor(rows, device=ids.device)]
        return documents(ids[..., start:stop])

    return pattern.fold(leaf, lambda a, b: a & b, lambda a, b: a | b, Not)


def _row_problem(mask: Mask, user: Pattern | None, device: torch.device) -> Problem:
    """One query, or keys that a bounded cache holds: a table over these keys decides; None where all are allowed.

    One query that sees less than half of the keys gathers those it sees. Layers with one pattern share the result.
    """
    memo, text = mask.memo, None if user is None else user.text
    key = text, mask.pattern.text, mask.at, mask.n, mask.m, device
    if mask.held is not None and mask.keys is None:
        memo = mask.held.memo
    if mask.pattern.has_data or (user is not None and text is None) or key not in memo:
        table = allowed(mask, user, device)
        seen = int(table.sum())
        if seen == table.numel():
            found = Problem(None)
        elif mask.n == 1 and table.shape[0] == 1 and 2 * seen < mask.m:
            found = Problem(None, index=table[0, 0, 0].nonzero()[:, 0])
        else:
            found = Problem(table)
        memo[key] = found
    return memo[key]


def allowed(mask: Mask, user: Pattern | None, device: torch.device | None = None) -> Tensor:
    """The table of allowed pairs, (b or 1, 1, n, m): what the mask and the user's pattern mean together."""
    if mask.dense is not None:
        return _with_user(mask.dense, mask, user)
    device = _device(mask) or device
    j = torch.arange(mask.m, device=device) if mask.stored is None else mask.stored.to(device)
    i = torch.arange(mask.n, device=device)[:, None] + mask.at
    table = torch.as_tensor(mask.pattern.allows(i, j), device=device)
    table = table if table.dim() == 4 else table.expand(mask.n, mask.m)[None, None]
    if mask.keys is not None:
        table = table & mask.keys[:, None, None, :]
    return _with_user(table, mask, user)


def _with_user(table: Tensor, mask: Mask, user: Pattern | None) -> Tensor:
    """The table and the user's pattern, whose positions count from the first real token of each batch row."""
    if user is None:
        return table
    device = table.device
    if mask.counted is not None:
        i, j = mask.counted
        return table & torch.as_tensor(user.allows(i[:, None, :, None], j[:, None, None, :]), device=device)
    if mask.stored is not None:
        i, j = torch.arange(mask.n, device=device)[:, None] + mask.at, mask.stored.to(device)
        return table & torch.as_tensor(user.allows(i, j), device=device)
    i = torch.arange(mask.n, device=device)[:, None] + mask.at + mask.origin
    j = torch.arange(mask.m, device=device) + mask.origin
    begins_later = mask.origin and mask.ranges is not None and any(mask.ranges[0])
    if mask.keys is not None and (not mask.origin or begins_later):
        starts = starts_of_rows(mask.keys).to(device)[:, :, None, None] + mask.origin
        return table & user.allows(i - starts, j - starts)
    return table & torch.as_tensor(user.allows(i, j), device=device)


def _device(mask: Mask) -> torch.device | None:
    for x in (mask.dense, mask.keys):
        if x is not None:
            return x.device
    return mask.pattern.device


def together(pattern: Pattern, user: Pattern | None) -> Pattern:
    """Both, written as short as can be: plans and prepared calls are looked up by how a pattern is written."""
    if user is None:
        return pattern
    if isinstance(pattern, full):
        return user
    if isinstance(user, full) or user == pattern:
        return pattern
    if isinstance(pattern, causal) and is_causal(user):
        return user
    return Both(pattern, user)


def is_causal(pattern: Pattern) -> bool:
    """Whether the pattern is written so that no query sees a key after it."""
    return any(isinstance(x, causal) or (isinstance(x, window) and x.after == 0) for x in conjuncts(pattern))


def _shiftable(user: Pattern | None, origin: int) -> bool:
    """Whether the user's pattern may be read with positions counted from the first key of a sliding cache."""
    if user is None or not origin:
        return True
    return bool(user.shift_period) and origin % user.shift_period == 0
