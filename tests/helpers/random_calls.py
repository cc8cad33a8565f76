"""Random calls of `attention`, and what ran them, observed in the executors themselves."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

import regard as rg
from regard.engine import flex, reference_backend, sdpa
from regard.engine.cpu import backend as cpu_backend
from regard.engine.cpu.gathered_layout import GatheredLayout
from regard.engine.cpu.tiles import TileAttention
from regard.position import ByDistance

WORDS = [
    rg.full(),
    rg.causal(),
    rg.window(2),
    rg.window(16),
    rg.window(9, 2),
    rg.every(4),
    rg.every(32, 3),
    rg.dilated(8, 4),
    rg.strided(7),
    rg.blocks(16),
    rg.sinks(4),
    rg.prefix(20),
]


def random_pattern(rng: random.Random, m: int, device: str) -> Any:
    """None, a pattern of one to three words, packed documents, a function, or a bool tensor."""
    kind = rng.random()
    if kind < 0.08:
        return None
    if kind < 0.14:
        return torch.rand(1, 1, 1, m, generator=torch.Generator().manual_seed(rng.randrange(99))) < 0.7
    if kind < 0.18:
        return torch.ones(1, m, dtype=torch.bool)
    pattern = rng.choice(WORDS)
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        other = rng.choice(WORDS)
        pattern = rng.choice([pattern & other, pattern | other, pattern - other])
    if kind < 0.24:
        return rg.documents(torch.arange(m, device=device) // rng.choice([8, 40])) & rng.choice(
            [rg.full(), rg.causal()]
        )
    return rg.where(torch.ge) & pattern if kind < 0.27 else pattern


def random_call(seed: int, device: str = "cpu") -> tuple[tuple, dict[str, Any]]:
    """The arguments of one call: positional, and by name."""
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, kv_heads = rng.choice([1, 2]), rng.choice([1, 2])
    heads = kv_heads * rng.choice([1, 1, 2])
    m = rng.choice([5, 16, 40, 64, 129, 200, 300, 520])
    n = m if rng.random() < 0.7 else rng.randrange(1, m + 1)
    d_k = rng.choice([8, 16, 64])
    d_v = d_k if rng.random() < 0.7 else rng.choice([3, 24])
    dtypes = [torch.float32, torch.float32, torch.float32, torch.float64, torch.bfloat16]
    dtype, grad = rng.choice(dtypes), rng.random() < 0.5
    shapes = (batch, heads, n, d_k), (batch, kv_heads, m, d_k), (batch, kv_heads, m, d_v)
    q, k, v = (torch.randn(s, generator=g).to(dtype).to(device).requires_grad_(grad) for s in shapes)
    options: dict[str, Any] = {}
    if rng.random() < 0.15:
        options["lengths"] = torch.randint(1, m + 1, (batch,), generator=g).to(device)
    if rng.random() < 0.15:
        options["dropout_p"] = 0.25
    if rng.random() < 0.15:
        options["scale"] = rng.choice([float("inf"), 0.3, 0.0, -1.0, 2])
    if rng.random() < 0.2 and options.get("scale") != float("inf"):
        options["return_lse"] = True
    if rng.random() < 0.2:
        options["at"] = rng.choice([m - n, 0, 3, (0, 2), (torch.arange(batch) + m - n).to(device)])
    if rng.random() < 0.25:
        table = torch.randn(heads, 9, generator=g).to(device)
        slopes = ByDistance(slopes=torch.rand(heads, generator=g).to(device))
        options["bias"] = rng.choice(
            [
                slopes,
                ByDistance(table=table.requires_grad_(grad)),
                torch.zeros(1, m, dtype=dtype, device=device),
            ]
        )
    pattern = random_pattern(rng, m, device)
    if isinstance(pattern, torch.Tensor):
        pattern = pattern.to(device)
    return (q, k, v, pattern), options


@contextmanager
def observed() -> Iterator[list[str]]:
    """ "backend, variant" of every executor that runs inside, in order."""
    ran: list[str] = []

    def sdpa_variant(*args, **kwargs):
        mask = next((x for x in args[3:5] if isinstance(x, torch.Tensor)), kwargs.get("attn_mask"))
        return "sdpa, dense" if mask is None else "sdpa, masked"

    with ExitStack() as stack:
        for holder, name, variant in (
            (sdpa, "_sdpa", sdpa_variant),
            (sdpa, "_without_plan", sdpa_variant),
            (sdpa, "fused_forward", sdpa_variant),
            (reference_backend, "attend", "reference, formula"),
            (flex, "attend", "flex, blocks of 128 × 128"),
            (TileAttention, "forward", _tiles_variant),
            (cpu_backend, "_attend_one_query", "tiles, one query"),
        ):
            stack.enter_context(_noting(ran, holder, name, variant))
        yield ran


def _tiles_variant(call: TileAttention, buffers: Any, q: Any, k: Any, v: Any, e: Any = None) -> str:
    """By the layout that the executor is given."""
    if isinstance(call.layouts[0], GatheredLayout):
        return "tiles, short sequence: gathered keys"
    if e is not None or call.dropout_p:
        return "tiles, dropout" if e is None else "tiles, bias by distance"
    if call.pattern_and_offset is not None and call.pattern_and_offset[0].has_data:
        return "tiles, packed documents"
    return "tiles, concatenated keys" if call.layouts[0].concatenated else "tiles, merged tiles"


def _noting(ran: list[str], holder: Any, name: str, variant: Any) -> Any:
    real = getattr(holder, name)

    def noting(*args, **kwargs):
        ran.append(variant(*args, **kwargs) if callable(variant) else variant)
        return real(*args, **kwargs)

    return mock.patch.object(holder, name, noting)
