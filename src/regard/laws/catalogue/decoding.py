"""Decoding with a cache and chunked prefill: L33, L52."""

import itertools
from typing import Any

import torch

from ..controls import small_decoder, with_changed_call
from ..harness import Harness
from ..law import Case, Law, Trial
from ..measurement import Measurement, compare
from .masks import positions_out, sequence_lengths


def cached(harness: Harness, c: Case) -> Measurement:
    """Decoding step by step, or in chunks, against the full pass."""
    model, module = harness.model, harness.module()
    assert model.make_cache is not None and model.decode is not None
    x, context = harness.sequence(c.b, c.n), harness.context(c.b, 3)
    with torch.no_grad():
        options: dict[str, Any] = {} if harness.supports("always causal") else {"causal": True}
        want = harness.run(x, context, **options)
        cache = model.make_cache(module, c.b, *(() if context is None else (context,)))
        steps, position = [], 0
        for size in itertools.cycle((c.chunk, 1) if c.chunk > 1 else (1,)):
            if position >= c.n:
                break
            steps.append(model.decode(module, x[:, position : position + size], cache))
            position += size
    return compare("decoding with a cache against the full pass", torch.cat(steps, 1), want)


def function_cached(harness: Harness, c: Case) -> Measurement:
    """Query t over the keys up to t against row t of the causal pass."""
    q, k, v = harness.qkv(c)
    n = c.n
    past = torch.ones(n, n, dtype=torch.bool, device=harness.device).tril()
    full = harness.attend(q, k, v, **({"causal": True} if harness.supports("causal") else {"allowed": past}))
    steps = [harness.attend(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1]) for t in range(n)]
    return compare("one query at a time against the causal pass", torch.cat(steps, 2), full)


def chunked_prefill(harness: Harness, c: Case) -> Measurement:
    """Queries in chunks, each over the keys so far, against the full causal pass."""
    q, k, v = harness.qkv(c)
    full = harness.attend(q, k, v, **_causal_options(harness, c.n, c.n))
    chunks = []
    for start in range(0, c.n, c.chunk):
        end = min(start + c.chunk, c.n)
        options = _causal_options(harness, end - start, end)
        chunks.append(harness.attend(q[:, :, start:end], k[:, :, :end], v[:, :, :end], **options))
    return compare("queries in chunks against the full pass", torch.cat(chunks, 2), full)


def _causal_options(harness: Harness, n: int, m: int) -> dict[str, Any]:
    """Options for the last n queries over m keys with a causal mask."""
    if harness.supports("causal") and (n == m or harness.target.alignment == "bottom-right"):
        return {"causal": True}
    i = torch.arange(n, device=harness.device)[:, None] + m - n
    return {"allowed": torch.arange(m, device=harness.device) <= i}


def chunk_space(harness: Harness):
    return harness.space(m=None, n=(2, 3, 5, 7, 11), chunk=(1, 2, 3, 4))


def without_chunks(harness: Harness) -> str | None:
    if harness.supports("mask") or harness.target.alignment == "bottom-right":
        return None
    return "a chunk of queries is aligned with the last keys, which needs bottom-right alignment or a mask"


LAWS = (
    Law(
        "L33",
        "cached decoding",
        "decoding with cached keys and values = the full causal pass",
        "causal; positions continue in the cache",
        {
            "function": Trial(
                function_cached, lambda harness: harness.space(m=None), needs=("causal|mask", "n≠m")
            ),
            "model": Trial(
                cached,
                lambda harness: {"b": (1, 2, 3), "n": sequence_lengths(harness, 2), "chunk": (1,)},
                needs=("cache",),
                unless=positions_out,
            ),
        },
        lambda: small_decoder("positions restarted", fault="restarts positions"),
    ),
    Law(
        "L52",
        "chunked prefill",
        "queries in chunks over the keys so far = the full causal pass",
        "causal or mask, and n ≠ m; for a model a cache",
        {
            "function": Trial(
                chunked_prefill, chunk_space, needs=("causal|mask", "n≠m"), unless=without_chunks
            ),
            "model": Trial(
                cached,
                lambda harness: {"b": (1, 2, 3), "n": sequence_lengths(harness, 3), "chunk": (2, 3)},
                needs=("cache",),
                unless=positions_out,
            ),
        },
        lambda: with_changed_call(
            "each chunk attends only to itself",
            lambda q, k, v, options: ((q, k[:, :, -q.shape[2] :], v[:, :, -q.shape[2] :]), options),
            "causal",
            "n≠m",
            "float64",
            "d_v≠d_k",
        ),
    ),
)
