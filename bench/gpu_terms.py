"""Score terms and padding on one GPU: softcap, sinks, lengths; regard against its general kernels and its peers.

    PYTHONPATH=src:bench:$HOME/wheels:$HOME/wheels/nvidia_cutlass_dsl/dsl_packages python3 bench/gpu_terms.py

Shapes are those of models that have these terms: Gemma 2 (softcap), gpt-oss (sinks), BERT, Llama and Mistral (padded
batches, whose lengths are drawn by a seed). Peers: FlexAttention (score_mod, mask_mod; a sink is joined by its
log-sum-exp), SDPA with a mask (lengths), FlashAttention-4 where it is installed (softcap with an approximate tanh,
learnable sinks). `wall` is the time of one call by CUDA events with the cache cleared before, `busy` that of its
launches replayed as a CUDA graph; medians of rounds in random order. Results are compared before they are timed.
"""

import argparse
import json
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from unittest import mock

import torch
import torch.nn.functional as F
from gpu_peers import PACKAGES, _there, both, graph_of, off, times

import regard as rg
from regard.engine import flash4
from regard.engine.call import Extras, Options
from regard.engine.cuda import host
from regard.engine.cuda.call import task

BF16 = torch.bfloat16
c, w = rg.causal, rg.window
SPARSE = c() & (w(128) | rg.every(64))
# pattern, n, d, heads, kv_heads, batch, terms
ROWS = [
    (c() & w(4095), 8192, 256, 16, 8, 1, {"softcap": 50.0}),
    (c(), 8192, 128, 16, 16, 1, {"softcap": 50.0}),
    (SPARSE, 16384, 128, 16, 16, 1, {"softcap": 50.0}),
    (c() & w(127), 8192, 64, 64, 8, 1, {"sink_logits": True}),
    (c(), 8192, 64, 64, 8, 1, {"sink_logits": True}),
    (SPARSE, 16384, 128, 16, 16, 1, {"sink_logits": True}),
    (rg.full(), 512, 64, 12, 12, 32, {"lengths": 1}),
    (c(), 4096, 128, 16, 16, 8, {"lengths": 1}),
    (c(), 4096, 128, 16, 16, 8, {"lengths": 2}),
    (c() & w(1023), 8192, 128, 32, 8, 4, {"lengths": 1}),
    (SPARSE, 16384, 128, 16, 16, 1, {"lengths": 1}),
]


def given(row, seed):
    """The options of rg.attention: lengths between a quarter and all of the keys, where the longest has all."""
    generator = torch.Generator("cuda").manual_seed(seed)
    n, heads, batch, terms = row[1], row[3], row[5], dict(row[6])
    if terms.get("sink_logits"):
        terms["sink_logits"] = torch.randn(heads, device="cuda", generator=generator)
    if "lengths" in terms:
        left = terms["lengths"] == 2
        drawn = torch.randint(n // 4, n + 1, (batch,), device="cuda", generator=generator)
        drawn[-1] = n if batch > 1 else 7 * n // 8
        terms["lengths"] = torch.stack([n - drawn, torch.full_like(drawn, n)], 1) if left else drawn
    return terms


def visible(terms, batch, n):
    j, lengths = torch.arange(n, device="cuda"), terms["lengths"]
    return (j < lengths[:, None]) if lengths.dim() == 1 else (j >= lengths[:, :1]) & (j < lengths[:, 1:])


def general(row, terms, tensors):
    """The general Triton kernels: forward and both passes, called directly."""
    pattern, _, d = row[:3]
    q, k, v, do = tensors
    extras = Extras(lengths=terms.get("lengths"), sink=terms.get("sink_logits"))
    own = replace(task(q, v, Options(pattern, 0, 1, d**-0.5, softcap=terms.get("softcap")), extras))
    forward = lambda: host.forward(q, k, v, own, extras)  # noqa: E731

    def step():
        saved = forward()
        return host.backward((q, k, v, *saved), (do, None), own, extras)[:3]

    with mock.patch("regard.engine.cuda.launches.is_hopper", lambda device: False):
        found = [forward()[0], *step()]  # prepared by these calls
    return found, lambda: forward()[0], step


def sdpa(row, terms):
    """SDPA with the mask that a padded batch has in Hugging Face's models."""
    pattern, n, batch, grouped = row[0], row[1], row[5], row[3] != row[4]
    shown = visible(terms, batch, n)[:, None, None]
    mask = shown & pattern.allowed(n, device="cuda") if pattern != rg.full() else shown.expand(-1, 1, n, n)
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=grouped)


def flex(row, terms):
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    pattern, n, _, heads, kv_heads, batch, _ = row
    shown = visible(terms, batch, n) if "lengths" in terms else None
    masked = lambda b, h, i, j: pattern.allows(i, j)  # noqa: E731
    if shown is not None:
        masked = lambda b, h, i, j: pattern.allows(i, j) & shown[b, j]  # noqa: E731
    mask = create_block_mask(masked, None if shown is None else batch, None, n, n, device="cuda")
    cap, sink = terms.get("softcap"), terms.get("sink_logits")
    options = {"block_mask": mask, "enable_gqa": heads != kv_heads}
    if cap is not None:
        options["score_mod"] = lambda score, b, h, i, j: cap * torch.tanh(score / cap)
    compiled = torch.compile(flex_attention, dynamic=False)
    if sink is None:
        return lambda q, k, v: compiled(q, k, v, **options)

    def with_sink(q, k, v):
        o, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True), **options)
        return o * torch.sigmoid(aux.lse - sink[:, None])[..., None].to(o.dtype)

    return torch.compile(with_sink, dynamic=False)


def flash_attention_4(row, terms):
    from flash_attn.cute import flash_attn_func

    (part,) = flash4.parts_of(row[0], row[1], row[1], 0)
    options = {"window_size": (part.left, part.right), "deterministic": True}
    if "softcap" in terms:
        options["softcap"] = terms["softcap"]
    if "sink_logits" in terms:
        options["learnable_sink"] = terms["sink_logits"].to(BF16)
    attend = lambda *x: flash_attn_func(*x, **options)[0]  # noqa: E731
    return lambda q, k, v: attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def contestants(row, terms):
    yield "regard", lambda: lambda q, k, v: rg.attention(q, k, v, row[0], **terms)
    yield "triton", lambda: lambda q, k, v: rg.attention(q, k, v, row[0], **terms, backend="triton")
    if "lengths" in terms and row[5] * row[1] ** 2 <= 1 << 28:
        yield "SDPA, masked", lambda: sdpa(row, terms)
    yield "FlexAttention", lambda: flex(row, terms)
    if flash4.version() is not None and "lengths" not in terms and row[0] != SPARSE:
        yield "FlashAttention-4", lambda: flash_attention_4(row, terms)


def measure(row, seed):
    pattern, n, d, heads, kv_heads, batch, named = row
    torch.manual_seed(seed)
    shapes = (heads, kv_heads, kv_heads, heads)
    tensors = q, k, v, do = [torch.randn(batch, h, n, d, device="cuda", dtype=BF16) for h in shapes]
    terms = given(row, seed)
    expected, forward, step = general(row, terms, tensors)
    calls = {("general", "forward"): forward, ("general", "both"): step}
    errors, failed = {}, {}
    for name, make in contestants(row, terms):
        try:
            attend = make()
            found = [attend(q, k, v).detach(), *both(attend, (q, k, v), do)()]
            errors[name] = max(map(off, found, expected))
            assert errors[name] < 2e-2, f"differs by {errors[name]}"
            calls[name, "forward"] = no_grad(attend, q, k, v)
            calls[name, "both"] = both(attend, (q, k, v), do)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:300]
    del expected
    torch.cuda.empty_cache()
    wall = times(calls)
    graphs = {key: graph_of(fn) for key, fn in calls.items()}
    busy = times({key: graph for key, graph in graphs.items() if graph is not None})
    explained = rg.explain(q.requires_grad_(), k, v, pattern, **terms)
    return {
        "pattern": repr(pattern), "n": n, "d": d, "heads": heads, "kv_heads": kv_heads, "batch": batch,
        "terms": named, "off": errors, "failed": failed, "runs": f"{explained.backend}, {explained.variant}",
        "wall": {" ".join(key): ms for key, ms in wall.items()},
        "busy": {" ".join(key): ms for key, ms in busy.items()},
    }  # fmt: skip


def no_grad(attend, *tensors):
    def run():
        with torch.no_grad():
            return attend(*tensors)

    return run


def shown(result):
    cells = []
    for name in dict.fromkeys(key.rsplit(" ", 1)[0] for key in result["wall"]):
        pairs = [
            [kind.get(f"{name} {x}") for x in ("forward", "both")]
            for kind in (result["busy"], result["wall"])
        ]
        texts = [" / ".join(f"{x:.3f}" if x else "–" for x in pair) for pair in pairs]
        cells.append(f"{name} {texts[0]} (wall {texts[1]})")
    sizes = " ".join(f"{x}={result[x]}" for x in ("n", "d", "heads", "kv_heads", "batch"))
    failed = f"; failed: {result['failed']}" if result["failed"] else ""
    return f"{result['pattern']} {sizes} {result['terms']} [{result['runs']}]: " + "; ".join(cells) + failed


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=4118)
    parser.add_argument("--rows", type=int, nargs="*", default=list(range(len(ROWS))))
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64
    results = []
    for at in options.rows:
        torch._dynamo.reset()
        results.append(measure(ROWS[at], options.seed + at))
        print(shown(results[-1]), flush=True)
        if options.out:
            with open(options.out, "w", encoding="utf-8") as file:
                versions = {p: metadata.version(p) for p in PACKAGES.split() if _there(p)}
                about = {"device": torch.cuda.get_device_name(0), "versions": versions, "seed": options.seed}
                json.dump(about | {"rows": results}, file, indent=1)
        with suppress(RuntimeError):
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
