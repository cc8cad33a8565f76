"""Compilers, modes and short floats: L55, L56, L60, L63."""

import torch
from torch import Tensor

from ... import reference
from ...engine.cpu import denormals
from ..controls import formula, small_attention
from ..harness import DTYPES, Lab
from ..law import Case, Law, Reading, Tolerance, Trial, bounded, compare, exactly, gradients, worst
from ..target import Function
from .softmax import asked, spaced


def compiled(lab: Lab, c: Case) -> Reading:
    torch._dynamo.reset()
    q, k, v = lab.qkv(c)
    hiding = asked(lab, c)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return lab.function.call(q, k, v, **hiding.options)

    eager = lab.attend(q, k, v, **hiding.options)
    with denormals.kept():
        return compare("compiled against eager", torch.compile(call)(q, k, v), eager)


def model_compiled(lab: Lab, c: Case) -> Reading:
    torch._dynamo.reset()
    x, context = lab.sequence(c.b, c.n), lab.context(c.b, c.n)
    module = lab.module()
    with torch.no_grad(), denormals.kept():
        given = (x,) if context is None else (x, context)
        return compare(
            "compiled against eager", torch.compile(lab.model.call)(module, *given), lab.run(x, context)
        )


def same_in_every_mode(lab: Lab, c: Case) -> Reading:
    """With gradients, without, and under inference mode."""
    q, k, v = lab.qkv(c)
    hiding = asked(lab, c)
    o = lab.attend(q, k, v, **hiding.options)
    with torch.no_grad():
        without = lab.attend(q, k, v, **hiding.options)
    readings = [compare("outputs under no_grad", without, o)]
    if lab.takes("grad"):
        learning = lab.attend(*(x.clone().requires_grad_() for x in (q, k, v)), **hiding.options)
        readings.append(compare("outputs with gradients asked for", learning, o))
    with torch.inference_mode():
        readings.append(
            compare("outputs under inference_mode", lab.attend(q, k, v, **hiding.options).clone(), o)
        )
    if lab.takes("dropout"):
        readings.append(compare("dropout_p=0", lab.attend(q, k, v, dropout_p=0.0, **hiding.options), o))
    return worst(*readings)


def model_same_in_every_mode(lab: Lab, c: Case) -> Reading:
    """Evaluation = no_grad = training, with every dropout set to 0."""
    x, context = lab.sequence(c.b, c.n), lab.context(c.b, c.n)
    module = lab.fresh()
    found = _without_dropout(module)
    o = lab.run(x, context, module.eval())
    with torch.no_grad():
        frozen = lab.run(x, context, module)
        again = lab.run(x, context, module)
    readings = [compare("outputs under no_grad", frozen, o), compare("evaluation twice", again, frozen)]
    kept = lab.run(x, context)  # the module as it came: in evaluation its dropout sleeps
    readings.append(compare("evaluation with dropout asleep", kept, o))
    batch = any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in module.modules())
    if not batch and (found or not lab.takes("dropout")):
        train = lab.run(x, context, module.train())
        readings.append(compare("training without dropout" if found else "training", train, frozen))
    return worst(*readings)


def _without_dropout(module: torch.nn.Module) -> bool:
    """Every probability that a module holds under a dropout's name set to 0."""
    found = False
    for m in module.modules():
        for name in (
            "p",
            "dropout",
            "dropout_p",
            "attention_dropout",
            "attn_dropout",
            "dropout_rate",
            "dropout_prob",
        ):
            if isinstance(getattr(m, name, None), float) and (name != "p" or "Dropout" in type(m).__name__):
                setattr(m, name, 0.0)
                found = True
        if declared := getattr(m, "spec", None):
            object.__setattr__(m, "spec", _undropped(declared))
    return found


def _undropped(declared):
    import dataclasses

    if hasattr(declared, "dropout"):
        return dataclasses.replace(declared, dropout=0.0)
    return declared


def short_floats(lab: Lab, c: Case) -> Reading:
    """max|fast − ref| ≤ 2·max|plain − ref| + 4 ulp of max|ref|, plain being ordinary PyTorch in the same dtype.

    One order of its sums may be exact by luck, so plain is the worst of three.
    """
    dtype = DTYPES[c.dtype]
    q, k, v = (x.to(dtype) for x in lab.qkv(c))
    q = (q.float() * c.size).to(dtype)
    hiding = asked(lab, c)
    if c.size > 10:  # unscaled products pass 65504, scaled ones do not: nothing to compare, but no infinity
        o = lab.attend(q, (k.float() * c.size).to(dtype), v, **hiding.options)
        finite = torch.isfinite(o)
        return exactly(f"{c.dtype}: {int((~finite).sum())} of {o.numel()} outputs not finite", finite)
    ref = lab.formula(q, k, v, hiding.allowed).o
    plain = [o.double() for o in plainly(q, k, v, hiding.allowed)]
    fast = lab.attend(q, k, v, **hiding.options).double()
    bits = torch.finfo(dtype).eps * float(ref.abs().max())
    far, near = float((fast - ref).abs().max()), max(float((o - ref).abs().max()) for o in plain)
    text = f"{c.dtype}: off by {far:.3g}, ordinary PyTorch by {near:.3g}"
    return bounded(text, far - 2 * near - 4 * bits) if far == far else Reading(far, f"{c.dtype}: NaN")


def plainly(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> list[Tensor]:
    """The formula step by step in the dtype itself: scaled before the product, after it, and the sums backwards."""
    k, v = (reference.repeat_heads(x, q.shape[1]) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    back = q.flip(-1) @ k.flip(-1).mT  # the terms of q·k from the last to the first
    outs = []
    for scores in ((q * scale) @ k.mT, (q @ k.mT) * scale, back * scale):
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        outs.append(scores.softmax(-1) @ v)
    return outs


def short_gradients(lab: Lab, c: Case) -> Reading:
    reading = short_floats(lab, c)
    if not lab.takes("grad") or not c.grad or c.dtype == "float32" or c.size > 10:
        return reading  # a fused float32 backward computes its weights again, and rounds them again
    dtype = DTYPES[c.dtype]
    lab.begin(c)
    q, k, v = (x.to(dtype).requires_grad_() for x in lab.qkv(c))
    towards = lab.randn(*q.shape[:-1], v.shape[-1])
    wanted = gradients(lab.formula(q, k, v).o, (q, k, v), towards)
    plain = [gradients(o, (q, k, v), towards) for o in plainly(q, k, v, None)]
    fast = gradients(lab.attend(q, k, v), (q, k, v), towards)
    readings = [reading]
    for name, f, w, *orders in zip("qkv", fast, wanted, *plain):
        f, w = f.double(), w.double()
        ulps = torch.finfo(dtype).eps * float(w.abs().max())
        far, near = float((f - w).abs().max()), max(float((p.double() - w).abs().max()) for p in orders)
        readings.append(
            bounded(
                f"{c.dtype}: ∂/∂{name} off by {far:.3g}, ordinary PyTorch by {near:.3g}",
                far - 2 * near - 4 * ulps,
            )
        )
    return worst(*readings)


def _short(lab: Lab) -> tuple[str, ...]:
    return tuple(name for name in ("float32", "bfloat16", "float16") if lab.takes(name))


def dropout_mean(lab: Lab, c: Case) -> Reading:
    """Weights are dropped with p and the rest divided by 1 − p: the mean over draws is the output without."""
    q, k, v = lab.qkv(c)
    o = lab.attend(q, k, v).double()
    draws = 4000
    torch.manual_seed(c.seed)
    many = (x.expand(draws, *x.shape[1:]).contiguous() for x in (q[:1], k[:1], v[:1]))
    got = lab.attend(*many, dropout_p=c.p).double()
    error = (got.mean(0) - o[0]).abs() / (got.std(0) / draws**0.5).clamp(min=1e-9)
    a = lab.weights(q, k).double()
    variance = c.p / (1 - c.p) * (a[:1] ** 2) @ (v[:1].double() ** 2)
    ratio = got.var(0) / variance[0].clamp(min=1e-12)
    return worst(
        bounded(
            f"the mean over draws is {float(error.max()):.1f} standard errors from the output", error - 6.0
        ),
        bounded("the variance over draws is not p/(1 − p) Σ a²v²", (ratio.log().abs() - 0.35)),
    )


def _overflowing() -> Function:
    """Scores summed in float16 before they are scaled, and clipped."""
    right = formula()

    def call(q, k, v, **asked):
        q, k = (x.clamp(-4, 4) if x.dtype == torch.float16 else x for x in (q, k))
        return right.call(q, k, v, **asked)

    return Function("float16 clipped", call, claims=right.claims | {"float16"}, alignment="bottom-right")


def _unscaled_dropout() -> Function:
    right = formula()

    def call(q, k, v, *, dropout_p=0.0, **asked):
        o, weights = right.call(q, k, v, weights=True, **asked)
        return (weights * (torch.rand_like(weights) > dropout_p)) @ v if dropout_p else o

    return Function(
        "dropout without 1/(1 − p)", call, claims=(right.claims - {"weights", "lse"}) | {"dropout"}
    )


def _traced_otherwise() -> Function:
    def call(q, k, v):
        factor = 1.01 if torch.compiler.is_compiling() else 1.0
        scores = factor * q @ k.mT * q.shape[-1] ** -0.5
        return scores.softmax(-1) @ v

    return Function(
        "another scale when compiled", call, claims={"compile", "float64", "float32", "n≠m", "d_v≠d_k"}
    )


LAWS = (
    Law(
        "L55",
        "compiled equals eager",
        "torch.compile(f)(x) = f(x)",
        "it claims to compile",
        {
            "function": Trial(
                compiled,
                lambda lab: lab.space(b=(2,), h=(2,), n=(7,), m=None, d_k=(8,), d_v=None, hide=lab.hidings()),
                needs=("compile",),
                few=True,
                seconds=40.0,
            ),
            "model": Trial(
                model_compiled,
                lambda lab: {"b": (2,), "n": (min(5, lab.model.longest),)},
                needs=("compile",),
                few=True,
                seconds=40.0,
            ),
        },
        _traced_otherwise,
        Tolerance(1e-10, 1e-4),
    ),
    Law(
        "L56",
        "train = eval = no_grad",
        "outputs are the same with gradients, without, and in training without dropout",
        "dropout set to 0; no batch statistics",
        {
            "function": Trial(same_in_every_mode, spaced()),
            "model": Trial(
                model_same_in_every_mode,
                lambda lab: {"b": (1, 2, 3), "n": tuple(n for n in (2, 3, 5, 7) if n <= lab.model.longest)},
            ),
        },
        lambda: small_attention("dropout awake in evaluation", wrong="drops in evaluation"),
    ),
    Law(
        "L60",
        "error in 16 bits",
        "max|fast − ref| ≤ 2·max|plain − ref| + 4 ulp of max|ref|",
        "float32, bfloat16 or float16; plain is ordinary PyTorch in the same dtype",
        {
            "function": Trial(
                short_gradients,
                lambda lab: lab.space(
                    n=(7, 16),
                    m=None,
                    d_k=(5, 16, 64),
                    d_v=None,
                    h=(1, 2),
                    hide=lab.hidings(),
                    dtype=_short(lab),
                    size=(1.0, 4.0, 100.0),
                    grad=(False, True),
                ),
                needs=("float32|bfloat16|float16",),
            )
        },
        _overflowing,
        Tolerance(0.0, 0.0, 0.0),
    ),
    Law(
        "L63",
        "dropout keeps the mean",
        "E o = o without dropout; Var o = p/(1 − p) Σ_j a_j² v_j²",
        "dropout of weights, the rest divided by 1 − p; sampled",
        {
            "function": Trial(
                dropout_mean,
                lambda lab: lab.space(b=(1,), h=(1, 2), n=(3,), m=None, d_k=(5,), d_v=None, p=(0.2, 0.5)),
                needs=("dropout",),
                few=True,
            )
        },
        _unscaled_dropout,
        Tolerance(0.0, 0.0, 0.0),
    ),
)
