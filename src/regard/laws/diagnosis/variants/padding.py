"""Faults of lengths, documents and biases."""

from typing import Any

import torch

from .make import variant as _v
from .masks import _ones, _square


def _lengths(change: Any) -> Any:
    return lambda i, j, c: change(i, j, c.options["lengths"][:, None, None, None], c)


def _documents(change: Any) -> Any:
    return lambda i, j, c: change(
        c.options["documents"][:, None, :, None], c.options["documents"][:, None, None, :], i, j
    )


LENGTHS = (
    _v(
        "the lengths are ignored: queries attend to padding",
        "padding ignored",
        "mask keys j ≥ length",
        lengths=_ones,
    ),
    _v(
        "the lengths are off by one: the first padded key takes part",
        "padding off by one",
        "mask keys j ≥ length",
        lengths=_lengths(lambda i, j, l, c: j <= l),
    ),
    _v(
        "the lengths are off by one: the last real key is masked",
        "padding off by one",
        "keep keys j < length",
        lengths=_lengths(lambda i, j, l, c: j < (l - 1).clamp(min=1)),
    ),
    _v(
        "the last real key is masked, even if it is the only one",
        "padding off by one",
        "keep keys j < length",
        lengths=_lengths(lambda i, j, l, c: j < l - 1),
    ),
    _v(
        "the padding mask is inverted: only padding takes part",
        "padding inverted",
        "keep keys j < length",
        lengths=_lengths(lambda i, j, l, c: j >= l),
    ),
    _v(
        "the padding mask is applied to the queries instead of the keys",
        "padding over queries",
        "mask columns of the scores (keys), not rows",
        lengths=_lengths(lambda i, j, l, c: (i < l) & (j >= 0)),
    ),
    _v(
        "the length of batch row 0 is used for all rows",
        "padding of one row",
        "use each row's own length",
        lengths=_lengths(lambda i, j, l, c: j < l[:1]),
    ),
    _v(
        "the largest length of the batch is used for all rows",
        "padding of one row",
        "use each row's own length",
        lengths=_lengths(lambda i, j, l, c: j < l.amax()),
    ),
    _v(
        "the smallest length of the batch is used for all rows",
        "padding of one row",
        "use each row's own length",
        lengths=_lengths(lambda i, j, l, c: j < l.amin()),
    ),
    _v(
        "the lengths of the batch rows are in reversed order",
        "padding of one row",
        "use each row's own length",
        lengths=_lengths(lambda i, j, l, c: j < l.flip(0)),
    ),
    _v(
        "the padding is masked on the left instead of the right",
        "padding side",
        "mask keys j ≥ length",
        lengths=_lengths(lambda i, j, l, c: j >= c.k.shape[-2] - l),
    ),
)

DOCUMENTS = (
    _v(
        "documents are ignored: packed sequences attend to one another",
        "documents ignored",
        "mask pairs of different documents",
        documents=_ones,
    ),
    _v(
        "a query attends to its own and to earlier documents",
        "documents leak",
        "allow equal ids only",
        documents=_documents(lambda a, b, i, j: a >= b),
    ),
    _v(
        "a query attends to its own and to later documents",
        "documents leak",
        "allow equal ids only",
        documents=_documents(lambda a, b, i, j: a <= b),
    ),
    _v(
        "a query attends to other documents only",
        "documents inverted",
        "allow equal ids only",
        documents=_documents(lambda a, b, i, j: a != b),
    ),
    _v(
        "a query also attends to the previous document",
        "documents leak",
        "allow equal ids only",
        documents=_documents(lambda a, b, i, j: (a - b >= 0) & (a - b <= 1)),
    ),
    _v(
        "a query also attends to the neighboring documents",
        "documents leak",
        "allow equal ids only",
        documents=_documents(lambda a, b, i, j: (a - b).abs() <= 1),
    ),
    _v(
        "the documents of batch row 0 are used for all rows",
        "documents of one row",
        "use each row's own documents",
        documents=_documents(lambda a, b, i, j: a[:1] == b[:1]),
    ),
)

BIAS = (
    _v("the bias is ignored", "bias ignored", "add it to the scores", bias=lambda s, b: s),
    _v("the bias is subtracted", "bias sign", "add it to the scores", bias=lambda s, b: s - b),
    _v(
        "the bias is scaled with the scores: added before the scale",
        "bias scaled",
        "add the bias after scaling",
        bias_before_scale=True,
    ),
    _v(
        "the bias is transposed",
        "bias transposed",
        "bias[i, j] is query i, key j",
        bias=lambda s, b: s + _square(b),
    ),
    _v("the bias is added twice", "bias twice", "add it once", bias=lambda s, b: s + 2 * b),
    _v(
        "the scores are multiplied by the bias",
        "bias multiplied",
        "add it to the scores",
        bias=lambda s, b: s * b,
    ),
    _v(
        "the bias of head 0 is used for all heads",
        "bias of one head",
        "keep the head axis of the bias",
        bias=lambda s, b: s + (b[:, :1] if b.dim() == 4 else b),
    ),
    _v(
        "the bias of batch row 0 is used for all rows",
        "bias of one row",
        "keep the batch axis of the bias",
        bias=lambda s, b: s + (b[:1] if b.dim() == 4 else b),
    ),
    _v(
        "the absolute value of the bias is added",
        "bias sign",
        "add it as it is",
        bias=lambda s, b: s + b.abs(),
    ),
    *(
        _v(
            f"the bias is cast to bool: pairs {where} are masked",
            "bias as a mask",
            "add a mask of floats to the scores; only a bool mask hides pairs",
            bias=lambda s, b, hides=hides: s.masked_fill(hides(b), torch.finfo(s.dtype).min),
        )
        for where, hides in (
            ("where it is not 0", lambda b: b != 0),
            ("where it is 0", lambda b: b == 0),
            ("where it is negative", lambda b: b < 0),
        )
    ),
)
