"""How a target expects its mask: shape, type and polarity, determined from the keys that have a weight."""

import re
from collections.abc import Callable, Iterable
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..harness import Inexpressible

KINDS = {  # polarity → kinds of mask that have it; the first is tried first
    "keep": ("bool, True = may attend", "additive, 0 and −inf", "1 = may attend"),
    "hide": ("bool, True = masked", "additive, 0 and −inf", "1 = masked"),
}
PAIR_SHAPES = ("(b, h, n, m)", "(b, 1, n, m)", "(b, n, m)", "(n, m)")
KEY_SHAPES = ("(b, 1, 1, m)", "(b, m)", "(b, 1, m)")


class MaskEncoding(NamedTuple):
    """Translates a table of allowed pairs, broadcastable to (b, h, n, m), into what a target takes."""

    shape: str
    kind: str

    @property
    def by_pairs(self) -> bool:
        return self.shape in PAIR_SHAPES or self.shape == "any that broadcasts"

    @property
    def per_head(self) -> bool:
        return self.shape in ("any that broadcasts", "(b, h, n, m)")

    def __str__(self) -> str:
        return f"{self.kind}, shape {self.shape}"

    def encode(self, allowed: Tensor, size: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
        return typed(self.kind, shaped(self.shape, allowed, size), dtype)

    def added(self, bias: Tensor, allowed: Tensor | None, size: tuple[int, int, int, int]) -> Tensor:
        """A bias passed as the mask, for a target that adds its mask to the scores."""
        return shaped(self.shape, bias if allowed is None else bias.masked_fill(~allowed, -inf), size)


def shaped(shape: str, allowed: Tensor, size: tuple[int, int, int, int]) -> Tensor:
    """The table in another shape; raises Inexpressible if that shape cannot represent it."""
    if shape == "any that broadcasts":
        return allowed
    full = allowed.expand(size)
    if shape == "(b, h, n, m)":
        return full
    if not torch.equal(full, full[:, :1].expand(size)):
        raise Inexpressible(f"a mask per head does not fit into {shape}")
    full = full[:, 0]
    if shape in ("(b, n, m)", "(b, 1, n, m)"):
        return full if shape == "(b, n, m)" else full[:, None]
    if shape == "(n, m)":
        if not torch.equal(full, full[:1].expand_as(full)):
            raise Inexpressible("a mask per batch row does not fit into (n, m)")
        return full[0]
    if not torch.equal(full, full[:, :1].expand_as(full)):
        raise Inexpressible(f"a mask per query does not fit into {shape}")
    keys = full[:, 0]
    return {"(b, m)": keys, "(b, 1, m)": keys[:, None], "(b, 1, 1, m)": keys[:, None, None]}[shape]


def typed(kind: str, allowed: Tensor, dtype: torch.dtype) -> Tensor:
    match kind:
        case "bool, True = may attend":
            return allowed
        case "bool, True = masked":
            return ~allowed
        case "additive, 0 and −inf":
            return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, -inf)
        case "1 = may attend":
            return allowed.long()
        case "1 = masked":
            return (~allowed).long()
    raise AssertionError(kind)


def as_integers(mask: Tensor, options: dict[str, Any]) -> Tensor:
    """The same mask with 0 and 1 for False and True, in a call that asks for integers."""
    return mask.long() if options.get("integer_mask") and mask.dtype == torch.bool else mask


def stated_shapes(text: str) -> tuple[str, ...]:
    """The shape that a docstring gives for a mask of pairs; empty if it gives none, or says that it broadcasts."""
    if "broadcast" in text:
        return ()
    axes = {"b": ("b", "batch", "bsz"), "h": ("h", "heads"), "n": ("n", "l", "t", "q"), "m": ("m", "s", "k")}
    letter = {name: axis for axis, names in axes.items() for name in names}
    for inner in re.findall(r"\(([^()]*)\)", text):
        words = [letter.get(w.strip().lower(), w.strip()) for w in inner.split(",")]
        words = [*words[:-1], "m"] if words[-2:] == ["n", "n"] else words
        if f"({', '.join(words)})" in PAIR_SHAPES:
            return (f"({', '.join(words)})",)
    return ()


def is_inverted(effect: Tensor, table: Tensor) -> bool:
    """Whether exactly the masked pairs have an effect, apart from those of a position with itself.

    Queries for which that would leave no key are not compared: their output is not defined.
    """
    other = ~torch.eye(*table.shape[-2:], dtype=torch.bool)
    masked = (~table & other).expand_as(effect)
    rows = masked.any(-1)
    return bool(rows.any()) and torch.equal((effect & other)[rows], masked[rows])


MaskEffect = Callable[
    [MaskEncoding, Tensor], Tensor
]  # encoding, table (b, 1, n, m) → which pairs have an effect


def find_encoding(
    effect_of: MaskEffect,
    polarities: Iterable[str],
    table: Tensor,
    shapes: tuple[str, ...],
    only_bool: bool = False,
    stated: bool = False,
) -> MaskEncoding | None:
    """The first encoding under which exactly the allowed pairs have an effect.

    If a shape is accepted but no encoding has the right effect, that shape is used with the first polarity, so that
    the laws report the fault. only_bool: the mask is stated to be bool. stated: the meaning of True is stated.
    None: every call raised.
    """
    polarities = tuple(polarities)
    kinds = list(dict.fromkeys(kind for p in polarities for kind in KINDS[p]))
    for shape in shapes:
        accepted = False
        for kind in kinds:
            if kind.startswith("additive") and (only_bool or shape == "(b, m)"):
                continue  # a mask per position marks tokens with 0 and 1; adding it to the scores is a fault
            encoding = MaskEncoding(shape, kind)
            try:
                effect = effect_of(encoding, table)
            except Exception:  # the target does not take a mask of this shape or type
                continue
            accepted = accepted or kind.startswith(("bool", "1"))
            if torch.equal(effect, table.expand_as(effect)):
                return encoding
            if stated and kind.startswith("bool") and is_inverted(effect, table):
                return encoding  # not the stated polarity: the laws report it, whatever else is accepted
        if accepted:
            return MaskEncoding(shape, kinds[0])
    return None
