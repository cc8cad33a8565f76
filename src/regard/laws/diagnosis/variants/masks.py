"""Faults of a mask."""

from typing import Any

import torch
from torch import Tensor

from ..formula import Call
from .make import variant as _v


def _square(table: Tensor) -> Tensor:
    return table.mT if table.shape[-1] == table.shape[-2] else table


def _first_row(table: Tensor) -> Tensor:
    return table[:1] if table.dim() == 4 else table


def _ones(i: Tensor, j: Tensor, call: Call) -> Tensor:
    return (i >= 0) & (j >= 0)


def _allowed(change: Any) -> Any:
    return lambda i, j, c: change(c.options["allowed"])


MASK = (
    _v(
        "the mask is ignored",
        "mask ignored",
        "apply the mask to the scores before softmax",
        mask=_ones,
    ),
    _v(
        "the mask is inverted: True is treated as masked",
        "mask polarity",
        "mask where the table is False, or document True = masked (--with mask=hide)",
        mask=_allowed(lambda t: ~t),
    ),
    _v(
        "the mask is transposed",
        "mask transposed",
        "mask[i, j] is query i, key j",
        mask=_allowed(_square),
    ),
    _v(
        "the mask is shifted by one key",
        "mask shifted",
        "mask[i, j] is query i, key j",
        mask=_allowed(lambda t: t.roll(1, -1)),
    ),
    _v(
        "the mask is shifted by one key in the other direction",
        "mask shifted",
        "mask[i, j] is query i, key j",
        mask=_allowed(lambda t: t.roll(-1, -1)),
    ),
    _v(
        "the mask of batch row 0 is used for all rows",
        "mask of one row",
        "broadcast the mask over heads only",
        mask=_allowed(_first_row),
    ),
    _v(
        "the mask of head 0 is used for all heads",
        "mask of one head",
        "keep the head axis of the mask",
        mask=_allowed(lambda t: t[:, :1] if t.dim() == 4 else t),
    ),
    _v(
        "only the first row of the mask is used, for all queries",
        "mask of one query",
        "mask[i, j] is query i, key j",
        mask=_allowed(lambda t: t[..., :1, :]),
    ),
    _v(
        "the mask is applied to the queries: rows instead of pairs",
        "mask of one query",
        "mask[i, j] is query i, key j",
        mask=_allowed(lambda t: t[..., :1]),
    ),
    _v(
        "the mask is applied after softmax, without renormalization",
        "mask after softmax",
        "set masked scores to −∞ before softmax",
        fill=lambda s, ok: s,
        normalize=lambda s, ok: s.softmax(-1),
        weights=lambda a, ok: a if ok is None else a * ok,
    ),
    _v(
        "masked scores are set to 0 instead of −∞",
        "mask fills with 0",
        "use −∞ (or the smallest finite number)",
        fill=lambda s, ok: s * ok,
    ),
    _v(
        "masked scores are set to a number that is too close to 0",
        "mask value too small",
        "use −∞ (or the smallest finite number)",
        fill=lambda s, ok: s.masked_fill(~ok, -1.0),
    ),
    _v(
        "masked scores are set to the smallest positive number",
        "mask fills with 0",
        "use −∞ (finfo.min, not finfo.tiny)",
        fill=lambda s, ok: s.masked_fill(~ok, torch.finfo(s.dtype).tiny),
    ),
    _v(
        "masked scores are set to +∞ or a large positive number",
        "mask polarity",
        "use −∞",
        fill=lambda s, ok: s.masked_fill(~ok, 1e9),
    ),
    _v(
        "the bool mask is added to the scores as 0 and 1",
        "mask added",
        "use masked_fill, or convert the mask to 0 and −∞",
        fill=lambda s, ok: s + ok,
    ),
    _v(
        "the negated bool mask is added to the scores as 0 and 1",
        "mask added",
        "use masked_fill, or convert the mask to 0 and −∞",
        fill=lambda s, ok: s + ~ok,
    ),
    _v(
        "masked scores are lowered by 1",
        "mask added",
        "use masked_fill, or convert the mask to 0 and −∞",
        fill=lambda s, ok: s - (~ok).to(s.dtype),
    ),
    _v(
        "two masks are combined with or: a pair that either of them allows takes part",
        "masks combined with or",
        "combine masks with and",
        combine=lambda tables: torch.stack([t.contiguous() for t in tables]).any(0),
    ),
    _v(
        "of two masks only the first takes effect",
        "mask ignored in combination",
        "combine masks with and",
        combine=lambda tables: tables[0],
    ),
    _v(
        "of two masks only the last takes effect",
        "mask ignored in combination",
        "combine masks with and",
        combine=lambda tables: tables[-1],
    ),
)


def _filled(value: float) -> Any:
    return lambda s, ok: s.masked_fill(~ok, value)


MASK_VALUES = tuple(
    _v(
        f"masked scores are {word} {value:g}, which softmax does not turn into 0",
        "mask value too small",
        "use −∞ (or the smallest finite number)",
        fill=fill,
    )
    for value in (-1.0, -2.0, -3.0, -5.0, -8.0, -10.0, -20.0, -50.0, -100.0)
    for word, fill in (
        ("set to", _filled(value)),
        ("lowered by", lambda s, ok, value=value: s + value * (~ok).to(s.dtype)),
    )
)
