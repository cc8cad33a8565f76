"""Toy languages: a phrase book, and a grammar with agreement and pronouns."""

from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import spec
from ...generation import generate
from ...lens import figures
from ...lens.view import View, look
from ...pattern import causal
from ...position import learned, sinusoidal
from ..data.ragged import Ragged
from ..data.rows import Pairs
from ..data.tokens import END, START
from ..recipes.coreference import Coreference
from ..recipes.tasks import Translation
from ..report.maps import view_maps
from . import pictures
from .experiment import Experiment
from .lesson import Lesson, Picture, Suggestion, check, seeded

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


def phrase_book(run: Experiment, *, seed: int = 0, steps: int = 250) -> Lesson:
    """T3: a Transformer translates a toy language, including "Hello world"."""
    torch.manual_seed(seed)
    pairs = phrases()
    words = sorted({w for pair in pairs for side in pair for w in side})
    number = {w: 4 + i for i, w in enumerate(words)}
    order = [0, *(1 + torch.randperm(len(pairs) - 1, generator=seeded(seed))).tolist()]
    held_out = order[-20:]
    train = [p for i, p in enumerate(pairs) if i not in held_out]
    data = Pairs(*(Ragged.of([[number[w] for w in p[side]] for p in train]) for side in (0, 1)))
    model = _translator(4 + len(words))

    def loss(task: Any, generator: torch.Generator) -> Tensor:
        batch = data.batch(torch.randint(0, len(train), (32,), generator=generator)).to(
            torch.device(run.device)
        )
        return task(**batch.inputs)[0] / batch.predicted

    run.fit("translator", Translation(model), loss, steps, 4e-3, floor=0.0)
    run.models["translator"] = model  # the task module only adds the loss

    def translated(source: list[str]) -> list[str]:
        ids = torch.tensor([[number[w] for w in source]])
        row = generate(model, [[START]], source=ids, max_new_tokens=8, eos_id=END).rows()[0]
        return [words[i - 4] for i in row if i >= 4]

    outputs = {i: translated(pairs[i][0]) for i in held_out}
    accuracy = sum(outputs[i] == pairs[i][1] for i in held_out) / len(held_out)
    hello = " ".join(translated(["Hello", "world"]))
    shown = [pairs[0], *(pairs[i] for i in held_out[:3])]
    views = [_translation_view(model, number, source, target) for source, target in shown]
    cross = next(c.layer for c in views[1].calls if c.role == "cross")
    weights = torch.stack([views[1].map(cross, h) for h in range(views[1].calls[cross].heads)]).mean(0)
    return Lesson(
        "T3",
        'a Transformer learns to translate: greedy decoding turns "Hello world" into "Hola mundo", and new '
        "phrases are "
        "translated too",
        f'A toy language of {len(pairs)} phrases, "Hello world" and "the red cat sleeps" with all '
        'combinations; in the other language the adjective follows its noun: "el gato rojo duerme". An '
        "encoder-decoder with one layer each trains "
        f"on {len(train)} phrases and translates {len(held_out)} that it has never seen.",
        (
            check("translation of “Hello world”", hello, "exactly", "Hola mundo"),
            check(f"share of {len(held_out)} held-out phrases translated exactly", accuracy, "above", 0.99),
        ),
        {
            "held-out phrases": {
                " ".join(pairs[i][0]): {
                    "translation": " ".join(outputs[i]),
                    "reference": " ".join(pairs[i][1]),
                }
                for i in held_out[:8]
            }
        },
        _phrase_book_pictures(weights, run, model, shown),
        tuple(
            view_maps(" ".join(pair[0]), view, role="cross") | {"queries": _predicted(pair[1])}
            for pair, view in zip(shown, views, strict=True)
        ),
        (
            Suggestion("Too few steps: which of the two numbers falls first?", {"steps": 40}),
            Suggestion("Another choice of held-out phrases.", {"seed": 1}),
        ),
    )


def _phrase_book_pictures(weights: Any, run: Experiment, model: Any, shown: Any) -> tuple[Picture, ...]:
    return (
        pictures.tables(
            "Cross-attention while translating",
            "Mean over the heads for a held-out phrase. Row: the token that is predicted next; column: "
            "the source.",
            {" ".join(shown[1][0]): weights},
            x="source token",
            y="predicted token",
            names=(_predicted(shown[1][1]), shown[1][0]),
        ),
        Picture(
            "The model",
            "Drawn from its declaration.",
            lambda dark: figures.architecture(
                model.spec, source='"Hello world"', target='start, "Hola mundo"', dark=dark
            ),
        ),
        pictures.losses(run.recorder, "Mean loss of a predicted token; 0 is a certain translation."),
        Picture(
            "Which attention has which mask",
            "This model has the three masks of the encoder-decoder: padding twice, and the causal mask "
            "in the decoder.",
            lambda dark: figures.mask_table(source=4, target=5, padding=2, dark=dark),
        ),
    )


def _predicted(target: list[str]) -> list[str]:
    """Row i of the decoder predicts token i + 1, so rows are named by what they predict."""
    return [*target, "end"]


def _translation_view(model: Any, number: dict[str, int], source: list[str], target: list[str]) -> View:
    inputs = {
        "source": torch.tensor([[number[w] for w in source]]),
        "target": torch.tensor([[START, *(number[w] for w in target)]]),
    }
    return look(model, inputs, tokens={"source": [source], "target": [["start", *target]]})


def _translator(vocab: int) -> Any:
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


ANIMALS = ("cat", "dog", "bird", "horse", "cow", "fox")
PLACES = ("mat", "roof", "road", "bed", "wall", "tree")
MASK = "[MASK]"


class Verb(NamedTuple):
    """Seven tokens with a masked verb: its position, is or are, and the position of the noun that decides."""

    words: tuple[str, ...]
    at: int
    answer: str
    noun: int = 1


def masked_verbs() -> list[Verb]:
    """the cats [MASK] running on the mat; and: the cats near the mats [MASK] running, where a second noun, of either
    number, is right before the verb."""
    made = []
    for animal, place, many, other in product(ANIMALS, PLACES, (False, True), (False, True)):
        noun, second, answer = animal + "s" * many, place + "s" * other, "are" if many else "is"
        made.append(Verb(("the", noun, MASK, "running", "on", "the", second), 2, answer))
        made.append(Verb(("the", noun, "near", "the", second, MASK, "running"), 5, answer))
    return made


def agreement(run: Experiment, *, seed: int = 0, steps: int = 300) -> Lesson:
    """T13: "it" attends to the noun it stands for, and the masked verb to the noun it agrees with."""
    task = Coreference(seed)
    torch.manual_seed(seed)
    referent = task.model()
    seen = (~task.is_held_out).nonzero()[:, 0]
    pronoun = task.pair[0].pronoun

    def name_the_noun(model: Any, generator: torch.Generator) -> Tensor:
        rows = seen[torch.randint(0, len(seen), (64,), generator=generator)]
        logits = model(task.ids[rows].to(run.device))[:, pronoun]
        return F.cross_entropy(logits, task.answers[rows].to(run.device))

    run.fit("what it stands for", referent, name_the_noun, steps, 5e-3, floor=0.0)
    shares, view = task.shares(referent), task.view(referent)
    tired, soft = (view.row(1, 0, "it", row) for row in (0, 1))
    verbs = Verbs(run, seed, steps)
    return Lesson(
        "T13",
        "a trained model’s attention links “it” to the noun it stands for: to the cat if it was tired, to the mat if "
        "it was soft",
        "Two small models on toy grammars. The first reads sentences like “the cat sat on the mat because it "
        f"was tired” ({len(task.sentences):,} of them; the last word decides) and names the noun that “it” "
        "stands for; only the answer is trained, never the attention. Its first layer passes one number per "
        "position, enough for the kind of the last word, too little for a noun; so the second has to fetch "
        "the noun itself. The sentences about the cat on the mat are held out. The second model chooses "
        "between is and are in “the cats [MASK] running”, also where another noun is "
        "between. Then the attention to the deciding noun is cut.",
        (
            check("… because it was tired: share of “it” on cat", tired["cat"], "above", 0.5),
            check("… because it was tired: share of “it” on mat", tired["mat"], "below", 0.2),
            check("control, … because it was soft: share of “it” on mat", soft["mat"], "above", 0.5),
            check("control, … because it was soft: share of “it” on cat", soft["cat"], "below", 0.2),
            check("held-out sentences: the right noun named", task.accuracy(referent), "above", 0.99),
            check("the same, attention to that noun cut", shares.accuracy_without, "below", 0.6),
            check("held-out verbs: is or are", verbs.accuracy(), "above", 0.99),
            check("the same, attention to the noun cut", verbs.accuracy(cut=True), "below", 0.8,
                  because="chance is 0.5"),
        ),
        {
            "mean share of “it”, all held-out sentences": {"right noun": shares.referent, "other noun": shares.other},
            "largest mean share of [MASK] on the noun, by head": verbs.share(),
        },
        _agreement_pictures(view, run, verbs),
        (
            *(view_maps(" ".join(s.words), view, row) for row, s in enumerate(task.pair)),
            *(view_maps(" ".join(s.words), verbs.view, row) for row, s in enumerate(verbs.shown)),
        ),
        (
            Suggestion("Too few steps: the attention is not there yet.", {"steps": 30}),
            Suggestion("Other random weights and held-out sentences.", {"seed": 1}),
        ),
    )  # fmt: skip


def _agreement_pictures(view: View, run: Experiment, verbs: Any) -> tuple[Picture, ...]:
    return (
        Picture(
            "What “it” attends to",
            "Second layer, in two sentences that differ in their last word only. Neither was seen in training.",
            lambda dark: figures.attention_rows(view, 1, 0, "it", dark=dark),
        ),
        pictures.head_map(
            "… because it was tired", "Scores, weights and entropy of that head.", view, 1, 0, 0
        ),
        pictures.head_map("… because it was soft", "The control sentence.", view, 1, 0, 1),
        Picture(
            "The heads that choose is or are",
            "All heads of the second model on “the cats [MASK] running on the mat”, each with its kind.",
            lambda dark: figures.overview(verbs.view, dark=dark),
        ),
        pictures.losses(run.recorder, "Mean loss of the predicted words; 0 is possible."),
    )


class Verbs:
    """A masked language model trained to choose between is and are; every sixth sentence is held out."""

    def __init__(self, run: Experiment, seed: int, steps: int):
        self.sentences = masked_verbs()
        words = sorted({w for s in self.sentences for w in (*s.words, s.answer)})
        number = {w: i for i, w in enumerate(words)}
        self.x = torch.tensor([[number[w] for w in s.words] for s in self.sentences])
        self.y = torch.tensor([number[s.answer] for s in self.sentences])
        self.at = torch.tensor([s.at for s in self.sentences])
        order = torch.randperm(len(self.x), generator=seeded(seed))
        self.held_out, seen = order[: len(order) // 6], order[len(order) // 6 :]
        torch.manual_seed(seed)
        block = spec.Block(spec.Attention(32, heads=4), spec.FeedForward(64), norm_at="pre")
        embedding = spec.Embedding(len(words), 32, position=learned(self.x.shape[1]))
        self.model: Any = spec.Encoder(block, 2, embedding=embedding, head=spec.MaskedHead()).build()

        def loss(model: Any, generator: torch.Generator) -> Tensor:
            rows = seen[torch.randint(0, len(seen), (64,), generator=generator)]
            logits = model(self.x[rows].to(run.device))[torch.arange(64), self.at[rows]]
            return F.cross_entropy(logits, self.y[rows].to(run.device))

        run.fit("is or are", self.model, loss, steps, 5e-3, floor=0.0)
        self.shown = [s for s in self.sentences if s.words[1:4] == ("cats", MASK, "running")][:1]
        self.shown += [s for s in self.sentences if s.words[1] == "cats" and s.at == 5][:1]
        rows = [self.sentences.index(s) for s in self.shown]
        tokens = [list(s.words) for s in self.shown]
        related = [(row, s.at, s.noun) for row, s in enumerate(self.shown)]
        self.view = look(self.model, self.x[rows], tokens=tokens).mark({"agreement": related})

    @torch.no_grad()
    def accuracy(self, cut: bool = False) -> float:
        """On the held-out sentences; with `cut` no other position may attend to the noun, in any layer."""
        rows = self.held_out
        allowed = torch.ones(self.x.shape[1], self.x.shape[1], dtype=torch.bool)
        if cut:
            allowed[:, 1] = torch.arange(self.x.shape[1]) == 1
        logits = self.model(self.x[rows], pattern=allowed)[torch.arange(len(rows)), self.at[rows]]
        return float((logits.argmax(-1) == self.y[rows]).double().mean())

    @torch.no_grad()
    def share(self) -> float:
        """The mean weight from the masked verb to its noun, in the head where it is largest."""
        rows = self.held_out
        _, weights = self.model(self.x[rows], return_weights=True)
        from_verb = [layer["self"][torch.arange(len(rows)), :, self.at[rows], 1].mean(0) for layer in weights]
        return float(torch.cat(from_verb).max())
