"""Translation of texts with a trained model, and its BLEU and chrF scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import RegardError
from ...generation import Strategy, generate, greedy
from ...generation.cpu_inference import weights_unchanged
from ...generation.steps import positions
from ...nn.stack import EncoderDecoder
from ..data.ragged import Ragged
from ..data.tokens import END, PAD, START, Tokens

GREEDY, MAX_SOURCE_TOKENS = greedy(), 120


def translate(
    model: EncoderDecoder,
    tokens: Tokens,
    texts: Sequence[str],
    strategy: Strategy = GREEDY,
    *,
    rows: int = 64,
    max_tokens: int = MAX_SOURCE_TOKENS,
) -> list[str]:
    """The translations of the texts, in order. Texts of similar length share batches; an empty text stays empty.

    A text of more than max_tokens tokens, or longer than the model's table of positions, is truncated.
    """
    device = next(model.parameters()).device
    limit = max_source_tokens(model, max_tokens)
    ids = [row[:limit] for row in tokens.encode(texts)]
    order = sorted((i for i in range(len(ids)) if ids[i]), key=lambda i: -len(ids[i]))
    out = [""] * len(texts)
    with weights_unchanged():
        for start in range(0, len(order), rows):
            part = order[start : start + rows]
            source, lengths = Ragged.of([ids[i] for i in part]).pad(torch.arange(len(part)), PAD)
            result = generate(
                model,
                [[START]] * len(part),
                strategy,
                source=source.to(device),
                source_lengths=None if bool((lengths == lengths[0]).all()) else lengths.to(device),
                # Each text has its own limit, so that its translation does not depend on the others of the batch.
                max_new_tokens=[max_target_tokens(len(ids[i])) for i in part],
                eos_id=END,
                return_log_probs=False,
            )
            for i, translation in zip(part, tokens.decode(result.rows()), strict=True):
                out[i] = translation
    return out


def truncated(model: EncoderDecoder, tokens: Tokens, texts: Sequence[str]) -> dict[int, str]:
    """Which texts `translate` truncates, and the words that say so."""
    limit, long = max_source_tokens(model), {}
    for i, ids in enumerate(tokens.encode(texts)):
        if len(ids) > limit:
            long[i] = f"has {len(ids)} tokens; the first {limit} are translated: {texts[i][:40]}…"
    return long


def max_source_tokens(model: EncoderDecoder, limit: int = MAX_SOURCE_TOKENS) -> int:
    """How many tokens of a text the model reads."""
    return min(limit, positions(model.encoder) or limit)


def max_target_tokens(length: int) -> int:
    """The largest number of tokens of a translation of `length` tokens."""
    return 2 * length + 10


@dataclass(frozen=True)
class Scores:
    """BLEU and chrF with sacreBLEU's signatures."""

    bleu: float
    bleu_signature: str
    chrf: float
    chrf_signature: str

    def __str__(self) -> str:
        return f"BLEU {self.bleu:.2f} ({self.bleu_signature})\nchrF {self.chrf:.2f} ({self.chrf_signature})"


def scores(translations: Sequence[str], references: Sequence[str]) -> Scores:
    """Corpus scores by sacreBLEU, with one reference per sentence."""
    bleu: Any = sacrebleu_metrics().BLEU()
    chrf: Any = sacrebleu_metrics().CHRF()
    by_bleu, by_chrf = (m.corpus_score(list(translations), [list(references)]) for m in (bleu, chrf))
    return Scores(by_bleu.score, str(bleu.get_signature()), by_chrf.score, str(chrf.get_signature()))


def sacrebleu_metrics() -> Any:
    try:
        from sacrebleu import metrics
    except ModuleNotFoundError as e:
        raise RegardError("BLEU and chrF need sacrebleu: pip install 'regard[train]'") from e
    return metrics
