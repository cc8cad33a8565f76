"""Beam search over the likeliest sequences of each batch row."""

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
    """The best finished sequence of one batch row."""

    score: float = -inf
    log_prob: float = -inf
    tokens: list[int] = field(default_factory=list)


def search(
    strategy: beam,
    steps: Steps,
    prompt: Int[Tensor, "b n"],
    lengths: Int[Tensor, " b"] | None,
    max_new_tokens: int,
    eos_id: int | None,
) -> list[tuple[float, list[int]]]:
    """The log-probability and the tokens of each row's best sequence, without the prompt and without `eos_id`.

    An end token counts where it is among the `width` likeliest continuations. A row is finished when no unfinished
    sequence can still win: a log-probability only decreases, and the length penalty is largest at max_new_tokens.
    """
    device, b, width = prompt.device, len(prompt), strategy.width
    first = torch.arange(b, device=device)[:, None] * width  # index of each row's first sequence
    logits = repeat(steps.next(prompt, lengths), "b v -> b w v", w=width)
    steps.select(repeat(torch.arange(b, device=device), "b -> (b w)", w=width))
    total = torch.full((b, width), -inf, device=device)
    total[:, 0] = 0.0  # the first step continues one sequence per row
    written = torch.empty(b, width, 0, dtype=torch.long, device=device)
    best = [Best() for _ in range(b)]
    for length in range(1, max_new_tokens + 1):
        log_prob, origin, token = _continuations(total, logits.float())
        longer = torch.cat([_select(written, origin), token[..., None]], 2)
        ends = (token == eos_id) if eos_id is not None else torch.zeros_like(token, dtype=torch.bool)
        _finish(best, log_prob[:, :width], longer[:, :width, :-1], ends[:, :width], strategy.penalty(length))
        # Of 2·width continuations at most width end, one per sequence, so width unfinished ones remain.
        live = ends.to(torch.int8).argsort(dim=-1, stable=True)[:, :width]
        total = log_prob.gather(1, live).masked_fill(ends.gather(1, live), -inf)
        written = _select(longer, live)
        bound = (total.amax(1) / strategy.penalty(max_new_tokens)).tolist()
        if length == max_new_tokens:
            _finish(best, total, written, total > -inf, strategy.penalty(max_new_tokens))
        if length == max_new_tokens or all(b.score >= h for b, h in zip(best, bound, strict=True)):
            break
        origin, token = origin.gather(1, live), token.gather(1, live)
        steps.select(rearrange(origin + first, "b w -> (b w)"), same_context=True)
        logits = rearrange(steps.next(rearrange(token, "b w -> (b w) 1")), "(b w) v -> b w v", w=width)
    return [(b.log_prob, b.tokens) for b in best]


def _continuations(
    total: Float[Tensor, "b w"], logits: Float[Tensor, "b w v"]
) -> tuple[Float[Tensor, "b k"], Int[Tensor, "b k"], Int[Tensor, "b k"]]:
    """The 2·width likeliest continuations: log-probability, which sequence is continued, with which token.

    They are among the 2·width likeliest of each sequence, so log-probabilities are computed for those only.
    """
    width, vocab = logits.shape[1:]
    each = min(2 * width, vocab)
    scores, token = logits.topk(each, dim=-1)
    log_prob = total[..., None] + scores - logits.logsumexp(-1, keepdim=True)
    largest, index = log_prob.flatten(1).topk(min(2 * width, width * each), dim=-1)
    return largest, index // each, token.flatten(1).gather(1, index)


def _select(written: Int[Tensor, "b w n"], origin: Int[Tensor, "b k"]) -> Int[Tensor, "b k n"]:
    return written.gather(1, repeat(origin, "b k -> b k n", n=written.shape[2]))


def _finish(
    best: list[Best],
    total: Float[Tensor, "b k"],
    written: Int[Tensor, "b k n"],
    ends: Bool[Tensor, "b k"],
    penalty: int | float,
) -> None:
    """Store the sequences that end and score higher than the best of their row so far."""
    log_prob = total.tolist()
    for row, index in ends.nonzero().tolist():
        score = log_prob[row][index] / penalty
        if score > best[row].score:
            best[row] = Best(score, log_prob[row][index], written[row, index].tolist())
