"""`rg.generate`: the entry point of generation, and the decoding loop of `greedy` and `sample`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..errors import ShapeError, SpecError, require_tensors
from ..nn.recurrent import check_lengths
from ..nn.stack import EncoderDecoder, Stack
from ..pattern import causal, sinks
from ..spec import Spec
from . import beam_search
from .steps import Steps, steps
from .strategies import Strategy, beam, greedy, pick, sample


@dataclass(frozen=True)
class Generated:
    """The generated tokens, one row per prompt; past lengths[b] a row holds eos_id (0 if there is none)."""

    tokens: Int[Tensor, "b n"]  # without the prompt and without the end token
    lengths: Int[Tensor, " b"]
    log_probs: Float[Tensor, " b"] | None = None  # of the tokens and their end, where requested
    weights: Any = None  # as the model's own return_weights gives them for prompt and tokens

    def rows(self) -> list[list[int]]:
        """The tokens of each row, cut at its length."""
        return [row[:n].tolist() for row, n in zip(self.tokens, self.lengths.tolist(), strict=True)]


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Int[Tensor, "b n"] | Sequence[Sequence[int]],
    strategy: Strategy = greedy(),
    *,
    source: Int[Tensor, "b m"] | None = None,
    source_lengths: Int[Tensor, " b"] | None = None,
    padding: Bool[Tensor, "b _"] | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    eos_id: int | None = None,
    return_log_probs: bool = True,
    return_weights: bool = False,
) -> Generated:
    """Continue each prompt until `eos_id` or for max_new_tokens tokens, with dropout off.

    prompt: rows of token ids, of different lengths, or padded on either side (`padding` is True there). An
    encoder-decoder reads `source` and starts from its start token: prompt = [[start]] * b. Rows that have
    ended cost nothing more; no row grows beyond a learned table of positions. max_new_tokens: one number, or
    one per row. Without log-probabilities a greedy step is about a tenth cheaper.
    """
    if not isinstance(strategy, Strategy):
        raise SpecError(
            f"strategy={strategy!r} is not a strategy; use rg.greedy(), rg.sample(0.8) or rg.beam(4)"
        )
    if eos_id is not None and not hasattr(eos_id, "__index__"):
        raise SpecError(f"eos_id={eos_id}: one token id is needed, a whole number")
    model = getattr(model, "_orig_mod", model)  # of torch.compile(model)
    tokens, lengths = _aligned(prompt, padding, _device(model, prompt))
    limits = _limits(max_new_tokens, len(tokens))
    _require_fitting(model, tokens, lengths, tokens.shape[1] + max(limits), eos_id)
    _require_source(model, source, source_lengths, len(tokens))
    was_training = model.training
    model.eval()
    try:
        order = None if isinstance(strategy, sample) else _longest_first(tokens, source, source_lengths)
        if order is not None:
            unsorted = tokens, lengths, source, source_lengths
            tokens = tokens[order]
            lengths, source, source_lengths = (None if t is None else t[order] for t in unsorted[1:])
            limits = [limits[i] for i in order.tolist()]
        decoder, positions = steps(model, source, source_lengths)
        if positions is not None:
            room = positions - tokens.shape[1]
            if room < 1:
                raise ShapeError(
                    f"a prompt of {tokens.shape[1]} tokens fills a table of {positions} positions; shorten it"
                )
            limits = [min(n, room) for n in limits]
        if isinstance(strategy, beam):
            best = beam_search.search(strategy, decoder, tokens, lengths, limits, eos_id)
            written, log_probs = [tokens for _, tokens in best], [log_prob for log_prob, _ in best]
        else:
            written, log_probs = _decode(strategy, decoder, tokens, lengths, limits, eos_id, return_log_probs)
        if order is not None:
            tokens, lengths, source, source_lengths = unsorted
            back = order.argsort().tolist()
            written, log_probs = [written[i] for i in back], [log_probs[i] for i in back]
        result = _generated(written, log_probs if return_log_probs else None, tokens.device, eos_id or 0)
        if return_weights:
            weights = _weights(model, tokens, lengths, result, source, source_lengths)
            result = replace(result, weights=weights)
        return result
    finally:
        model.train(was_training)


def _decode(
    strategy: greedy | sample,
    steps: Steps,
    prompt: Int[Tensor, "b n"],
    lengths: Int[Tensor, " b"] | None,
    limits: list[int],
    eos_id: int | None,
    with_log_probs: bool,
) -> tuple[list[list[int]], list[float]]:
    """One token per row and step. Returns each row's tokens and their log-probability."""
    b, device, longest = len(prompt), prompt.device, max(limits)
    written = torch.zeros(b, longest, dtype=torch.long, device=device)
    count = torch.tensor(limits, device=device)
    limit = None if min(limits) == longest else count.clone()  # None: all rows have the same
    log_probs = torch.zeros(b, device=device)
    active = torch.arange(b, device=device)  # the rows that have not ended
    random = torch.Generator().manual_seed(strategy.seed) if isinstance(strategy, sample) else None
    logits = steps.next(prompt, lengths)
    for n in range(longest):
        uniform = None
        if random is not None:
            # One number for every row at every step, so that no row depends on which others are active.
            uniform = torch.rand(b, generator=random, dtype=torch.float64).to(device)[active]
        token = pick(strategy, logits, uniform)
        if with_log_probs:
            scores = logits.float()
            log_probs[active] += scores.gather(-1, token[:, None])[:, 0] - scores.logsumexp(-1)
        written[active, n] = token
        continues = torch.ones_like(token, dtype=torch.bool) if eos_id is None else token != eos_id
        left = int(continues.sum())
        if left < len(active):
            count[active[~continues]] = n
        if limit is not None:
            continues &= limit[active] > n + 1
            left = int(continues.sum())
        if left == 0 or n + 1 == longest:
            break
        if left < len(active):
            rows = _compacted(continues, left)
            steps.select(rows)
            active, token = active[rows], token[rows]
        logits = steps.next(token[:, None])
    return [row[:c].tolist() for row, c in zip(written, count.tolist(), strict=True)], log_probs.tolist()


def _limits(max_new_tokens: int | Sequence[int], rows: int) -> list[int]:
    """The largest number of new tokens of each row."""
    given = max_new_tokens if isinstance(max_new_tokens, Iterable) else [max_new_tokens] * rows
    try:
        limits = [index(n) for n in given]
    except TypeError as e:
        raise SpecError(
            f"max_new_tokens={max_new_tokens}: a whole number is needed, or one per prompt"
        ) from e
    if len(limits) != rows:
        raise ShapeError(
            f"max_new_tokens has {len(limits)} numbers for {rows} prompts; give one, or one per prompt"
        )
    if min(limits) < 1:
        raise SpecError(f"max_new_tokens={max_new_tokens}: it needs to be at least 1")
    return limits


def _device(model: nn.Module, prompt: Any) -> torch.device:
    """Where the model is; refuses what is no module, and tensors without values."""
    if not isinstance(model, nn.Module):
        built = "; build it first: spec.build()" if isinstance(model, Spec) else ""
        raise SpecError(f"generate needs a model, not {type(model).__name__}{built}")
    device = next(model.parameters(), torch.empty(0)).device
    if device.type == "meta" or (isinstance(prompt, Tensor) and prompt.is_meta):
        raise ShapeError("tensors on the device meta have no values to generate from; use a CPU or a GPU")
    return device


def _require_source(model: nn.Module, source: Any, lengths: Any, rows: int) -> None:
    """Refuse a source that is not one row of the model's tokens per prompt, and lengths that do not fit it."""
    if source is None:
        if lengths is not None:
            raise ShapeError("source_lengths belong to a source; give source= as well")
        return
    if not isinstance(source, Tensor):
        kind = type(source).__name__
        raise ShapeError(f"source is of type {kind}, not a tensor; pad its rows and give source_lengths")
    if source.dim() != 2 or len(source) != rows:
        raise ShapeError(
            f"source has shape {tuple(source.shape)}; ({rows}, m) is needed, one row of ids per prompt"
        )
    if lengths is not None:
        require_tensors(source_lengths=lengths)
        check_lengths(lengths, source)
    if isinstance(model, EncoderDecoder) and model.encoder.embedding is not None:
        inside = torch.arange(source.shape[1], device=source.device)
        real = source if lengths is None else source[inside < lengths[:, None]]
        _require_tokens("source", real, len(model.encoder.embedding.table))


def _require_tokens(name: str, tokens: Int[Tensor, "*b"], vocab: int) -> None:
    wrong = tokens[(tokens < 0) | (tokens >= vocab)]
    if len(wrong):
        raise ShapeError(f"{name} has the token {int(wrong[0])}; this model has the tokens 0 to {vocab - 1}")


def _require_fitting(
    model: nn.Module,
    tokens: Int[Tensor, "b n"],
    lengths: Int[Tensor, " b"] | None,
    total: int,
    eos_id: int | None,
) -> None:
    """Refuse tokens that the model does not have, and a model in which a token changes what earlier ones compute.

    A cache keeps their keys and values. Within its prompt, a prefix language model may attend to later tokens.
    """
    stack = model.decoder if isinstance(model, EncoderDecoder) else model
    if not isinstance(stack, Stack) or stack.embedding is None:
        return
    vocab, prompt = len(stack.embedding.table), tokens.shape[1] if lengths is None else int(lengths.min())
    _require_tokens("prompt", tokens, vocab)
    if eos_id is not None and not 0 <= eos_id < vocab:
        raise SpecError(f"eos_id={eos_id}: this model has the tokens 0 to {vocab - 1}; None ends no row")
    pattern = stack.spec.block.attention.pattern
    if not isinstance(pattern, causal) and (pattern - causal() - sinks(prompt)).count(total):
        declared = f"({pattern!r})" if "|" in repr(pattern) else repr(pattern)
        raise SpecError(
            f"after a prompt of {prompt} tokens, {pattern!r} attends to tokens that are not generated yet; declare "
            f"rg.causal() & {declared}"
        )


def _longest_first(
    tokens: Int[Tensor, "b n"], source: Tensor | None, lengths: Int[Tensor, " b"] | None
) -> Int[Tensor, " b"] | None:
    """On a CPU the rows in descending order of their sources' lengths: attention then takes similar ones at once, and
    those that end first are at the end."""
    if source is None or lengths is None or not tokens.is_cpu or lengths.shape != (len(tokens),):
        return None
    return lengths.argsort(descending=True, stable=True) if len(source) == len(tokens) else None


def _compacted(continues: Bool[Tensor, " b"], left: int) -> Int[Tensor, " left"]:
    """The rows that continue: the last ones move to the indices of rows that ended, the others stay."""
    rows = torch.arange(left, device=continues.device)
    rows[~continues[:left]] = left + continues[left:].nonzero()[:, 0]
    return rows


def _aligned(
    prompt: Int[Tensor, "b n"] | Sequence[Sequence[int]],
    padding: Bool[Tensor, "b _"] | None,
    device: torch.device,
) -> tuple[Int[Tensor, "b n"], Int[Tensor, " b"] | None]:
    """Prompts aligned at the left, and their lengths where they differ."""
    if isinstance(prompt, str):
        raise ShapeError(f"prompt={prompt!r}: token ids are needed, such as tokens.encode([{prompt!r}])")
    if isinstance(prompt, Tensor) and prompt.dim() != 2:
        raise ShapeError(
            f"prompt has shape {tuple(prompt.shape)}; (b, n) is needed, one row of ids per prompt"
        )
    if not isinstance(prompt, Tensor):
        if any(isinstance(row, int) for row in prompt):
            raise ShapeError(f"prompt is one row; put it into a list, [{list(prompt)}]")
        rows = [list(row) for row in prompt]
    elif padding is None:
        rows = prompt.tolist()
    else:
        if padding.shape != prompt.shape:
            raise ShapeError(
                f"padding has shape {tuple(padding.shape)} and prompt {tuple(prompt.shape)}; they have to be equal"
            )
        rows = [row[~hidden].tolist() for row, hidden in zip(prompt, padding, strict=True)]
    if not rows or not all(rows):
        raise ShapeError("every prompt needs at least one token, such as the start token")
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
    lengths = [len(row) for row in rows]
    return tokens, None if min(lengths) == longest else torch.tensor(lengths, device=device)


def _generated(
    rows: list[list[int]], log_probs: list[float] | None, device: torch.device, filler: int
) -> Generated:
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [filler] * (longest - len(row)) for row in rows], dtype=torch.long)
    lengths = torch.tensor([len(row) for row in rows])
    return Generated(
        tokens.reshape(len(rows), longest).to(device),
        lengths.to(device),
        None if log_probs is None else torch.tensor(log_probs, device=device),
    )


def _weights(model, prompt, lengths, result: Generated, source, source_lengths) -> Any:
    """One full pass over prompt and tokens; decoding with a cache has the same weights (law L33)."""
    given = [prompt.shape[1]] * len(prompt) if lengths is None else lengths.tolist()
    rows = [p[:n].tolist() + t for p, n, t in zip(prompt, given, result.rows(), strict=True)]
    tokens, lengths = _aligned(rows, None, prompt.device)
    if isinstance(model, EncoderDecoder):
        return model(
            source, tokens, source_lengths=source_lengths, target_lengths=lengths, return_weights=True
        )[1]
    if source is not None:  # recurrent
        return model(source, tokens, source_lengths, return_weights=True)[1]
    return model(tokens, lengths=lengths, return_weights=True)[1]
