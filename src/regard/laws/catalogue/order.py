"""The order of the input: L19 to L21."""

from typing import Any

import torch
from torch import Tensor

from ..controls import small_attention, with_changed_call
from ..harness import Harness
from ..law import Case, Law, Tolerance, Trial
from ..measurement import Measurement, compare, excess, worst


def permuted_table(allowed: Tensor | None, order: Tensor) -> Tensor:
    assert allowed is not None
    return allowed[..., order, :][..., order]


def equivariance(harness: Harness, c: Case) -> Measurement:
    q, k, v = harness.qkv(c)
    order = harness.randperm(c.n)
    options: dict[str, Any] = {}
    permuted: dict[str, Any] = {}
    if c.mask != "none":
        allowed = harness.make_mask(c.mask, c.b, c.h, c.n, c.n).allowed
        options, permuted = {"allowed": allowed}, {"allowed": permuted_table(allowed, order)}
    o = harness.attend(q, k, v, **options)
    got = harness.attend(*(x[:, :, order] for x in (q, k, v)), **permuted)
    return compare("f(PX; P M Pᵀ) against P f(X; M)", got, o[:, :, order])


def _masks(harness: Harness) -> tuple[str, ...]:
    return ("none", "random", "strided") if harness.supports("mask") else ("none",)


def model_equivariance(harness: Harness, c: Case) -> Measurement:
    x, order = harness.sequence(c.b, c.n), harness.randperm(c.n)
    context = harness.context(c.b, c.n)
    options: dict[str, Any] = {}
    permuted: dict[str, Any] = {}
    if c.mask == "random":
        allowed = (harness.rand(c.b, c.n, c.n) < 0.5) | torch.eye(
            c.n, dtype=torch.bool, device=harness.device
        )
        options, permuted = {"allowed": allowed}, {"allowed": permuted_table(allowed, order)}
    with torch.no_grad():
        o, got = harness.run(x, context, **options), harness.run(x[:, order], context, **permuted)
    if harness.supports("pooled"):
        return compare("the pooled output f(PX) against f(X)", got, o)
    return worst(
        compare("f(PX; P M Pᵀ) against P f(X; M)", got, o[:, order]),
        compare("the mean over positions of f(PX) against that of f(X)", got.mean(1), o.mean(1)),
    )


def _model_space(harness: Harness):
    return {"b": (1, 2), "n": (2, 3, 5, 7, 11), "mask": _masks(harness)[:2]}


def without_order(harness: Harness) -> str | None:
    if harness.model.image is not None:
        return "its input is an image"
    for capability in ("positions", "always causal"):
        if harness.supports(capability):
            return f"it has {capability!r}, so order matters (L21)"
    if harness.target.declares("positions") is None:
        return "it does not declare whether it has positions (put 'positions' into claims or lacks)"
    return None


def invariance(harness: Harness, c: Case) -> Measurement:
    q, k, v = harness.qkv(c)
    m = k.shape[-2]
    order = harness.randperm(m)
    options: dict[str, Any] = {}
    permuted: dict[str, Any] = {}
    if c.mask != "none":
        allowed = harness.make_mask(c.mask, c.b, c.h, c.n, m).allowed
        assert allowed is not None
        options, permuted = {"allowed": allowed}, {"allowed": allowed[..., order]}
    o = harness.attend(q, k, v, **options)
    return compare(
        "outputs with keys and values permuted",
        harness.attend(q, k[:, :, order], v[:, :, order], **permuted),
        o,
    )


def context_invariance(harness: Harness, c: Case) -> Measurement:
    """The context permuted."""
    x, context = harness.sequence(c.b, c.n), harness.second_sequence(c.b, c.m)
    order = harness.randperm(c.m)
    with torch.no_grad():
        return compare(
            "outputs with the context permuted", harness.run(x, context[:, order]), harness.run(x, context)
        )


def order_matters(harness: Harness, c: Case) -> Measurement:
    """Of 100 swaps of two different inputs, 99 must change the outputs by more than a thousandth.

    Where outputs depend on some inputs only, by a mask of blocks for example, swaps that the mask does not notice
    are not counted.
    """
    n = harness.model.length or min(7, harness.model.max_length)
    noticed, unnoticed = 0, []
    with torch.no_grad():
        for _ in range(100):
            x, context = harness.sequence(1, n), harness.context(1, n)
            order = torch.arange(n, device=harness.device)
            i, j = (int(s) for s in harness.randperm(n)[:2])
            if not x.is_floating_point():
                x[0, j] = harness.changed(x[:, i : i + 1])[0, 0]
            order[[i, j]] = order[[j, i]]
            o, got = harness.run(x, context), harness.run(x[:, order], context)
            far = (got - (o if harness.supports("pooled") else o[:, order])).abs().amax()
            if far > 1e-3 * o.abs().amax():
                noticed += 1
            else:
                unnoticed.append(order.cpu())
        read = _read(harness, n) if noticed and len(unnoticed) > 1 else None
    if read is not None and not bool(read.all()):
        unnoticed = [order for order in unnoticed if not torch.equal(read[order][:, order], read)]
    expected = noticed + len(unnoticed) - 1
    return excess(
        f"{noticed} of {expected + 1} swaps changed the outputs, expected at least {expected}",
        float(expected - noticed),
    )


def _read(harness: Harness, n: int) -> Tensor | None:
    """[i, j]: whether output i depends on input j; None for a model with one output for all positions."""
    x, context = harness.sequence(1, n), harness.context(1, n)
    o, other = harness.run(x, context), harness.changed(x)
    if harness.supports("pooled") or o.dim() != 3:
        return None
    columns = []
    for j in range(n):
        changed = x.clone()
        changed[:, j] = other[:, j]
        columns.append((harness.run(changed, context) - o).abs().amax((0, 2)) > 0)
    return torch.stack(columns, -1).cpu()


def with_order(harness: Harness) -> str | None:
    if harness.model.image is not None:
        return "its input is an image"
    if not (harness.supports("positions") or harness.supports("always causal")):
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
                equivariance,
                lambda harness: harness.space(m=None, n=(2, 3, 5, 7, 11, 64), mask=_masks(harness)),
            ),
            "model": Trial(model_equivariance, _model_space, avoids=("pooled",), unless=without_order),
        },
        lambda: small_attention("sinusoids added inside", positions=True),
    ),
    Law(
        "L20",
        "permutation invariance",
        "f(Q, PK, PV) = f(Q, K, V)",
        "no positions; the columns of a mask are permuted too",
        {
            "function": Trial(
                invariance, lambda harness: harness.space(n=(2, 3, 5, 7, 11), mask=_masks(harness))
            ),
            "model": Trial(
                context_invariance,
                lambda harness: {"b": (1, 2), "n": (1, 2, 3, 5), "m": (2, 3, 5, 7)},
                needs=("context",),
                unless=without_order,
            ),
        },
        lambda: with_changed_call(
            "keys sorted without their values",
            lambda q, k, v, options: ((q, k.sort(2).values, v), options),
        ),
    ),
    Law(
        "L21",
        "order matters",
        "some X, P: ‖f(PX) − P f(X)‖ > 10⁻³ of the outputs",
        "positions or a causal mask; generic weights; 100 swaps per case",
        {"model": Trial(order_matters, lambda harness: {"try": (0, 1)}, unless=with_order, per_seed=True)},
        lambda: small_attention("no positions, although it claims them").with_claims("positions"),
        Tolerance(0.0, 0.0, 0.0),
    ),
)
