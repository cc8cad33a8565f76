"""Presets: well-known models with their published sizes, and small ones that train on a CPU."""

from collections.abc import Callable

from ..errors import SpecError, nearest
from ..pattern import causal, full
from ..position import learned, rope, sinusoidal, t5_buckets
from .attention import Attention
from .base import Spec
from .model import (
    Block,
    ClassifierHead,
    Decoder,
    Embedding,
    Encoder,
    EncoderDecoder,
    FeedForward,
    LanguageHead,
    MaskedHead,
    Pooler,
    Vision,
)


def transformer(
    d_model: int, heads: int, d_ff: int, layers: int, vocab: int, dropout: float = 0.1
) -> EncoderDecoder:
    """The encoder-decoder of "Attention Is All You Need": post-norm, ReLU, sinusoids, one shared embedding."""
    embedding = Embedding(vocab, d_model, position=sinusoidal(), scaled=True, dropout=dropout)
    mlp = FeedForward(d_ff)
    attention = Attention(d_model, heads=heads)
    past = Attention(d_model, heads=heads, pattern=causal())
    return EncoderDecoder(
        Encoder(Block(attention, mlp, dropout=dropout), layers, embedding=embedding),
        Decoder(
            Block(past, mlp, cross=attention, dropout=dropout),
            layers,
            embedding=embedding,
            head=LanguageHead(),
        ),
        share_embedding=True,
    )


def transformer_base() -> EncoderDecoder:
    return transformer(512, 8, 2048, 6, vocab=37000)


def transformer_big() -> EncoderDecoder:
    return transformer(1024, 16, 4096, 6, vocab=37000, dropout=0.3)


def bert_base() -> Encoder:
    """BERT base, uncased, with its pooler: 109,482,240 parameters."""
    return Encoder(
        Block(Attention(768, heads=12), FeedForward(3072, activation="gelu"), eps=1e-12, dropout=0.1),
        12,
        embedding=Embedding(30522, 768, position=learned(512), types=2, norm=True, eps=1e-12, dropout=0.1),
        head=Pooler(),
        init="normal",
    )


def gpt2() -> Encoder:
    """GPT-2 small: 124,439,808 parameters."""
    block = Block(
        Attention(768, heads=12, pattern=causal()),
        FeedForward(3072, activation="gelu_tanh"),
        norm_at="pre",
        dropout=0.1,
    )
    embedding = Embedding(50257, 768, position=learned(1024), dropout=0.1)
    return Encoder(block, 12, embedding=embedding, head=LanguageHead(), init="depth_scaled")


def t5_small() -> EncoderDecoder:
    """T5 small: no biases, unscaled scores, RMS pre-norms, one position table per stack: 60,506,624 parameters."""
    embedding, mlp = Embedding(32128, 512), FeedForward(2048, bias=False)

    def attention(pattern):
        return Attention(512, heads=8, pattern=pattern, scale=1.0, biases="none")

    def block(pattern, cross=None):
        return Block(attention(pattern), mlp, cross=cross, norm="rms", norm_at="pre", eps=1e-6, dropout=0.1)

    return EncoderDecoder(
        Encoder(block(full()), 6, embedding=embedding, position=t5_buckets()),
        Decoder(
            block(causal(), cross=attention(full())),
            6,
            embedding=embedding,
            position=t5_buckets(bidirectional=False),
            head=LanguageHead(scaled=True),
        ),
        share_embedding=True,
    )


def vit_b16() -> Vision:
    """ViT-B/16 for 1000 classes: 86,567,656 parameters."""
    block = Block(Attention(768, heads=12), FeedForward(3072, activation="gelu"), norm_at="pre", eps=1e-6)
    return Vision(Encoder(block, 12), head=ClassifierHead(1000, pool="first"))


def tiny() -> EncoderDecoder:
    """A translation model that trains in minutes on two cores."""
    return transformer(128, 4, 512, 2, vocab=8000)


def tiny_gpt() -> Encoder:
    """A character or sub-word language model for a CPU: rotary, RMS norms, SwiGLU."""
    block = Block(
        Attention(128, heads=4, pattern=causal(), position=rope(), biases="none"),
        FeedForward(344, activation="swiglu", bias=False),
        norm="rms",
        norm_at="pre",
    )
    return Encoder(block, 4, embedding=Embedding(256, 128), head=LanguageHead(), init="depth_scaled")


def tiny_bert() -> Encoder:
    """A masked language model for a CPU."""
    block = Block(Attention(128, heads=4), FeedForward(512, activation="gelu"), norm_at="pre")
    embedding = Embedding(1000, 128, position=learned(128))
    return Encoder(block, 2, embedding=embedding, head=MaskedHead(), init="normal")


def tiny_classifier() -> Encoder:
    """A sentence classifier for a CPU."""
    block = Block(Attention(64, heads=4), FeedForward(128), norm_at="pre")
    embedding = Embedding(1000, 64, position=sinusoidal())
    return Encoder(block, 2, embedding=embedding, head=ClassifierHead(2))


def tiny_vit() -> Vision:
    """A vision Transformer for 8 × 8 digits."""
    block = Block(Attention(64, heads=4), FeedForward(128, activation="gelu"), norm_at="pre")
    head = ClassifierHead(10, pool="first", hidden=64)
    return Vision(Encoder(block, 4), image=(8, 8), patch=(2, 2), channels=1, head=head)


PRESETS: dict[str, Callable[[], Spec]] = {
    "transformer-base": transformer_base,
    "transformer-big": transformer_big,
    "bert-base": bert_base,
    "gpt2": gpt2,
    "t5-small": t5_small,
    "vit-b16": vit_b16,
    "tiny": tiny,
    "tiny-gpt": tiny_gpt,
    "tiny-bert": tiny_bert,
    "tiny-classifier": tiny_classifier,
    "tiny-vit": tiny_vit,
}


def preset(name: str) -> Spec:
    """The declaration with this name.

    >>> preset("transformer-base").d_model
    512
    """
    if name not in PRESETS:
        raise SpecError(f"unknown preset {name!r}; {nearest(name, PRESETS)}")
    return PRESETS[name]()


def presets() -> list[str]:
    """The names of all presets."""
    return list(PRESETS)
