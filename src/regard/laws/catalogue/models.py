"""Whole models: L30, L33, L35, L36, L43, L44, L52, L59."""

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from ... import reference
from ..controls import small_attention, small_decoder, wrapped
from ..harness import Lab
from ..law import Case, Law, Reading, Tolerance, Trial, bounded, compare, exactly, worst
from ..target import Model
from .equivalences import by_chunks, chunk_space, chunked_prefill, has_projections
from .masks import lengths_in, positions_out

MOST = 4096  # sequences whose likelihoods are summed


def likelihood(lab: Lab, c: Case) -> Reading:
    """Σ over all vᵀ sequences of Π_t p(y_t | y_<t)."""
    vocab = lab.model.vocab
    assert vocab is not None
    every = torch.tensor(list(itertools.product(range(vocab), repeat=c.T)), device=lab.device)
    start = torch.zeros(len(every), 1, dtype=torch.long, device=lab.device)
    context = lab.context(1, 3)
    context = None if context is None else context.expand(len(every), *context.shape[1:])
    with torch.no_grad():
        logs = lab.run(torch.cat([start, every[:, :-1]], 1), context).double().log_softmax(-1)
    total = logs.gather(-1, every[..., None])[..., 0].sum(-1).exp().sum()
    return compare(f"the likelihoods of all {len(every)} sequences of {c.T}", total, torch.tensor(1.0))


def _few_words(lab: Lab) -> str | None:
    vocab = lab.model.vocab
    if vocab is None:
        return "it takes no tokens"
    if vocab**2 > MOST:
        return f"a vocabulary of {vocab} has {vocab**2} sequences of 2, past {MOST}"
    if positions_out(lab):
        return positions_out(lab)
    out = lab.run(lab.sequence(1, 2), lab.context(1, 2)).shape[-1]
    return None if out == vocab else f"it gives {out} numbers a position, no likelihood of {vocab} words"


def _lengths_of_words(lab: Lab):
    vocab = lab.model.vocab or 2
    return {"T": tuple(t for t in (2, 3, 4) if vocab**t <= MOST) or (1,)}


def cached(lab: Lab, c: Case) -> Reading:
    """Step by step, or in chunks, against the full pass."""
    model, module = lab.model, lab.module()
    assert model.start is not None and model.step is not None
    x, context = lab.sequence(c.b, c.n), lab.context(c.b, 3)
    with torch.no_grad():
        options: dict[str, Any] = {} if lab.takes("always causal") else {"causal": True}
        want = lab.run(x, context, **options)
        given = () if context is None else (context,)
        cache = model.start(module, c.b, *given)
        steps, at = [], 0
        for size in itertools.cycle((c.chunk, 1) if c.chunk > 1 else (1,)):
            if at >= c.n:
                break
            steps.append(model.step(module, x[:, at : at + size], cache))
            at += size
    return compare("decoding with a cache against the full pass", torch.cat(steps, 1), want)


def function_cached(lab: Lab, c: Case) -> Reading:
    """Query t alone over the keys so far against row t of the causal pass."""
    q, k, v = lab.qkv(c)
    n = c.n
    past = torch.ones(n, n, dtype=torch.bool, device=lab.device).tril()
    whole = lab.attend(q, k, v, **({"causal": True} if lab.takes("causal") else {"allowed": past}))
    steps = [lab.attend(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1]) for t in range(n)]
    return compare("one query at a time against the causal pass", torch.cat(steps, 2), whole)


def receptive_field(lab: Lab, c: Case) -> Reading:
    """x ← x + f(x) over and over: who depends on whom is the boolean power of I + allowed."""
    n, d = c.n, c.d_k
    allowed = (lab.rand(n, n) < 0.35) | torch.eye(n, dtype=torch.bool, device=lab.device)
    if c.near:
        i = torch.arange(n, device=lab.device)
        allowed = (i[:, None] - i).abs() <= 1
    x = lab.randn(1, 1, n, d).requires_grad_()
    y = x
    for _ in range(c.layers):
        y = y + lab.attend(y, y, y, allowed=allowed)
    got = torch.stack(
        [torch.autograd.grad(y[0, 0, t].sum(), x, retain_graph=True)[0][0, 0].abs().sum(-1) for t in range(n)]
    )
    reach = torch.linalg.matrix_power(allowed.double(), c.layers) > 0
    wrong = ((got != 0) != reach).nonzero()
    place = wrong[0].tolist() if len(wrong) else [0, 0]
    keys = int(allowed.sum(-1).max())
    return worst(
        exactly(
            f"after {c.layers} layers output {place[0]} and input {place[1]}: dependent or not?",
            not len(wrong),
        ),
        bounded("more inputs than (k + 1)^L are seen", (got != 0).sum(-1) - min(n, keys**c.layers)),
    )


def window_reach(lab: Lab, c: Case) -> Reading:
    """After L layers of a window (before, after), inputs past L·before and L·after do not matter, those within do."""
    model = lab.model
    assert model.window is not None and model.layers is not None
    before, after = (model.layers * reach for reach in model.window)
    n, t = c.n, int(lab.below(c.n))
    x, context = lab.sequence(c.b, n), lab.context(c.b, n)
    i = torch.arange(n, device=lab.device)
    far = (i < t - before) | (i > t + after)
    other = lab.others(x)
    outside = torch.where(far[:, None] if x.is_floating_point() else far, other, x)
    with torch.no_grad():
        o = lab.run(x, context)[:, t]
        readings = [
            compare(
                f"output {t} after inputs past its reach were changed", lab.run(outside, context)[:, t], o
            )
        ]
        for edge in (t - before, t + after):
            if 0 <= edge < n and edge != t:
                inside = x.clone()
                inside[:, edge] = other[:, edge]
                moved = (lab.run(inside, context)[:, t] - o).abs().amax()
                readings.append(
                    exactly(f"input {edge}, at the edge of its reach, does not move output {t}", moved > 0)
                )
    return worst(*readings)


def function_window_reach(lab: Lab, c: Case) -> Reading:
    """The window of a function: exactly the keys −after ≤ i − j ≤ before, and L times that after L layers."""
    n, reach = c.n, (c.before, c.after)
    x = lab.randn(1, 1, n, c.d_k).requires_grad_()
    y = x
    for _ in range(c.layers):
        y = y + lab.attend(y, y, y, window=reach)
    got = torch.stack(
        [torch.autograd.grad(y[0, 0, t].sum(), x, retain_graph=True)[0][0, 0].abs().sum(-1) for t in range(n)]
    )
    apart = torch.arange(n, device=lab.device)[:, None] - torch.arange(n, device=lab.device)
    want = (apart <= c.layers * c.before) & (-apart <= c.layers * c.after)
    wrong = ((got != 0) != want).nonzero()
    place = wrong[0].tolist() if len(wrong) else [0, 0]
    return exactly(
        f"window {reach}, {c.layers} layers: output {place[0]} and input {place[1]}, seen or not?",
        not len(wrong),
    )


def residual(lab: Lab, c: Case) -> Reading:
    """With every branch silent a pre-norm stack is the identity, and so is its gradient."""
    module = lab.fresh()
    assert lab.model.silence is not None
    with torch.no_grad():
        lab.model.silence(module)
    x = lab.sequence(c.b, c.n).requires_grad_()
    context = lab.context(c.b, c.n)
    o = lab.run(x, context, module)
    w = lab.randn(*o.shape)
    (g,) = torch.autograd.grad((o * w).sum(), x)
    return worst(compare("outputs without branches against the input", o, x), compare("their gradient", g, w))


def _stack(lab: Lab) -> str | None:
    if lab.model.silence is None:
        return "its branches cannot be silenced (the adapter's field silence)"
    return "it takes no vectors" if lab.model.d_model is None or lab.model.vocab or lab.model.image else None


def initial_scale(lab: Lab, c: Case) -> Reading:
    """Xavier on separate square projections: q, k and scaled scores of variance 1, entropy ln n − 1/2."""
    assert lab.model.projections is not None
    p = lab.model.projections(lab.module())
    n, wide = 1024, p.w_q.shape[1]
    x = lab.randn(n, wide).double()
    q, k = (torch.einsum("ne,hed->hnd", x, w.double()) for w in (p.w_q, p.w_k))
    k = reference.repeat_heads(k, len(q))
    scores = torch.einsum("hnd,hmd->hnm", q, k) * p.w_q.shape[-1] ** -0.5
    entropy = torch.special.entr(scores.softmax(-1)).sum(-1).mean()
    variances = {"q": float(q.var()), "k": float(k.var()), "scaled scores": float(scores.var())}
    allowance = 0.05 * max(1.0, (512 / wide) ** 0.5)
    return worst(
        *(
            bounded(f"{name} have variance {got:.3f}, not 1", abs(got - 1) - allowance)
            for name, got in variances.items()
        ),
        bounded(
            f"the entropy is {float(entropy):.2f}, not ln n − 1/2",
            abs(float(entropy) - math.log(n) + 0.5) - 0.1,
        ),
    )


def _square(lab: Lab) -> str | None:
    if has_projections(lab):
        return has_projections(lab)
    assert lab.model.projections is not None
    p = lab.model.projections(lab.model.module)
    heads, wide, d_k = p.w_q.shape
    if heads * d_k != wide or p.w_k.shape[0] != heads:
        return f"its projections are not square: {heads} heads of {d_k} on {wide}"
    return None if wide >= 64 else f"{wide} columns are too few for a variance"


def equal_heads(lab: Lab, c: Case) -> Reading:
    """Two heads with equal matrices and equal blocks of W_O stay equal under SGD and Adam, clipping included."""
    module = lab.fresh().train()
    assert lab.model.projections is not None

    def heads() -> list[Tensor]:
        return [w for w in lab.model.projections(module)[:7] if w is not None]

    with torch.no_grad():
        for w in heads():
            w[1].copy_(w[0])
    kinds: dict[str, Any] = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam}
    optimiser = kinds[c.optimiser](module.parameters(), lr=1e-2)
    for _ in range(c.steps):
        x, context = lab.sequence(2, 5), lab.context(2, 5)
        optimiser.zero_grad()
        lab.run(x, context, module).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimiser.step()
    return worst(*(compare(f"two equal heads after {c.steps} steps", w[1], w[0]) for w in heads()))


def _two_heads(lab: Lab) -> str | None:
    if reason := has_projections(lab):
        return reason
    assert lab.model.projections is not None
    p = lab.model.projections(lab.model.module)
    if p.w_q.shape[0] != p.w_k.shape[0] or p.w_q.shape[0] < 2:
        return "it has no two heads with keys of their own"
    return "it adds positions inside, which may differ by head" if lab.takes("positions") else None


def _post_norm() -> Model:
    import torch.nn as nn

    layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True, norm_first=False)

    def silence(module: Any) -> None:
        for p in (module.self_attn.out_proj, module.linear2):
            p.weight.zero_()
            p.bias.zero_()

    return Model(
        "a post-norm layer",
        layer,
        lambda module, x: module(x),
        of="encoder",
        d_model=6,
        silence=silence,
        claims=frozenset({"pre-norm", "float64", "float32", "grad"}),
        lacks=frozenset({"positions"}),
    )


def _packed_init() -> Model:
    """Drawn with the bound of the packed matrix, called separate."""
    model = small_attention("the bound of a packed matrix, called separate")
    torch.manual_seed(0)
    wide = torch.nn.MultiheadAttention(128, 4)  # its in_proj is drawn packed

    def projections(module):
        from ..target import Projections

        q, k, v = wide.in_proj_weight.detach().double().reshape(3, 4, 32, 128).mT
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
    model = small_attention("a weight of its own on head 1")

    def call(module, x, context=None, **asked):
        with torch.no_grad():
            module.w_o.weight[:, 3:] *= 1.01
        return module(x, context, **asked)

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
    def change(q, k, v, asked):
        if "window" in asked:
            asked["window"] = (asked["window"][0] + 1, asked["window"][1])
        return (q, k, v), asked

    return wrapped("a window one key too wide", change)


def _depth_space(lab: Lab):
    return lab.space(b=None, h=None, m=None, d_v=None, n=(3, 5, 7, 11), d_k=(2, 3, 5), layers=(1, 2, 3))


LAWS = (
    Law(
        "L30",
        "a proper likelihood",
        "Σ over all vᵀ sequences of Π_t p(y_t | y_<t) = 1",
        "a causal language model with few words; inputs shifted by one",
        {"model": Trial(likelihood, _lengths_of_words, needs=("always causal",), when=_few_words)},
        lambda: small_decoder("no mask", wrong="sees the future"),
    ),
    Law(
        "L33",
        "cached decoding",
        "decoding with stored keys and values = the full causal pass",
        "causal; positions continued",
        {
            "function": Trial(function_cached, lambda lab: lab.space(m=None), needs=("causal|mask", "n≠m")),
            "model": Trial(
                cached,
                lambda lab: {"b": (1, 2, 3), "n": lengths_in(lab, 2), "chunk": (1,)},
                needs=("cache",),
                when=positions_out,
            ),
        },
        lambda: small_decoder("positions restarted", wrong="restarts positions"),
    ),
    Law(
        "L35",
        "receptive field",
        "inputs seen after L layers = support of (I + allowed)^L, at most min(n, (k + 1)^L)",
        "takes a mask, gives gradients; x ← x + f(x)",
        {
            "function": Trial(
                receptive_field,
                lambda lab: {**_depth_space(lab), "near": (True, False)},
                needs=("mask", "grad"),
                when=lambda lab: "the target takes fixed sizes only" if lab.function.sizes else None,
            )
        },
        lambda: wrapped(
            "one key more than allowed",
            lambda q, k, v, asked: (
                (q, k, v),
                {**asked, "allowed": asked["allowed"] | torch.roll(asked["allowed"], 2, -1)}
                if "allowed" in asked
                else asked,
            ),
        ),
    ),
    Law(
        "L36",
        "residual",
        "pre-norm: x_L = x_0 + Σ F_l(LN(x_l)); without branches the gradient passes unchanged",
        "a pre-norm stack of vectors whose branches can be silenced",
        {
            "model": Trial(
                residual, lambda lab: {"b": (1, 2), "n": lengths_in(lab)}, needs=("pre-norm",), when=_stack
            )
        },
        _post_norm,
    ),
    Law(
        "L43",
        "initial scale",
        "Xavier on separate square projections: Var q = Var k = Var scaled scores = 1; entropy ≈ ln n − 1/2",
        "fresh weights drawn so; unit-variance input, n = 1024",
        {
            "model": Trial(
                initial_scale, lambda lab: {"draw": (0,)}, needs=("xavier",), when=_square, few=True
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
                lambda lab: {"optimiser": ("SGD", "Adam"), "steps": (20, 100)},
                needs=("grad",),
                when=_two_heads,
                few=True,
            )
        },
        _differing_blocks,
    ),
    Law(
        "L52",
        "chunked prefill",
        "queries in chunks over the keys so far = the full causal pass",
        "causal or mask; n ≠ m; of a model: it has a cache",
        {
            "function": Trial(chunked_prefill, chunk_space, needs=("causal|mask", "n≠m"), when=by_chunks),
            "model": Trial(
                cached,
                lambda lab: {"b": (1, 2, 3), "n": lengths_in(lab, 3), "chunk": (2, 3)},
                needs=("cache",),
                when=positions_out,
            ),
        },
        lambda: wrapped(
            "each chunk sees itself alone",
            lambda q, k, v, asked: ((q, k[:, :, -q.shape[2] :], v[:, :, -q.shape[2] :]), asked),
            "causal",
            "n≠m",
            "float64",
            "d_v≠d_k",
        ),
    ),
    Law(
        "L59",
        "window reach after L layers",
        "output t depends on inputs t − L·before … t + L·after, and on no other",
        "a window: an option of the function, or declared by the model with its layers",
        {
            "function": Trial(
                function_window_reach,
                lambda lab: {**_depth_space(lab), "before": (0, 1, 2), "after": (0, 1)},
                needs=("window", "grad"),
            ),
            "model": Trial(
                window_reach,
                lambda lab: {"b": (1, 2), "n": lengths_in(lab, 3)},
                when=lambda lab: (
                    positions_out(lab)
                    or (
                        None
                        if lab.model.window and lab.model.layers
                        else "no window is declared (fields window and layers)"
                    )
                ),
            ),
        },
        _off_by_one_window,
    ),
)
