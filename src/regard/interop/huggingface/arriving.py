"""What a layer of transformers gives to its attention: masks of any kind, biases, packed documents, stored keys."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ... import compat
from ...errors import ShapeError, SpecError
from ...pattern import Both, Pattern, causal, documents, full, window
from .lazy_mask import LazyMask, Mask, positions_in_documents, starts_of_rows
from .lifetimes import Held
from .masks import TracedMask
from .problems import allowed, is_causal

# Words in the name of an argument that changes the weights. One that "regard" does not know is an error, not a loss.
CHANGES_WEIGHTS = ("bias", "softcap", "sink", "alibi", "head_mask", "relative", "temperature")
PAIRS_AT_A_TIME = 1 << 24  # of queries and dropped keys
UserPattern = Pattern | tuple[Pattern, ...] | None


def mask_and_bias(
    module: nn.Module, q: Tensor, k: Tensor, given: Any, kwargs: dict[str, Any]
) -> tuple[Mask, Tensor | None]:
    """What a mask of any kind means, and what of it is added to the scores."""
    batch, n, m = q.shape[0], q.shape[2], k.shape[2]
    bias = None
    if isinstance(given, LazyMask) and given.for_graph is not None and torch.compiler.is_compiling():
        table, i, j = given.for_graph
        return Mask(full(), 0, batch, n, m, dense=table[..., :m], counted=(i, j[:, :m])), None
    if isinstance(given, LazyMask):
        mask = given.mask
        if mask.batch != batch:
            mask = _of_batch(mask, batch, given)
    elif isinstance(given, TracedMask):
        mask = _in_graph(given, batch, n, m, kwargs.get("position_ids"))
    elif given is None:
        mask = _unmasked(module, batch, n, m, kwargs)
    elif not isinstance(given, Tensor):
        raise SpecError(
            f'attention_mask is a {type(given).__name__}; "regard" takes its own masks, a bool tensor (True = may '
            f"attend) or a tensor that is added to the scores"
        )
    else:
        given = given if given.dim() >= 3 else given[:, None, None, :]
        given = given[:, None] if given.dim() == 3 else given
        given = given[..., :m] if given.shape[-1] > m else given
        mask, bias = _from_tensor(given, batch, n, m)
    if not isinstance(given, TracedMask) and mask.dense is None:
        mask = _with_documents(mask, kwargs)
    return mask, bias


def _in_graph(given: TracedMask, batch: int, n: int, m: int, positions: Any) -> Mask:
    """The mask in a compiled graph, where packed documents have to be found with tensor operations alone."""
    table, counted = given.table, given.counted
    if n == m and n > 1 and isinstance(positions, Tensor) and positions.dim() == 2:
        starts = (positions[:, 1:] <= positions[:, :-1]).long()
        ids = nn.functional.pad(starts.cumsum(-1), (1, 0))
        if (
            table is None
        ):  # a table would cost every model n × n; the compiler keeps an assertion of this form
            assert (starts == 0).all(), (
                "position_ids start anew within a row: a compiled graph cannot separate such packed documents where "
                "there is a cache and no mask; call the model with use_cache=False"
            )
        else:
            table = table & (ids[:, None, :, None] == ids[:, None, None, :])
        if counted is not None:
            found = positions_in_documents(ids, None)
            counted = torch.minimum(counted[0], found), torch.minimum(counted[1], found)
    return Mask(given.pattern, given.at, batch, n, m, dense=table, counted=counted)


def _from_tensor(given: Tensor, batch: int, n: int, m: int) -> tuple[Mask, Tensor | None]:
    if given.dtype == torch.bool:
        note = f"the model gave a table of {tuple(given.shape)}"
        return Mask(full(), m - n, batch, n, m, dense=given, note=note), None
    if not given.is_floating_point():
        raise SpecError(
            f"attention_mask is {given.dtype} of shape {tuple(given.shape)}: is 1 'may attend', or is it added to "
            f"the scores? Give a bool tensor or a float one"
        )
    return Mask(
        full(), m - n, batch, n, m, note="the model gave a float mask, which is added to the scores"
    ), given


def _unmasked(module: nn.Module, batch: int, n: int, m: int, kwargs: dict[str, Any]) -> Mask:
    """No mask: all pairs, as in eager, unless the call has is_causal=True (aligned at the first key).

    A module's attribute `is_causal` does not count: the masks that are made for "regard" are never None where they
    hide something, and a layer that is called without one attends everywhere in eager.
    """
    sliding = kwargs.get("sliding_window")
    if not (kwargs.get("is_causal") and n > 1):
        return Mask(full(), max(0, m - n), batch, n, m)
    pattern: Pattern = causal()
    if sliding is not None and sliding < n:
        pattern = Both(pattern, window(int(sliding) - 1, after=0))
    return Mask(pattern, 0, batch, n, m)


def _of_batch(mask: Mask, batch: int, given: LazyMask) -> Mask:
    """A mask for another batch than that of the queries: one row for all of them, or each row repeated."""
    if mask.keys is None and mask.real is None and not mask.pattern.has_data and mask.dense is None:
        return Mask(mask.pattern, mask.at, batch, mask.n, mask.m, origin=mask.origin, build=mask.build)
    table = mask.table()
    if batch % mask.batch:
        raise ShapeError(f"a mask for a batch of {mask.batch} and queries for a batch of {batch}")
    note = f"the mask is of a batch of {mask.batch} and the queries of {batch}"
    return Mask(full(), mask.at, batch, mask.n, mask.m, dense=table.expand(batch, -1, -1, -1) if
                mask.batch == 1 else table.repeat_interleave(batch // mask.batch, 0), note=note)  # fmt: skip


def _with_documents(mask: Mask, kwargs: dict) -> Mask:
    """Packed sequences: positions that restart, or cu_seq_lens_q, begin a document that sees no other."""
    if (
        mask.n <= 1
        or mask.n != mask.m
        or mask.at != 0
        or mask.pattern.has_data
        or not is_causal(mask.pattern)
    ):
        return mask
    ids = _ids_from_lengths(kwargs.get("cu_seq_lens_q"), mask)
    if ids is None:
        ids = _ids_from_positions(kwargs.get("position_ids"), mask)
    if ids is None:
        return mask
    pattern = Both(mask.pattern, documents(ids))
    found = positions_in_documents(ids, mask.keys)
    counted = found, found
    return Mask(pattern, 0, mask.batch, mask.n, mask.m, keys=mask.keys, origin=mask.origin, counted=counted)


def _ids_from_lengths(bounds: Any, mask: Mask) -> Tensor | None:
    if not isinstance(bounds, Tensor) or mask.batch != 1 or bounds.numel() <= 2:
        return None
    if int(bounds[-1]) != mask.m:
        raise ShapeError(f"cu_seq_lens_q ends at {int(bounds[-1])} and there are {mask.m} keys")
    places = torch.arange(mask.m, device=bounds.device, dtype=bounds.dtype)
    return torch.bucketize(places, bounds[1:], right=True)[None]


_last_positions: dict[str, Any] = {}


def _ids_from_positions(given: Any, mask: Mask) -> Tensor | None:
    """Ids of documents, where 2-D position ids of real tokens do not increase somewhere; read once per forward."""
    if not isinstance(given, Tensor) or given.dim() != 2 or given.shape[1] != mask.m:
        return None
    seen = _last_positions.get("of")
    version = compat.version(given)
    if (
        version is not None
        and seen is not None
        and seen() is given
        and _last_positions["key"] == (version, id(mask.keys))
    ):
        return _last_positions["ids"]
    starts = given[:, 1:] <= given[:, :-1]
    if mask.keys is not None:
        starts = starts & mask.keys[:, 1:] & mask.keys[:, :-1]
    ids = None
    if bool(starts.any()):
        ids = nn.functional.pad(starts.long().cumsum(-1), (1, 0)).expand(mask.batch, -1)
    _last_positions.update(of=weakref.ref(given), key=(version, id(mask.keys)), ids=ids)
    return ids


def fitting(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One dtype and one batch."""
    if not q.dim() == k.dim() == v.dim() == 4:
        name, x = next((name, x) for name, x in (("query", q), ("key", k), ("value", v)) if x.dim() != 4)
        raise ShapeError(
            f"{type(module).__name__}: {name} has shape {tuple(x.shape)}; (batch, heads, positions, width) is needed"
        )
    if not q.dtype == k.dtype == v.dtype:
        dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    (b, heads, _, _), (b_k, kv_heads, _, _) = q.shape, k.shape
    if not b == b_k == v.shape[0]:
        batch = max(b, b_k, v.shape[0])
        q, k, v = (x if x.shape[0] == batch else x.expand(batch, -1, -1, -1) for x in (q, k, v))
    if heads % kv_heads:
        raise ShapeError(f"{type(module).__name__}: {kv_heads} key heads do not divide {heads} query heads")
    return q, k, v


def fitting_bias(bias: Tensor, q: Tensor, k: Tensor) -> Tensor:
    bias = bias if bias.dim() == 4 else bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))
    need = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if bias.shape[3] > need[3]:
        bias = bias[..., : need[3]]
    if bias.shape[0] not in (1, need[0]) and need[0] % bias.shape[0] == 0:
        bias = bias.repeat_interleave(need[0] // bias.shape[0], 0)
    return bias


def fit_keys(module: nn.Module, mask: Mask, k: Tensor) -> Mask:
    """A mask of one column is for all keys, as broadcasting reads it; other sizes must agree."""
    m = k.shape[2]
    if mask.m == 1:
        return Mask(full(), 0, mask.batch, mask.n, m, dense=mask.table().expand(-1, -1, -1, m))
    raise ShapeError(
        f"{type(module).__name__}: the mask is for {mask.m} keys and there are {m}. The cache does not say how many "
        f"keys it returns: get_mask_sizes and update of its layer disagree"
    )


def sees_all(mask: Mask, held: Held, user: UserPattern) -> bool:
    """Whether one query may see every key that a bounded cache holds for it, by the mask and by the pattern."""
    return (
        mask.n == 1
        and mask.held is not None
        and mask.dense is None
        and isinstance(mask.pattern, causal)
        and (held.lifetimes.given is user or held.lifetimes.given == user)
        and held.complete
        and (mask.real is None or held.lifetimes.given.shift_period == 1)
        and mask.keys_of(held) is None
    )


def at_stored_positions(module: nn.Module, mask: Mask, held: Held | None, user: UserPattern) -> Mask:
    """A bounded cache: the mask at the positions of the keys that this layer's cache holds."""
    if held is None:
        raise SpecError(
            f"{type(module).__name__}: the mask is for a bounded cache, but the keys do not say their positions; "
            f"this model changes the keys after the cache returns them, so it cannot use one"
        )
    if mask.dense is not None or mask.pattern.has_data:
        raise SpecError(
            "a bounded cache needs a mask that is a pattern; this one is a table or packed documents"
        )
    if mask.keys is not None and mask.real is None:
        raise SpecError(
            "this model makes a mask with padding without asking the bounded cache which keys it holds: give rows of "
            "one length, or another cache"
        )
    keys, stored = mask.keys_of(held), held.positions
    first, last = int(stored[0]), int(stored[-1])
    contiguous = last - first + 1 == len(stored)
    whole = contiguous and first == 0  # no key has been dropped
    counted = None
    if mask.real is not None and not whole:
        users = dict.fromkeys(user if isinstance(user, tuple) else (user,))
        if naming := [u for u in users if u is not None and u.shift_period != 1]:
            keys, counted = _counted_from_first_token(mask, held, naming)
    pattern, b, n, m = mask.pattern, mask.batch, mask.n, len(stored)
    if whole or (contiguous and pattern.shift_period == 1):
        return Mask(pattern, mask.at - first, b, n, m, keys=keys, origin=first, counted=counted)
    return Mask(pattern, mask.at, b, n, m, keys=keys, held=held, counted=counted)


def _counted_from_first_token(
    mask: Mask, held: Held, users: list[Pattern]
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Which stored keys are real, and the positions of queries and keys counted from the first token of each row.

    The cache drops keys by their positions in the sequence. Where left padding moves the positions of a pattern, a
    query may need a key that was dropped, which is an error.
    """
    assert mask.real is not None
    key = "counted", held, *users
    if key not in mask.memo:
        device = mask.real.device
        starts, stored = starts_of_rows(mask.real), held.positions.to(device)
        i = torch.arange(mask.n, device=device) + mask.at
        moved = [u for u in users if bool((starts % u.shift_period if u.shift_period else starts).any())]
        if moved:
            _refuse_if_dropped(mask, i, stored, starts, moved)
        mask.memo[key] = mask.real[:, stored], (i - starts, stored - starts)
    return mask.memo[key]


def _refuse_if_dropped(mask: Mask, i: Tensor, stored: Tensor, starts: Tensor, users: list[Pattern]) -> None:
    """An error where a query at one of the positions i may attend to a real key that the cache no longer holds."""
    assert mask.real is not None
    dropped = torch.ones(mask.real.shape[1], dtype=torch.bool, device=i.device)
    dropped[stored] = False
    j, start = dropped.nonzero()[:, 0], starts[:, :, None]
    for here in i[:, None].split(max(1, PAIRS_AT_A_TIME // max(1, mask.batch * len(j)))):
        there = mask.real[:, None, j] & torch.as_tensor(mask.pattern.allows(here, j), device=j.device)
        for user in users:
            if bool((there & torch.as_tensor(user.allows(here - start, j - start), device=j.device)).any()):
                raise SpecError(
                    "left padding moves the positions that this pattern names (sinks, every, blocks), and the "
                    "bounded cache has dropped keys that it now needs; generate rows of one length together, or use "
                    "another cache"
                )


def only_selected(mask: Mask, indices: Tensor, device: torch.device) -> Mask:
    """The keys that an indexer selected for each query, (b, n, count), of those that the mask allows."""
    table = allowed(mask, None, device)
    chosen = torch.zeros(indices.shape[0], indices.shape[1], mask.m + 1, dtype=torch.bool, device=device)
    chosen.scatter_(-1, torch.where(indices < 0, mask.m, indices.long()), True)
    note = f"the model selects {indices.shape[-1]} keys for each query"
    return Mask(full(), mask.at, mask.batch, mask.n, mask.m, origin=mask.origin,
                dense=table & chosen[:, None, :, : mask.m], note=note)  # fmt: skip


def refuse_unknown(module: nn.Module, kwargs: dict) -> None:
    for name, x in kwargs.items():
        if isinstance(x, (Tensor, float)) and _changes_weights(name):
            raise SpecError(
                f'{type(module).__name__} gives {name}=…, which "regard" does not know; '
                f'use attn_implementation="eager" for this model'
            )


def _changes_weights(name: str) -> bool:
    if name in ("position_bias", "softcap"):  # which are computed
        return False
    return any(word in name for word in CHANGES_WEIGHTS)
