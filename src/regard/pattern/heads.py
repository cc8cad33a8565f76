"""A pattern for each query head."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from ..errors import ShapeError, SpecError, not_a_pattern
from .algebra import Pattern, register


@dataclass(frozen=True, repr=False)
class per_head(Pattern):
    """Head h attends by patterns[h]. `&`, `|`, `~` and `-` combine head by head.

    >>> from regard.pattern import causal, every, window
    >>> print(per_head([window(1), every(2)]) & causal())
    per_head([window(1) & causal(), every(2) & causal()])
    """

    patterns: tuple[Pattern, ...]

    differs_by_head = True

    def __init__(self, patterns: Iterable[Pattern]):
        if isinstance(patterns, Pattern) or not isinstance(patterns, Iterable):
            raise SpecError(f"per_head({patterns!r}): give a list, with one pattern for each query head")
        given = tuple(patterns)
        if not given:
            raise SpecError("per_head([]) has no head; give one pattern for each query head")
        for head, pattern in enumerate(given):
            if not isinstance(pattern, Pattern):
                raise not_a_pattern(pattern, where=f"per_head: head {head}: ")
            if pattern.differs_by_head:
                raise SpecError(f"per_head: head {head} has a pattern for each head; give it one")
        object.__setattr__(self, "patterns", given)
        if all(pattern.text is not None for pattern in given):
            inner = ", ".join(pattern.text for pattern in given)
            object.__setattr__(self, "text", f'{{"kind": "per_head", "patterns": [{inner}]}}')

    @property
    def heads_of(self) -> dict[Pattern, list[int]]:
        """Each pattern, and the heads that have it."""
        heads: dict[Pattern, list[int]] = {}
        for head, pattern in enumerate(self.patterns):
            heads.setdefault(pattern, []).append(head)
        return heads

    def check_heads(self, heads: int) -> None:
        """Raise a ShapeError if these are not as many patterns as query heads."""
        if len(self.patterns) != heads:
            raise ShapeError(
                f"per_head has {len(self.patterns)} patterns for {heads} query heads; give one for each head"
            )

    def allows(self, i, j):
        """One truth value for each head; of tensors, along an axis in front of the last two."""
        found = [pattern.allows(i, j) for pattern in self.patterns]
        if isinstance(i, int) and isinstance(j, int):
            return tuple(map(bool, found))
        shape = torch.broadcast_shapes(*(x.shape for x in found))
        return (
            torch.stack([x.expand(shape) for x in found], -3)
            if len(shape) < 3
            else torch.cat([x.expand(shape) for x in found], -3)
        )

    def leaves(self):
        for pattern in self.patterns:
            yield from pattern.leaves()

    def fold(self, leaf, both, either, negate):
        raise ShapeError(f"{self!r} is one pattern for each head; take one of .patterns")

    def expanded(self):
        return per_head([pattern.expanded() for pattern in self.patterns])

    def allowed(self, n, m=None, at=None, device=None):
        """The dense tables, h × n × m, or b × h × n × m where data or offsets differ along the batch."""
        tables = [pattern.allowed(n, m, at, device) for pattern in self.patterns]
        if any(table.dim() > 2 for table in tables):
            tables = [table if table.dim() > 2 else table[None, None] for table in tables]
            b = max(len(table) for table in tables)
            return torch.cat([table.expand(b, 1, *table.shape[-2:]) for table in tables], 1)
        return torch.stack(tables)

    def row_counts(self, n, m=None, at=None):
        """How many keys each of the n queries may attend to, over all heads and batch rows that data tell apart."""
        return sum(times * pattern.row_counts(n, m, at) for pattern, times in self._with_batch_rows())

    def count(self, n, m=None, at=None):
        """How many pairs are allowed, over all heads and batch rows that data tell apart."""
        return sum(times * pattern.count(n, m, at) for pattern, times in self._with_batch_rows())

    def _with_batch_rows(self):
        """Each head's pattern, and in how many batch rows it is the same while data of other heads differ."""
        return [(pattern, self.data_shape[0] // pattern.data_shape[0]) for pattern in self.patterns]

    def same(self, other, n, m=None, at=None):
        others = other.patterns if isinstance(other, per_head) else (other,) * len(self.patterns)
        if len(others) != len(self.patterns):
            return False
        return all(a.same(b, n, m, at) for a, b in zip(self.patterns, others))

    def draw(self, n, m=None, at=None):
        """The picture of each head, below its number; heads with equal patterns share one."""
        each = self.heads_of.items()
        return "\n\n".join(f"{numbered(heads)}: {p!r}\n{p.draw(n, m, at)}" for p, heads in each)

    def block_mask(self, n, m=None, at=None, device=None):
        raise ShapeError(
            "block_mask of per_head: FlexAttention's mask is for all heads; take one of .patterns"
        )

    def _combined(self, other: Pattern, combine: Callable[[Pattern, Pattern], Pattern]) -> Pattern:
        if not isinstance(other, Pattern):
            return NotImplemented
        others = other.patterns if isinstance(other, per_head) else (other,) * len(self.patterns)
        if len(others) != len(self.patterns):
            raise SpecError(
                f"per_head of {len(self.patterns)} heads and of {len(others)} heads do not combine"
            )
        return per_head([combine(a, b) for a, b in zip(self.patterns, others)])

    def __and__(self, other):
        return self._combined(other, lambda a, b: a & b)

    def __or__(self, other):
        return self._combined(other, lambda a, b: a | b)

    def __sub__(self, other):
        return self._combined(other, lambda a, b: a - b)

    def __rand__(self, other):
        return self._combined(other, lambda a, b: b & a)

    def __ror__(self, other):
        return self._combined(other, lambda a, b: b | a)

    def __rsub__(self, other):
        return self._combined(other, lambda a, b: b - a)

    def __invert__(self):
        return per_head([~pattern for pattern in self.patterns])

    def __repr__(self):
        return f"per_head([{', '.join(map(repr, self.patterns))}])"


def launches(pattern: Pattern, heads: int, kv_heads: int) -> list[tuple[Pattern, list[int], list[int]]]:
    """Heads that run together, with their key heads: of one pattern, and as many of them in each group of heads that
    share their keys."""
    if not isinstance(pattern, per_head):
        return [(pattern, [*range(heads)], [*range(kv_heads)])]
    pattern.check_heads(heads)
    group = heads // kv_heads
    together: dict[tuple[Pattern, int], list[int]] = defaultdict(list)
    for first in range(0, heads, group):
        members: dict[Pattern, list[int]] = defaultdict(list)
        for head in range(first, first + group):
            members[pattern.patterns[head]].append(head)
        for one, of in members.items():
            together[one, len(of)] += of
    return [(one, of, list(dict.fromkeys(head // group for head in of))) for (one, _), of in together.items()]


def of_heads(pattern: Pattern, heads: Sequence[int]) -> Pattern:
    """The pattern of an attention of these heads only."""
    return per_head([pattern.patterns[h] for h in heads]) if isinstance(pattern, per_head) else pattern


def numbered(heads: Sequence[int]) -> str:
    """These heads in words.

    >>> numbered([2]), numbered([0, 1])
    ('head 2', 'heads 0, 1')
    """
    return ("heads " if len(heads) > 1 else "head ") + ", ".join(map(str, heads))


register(per_head)
