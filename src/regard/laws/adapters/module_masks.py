"""The masks of a module (of pairs, of keys, of the context), determined from the inputs that have an effect."""

from typing import Any

import torch
from torch import Tensor

from ..probe import describe
from .mask_encoding import MaskEncoding, find_encoding
from .names import CONTEXT_PADDING, polarity, says_added, says_integers

MODEL_PAIRS = ("(b, n, m)", "(b, 1, n, m)", "(b, h, n, m)", "(n, m)")
MODEL_KEYS = ("(b, m)", "(b, 1, 1, m)", "(b, 1, m)")


def _table(by_pairs: bool, b: int) -> Tensor:
    if not by_pairs:
        return (torch.arange(5) < torch.tensor([3, 4, 2, 3])[:b, None])[:, None, None]
    g = torch.Generator().manual_seed(3)
    return (torch.rand(b, 1, 5, 5, generator=g) < 0.5) | torch.eye(5, dtype=torch.bool)


def read_masks(reader: Any) -> set[str]:
    """Find the encodings of the mask, the padding mask and the context's mask; returns the claims that follow."""
    claims = {name for name in reader.names if name != "mask"}
    if reader.length is not None:  # masks are probed with several lengths
        return claims - {"lengths", "documents"}
    name = next((n for n in CONTEXT_PADDING if n in reader.parameters), None)
    if "mask" in reader.names and name is None and reader.required_context and _only_context(reader):
        name = reader.names["mask"]  # the only keys are those of the context
        reader.context_mask = name
    elif "mask" in reader.names:
        claims |= _read_mask(reader, reader.names["mask"])
    if reader.padding is not None:
        side = reader.hints.mask or polarity(reader.padding, reader.text)
        found = _padding(reader, "padding", [side])
        reader.encodings["padding"] = found or MaskEncoding("(b, m)", _bool(side))
        reader.notes.append(f"{reader.padding}: {reader.encodings['padding']}")
        claims |= {"lengths", "left padding"}
    if _says_integers(reader):
        claims |= {"integer mask"}
    if name is not None and reader.context is not None and not reader.three:
        side = reader.hints.mask or polarity(name, reader.text, "hide" if "padding" in name else "keep")
        found = _context_padding(reader, [side])
        if found is not None:
            reader.encodings["context"] = found
            reader.notes.append(f"{name}: {found}")
            claims |= {"context lengths"}
    return claims


def _says_integers(reader: Any) -> bool:
    """Whether the mask that lengths are given by takes bools, and is said to take integers as well."""
    name, encoding = reader.padding or reader.names.get("mask"), reader.encodings.get("padding")
    if name is None or encoding is None or "lengths" in reader.names:
        return False
    return encoding.kind.startswith("bool") and says_integers(name, reader.text)


def _only_context(reader: Any) -> bool:
    """Whether an output depends on no other position of the input: cross-attention alone."""
    effect = _plain_effect(reader)
    return effect is not None and not bool((effect & ~torch.eye(5, dtype=torch.bool)).any())


def _plain_effect(reader: Any) -> Tensor | None:
    """Which inputs have an effect if nothing is masked; None, with a note, if such a call raises."""
    try:
        return reader.effect()
    except Exception as e:  # foreign code, which may raise anything
        note = f"masks are not checked: a call without a mask raised {describe(e)}"
        reader.notes += [] if note in reader.notes else [note]
        return None


def _bool(side: str) -> str:
    return "bool, True = may attend" if side == "keep" else "bool, True = masked"


def _read_mask(reader: Any, name: str) -> set[str]:
    """A mask of pairs, of keys, or of both; the polarity of a module's `attn_mask` depends on the library."""
    stated = polarity(name, reader.text, default="")
    side = reader.hints.mask or stated or "keep"
    sides = [side] if reader.hints.mask or stated or name != "attn_mask" else ["hide", "keep"]
    off = ~torch.eye(5, dtype=torch.bool)

    def pairs(encoding: MaskEncoding, table: Tensor) -> Tensor:
        reader.encodings["mask"] = encoding
        # Fewer positions than batch rows: a mask that is cut to the length must not be cut along the batch.
        reader.output(
            reader.sample(len(table), 2), reader.needed_context(len(table), 2), allowed=table[:, 0, :2, :2]
        )
        effect = reader.effect(allowed=table[:, 0])
        return torch.where(off, effect, table[:, 0])[:, None]

    claims: set[str] = set()
    said = bool(reader.hints.mask or stated)
    found = find_encoding(pairs, sides, _table(True, reader.rows), MODEL_PAIRS[:-1], stated=said)
    if found is None:
        same = _table(True, 1).expand(reader.rows, -1, -1, -1)
        found = find_encoding(pairs, sides, same, MODEL_PAIRS[-1:], stated=said)
    if found is not None:
        reader.encodings["mask"] = found
        reader.notes.append(f"{name}: {found}")
        claims |= {"mask", "bias"} if says_added(name, reader.text) else {"mask"}
    if reader.padding is None and "lengths" not in reader.names:
        by_batch = found is not None and found.shape != "(n, m)"
        keys = found if by_batch else _padding(reader, "mask", sides)
        if keys is not None:
            reader.encodings["padding"] = keys
            if not by_batch:
                reader.notes.append(f"{name}: {keys}")
            claims |= {"lengths", "left padding"}
    if not claims:
        reader.encodings["mask"] = MaskEncoding("(b, n, m)", _bool(side))
        reader.notes.append(f"{name}: no mask of a common shape was accepted")
    return claims


def _padding(reader: Any, which: str, sides: list[str]) -> MaskEncoding | None:
    """The encoding of a mask over keys: outputs at real positions must not depend on padding."""

    def keys(encoding: MaskEncoding, table: Tensor) -> Tensor:
        reader.encodings["padding"] = encoding
        b = len(table)
        reader.output(reader.sample(b, 2), reader.needed_context(b, 2), lengths=torch.full((b,), 2))
        lengths = table.sum((1, 2, 3))
        effect = reader.effect(lengths=lengths)
        real = torch.arange(5) < lengths[:, None]
        # rows of padding and the diagonal may be anything; a causal module never sees later keys
        expected = table[:, 0].expand(len(table), 5, 5)
        free = ~real[:, :, None] | torch.eye(5, dtype=torch.bool) | (expected & ~effect & later)
        return torch.where(free, expected, effect)[:, None]

    plain = _plain_effect(reader)
    if plain is None:
        return None
    later = ~plain  # pairs without an effect even where nothing is masked, as in a causal module
    return find_encoding(keys, sides, _table(False, reader.rows), MODEL_KEYS)


def _context_padding(reader: Any, sides: list[str]) -> MaskEncoding | None:
    lengths, b = torch.tensor([3, 4, 2, 3])[: reader.rows], reader.rows

    def keys(encoding: MaskEncoding, table: Tensor) -> Tensor:
        reader.encodings["context"] = encoding
        x, context, y = reader.sample(b, 4), reader.context_sample(b, 5), reader.context_sample(b, 5, 9)
        before = reader.output(x, context, context_lengths=lengths)
        columns = []
        for j in range(5):
            changed = context.clone()
            changed[:, j] = y[:, j]
            after = reader.output(x, changed, context_lengths=lengths)
            columns.append(((after - before).abs().amax(-1) > 1e-6).any(-1))
        return torch.stack(columns, -1)[:, None, None]

    return find_encoding(keys, sides, _table(False, reader.rows), MODEL_KEYS)
