"""Inputs and targets of the right shapes for a declared model: ids, vectors or pixels."""

from typing import Any

import torch
from torch import Tensor

from .. import spec


def example_inputs(
    declared: Any, n: int, m: int, batch: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """n: length of the queries (of an encoder-decoder: of the target); m: of the context, where there is one.

    Ids are zeros; vectors and pixels have no values: they are meta tensors.
    """

    def sequence(part: Any, length: int, width: int | None = None) -> Tensor:
        if getattr(part, "embedding", None) is not None or getattr(part, "vocab", None) is not None:
            return torch.zeros(batch, length, dtype=torch.long)
        shape = (batch, length, part.d_model if width is None else width)
        return torch.empty(shape, dtype=dtype, device="meta")

    match declared:
        case spec.EncoderDecoder():
            return sequence(declared.encoder, m), sequence(declared.decoder, n)
        case spec.Recurrent():
            return sequence(declared, m), sequence(declared, n)
        case spec.Vision():
            return (torch.empty(batch, declared.channels, *declared.image, dtype=dtype, device="meta"),)
    given = [sequence(declared, n)]
    inner = getattr(declared, "block", declared)
    cross = inner if isinstance(inner, spec.Attention) else getattr(inner, "cross", None)
    if cross is not None and (cross is not declared or cross.d_context is not None):
        given.append(sequence(cross, m, cross.sizes.d_context))
    return tuple(given)


def example_targets(declared: Any, n: int, batch: int = 1) -> Tensor | None:
    """Class or token ids, if the model has a head that scores them."""
    match getattr(getattr(declared, "decoder", declared), "head", None):
        case spec.ClassifierHead():
            return torch.zeros(batch, dtype=torch.long)
        case spec.LanguageHead() | spec.MaskedHead():
            return torch.zeros(batch * n, dtype=torch.long)
    return None
