"""Several short texts in one row, one after the other."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...errors import SpecError
from .rows import IGNORED, Batch
from .tokens import PAD


def laid(batch: Batch, wide: int) -> Batch:
    """The same texts end to end in rows of at most so many tokens, and which text each token belongs to.

    Each token left at the end of a row is a text of its own, past the last: it stands at position 0.
    """
    given = dict(batch.given)
    lengths = given.pop("lengths", None)
    if lengths is None or "tokens" not in given:
        raise SpecError(
            f"packed=True lays texts end to end, and these rows are {' and '.join(batch.given)}; it is for texts "
            f"that are classified, or of which words are hidden"
        )
    real = torch.arange(given["tokens"].shape[1]) < lengths[:, None]
    at, shape = _lying(lengths.tolist(), wide)
    blank = {"tokens": PAD, "wanted": IGNORED}
    for name in [name for name in blank if name in given]:
        given[name] = (
            torch.full(shape, blank[name]).flatten().index_copy(0, at, given[name][real]).view(shape)
        )
    which = torch.arange(len(lengths)).repeat_interleave(lengths)
    rest = len(lengths) + torch.arange(shape[0] * shape[1])
    given["texts"] = rest.index_copy(0, at, which).view(shape)
    return Batch(given, batch.predicted)


def _lying(lengths: list[int], wide: int) -> tuple[Int[Tensor, " total"], tuple[int, int]]:
    """Where the tokens of the texts lie, row after row, each begun when the next text does not fit; and the shape."""
    rows, ends, row, end = [], [], 0, 0
    for length in lengths:
        row, end = (row + 1, length) if end + length > wide else (row, end + length)
        rows.append(row)
        ends.append(end)
    n = max(ends)
    starts = torch.tensor([r * n + e - length for r, e, length in zip(rows, ends, lengths, strict=True)])
    many = torch.tensor(lengths)
    within = torch.arange(sum(lengths)) - (many.cumsum(0) - many).repeat_interleave(many)
    return starts.repeat_interleave(many) + within, (row + 1, n)


def apart(
    states: Float[Tensor, "b n d"], texts: Int[Tensor, "b n"], many: int
) -> tuple[Float[Tensor, "many longest d"], Int[Tensor, " many"]]:
    """The states of each of so many texts in a row of its own, and how many count there."""
    lengths = torch.bincount(texts.flatten(), minlength=many)[:many]
    order = texts.flatten().argsort(stable=True)  # the tokens of text 0, of text 1, …
    at = (lengths.cumsum(0) - lengths)[:, None] + torch.arange(int(lengths.max()), device=texts.device)
    return states.flatten(0, 1)[order[at.clamp(max=len(order) - 1)]], lengths
