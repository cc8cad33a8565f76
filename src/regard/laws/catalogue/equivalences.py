"""Different computations of the same result: L06, L07, L51, L53, L54."""

import math
from typing import Any

import torch
from einops import einsum, rearrange, repeat
from torch import Tensor

from ... import reference
from ...engine.merge import merge
from ..controls import reference_function, with_changed_call
from ..harness import Harness
from ..law import Case, Law, Trial
from ..measurement import Measurement, compare, gradients, worst
from ..target import Function, Projections
from .softmax import call_space, case_mask


def equivalent_computations(harness: Harness, c: Case) -> Measurement:
    q, k, v = harness.qkv(c, requires_grad=harness.supports("grad"))
    masking = case_mask(harness, c)
    options = masking.options if c.scale is None else {**masking.options, "scale": c.scale}
    o = harness.attend(q, k, v, **options)
    others = {"the reference": harness.reference(q, k, v, masking.allowed, scale=c.scale).o}
    if c.mask in ("none", "causal", "random", "band", "strided", "window"):
        heads = [harness.attend(*(x[:, h : h + 1] for x in (q, k, v)), **options) for h in range(c.h)]
        others["a loop over heads"] = torch.cat(heads, 1)
        folded = (rearrange(x, "b h n d -> (b h) 1 n d") for x in (q, k, v))
        others["heads folded into the batch"] = rearrange(
            harness.attend(*folded, **options), "(b h) 1 n d -> b h n d", b=c.b
        )
        others["a streaming softmax"] = reference.attend_streaming(
            q.double(), k.double(), v.double(), masking.allowed, scale=c.scale, block=3
        )[0]
    measurements = [compare(f"outputs against {name}", o, other) for name, other in others.items()]
    if harness.supports("grad"):
        grad_output = harness.randn(*o.shape)
        got = gradients(o, (q, k, v), grad_output)
        for name in ("the reference", "a loop over heads"):
            if name in others:
                want = gradients(others[name], (q, k, v), grad_output)
                measurements += [
                    compare(f"∂/∂{x} against {name}", g, w, harness.slack)
                    for x, g, w in zip("qkv", got, want)
                ]
    return worst(*measurements)


def _scaled(harness: Harness):
    return harness.space(
        mask=harness.mask_kinds(), scale=(None, 1.0, 0.37) if harness.supports("scale") else (None,)
    )


def projected(
    x: Tensor, context: Tensor, p: Projections, allowed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The head outputs (b, h, n, d_v) of the reference, and each multiplied by its block of W_O: (b, h, n, d_out)."""

    def project(inputs: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        out = einsum(inputs, w, "b n e, h e d -> b h n d")
        return out if bias is None else out + bias[:, None]

    q = project(x, p.w_q, p.b_q)
    k, v = project(context, p.w_k, p.b_k), project(context, p.w_v, p.b_v)
    k, v = (reference.repeat_heads(t, q.shape[1]) for t in (k, v))
    heads = reference.attend(q, k, v, allowed).o
    return heads, einsum(heads, p.w_o, "b h n d, h d e -> b h n e")


def _matrices(harness: Harness, module: Any) -> Projections:
    assert harness.model.projections is not None
    return harness.model.projections(module)


def module_against_reference(harness: Harness, c: Case) -> Measurement:
    module, x = harness.module(), harness.sequence(c.b, c.n)
    p = _matrices(harness, module)
    context = harness.second_sequence(c.b, c.m) if c.get("m") else None
    options, allowed = model_mask(harness, c.mask, c.b, c.n)
    options = options if context is None else {}
    table = None if allowed is None or context is not None else rearrange(allowed, "... n m -> ... 1 n m")
    _, parts = projected(x, x if context is None else context, p, table)
    want = parts.sum(1) if p.b_o is None else parts.sum(1) + p.b_o
    return compare(
        "outputs against concat_h softmax(Q_h K_hᵀ/√d_k) V_h W_O", harness.run(x, context, **options), want
    )


def model_mask(harness: Harness, kind: str, b: int, n: int) -> tuple[dict[str, Any], Tensor | None]:
    """A mask as options of a model, and the table (b, n, n)."""
    past = torch.ones(n, n, dtype=torch.bool, device=harness.device).tril()
    always = past if harness.supports("always causal") else None
    match kind:
        case "none":
            return {}, always
        case "causal":
            return {"causal": True}, past
        case "random":
            allowed = (harness.rand(b, n, n) < 0.5) | torch.eye(n, dtype=torch.bool, device=harness.device)
            return {"allowed": allowed}, allowed if always is None else allowed & always
    raise AssertionError(kind)


def model_mask_kinds(harness: Harness) -> tuple[str, ...]:
    return (
        "none",
        *(["causal"] if harness.supports("causal") else []),
        *(["random"] if harness.supports("mask") else []),
    )


def module_space(harness: Harness, **fields):
    sizes = {"b": (1, 2, 3), "n": (1, 2, 3, 5, 7), "mask": model_mask_kinds(harness)}
    return {**sizes, **({"m": (None, 2, 3, 5)} if harness.supports("context") else {}), **fields}


def has_projections(harness: Harness) -> str | None:
    return (
        "the adapter does not give its matrices (field projections)"
        if harness.model.projections is None
        else None
    )


def of_plain_heads(harness: Harness) -> str | None:
    if harness.supports("positions"):
        return "it adds positions inside, which the plain formula does not include"
    return has_projections(harness)


def output_projection(harness: Harness, c: Case) -> Measurement:
    q, k, v = harness.qkv(c)
    o = harness.attend(q, k, v)
    w_o = harness.randn(c.h, v.shape[-1], 5)
    concatenated = rearrange(o, "b h n d -> b n (h d)") @ rearrange(w_o, "h d e -> (h d) e")
    summed = torch.stack([o[:, h] @ w_o[h] for h in range(c.h)]).sum(0)
    order = harness.randperm(c.h)
    permuted = harness.attend(q[:, order], k[:, order], v[:, order])
    with_blocks = rearrange(permuted, "b h n d -> b n (h d)") @ rearrange(w_o[order], "h d e -> (h d) e")
    return worst(
        compare("concat(H_h) W_O against Σ_h H_h W_O^(h)", concatenated, summed),
        compare("outputs with heads and blocks of W_O permuted", with_blocks, concatenated),
    )


def module_output_projection(harness: Harness, c: Case) -> Measurement:
    """Permuting the heads of a module together with the blocks of W_O changes no output."""
    module, x = harness.module_copy(), harness.sequence(c.b, c.n)
    context = harness.context(c.b, c.n)
    with torch.no_grad():
        before = harness.run(x, context, module)
        p = _matrices(harness, module)
        groups = p.w_k.shape[0]
        order = harness.randperm(groups)
        each = p.w_q.shape[0] // groups
        queries = rearrange(
            repeat(order, "g -> g c", c=each) * each + torch.arange(each, device=harness.device),
            "g c -> (g c)",
        )
        for w, rows in zip(p[:7], (queries, order, order, queries, queries, order, order)):
            if w is not None:
                w.copy_(w[rows].clone())
        return compare(
            "outputs with heads and blocks of W_O permuted", harness.run(x, context, module), before
        )


def grouped(harness: Harness, c: Case) -> Measurement:
    q, k, v = harness.qkv(c, requires_grad=harness.supports("grad"))
    masking = case_mask(harness, c)
    o = harness.attend(q, k, v, **masking.options)
    repeated = [reference.repeat_heads(x, c.h) for x in (k, v)]
    want = harness.attend(q, *repeated, **masking.options)
    measurements = [
        compare("grouped heads against repeated keys and values", o, want),
        compare("grouped heads against the reference", o, harness.reference(q, k, v, masking.allowed).o),
    ]
    if harness.supports("grad"):
        grad_output = harness.randn(*o.shape)
        got, expected = gradients(o, (q, k, v), grad_output), gradients(want, (q, k, v), grad_output)
        measurements += [
            compare(f"∂/∂{x} of grouped heads", g, w, harness.slack) for x, g, w in zip("qkv", got, expected)
        ]
    return worst(*measurements)


def split_and_merged(harness: Harness, c: Case) -> Measurement:
    q, k, v = harness.qkv(c, requires_grad=harness.supports("grad"))
    m = k.shape[-2]
    cut = int(harness.randint(m, low=1)) if m > 1 else m
    full, lse = harness.attend_lse(q, k, v)
    parts = [
        harness.attend_lse(q, k[:, :, s], v[:, :, s]) for s in (slice(0, cut), slice(cut, m)) if m > s.start
    ]
    merged, merged_lse = merge(parts)
    expected = harness.reference(q, k, v)
    masking = case_mask(harness, c)
    masked_lse = harness.attend_lse(q, k, v, **masking.options)[1]
    measurements = [
        compare("the log-sum-exp against the reference", lse, expected.lse),
        compare(
            f"the log-sum-exp with mask {c.mask!r}",
            masked_lse,
            harness.reference(q, k, v, masking.allowed).lse,
        ),
        compare("parts merged by log-sum-exp against one call", merged, full),
        compare("the merged log-sum-exp", merged_lse, lse),
    ]
    if harness.supports("grad"):
        on_o, on_lse = harness.randn(*full.shape), harness.randn(*lse.shape)
        got = torch.autograd.grad(
            (merged * on_o).sum() + (merged_lse * on_lse).sum(), (q, k, v), retain_graph=True
        )
        direct = torch.autograd.grad((full * on_o).sum() + (lse * on_lse).sum(), (q, k, v), allow_unused=True)
        want = torch.autograd.grad((expected.o * on_o).sum() + (expected.lse * on_lse).sum(), (q, k, v))
        for x, g, o, w in zip("qkv", got, direct, want):
            if o is None:
                return Measurement(math.inf, f"no gradient reached {x} through (o, lse)")
            measurements += [
                compare(f"∂/∂{x} of the merged parts", g, w, harness.slack),
                compare(f"∂/∂{x} through o and lse", o, w, harness.slack),
            ]
    return worst(*measurements)


def overlaps_once(harness: Harness, c: Case) -> Measurement:
    """A union of overlapping masks: a key that several of them allow counts once."""
    q, k, v = harness.qkv(c)
    m = k.shape[-2]
    i, j = torch.arange(c.n, device=harness.device)[:, None], torch.arange(m, device=harness.device)
    near, sinks, columns = (i - j).abs() <= 2, j < 2, j % 3 == 0
    union = near | sinks | columns
    o = harness.attend(q, k, v, allowed=union)
    measurements = [
        compare("a union of overlapping masks against the reference", o, harness.reference(q, k, v, union).o)
    ]
    if harness.supports("lse"):
        parts = [near, sinks & ~near, columns & ~near & ~sinks]
        partial = [harness.attend_lse(q, k, v, allowed=p.expand(c.n, m)) for p in parts]
        merged, _ = merge(partial)
        measurements.append(compare("disjoint parts merged against their union", merged, o))
    return worst(*measurements)


def _heads(harness: Harness):
    return harness.space(mask=harness.mask_kinds(), h=(2, 3, 4, 6), h_kv=(1, 2, 3))


def _wrong_split(x: Tensor, h: int) -> Tensor:
    return rearrange(rearrange(x, "b h n d -> b n (d h)"), "b n (h d) -> b h n d", h=h)


def _dropped_lse() -> Function:
    correct = reference_function()

    def call(q, k, v, **options):
        out = correct.call(q, k, v, **options)
        return (out[0], out[1].detach() + 0 * q.sum(-1)) if options.get("lse") else out

    return Function("no gradient through lse", call, claims=correct.claims, alignment=correct.alignment)


def _sinks_twice(q, k, v, options):
    allowed = options.get("allowed")
    if allowed is not None:  # keys 0 and 1 occur twice
        k, v = (torch.cat([x[:, :, :2], x], 2) for x in (k, v))
        options["allowed"] = torch.cat([allowed[..., :2], allowed], -1)
    return (q, k, v), options


LAWS = (
    Law(
        "L06",
        "equivalent computations",
        "loop over heads = heads in the batch = streaming softmax = softmax(b Q Kᵀ) V, gradients included",
        "the same weights, mask and scale; no dropout",
        {
            "function": Trial(equivalent_computations, _scaled),
            "model": Trial(module_against_reference, module_space, avoids=("pooled",), unless=of_plain_heads),
        },
        lambda: with_changed_call(
            "heads split in the wrong order",
            lambda q, k, v, options: ((_wrong_split(q, q.shape[1]), k, v), options),
        ),
    ),
    Law(
        "L07",
        "output projection",
        "concat(H_h) W_O = Σ_h H_h W_O^(h); unchanged if heads and row blocks of W_O are permuted together",
        "no dropout",
        {
            "function": Trial(output_projection, call_space(masked=False, h=(2, 3, 5))),
            "model": Trial(module_output_projection, module_space, unless=has_projections),
        },
        lambda: with_changed_call(
            "keys of head 0 used for all heads",
            lambda q, k, v, options: ((q, k[:, :1].expand_as(k), v), options),
        ),
    ),
    Law(
        "L51",
        "grouped heads",
        "query head g·c + r reads key/value head g: equal to repeated keys and values",
        "h_kv divides h",
        {"function": Trial(grouped, _heads, needs=("grouped",))},
        lambda: with_changed_call(
            "key/value heads assigned by remainder",
            lambda q, k, v, options: (
                (q, *(x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x in (k, v))),
                options,
            ),
        ),
    ),
    Law(
        "L53",
        "split and merge",
        "o = Σ_p exp(lse_p − lse) o_p, lse = logsumexp_p lse_p over a split of the keys; gradients through both",
        "returns its log-sum-exp",
        {"function": Trial(split_and_merged, call_space(), needs=("lse", "n≠m"))},
        _dropped_lse,
    ),
    Law(
        "L54",
        "overlaps counted once",
        "a key that several masks allow has the same weight as any other",
        "mask; each query has an allowed key",
        {"function": Trial(overlaps_once, call_space(masked=False), needs=("mask",))},
        lambda: with_changed_call("sinks counted twice", _sinks_twice),
    ),
)
