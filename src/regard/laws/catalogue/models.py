"""Complete models and attention modules: L30, L36, L43, L44."""

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from ... import reference
from ..controls import small_attention, small_decoder
from ..harness import Harness
from ..law import Case, Law, Tolerance, Trial
from ..measurement import Measurement, compare, excess, worst
from ..target import Model, Projections
from .equivalences import has_projections
from .masks import positions_out, sequence_lengths

MAX_SEQUENCES = 4096  # whose likelihoods are summed


def likelihood(harness: Harness, c: Case) -> Measurement:
    """Σ over all vocab^T sequences of Π_t p(y_t | y_<t)."""
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


LAWS = (
    Law(
        "L30",
        "likelihoods sum to one",
        "Σ over all vocab^T sequences of Π_t p(y_t | y_<t) = 1",
        "a causal language model with a small vocabulary; inputs shifted by one",
        {
            "model": Trial(
                likelihood, _sequence_lengths, needs=("always causal",), unless=_no_small_vocabulary
            )
        },
        lambda: small_decoder("no causal mask", fault="attends to the future"),
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
)
