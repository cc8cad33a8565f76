"""Complete models: L30, L33, L35, L36, L43, L44, L52, L59."""

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from ... import reference
from ..controls import small_attention, small_decoder, with_changed_call
from ..harness import Harness
from ..law import Case, Law, Tolerance, Trial
from ..measurement import Measurement, compare, excess, require, worst
from ..target import Model, Projections
from .equivalences import chunk_space, chunked_prefill, has_projections, without_chunks
from .masks import positions_out, sequence_lengths

MAX_SEQUENCES = 4096  # whose likelihoods are summed


def likelihood(harness: Harness, c: Case) -> Measurement:
    """Σ over all vᵀ sequences of Π_t p(y_t | y_<t)."""
    vocab = harness.model.vocab
    assert vocab is not None
    sequences = torch.tensor(list(itertools.product(range(vocab), repeat=c.T)), device=harness.device)
    start = torch.zeros(len(sequences), 1, dtype=torch.long, device=harness.device)
    context = harness.context(1, 3)
    context = None if context is None else context.expand(len(sequences), *context.shape[1:])
    with torch.no_grad():
        logs = harness.run(torch.cat([start, sequences[:, :-1]], 1), context).double().log_softmax(-1)
    total = logs.gather(-1, sequences[..., None])[..., 0].sum(-1).exp().sum()
    return compare(
        f"the sum of the likelihoods of all {len(sequences)} sequences of length {c.T}",
        total,
        torch.tensor(1.0),
    )


def _no_small_vocabulary(harness: Harness) -> str | None:
    vocab = harness.model.vocab
    if vocab is None:
        return "its input is not tokens"
    if vocab**2 > MAX_SEQUENCES:
        return f"a vocabulary of {vocab} has {vocab**2} sequences of length 2, more than {MAX_SEQUENCES}"
    if positions_out(harness):
        return positions_out(harness)
    out = harness.run(harness.sequence(1, 2), harness.context(1, 2)).shape[-1]
    return None if out == vocab else f"it returns {out} values per position, not the logits of {vocab} tokens"


def _sequence_lengths(harness: Harness):
    vocab = harness.model.vocab or 2
    return {"T": tuple(t for t in (2, 3, 4) if vocab**t <= MAX_SEQUENCES) or (1,)}


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


def receptive_field(harness: Harness, c: Case) -> Measurement:
    """After L layers x ← x + f(x), the dependencies are the boolean power (I + allowed)^L."""
    n, d = c.n, c.d_k
    allowed = (harness.rand(n, n) < 0.35) | torch.eye(n, dtype=torch.bool, device=harness.device)
    if c.near:
        positions = torch.arange(n, device=harness.device)
        allowed = (positions[:, None] - positions).abs() <= 1
    x = harness.randn(1, 1, n, d).requires_grad_()
    y = x
    for _ in range(c.layers):
        y = y + harness.attend(y, y, y, allowed=allowed)
    got = torch.stack(
        [torch.autograd.grad(y[0, 0, t].sum(), x, retain_graph=True)[0][0, 0].abs().sum(-1) for t in range(n)]
    )
    reach = torch.linalg.matrix_power(allowed.double(), c.layers) > 0
    wrong = ((got != 0) != reach).nonzero()
    i, j = wrong[0].tolist() if len(wrong) else (0, 0)
    keys = int(allowed.sum(-1).max())
    return worst(
        require(
            f"after {c.layers} layers output {i} {_dependence(got[i, j])} on input {j}, expected the opposite",
            not len(wrong),
        ),
        excess(
            "an output depends on more than (k + 1)^L inputs", (got != 0).sum(-1) - min(n, keys**c.layers)
        ),
    )


def window_reach(harness: Harness, c: Case) -> Measurement:
    """After L layers of a window (before, after), an output depends on inputs within L·before and L·after only."""
    model = harness.model
    assert model.window is not None and model.layers is not None
    before, after = (model.layers * reach for reach in model.window)
    n, t = c.n, int(harness.randint(c.n))
    x, context = harness.sequence(c.b, n), harness.context(c.b, n)
    i = torch.arange(n, device=harness.device)
    far = (i < t - before) | (i > t + after)
    other = harness.changed(x)
    outside = torch.where(far[:, None] if x.is_floating_point() else far, other, x)
    with torch.no_grad():
        o = harness.run(x, context)[:, t]
        measurements = [
            compare(
                f"output {t} after inputs beyond its receptive field were changed",
                harness.run(outside, context)[:, t],
                o,
            )
        ]
        for edge in (t - before, t + after):
            if 0 <= edge < n and edge != t:
                inside = x.clone()
                inside[:, edge] = other[:, edge]
                change = (harness.run(inside, context)[:, t] - o).abs().amax()
                measurements.append(
                    require(
                        f"output {t} does not depend on input {edge}, at the edge of its receptive field",
                        change > 0,
                    )
                )
    return worst(*measurements)


def function_window_reach(harness: Harness, c: Case) -> Measurement:
    """The window of a function: exactly the keys −after ≤ i − j ≤ before, and L times that after L layers."""
    n, reach = c.n, (c.before, c.after)
    x = harness.randn(1, 1, n, c.d_k).requires_grad_()
    y = x
    for _ in range(c.layers):
        y = y + harness.attend(y, y, y, window=reach)
    got = torch.stack(
        [torch.autograd.grad(y[0, 0, t].sum(), x, retain_graph=True)[0][0, 0].abs().sum(-1) for t in range(n)]
    )
    distance = torch.arange(n, device=harness.device)[:, None] - torch.arange(n, device=harness.device)
    want = (distance <= c.layers * c.before) & (-distance <= c.layers * c.after)
    wrong = ((got != 0) != want).nonzero()
    i, j = wrong[0].tolist() if len(wrong) else (0, 0)
    return require(
        f"window {reach}, {c.layers} layers: output {i} {_dependence(got[i, j])} on input {j}, expected the opposite",
        not len(wrong),
    )


def _dependence(gradient: Tensor) -> str:
    return "depends" if bool(gradient != 0) else "does not depend"


def residual(harness: Harness, c: Case) -> Measurement:
    """With the output of every branch set to 0, a pre-norm stack is the identity, and so is its gradient."""
    module = harness.module_copy()
    assert harness.model.zero_branches is not None
    with torch.no_grad():
        harness.model.zero_branches(module)
    x = harness.sequence(c.b, c.n).requires_grad_()
    context = harness.context(c.b, c.n)
    o = harness.run(x, context, module)
    w = harness.randn(*o.shape)
    (g,) = torch.autograd.grad((o * w).sum(), x)
    return worst(
        compare("outputs with all branches set to 0 against the input", o, x),
        compare("the gradient with all branches set to 0", g, w),
    )


def _no_residual_stack(harness: Harness) -> str | None:
    if harness.model.zero_branches is None:
        return "the adapter cannot set its branches to 0 (field zero_branches)"
    return (
        "its input is not vectors"
        if harness.model.d_model is None or harness.model.vocab or harness.model.image
        else None
    )


def initial_scale(harness: Harness, c: Case) -> Measurement:
    """Xavier on separate square projections: variance 1 of q, k and scaled scores, entropy ln n − 1/2."""
    assert harness.model.projections is not None
    p = harness.model.projections(harness.module())
    n, width = 1024, p.w_q.shape[1]
    x = harness.randn(n, width).double()
    q, k = (torch.einsum("ne,hed->hnd", x, w.double()) for w in (p.w_q, p.w_k))
    k = reference.repeat_heads(k, len(q))
    scores = torch.einsum("hnd,hmd->hnm", q, k) * p.w_q.shape[-1] ** -0.5
    entropy = torch.special.entr(scores.softmax(-1)).sum(-1).mean()
    variances = {"q": float(q.var()), "k": float(k.var()), "scaled scores": float(scores.var())}
    margin = 0.05 * max(1.0, (512 / width) ** 0.5)
    return worst(
        *(
            excess(f"the variance of {name}: got {got:.3f}, expected 1", abs(got - 1) - margin)
            for name, got in variances.items()
        ),
        excess(
            f"the entropy: got {float(entropy):.2f}, expected ln n − 1/2 = {math.log(n) - 0.5:.2f}",
            abs(float(entropy) - math.log(n) + 0.5) - 0.1,
        ),
    )


def _not_square(harness: Harness) -> str | None:
    if has_projections(harness):
        return has_projections(harness)
    assert harness.model.projections is not None
    p = harness.model.projections(harness.model.module)
    heads, width, d_k = p.w_q.shape
    if heads * d_k != width or p.w_k.shape[0] != heads:
        return f"its projections are not square: {heads} heads of {d_k} on {width}"
    return None if width >= 64 else f"{width} columns are too few to estimate a variance"


def equal_heads(harness: Harness, c: Case) -> Measurement:
    """Two heads with equal matrices and equal blocks of W_O stay equal under SGD and Adam with gradient clipping."""
    module = harness.module_copy().train()
    assert harness.model.projections is not None

    def heads() -> list[Tensor]:
        return [w for w in harness.model.projections(module)[:7] if w is not None]

    with torch.no_grad():
        for w in heads():
            w[1].copy_(w[0])
    optimizers: dict[str, Any] = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam}
    optimizer = optimizers[c.optimizer](module.parameters(), lr=1e-2)
    for _ in range(c.steps):
        x, context = harness.sequence(2, 5), harness.context(2, 5)
        optimizer.zero_grad()
        harness.run(x, context, module).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
    return worst(
        *(
            compare(f"head 1 against head 0, initially equal, after {c.steps} steps", w[1], w[0])
            for w in heads()
        )
    )


def _no_equal_heads(harness: Harness) -> str | None:
    if reason := has_projections(harness):
        return reason
    assert harness.model.projections is not None
    p = harness.model.projections(harness.model.module)
    if p.w_q.shape[0] != p.w_k.shape[0] or p.w_q.shape[0] < 2:
        return "it does not have two heads with their own keys"
    return "it adds positions inside, which may differ by head" if harness.supports("positions") else None


def _post_norm() -> Model:
    import torch.nn as nn

    layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True, norm_first=False)

    def zero_branches(module: Any) -> None:
        for p in (module.self_attn.out_proj, module.linear2):
            p.weight.zero_()
            p.bias.zero_()

    return Model(
        "a post-norm layer",
        layer,
        lambda module, x: module(x),
        architecture="encoder",
        d_model=6,
        zero_branches=zero_branches,
        claims=frozenset({"pre-norm", "float64", "float32", "grad"}),
        lacks=frozenset({"positions"}),
    )


def _packed_init() -> Model:
    """Initialized with the bound of the packed matrix, although it claims separate matrices."""
    model = small_attention("initialized as a packed matrix")
    torch.manual_seed(0)
    packed = torch.nn.MultiheadAttention(128, 4)  # it initializes in_proj as one matrix

    def projections(module):
        q, k, v = packed.in_proj_weight.detach().double().reshape(3, 4, 32, 128).mT
        return Projections(q, k, v, torch.zeros(4, 32, 128).double())

    return Model(
        model.name,
        model.module,
        model.call,
        d_model=6,
        projections=projections,
        claims=model.claims | {"xavier"},
    )


def _differing_blocks() -> Model:
    model = small_attention("head 1 is scaled")

    def call(module, x, context=None, **options):
        with torch.no_grad():
            module.w_o.weight[:, 3:] *= 1.01
        return module(x, context, **options)

    return Model(
        model.name,
        model.module,
        call,
        d_model=6,
        projections=model.projections,
        claims=model.claims,
        lacks=model.lacks,
    )


def _off_by_one_window():
    def change(q, k, v, options):
        if "window" in options:
            options["window"] = (options["window"][0] + 1, options["window"][1])
        return (q, k, v), options

    return with_changed_call("a window one key too wide", change)


def _depth_space(harness: Harness):
    return harness.space(b=None, h=None, m=None, d_v=None, n=(3, 5, 7, 11), d_k=(2, 3, 5), layers=(1, 2, 3))


LAWS = (
    Law(
        "L30",
        "likelihoods sum to one",
        "Σ over all vᵀ sequences of Π_t p(y_t | y_<t) = 1",
        "a causal language model with a small vocabulary; inputs shifted by one",
        {
            "model": Trial(
                likelihood, _sequence_lengths, needs=("always causal",), unless=_no_small_vocabulary
            )
        },
        lambda: small_decoder("no causal mask", fault="attends to the future"),
    ),
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
        "L35",
        "receptive field",
        "the inputs that an output depends on after L layers = support of (I + allowed)^L, at most min(n, (k + 1)^L)",
        "supports a mask and gradients; x ← x + f(x)",
        {
            "function": Trial(
                receptive_field,
                lambda harness: {**_depth_space(harness), "near": (True, False)},
                needs=("mask", "grad"),
                unless=lambda harness: (
                    "the target accepts only fixed sizes" if harness.function.sizes else None
                ),
            )
        },
        lambda: with_changed_call(
            "more keys than the mask allows",
            lambda q, k, v, options: (
                (q, k, v),
                {**options, "allowed": options["allowed"] | torch.roll(options["allowed"], 2, -1)}
                if "allowed" in options
                else options,
            ),
        ),
    ),
    Law(
        "L36",
        "residual",
        "pre-norm: x_L = x_0 + Σ F_l(LN(x_l)); with all F_l = 0 the gradient passes unchanged",
        "a pre-norm stack on vectors whose branches can be set to 0",
        {
            "model": Trial(
                residual,
                lambda harness: {"b": (1, 2), "n": sequence_lengths(harness)},
                needs=("pre-norm",),
                unless=_no_residual_stack,
            )
        },
        _post_norm,
    ),
    Law(
        "L43",
        "initial scale",
        "Xavier on separate square projections: Var q = Var k = Var scaled scores = 1; entropy ≈ ln n − 1/2",
        "newly initialized weights; input of variance 1, n = 1024",
        {
            "model": Trial(
                initial_scale,
                lambda harness: {"repeat": (0,)},
                needs=("xavier",),
                unless=_not_square,
                per_seed=True,
            )
        },
        _packed_init,
        Tolerance(0.0, 0.0, 0.0),
    ),
    Law(
        "L44",
        "equal heads stay equal",
        "heads with equal W_Q, W_K, W_V and equal blocks of W_O get equal gradients and stay equal",
        "no dropout inside heads; SGD and Adam, with global-norm clipping",
        {
            "model": Trial(
                equal_heads,
                lambda harness: {"optimizer": ("SGD", "Adam"), "steps": (20, 100)},
                needs=("grad",),
                unless=_no_equal_heads,
                per_seed=True,
            )
        },
        _differing_blocks,
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
    Law(
        "L59",
        "receptive field of a window",
        "output t depends on inputs t − L·before … t + L·after and on no others",
        "a window: an option of the function, or declared by the model with its layers",
        {
            "function": Trial(
                function_window_reach,
                lambda harness: {**_depth_space(harness), "before": (0, 1, 2), "after": (0, 1)},
                needs=("window", "grad"),
            ),
            "model": Trial(
                window_reach,
                lambda harness: {"b": (1, 2), "n": sequence_lengths(harness, 3)},
                unless=lambda harness: (
                    positions_out(harness)
                    or (
                        None
                        if harness.model.window and harness.model.layers
                        else "it declares no window (fields window and layers)"
                    )
                ),
            ),
        },
        _off_by_one_window,
    ),
)
