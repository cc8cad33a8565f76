"""The door: `generate`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..errors import ShapeError, SpecError
from ..nn.stack import EncoderDecoder
from . import beam_search as beams
from .steps import Steps, steps
from .strategies import How, beam, greedy, pick, sample


@dataclass(frozen=True)
class Generated:
    """What was written, one row a prompt; past lengths[b] a row holds the end token (0 where there is none)."""

    tokens: Int[Tensor, "b n"]  # without the prompt and without the end token
    lengths: Int[Tensor, " b"]
    log_p: Float[Tensor, " b"] | None = None  # of the tokens and their end, where it was asked for
    weights: Any = None  # as the model's own return_weights gives them for prompt and tokens

    def rows(self) -> list[list[int]]:
        """The tokens of each row, cut at its length."""
        return [row[:n].tolist() for row, n in zip(self.tokens, self.lengths.tolist(), strict=True)]


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Int[Tensor, "b n"] | Sequence[Sequence[int]],
    how: How = greedy(),
    *,
    source: Int[Tensor, "b m"] | None = None,
    source_lengths: Int[Tensor, " b"] | None = None,
    padding: Bool[Tensor, "b _"] | None = None,
    most: int = 128,
    end: int | None = None,
    log_p: bool = True,
    return_weights: bool = False,
) -> Generated:
    """Go on from each prompt until `end` or `most` tokens; dropout is off while it runs.

    prompt: rows of ids, of different lengths or padded on either side (`padding` is True there). An
    encoder-decoder reads `source` and starts from its start token: prompt = [[start]] * b. Rows that have
    ended cost nothing more; no row outgrows a learned table of positions. Without log_p a greedy step is about
    a tenth cheaper.
    """
    tokens, lengths = _aligned(prompt, padding, next(model.parameters()).device)
    if most < 1:
        raise SpecError(f"most={most}: at least one token needs to be asked for")
    was_training = model.training
    model.eval()
    try:
        walk, positions = steps(model, source, source_lengths)
        if positions is not None:
            most = min(most, positions - tokens.shape[1])
            if most < 1:
                raise ShapeError(
                    f"a prompt of {tokens.shape[1]} tokens fills a table of {positions} positions; shorten it"
                )
        if isinstance(how, beam):
            found = beams.search(how, walk, tokens, lengths, most, end)
            written, totals = [f[1] for f in found], [f[0] for f in found]
        else:
            written, totals = _one_by_one(how, walk, tokens, lengths, most, end, log_p)
        told = _generated(written, totals if log_p else None, tokens.device, 0 if end is None else end)
        if return_weights:
            kept = _weights(model, tokens, lengths, told, source, source_lengths)
            told = Generated(told.tokens, told.lengths, told.log_p, kept)
        return told
    finally:
        model.train(was_training)


def _one_by_one(
    how: greedy | sample,
    steps: Steps,
    prompt: Int[Tensor, "b n"],
    lengths: Int[Tensor, " b"] | None,
    most: int,
    end: int | None,
    count_log_p: bool,
) -> tuple[list[list[int]], list[float]]:
    b, device = len(prompt), prompt.device
    written = torch.zeros(b, most, dtype=torch.long, device=device)
    count = torch.full((b,), most, device=device)
    log_p = torch.zeros(b, device=device)
    alive = torch.arange(b, device=device)  # the rows that have not ended
    noise = torch.Generator().manual_seed(how.seed) if isinstance(how, sample) else None
    logits = steps.next(prompt, lengths)
    for n in range(most):
        # Every row draws at every step, so that none depends on who else is left.
        drawn = (
            None if noise is None else torch.rand(b, generator=noise, dtype=torch.float64).to(device)[alive]
        )
        token = pick(how, logits, drawn)
        if count_log_p:
            scores = logits.float()
            log_p[alive] += scores.gather(-1, token[:, None])[:, 0] - scores.logsumexp(-1)
        written[alive, n] = token
        going = torch.ones_like(token, dtype=torch.bool) if end is None else token != end
        left = int(going.sum())
        if left < len(alive):
            count[alive[~going]] = n
        if left == 0 or n + 1 == most:
            break
        if left < len(alive):
            kept = _closed_up(going, left)
            steps.select(kept)
            alive, token = alive[kept], token[kept]
        logits = steps.next(token[:, None])
    return [row[:c].tolist() for row, c in zip(written, count.tolist(), strict=True)], log_p.tolist()


def _closed_up(going: Bool[Tensor, " b"], left: int) -> Int[Tensor, " left"]:
    """The rows that go on: the last of them take the places of those that ended, the others stay."""
    rows = torch.arange(left, device=going.device)
    rows[~going[:left]] = left + going[left:].nonzero()[:, 0]
    return rows


def _aligned(
    prompt: Int[Tensor, "b n"] | Sequence[Sequence[int]],
    padding: Bool[Tensor, "b _"] | None,
    device: torch.device,
) -> tuple[Int[Tensor, "b n"], Int[Tensor, " b"] | None]:
    """Prompts that begin at the left, and their lengths where they differ."""
    if not isinstance(prompt, Tensor):
        rows = [list(row) for row in prompt]
    elif padding is None:
        rows = prompt.tolist()
    else:
        if padding.shape != prompt.shape:
            raise ShapeError(f"padding {tuple(padding.shape)} beside a prompt {tuple(prompt.shape)}")
        rows = [row[~hidden].tolist() for row, hidden in zip(prompt, padding, strict=True)]
    if not rows or not all(rows):
        raise ShapeError("every row needs a token to go on from, its start token at least")
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
    lengths = [len(row) for row in rows]
    return tokens, None if min(lengths) == longest else torch.tensor(lengths, device=device)


def _generated(
    rows: list[list[int]], log_p: list[float] | None, device: torch.device, filler: int
) -> Generated:
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [filler] * (longest - len(row)) for row in rows], dtype=torch.long)
    lengths = torch.tensor([len(row) for row in rows])
    return Generated(
        tokens.reshape(len(rows), longest).to(device),
        lengths.to(device),
        None if log_p is None else torch.tensor(log_p, device=device),
    )


def _weights(model, prompt, lengths, told: Generated, source, source_lengths) -> Any:
    """One full pass over what was written: what is kept from step to step gives the same numbers (L33)."""
    given = [prompt.shape[1]] * len(prompt) if lengths is None else lengths.tolist()
    rows = [p[:n].tolist() + t for p, n, t in zip(prompt, given, told.rows(), strict=True)]
    tokens, lengths = _aligned(rows, None, prompt.device)
    if isinstance(model, EncoderDecoder):
        return model(
            source, tokens, source_lengths=source_lengths, target_lengths=lengths, return_weights=True
        )[1]
    if source is not None:  # recurrent
        return model(source, tokens, source_lengths, return_weights=True)[1]
    return model(tokens, lengths=lengths, return_weights=True)[1]
