"""The algebra of patterns: `&`, `|`, `~` and `-` over sets of pairs, and the positions of queries."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from math import lcm
from operator import index
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from .. import compat, value
from ..errors import ShapeError, SpecError
from ..progression import Ints
from . import counting
from .counting import Terms
from .relation import EVERYTHING

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

At = int | tuple[int, int] | None
MAX_COUNTED_WORDS = 12  # inclusion and exclusion has up to 2^words terms; with more, blocks are counted
CHUNK_PAIRS = 1 << 24  # pairs enumerated at a time
MAX_PAIRS = 1 << 33  # enumerated for one count: about ten seconds
KINDS: dict[str, type] = {}  # what JSON may name; `register` adds to it
CONSTANTS = int, float, str, ModuleType, CodeType, type  # of values: what cannot change
RowMask = Callable[[Any, Any, Any], Any]  # (batch row, query position, key position) ↦ allowed


def register(kind: type) -> None:
    """Make a kind of pattern known to JSON and to pattern texts. Each name belongs to one class."""
    known = KINDS.setdefault(kind.__name__, kind)
    if (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
        raise SpecError(
            f"there is a pattern {kind.__name__!r} already, in {known.__module__}; choose another name"
        )
    KINDS[kind.__name__] = kind  # the same class may be defined again, as in a notebook


class Pattern:
    """A set of pairs (i, j). Combine with `&`, `|`, `~` and `-`; nothing is n × m until `allowed(n, m)`."""

    text: str | None = None  # its JSON, made at declaration, which a compiled graph holds; None with data
    differs_by_head = False  # whether it is one pattern for each head (per_head)

    @property
    def by_row(self) -> "tuple[Pattern, ...]":
        """A word with data as words without, one for each batch row; empty where there are no such words."""
        return ()

    def allows(self, i: Any, j: Any) -> Any:
        """Whether the query at position i may attend to key j: for two integers, or tensors that broadcast."""
        raise NotImplementedError

    def fold(self, leaf: Callable, both: Callable, either: Callable, negate: Callable) -> Any:
        """The value of the expression: leaf(word) for each word, combined by the other three for &, | and ~."""
        return leaf(self)

    def leaves(self) -> Iterator["Pattern"]:
        """The words in reading order, repeats included; of a shorthand those of its meaning."""
        yield self

    def tensors(self) -> list[Tensor]:
        """The data of all words that are tensors."""
        return [x for leaf in self.leaves() for x in vars(leaf).values() if isinstance(x, Tensor)]

    def values(self) -> list[Any] | None:
        """What decides its pairs: its text; with data, how it is composed and its data. None: not all is known."""
        found: list[Any] = [type(self) if self.text is None else self.text]
        for name in self.__dataclass_fields__ if self.text is None else ():  # type: ignore[attr-defined]
            given = getattr(self, name)
            more = given.values() if isinstance(given, Pattern) else [given]
            if more is None:
                return None
            found += more
        return found

    def state(self) -> tuple[Any, ...] | None:
        """A key for the pairs that it allows now, valid as long as its `values` exist; None if a change of them could
        not be noticed. A tensor counts how often it was written."""
        found: list[Any] = []
        for x in self.values() or [None]:
            if isinstance(x, CONSTANTS):
                found.append((type(x), x))
            else:
                written = compat.version(x) if isinstance(x, Tensor) else None
                found.append(None if written is None else (id(x), written))
        return None if None in found else tuple(found)

    def expanded(self) -> "Pattern":
        """The same pattern with each shorthand replaced by its meaning."""
        return self

    def fits(self, m: int, last: int = -1) -> None:
        """Raise a ShapeError if the data of this word cannot be read for m keys and queries up to position `last`."""

    @property
    def varies(self) -> tuple[int, int]:
        """The batch rows and heads for which a word has data of their own; 1: the same for all."""
        return 1, 1

    @property
    def data_shape(self) -> tuple[int, int]:
        """The same of all words together."""
        rows, heads = zip(*(leaf.varies for leaf in self.leaves()))
        return max(rows), max(heads)

    def check_data(
        self, m: int, n: int = 0, at: "At | Tensor" = None, shape: tuple[int, int] | None = None
    ) -> None:
        """The same for all words, n queries, and batch rows and heads. Offsets per row are read on the CPU only."""
        last, compiling = -1, torch.compiler.is_compiling()  # where sizes may be symbols
        if n and not isinstance(at, Tensor):
            start, step = query_offset(self, n, m, at)
            last = start + step * (n - 1)
        elif n and isinstance(at, Tensor) and self.has_data and at.is_cpu and at.numel() and not compiling:
            last = -1 if compat.is_mapped(at) else int(at.max()) + n - 1
        for leaf in self.leaves():
            leaf.fits(m, last)
            common = shape or (leaf.varies if compiling else self.data_shape)
            for own, there, axis in zip(leaf.varies, common, ("batch rows", "heads")):
                # A symbol is compared with its like first, which decides it.
                if (type(own) is int and own == 1) or own == there or own == 1:
                    continue
                how = "each, or for all"
                if axis == "heads" and own and there % own == 0:
                    how = f"each: indices.repeat_interleave({there // own}, 1)"
                raise ShapeError(
                    f"{leaf!r} has data for {own} {axis}, and there are {there}; give it for {how}"
                )

    def terms(self) -> Terms:
        """The indicator as a polynomial in those of relations."""
        raise NotImplementedError

    def row_mask(self, inside: bool) -> RowMask:
        """The word for one pair of one batch row, as a function that holds the data but not the word.

        inside: every query position is also a key position.
        """
        raise NotImplementedError

    def __and__(self, other: "Pattern") -> "Pattern":
        return Both(self, other) if _is_one(other) else NotImplemented

    def __or__(self, other: "Pattern") -> "Pattern":
        return Either(self, other) if _is_one(other) else NotImplemented

    def __sub__(self, other: "Pattern") -> "Pattern":
        return Both(self, Not(other)) if _is_one(other) else NotImplemented

    def __invert__(self) -> "Pattern":
        return Not(self)

    def __bool__(self) -> bool:
        raise SpecError(
            f"{self!r} is a set of pairs, neither true nor false; combine patterns with &, | and ~, "
            "not with and, or and not"
        )

    def _repr_html_(self) -> str | None:
        """A picture, in a notebook."""
        from .html_picture import picture

        return picture(self)

    @property
    def has_data(self) -> bool:
        """True if tensors or a function decide, not the declaration: `documents`, `lengths`, `where`."""
        return any(leaf.has_data for leaf in self.leaves())

    @property
    def reads_query(self) -> bool:
        """True if the position of the query matters: not for `full`, `every`, `sinks`, `lengths`."""
        return any(leaf.reads_query for leaf in self.leaves())

    @property
    def reads_key(self) -> bool:
        """True if the position of the key matters: not for `full` and `rows`."""
        return any(leaf.reads_key for leaf in self.leaves())

    @property
    def shift_period(self) -> int:
        """Shifting i and j together by a multiple of this changes nothing; 0 if no such shift is known."""
        return lcm(*(leaf.shift_period for leaf in self.leaves()))

    @property
    def device(self) -> torch.device | None:
        """Where its data are; None if it has no tensor."""
        return next(
            (leaf.device for leaf in self.leaves() if leaf is not self and leaf.device is not None), None
        )

    def allowed(
        self, n: int, m: int | None = None, at: At | Tensor = None, device: torch.device | str | None = None
    ) -> Bool[Tensor, "*b n m"]:
        """The dense table, True = allowed: n × m, or b × 1 × n × m where data differ along the batch.

        device: None is where the pattern's data are, or the default device.
        """
        m = n if m is None else m
        if not torch.compiler.is_compiling():  # where a size may be a symbol
            n, m = whole_sizes(n, m)
        device = self.device if device is None else device
        self.check_data(m, n, at)
        i = positions(self, n, m, at, device)[..., None]
        j = torch.arange(m, device=device)
        i = i[:, None] if i.dim() == 3 else i  # one offset per batch row: an axis for the heads
        table = torch.as_tensor(self.allows(i, j), device=device)
        return torch.broadcast_to(
            table, (*table.shape[:-2], n, m) if table.dim() > 2 else (*i.shape[:-2], n, m)
        )

    def row_counts(self, n: int, m: int | None = None, at: At = None) -> Ints:
        """How many keys each of the n queries may attend to; with data, summed over the batch rows."""
        m = n if m is None else m
        start, step = query_offset(self, n, m, at)
        if not self._enumerated:
            return counting.row_counter(self.terms(), m, start, step)(np.arange(n, dtype=np.int64))
        from .block_counts import row_counts

        return row_counts(self, n, m, (start, step))

    def block_mask(
        self, n: int, m: int | None = None, at: At = None, device: torch.device | str | None = None
    ) -> "BlockMask":
        """The pattern for `torch.nn.attention.flex_attention`, computed without an n × m table.

        Its lists of blocks of 128 × 128 are those of PyTorch's `create_block_mask`. (With data or every second
        position, a block where words meet may be listed as partial that is empty or full.) Where a list would be
        longer than a million entries, it is as narrow as its longest row, or a view.
        """
        from .block_mask import block_mask

        return block_mask(self, n, n if m is None else m, at, device)

    def count(self, n: int, m: int | None = None, at: At = None) -> int:
        """How many pairs are allowed, exactly; without visiting each row where the pattern repeats itself.

        With data other than `lengths` (`documents`, `tree`) it goes block by block, in all batch rows; with a
        function (`where`), pair by pair. A pattern with so many words and so long periods that it would take minutes
        is refused.
        """
        n, m = whole_sizes(n, n if m is None else m)
        start, step = query_offset(self, n, m, at)
        if n == 0 or m == 0:
            return 0
        if all(leaf.by_row for leaf in self.leaves() if leaf.has_data) and self.has_data:
            self.check_data(m, n, at)
            rows = Counter(self._of_row(row) for row in range(self.data_shape[0]))
            return sum(times * one.count(n, m, (start, step)) for one, times in rows.items())
        if self.has_data or (self._enumerated and n * m <= CHUNK_PAIRS):
            return int(self.row_counts(n, m, at).sum())
        try:
            return counting.count(self.terms(), n, m, start, step)
        except counting.TooManyTerms:
            if n * m <= MAX_PAIRS:
                return int(self.row_counts(n, m, at).sum())
            limit = (
                f"more than {counting.MAX_TERMS:,} combinations of words, "
                f"which are counted up to n · m = {MAX_PAIRS:,}"
            )
        except counting.TooManyRows:
            limit = (
                f"more than the {counting.MAX_ROWS:,} rows that a count may visit, since its periods are long"
            )
        raise SpecError(
            f"counting the pairs of {len(set(self.leaves()))} words at n = {n:,}, m = {m:,} takes {limit}; "
            "count a shorter sequence, or a pattern of fewer words"
        )

    def _of_row(self, row: int) -> "Pattern":
        """The pattern of one batch row, in words without data."""

        def of_word(word: Pattern) -> Pattern:
            return word.by_row[row % len(word.by_row)] if word.by_row else word

        return self.fold(of_word, Both, Either, Not)

    @property
    def _enumerated(self) -> bool:
        """True where there is no formula, or one of too many terms: it is counted block by block."""
        return self.has_data or len(set(self.leaves())) > MAX_COUNTED_WORDS

    def same(self, other: "Pattern", n: int, m: int | None = None, at: At = None) -> bool:
        """Equality of meaning at this size: exactly the same pairs. (`==` compares how they are written.)"""
        return ((self - other) | (other - self)).count(n, m, at) == 0

    def draw(self, n: int, m: int | None = None, at: At = None) -> str:
        """One line per query: ■ allowed, · not."""
        n, m = whole_sizes(n, n if m is None else m)
        if n * m > CHUNK_PAIRS:
            raise ShapeError(
                f"a picture of {n:,} × {m:,} pairs is too large; draw fewer queries and keys: draw(64)"
            )
        table = self.allowed(n, m, at, self.device or "cpu")
        if table.dim() > 2:
            raise ShapeError(f"{self!r} differs along the batch; draw one row: pattern.allowed(n)[b, 0]")
        return "\n".join(" ".join("■" if cell else "·" for cell in row) for row in table.tolist())

    def json(self, indent: int | None = None) -> str:
        return value.to_json(self, indent)

    @staticmethod
    def from_text(text: str) -> "Pattern":
        """The pattern that `repr` or a person writes: `causal() & window(128)`."""
        from .parse import parse_pattern

        return parse_pattern(text)

    @staticmethod
    def from_json(text: str) -> "Pattern":
        return value.from_json(text, KINDS)


def write_text(pattern: Pattern, *parts: Pattern) -> None:
    """Give a frozen pattern its text, if all its parts have one.

    The JSON of whole numbers, None and patterns, without the json module: a traced graph may declare a pattern too.
    """
    if any(part.text is None for part in parts):
        return
    members = [f'"kind": "{type(pattern).__name__}"']
    for field in fields(pattern):  # type: ignore[arg-type]  # every pattern is a dataclass
        given = getattr(pattern, field.name)
        text = given.text if isinstance(given, Pattern) else "null" if given is None else str(index(given))
        members.append(f'"{field.name}": {text}')
    object.__setattr__(pattern, "text", "{" + ", ".join(members) + "}")


def _is_one(other: Any) -> bool:
    """Whether it is a pattern for all heads; per_head combines its own patterns, one by one."""
    if isinstance(other, Tensor):
        raise SpecError(
            "a tensor is not a pattern; use rg.lengths(l), rg.documents(ids) or rg.where(lambda i, j: mask[i, j]), "
            "or combine tables: rg.attention(q, k, v, pattern.allowed(n) & mask)"
        )
    if isinstance(other, type) and issubclass(other, Pattern):
        raise SpecError(
            f"{other.__name__} is a kind of pattern; write it with parentheses: {other.__name__}(…)"
        )
    return isinstance(other, Pattern) and not other.differs_by_head


def _need_patterns(composite: Pattern, *parts: Any) -> None:
    for part in parts:
        if not isinstance(part, Pattern):
            raise SpecError(f"{type(composite).__name__} combines patterns; {part!r} is not one")
        if part.differs_by_head:
            raise SpecError(f"{part!r} is one pattern for each head; combine it with &, |, ~ and -")


@dataclass(frozen=True, repr=False)
class Both(Pattern):
    """left & right."""

    left: Pattern
    right: Pattern

    def __post_init__(self):
        _need_patterns(self, self.left, self.right)
        write_text(self, self.left, self.right)

    def allows(self, i, j):
        return self.left.allows(i, j) & self.right.allows(i, j)

    def fold(self, leaf, both, either, negate):
        inner = (x.fold(leaf, both, either, negate) for x in (self.left, self.right))
        return both(*inner)

    def expanded(self):
        left, right = self.left.expanded(), self.right.expanded()
        return self if left is self.left and right is self.right else Both(left, right)

    def leaves(self):
        yield from self.left.leaves()
        yield from self.right.leaves()

    def terms(self):
        return counting.product(self.left.terms(), self.right.terms())

    def __repr__(self):
        # & binds tighter than | and to the left
        left = f"({self.left!r})" if isinstance(self.left, Either) else repr(self.left)
        right = f"({self.right!r})" if isinstance(self.right, Both | Either) else repr(self.right)
        return f"{left} & {right}"


@dataclass(frozen=True, repr=False)
class Either(Pattern):
    """left | right."""

    left: Pattern
    right: Pattern

    def __post_init__(self):
        _need_patterns(self, self.left, self.right)
        write_text(self, self.left, self.right)

    def allows(self, i, j):
        return self.left.allows(i, j) | self.right.allows(i, j)

    def fold(self, leaf, both, either, negate):
        inner = (x.fold(leaf, both, either, negate) for x in (self.left, self.right))
        return either(*inner)

    def expanded(self):
        left, right = self.left.expanded(), self.right.expanded()
        return self if left is self.left and right is self.right else Either(left, right)

    def leaves(self):
        yield from self.left.leaves()
        yield from self.right.leaves()

    def terms(self):
        a, b = self.left.terms(), self.right.terms()
        return counting.plus(counting.plus(a, b), counting.product(a, b), -1)

    def __repr__(self):
        right = f"({self.right!r})" if isinstance(self.right, Either) else repr(self.right)
        return f"{self.left!r} | {right}"


@dataclass(frozen=True, repr=False)
class Not(Pattern):
    """~inner: every pair that is not in inner."""

    inner: Pattern

    def __post_init__(self):
        _need_patterns(self, self.inner)
        write_text(self, self.inner)

    def allows(self, i, j):
        inner = self.inner.allows(i, j)
        return not inner if isinstance(inner, bool) else ~inner

    def fold(self, leaf, both, either, negate):
        return negate(self.inner.fold(leaf, both, either, negate))

    def expanded(self):
        inner = self.inner.expanded()
        return self if inner is self.inner else Not(inner)

    def leaves(self):
        yield from self.inner.leaves()

    def terms(self):
        return counting.plus({EVERYTHING: 1}, self.inner.terms(), -1)

    def __repr__(self):
        return f"~({self.inner!r})" if isinstance(self.inner, Both | Either) else f"~{self.inner!r}"


for kind in (Both, Either, Not):
    register(kind)


def whole_sizes(n: Any, m: Any) -> tuple[int, int]:
    """Numbers of queries and keys, as whole numbers."""
    for name, size in {"n": n, "m": m}.items():
        if not hasattr(size, "__index__") or size < 0:
            raise SpecError(f"{name}={size!r}: a number of positions needs to be a whole number >= 0")
    return index(n), index(m)


def query_offset(pattern: Pattern, n: int, m: int, at: At = None) -> tuple[int, int]:
    """(start, step): query r of n over m keys is at position start + step · r."""
    numbers = at if isinstance(at, tuple) and len(at) == 2 else (at,)
    if not (at is None or all(isinstance(x, int) or hasattr(x, "__index__") for x in numbers)):
        raise SpecError(f"at={at!r}: use a whole number, (start, step), or a tensor with one per batch row")
    if isinstance(at, tuple):
        start, step = at
        if step < 1:
            raise SpecError(f"at=({start}, {step}): the step between queries needs to be >= 1")
        return start, step
    if at is not None:
        return int(at), 1
    if n > m and pattern.reads_query:
        raise ShapeError(
            f"{n} queries over {m} keys: {pattern!r} compares positions, and query 0 would be at {m - n}; "
            f"give the query offset with at=, for example at=0"
        )
    return m - n, 1


def positions(
    pattern: Pattern, n: int, m: int, at: At | Tensor = None, device: torch.device | str | None = None
) -> Int[Tensor, "*b n"]:
    """The positions of the n queries: (n,), or (b, n) where `at` holds one offset per batch row."""
    if isinstance(at, Tensor):
        return at.to(device)[..., None] + torch.arange(n, device=device)
    start, step = query_offset(pattern, n, m, at)
    return start + step * torch.arange(n, device=device)
