"""Translating texts with a trained model, and scoring it as others do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import RegardError
from ...generation import generate, greedy
from ...generation.steps import positions
from ...generation.strategies import How
from ...nn.stack import EncoderDecoder
from ..data.ragged import Ragged
from ..data.tokens import END, PAD, START, Tokens

GREEDY, LONGEST = greedy(), 120


def translate(
    model: EncoderDecoder,
    tokens: Tokens,
    texts: Sequence[str],
    how: How = GREEDY,
    *,
    rows: int = 64,
    longest: int = LONGEST,
) -> list[str]:
    """The texts in the other language, in their order. Texts of like length go together; an empty one stays empty.

    Of a text of more than `longest` tokens, or than the model has positions, the first ones are read.
    """
    device = next(model.parameters()).device
    most = readable(model, longest)
    ids = [row[:most] for row in tokens.encode(texts)]
    order = sorted((i for i in range(len(ids)) if ids[i]), key=lambda i: -len(ids[i]))
    out = [""] * len(texts)
    for start in range(0, len(order), rows):
        part = order[start : start + rows]
        source, lengths = Ragged.of([ids[i] for i in part]).pad(torch.arange(len(part)), PAD)
        told = generate(
            model,
            [[START]] * len(part),
            how,
            source=source.to(device),
            source_lengths=None if bool((lengths == lengths[0]).all()) else lengths.to(device),
            most=limit(source.shape[1]),
            end=END,
            log_p=False,
        )
        # Each text has its own limit, so that what it becomes does not depend on those beside it.
        ends = [said[: limit(len(ids[i]))] for i, said in zip(part, told.rows(), strict=True)]
        for i, said in zip(part, tokens.decode(ends), strict=True):
            out[i] = said
    return out


def readable(model: EncoderDecoder, longest: int = LONGEST) -> int:
    """How many tokens of a text the model reads."""
    return min(longest, positions(model.encoder) or longest)


def limit(length: int) -> int:
    """How many tokens a translation of so many may have."""
    return 2 * length + 10


@dataclass(frozen=True)
class Scores:
    """BLEU and chrF with the signatures that say how they were counted."""

    bleu: float
    bleu_signature: str
    chrf: float
    chrf_signature: str

    def __str__(self) -> str:
        return f"BLEU {self.bleu:.2f} ({self.bleu_signature})\nchrF {self.chrf:.2f} ({self.chrf_signature})"


def scores(said: Sequence[str], references: Sequence[str]) -> Scores:
    """sacreBLEU's, one reference a sentence."""
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ModuleNotFoundError as e:
        raise RegardError("BLEU and chrF are counted by sacrebleu: pip install 'regard[train]'") from e
    bleu: Any = BLEU()
    chrf: Any = CHRF()
    by_bleu, by_chrf = (m.corpus_score(list(said), [list(references)]) for m in (bleu, chrf))
    return Scores(by_bleu.score, str(bleu.get_signature()), by_chrf.score, str(chrf.get_signature()))
