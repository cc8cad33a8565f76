"""Several short texts in one row, one after the other."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...errors import SpecError
from .rows import IGNORED, Batch
from .tokens import PAD


def pack(batch: Batch, width: int) -> Batch:
    """The same texts one after the other in rows of at most `width` tokens, and the number of each token's text.

    Each padding token at the end of a row counts as a text of its own, numbered past the last, at position 0.
    """
    inputs = dict(batch.inputs)
    lengths = inputs.pop("lengths", None)
    if lengths is None or "tokens" not in inputs:
        raise SpecError(
            f"packed=True needs rows of tokens with lengths, and these rows have {' and '.join(batch.inputs)}; it is "
            f"for classification and masked language models"
        )
    real = torch.arange(inputs["tokens"].shape[1]) < lengths[:, None]
    at, shape = _layout(lengths.tolist(), width)
    padding = {"tokens": PAD, "targets": IGNORED}
    for name in [name for name in padding if name in inputs]:
        blank = torch.full(shape, padding[name]).flatten()
        inputs[name] = blank.index_copy(0, at, inputs[name][real]).view(shape)
    which = torch.arange(len(lengths)).repeat_interleave(lengths)
    rest = len(lengths) + torch.arange(shape[0] * shape[1])
    inputs["texts"] = rest.index_copy(0, at, which).view(shape)
    return Batch(inputs, batch.predicted)


def _layout(lengths: list[int], width: int) -> tuple[Int[Tensor, " total"], tuple[int, int]]:
    """The flat index of each token, and the shape; a new row begins where the next text does not fit."""
    rows, ends, row, end = [], [], 0, 0
    for length in lengths:
        row, end = (row + 1, length) if end + length > width else (row, end + length)
        rows.append(row)
        ends.append(end)
    n = max(ends)
    starts = torch.tensor([r * n + e - length for r, e, length in zip(rows, ends, lengths, strict=True)])
    counts = torch.tensor(lengths)
    within = torch.arange(sum(lengths)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    return starts.repeat_interleave(counts) + within, (row + 1, n)


def unpack(
    states: Float[Tensor, "b n d"], texts: Int[Tensor, "b n"], count: int
) -> tuple[Float[Tensor, "count longest d"], Int[Tensor, " count"]]:
    """The states of each of `count` texts in a row of its own, and their lengths."""
    lengths = torch.bincount(texts.flatten(), minlength=count)[:count]
    order = texts.flatten().argsort(stable=True)  # the tokens of text 0, of text 1, …
    at = (lengths.cumsum(0) - lengths)[:, None] + torch.arange(int(lengths.max()), device=texts.device)
    return states.flatten(0, 1)[order[at.clamp(max=len(order) - 1)]], lengths
