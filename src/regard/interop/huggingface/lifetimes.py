"""Which keys a future query may see under a pattern, and so which keys a bounded cache holds, and where.

A key is dropped after the last query that may attend to it. The next key takes its place, so that a step of
generation copies one key and not all of them. Positions are those of the sequence; they are never renumbered.
"""

from functools import cached_property, reduce
from math import lcm
from typing import Any

import torch
from torch import Tensor

from ...errors import SpecError
from ...pattern import Both, Pattern, causal
from ...progression import FAR

FOREVER = 1 << 62
MAX_PERIOD = 1 << 16  # queries after which a pattern repeats itself, at most
AHEAD = 256  # positions for which last queries and row counts are computed at a time

Expiring = dict[int, tuple[int, ...]]  # a query → the places of the keys that no later query may see


class Held:
    """What a cache holds, and how the last step came to it. All layers of one pattern share it.

    present: the positions of the keys that the queries of the step attended to, by place in their tensor.
    stored: the positions of the keys in the cache after the step, by place.
    """

    def __init__(
        self, lifetimes: "Lifetimes", seen: int, present: list[int], stored: list[int], expiring: Expiring
    ):
        self.lifetimes, self.seen = lifetimes, seen
        self.present, self.stored, self.expiring = present, stored, expiring
        self.first: Tensor | None = None  # the places, before the step, of what comes first now; None: all
        self.place = 0  # where a single new key is
        self.keep: Tensor | None = (
            None  # the places of `present` that are stored after several keys; None: all
        )
        self.memo: dict[Any, Any] = {}  # what a layer computed for these keys, for the others

    @property
    def count(self) -> int:
        """How many keys a later query may see."""
        return len(self.stored) - len(self.expiring.get(self.seen - 1, ()))

    @cached_property
    def complete(self) -> bool:
        """Whether the last query may see every key that is present."""
        return self.lifetimes.visible(self.seen - 1) == len(self.present)

    @cached_property
    def positions(self) -> Tensor:
        """The positions of the keys that are present, sorted."""
        return torch.tensor(sorted(self.present))

    @cached_property
    def order(self) -> Tensor | None:
        """The places in the order of their positions; None where they have that order."""
        places = sorted(range(len(self.present)), key=self.present.__getitem__)
        return None if places == list(range(len(places))) else torch.tensor(places)

    def step(self, n: int) -> "Held":
        """After n more keys. Layers ask one after the other: the last answer is remembered."""
        before, count, after = self.lifetimes.last_step
        if before is not self or count != n:
            after = self._one() if n == 1 else self._several(n)
            self.lifetimes.last_step = (self, n, after)
        return after

    def _one(self) -> "Held":
        stored, expiring, seen = self.stored.copy(), self.expiring.copy(), self.seen
        place, first = len(stored), None
        if gone := expiring.pop(seen - 1, ()):
            place = gone[0]
            if len(gone) > 1:
                kept = sorted(set(range(len(stored))).difference(gone[1:]))
                now = {old: new for new, old in enumerate(kept)}
                stored, place, first = [stored[p] for p in kept], now[place], torch.tensor(kept)
                expiring = {end: tuple(now[p] for p in places) for end, places in expiring.items()}
            stored[place] = seen
        else:
            stored.append(seen)
        end = max(seen, self.lifetimes.end(seen))
        if end < FOREVER:
            expiring[end] = (*expiring.get(end, ()), place)
        made = Held(self.lifetimes, seen + 1, stored, stored, expiring)
        made.first, made.place = first, place
        return made

    def _several(self, n: int) -> "Held":
        """All that is needed, then the new keys."""
        ends = {place: end for end, places in self.expiring.items() for place in places}
        kept = [place for place in range(len(self.stored)) if ends.get(place, FOREVER) >= self.seen]
        seen = self.seen + n
        present = [self.stored[place] for place in kept] + list(range(self.seen, seen))
        last = [ends.get(place, FOREVER) for place in kept]
        last += self.lifetimes.last_queries(torch.arange(self.seen, seen)).tolist()
        needed = [place for place, end in enumerate(last) if end >= seen]
        expiring: Expiring = {}
        for place, old in enumerate(needed):
            if last[old] < FOREVER:
                expiring[last[old]] = (*expiring.get(last[old], ()), place)
        made = Held(self.lifetimes, seen, present, [present[p] for p in needed], expiring)
        made.first = None if kept == list(range(len(self.stored))) else torch.tensor(kept, dtype=torch.long)
        made.keep = None if len(needed) == len(present) else torch.tensor(needed, dtype=torch.long)
        return made


class Lifetimes:
    """Until which query each key may be seen, for a pattern on top of a causal mask."""

    def __init__(self, given: Pattern):
        self.given = given
        self.pattern = given if given == causal() else Both(causal(), given)
        self.reach, self.below, self.period = _horizon(self.pattern)
        self._ahead: tuple[int, list[int], list[int]] = (-1, [], [])
        self.nothing = Held(self, 0, [], [], {})  # what an empty cache holds
        self.last_step = (self.nothing, 0, self.nothing)

    def end(self, key: int) -> int:
        """The position of the last query that may attend to a key; FOREVER if there is none, −1 if no query may."""
        return self._read_ahead(key)[1][key % AHEAD]

    def visible(self, query: int) -> int:
        """How many keys a query may attend to."""
        return self._read_ahead(query)[2][query % AHEAD]

    def _read_ahead(self, position: int) -> tuple[int, list[int], list[int]]:
        start = position - position % AHEAD
        if self._ahead[0] != start:
            counts = self.pattern.row_counts(AHEAD, start + AHEAD, start)
            ends = self.last_queries(torch.arange(start, start + AHEAD))
            self._ahead = (start, ends.tolist(), counts.tolist())
        return self._ahead

    def last_queries(self, keys: Tensor) -> Tensor:
        """The position of the last query that may attend to each of the keys; FOREVER if there is none."""
        distances = torch.arange(max(self.reach, self.below - int(keys[0])) + 1)
        found = []
        for part in keys.split(max(1, (1 << 22) // len(distances))):
            i = part[:, None] + distances
            seen = torch.as_tensor(self.pattern.allows(i, part[:, None])).expand(i.shape)
            last = torch.where(seen, i, -1).amax(-1)
            later = i[:, -1:] + 1 + torch.arange(self.period)
            always = torch.as_tensor(self.pattern.allows(later, part[:, None])).expand(later.shape).any(-1)
            found.append(torch.where(always, FOREVER, last))
        return torch.cat(found)


def _horizon(pattern: Pattern) -> tuple[int, int, int]:
    """(distance, position, period): beyond that distance from a key and that position, only i mod period matters."""
    reach, below, periods = 0, 0, [1]
    for leaf in pattern.leaves():
        relation = getattr(leaf, "relation", None)
        if relation is None:
            raise SpecError(f"{leaf!r} carries data, so no cache can know which keys it will need")
        bounds = [abs(x) for x in (relation.near, relation.far) if abs(x) < FAR]
        reach = max([reach, *bounds, *relation.blocks])
        below = max(below, relation.query_below if relation.query_below < FAR else 0)
        periods += [relation.divisor, relation.query_class[0]]
    period = reduce(lcm, periods)
    if period > MAX_PERIOD:
        raise SpecError(
            f"{pattern!r} repeats itself after {period:,} queries only; at most {MAX_PERIOD:,} are supported"
        )
    return reach, below, period
