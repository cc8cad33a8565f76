"""Caches that keep exactly the keys that a future query may see under the patterns of `rg.use`.

A key is dropped after the last query that may attend to it. The others keep their positions in the sequence (some
streaming caches renumber them), so generation equals the uncached model under the same pattern.
"""

from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from ...errors import SpecError
from ...pattern import Either, causal
from .attention import user_pattern
from .lazy_mask import StoredKeys
from .lifetimes import Held, Lifetimes
from .patterns import attention_modules


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
        self.is_initialized, self.held = False, self.lifetimes.nothing

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
        n, before = key_states.shape[2], len(self.held.stored)
        held = self.held = self.held.step(n)
        self.keys, keys = _stepped(self.keys, key_states, held, before)
        self.values, values = _stepped(self.values, value_states, held, before)
        keys.regard_held = held  # type: ignore[attr-defined]
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        held = self.held.step(query_length)
        return len(held.present), StoredKeys(held)

    def get_seq_length(self) -> int:
        """The length of the sequence so far, dropped keys included: the position of the next token."""
        return self.held.seen

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


def _stepped(buffer: Tensor, new: Tensor, held: Held, before: int) -> tuple[Tensor, Tensor]:
    """What is stored after a step, and what its queries attend to: another tensor, of which more can be said."""
    if held.first is not None:
        buffer = buffer.index_select(2, held.first.to(buffer.device))
        before = len(held.first)
    n, count = new.shape[2], len(held.present)
    if n > 1:
        present = torch.cat([buffer[:, :, :before], new], 2)
        stored = present if held.keep is None else present.index_select(2, held.keep.to(present.device))
        return stored, present.view_as(present)
    if torch.is_grad_enabled():  # what a backward pass needs is not written over
        place = torch.tensor([held.place], device=new.device)
        wide = nn.functional.pad(buffer[:, :, :before], (0, 0, 0, count - before))
        stored = wide.index_copy(2, place, new)
        return stored, stored.view_as(stored)
    if buffer.shape[2] < count or buffer.is_inference() != torch.is_inference_mode_enabled():
        wide = buffer.new_empty(*buffer.shape[:2], count + count // 4, buffer.shape[3])
        wide[:, :, :before] = buffer[:, :, :before]
        buffer = wide
    buffer[:, :, held.place : held.place + 1] = new
    return buffer, buffer[:, :, :count]


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
        return [layer.held.count for layer in self.layers if isinstance(layer, BoundedLayer)]
