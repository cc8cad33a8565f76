"""Random calls that combine patterns, heads, score terms, padding and offsets, by every backend that takes them."""

import random

import pytest
import torch
from torch.testing import assert_close

import regard as rg
from regard.engine.attention import call_of, normalized
from regard.errors import BackendError

f64 = torch.float64


def sample_pattern(r: random.Random, depth: int = 2):
    words = [
        lambda: rg.causal(),
        lambda: rg.window(r.randint(0, 9), r.choice([None, 0, 3])),
        lambda: rg.every(r.randint(1, 7)),
        lambda: rg.strided(r.randint(1, 6)),
        lambda: rg.sinks(r.randint(0, 4)),
        lambda: rg.blocks(r.randint(1, 12)),
        lambda: rg.dilated(r.randint(0, 3), r.randint(1, 4)),
        lambda: rg.prefix(r.randint(0, 9)),
    ]
    if depth == 0 or r.random() < 0.3:
        return r.choice(words)()
    a, b = sample_pattern(r, depth - 1), sample_pattern(r, depth - 1)
    return r.choice([a & b, a | b, a | b, a - b])


def sample_call(seed: int):
    """(q, k, v), options."""
    r = random.Random(seed)
    h_kv, group = r.choice([1, 2, 3]), r.choice([1, 2, 4])
    h, b = h_kv * group, r.choice([1, 2, 3])
    m = r.choice([1, 5, 17, 40, 70])
    n = r.choice([1, m, max(1, m // 3)])
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=g, dtype=f64)

    d_k, d_v = r.choice([4, 8]), r.choice([4, 8])
    q, k, v = 2 * randn(b, h, n, d_k), randn(b, h_kv, m, d_k), randn(b, h_kv, m, d_v)
    patterns = [sample_pattern(r) for _ in range(r.choice([1, 1, 2, 3]))]
    options = {"pattern": patterns[0] if len(patterns) == 1 else [r.choice(patterns) for _ in range(h)]}
    if r.random() < 0.4:
        options["softcap"] = r.choice([0.8, 3.0, 30.0])
    if r.random() < 0.4:
        options["sink_logits"] = randn(h)
    match r.choice(["none", "none", "right", "left"]):
        case "right":
            options["lengths"] = torch.randint(0, m + 1, (b,), generator=g)
        case "left":
            first = torch.randint(0, m, (b,), generator=g)
            options["lengths"] = torch.stack([first, torch.randint(0, m + 1, (b,), generator=g)], 1)
    match r.choice(["none", "none", "start", "rows"]):
        case "start":
            options["at"] = r.randint(0, m)
        case "rows":
            options["at"] = torch.randint(0, m + 1, (b,), generator=g)
    if r.random() < 0.2:
        options["bias"] = rg.ByDistance(slopes=randn(h).abs())
    if r.random() < 0.3:
        options["scale"] = r.choice([0.0, 0.3, 2.0])
    return (q, k, v), options


def expected(q, k, v, options):
    """Every table dense, by reference.py."""
    call = normalized(call_of(q, k, v, **options)).hide()
    allowed, bias = call.allowed(), call.dense_bias()
    k, v = (rg.reference.repeat_heads(x, q.shape[1]) for x in (call.k, call.v))
    terms = {"scale": call.scale, "softcap": call.softcap, "sink_logits": call.sink_logits}
    found = rg.reference.attend(call.q, k, v, allowed, bias=bias, **terms)
    return found.o, found.lse


def same(found, right, where: str):
    assert_close(found, right, msg=lambda text: f"{where}: {text}")


MORE = [pytest.param(first, marks=pytest.mark.long) for first in range(25, 200, 25)]


@pytest.mark.parametrize("first", [0, *MORE])
def test_random_compositions_are_the_formula(first):
    ran = {"auto": 0, "sdpa": 0, "tiles": 0, "reference": 0}
    for seed in range(first, first + 25):
        inputs, options = sample_call(seed)
        q, k, v = (x.requires_grad_() for x in inputs)
        o, lse = expected(q, k, v, options)
        do = torch.randn(o.shape, generator=torch.Generator().manual_seed(seed), dtype=f64)
        wrt = [q, k, v] + ([options["sink_logits"].requires_grad_()] if "sink_logits" in options else [])
        o, lse = expected(q, k, v, options)
        right = torch.autograd.grad((o * do).sum(), wrt, allow_unused=True)
        for backend in ran:
            try:
                found, found_lse = rg.attention(q, k, v, **options, backend=backend, return_lse=True)
                same(found_lse, lse, f"seed {seed}, {backend}, lse")
            except BackendError:
                try:
                    found = rg.attention(q, k, v, **options, backend=backend)
                except BackendError:
                    continue
            ran[backend] += 1
            same(found, o, f"seed {seed}, {backend}")
            grads = torch.autograd.grad((found * do).sum(), wrt, allow_unused=True)
            for name, g, w in zip(("q", "k", "v", "sink"), grads, right):
                same(g, w, f"seed {seed}, {backend}, gradient of {name}")
    assert ran["auto"] == ran["reference"] == 25
    assert ran["tiles"] >= 3 and ran["sdpa"] >= 3, ran
