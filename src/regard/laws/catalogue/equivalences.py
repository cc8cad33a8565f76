"""One result, many ways to it: L06, L07, L51 – L54, L57, L61, L62."""

import math
from typing import Any

import torch
from einops import einsum, rearrange, repeat
from torch import Tensor

from ... import reference
from ...engine.merge import merge
from ..controls import formula, wrapped
from ..harness import Lab
from ..law import Case, Law, Reading, Trial, compare, gradients, worst
from ..target import Function, Projections
from .softmax import asked, spaced


def one_result(lab: Lab, c: Case) -> Reading:
    q, k, v = lab.qkv(c, learn=lab.takes("grad"))
    hiding = asked(lab, c)
    options = hiding.options if c.scale is None else {**hiding.options, "scale": c.scale}
    o = lab.attend(q, k, v, **options)
    ways = {"the formula": lab.formula(q, k, v, hiding.allowed, scale=c.scale).o}
    if c.hide in ("nothing", "causal", "random", "band", "columns", "window"):
        heads = [lab.attend(*(x[:, h : h + 1] for x in (q, k, v)), **options) for h in range(c.h)]
        ways["one head after the other"] = torch.cat(heads, 1)
        folded = (rearrange(x, "b h n d -> (b h) 1 n d") for x in (q, k, v))
        ways["heads folded into the batch"] = rearrange(
            lab.attend(*folded, **options), "(b h) 1 n d -> b h n d", b=c.b
        )
        doubles = (x.double() for x in (q, k, v))
        streamed = reference.attend_streaming(*doubles, hiding.allowed, scale=c.scale, block=3)
        ways["a streaming softmax"] = streamed[0]
    readings = [compare(f"outputs against {name}", o, way) for name, way in ways.items()]
    if lab.takes("grad"):
        towards = lab.randn(*o.shape)
        got = gradients(o, (q, k, v), towards)
        for name in ("the formula", "one head after the other"):
            if name in ways:
                want = gradients(ways[name], (q, k, v), towards)
                readings += [
                    compare(f"∂/∂{x} against {name}", g, w, lab.slack) for x, g, w in zip("qkv", got, want)
                ]
    return worst(*readings)


def _scaled(lab: Lab):
    return lab.space(hide=lab.hidings(), scale=(None, 1.0, 0.37) if lab.takes("scale") else (None,))


def projected(
    x: Tensor, context: Tensor, p: Projections, allowed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The head outputs (b, h, n, d_v) by the formula, and what W_O makes of each: (b, h, n, d_out)."""

    def project(given: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        out = einsum(given, w, "b n e, h e d -> b h n d")
        return out if bias is None else out + bias[:, None]

    q = project(x, p.w_q, p.b_q)
    k, v = project(context, p.w_k, p.b_k), project(context, p.w_v, p.b_v)
    k, v = (reference.repeat_heads(t, q.shape[1]) for t in (k, v))
    heads = reference.attend(q, k, v, allowed).o
    return heads, einsum(heads, p.w_o, "b h n d, h d e -> b h n e")


def _matrices(lab: Lab, module: Any) -> Projections:
    assert lab.model.projections is not None
    return lab.model.projections(module)


def module_is_the_formula(lab: Lab, c: Case) -> Reading:
    module, x = lab.module(), lab.sequence(c.b, c.n)
    p = _matrices(lab, module)
    context = lab.other(c.b, c.m) if c.get("m") else None
    options, allowed = model_hiding(lab, c.hide, c.b, c.n)
    options = options if context is None else {}
    table = None if allowed is None or context is not None else rearrange(allowed, "... n m -> ... 1 n m")
    _, parts = projected(x, x if context is None else context, p, table)
    want = parts.sum(1) if p.b_o is None else parts.sum(1) + p.b_o
    return compare(
        "outputs against concat_h softmax(Q_h K_hᵀ/√d_k) V_h W_O", lab.run(x, context, **options), want
    )


def model_hiding(lab: Lab, way: str, b: int, n: int) -> tuple[dict[str, Any], Tensor | None]:
    """How to ask a model to hide pairs, and the table (b, n, n)."""
    past = torch.ones(n, n, dtype=torch.bool, device=lab.device).tril()
    always = past if lab.takes("always causal") else None
    match way:
        case "nothing":
            return {}, always
        case "causal":
            return {"causal": True}, past
        case "random":
            allowed = (lab.rand(b, n, n) < 0.5) | torch.eye(n, dtype=torch.bool, device=lab.device)
            return {"allowed": allowed}, allowed if always is None else allowed & always
    raise AssertionError(way)


def model_hidings(lab: Lab) -> tuple[str, ...]:
    return (
        "nothing",
        *(["causal"] if lab.takes("causal") else []),
        *(["random"] if lab.takes("mask") else []),
    )


def module_space(lab: Lab, **fields):
    sizes = {"b": (1, 2, 3), "n": (1, 2, 3, 5, 7), "hide": model_hidings(lab)}
    return {**sizes, **({"m": (None, 2, 3, 5)} if lab.takes("context") else {}), **fields}


def has_projections(lab: Lab) -> str | None:
    return (
        "its matrices are not given (the adapter's field projections)"
        if lab.model.projections is None
        else None
    )


def of_plain_heads(lab: Lab) -> str | None:
    if lab.takes("positions"):
        return "it adds positions inside, which the bare formula does not know"
    return has_projections(lab)


def output_projection(lab: Lab, c: Case) -> Reading:
    q, k, v = lab.qkv(c)
    o = lab.attend(q, k, v)
    w_o = lab.randn(c.h, v.shape[-1], 5)
    together = rearrange(o, "b h n d -> b n (h d)") @ rearrange(w_o, "h d e -> (h d) e")
    summed = torch.stack([o[:, h] @ w_o[h] for h in range(c.h)]).sum(0)
    order = lab.shuffled(c.h)
    permuted = lab.attend(q[:, order], k[:, order], v[:, order])
    with_blocks = rearrange(permuted, "b h n d -> b n (h d)") @ rearrange(w_o[order], "h d e -> (h d) e")
    return worst(
        compare("concat(H_h) W_O against Σ_h H_h W_O^(h)", together, summed),
        compare("heads permuted with the row blocks of W_O", with_blocks, together),
    )


def module_output_projection(lab: Lab, c: Case) -> Reading:
    """Permute the heads of the module together with the blocks of W_O: nothing may change."""
    module, x = lab.fresh(), lab.sequence(c.b, c.n)
    context = lab.context(c.b, c.n)
    with torch.no_grad():
        before = lab.run(x, context, module)
        p = _matrices(lab, module)
        groups = p.w_k.shape[0]
        order = lab.shuffled(groups)
        each = p.w_q.shape[0] // groups
        queries = rearrange(
            repeat(order, "g -> g c", c=each) * each + torch.arange(each, device=lab.device), "g c -> (g c)"
        )
        for w, rows in zip(p[:7], (queries, order, order, queries, queries, order, order)):
            if w is not None:
                w.copy_(w[rows].clone())
        return compare("outputs with heads and blocks of W_O permuted", lab.run(x, context, module), before)


def grouped(lab: Lab, c: Case) -> Reading:
    q, k, v = lab.qkv(c, learn=lab.takes("grad"))
    hiding = asked(lab, c)
    o = lab.attend(q, k, v, **hiding.options)
    repeated = [reference.repeat_heads(x, c.h) for x in (k, v)]
    want = lab.attend(q, *repeated, **hiding.options)
    readings = [
        compare("grouped heads against repeated ones", o, want),
        compare("grouped heads against the formula", o, lab.formula(q, k, v, hiding.allowed).o),
    ]
    if lab.takes("grad"):
        towards = lab.randn(*o.shape)
        got, right = gradients(o, (q, k, v), towards), gradients(want, (q, k, v), towards)
        readings += [
            compare(f"∂/∂{x} of grouped heads", g, w, lab.slack) for x, g, w in zip("qkv", got, right)
        ]
    return worst(*readings)


def chunked_prefill(lab: Lab, c: Case) -> Reading:
    """Queries in chunks, each over the keys so far, against the full causal pass."""
    q, k, v = lab.qkv(c)
    whole = lab.attend(q, k, v, **_past(lab, c.n, c.n))
    chunks = []
    for start in range(0, c.n, c.chunk):
        end = min(start + c.chunk, c.n)
        options = _past(lab, end - start, end)
        chunks.append(lab.attend(q[:, :, start:end], k[:, :, :end], v[:, :, :end], **options))
    return compare("queries in chunks against the full pass", torch.cat(chunks, 2), whole)


def _past(lab: Lab, n: int, m: int) -> dict[str, Any]:
    """n last queries over m keys, each looking at its past."""
    if lab.takes("causal") and (n == m or lab.target.alignment == "bottom-right"):
        return {"causal": True}
    i = torch.arange(n, device=lab.device)[:, None] + m - n
    return {"allowed": torch.arange(m, device=lab.device) <= i}


def split_and_merged(lab: Lab, c: Case) -> Reading:
    q, k, v = lab.qkv(c, learn=lab.takes("grad"))
    m = k.shape[-2]
    cut = int(lab.below(m, low=1)) if m > 1 else m
    whole, lse = lab.attend_lse(q, k, v)
    parts = [lab.attend_lse(q, k[:, :, s], v[:, :, s]) for s in (slice(0, cut), slice(cut, m)) if m > s.start]
    joined, joined_lse = merge(parts)
    right = lab.formula(q, k, v)
    hiding = asked(lab, c)
    shown = lab.attend_lse(q, k, v, **hiding.options)[1]
    readings = [
        compare("the log-sum-exp against the formula", lse, right.lse),
        compare(f"the log-sum-exp with {c.hide!r} hidden", shown, lab.formula(q, k, v, hiding.allowed).lse),
        compare("parts merged by log-sum-exp against the whole", joined, whole),
        compare("their joined log-sum-exp", joined_lse, lse),
    ]
    if lab.takes("grad"):
        on_o, on_lse = lab.randn(*whole.shape), lab.randn(*lse.shape)
        got = torch.autograd.grad(
            (joined * on_o).sum() + (joined_lse * on_lse).sum(), (q, k, v), retain_graph=True
        )
        ones = torch.autograd.grad((whole * on_o).sum() + (lse * on_lse).sum(), (q, k, v), allow_unused=True)
        want = torch.autograd.grad((right.o * on_o).sum() + (right.lse * on_lse).sum(), (q, k, v))
        for x, g, o, w in zip("qkv", got, ones, want):
            if o is None:
                return Reading(math.inf, f"no gradient reaches {x} through (o, lse)")
            readings += [
                compare(f"∂/∂{x} of the merged parts", g, w, lab.slack),
                compare(f"∂/∂{x} through o and lse", o, w, lab.slack),
            ]
    return worst(*readings)


def overlaps_once(lab: Lab, c: Case) -> Reading:
    """A union of overlapping masks, and keys that several ways of hiding allow: each key counts once."""
    q, k, v = lab.qkv(c)
    m = k.shape[-2]
    i, j = torch.arange(c.n, device=lab.device)[:, None], torch.arange(m, device=lab.device)
    near, sinks, columns = (i - j).abs() <= 2, j < 2, j % 3 == 0
    union = near | sinks | columns
    o = lab.attend(q, k, v, allowed=union)
    readings = [compare("a union of overlapping masks against the formula", o, lab.formula(q, k, v, union).o)]
    if lab.takes("lse"):
        parts = [near, sinks & ~near, columns & ~near & ~sinks]
        told = [lab.attend_lse(q, k, v, allowed=p.expand(c.n, m)) for p in parts]
        joined, _ = merge(told)
        readings.append(compare("disjoint parts merged against their union", joined, o))
    return worst(*readings)


def _heads(lab: Lab):
    return lab.space(hide=lab.hidings(), h=(2, 3, 4, 6), h_kv=(1, 2, 3))


def _wrong_split(x: Tensor, h: int) -> Tensor:
    return rearrange(rearrange(x, "b h n d -> b n (d h)"), "b n (h d) -> b h n d", h=h)


def chunk_space(lab: Lab):
    return lab.space(m=None, n=(2, 3, 5, 7, 11), chunk=(1, 2, 3, 4))


def _dropped_lse() -> Function:
    right = formula()

    def call(q, k, v, **asked):
        out = right.call(q, k, v, **asked)
        return (out[0], out[1].detach() + 0 * q.sum(-1)) if asked.get("lse") else out

    return Function("no gradient through lse", call, claims=right.claims, alignment=right.alignment)


def _twice(q, k, v, asked):
    allowed = asked.get("allowed")
    if allowed is not None:  # keys 0 and 1 stand in the list twice
        k, v = (torch.cat([x[:, :, :2], x], 2) for x in (k, v))
        asked["allowed"] = torch.cat([allowed[..., :2], allowed], -1)
    return (q, k, v), asked


LAWS = (
    Law(
        "L06",
        "one result, many ways",
        "scalar sums = head loop = heads in the batch = streaming softmax = softmax(b Q Kᵀ) V, gradients too",
        "the same weights, mask and scale; no dropout",
        {
            "function": Trial(one_result, _scaled),
            "model": Trial(module_is_the_formula, module_space, avoids=("pooled",), when=of_plain_heads),
        },
        lambda: wrapped(
            "heads split in another order",
            lambda q, k, v, asked: ((_wrong_split(q, q.shape[1]), k, v), asked),
        ),
    ),
    Law(
        "L07",
        "output projection",
        "concat(H_h) W_O = Σ_h H_h W_O^(h); heads permuted with the row blocks of W_O: the same",
        "no dropout",
        {
            "function": Trial(output_projection, spaced(hide=False, h=(2, 3, 5))),
            "model": Trial(module_output_projection, module_space, when=has_projections),
        },
        lambda: wrapped(
            "head 0's keys for all", lambda q, k, v, asked: ((q, k[:, :1].expand_as(k), v), asked)
        ),
    ),
    Law(
        "L51",
        "grouped heads",
        "query head g·c + r with key/value head g = the same with keys and values repeated",
        "h_kv divides h",
        {"function": Trial(grouped, _heads, needs=("grouped",))},
        lambda: wrapped(
            "heads grouped by remainder",
            lambda q, k, v, asked: (
                (q, *(x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x in (k, v))),
                asked,
            ),
        ),
    ),
    Law(
        "L53",
        "split and merged",
        "o = Σ_p exp(lse_p − lse) o_p, lse = logsumexp_p lse_p over a split of the keys; gradients through both",
        "gives its log-sum-exp",
        {"function": Trial(split_and_merged, spaced(), needs=("lse", "n≠m"))},
        _dropped_lse,
    ),
    Law(
        "L54",
        "overlaps counted once",
        "keys that several masks allow weigh as much as any other",
        "mask; each query has an allowed key",
        {"function": Trial(overlaps_once, spaced(hide=False), needs=("mask",))},
        lambda: wrapped("sinks counted twice", _twice),
    ),
)


def by_chunks(lab: Lab) -> str | None:
    if lab.takes("mask") or lab.target.alignment == "bottom-right":
        return None
    return "chunks stand at the end of their keys: it aligns top-left and takes no mask"
