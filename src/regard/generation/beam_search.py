"""Beam search over the likeliest sequences of each batch row."""

from dataclasses import dataclass, field
from math import inf

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .steps import Steps
from .strategies import beam

BLOCK = 64  # scores per block when the largest ones are searched on a CPU


@dataclass
class Best:
    """The best finished sequence of one batch row, and how many have ended."""

    score: float = -inf
    log_prob: float = -inf
    tokens: list[int] = field(default_factory=list)
    ended: int = 0  # sequences so far


def search(
    strategy: beam,
    steps: Steps,
    prompt: Int[Tensor, "b n"],
    lengths: Int[Tensor, " b"] | None,
    limits: list[int],
    eos_id: int | None,
) -> list[tuple[float, list[int]]]:
    """The log-probability and the tokens of each row's best sequence, without the prompt and without `eos_id`.

    An end token counts where it is among the `width` likeliest continuations. A row is finished when `width` of its
    sequences have ended, or when no unfinished one can still win: a log-probability only decreases, and the length
    penalty is largest at the row's limit of new tokens. Rows that are finished cost nothing more.
    """
    device, b, width = prompt.device, len(prompt), strategy.width
    best = [Best() for _ in range(b)]
    active = list(range(b))  # the rows that are not finished
    logits = repeat(steps.next(prompt, lengths), "b v -> b w v", w=width)
    steps.repeat(width)
    total = torch.full((b, width), -inf, device=device)
    total[:, 0] = 0.0  # the first step continues one sequence per row
    written = torch.empty(b, width, 0, dtype=torch.long, device=device)
    for length in range(1, max(limits) + 1):
        log_prob, origin, token = _continuations(total, logits.float())
        longer = torch.cat([_select(written, origin), token[..., None]], 2)
        ends = (token == eos_id) if eos_id is not None else torch.zeros_like(token, dtype=torch.bool)
        rows = [best[i] for i in active]
        _finish(rows, log_prob[:, :width], longer[:, :width, :-1], ends[:, :width], strategy.penalty(length))
        # Of 2·width continuations at most width end, one per sequence, so width unfinished ones remain.
        live = ends.to(torch.int8).argsort(dim=-1, stable=True)[:, :width]
        total = log_prob.gather(1, live).masked_fill(ends.gather(1, live), -inf)
        written = _select(longer, live)
        at_limit = [limits[i] == length for i in active]
        if any(at_limit):
            unfinished = (total > -inf) & torch.tensor(at_limit, device=device)[:, None]
            _finish(rows, total, written, unfinished, strategy.penalty(length))
        left = [
            i
            for i, (row, most) in enumerate(zip(rows, total.amax(1).tolist(), strict=True))
            if not at_limit[i]
            and row.ended < width
            and row.score < most / strategy.penalty(limits[active[i]])
        ]
        if not left:
            break
        origin, token = origin.gather(1, live), token.gather(1, live)
        origin += (
            torch.arange(len(active), device=device)[:, None] * width
        )  # from each row's first sequence on
        kept = None
        if len(left) < len(active):
            left = _compacted(left)
            kept = torch.tensor(left, device=device)
            total, written, origin, token = (t[kept] for t in (total, written, origin, token))
            active = [active[i] for i in left]
        steps.select_beams(origin.flatten(), kept)
        logits = rearrange(steps.next(token.view(-1, 1)), "(b w) v -> b w v", w=width)
    return [(b.log_prob, b.tokens) for b in best]


def _compacted(left: list[int]) -> list[int]:
    """These rows in an order in which few move: the last ones take the places of those that are missing.

    >>> _compacted([0, 2, 3, 5, 6])
    [0, 6, 2, 3, 5]
    """
    kept, last = set(left), [i for i in left if i >= len(left)]
    return [i if i in kept else last.pop() for i in range(len(left))]


def _continuations(
    total: Float[Tensor, "b w"], logits: Float[Tensor, "b w v"]
) -> tuple[Float[Tensor, "b k"], Int[Tensor, "b k"], Int[Tensor, "b k"]]:
    """The 2·width likeliest continuations: log-probability, which sequence is continued, with which token.

    Contiguous logits are overwritten: a new tensor of this size costs more than what is computed in it.
    """
    width, vocab = logits.shape[1:]
    k = min(2 * width, width * vocab)
    scores = torch.log_softmax(logits, -1, out=logits if logits.is_contiguous() else None)
    if scores.device.type != "cpu" or vocab % BLOCK or width * vocab < 4 * k * BLOCK:
        largest, index = (total[..., None] + scores).flatten(1).topk(k, dim=-1)
        return largest, index // vocab, index % vocab
    # A maximum is faster on a CPU than topk: only the k blocks with the largest maxima are searched.
    blocks = scores.unflatten(-1, (-1, BLOCK)).flatten(1, 2)
    of_block = total.repeat_interleave(vocab // BLOCK, 1)
    index = (blocks.amax(-1) + of_block).topk(k, dim=-1).indices
    inside = blocks.gather(1, repeat(index, "b k -> b k n", n=BLOCK)) + of_block.gather(1, index)[..., None]
    largest, inner = inside.flatten(1).topk(k, dim=-1)
    index = index.gather(1, inner // BLOCK) * BLOCK + inner % BLOCK
    return largest, index // vocab, index % vocab


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
        best[row].ended += 1
        if score > best[row].score:
            found = best[row]
            found.score, found.log_prob, found.tokens = (
                score,
                log_prob[row][index],
                written[row, index].tolist(),
            )
