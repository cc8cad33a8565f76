"""Isolation of documents, batch rows and padding; gradients of every input: L47 to L50."""

import math
from typing import Any

import torch
from torch import Tensor

from ..controls import with_changed_call
from ..harness import Harness
from ..law import Case, Law, Trial
from ..measurement import Measurement, compare, gradients, require, worst
from .masks import each_length, ignoring, positions_out, sequence_lengths, sequences
from .softmax import call_space, case_mask


def documents_isolated(harness: Harness, c: Case) -> Measurement:
    q, k, v = harness.qkv(c)
    ids = (harness.rand(c.b, c.n) < 0.4).long().cumsum(-1)
    same = (ids[:, :, None] == ids[:, None])[:, None]
    options: dict[str, Any] = {"documents": ids} if c.by == "documents" else {"allowed": same}
    o = harness.attend(q, k, v, **options)
    row, position = int(harness.randint(c.b)), int(harness.randint(c.n))
    mine = (ids[row] == ids[row, position])[:, None]
    others_k, others_v = k.clone(), v.clone()
    others_k[row] = torch.where(mine, k[row], harness.randn(*k[row].shape) * 5.0)
    others_v[row] = torch.where(mine, v[row], harness.randn(*v[row].shape) * 5.0)
    changed = harness.attend(q, others_k, others_v, **options)
    members = mine[:, 0].nonzero()[:, 0]
    alone = harness.attend(*(x[row : row + 1, :, members] for x in (q, k, v)))
    return worst(
        compare(
            "a document after other documents were changed", changed[row][:, members], o[row][:, members]
        ),
        compare("a packed document against the document by itself", o[row][:, members], alone[0]),
    )


def model_documents(harness: Harness, c: Case) -> Measurement:
    """Two packed documents: the second does not depend on the first, and each gives the same output as alone."""
    x, cut = harness.sequence(c.b, c.n), int(harness.randint(c.n, low=1))
    context = harness.context(c.b, c.n)
    ids = (torch.arange(c.n, device=harness.device) >= cut).long().expand(c.b, c.n).contiguous()
    other = x.clone()
    other[:, :cut] = harness.changed(x)[:, :cut]
    with torch.no_grad():
        o, changed = (harness.run(t, context, documents=ids) for t in (x, other))
        measurements = [
            compare("document 2 after document 1 was changed", changed[:, cut:], o[:, cut:]),
            compare(
                "document 1 packed against document 1 by itself", o[:, :cut], harness.run(x[:, :cut], context)
            ),
        ]
        # With absolute positions, document 2 by itself has other positions than in the pack.
        if harness.supports("relative positions") or not harness.supports("positions"):
            measurements.append(
                compare(
                    "document 2 packed against document 2 by itself",
                    o[:, cut:],
                    harness.run(x[:, cut:], context),
                )
            )
    return worst(*measurements)


def rows_independent(harness: Harness, c: Case) -> Measurement:
    q, k, v = harness.qkv(c, requires_grad=harness.supports("grad"))
    masking = case_mask(harness, c)
    o, row = harness.attend(q, k, v, **masking.options), int(harness.randint(c.b))
    others = [x.detach().clone() for x in (q, k, v)]
    for x in others:
        new = 5.0 * harness.randn(*x.shape)
        new[row] = x[row]
        x.copy_(new)
    changed = harness.attend(*others, **masking.options)
    measurements = [compare(f"row {row} after other rows were changed", changed[row], o[row])]
    if harness.supports("grad"):
        other_rows = torch.arange(c.b, device=harness.device) != row
        for name, g in zip("qkv", gradients(o[row], (q, k, v), torch.ones_like(o[row]))):
            measurements.append(
                require(f"row {row} has a gradient with respect to {name} of another row", g[other_rows] == 0)
            )
    return worst(*measurements)


def model_rows_independent(harness: Harness, c: Case) -> Measurement:
    x, context = harness.sequence(c.b, c.n), harness.context(c.b, c.n)
    row = int(harness.randint(c.b))
    mine = torch.zeros(c.b, dtype=torch.bool, device=harness.device)
    mine[row] = True
    keep = mine.reshape(-1, *[1] * (x.dim() - 1))
    other = torch.where(keep, x, harness.changed(x))
    if context is not None:
        own = mine.reshape(-1, *[1] * (context.dim() - 1))
        changed_context = torch.where(own, context, harness.changed(context))
    else:
        changed_context = None
    if not x.is_floating_point():
        with torch.no_grad():
            return compare(
                f"row {row} after other rows were changed",
                harness.run(other, changed_context)[row],
                harness.run(x, context)[row],
            )
    x = x.requires_grad_()
    o, changed = harness.run(x, context), harness.run(other.detach(), changed_context)
    (g,) = gradients(o[row], (x,), torch.ones_like(o[row]))
    return worst(
        compare(f"row {row} after other rows were changed", changed[row], o[row]),
        require(f"row {row} has a gradient with respect to another row", g[~mine] == 0),
    )


def side_of_padding(harness: Harness, c: Case) -> Measurement:
    """Padding after the keys and padding before them, both masked."""
    q, k, v = harness.qkv(c)
    count = int(harness.randint(4, low=1))
    padding = [harness.randn(*x.shape[:2], count, x.shape[-1]) * 5.0 for x in (k, v)]
    m = k.shape[-2]
    real = torch.arange(m + count, device=harness.device) < m
    want = harness.attend(q, k, v)
    right = harness.attend(
        q, *(torch.cat([x, y], 2) for x, y in zip((k, v), padding)), allowed=real[None, None, None]
    )
    left = harness.attend(
        q, *(torch.cat([y, x], 2) for x, y in zip((k, v), padding)), allowed=real.flip(0)[None, None, None]
    )
    return worst(
        compare("outputs with padding on the right", right, want),
        compare("outputs with padding on the left", left, want),
    )


def model_side_of_padding(harness: Harness, c: Case) -> Measurement:
    """Rows of several lengths, padded on the left to a common length, against each row by itself."""
    length = c.n + 2
    x, left_padding = harness.sequence(c.b, length), harness.randint(3, c.b)
    left_padding[0] = 2
    padded = torch.cat(
        [
            torch.cat([harness.changed(row[None, :p]), row[None, : length - p]], 1)
            for row, p in zip(x, left_padding.tolist())
        ]
    )
    measurements = []
    with torch.no_grad():
        context = harness.context(c.b, 3)
        batched = harness.run(padded, context, left_padding=left_padding)
        for r, p in enumerate(left_padding.tolist()):
            alone = harness.run(padded[r : r + 1, p:], None if context is None else context[r : r + 1])[0]
            mine = batched[r] if harness.supports("pooled") else batched[r, p:]
            measurements.append(
                compare(
                    f"row {r} with {p} padded positions on the left against the row by itself", mine, alone
                )
            )
    return worst(*measurements)


def every_gradient(harness: Harness, c: Case) -> Measurement:
    """The gradient of every input exists and equals that of the reference."""
    q, k, v = harness.qkv(c, requires_grad=True)
    inputs = {"q": q, "k": k, "v": v}
    options = {}
    if c.bias:
        inputs["bias"] = options["bias"] = harness.randn(c.h, c.n, k.shape[-2]).requires_grad_()
    o = harness.attend(q, k, v, **options)
    grad_output = harness.randn(*o.shape)
    if not o.requires_grad:
        return Measurement(math.inf, "the output does not require grad: no gradient reached any input")
    expected = harness.reference(q, k, v, bias=options.get("bias"))
    got = torch.autograd.grad((o * grad_output).sum(), tuple(inputs.values()), allow_unused=True)
    want = torch.autograd.grad((expected.o * grad_output.double()).sum(), tuple(inputs.values()))
    measurements = []
    for name, g, w in zip(inputs, got, want):
        if g is None:
            return Measurement(math.inf, f"no gradient reached {name}")
        measurements.append(compare(f"∂/∂{name}", g, w, harness.slack))
    return worst(*measurements)


def model_every_gradient(harness: Harness, c: Case) -> Measurement:
    """A gradient reaches every parameter that the output depends on, and the input."""
    module = harness.module_copy()
    x, context = harness.sequence(c.b, c.n), harness.context(c.b, c.n)
    x = x.requires_grad_() if x.is_floating_point() else x
    o = harness.run(x, context, module)
    loss = (o * harness.randn(*o.shape)).sum()
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    inputs = [*named.values(), *([x] if x.is_floating_point() else [])]
    if not loss.requires_grad:
        return Measurement(math.inf, "the output does not require grad: no gradient reached any parameter")
    grads = torch.autograd.grad(loss, inputs, allow_unused=True)
    broken = [name for name, g in zip(named, grads) if g is not None and not bool(torch.isfinite(g).all())]
    measurements = [require(f"the gradient of {', '.join(broken)} is not finite", not broken)]
    missing = [name for name, g in zip(named, grads) if g is None]
    if missing and harness.model.architecture == "attention":
        measurements.append(require(f"no gradient reached {', '.join(missing)}", not missing))
    elif missing:
        depends = _depends(harness, module, x.detach(), context, [named[name] for name in missing])
        measurements.append(
            require(
                f"no gradient reached {', '.join(missing)}, although the output depends on it", not depends
            )
        )
    if harness.dtype == torch.float64 and not missing:
        measurements.append(_directional_derivative(harness, module, x.detach(), context))
    if harness.dtype == torch.float64 and x.is_floating_point():
        measurements.append(_input_derivative(harness, module, x.detach(), context))
    if x.is_floating_point():
        g = grads[-1]
        measurements.append(require("no gradient reached the input", g is not None and bool((g != 0).any())))
    return worst(*measurements)


def _directional_derivative(harness: Harness, module: Any, x: Tensor, context: Tensor | None) -> Measurement:
    """The derivative of a loss along a random direction of all parameters, against finite differences."""
    o = harness.run(x, context, module)
    grad_output = harness.randn(*o.shape)
    parameters = [p for p in module.parameters() if p.requires_grad]
    direction = [harness.randn(*p.shape) * p.detach().std(correction=0).clamp(min=1e-2) for p in parameters]
    grads = torch.autograd.grad((o * grad_output).sum(), parameters)

    def loss(distance: float) -> Tensor:
        with torch.no_grad():
            for p, d in zip(parameters, direction):
                p.add_(distance * d)
            total = (harness.run(x, context, module) * grad_output).sum()
            for p, d in zip(parameters, direction):
                p.sub_(distance * d)
        return total

    got = torch.stack([(g * d).sum() for g, d in zip(grads, direction)]).sum()
    steps = (1e-6, 1e-7, 1e-8)  # a ReLU kink inside one step may lie outside a shorter one
    differences = [(loss(step) - loss(-step)) / (2 * step) for step in steps]
    quantity = "the derivative along a random direction of all parameters"
    return min((compare(quantity, got, d, slack=1e8) for d in differences), key=lambda r: r.rank)


def _input_derivative(harness: Harness, module: Any, x: Tensor, context: Tensor | None) -> Measurement:
    """The derivative of a loss along a random direction of the input, against finite differences."""
    leaf, direction = x.clone().requires_grad_(), harness.randn(*x.shape)
    o = harness.run(leaf, context, module)
    grad_output = harness.randn(*o.shape)
    (g,) = gradients(o, (leaf,), grad_output)
    differences = []
    with torch.no_grad():
        for step in (1e-5, 1e-6, 1e-7):  # a ReLU kink inside one step may lie outside a shorter one
            high, low = (harness.run(x + s * direction, context, module) for s in (step, -step))
            differences.append(((high - low) * grad_output).sum() / (2 * step))
    quantity = "the derivative along a random direction of the input"
    got = (g * direction).sum()
    return min((compare(quantity, got, d, slack=1e7) for d in differences), key=lambda r: r.rank)


def _depends(
    harness: Harness, module: Any, x: Tensor, context: Tensor | None, parameters: list[Tensor]
) -> bool:
    """Whether a change of these parameters changes the output."""
    with torch.no_grad():
        before = harness.run(x, context, module)
        for p in parameters:
            p.add_(0.1 * torch.randn(p.shape, dtype=torch.float64, generator=harness.random).to(p))
        return not torch.equal(harness.run(x, context, module), before)


def _no_grad_to_k(q, k, v, options):
    return (q, k.detach(), v), options


def _next_document(q, k, v, options):
    ids = options.pop("documents", None)
    if ids is not None:  # the first token of a document also attends to the document before it
        near = torch.roll(ids, 1, -1)
        allowed = (ids[:, :, None] == ids[:, None]) | (near[:, :, None] == ids[:, None])
        options["allowed"] = allowed[:, None]
    return (q, k, v), options


def _mixing(q, k, v, options):
    return (q, k + 1e-3 * k.mean(0, keepdim=True), v), options


def _free(harness: Harness) -> str | None:
    return "the target accepts only fixed lengths" if {"n", "m"} & set(harness.function.sizes) else None


def _forward_only(harness: Harness) -> str | None:
    """A missing gradient is a fault, unless the target declares "grad" as lacking."""
    if harness.target.declares("grad") is False:
        return "needs 'grad', which the target declares as lacking"
    return None


LAWS = (
    Law(
        "L47",
        "packed documents are isolated",
        "the output of a packed document = that of the document by itself, whatever the other documents contain",
        "documents, or a mask that is True within each document",
        {
            "function": Trial(
                documents_isolated,
                lambda harness: harness.space(
                    m=None,
                    n=(2, 3, 5, 7, 11),
                    by=tuple(x for x in ("documents", "mask") if harness.supports(x)),
                ),
                needs=("documents|mask",),
            ),
            "model": Trial(model_documents, each_length(2), needs=("documents",), unless=positions_out),
        },
        lambda: with_changed_call("documents leak into the next one", _next_document),
    ),
    Law(
        "L48",
        "batch rows are independent",
        "o_b depends only on row b, in values and in gradients",
        "evaluation, no batch statistics",
        {
            "function": Trial(rows_independent, call_space(b=(2, 3))),
            "model": Trial(model_rows_independent, each_length(rows=(2, 3))),
        },
        lambda: with_changed_call("batch rows mixed slightly", _mixing),
    ),
    Law(
        "L49",
        "left and right padding",
        "padding on the left = padding on the right = no padding",
        "a mask and n ≠ m; for a model the claim 'left padding'",
        {
            "function": Trial(
                side_of_padding,
                call_space(masked=False),
                needs=("mask", "n≠m"),
                unless=lambda harness: _free(harness),
            ),
            "model": Trial(
                model_side_of_padding,
                lambda harness: {"b": (1, 2, 3), "n": sequence_lengths(harness)[:5]},
                needs=("left padding",),
                unless=sequences,
            ),
        },
        lambda: with_changed_call("padding ignored", ignoring("allowed")),
    ),
    Law(
        "L50",
        "gradients reach every input",
        "∂⟨o, w⟩/∂x exists and is correct for x in q, k, v, bias (a model: for each parameter)",
        "every target that does not declare grad as lacking",
        {
            "function": Trial(
                every_gradient,
                lambda harness: harness.space(
                    n=(2, 3, 5, 7), bias=(False, True) if harness.supports("bias") else (False,)
                ),
                unless=_forward_only,
            ),
            "model": Trial(model_every_gradient, each_length(2), unless=_forward_only),
        },
        lambda: with_changed_call("k is detached", _no_grad_to_k),
    ),
)
