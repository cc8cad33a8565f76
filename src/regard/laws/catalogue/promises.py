"""Promises: asked of targets that claim them, only observed of others."""

import math
from typing import Any

import torch
from torch import Tensor

from ... import reference
from ..controls import CLAIMS, formula, weighing, wrapped
from ..harness import Lab, first_line
from ..law import Case, Law, Reading, Tolerance, Trial, compare, exactly, gradients, together, worst
from ..target import Function
from .masks import hide_end, lengths_in, sequences
from .softmax import asked, spaced

POISON = {"NaN": math.nan, "infinity": math.inf, "−infinity": -math.inf}


def hidden_poison(lab: Lab, c: Case) -> Reading:
    """A key that no query may see holds NaN or infinity, in k, in v or in both."""
    q, k, v = lab.qkv(c)
    m = k.shape[-2]
    l = lab.below(m, c.b, low=1) if m > 1 else torch.ones(c.b, dtype=torch.long, device=lab.device)
    past = ~(torch.arange(m, device=lab.device) < l[:, None])[:, None, :, None]
    options = hide_end(lab, c.by, l, m).options
    want = lab.attend(q, k, v, **options)
    bad_k = k.masked_fill(past, POISON[c.poison]) if "k" in c.into else k
    bad_v = v.masked_fill(past, POISON[c.poison]) if "v" in c.into else v
    if not lab.takes("grad"):
        return compare(
            f"outputs with {c.poison} in hidden {c.into}", lab.attend(q, bad_k, bad_v, **options), want
        )
    leaves = (q.clone().requires_grad_(), bad_k.clone().requires_grad_(), bad_v.clone().requires_grad_())
    o = lab.attend(*leaves, **options)
    right = (q.clone().requires_grad_(), k.clone().requires_grad_(), v.clone().requires_grad_())
    towards = lab.randn(*o.shape)
    got, wanted = gradients(o, leaves, towards), gradients(lab.attend(*right, **options), right, towards)
    return worst(
        compare(f"outputs with {c.poison} in hidden {c.into}", o, want),
        *(
            compare(f"∂/∂{x} with {c.poison} in hidden {c.into}", g, w, lab.slack)
            for x, g, w in zip("qkv", got, wanted)
        ),
    )


def model_hidden_poison(lab: Lab, c: Case) -> Reading:
    x, context = lab.sequence(c.b, c.n), lab.context(c.b, c.n)
    l = lab.below(c.n, c.b, low=1)
    real = (torch.arange(c.n, device=lab.device) < l[:, None])[..., None]
    with torch.no_grad():
        want = lab.run(x, context, lengths=l)
        got = lab.run(torch.where(real, x, POISON[c.poison]), context, lengths=l)
    if lab.takes("pooled"):
        return compare(f"outputs with {c.poison} in the padding", got, want)
    got, want = (torch.where(real, y, 0.0) for y in (got, want))
    return compare(f"real outputs with {c.poison} in the padding", got, want)


def _vectors(lab: Lab) -> str | None:
    return None if lab.model.vocab is None and lab.model.image is None else "its input cannot hold NaN"


def empty_row(lab: Lab, c: Case) -> Reading:
    """A query that may look nowhere: zeros, finite gradients, and the others as if it were not there."""
    q, k, v = lab.qkv(c, learn=lab.takes("grad"))
    m = k.shape[-2]
    if c.by == "lengths":
        l = lab.below(m + 1, c.b)
        l[int(lab.below(c.b))] = 0
        allowed = hide_end(lab, "mask", l, m).allowed
        assert allowed is not None
        allowed, options = allowed.expand(c.b, c.h, c.n, m), {"lengths": l}
    else:
        allowed = lab.rand(c.b, c.h, c.n, m) < 0.6
        allowed[:, :, int(lab.below(c.n))] = False
        options = {"allowed": allowed}
    o = lab.attend(q, k, v, **options)
    nowhere = ~allowed.any(-1)
    readings = [_nowhere(o[nowhere], v), *_elsewhere(lab, q, k, v, o, allowed)]
    return worst(*readings)


def _nowhere(o: Tensor, v: Tensor) -> Reading:
    """What stands where zeros must."""
    o = o.detach()
    if bool(o.isnan().any()):
        return Reading(math.nan, f"NaN in {int(o.isnan().sum())} of {o.numel()} outputs of empty rows")
    if bool((o == 0).all()):
        return Reading(0.0, "outputs of empty rows are zeros")
    mean = v.detach().mean(-2)
    alike = bool(
        torch.isclose(o[:, None], mean.reshape(1, -1, mean.shape[-1]), atol=1e-6).all(-1).any(-1).all()
    )
    what = "the mean of the forbidden values" if alike else f"up to {float(o.abs().max()):.3g}"
    return Reading(float(o.abs().max()), f"outputs of empty rows are {what}, not zeros")


def _elsewhere(lab: Lab, q: Tensor, k: Tensor, v: Tensor, o: Tensor, allowed: Tensor) -> list[Reading]:
    right = lab.formula(q, k, v, allowed)
    somewhere = allowed.any(-1)
    readings = [compare("outputs of the other rows", o[somewhere], right.o[somewhere])]
    if lab.takes("grad"):
        towards = lab.randn(*o.shape)
        got, want = gradients(o, (q, k, v), towards), gradients(right.o, (q, k, v), towards)
        readings += [
            compare(f"∂/∂{x} beside an empty row", g, w, lab.slack) for x, g, w in zip("qkv", got, want)
        ]
    return readings


def model_empty_row(lab: Lab, c: Case) -> Reading:
    """One row is padding alone: the others are as ever, gradients too; its own finite, each position by itself."""
    module, x = lab.fresh(), lab.sequence(c.b, c.n)
    context = lab.context(c.b, c.n)
    l = lab.below(c.n + 1, c.b, low=1)
    with torch.no_grad():
        want = lab.run(x[1:], None if context is None else context[1:], module, lengths=l[1:])
    l[0] = 0
    options: dict[str, Any] = {"lengths": l, **({"weights": True} if c.weights else {})}
    real = (torch.arange(c.n, device=lab.device) < l[1:, None])[..., None]

    def others(o: Tensor) -> Tensor:
        return o if lab.takes("pooled") else torch.where(real, o, 0.0)

    o = lab.run(x, context, module, **options)
    with torch.no_grad():  # another way, in several libraries
        frozen = lab.run(x, context, module, **options)
    readings = []
    for out, mode in ((o, ""), (frozen, " under no_grad")):
        readings += [
            _finite(f"a row of padding alone{mode}", out[0].detach()),
            compare(f"the other rows beside one of padding alone{mode}", others(out[1:]), others(want)),
        ]
    if lab.takes("grad"):
        readings.append(_nan_gradients(module, others(o[1:])))
    if c.n > 1 and not lab.takes("pooled"):
        other = x.clone()
        other[0, -1] = lab.others(x)[0, -1]
        with torch.no_grad():
            moved = lab.run(other, context, module, **options)
        what = "a position that may look nowhere, after a forbidden one was changed"
        readings.append(compare(what, moved[0, 0], frozen[0, 0]))
    return together(*readings)


def _finite(whose: str, o: Tensor) -> Reading:
    ok = bool(torch.isfinite(o).all())
    return Reading(0.0 if ok else math.nan, f"{whose}: NaN in {int(o.isnan().sum())} of {o.numel()} outputs")


def _nan_gradients(module: Any, o: Tensor) -> Reading:
    """The gradients of a loss over these outputs."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    grads = torch.autograd.grad(o.square().sum(), parameters, allow_unused=True)
    broken = sum(int(not bool(torch.isfinite(g).all())) for g in grads if g is not None)
    what = f"a loss over the other rows alone gives {broken} of {len(parameters)} parameters NaN gradients"
    return Reading(math.nan if broken else 0.0, what)


def double_backward(lab: Lab, c: Case) -> Reading:
    leaves = lab.qkv(c, learn=True)
    towards = lab.randn(*leaves[0].shape[:-1], leaves[2].shape[-1])

    def second(o: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad((o * towards).sum(), leaves, create_graph=True)
        return torch.autograd.grad(torch.stack([(g**2).sum() for g in first]).sum(), leaves)

    try:
        got, want = second(lab.attend(*leaves)), second(lab.formula(*leaves).o)
    except RuntimeError as e:  # what autograd says where there is no second derivative
        return Reading(math.inf, f"the gradient cannot be differentiated again: {first_line(e)}")
    return worst(
        *(
            compare(f"second derivatives towards {x}", g, w, 10 * lab.slack)
            for x, g, w in zip("qkv", got, want)
        )
    )


def determinism(lab: Lab, c: Case) -> Reading:
    leaves = lab.qkv(c, learn=lab.takes("grad"))
    hiding, outs, grads = asked(lab, c), [], []
    towards = lab.randn(*leaves[0].shape[:-1], leaves[2].shape[-1])
    for _ in range(4):
        o = lab.attend(*leaves, **hiding.options)
        outs.append(o.detach().clone())
        if lab.takes("grad"):
            grads.append(gradients(o, leaves, towards))
    far = max(float((o - outs[0]).abs().max()) for o in outs)
    readings = [
        exactly(f"outputs of equal calls differ by {far:.2g}", all(torch.equal(o, outs[0]) for o in outs))
    ]
    for name, each in zip("qkv", zip(*grads)):
        readings.append(
            exactly(f"∂/∂{name} of equal calls differ", all(torch.equal(g, each[0]) for g in each))
        )
    return worst(*readings)


def model_determinism(lab: Lab, c: Case) -> Reading:
    x, context = lab.sequence(c.b, c.n), lab.context(c.b, c.n)
    with torch.no_grad():
        outs = [lab.run(x, context) for _ in range(3)]
    return exactly("outputs of equal calls differ", all(torch.equal(o, outs[0]) for o in outs))


def by_the_formula(lab: Lab, c: Case) -> Reading:
    dtype = torch.float64 if c.get("double") else lab.dtype
    q, k, v = (x.to(dtype) for x in lab.qkv(c))
    o = lab.attend(q, k, v)
    return compare(f"{c.n} queries over {k.shape[-2]} keys against the formula", o, lab.formula(q, k, v).o)


def mask_and_causal(lab: Lab, c: Case) -> Reading:
    q, k, v = lab.qkv(c)
    past = torch.ones(c.n, c.n, dtype=torch.bool, device=lab.device).tril()
    allowed = (lab.rand(c.n, c.n) < 0.6) | torch.eye(c.n, dtype=torch.bool, device=lab.device)
    o = lab.attend(q, k, v, allowed=allowed, causal=True)
    return compare("a mask together with causal", o, lab.formula(q, k, v, allowed & past).o)


def _poisoned(by: str):
    return lambda lab: lab.space(n=(2, 3, 5), by=(by,), poison=tuple(POISON), into=("v", "k", "k, v"))


def _emptied(lab: Lab):
    return lab.space(by=tuple(x for x in ("mask", "lengths") if lab.takes(x)))


def _plain_softmax(scores: Tensor, allowed: Tensor) -> Tensor:
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1)


def _noisy() -> Function:
    right = formula()

    def call(q, k, v, **asked):
        o = right.call(q, k, v, **asked)
        return (
            tuple(x + 1e-15 * torch.rand_like(x) for x in o)
            if isinstance(o, tuple)
            else o + 1e-15 * torch.rand_like(o)
        )

    return Function("a little noise", call, claims=right.claims, alignment="bottom-right")


class _Once(torch.autograd.Function):
    """The gradient of attention, itself cut off from the graph."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return reference.attend(q, k, v).o

    @staticmethod
    def backward(ctx, towards):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            return torch.autograd.grad(reference.attend(*leaves).o, leaves, towards.detach())


def _single_backward() -> Function:
    claims = {"float64", "float32", "grad", "double backward", "n≠m", "d_v≠d_k"}
    return Function("one backward pass", lambda q, k, v: _Once.apply(q, k, v), claims=claims)


def _narrow(claim: str, change) -> Function:
    return wrapped(f"wrong where {claim}", change, *CLAIMS)


def _cut_keys(q, k, v, asked):
    n, m = q.shape[-2], k.shape[-2]
    return ((q, k[..., :n, :], v[..., :n, :]) if m > n and not asked else (q, k, v)), asked


def _as_float32(q, k, v, asked):
    return tuple(x.float().double() if x.dtype == torch.float64 else x for x in (q, k, v)), asked


def _either(q, k, v, asked):
    if asked.get("causal") and asked.get("allowed") is not None:
        asked.pop("causal")
    return (q, k, v), asked


def _promise(number, name, formula, word, on, control, tolerance=None) -> Law:
    return Law(
        number, name, formula, "promised, or only observed", on, control, tolerance or Tolerance(), word
    )


LAWS = (
    _promise(
        "P01",
        "NaN under a mask",
        "NaN or ±∞ in a key or value that a mask hides from all changes nothing",
        "nan under mask",
        {"function": Trial(hidden_poison, _poisoned("mask"), needs=("mask",))},
        lambda: formula().having("nan under mask"),
    ),
    _promise(
        "P02",
        "NaN past the lengths",
        "NaN or ±∞ in padding changes nothing",
        "nan under lengths",
        {
            "function": Trial(hidden_poison, _poisoned("lengths"), needs=("lengths",)),
            "model": Trial(
                model_hidden_poison,
                lambda lab: {"b": (1, 2), "n": lengths_in(lab, 2), "poison": tuple(POISON)},
                needs=("lengths",),
                when=_vectors,
            ),
        },
        lambda: formula().having("nan under lengths"),
    ),
    _promise(
        "P03",
        "empty row",
        "a query that may look nowhere: o = 0, finite gradients, no one else disturbed",
        "empty rows",
        {
            "function": Trial(empty_row, _emptied, needs=("mask|lengths",)),
            "model": Trial(
                model_empty_row,
                lambda lab: {
                    "b": (2, 3),
                    "n": lengths_in(lab),
                    "weights": (True, False) if lab.takes("weights") else (False,),
                },
                needs=("lengths",),
                when=sequences,
            ),
        },
        lambda: weighing("NaN on an empty row", _plain_softmax).having("empty rows"),
    ),
    _promise(
        "P04",
        "double backward",
        "second derivatives are there and right",
        "double backward",
        {"function": Trial(double_backward, spaced(hide=False, n=(2, 3, 5)), needs=("grad",))},
        _single_backward,
    ),
    _promise(
        "P05",
        "bitwise determinism",
        "equal calls give equal bits, gradients too",
        "deterministic",
        {
            "function": Trial(determinism, spaced(n=(2, 7, 33))),
            "model": Trial(model_determinism, lambda lab: {"b": (1, 2, 3), "n": lengths_in(lab)}),
        },
        _noisy,
    ),
    _promise(
        "P06",
        "grouped heads",
        "fewer key/value heads than query heads",
        "grouped",
        {
            "function": Trial(
                by_the_formula,
                lambda lab: lab.space(h=(2, 4, 6), h_kv=(1, 2, 3)),
                fits=lambda c: c.h != c.h_kv,
            )
        },
        lambda: _narrow(
            "heads are grouped",
            lambda q, k, v, asked: (
                (q, *(x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x in (k, v))),
                asked,
            ),
        ),
    ),
    _promise(
        "P07",
        "n ≠ m",
        "another number of keys than of queries",
        "n≠m",
        {
            "function": Trial(
                by_the_formula, lambda lab: lab.space(m=(1, 2, 3, 5, 7, 11)), fits=lambda c: c.n != c.m
            )
        },
        lambda: _narrow("m > n", _cut_keys),
    ),
    _promise(
        "P08",
        "d_v ≠ d_k",
        "values of another width than keys",
        "d_v≠d_k",
        {
            "function": Trial(
                by_the_formula, lambda lab: lab.space(d_v=(1, 2, 3, 5, 8)), fits=lambda c: c.d_k != c.d_v
            )
        },
        lambda: _narrow(
            "d_v ≠ d_k",
            lambda q, k, v, asked: ((q, k * (1.0 if v.shape[-1] == k.shape[-1] else 1.1), v), asked),
        ),
    ),
    _promise(
        "P09",
        "float64",
        "as precise as float64 is",
        "float64",
        {"function": Trial(by_the_formula, spaced(hide=False, double=(True,)))},
        lambda: _narrow("float64", _as_float32),
        Tolerance(1e-12, 1e-12, 1e-12),
    ),
    _promise(
        "P10",
        "mask together with causal",
        "both at once: the pairs that both allow",
        "mask and causal",
        {
            "function": Trial(
                mask_and_causal, spaced(hide=False, m=None, n=(2, 3, 5, 7)), needs=("mask", "causal")
            )
        },
        lambda: wrapped("a mask that switches causal off", _either),
    ),
)
