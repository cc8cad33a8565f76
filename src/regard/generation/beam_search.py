"""Beam search: the likeliest sentences, kept side by side."""

from dataclasses import dataclass, field
from math import inf

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .steps import Steps
from .strategies import beam


@dataclass
class Best:
    """The best of one row's sentences that have ended."""

    score: float = -inf
    log_p: float = -inf
    tokens: list[int] = field(default_factory=list)


def search(
    how: beam,
    steps: Steps,
    prompt: Int[Tensor, "b n"],
    lengths: Int[Tensor, " b"] | None,
    most: int,
    end: int | None,
) -> list[tuple[float, list[int]]]:
    """The log-probability and the tokens of each row's best sentence; the prompt and `end` are left out.

    An end counts where it is among the `width` likeliest continuations. A row is done when no live sentence can
    still win, however long it grows: a log-probability only falls, and no length divides it by more than `most`.
    """
    device, b, width = prompt.device, len(prompt), how.width
    first = torch.arange(b, device=device)[:, None] * width  # where a row's sentences stand among all
    logits = repeat(steps.next(prompt, lengths), "b v -> b w v", w=width)
    steps.select(repeat(torch.arange(b, device=device), "b -> (b w)", w=width))
    total = torch.full((b, width), -inf, device=device)
    total[:, 0] = 0.0  # the first step has one sentence to go on from
    written = torch.empty(b, width, 0, dtype=torch.long, device=device)
    best = [Best() for _ in range(b)]
    for length in range(1, most + 1):
        found, origin, token = _continuations(total, logits.float())
        grown = torch.cat([_along(written, origin), token[..., None]], 2)
        ends = (token == end) if end is not None else torch.zeros_like(token, dtype=torch.bool)
        _close(best, found[:, :width], grown[:, :width, :-1], ends[:, :width], how.penalty(length))
        # Of 2·width continuations at most width end, one a sentence: the others are enough to go on with.
        live = ends.to(torch.int8).argsort(dim=-1, stable=True)[:, :width]
        total, written = found.gather(1, live).masked_fill(ends.gather(1, live), -inf), _along(grown, live)
        hope = (total.amax(1) / how.penalty(most)).tolist()
        if length == most:
            _close(best, total, written, total > -inf, how.penalty(most))
        if length == most or all(b.score >= h for b, h in zip(best, hope, strict=True)):
            break
        origin, token = origin.gather(1, live), token.gather(1, live)
        steps.select(rearrange(origin + first, "b w -> (b w)"), same_context=True)
        logits = rearrange(steps.next(rearrange(token, "b w -> (b w) 1")), "(b w) v -> b w v", w=width)
    return [(b.log_p, b.tokens) for b in best]


def _continuations(
    total: Float[Tensor, "b w"], logits: Float[Tensor, "b w v"]
) -> tuple[Float[Tensor, "b k"], Int[Tensor, "b k"], Int[Tensor, "b k"]]:
    """The 2·width likeliest: log-probability, which sentence is continued, with which token.

    They are among the 2·width likeliest of each sentence, so only those are made log-probabilities.
    """
    width, vocab = logits.shape[1:]
    each = min(2 * width, vocab)
    scores, token = logits.topk(each, dim=-1)
    log_p = total[..., None] + scores - logits.logsumexp(-1, keepdim=True)
    found, at = log_p.flatten(1).topk(min(2 * width, width * each), dim=-1)
    return found, at // each, token.flatten(1).gather(1, at)


def _along(written: Int[Tensor, "b w n"], origin: Int[Tensor, "b k"]) -> Int[Tensor, "b k n"]:
    return written.gather(1, repeat(origin, "b k -> b k n", n=written.shape[2]))


def _close(
    best: list[Best],
    total: Float[Tensor, "b k"],
    written: Int[Tensor, "b k n"],
    ends: Bool[Tensor, "b k"],
    penalty: int | float,
) -> None:
    """Keep the sentences that end and beat what their row has."""
    log_p = total.tolist()
    for row, place in ends.nonzero().tolist():
        if log_p[row][place] / penalty > best[row].score:
            best[row] = Best(log_p[row][place] / penalty, log_p[row][place], written[row, place].tolist())
