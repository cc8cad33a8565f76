"""From a declaration to its module."""

from torch import nn

from .. import spec
from ..errors import SpecError
from .attention import MultiHeadAttention
from .block import Block
from .convolutional import ConvolutionalModel
from .embedding import Embedding
from .mixing import MixingLayer
from .recurrent import RecurrentModel
from .stack import EncoderDecoder, Stack, Vision

MODULES: dict[type, type[nn.Module]] = {
    spec.Attention: MultiHeadAttention,
    spec.Block: Block,
    spec.Embedding: Embedding,
    spec.Encoder: Stack,
    spec.Decoder: Stack,
    spec.EncoderDecoder: EncoderDecoder,
    spec.Vision: Vision,
    spec.Recurrent: RecurrentModel,
    spec.Convolutional: ConvolutionalModel,
    spec.Mixing: MixingLayer,
}


def build(declared: spec.Spec) -> nn.Module:
    """The module of a spec, with newly initialized weights."""
    if type(declared) not in MODULES:
        raise SpecError(
            f"{type(declared).__name__} is a part of a model; it is built by the block or the model that contains it"
        )
    return MODULES[type(declared)](declared)
