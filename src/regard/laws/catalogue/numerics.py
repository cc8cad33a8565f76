"""torch.compile, training and evaluation modes, low precision, dropout: L55, L56, L60, L63."""

import torch
from torch import Tensor

from ... import compat, reference
from ..controls import reference_function, small_attention
from ..harness import DTYPES, Harness
from ..law import Case, Law, Tolerance, Trial
from ..measurement import Measurement, compare, excess, gradients, worst
from ..target import Function
from .masks import sequence_lengths
from .softmax import call_space, case_mask

MODE_RUNS = 4  # in training mode: they differ if any dropout is left
BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)


def compiled(harness: Harness, c: Case) -> Measurement:
    torch.compiler.reset()
    q, k, v = harness.qkv(c)
    masking = case_mask(harness, c)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return harness.function.call(q, k, v, **masking.options)

    eager = harness.attend(q, k, v, **masking.options)
    with compat.denormals_preserved():
        return compare("compiled outputs against eager ones", torch.compile(call)(q, k, v), eager)


def model_compiled(harness: Harness, c: Case) -> Measurement:
    torch.compiler.reset()
    x, context = harness.sequence(c.b, c.n), harness.context(c.b, c.n)
    module = harness.module()
    with torch.no_grad(), compat.denormals_preserved():
        inputs = (x,) if context is None else (x, context)
        return compare(
            "compiled outputs against eager ones",
            torch.compile(harness.model.call)(module, *inputs),
            harness.run(x, context),
        )


def same_in_every_mode(harness: Harness, c: Case) -> Measurement:
    """With gradients, under no_grad and under inference_mode."""
    q, k, v = harness.qkv(c)
    masking = case_mask(harness, c)
    o = harness.attend(q, k, v, **masking.options)
    with torch.no_grad():
        no_grad = harness.attend(q, k, v, **masking.options)
    measurements = [compare("outputs under no_grad", no_grad, o)]
    if harness.supports("grad"):
        tracked = harness.attend(*(x.clone().requires_grad_() for x in (q, k, v)), **masking.options)
        measurements.append(compare("outputs of inputs that require grad", tracked, o))
    with torch.inference_mode():
        measurements.append(
            compare("outputs under inference_mode", harness.attend(q, k, v, **masking.options).clone(), o)
        )
    if harness.supports("dropout"):
        measurements.append(
            compare("outputs with dropout_p=0", harness.attend(q, k, v, dropout_p=0.0, **masking.options), o)
        )
    if (call_in_eval := harness.function.dropout_in_eval) is not None:
        undropped = call_in_eval(q, k, v, dropout_p=0.5, **masking.options)
        measurements.append(compare("outputs with dropout_p=0.5 outside training", undropped, o))
    return worst(*measurements)


def model_same_in_every_mode(harness: Harness, c: Case) -> Measurement:
    """Evaluation, no_grad and training mode agree when every dropout probability is 0."""
    x, context = harness.sequence(c.b, c.n), harness.context(c.b, c.n)
    module = harness.module_copy()
    had_dropout = _disable_dropout(module)
    o = harness.run(x, context, module.eval())
    with torch.no_grad():
        no_grad = harness.run(x, context, module)
        repeated = harness.run(x, context, module)
    measurements = [
        compare("outputs under no_grad", no_grad, o),
        compare("a repeated evaluation", repeated, no_grad),
    ]
    original = harness.run(x, context)  # the unchanged module: in evaluation its dropout must be inactive
    measurements.append(compare("evaluation of the module with its dropout", original, o))
    batch = any(isinstance(m, BATCH_NORMS) for m in module.modules())
    if not batch and (had_dropout or not harness.supports("dropout")):
        train, *others = (harness.run(x, context, module.train()) for _ in range(MODE_RUNS))
        words = "outputs in training mode without dropout" if had_dropout else "outputs in training mode"
        if all(torch.equal(train, other) for other in others):  # else there is dropout of another name
            measurements.append(compare(words, train, no_grad))
    return worst(*measurements)


def _disable_dropout(module: torch.nn.Module) -> bool:
    """Set every dropout probability of a module to 0; whether there was one."""
    had_dropout = False
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
                had_dropout = True
        if declared := getattr(m, "spec", None):
            object.__setattr__(m, "spec", _spec_without_dropout(declared))
    return had_dropout


def _spec_without_dropout(declared):
    import dataclasses

    if hasattr(declared, "dropout"):
        return dataclasses.replace(declared, dropout=0.0)
    return declared


def low_precision_outputs(harness: Harness, c: Case) -> Measurement:
    """max|fast − ref| ≤ 2·max|plain − ref| + 4 ulp of max|ref|, plain being ordinary PyTorch in the same dtype.

    One order of summation may be exact by chance, so plain is the worst of three.
    """
    dtype = DTYPES[c.dtype]
    q, k, v = (x.to(dtype) for x in harness.qkv(c))
    q = (q.float() * c.size).to(dtype)
    masking = case_mask(harness, c)
    ref = harness.reference(q, k, v, masking.allowed).o
    plain = [o.double() for o in plain_pytorch(q, k, v, masking.allowed)]
    fast = harness.attend(q, k, v, **masking.options).double()
    ulp = torch.finfo(dtype).eps * float(ref.abs().max())
    far, near = float((fast - ref).abs().max()), max(float((o - ref).abs().max()) for o in plain)
    text = f"{c.dtype}: error {far:.3g}, plain PyTorch has {near:.3g}"
    return excess(text, far - 2 * near - 4 * ulp) if far == far else Measurement(far, f"{c.dtype}: NaN")


def plain_pytorch(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> list[Tensor]:
    """Attention in the dtype itself: scaled before the product, scaled after it, and with reversed summation."""
    k, v = (reference.repeat_heads(x, q.shape[1]) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    back = q.flip(-1) @ k.flip(-1).mT  # the terms of q·k in reversed order
    outs = []
    for scores in ((q * scale) @ k.mT, (q @ k.mT) * scale, back * scale):
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        outs.append(scores.softmax(-1) @ v)
    return outs


def low_precision(harness: Harness, c: Case) -> Measurement:
    measurement = low_precision_outputs(harness, c)
    if not harness.supports("grad") or not c.grad or c.dtype == "float32":
        return measurement  # a fused float32 backward recomputes its weights, with another rounding
    dtype = DTYPES[c.dtype]
    harness.seed(c)
    q, k, v = (x.to(dtype).requires_grad_() for x in harness.qkv(c))
    grad_output = harness.randn(*q.shape[:-1], v.shape[-1])
    wanted = gradients(harness.reference(q, k, v).o, (q, k, v), grad_output)
    plain = [gradients(o, (q, k, v), grad_output) for o in plain_pytorch(q, k, v, None)]
    fast = gradients(harness.attend(q, k, v), (q, k, v), grad_output)
    measurements = [measurement]
    for name, f, w, *orders in zip("qkv", fast, wanted, *plain):
        f, w = f.double(), w.double()
        ulp = torch.finfo(dtype).eps * float(w.abs().max())
        far, near = float((f - w).abs().max()), max(float((p.double() - w).abs().max()) for p in orders)
        measurements.append(
            excess(
                f"{c.dtype}: ∂/∂{name} error {far:.3g}, plain PyTorch has {near:.3g}",
                far - 2 * near - 4 * ulp,
            )
        )
    return worst(*measurements)


def _dtypes(harness: Harness) -> tuple[str, ...]:
    return tuple(name for name in ("float32", "bfloat16", "float16") if harness.supports(name))


def dropout_mean(harness: Harness, c: Case) -> Measurement:
    """Weights are dropped with probability p and the rest divided by 1 − p, which preserves the mean output."""
    q, k, v = harness.qkv(c)
    o = harness.attend(q, k, v).double()
    samples = 4000
    torch.manual_seed(c.seed)
    repeated = (x.expand(samples, *x.shape[1:]).contiguous() for x in (q[:1], k[:1], v[:1]))
    got = harness.attend(*repeated, dropout_p=c.p).double()
    error = (got.mean(0) - o[0]).abs() / (got.std(0) / samples**0.5).clamp(min=1e-9)
    a = harness.weights(q, k).double()
    variance = c.p / (1 - c.p) * (a[:1] ** 2) @ (v[:1].double() ** 2)
    ratio = got.var(0) / variance[0].clamp(min=1e-12)
    return worst(
        excess(
            f"the mean over {samples} samples is {float(error.max()):.1f} standard errors from the output",
            error - 6.0,
        ),
        excess("the variance over samples is not p/(1 − p) Σ a²v²", (ratio.log().abs() - 0.35)),
    )


def _clipped() -> Function:
    """Inputs clipped in float16."""
    correct = reference_function()

    def call(q, k, v, **options):
        q, k = (x.clamp(-4, 4) if x.dtype == torch.float16 else x for x in (q, k))
        return correct.call(q, k, v, **options)

    return Function(
        "inputs clipped in float16", call, claims=correct.claims | {"float16"}, alignment="bottom-right"
    )


def _unscaled_dropout() -> Function:
    correct = reference_function()

    def call(q, k, v, *, dropout_p=0.0, **options):
        o, weights = correct.call(q, k, v, weights=True, **options)
        return (weights * (torch.rand_like(weights) > dropout_p)) @ v if dropout_p else o

    return Function(
        "dropout without 1/(1 − p)", call, claims=(correct.claims - {"weights", "lse"}) | {"dropout"}
    )


def _different_when_compiled() -> Function:
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
        "it claims to support torch.compile",
        {
            "function": Trial(
                compiled,
                lambda harness: harness.space(
                    b=(2,), h=(2,), n=(7,), m=None, d_k=(8,), d_v=None, mask=harness.mask_kinds()
                ),
                needs=("compile",),
                per_seed=True,
                seconds=40.0,
            ),
            "model": Trial(
                model_compiled,
                lambda harness: {"b": (2,), "n": (min(5, harness.model.max_length),)},
                needs=("compile",),
                per_seed=True,
                seconds=40.0,
            ),
        },
        _different_when_compiled,
        Tolerance(1e-10, 1e-4),
    ),
    Law(
        "L56",
        "train = eval = no_grad",
        "equal outputs with gradients, under no_grad, and in training mode without dropout",
        "dropout set to 0; no batch statistics",
        {
            "function": Trial(same_in_every_mode, call_space()),
            "model": Trial(
                model_same_in_every_mode,
                lambda harness: {
                    "b": (1, 2, 3),
                    "n": sequence_lengths(harness, 2)[:4],
                },
            ),
        },
        lambda: small_attention("dropout active in evaluation", fault="dropout in evaluation"),
    ),
    Law(
        "L60",
        "low-precision error",
        "max|fast − ref| ≤ 2·max|plain − ref| + 4 ulp of max|ref|",
        "float32, bfloat16 or float16; plain is unfused PyTorch in the same dtype",
        {
            "function": Trial(
                low_precision,
                lambda harness: harness.space(
                    n=(7, 16),
                    m=None,
                    d_k=(5, 16, 64),
                    d_v=None,
                    h=(1, 2),
                    mask=harness.mask_kinds(),
                    dtype=_dtypes(harness),
                    size=(1.0, 4.0),
                    grad=(False, True),
                ),
                needs=("float32|bfloat16|float16",),
            )
        },
        _clipped,
        Tolerance(0.0, 0.0, 0.0),
    ),
    Law(
        "L63",
        "dropout preserves the mean",
        "E o = o without dropout; Var o = p/(1 − p) Σ_j a_j² v_j²",
        "dropout of weights, the others divided by 1 − p; sampled",
        {
            "function": Trial(
                dropout_mean,
                lambda harness: harness.space(
                    b=(1,), h=(1, 2), n=(3,), m=None, d_k=(5,), d_v=None, p=(0.2, 0.5)
                ),
                needs=("dropout",),
                per_seed=True,
                heavy=True,
            )
        },
        _unscaled_dropout,
        Tolerance(0.0, 0.0, 0.0),
    ),
)
