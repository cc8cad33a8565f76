"""Order: L19 – L21."""

from typing import Any

import torch
from torch import Tensor

from ..controls import small_attention, wrapped
from ..harness import Lab
from ..law import Case, Law, Reading, Tolerance, Trial, bounded, compare, worst


def permuted_table(allowed: Tensor | None, order: Tensor) -> Tensor:
    assert allowed is not None
    return allowed[..., order, :][..., order]


def equivariance(lab: Lab, c: Case) -> Reading:
    q, k, v = lab.qkv(c)
    order = lab.shuffled(c.n)
    options: dict[str, Any] = {}
    turned: dict[str, Any] = {}
    if c.hide != "nothing":
        allowed = lab.hide(c.hide, c.b, c.h, c.n, c.n).allowed
        options, turned = {"allowed": allowed}, {"allowed": permuted_table(allowed, order)}
    o = lab.attend(q, k, v, **options)
    got = lab.attend(*(x[:, :, order] for x in (q, k, v)), **turned)
    return compare("f(PX; P M Pᵀ) against P f(X; M)", got, o[:, :, order])


def _masks(lab: Lab) -> tuple[str, ...]:
    return ("nothing", "random", "columns") if lab.takes("mask") else ("nothing",)


def model_equivariance(lab: Lab, c: Case) -> Reading:
    x, order = lab.sequence(c.b, c.n), lab.shuffled(c.n)
    context = lab.context(c.b, c.n)
    options: dict[str, Any] = {}
    turned: dict[str, Any] = {}
    if c.hide == "random":
        allowed = (lab.rand(c.b, c.n, c.n) < 0.5) | torch.eye(c.n, dtype=torch.bool, device=lab.device)
        options, turned = {"allowed": allowed}, {"allowed": permuted_table(allowed, order)}
    with torch.no_grad():
        o, got = lab.run(x, context, **options), lab.run(x[:, order], context, **turned)
    if lab.takes("pooled"):
        return compare("one vector of f(PX) against that of f(X)", got, o)
    return worst(
        compare("f(PX; P M Pᵀ) against P f(X; M)", got, o[:, order]),
        compare("the mean over positions of f(PX)", got.mean(1), o.mean(1)),
    )


def _model_space(lab: Lab):
    return {"b": (1, 2), "n": (2, 3, 5, 7, 11), "hide": _masks(lab)[:2]}


def without_order(lab: Lab) -> str | None:
    if lab.model.image is not None:
        return "its input is an image"
    for word in ("positions", "always causal"):
        if lab.takes(word):
            return f"it has {word!r}, so order matters (L21)"
    if lab.target.says("positions") is None:
        return "not said whether it sees the order of its input (put 'positions' into claims or lacks)"
    return None


def invariance(lab: Lab, c: Case) -> Reading:
    q, k, v = lab.qkv(c)
    m = k.shape[-2]
    order = lab.shuffled(m)
    options: dict[str, Any] = {}
    turned: dict[str, Any] = {}
    if c.hide != "nothing":
        allowed = lab.hide(c.hide, c.b, c.h, c.n, m).allowed
        assert allowed is not None
        options, turned = {"allowed": allowed}, {"allowed": allowed[..., order]}
    o = lab.attend(q, k, v, **options)
    return compare(
        "keys and values in another order", lab.attend(q, k[:, :, order], v[:, :, order], **turned), o
    )


def context_invariance(lab: Lab, c: Case) -> Reading:
    """What is looked at, in another order."""
    x, context = lab.sequence(c.b, c.n), lab.other(c.b, c.m)
    order = lab.shuffled(c.m)
    with torch.no_grad():
        return compare("the context in another order", lab.run(x, context[:, order]), lab.run(x, context))


def order_is_seen(lab: Lab, c: Case) -> Reading:
    """100 swaps of two different inputs; 99 must move the outputs by more than a thousandth."""
    n = min(7, lab.model.longest)
    seen = 0
    with torch.no_grad():
        for _ in range(100):
            x, context = lab.sequence(1, n), lab.context(1, n)
            order = torch.arange(n, device=lab.device)
            i, j = (int(s) for s in lab.shuffled(n)[:2])
            if not x.is_floating_point():
                x[0, j] = lab.others(x[:, i : i + 1])[0, 0]
            order[[i, j]] = order[[j, i]]
            o, got = lab.run(x, context), lab.run(x[:, order], context)
            far = (got - (o if lab.takes("pooled") else o[:, order])).abs().amax()
            seen += bool(far > 1e-3 * o.abs().amax())
    return bounded(f"{seen} of 100 swaps are seen; 99 must be", 99.0 - seen)


def with_order(lab: Lab) -> str | None:
    if lab.model.image is not None:
        return "its input is an image"
    if not (lab.takes("positions") or lab.takes("always causal")):
        return "it claims neither 'positions' nor 'always causal'"
    return None


LAWS = (
    Law(
        "L19",
        "permutation equivariance",
        "f(PX; P M Pᵀ) = P f(X; M) for any permutation P",
        "no positions, no dropout; a mask is permuted too",
        {
            "function": Trial(
                equivariance, lambda lab: lab.space(m=None, n=(2, 3, 5, 7, 11, 64), hide=_masks(lab))
            ),
            "model": Trial(model_equivariance, _model_space, avoids=("pooled",), when=without_order),
        },
        lambda: small_attention("sinusoids added inside", positions=True),
    ),
    Law(
        "L20",
        "permutation invariance",
        "f(Q, PK, PV) = f(Q, K, V)",
        "no positions; the columns of a mask are permuted too",
        {
            "function": Trial(invariance, lambda lab: lab.space(n=(2, 3, 5, 7, 11), hide=_masks(lab))),
            "model": Trial(
                context_invariance,
                lambda lab: {"b": (1, 2), "n": (1, 2, 3, 5), "m": (2, 3, 5, 7)},
                needs=("context",),
                when=without_order,
            ),
        },
        lambda: wrapped(
            "keys sorted without their values",
            lambda q, k, v, asked: ((q, k.sort(2).values, v), asked),
        ),
    ),
    Law(
        "L21",
        "order is seen",
        "some X, P: ‖f(PX) − P f(X)‖ > 10⁻³ of the outputs",
        "positions or a causal mask; generic weights; 100 swaps a case",
        {"model": Trial(order_is_seen, lambda lab: {"try": (0, 1)}, when=with_order, few=True)},
        lambda: small_attention("no positions, said to have them").having("positions"),
        Tolerance(0.0, 0.0, 0.0),
    ),
)
