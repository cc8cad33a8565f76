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
from .lesson import Lesson, fit, seeded

ADJECTIVES = {"red": "rojo", "big": "grande", "old": "viejo", "new": "nuevo"}
NOUNS = {"cat": "gato", "dog": "perro", "car": "coche", "book": "libro", "tree": "árbol", "world": "mundo"}
VERBS = {"sleeps": "duerme", "falls": "cae", "burns": "arde", "grows": "crece"}


def phrases() -> list[tuple[list[str], list[str]]]:
    """the <adjective> <noun> <verb>: in Spanish the adjective follows its noun; and "Hello world"."""
    sentences = [
        (["the", a, n, v], ["el", NOUNS[n], ADJECTIVES[a], VERBS[v]])
        for a, n, v in product(ADJECTIVES, NOUNS, VERBS)
    ]
    return [(["Hello", "world"], ["Hola", "mundo"]), *sentences]


def phrase_book(seed: int = 0, steps: int = 250) -> Lesson:
    """T3: a Transformer translates a toy language, including "Hello world"."""
    torch.manual_seed(seed)
    pairs = phrases()
    words = sorted({w for pair in pairs for side in pair for w in side})
    number = {w: 4 + i for i, w in enumerate(words)}
    order = [0, *(1 + torch.randperm(len(pairs) - 1, generator=seeded(seed))).tolist()]
    held_out = set(order[-20:])
    train = [p for i, p in enumerate(pairs) if i not in held_out]
    sides = [Ragged.of([[number[w] for w in p[side]] for p in train]) for side in (0, 1)]
    data, generator = Pairs(*sides), seeded(seed)
    model = _translator(4 + len(words))
    task = Translation(model)

    def loss(step: int) -> Tensor:
        batch = data.batch(torch.randint(0, len(train), (32,), generator=generator))
        return task(**batch.inputs)[0] / batch.predicted

    fit(task, loss, steps, 4e-3)

    def translated(source: list[str]) -> list[str]:
        ids = torch.tensor([[number[w] for w in source]])
        row = generate(model, [[START]], source=ids, max_new_tokens=8, eos_id=END).rows()[0]
        return [words[i - 4] for i in row if i >= 4]

    accuracy = sum(translated(pairs[i][0]) == pairs[i][1] for i in held_out) / len(held_out)
    hello = " ".join(translated(["Hello", "world"]))
    return Lesson(
        "T3",
        'greedy decoding turns "Hello world" into "Hola mundo", and held-out phrases are translated',
        {"Hello world": hello, "accuracy on held-out phrases": accuracy},
        hello == "Hola mundo" and accuracy > 0.99,
    )


ANIMALS = ("cat", "dog", "bird", "horse")
PLACES = ("mat", "roof", "road")
MASK = "[MASK]"


def agreement(seed: int = 0, steps: int = 300) -> Lesson:
    """T13: the masked verb agrees with its noun; the attention from the mask to it, and the effect of removing it."""
    torch.manual_seed(seed)
    sentences = [
        (["the", n + ("s" if many else ""), MASK, verb, "on", "the", p], "are" if many else "is")
        for n, p, many, verb in product(ANIMALS, PLACES, (False, True), ("running", "sleeping"))
    ]
    words = sorted({w for s, _ in sentences for w in s} | {"is", "are"})
    number = {w: i for i, w in enumerate(words)}
    x = torch.tensor([[number[w] for w in s] for s, _ in sentences])
    y = torch.tensor([number[v] for _, v in sentences])
    held_out = torch.arange(len(x)) % 6 == 0
    block = spec.Block(spec.Attention(32, heads=4), spec.FeedForward(64), norm_at="pre")
    embedding = spec.Embedding(len(words), 32, position=learned(x.shape[1]))
    model = spec.Encoder(block, 2, embedding=embedding, head=spec.MaskedHead()).build()
    fit(model, lambda step: F.cross_entropy(model(x[~held_out])[:, 2], y[~held_out]), steps, 3e-3)
    with torch.no_grad():
        logits, weights = model(x[held_out], return_weights=True)
        share = max(float(layer["self"][:, h, 2, 1].mean()) for layer in weights for h in range(4))
        allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        allowed[:, 1] = False
        allowed[1, 1] = True
        without = model(x[held_out], pattern=allowed)
    accuracy = float((logits[:, 2].argmax(-1) == y[held_out]).float().mean())
    blind = float((without[:, 2].argmax(-1) == y[held_out]).float().mean())
    return Lesson(
        "T13",
        "the noun decides between is and are: the mask attends to it, and without that attention accuracy falls",
        {"accuracy": accuracy, "largest weight from [MASK] to the noun": share, "accuracy without it": blind},
        accuracy > 0.99 and blind < accuracy,
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
