"""The modules that declarations build."""

from .attention import MultiHeadAttention
from .block import Block
from .build import build
from .cache import Cache, KeyValues, LayerCache
from .convolutional import ConvolutionalModel, ConvolutionLayer, image_classifier
from .embedding import ClassifierHead, Embedding, LanguageHead, MaskedHead, Pooler
from .feed_forward import FeedForward
from .initialization import initialize
from .mixing import MixingLayer
from .norm import norm
from .recurrent import RecurrentModel
from .serialization import load, save
from .stack import EncoderDecoder, Stack, Vision

__all__ = [
    "Block",
    "Cache",
    "ClassifierHead",
    "ConvolutionLayer",
    "ConvolutionalModel",
    "Embedding",
    "EncoderDecoder",
    "FeedForward",
    "KeyValues",
    "LanguageHead",
    "LayerCache",
    "MaskedHead",
    "MixingLayer",
    "MultiHeadAttention",
    "Pooler",
    "RecurrentModel",
    "Stack",
    "Vision",
    "build",
    "image_classifier",
    "initialize",
    "load",
    "norm",
    "save",
]
