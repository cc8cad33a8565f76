"""Masks of transformers as patterns.

transformers describes a mask by a tree of closures: `and_masks` and `or_masks` over causal, sliding, chunked, packed,
blockwise and padding functions. `mask` reads that tree into a pattern and a range of keys for each batch row, checks
the result against the function itself on sampled rows, and returns a tensor that holds no n × m table until some
model code computes with it. What is not recognized becomes the table that PyTorch's attention would get.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from ...pattern import Both, Either, Pattern, blocks, causal, documents, full, window
from .lazy_mask import LazyMask, Mask, added_to_scores, positions_in_documents, positions_in_rows
from .lifetimes import Held

SAMPLED_ROWS = 8  # query rows on which a mask that was read is compared with the function it was read from
CHUNK_PAIRS = 1 << 24  # pairs of a mask evaluated at a time


@dataclass(frozen=True, eq=False)
class Read:
    """What was read from a mask function: a pattern, and the (b, length) tables of keys that take part."""

    pattern: Pattern
    padding: tuple[Tensor, ...] = ()
    # Ids of packed documents, (b, m): the positions of a user's pattern start at 0 in each document.
    packed: Tensor | None = None


CAUSAL, EVERYTHING = Read(causal()), Read(full())  # made once: they are read for every token


@dataclass(frozen=True)
class Frame:
    """The positions a mask function is read for: keys origin … origin + m − 1, queries origin + at + (0 … n − 1)."""

    batch: int
    n: int
    m: int
    at: int
    origin: int

    @property
    def reach(self) -> int:
        """The largest distance between a query and a key before it."""
        return self.at + self.n - 1


def _code(made: Any) -> CodeType:
    return made.__code__


_none = torch.zeros(1, 1, dtype=torch.long)
_AND = _code(masking_utils.and_masks())
_OR = _code(masking_utils.or_masks())
_SLIDING = _code(masking_utils.sliding_window_overlay(1))
_SLIDING_BOTH = _code(masking_utils.sliding_window_bidirectional_overlay(1))
_CHUNKED = _code(masking_utils.chunked_overlay(1, _none))
_BLOCKWISE = _code(masking_utils.blockwise_overlay(_none))
_PADDING = _code(masking_utils.padding_mask_function(_none))
_PACKED = _code(masking_utils.packed_sequence_mask_function(_none))
# Several model files define this one for themselves, with the same body.
_ASYMMETRIC = "sliding_window_mask_function.<locals>.inner_mask"


def read(function: Callable, frame: Frame) -> Read | None:
    """The meaning of a mask function of transformers; None if some part of it is not known."""
    if function is masking_utils.causal_mask_function:
        return CAUSAL
    if function is masking_utils.bidirectional_mask_function:
        return EVERYTHING
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    given = _closure(function)
    if code is _AND:
        return _read_both([read(f, frame) for f in given["mask_functions"]])
    if code is _OR:
        return _read_either([read(f, frame) for f in given["mask_functions"]])
    if code is _SLIDING:
        size = int(given["sliding_window"])
        if size < 1:
            return None
        if size > frame.reach:
            return Read(full())
        return Read(window(size - 1, after=max(frame.m, size)))
    if code is _SLIDING_BOTH:
        size = int(given["sliding_window"])
        return Read(full() if size >= max(frame.reach, frame.m - frame.at) else window(size))
    if code is _PADDING:
        return Read(full(), (given["padding_mask"],))
    if code is _CHUNKED:
        return _read_chunks(int(given["chunk_size"]), given["left_padding"], frame)
    if code is _PACKED:
        return _read_documents(given["packed_sequence_mask"], frame)
    if code is _BLOCKWISE:
        return _read_blockwise(given["block_sequence_ids"], frame)
    if getattr(function, "__qualname__", "") == _ASYMMETRIC and function.__module__.startswith(
        "transformers."
    ):
        return _read_asymmetric(given)
    return None


def _read_both(parts: list[Read | None]) -> Read | None:
    if any(part is None for part in parts):
        return None
    known = [part for part in parts if part is not None]
    patterns = [part.pattern for part in known if not isinstance(part.pattern, full)]
    if any(isinstance(p, causal) for p in patterns):  # written as users write it: its plans are shared
        patterns = [causal(), *(_behind(p) for p in patterns if not isinstance(p, causal))]
    pattern: Pattern = patterns[0] if patterns else full()
    for other in patterns[1:]:
        pattern = Both(pattern, other)
    packed = next((part.packed for part in known if part.packed is not None), None)
    return Read(pattern, tuple(x for part in known for x in part.padding), packed)


def _behind(pattern: Pattern) -> Pattern:
    """The same pattern where only keys at or before the query matter."""
    return window(pattern.before, after=0) if isinstance(pattern, window) else pattern


def _read_either(parts: list[Read | None]) -> Read | None:
    if any(part is None or part.padding for part in parts):
        return None
    known = [part.pattern for part in parts if part is not None]
    if any(isinstance(p, full) for p in known):
        return Read(full())
    pattern = known[0]
    for other in known[1:]:
        pattern = Either(pattern, other)
    return Read(pattern)


def _read_chunks(size: int, left: Tensor, frame: Frame) -> Read:
    """⌊(i − left)/size⌋ = ⌊(j − left)/size⌋: blocks, where they begin at key 0 of every batch row."""
    shifts = (frame.origin - left).tolist()
    if all(s % size == 0 for s in shifts):
        return Read(full() if size >= frame.m else blocks(size))
    ids = torch.arange(frame.m, device=left.device) + (frame.origin - left)[:, None]
    return Read(documents(torch.div(ids, size, rounding_mode="floor")))


def _read_documents(ids: Tensor, frame: Frame) -> Read | None:
    here = ids[:, frame.origin : frame.origin + frame.m]
    return Read(documents(here.long()), packed=here) if here.shape[1] == frame.m else None


def _read_blockwise(ids: Tensor, frame: Frame) -> Read | None:
    """Tokens of one block see each other; −1 is no block: an id of its own, so that it sees itself alone."""
    here = ids[:, frame.origin : frame.origin + frame.m].long()
    if here.shape[1] != frame.m:
        return None
    alone = -1 - torch.arange(frame.m, device=ids.device)
    return Read(documents(torch.where(here < 0, alone, here)))


def _read_asymmetric(given: Mapping[str, Any]) -> Read | None:
    sizes = given.get("sliding_window")
    if isinstance(sizes, int):
        sizes = (sizes, 0) if given.get("is_causal", True) else ((sizes + 1) // 2, sizes // 2 + 1)
    if not isinstance(sizes, tuple | list) or len(sizes) != 2:
        return None
    left, right = int(sizes[0]), int(sizes[1])
    return Read(window(left - 1, after=max(right - 1, 0))) if left >= 1 else None


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Any:
    """What transformers calls to build the mask of "regard": a LazyMask, or None where every pair is allowed.

    options: allow_is_bidirectional_skip, use_vmap, device, and others that say nothing about the mask.
    """
    use_vmap, device = options.get("use_vmap", False), torch.device(options.get("device", "cpu"))
    how = {
        "allow_is_causal_skip": False,
        "allow_is_bidirectional_skip": False,
        "use_vmap": use_vmap,
        "device": device,
    }
    given = (batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask)
    dtype = options.get("dtype") or torch.float32
    if _tracing(attention_mask, q_offset):
        return _traced_mask(given, how, dtype, getattr(options.get("config"), "regard_patterns", None))
    static = q_offset.clone() if isinstance(q_offset, Tensor) and q_length == 1 else None
    held = getattr(kv_offset, "held", None)  # a bounded cache says which keys it holds
    q_offset, kv_offset = int(q_offset), int(kv_offset)
    given = (batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask)
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)

    def build():
        return masking_utils.sdpa_mask(*given, **how)

    if held is not None:
        made = _bounded_mask(batch_size, q_length, q_offset, held, mask_function, attention_mask, device)
        return LazyMask.of(made, device, dtype)
    frame = Frame(batch_size, q_length, kv_length, q_offset - kv_offset, kv_offset)
    function = mask_function
    if padding is not None:
        function = masking_utils.and_masks(mask_function, masking_utils.padding_mask_function(padding))
    found = read(function, frame)
    if found is not None:
        found = _without_single_documents(found)
        made = _mask_of(found, frame, build, attention_mask)
        if not _agrees(made, function, frame, use_vmap, device):
            found, reason = None, f"it was read as {made.pattern!r}, which differs from it on sampled rows"
    else:
        reason = f"its function {getattr(mask_function, '__qualname__', mask_function)!r} is not known"
    if found is None:
        made = Mask(
            full(), frame.at, batch_size, q_length, kv_length, origin=kv_offset, dense=build(),
            note=f"the mask is a table of {q_length:,} × {kv_length:,}: {reason}",
        )  # fmt: skip
    elif options.get("allow_is_bidirectional_skip") and made.keys is None and isinstance(made.pattern, full):
        return None
    lazy = LazyMask.of(made, device, dtype)
    if static is not None:  # the next step of a static cache, which `generate` may run as a graph
        places = positions_in_rows(1, kv_length, static.to(device), kv_offset, attention_mask, device)
        lazy.for_graph = (build(), *places)
    return lazy


def _mask_of(found: Read, frame: Frame, build: Callable[[], Tensor], padding: Tensor | None) -> Mask:
    """padding: of the whole sequence, (b, all positions), also of keys that a sliding cache no longer has."""
    keys = None
    for table in found.padding:
        here = table[:, frame.origin : frame.origin + frame.m].bool()
        keys = here if keys is None else keys & here
    if keys is not None:
        keys = keys.expand(frame.batch, -1)
        if bool(keys.all()):
            keys = None
    counted, in_hole = None, False
    if frame.origin and keys is not None:
        before = torch.stack(
            [table[:, : frame.origin].bool().any(-1).expand(frame.batch) for table in found.padding]
        )
        in_hole = bool((before.all(0) & keys.any(-1) & ~keys[:, 0]).any())
    if found.packed is not None and frame.n == frame.m:
        places = positions_in_documents(found.packed.expand(frame.batch, -1), keys)
        counted = places, places
    elif frame.origin and padding is not None and padding.dim() == 2 and not bool(padding[:, 0].all()):
        at = frame.at + frame.origin
        counted = positions_in_rows(frame.n, frame.m, at, frame.origin, padding, padding.device)
    return Mask(
        found.pattern, frame.at, frame.batch, frame.n, frame.m, keys=keys, origin=frame.origin, build=build,
        counted=counted, begins_in_hole=in_hole,
    )  # fmt: skip


def _without_single_documents(found: Read) -> Read:
    """Packed ids that name one document hide nothing."""
    pattern = found.pattern
    if isinstance(pattern, Both) and isinstance(pattern.right, documents) and _single(pattern.right):
        return replace(found, pattern=pattern.left, packed=None)
    if isinstance(pattern, documents) and _single(pattern):
        return replace(found, pattern=full(), packed=None)
    return found


def _single(word: documents) -> bool:
    return bool((word.ids == word.ids[..., :1]).all())


_agreed: set[tuple] = set()


def _agrees(made: Mask, function: Callable, frame: Frame, use_vmap: bool, device: torch.device) -> bool:
    """Whether the mask allows what the function allows, on the first, the last and other sampled query rows.

    What depends on no tensor is compared once for each size, on the CPU: a decoder, which has another size at each
    step, would wait for the GPU.
    """
    static = made.keys is None and not made.pattern.has_data and made.pattern.text is not None
    key = (made.pattern.text, frame, _structure(function)) if static else None
    if key is not None and key in _agreed:
        return True
    batch = frame.batch
    if static and _reads_no_tensor(function):
        batch, device = 1, torch.device("cpu")
    rows = sampled_rows(frame.n).to(device)
    j = torch.arange(frame.m, device=device)
    i = rows + frame.at
    said = torch.as_tensor(made.pattern.allows(i[:, None], j), device=device)
    if made.keys is not None:
        said = said & made.keys[:, None, None, :]
    if said.dim() < 4:
        said = said.expand(1, 1, len(rows), frame.m)
    meant = _evaluate(function, batch, i + frame.origin, j + frame.origin, use_vmap, device)
    same = bool((said == meant).all())
    if same and key is not None:
        if len(_agreed) > 4096:
            _agreed.clear()
        _agreed.add(key)
    return same


def sampled_rows(n: int) -> Tensor:
    """Query rows: the first, the last, and others spread between them at unequal distances."""
    if n <= SAMPLED_ROWS:
        return torch.arange(n)
    return torch.tensor(sorted({0, 1, n - 1, n // 2, *(int(n * x) for x in (0.13, 0.29, 0.618, 0.83))}))


def _structure(function: Callable) -> tuple:
    """The code and the numbers of a tree of mask functions: equal for functions that mean the same."""
    if not hasattr(function, "__code__"):
        return (id(function),)
    parts: list[Any] = [function.__code__]
    for name, x in sorted(_closure(function).items()):
        if name == "mask_functions":
            parts.extend(_structure(f) for f in x)
        elif isinstance(x, Tensor):
            parts.append((name, tuple(x.shape), id(x)))
        else:
            parts.append((name, repr(x)))
    return tuple(parts)


def _reads_no_tensor(function: Callable) -> bool:
    if not hasattr(function, "__code__"):
        return False
    given = _closure(function)
    parts = given.pop("mask_functions", ())
    return all(x is None or isinstance(x, int | float) for x in given.values()) and all(
        map(_reads_no_tensor, parts)
    )


def _closure(function: Callable) -> dict[str, Any]:
    """The variables of the function that defined it. inspect.getclosurevars would look up its globals as well."""
    return dict(
        zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()))
    )


def _evaluate(
    function: Callable, batch: int, i: Tensor, j: Tensor, use_vmap: bool, device: torch.device
) -> Tensor:
    b, h = torch.arange(batch, device=device), torch.arange(1, device=device)
    if use_vmap:
        for dims in (
            (None, None, None, 0),
            (None, None, 0, None),
            (None, 0, None, None),
            (0, None, None, None),
        ):
            function = torch.vmap(function, in_dims=dims, out_dims=0)
        with masking_utils.TransformGetItemToIndex():
            return function(b, h, i, j)
    found = function(b[:, None, None, None], h[None, :, None, None], i[None, None, :, None], j)
    return found.expand(batch, 1, len(i), len(j))


def _bounded_mask(
    batch: int,
    n: int,
    q_offset: int,
    held: Held,
    function: Callable,
    attention_mask: Tensor | None,
    device: torch.device,
) -> Mask:
    """The mask over the keys that a bounded cache holds, at their positions in the sequence."""
    m, length = len(held.present), q_offset + n
    keys, real = None, None
    if attention_mask is not None:
        whole = torch.nn.functional.pad(attention_mask, (0, max(0, length - attention_mask.shape[1])))
        real = whole[:, :length].bool().expand(batch, -1)
        real = None if bool(real.all()) else real
    if real is not None:
        keys = real[:, held.positions.to(device)]
        keys = None if bool(keys.all()) else keys
    found = read(function, Frame(batch, n, length, q_offset, 0))

    def build() -> Tensor:
        i, j = torch.arange(n, device=device) + q_offset, held.positions.to(device)
        allowed = _evaluate(function, batch, i, j, False, device)
        return allowed if keys is None else allowed & keys[:, None, None, :]

    if found is None or found.padding or found.pattern.has_data:
        return Mask(full(), q_offset, batch, n, m, held=held, dense=build(), note="a bounded cache")
    return Mask(found.pattern, q_offset, batch, n, m, keys=keys, held=held, real=real, build=build)


# Under torch.compile


@dataclass(frozen=True, eq=False)
class TracedMask:
    """For a graph, in which nothing is read from a tensor: a pattern without data, or a table with positions."""

    pattern: Pattern
    at: Any
    table: Tensor | None = None
    counted: tuple[Tensor, Tensor] | None = None


def _tracing(*tensors: Any) -> bool:
    return torch.compiler.is_compiling() or any(
        masking_utils.is_tracing(x) for x in tensors if isinstance(x, Tensor)
    )


def _traced_mask(given: tuple, how: dict[str, Any], dtype: torch.dtype, patterns: Any) -> Any:
    """A pattern where the whole mask is causal and nothing is read from tensors, as in training; else the table.

    patterns: those of `rg.use`, if any; they count from the first real token of each row, so that the table goes
    together with positions.
    """
    _, n, m, q_offset, kv_offset, function, attention_mask = given
    plain = attention_mask is None and not isinstance(q_offset, Tensor) and not isinstance(kv_offset, Tensor)
    if plain and function is masking_utils.causal_mask_function:
        return TracedMask(causal(), q_offset - kv_offset)
    table = masking_utils.sdpa_mask(*given, **how)
    assert table is not None  # nothing in `how` allows that
    if not patterns:
        return added_to_scores(table, dtype)
    counted = positions_in_rows(n, m, q_offset, kv_offset, attention_mask, how["device"])
    return TracedMask(full(), q_offset - kv_offset, table, counted)
