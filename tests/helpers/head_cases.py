"""Random declarations with a pattern for each head, and their heads run one by one by the definition."""

import random
import warnings
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

import regard as rg
from regard import reference
from regard.nn.attention import MultiHeadAttention

WORDS = [
    rg.full(), rg.causal(), rg.causal() & rg.window(2), rg.window(3, 1), rg.causal() & (rg.window(0) | rg.every(3)),
    rg.blocks(4), rg.sinks(2) | rg.window(1), rg.full() - rg.window(0), rg.causal() & rg.every(2, 1),
]  # fmt: skip
POSITIONS = [
    None, None, rg.rope(), rg.alibi(), rg.t5_buckets(8, 16), rg.relative_table(3), rg.quadratic(), rg.shaw(2),
    rg.shaw(2, values=True),
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A declaration, and one call of its module."""

    declared: rg.Attention
    batch: int
    n: int
    m: int | None  # keys of a context; None: self-attention
    lengths: Tensor | None = None
    at: Any = None
    given: Any = None  # a pattern, one for each head, or a table of the call
    seed: int = 0

    def module(self, dtype: torch.dtype = torch.float64) -> MultiHeadAttention:
        torch.manual_seed(self.seed)
        module = self.declared.build()
        for p in module.parameters():  # zeros would hide a parameter that goes with the wrong head
            torch.nn.init.normal_(p, std=0.5)
        return module.to(dtype).eval()

    def inputs(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor | None]:
        g = torch.Generator().manual_seed(self.seed)
        x = torch.randn(self.batch, self.n, self.declared.d_model, generator=g, dtype=torch.float64)
        if self.m is None:
            return x.to(dtype), None
        context = torch.randn(self.batch, self.m, self.declared.d_model, generator=g, dtype=torch.float64)
        return x.to(dtype), context.to(dtype)


def drawn(seed: int) -> Case:
    """A case; each option occurs in about a third of them."""
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    kv_heads = rng.choice([1, 2, 3])
    heads = kv_heads * rng.choice([1, 2] if kv_heads > 1 else [1, 2, 4, 5])
    batch, n = rng.choice([1, 2, 3]), rng.choice([5, 7, 11, 37, 151])
    m = rng.choice([None, None, n + rng.choice([0, 2, 4])])
    words = rng.sample(WORDS, rng.choice([1, 2, 3]))
    options: dict[str, Any] = {
        "position": rng.choice(POSITIONS),
        "scale": rng.choice([None, None, 0.5]),
        "softcap": rng.choice([None, None, 1.5]),
        "sink_logits": rng.random() < 0.3,
        "biases": rng.choice(["none", "output", "all"]),
        "output": rng.random() < 0.8,
    }
    kind = rng.random()
    if kind < 0.1:
        options |= {"score": "additive", "position": None, "softcap": None}
    elif kind < 0.2:
        options |= {"position": None, "softcap": None, "extra_key": True}
    elif kind < 0.3:
        options |= {"scale": inf, "sink_logits": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rg.EmptyRowWarning)
        declared = rg.Attention(
            13, heads=heads, kv_heads=kv_heads, d_k=6, d_v=3, d_context=None if m is None else 13,
            pattern=[rng.choice(words) for _ in range(heads)], **options,
        )  # fmt: skip
    keys = n if m is None else m
    lengths = torch.randint(1, keys + 1, (batch,), generator=g) if rng.random() < 0.3 else None
    at: Any = None
    if m is not None:
        at = rng.choice([None, 0, 2, (1, 2), torch.randint(0, 4, (batch,), generator=g)])
    given = rng.choice([
        None, None, rg.window(4), rg.per_head([rng.choice(WORDS) for _ in range(heads)]),
        torch.rand(heads, n, keys, generator=g) < 0.7, torch.rand(n, keys, generator=g) < 0.7,
    ])  # fmt: skip
    return Case(declared, batch, n, m, lengths, at, given, seed)


def head_patterns(declared: rg.Attention) -> list[rg.Pattern]:
    pattern = declared.pattern
    return [*pattern.patterns] if isinstance(pattern, rg.per_head) else [pattern] * declared.heads


def one_by_one(
    case: Case, layer: MultiHeadAttention, x: Tensor, context: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The output and the weights: each head alone, over a dense table of its own pattern."""
    declared, heads = layer.spec, layer.spec.heads
    p = layer._project(x, (context, None), case.lengths, None, case.at)
    n, m, group = p.q.shape[2], p.k.shape[2], heads // declared.sizes.kv_heads
    scale = declared.factor
    bias = None
    if declared.score == "additive":
        keys = p.k.repeat_interleave(group, 1)
        bias = reference.tanh_scores(p.q, keys, layer.v_score) * (1 if scale in (None, inf) else scale)
    elif declared.position is not None and declared.position.acts == "score":
        bias = layer.position(*layer._positions(p), p.q, p.q.shape[-1] ** -0.5 if scale is None else scale)
    outs, tables = [], []
    for head, pattern in enumerate(head_patterns(declared)):
        allowed = pattern.allowed(n, m, p.at).expand(x.shape[0], 1, n, m)[:, 0]
        if isinstance(case.given, torch.Tensor):
            allowed = allowed & (case.given[head] if case.given.dim() == 3 else case.given)
        elif case.given is not None:
            by_head = isinstance(case.given, rg.per_head)
            own = case.given.patterns[head] if by_head else case.given
            allowed = allowed & own.allowed(n, m, p.at).expand(x.shape[0], 1, n, m)[:, 0]
        if case.lengths is not None:
            allowed = allowed & (torch.arange(m) < case.lengths[:, None, None])
        q, k, v = p.q[:, head], p.k[:, head // group], p.v[:, head // group]
        added = None if bias is None else bias[..., head, :, :] if bias.shape[-3] > 1 else bias[..., 0, :, :]
        if declared.score == "additive":
            q = torch.zeros_like(q)
        if declared.extra_key:  # the last key, which every query sees
            extra_k, extra_v = (
                e.view(declared.sizes.kv_heads, -1)[head // group] for e in (layer.extra_k, layer.extra_v)
            )
            k, v = (torch.cat([t, e.expand(len(t), 1, -1)], 1) for t, e in ((k, extra_k), (v, extra_v)))
            allowed = torch.nn.functional.pad(allowed, (0, 1), value=True)
        sink = None if layer.sink_logits is None else layer.sink_logits[head : head + 1]
        terms = {"scale": scale, "softcap": declared.softcap, "sink_logits": sink}
        if declared.score == "additive" and scale != inf:
            terms["scale"] = None
        found = reference.attend(
            q[:, None], k[:, None], v[:, None], allowed[:, None],
            bias=None if added is None else added.reshape(-1, 1, n, m), **terms,
        )  # fmt: skip
        o, w = found.o[:, 0], found.weights[:, 0]
        if getattr(declared.position, "values", False):
            o = o + layer.position.values(w[:, None], *layer._positions(p))[:, 0]
        outs.append(o)
        tables.append(w[..., :m])
    joined = torch.cat(outs, -1)
    return (joined if layer.w_o is None else layer.w_o(joined)), torch.stack(tables, 1)


def products(case: Case) -> int:
    """FLOPs of the products over the allowed pairs: 2 d_k a score and 2 d_v a value of each head; and of the weights
    of each linear layer, for each of its rows."""
    declared, keys, size = case.declared, case.n if case.m is None else case.m, case.declared.sizes
    at = 0 if case.m is not None and case.n > keys else None
    pairs = sum(int(p.allowed(case.n, keys, at).sum()) for p in head_patterns(declared))
    width = size.d_v + (size.d_k if declared.score in ("dot", "bilinear") else 0)
    with torch.device("meta"):
        module = declared.build()
    rows = {"w_q": case.n, "w_k": keys, "w_v": keys, "w_o": case.n}
    linear = {name: getattr(module, name) for name in rows}
    total = sum(rows[name] * w.weight.numel() for name, w in linear.items() if w is not None)
    return 2 * case.batch * (pairs * width + total)


def check_run(case: Case, dtype: torch.dtype = torch.float64) -> None:
    """The output and the weights are those of the heads one by one; in float64 all gradients are, too."""
    layer, exact = case.module(dtype), case.module()
    (x, context), (y, other) = case.inputs(dtype), case.inputs()
    given = [t for t in (x, context) if t is not None]
    wanted = [t for t in (y, other) if t is not None]
    for t in (*given, *wanted):
        t.requires_grad_()
    options = {"lengths": case.lengths, "at": case.at, "pattern": case.given}
    o, weights = layer(x, context, return_weights=True, **options)
    alone = layer(x, context, **options)
    want, table = one_by_one(case, exact, y, other)
    close(alone, o, dtype, "the output without the weights")
    close(o, want, dtype, "the output")
    close(weights, table, dtype, "the weights")
    if dtype != torch.float64:
        return
    mix = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = torch.autograd.grad((o * mix).sum(), [*given, *layer.parameters()], allow_unused=True)
    truth = torch.autograd.grad((want * mix).sum(), [*wanted, *exact.parameters()], allow_unused=True)
    for name, a, b in zip([*["x", "context"][: len(given)], *dict(layer.named_parameters())], found, truth):
        a, b = (torch.zeros(1) if grad is None else grad for grad in (a, b))
        close(a, b, dtype, f"the gradient of {name}")


def close(a: Tensor, b: Tensor, dtype: torch.dtype, what: str) -> None:
    bound = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    error, size = float((a.detach().double() - b.detach()).abs().max()), float(b.detach().abs().max())
    assert error <= bound * max(1.0, size), f"{what} is off by {error:.2g}, of {size:.2g}"


def check_cost(case: Case) -> None:
    """FLOPs are those of the products over the allowed pairs, and of the formula; parameters are the module's."""
    declared = case.declared
    cost = rg.cost(declared, n=case.n, m=case.m, batch=case.batch)
    parameters = sum(p.numel() for p in case.module().parameters())
    assert cost.parameters == parameters
    shaw = sum(
        cost[p].total.flops for p in ("position", "position_values") if p in {x.name for x in cost.tree.parts}
    )
    assert cost.flops - shaw == products(case)
    assert cost.formula.subs(cost.values) == cost.flops
    assert sum(len(p.heads) or declared.heads for p in cost.pairs) == declared.heads
