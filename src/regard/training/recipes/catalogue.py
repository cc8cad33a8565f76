"""The recipes that have a name: functions whose parameters are the choices one usually varies."""

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from ...errors import SpecError, nearest
from ...pattern import Pattern, causal, every, per_head, window
from ...position import learned, rope, sinusoidal
from ...schedule import warmup_cosine
from ...spec import (
    Attention,
    Block,
    ClassifierHead,
    Decoder,
    Embedding,
    Encoder,
    EncoderDecoder,
    FeedForward,
    LanguageHead,
    MaskedHead,
    Vision,
)
from ..data.datasets import ContinuousText, Digits, LabeledText, MaskedText, SentencePairs
from ..data.image_augmentation import random_affine
from ..data.tokens import SPECIAL
from ..loop.averaging import ema
from ..loop.optimizer import AdamW
from ..loop.settings import Settings
from .base import Recipe

LONG_CONTEXT = causal() & (window(512) | every(16))


def translate(
    minutes: int | float | None = 6,
    *,
    steps: int = 1500,
    d_model: int = 256,
    layers: int = 3,
    heads: int = 8,
    data: SentencePairs = SentencePairs(),  # noqa: B008  a frozen value
    dropout: int | float = 0.0,
    tokens: int = 1500,
    rate: int | float = 1e-3,
    seed: int = 0,
) -> Recipe:
    """A Transformer that translates English to Spanish, trained on the included sentence pairs.

    In six minutes on two cores it reads less than half of them once, so there is no dropout; use dropout=0.1 and
    more tokens per batch where it reads them several times.
    """
    model = _translator(data.vocab, d_model, (layers, layers), heads, 8 * round(d_model / 3), dropout)
    settings = Settings(
        steps,
        tokens,
        warmup_cosine(rate, max(steps // 10, 1), steps),
        minutes=minutes,
        average=ema(0.99),
        seed=seed,
    )
    return Recipe("translate", model, data, settings, smoothing=0.1)


def translate_h200(
    minutes: int | float | None = 6,
    *,
    steps: int = 40_000,
    d_model: int = 384,
    layers: Sequence[int] = (4, 3),
    heads: int = 6,
    d_ff: int = 768,
    data: SentencePairs = SentencePairs(),  # noqa: B008
    dropout: int | float = 0.25,
    consistency: int | float = 2.5,
    tokens: int = 16_000,
    rate: int | float = 1.2e-3,
    seed: int = 0,
) -> Recipe:
    """The translator that is part of regard: English to Spanish, six minutes on an NVIDIA H200.

    It reads the included pairs more than a hundred times, so it needs much regularization: dropout, and a loss that
    makes predictions consistent under dropout. Its 15 million weights take 16 MB as 8-bit integers.
    """
    model = _translator(data.vocab, d_model, layers, heads, d_ff, dropout)
    settings = Settings(
        steps,
        tokens,
        warmup_cosine(rate, max(steps // 20, 1), steps),
        optimizer=AdamW(decay=0.02),
        minutes=minutes,
        bucketed=True,
        average=ema(0.999),
        autocast="bfloat16",
        seed=seed,
        save_every=10_000,
        log_every=100,
        valid_every=1000,
    )
    return Recipe("translate-h200", model, data, settings, smoothing=0.1, consistency=consistency)


def _translator(
    vocab: int, d_model: int, layers: Sequence[int], heads: int, d_ff: int, dropout: int | float
) -> EncoderDecoder:
    """A pre-norm Transformer with one table of embeddings; layers of the encoder and of the decoder."""
    if len(layers) != 2:
        raise SpecError(f"layers={layers}: two numbers are needed, of the encoder and of the decoder")
    embedding = Embedding(vocab, d_model, position=sinusoidal(), scaled=True, dropout=dropout)
    # Gated with 8/3 · d_model has as many parameters as ungated with 4 · d_model. Biases take 5 % of the time and do
    # not lower the loss.
    mlp = FeedForward(d_ff, activation="swiglu", bias=False)
    own = Attention(d_model, heads=heads, biases="none")
    past = Attention(d_model, heads=heads, pattern=causal(), biases="none")
    return EncoderDecoder(
        Encoder(Block(own, mlp, norm_at="pre", dropout=dropout), layers[0], embedding=embedding),
        Decoder(
            Block(past, mlp, cross=own, norm_at="pre", dropout=dropout),
            layers[1],
            embedding=embedding,
            head=LanguageHead(),
        ),
        share_embedding=True,
    )


def language_model(
    steps: int = 2000,
    *,
    file: str | None = None,
    context: int | None = None,
    vocab: int | None = None,
    d_model: int = 128,
    layers: int = 4,
    heads: int = 4,
    rows: int = 12,
    rate: int | float = 4e-3,
    seed: int = 0,
    data: ContinuousText = ContinuousText(),  # noqa: B008
) -> Recipe:
    """A causal language model of Shakespeare's plays or of a file, by characters or (vocab=4000) byte pairs."""
    changes: dict[str, Any] = {"file": file, "context": context, "vocab": vocab}
    data = replace(data, **{k: v for k, v in changes.items() if v is not None})
    size = data.vocab or len(SPECIAL) + len(set(data.text()))
    # No biases, rotary positions instead of a table, ReLU instead of GELU: with each the loss falls as fast as
    # with GPT-2's choice or faster, and without biases and GELU an update takes less time.
    past = Attention(
        d_model, heads=heads, pattern=causal(), position=rope(pairing="interleaved"), biases="none"
    )
    mlp = FeedForward(4 * d_model, bias=False)
    block = Block(past, mlp, norm_at="pre", norm_bias=False)
    model = Encoder(
        block, layers, embedding=Embedding(size, d_model), head=LanguageHead(), init="depth_scaled"
    )
    settings = Settings(
        steps,
        rows * data.context,
        warmup_cosine(rate, max(steps // 20, 1), steps),
        optimizer=AdamW(betas=(0.9, 0.99), eps=1e-8, decay=0.1),
        seed=seed,
        save_every=1000,
        valid_every=1000,
    )
    return Recipe("language-model", model, data, settings)


def long_context(
    steps: int = 1500,
    *,
    pattern: Pattern = LONG_CONTEXT,
    file: str | None = None,
    context: int = 16_384,
    vocab: int | None = 4000,
    d_model: int = 256,
    layers: int = 6,
    rows: int = 2,
    rate: int | float = 2e-3,
) -> Recipe:
    """A language model with a context of 16,384 subwords (or characters, vocab=None), for one large GPU.

    A token attends to the 512 before it and to every 16th of all earlier ones: an eighth of the pairs of dense causal
    attention, which pattern=causal() gives. Two layers connect any two tokens: the first collects a neighborhood at
    each 16th position, the second reads those. every(128) is cheaper, but in short runs nothing far away was learned
    with it.
    """
    data = ContinuousText("en-es" if file is None else "shakespeare", file=file, context=context, vocab=vocab)
    size = vocab or len(SPECIAL) + len(set(data.text()))
    heads = max(d_model // 64, 1)
    # Half of the columns are not rotated: their q·k depends on contents alone, also thousands of positions away.
    position = rope(pairing="interleaved", fraction=0.5)
    past = Attention(d_model, heads=heads, pattern=pattern, position=position, biases="none")
    block = Block(past, FeedForward(4 * d_model, bias=False), norm_at="pre", norm_bias=False)
    model = Encoder(
        block, layers, embedding=Embedding(size, d_model), head=LanguageHead(), init="depth_scaled"
    )
    settings = Settings(
        steps,
        rows * context,
        warmup_cosine(rate, max(steps // 10, 1), steps),
        optimizer=AdamW(betas=(0.9, 0.98), eps=1e-8, decay=0.1),
        autocast="bfloat16",
        valid_every=steps,
        save_every=steps,
        log_every=10,
    )
    return Recipe("long-context", model, data, settings)


def masked_language_model(
    minutes: int | float | None = None,
    *,
    steps: int = 2000,
    train: str | None = None,
    valid: str | None = None,
    vocab: int = 4000,
    d_model: int = 128,
    layers: int = 4,
    heads: int = 4,
    tokens: int = 4000,
    packed: bool = False,
    rate: int | float = 2e-3,
    seed: int = 0,
) -> Recipe:
    """A masked language model (BERT) of English sentences, or of your own texts, one per line."""
    data = MaskedText(train=train, valid=valid, vocab=vocab)
    block = Block(
        Attention(d_model, heads=heads),
        FeedForward(4 * d_model, activation="gelu"),
        norm_at="pre",
        dropout=0.1,
    )
    embedding = Embedding(vocab, d_model, position=learned(data.max_tokens), dropout=0.1)
    model = Encoder(block, layers, embedding=embedding, head=MaskedHead(), init="depth_scaled")
    settings = Settings(
        steps,
        tokens,
        warmup_cosine(rate, max(steps // 10, 1), steps),
        optimizer=AdamW(decay=0.01),
        minutes=minutes,
        packed=packed,
        seed=seed,
    )
    return Recipe("masked-language-model", model, data, settings)


def classify(
    train: str,
    valid: str | None = None,
    *,
    classes: int | None = None,
    steps: int = 1000,
    d_model: int = 128,
    layers: int = 2,
    heads: int = 4,
    tokens: int = 4000,
    packed: bool = False,
    rate: int | float = 1e-3,
    seed: int = 0,
) -> Recipe:
    """An encoder that classifies texts: label<TAB>text per line, or JSONL with the fields label and text."""
    classes = classes or len(LabeledText(train, valid).labels())
    data = LabeledText(train, valid, classes=classes)
    block = Block(Attention(d_model, heads=heads), FeedForward(4 * d_model), norm_at="pre", dropout=0.1)
    embedding = Embedding(data.vocab, d_model, position=learned(data.max_tokens), dropout=0.1)
    model = Encoder(block, layers, embedding=embedding, head=ClassifierHead(classes))
    schedule = warmup_cosine(rate, max(steps // 10, 1), steps)
    settings = Settings(steps, tokens, schedule, packed=packed, seed=seed)
    return Recipe("classify", model, data, settings)


def image(
    steps: int = 2500,
    *,
    fold: int = 0,
    d_model: int = 64,
    layers: int = 4,
    heads: int = 4,
    rows: int = 64,
    rate: int | float = 2e-3,
    seed: int = 0,
    data: Digits = Digits(augmentation=random_affine()),  # noqa: B008
) -> Recipe:
    """A vision Transformer that classifies handwritten digits; one of five folds is for testing."""
    # Augmentation prevents overfitting; dropout in addition only slows training down.
    mlp = FeedForward(2 * d_model, activation="gelu")
    block = Block(Attention(d_model, heads=heads), mlp, norm_at="pre")
    head = ClassifierHead(10, pool="first")
    model = Vision(Encoder(block, layers), image=(8, 8), patch=(2, 2), channels=1, head=head)
    settings = Settings(
        steps, rows, warmup_cosine(rate, max(steps // 10, 1), steps), average=ema(0.99), seed=seed
    )
    return Recipe("image", model, replace(data, fold=fold), settings)


WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", Sequence: "a list"}
RECIPES: dict[str, Callable[..., Recipe]] = {
    "translate": translate,
    "translate-h200": translate_h200,
    "language-model": language_model,
    "long-context": long_context,
    "masked-language-model": masked_language_model,
    "classify": classify,
    "image": image,
}


def recipe(name: str, **parameters: Any) -> Recipe:
    """The recipe of this name with these parameters; with `steps` and no `minutes` it makes that many updates."""
    if name not in RECIPES:
        raise SpecError(f"no recipe {name!r}; {nearest(name, RECIPES)}")
    known = inspect.signature(RECIPES[name]).parameters
    if unknown := [key for key in parameters if key not in known]:
        raise SpecError(f"recipe {name!r} has no parameter {unknown[0]!r}; {nearest(unknown[0], known)}")
    for key, given in parameters.items():
        if isinstance(given, os.PathLike):
            parameters[key] = given = os.fspath(given)  # a recipe is stored as JSON
        if known[key].annotation is Pattern and isinstance(given, list | tuple):
            parameters[key] = given = per_head(given)
        _require_type(name, key, given, known[key])
        if key in ("steps", "rows", "tokens", "rate") and not 0 < given < inf:
            raise SpecError(f"recipe {name!r}: {key}={given}; it needs to be more than 0 and finite")
    required = [key for key, p in known.items() if p.default is p.empty and key not in parameters]
    if required:
        raise SpecError(
            f"recipe {name!r} needs {required[0]}=, a file of label<TAB>text lines; on the command line: "
            f"regard train {name} --data FILE.tsv"
        )
    if "steps" in parameters and "minutes" in known:  # the default time of a recipe would override them
        parameters.setdefault("minutes", None)
    return RECIPES[name](**parameters)


def _require_type(name: str, key: str, given: Any, parameter: inspect.Parameter) -> None:
    """Refuse a value of another type than the parameter's; a whole number is also a number, and True is neither."""
    annotation = parameter.annotation
    kinds = [get_origin(kind) or kind for kind in get_args(annotation) or (annotation,)]
    if get_origin(annotation) not in (None, Union, UnionType):
        kinds = [get_origin(annotation)]
    fits = any(isinstance(given, kind) and (kind is bool or not isinstance(given, bool)) for kind in kinds)
    if isinstance(given, str) and str not in kinds:
        fits = False  # a text is a sequence, but not one of numbers
    if not fits:
        needed = " or ".join(
            WORDS.get(kind, kind.__name__) for kind in dict.fromkeys(kinds) if kind is not NoneType
        )
        needed += f" such as {parameter.default}" if Sequence in kinds else ""
        hint = "; --data FILE trains on your own file" if key == "data" else ""
        raise SpecError(f"recipe {name!r}: {key} needs to be {needed}, not {given!r}{hint}")
