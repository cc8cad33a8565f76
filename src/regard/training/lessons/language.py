"""Toy languages: a phrase book, and a grammar whose verbs agree."""

from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import spec
from ...generation import generate
from ...pattern import causal
from ...position import learned, sinusoidal
from ..data.ragged import Ragged
from ..data.rows import Pairs
from ..data.tokens import END, START
from ..recipes.tasks import Translation
from .lesson import Lesson, fit, noise

ADJECTIVES = {"red": "rojo", "big": "grande", "old": "viejo", "new": "nuevo"}
NOUNS = {"cat": "gato", "dog": "perro", "car": "coche", "book": "libro", "tree": "árbol", "world": "mundo"}
VERBS = {"sleeps": "duerme", "falls": "cae", "burns": "arde", "grows": "crece"}


def phrases() -> list[tuple[list[str], list[str]]]:
    """the <adjective> <noun> <verb>: in Spanish the adjective follows its noun; and the one the document asks for."""
    made = [
        (["the", a, n, v], ["el", NOUNS[n], ADJECTIVES[a], VERBS[v]])
        for a, n, v in product(ADJECTIVES, NOUNS, VERBS)
    ]
    return [(["Hello", "world"], ["Hola", "mundo"]), *made]


def phrase_book(seed: int = 0, steps: int = 250) -> Lesson:
    """T3: a Transformer translates a toy language, "Hello world" among it."""
    torch.manual_seed(seed)
    pairs = phrases()
    words = sorted({w for pair in pairs for side in pair for w in side})
    number = {w: 4 + i for i, w in enumerate(words)}
    order = [0, *(1 + torch.randperm(len(pairs) - 1, generator=noise(seed))).tolist()]
    held = set(order[-20:])
    train = [p for i, p in enumerate(pairs) if i not in held]
    sides = [Ragged.of([[number[w] for w in p[side]] for p in train]) for side in (0, 1)]
    data, draws = Pairs(*sides), noise(seed)
    model = _translator(4 + len(words))
    task = Translation(model)

    def loss(step: int) -> Tensor:
        batch = data.batch(torch.randint(0, len(train), (32,), generator=draws))
        return task(**batch.given)[0] / batch.predicted

    fit(task, loss, steps, 4e-3)

    def said(source: list[str]) -> list[str]:
        ids = torch.tensor([[number[w] for w in source]])
        row = generate(model, [[START]], source=ids, most=8, end=END).rows()[0]
        return [words[i - 4] for i in row if i >= 4]

    right = sum(said(pairs[i][0]) == pairs[i][1] for i in held) / len(held)
    hello = " ".join(said(["Hello", "world"]))
    return Lesson(
        "T3",
        'greedy decoding turns "Hello world" into "Hola mundo", and held-out phrases are translated',
        {"Hello world": hello, "held-out phrases right": right},
        hello == "Hola mundo" and right > 0.99,
    )


ANIMALS = ("cat", "dog", "bird", "horse")
PLACES = ("mat", "roof", "road")
MASK = "[MASK]"


def agreement(seed: int = 0, steps: int = 300) -> Lesson:
    """T13: the hidden verb agrees with its noun; how much the mask looks there, and what cutting that does."""
    torch.manual_seed(seed)
    sentences = [
        (["the", n + ("s" if many else ""), MASK, verb, "on", "the", p], "are" if many else "is")
        for n, p, many, verb in product(ANIMALS, PLACES, (False, True), ("running", "sleeping"))
    ]
    words = sorted({w for s, _ in sentences for w in s} | {"is", "are"})
    number = {w: i for i, w in enumerate(words)}
    x = torch.tensor([[number[w] for w in s] for s, _ in sentences])
    y = torch.tensor([number[v] for _, v in sentences])
    held = torch.arange(len(x)) % 6 == 0
    block = spec.Block(spec.Attention(32, heads=4), spec.FeedForward(64), norm_at="pre")
    embedding = spec.Embedding(len(words), 32, position=learned(x.shape[1]))
    model = spec.Encoder(block, 2, embedding=embedding, head=spec.MaskedHead()).build()
    fit(model, lambda step: F.cross_entropy(model(x[~held])[:, 2], y[~held]), steps, 3e-3)
    with torch.no_grad():
        logits, kept = model(x[held], return_weights=True)
        share = max(float(layer["self"][:, h, 2, 1].mean()) for layer in kept for h in range(4))
        cut = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        cut[:, 1] = False
        cut[1, 1] = True
        without = model(x[held], pattern=cut)
    right = float((logits[:, 2].argmax(-1) == y[held]).float().mean())
    blind = float((without[:, 2].argmax(-1) == y[held]).float().mean())
    return Lesson(
        "T13",
        "is and are are told by the noun: the mask looks there, and cutting it takes the answer away",
        {"right": right, "largest share of a head from [MASK] to the noun": share, "right when cut": blind},
        right > 0.99 and blind < right,
    )


def _translator(vocab: int):
    attention, mlp = spec.Attention(32, heads=4), spec.FeedForward(64)
    past = spec.Attention(32, heads=4, pattern=causal())
    embedding = spec.Embedding(vocab, 32, position=sinusoidal())
    return spec.EncoderDecoder(
        spec.Encoder(spec.Block(attention, mlp, norm_at="pre"), 1, embedding=embedding),
        spec.Decoder(
            spec.Block(past, mlp, cross=attention, norm_at="pre"),
            1,
            embedding=embedding,
            head=spec.LanguageHead(tied=False),
        ),
    ).build()
