"""Caches that keep exactly the keys that a future query may see under the patterns of `rg.use`.

A key is dropped after the last query that may attend to it. What remains keeps its position in the sequence, which is
not counted anew (some streaming caches do that). So generation equals the uncached model under the same pattern.
"""

from functools import reduce
from math import lcm
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from ...errors import SpecError
from ...pattern import Both, Either, Pattern, causal
from ...progression import FAR
from .attention import user_pattern
from .patterns import attention_modules

FOREVER = 1 << 62
MAX_PERIOD = 1 << 16  # queries after which a pattern repeats itself, at most


class StoredKeys(int):
    """A key offset of 0 that also says the position of each key: what a mask needs to know of a bounded cache."""

    positions: Tensor

    def __new__(cls, positions: Tensor) -> "StoredKeys":
        made = super().__new__(cls, 0)
        made.positions = positions
        return made


class Lifetimes:
    """Until which query each key may be seen, and so which keys are held. Shared by all layers of one pattern."""

    def __init__(self, pattern: Pattern):
        self.pattern = pattern if pattern == causal() else Both(causal(), pattern)
        self.reach, self.below, self.period = _horizon(self.pattern)
        self._step: tuple[Any, ...] | None = None

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

    def step(
        self, held: Tensor, ends: Tensor, seen: int, n: int
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """After n more keys: the positions of all present, then of those to keep: last queries, index, positions.

        Layers of one pattern ask the same question one after the other: the last answer is remembered.
        """
        if self._step is None or self._step[0] is not held or self._step[1] != (seen, n):
            new = torch.arange(seen, seen + n)
            present = torch.cat([held, new])
            ends = torch.cat([ends, self.last_queries(new)])
            keep = ends >= seen + n
            index = None if bool(keep.all()) else keep.nonzero()[:, 0]
            after = (present, ends) if index is None else (present[index], ends[index])
            self._step = (held, (seen, n), (present, index, *after))
        present, index, kept, kept_ends = self._step[2]
        return present, kept_ends, index, kept


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


class BoundedLayer(CacheLayerMixin):
    """The keys and values of one layer that a future query may see, in the order of their positions."""

    is_sliding = False
    is_croppable = False

    def __init__(self, lifetimes: Lifetimes):
        super().__init__()
        self.lifetimes = lifetimes
        self._forget()

    def _forget(self) -> None:
        self.keys = self.values = None
        self.is_initialized, self.cumulative_length = False, 0
        self.positions = self.ends = torch.empty(0, dtype=torch.long)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add keys and values; return these and all that were held, then drop what no later query may see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        keys = torch.cat([self.keys, key_states], 2)
        values = torch.cat([self.values, value_states], 2)
        n = key_states.shape[2]
        present, self.ends, index, self.positions = self.lifetimes.step(
            self.positions, self.ends, self.cumulative_length, n
        )
        self.cumulative_length += n
        if index is None:
            self.keys, self.values = keys, values
        else:
            index = index.to(keys.device)
            self.keys, self.values = keys.index_select(2, index), values.index_select(2, index)
        keys = keys.view_as(keys)  # another tensor than the one held: what follows is said of this one
        keys.regard_positions = present  # type: ignore[attr-defined]
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        new = torch.arange(self.cumulative_length, self.cumulative_length + query_length)
        return len(self.positions) + query_length, StoredKeys(torch.cat([self.positions, new]))

    def get_seq_length(self) -> int:
        """The length of the sequence so far, dropped keys included: the position of the next token."""
        return self.cumulative_length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self._forget()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise SpecError(
                "a bounded cache has dropped keys, so it cannot go back; assisted generation needs another cache"
            )

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            assert self.keys is not None and self.values is not None
            self.keys, self.values = (
                self.keys.repeat_interleave(repeats, 0),
                self.values.repeat_interleave(repeats, 0),
            )

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.is_initialized:
            assert self.keys is not None and self.values is not None
            self.keys, self.values = self.keys[indices], self.values[indices]


class BoundedCache(Cache):
    """A cache for `model.generate(…, past_key_values=BoundedCache(model))` after `rg.use(model, pattern)`.

    Each layer holds the keys that a future query of it may see: for `causal() & (window(w) | sinks(s))` w + s of
    them, however long the sequence. A layer without a pattern holds all of its keys.
    """

    def __init__(self, model: nn.Module):
        modules = [m for m in attention_modules(model).values() if getattr(m, "layer_idx", None) is not None]
        if not modules:
            raise SpecError(
                f"{type(model).__name__}: its attention layers do not know their numbers, so they have no cache"
            )
        if all(user_pattern(m) is None for m in modules):
            raise SpecError(
                "no layer has a pattern, so no key can be dropped; call rg.use(model, pattern) first"
            )
        shared: dict[Any, Lifetimes] = {}
        layers: dict[int, BoundedLayer] = {}
        for module in modules:
            given = user_pattern(module)
            each = given if isinstance(given, tuple) else (causal() if given is None else given,)
            needed = reduce(Either, dict.fromkeys(each))
            layers[int(module.layer_idx)] = BoundedLayer(  # type: ignore[arg-type]
                shared.setdefault(needed, Lifetimes(needed))
            )
        if sorted(layers) != list(range(len(layers))):
            raise SpecError(
                f"layers {sorted(layers)} have attention with a pattern; a bounded cache needs all from 0 on"
            )
        super().__init__(layers=[layers[k] for k in range(len(layers))])

    @property
    def held(self) -> list[int]:
        """How many keys each layer holds."""
        return [len(layer.positions) for layer in self.layers if isinstance(layer, BoundedLayer)]
