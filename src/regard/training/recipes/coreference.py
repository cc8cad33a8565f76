"""What "it" refers to: a model with two attention layers, trained to name the noun, and its attention from "it".

Only the answer is trained, never the attention. The first layer passes one number per position (d_v=1), enough to
tell "it" which kind of word comes last, too little to carry a noun; so the second layer has to fetch the noun itself.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ... import spec
from ...lens.view import View, look
from ...position import learned
from ..data.coreference import PRONOUN, Sentence, sentences

WIDTH, HELD_OUT = 48, 0.2


class ReferentModel(nn.Module):
    """Embedding → attention of one number per position → attention of one head → the noun, read at each position."""

    def __init__(self, words: int, length: int):
        super().__init__()
        narrow = spec.Block(spec.Attention(WIDTH, heads=1, d_k=8, d_v=1), None, norm_at="pre")
        embedding = spec.Embedding(words, WIDTH, position=learned(length))
        self.kinds = spec.Encoder(narrow, 1, embedding=embedding).build()
        self.nouns = spec.Encoder(spec.Block(spec.Attention(WIDTH, heads=1), None, norm_at="pre"), 1).build()
        self.words = nn.Linear(WIDTH, words)

    def forward(self, x: Int[Tensor, "b n"]) -> Float[Tensor, "b n words"]:
        return self.words(self.nouns(self.kinds(x)))


class Shares(NamedTuple):
    """The mean weight from "it" on the noun it refers to and on the other noun; the accuracy with and without it."""

    referent: float
    other: float
    accuracy: float
    accuracy_without: float  # no query may attend to the referent


class Coreference:
    """The sentences as ids, a part of them held out; "it" has to be answered by the noun it refers to."""

    def __init__(self, seed: int = 0):
        self.sentences = sentences()
        self.vocabulary = sorted({w for s in self.sentences for w in s.words})
        number = {w: i for i, w in enumerate(self.vocabulary)}
        self.ids = torch.tensor([[number[w] for w in s.words] for s in self.sentences])
        self.answers = torch.tensor([number[s.words[s.referent]] for s in self.sentences])
        self.generator = torch.Generator().manual_seed(seed)
        self.is_held_out = torch.rand(len(self.sentences), generator=self.generator) < HELD_OUT
        self.is_held_out[:2] = True  # the cat on the mat: tired, and the control: soft
        self._train = (~self.is_held_out).nonzero()[:, 0]

    @property
    def pair(self) -> tuple[Sentence, Sentence]:
        """The sentence in which "it" is the cat, and its control, in which it is the mat."""
        return self.sentences[0], self.sentences[1]

    def model(self) -> ReferentModel:
        return ReferentModel(len(self.vocabulary), self.ids.shape[1])

    def loss(self, model: nn.Module, rows: int = 64) -> Tensor:
        """The cross-entropy of the noun at "it", on a random batch of the sentences that are not held out."""
        batch = self._train[torch.randint(0, len(self._train), (rows,), generator=self.generator)]
        return F.cross_entropy(model(self.ids[batch])[:, self.sentences[0].pronoun], self.answers[batch])

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """On the held-out sentences."""
        predicted = model(self.ids[self.is_held_out])[:, self.sentences[0].pronoun].argmax(-1)
        return float((predicted == self.answers[self.is_held_out]).double().mean())

    @torch.no_grad()
    def shares(self, model: ReferentModel) -> Shares:
        """Over the held-out sentences in which "it" is a noun: where the second layer attends from "it"."""
        rows = [i for i, s in enumerate(self.sentences) if self.is_held_out[i] and s.referent != s.pronoun]
        chosen, index = [self.sentences[i] for i in rows], torch.arange(len(rows))
        referents, others = (torch.tensor([getattr(s, k) for s in chosen]) for k in ("referent", "other"))
        states = model.kinds(self.ids[rows])
        logits, weights = model.nouns(states, return_weights=True)
        row = weights[0]["self"][:, 0, chosen[0].pronoun]
        allowed = torch.ones(len(rows), 1, states.shape[1], states.shape[1], dtype=torch.bool)
        allowed[index, :, :, referents] = False
        without = model.nouns(states, pattern=allowed)
        right = [
            float((model.words(x)[:, chosen[0].pronoun].argmax(-1) == self.answers[rows]).double().mean())
            for x in (logits, without)
        ]
        return Shares(float(row[index, referents].mean()), float(row[index, others].mean()), *right)

    def view(self, model: nn.Module) -> View:
        """Both sentences of the pair, with "it" and its noun marked: `view.row(1, 0, "it")` has the shares."""
        relation = [(b, s.pronoun, s.referent) for b, s in enumerate(self.pair)]
        tokens = [list(s.words) for s in self.pair]
        return look(model, self.ids[:2], tokens=tokens).mark({"coreference": relation})


__all__ = ["PRONOUN", "Coreference", "ReferentModel", "Shares"]
