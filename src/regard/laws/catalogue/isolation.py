"""What must not mix: documents, batch rows, padding, gradients: L47 – L50."""

import math
from typing import Any

import torch
from torch import Tensor

from ..controls import wrapped
from ..harness import Lab
from ..law import Case, Law, Reading, Trial, compare, exactly, gradients, worst
from .masks import each_length, ignoring, lengths_in, positions_out, sequences
from .softmax import asked, spaced


def documents_isolated(lab: Lab, c: Case) -> Reading:
    q, k, v = lab.qkv(c)
    ids = (lab.rand(c.b, c.n) < 0.4).long().cumsum(-1)
    same = (ids[:, :, None] == ids[:, None])[:, None]
    options: dict[str, Any] = {"documents": ids} if c.by == "documents" else {"allowed": same}
    o = lab.attend(q, k, v, **options)
    row, place = int(lab.below(c.b)), int(lab.below(c.n))
    mine = (ids[row] == ids[row, place])[:, None]
    others_k, others_v = k.clone(), v.clone()
    others_k[row] = torch.where(mine, k[row], lab.randn(*k[row].shape) * 5.0)
    others_v[row] = torch.where(mine, v[row], lab.randn(*v[row].shape) * 5.0)
    changed = lab.attend(q, others_k, others_v, **options)
    inside = mine[:, 0]
    where = inside.nonzero()[:, 0]
    alone = lab.attend(*(x[row : row + 1, :, where] for x in (q, k, v)))
    return worst(
        compare("a document after the others were changed", changed[row][:, where], o[row][:, where]),
        compare("a packed document against the document alone", o[row][:, where], alone[0]),
    )


def model_documents(lab: Lab, c: Case) -> Reading:
    """Two packed documents: changing the first leaves the second as it was, and as it is alone."""
    x, cut = lab.sequence(c.b, c.n), int(lab.below(c.n, low=1))
    ids = (torch.arange(c.n, device=lab.device) >= cut).long().expand(c.b, c.n).contiguous()
    other = x.clone()
    other[:, :cut] = lab.others(x)[:, :cut]
    with torch.no_grad():
        o, changed = lab.run(x, documents=ids), lab.run(other, documents=ids)
        readings = [
            compare("document 2 after document 1 was changed", changed[:, cut:], o[:, cut:]),
            compare("document 1 packed against document 1 alone", o[:, :cut], lab.run(x[:, :cut])),
        ]
        if lab.takes("relative positions") or not lab.takes(
            "positions"
        ):  # else document 2 stands elsewhere alone
            readings.append(
                compare("document 2 packed against document 2 alone", o[:, cut:], lab.run(x[:, cut:]))
            )
    return worst(*readings)


def rows_independent(lab: Lab, c: Case) -> Reading:
    q, k, v = lab.qkv(c, learn=lab.takes("grad"))
    hiding = asked(lab, c)
    o, row = lab.attend(q, k, v, **hiding.options), int(lab.below(c.b))
    others = [x.detach().clone() for x in (q, k, v)]
    for x in others:
        new = 5.0 * lab.randn(*x.shape)
        new[row] = x[row]
        x.copy_(new)
    changed = lab.attend(*others, **hiding.options)
    readings = [compare(f"row {row} after the others were changed", changed[row], o[row])]
    if lab.takes("grad"):
        away = torch.arange(c.b, device=lab.device) != row
        for name, g in zip("qkv", gradients(o[row], (q, k, v), torch.ones_like(o[row]))):
            readings.append(exactly(f"row {row} has a gradient towards {name} of another row", g[away] == 0))
    return worst(*readings)


def model_rows_independent(lab: Lab, c: Case) -> Reading:
    x, context = lab.sequence(c.b, c.n), lab.context(c.b, c.n)
    row = int(lab.below(c.b))
    mine = torch.zeros(c.b, dtype=torch.bool, device=lab.device)
    mine[row] = True
    keep = mine.reshape(-1, *[1] * (x.dim() - 1))
    other = torch.where(keep, x, lab.others(x))
    if context is not None:
        kept = mine.reshape(-1, *[1] * (context.dim() - 1))
        changed_context = torch.where(kept, context, lab.others(context))
    else:
        changed_context = None
    learn = x.is_floating_point()
    if not learn:
        with torch.no_grad():
            return compare(
                f"row {row} after the others were changed",
                lab.run(other, changed_context)[row],
                lab.run(x, context)[row],
            )
    x = x.requires_grad_()
    o, changed = lab.run(x, context), lab.run(other.detach(), changed_context)
    (g,) = gradients(o[row], (x,), torch.ones_like(o[row]))
    return worst(
        compare(f"row {row} after the others were changed", changed[row], o[row]),
        exactly(f"row {row} has a gradient towards another row", g[~mine] == 0),
    )


def side_of_padding(lab: Lab, c: Case) -> Reading:
    """The keys of a row at its start and hidden after, or at its end and hidden before."""
    q, k, v = lab.qkv(c)
    pad = int(lab.below(4, low=1))
    junk = [lab.randn(*x.shape[:2], pad, x.shape[-1]) * 5.0 for x in (k, v)]
    m = k.shape[-2]
    real = torch.arange(m + pad, device=lab.device) < m
    want = lab.attend(q, k, v)
    right = lab.attend(
        q, *(torch.cat([x, y], 2) for x, y in zip((k, v), junk)), allowed=real[None, None, None]
    )
    left = lab.attend(
        q, *(torch.cat([y, x], 2) for x, y in zip((k, v), junk)), allowed=real.flip(0)[None, None, None]
    )
    return worst(compare("padded on the right", right, want), compare("padded on the left", left, want))


def model_side_of_padding(lab: Lab, c: Case) -> Reading:
    """Rows of several lengths, padded on the left to one: each as it is alone."""
    long = c.n + 2
    x, pads = lab.sequence(c.b, long), lab.below(3, c.b)
    pads[0] = 2
    padded = torch.cat(
        [torch.cat([lab.others(row[None, :p]), row[None, : long - p]], 1) for row, p in zip(x, pads.tolist())]
    )
    readings = []
    with torch.no_grad():
        context = lab.context(c.b, 3)
        together = lab.run(padded, context, pads=pads)
        for r, p in enumerate(pads.tolist()):
            alone = lab.run(padded[r : r + 1, p:], None if context is None else context[r : r + 1])[0]
            mine = together[r] if lab.takes("pooled") else together[r, p:]
            readings.append(compare(f"row {r} with {p} padded at its left against it alone", mine, alone))
    return worst(*readings)


def every_gradient(lab: Lab, c: Case) -> Reading:
    """All that enters gets a gradient, and the right one: the slope along a random direction."""
    q, k, v = lab.qkv(c, learn=True)
    inputs = {"q": q, "k": k, "v": v}
    options = {}
    if c.bias:
        inputs["bias"] = options["bias"] = lab.randn(c.h, c.n, k.shape[-2]).requires_grad_()
    o = lab.attend(q, k, v, **options)
    towards = lab.randn(*o.shape)
    if not o.requires_grad:
        return Reading(math.inf, "the output has no gradient at all")
    right = lab.formula(q, k, v, bias=options.get("bias"))
    got = torch.autograd.grad((o * towards).sum(), tuple(inputs.values()), allow_unused=True)
    want = torch.autograd.grad((right.o * towards.double()).sum(), tuple(inputs.values()))
    readings = []
    for name, g, w in zip(inputs, got, want):
        if g is None:
            return Reading(math.inf, f"no gradient reaches {name}")
        readings.append(compare(f"∂/∂{name}", g, w, lab.slack))
    return worst(*readings)


def model_every_gradient(lab: Lab, c: Case) -> Reading:
    """Every parameter that takes part gets a gradient; every position of the input too."""
    module = lab.fresh()
    x, context = lab.sequence(c.b, c.n), lab.context(c.b, c.n)
    x = x.requires_grad_() if x.is_floating_point() else x
    o = lab.run(x, context, module)
    loss = (o * lab.randn(*o.shape)).sum()
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    inputs = [*named.values(), *([x] if x.is_floating_point() else [])]
    grads = torch.autograd.grad(loss, inputs, allow_unused=True)
    broken = [name for name, g in zip(named, grads) if g is not None and not bool(torch.isfinite(g).all())]
    readings = [exactly(f"the gradient of {', '.join(broken)} is not finite", not broken)]
    missing = [name for name, g in zip(named, grads) if g is None]
    if missing and lab.model.of == "attention":
        readings.append(exactly(f"no gradient reaches {', '.join(missing)}", not missing))
    elif missing:
        moved = _moves(lab, module, x.detach(), context, [named[name] for name in missing])
        readings.append(
            exactly(f"no gradient reaches {', '.join(missing)}, on which the output depends", not moved)
        )
    if lab.dtype == torch.float64 and not missing:
        readings.append(_slope(lab, module, x.detach(), context))
    if x.is_floating_point():
        g = grads[-1]
        readings.append(exactly("no gradient reaches the input", g is not None and bool((g != 0).any())))
    return worst(*readings)


def _slope(lab: Lab, module: Any, x: Tensor, context: Tensor | None) -> Reading:
    """The gradients of all parameters along one random direction, against a difference of losses."""
    o = lab.run(x, context, module)
    towards = lab.randn(*o.shape)
    parameters = [p for p in module.parameters() if p.requires_grad]
    along = [lab.randn(*p.shape) * p.detach().std(correction=0).clamp(min=1e-2) for p in parameters]
    grads = torch.autograd.grad((o * towards).sum(), parameters)

    def loss(distance: float) -> Tensor:
        with torch.no_grad():
            for p, d in zip(parameters, along):
                p.add_(distance * d)
            total = (lab.run(x, context, module) * towards).sum()
            for p, d in zip(parameters, along):
                p.sub_(distance * d)
        return total

    got = torch.stack([(g * d).sum() for g, d in zip(grads, along)]).sum()
    steps = (1e-6, 1e-7, 1e-8)  # a kink of a ReLU inside one step is outside a shorter one
    slopes = [(loss(step) - loss(-step)) / (2 * step) for step in steps]
    what = "the slope along a random direction of all parameters"
    return min((compare(what, got, slope, slack=1e8) for slope in slopes), key=lambda r: r.rank)


def _moves(lab: Lab, module: Any, x: Tensor, context: Tensor | None, parameters: list[Tensor]) -> bool:
    """Whether the output depends on these parameters, gradients or not."""
    with torch.no_grad():
        before = lab.run(x, context, module)
        for p in parameters:
            p.add_(0.1 * torch.randn(p.shape, dtype=torch.float64, generator=lab.random).to(p))
        return not torch.equal(lab.run(x, context, module), before)


def _no_grad_to_k(q, k, v, asked):
    return (q, k.detach(), v), asked


def _next_document(q, k, v, asked):
    if (
        ids := asked.pop("documents", None)
    ) is not None:  # the last token of the document before is seen as well
        near = torch.roll(ids, 1, -1)
        shown = (ids[:, :, None] == ids[:, None]) | (near[:, :, None] == ids[:, None])
        asked["allowed"] = shown[:, None]
    return (q, k, v), asked


def _mixing(q, k, v, asked):
    return (q, k + 1e-3 * k.mean(0, keepdim=True), v), asked


def _free(lab: Lab) -> str | None:
    return "the target takes fixed lengths only" if {"n", "m"} & set(lab.function.sizes) else None


LAWS = (
    Law(
        "L47",
        "packed documents are isolated",
        "o of a document = o of the document alone, whatever its neighbours hold",
        "documents, or a mask that is True within each",
        {
            "function": Trial(
                documents_isolated,
                lambda lab: lab.space(
                    m=None, n=(2, 3, 5, 7, 11), by=tuple(x for x in ("documents", "mask") if lab.takes(x))
                ),
                needs=("documents|mask",),
            ),
            "model": Trial(model_documents, each_length(2), needs=("documents",), when=positions_out),
        },
        lambda: wrapped("documents leak into the next", _next_document),
    ),
    Law(
        "L48",
        "batch rows are independent",
        "o_b depends on row b alone, in values and in gradients",
        "evaluation, no batch statistics",
        {
            "function": Trial(rows_independent, spaced(b=(2, 3))),
            "model": Trial(model_rows_independent, each_length(rows=(2, 3))),
        },
        lambda: wrapped("rows mixed a little", _mixing),
    ),
    Law(
        "L49",
        "side and content of padding",
        "padded on the left = padded on the right = not padded",
        "a mask, n ≠ m; of a model: it claims 'left padding'",
        {
            "function": Trial(
                side_of_padding, spaced(hide=False), needs=("mask", "n≠m"), when=lambda lab: _free(lab)
            ),
            "model": Trial(
                model_side_of_padding,
                lambda lab: {"b": (1, 2, 3), "n": lengths_in(lab)[:5]},
                needs=("left padding",),
                when=sequences,
            ),
        },
        lambda: wrapped("padding ignored", ignoring("allowed")),
    ),
    Law(
        "L50",
        "every input gets its gradient",
        "∂⟨o, w⟩/∂x is there and right for x in q, k, v, bias (a model: each parameter)",
        "gives gradients",
        {
            "function": Trial(
                every_gradient,
                lambda lab: lab.space(n=(2, 3, 5, 7), bias=(False, True) if lab.takes("bias") else (False,)),
                needs=("grad",),
            ),
            "model": Trial(model_every_gradient, each_length(2), needs=("grad",)),
        },
        lambda: wrapped("the gradient is cut at k", _no_grad_to_k),
    ),
)
