"""Promises P01 to P11: required of targets that claim them, only observed of others."""

import math
from typing import Any

import torch
from torch import Tensor

from ... import reference
from ..controls import CLAIMS, reference_function, with_changed_call, with_weights
from ..harness import Harness
from ..law import Case, Law, Tolerance, Trial
from ..measurement import Measurement, combine, compare, gradients, require, worst
from ..probe import describe
from ..target import Function
from .masks import mask_tail, sequence_lengths, sequences
from .softmax import call_space, case_mask

POISON = {"NaN": math.nan, "infinity": math.inf, "−infinity": -math.inf}


def hidden_poison(harness: Harness, c: Case) -> Measurement:
    """A key that is masked for every query contains NaN or infinity, in k, in v or in both."""
    q, k, v = harness.qkv(c)
    m = k.shape[-2]
    l = harness.randint(m, c.b, low=1) if m > 1 else torch.ones(c.b, dtype=torch.long, device=harness.device)
    past = ~(torch.arange(m, device=harness.device) < l[:, None])[:, None, :, None]
    options = mask_tail(harness, c.by, l, m).options
    want = harness.attend(q, k, v, **options)
    bad_k = k.masked_fill(past, POISON[c.poison]) if "k" in c.into else k
    bad_v = v.masked_fill(past, POISON[c.poison]) if "v" in c.into else v
    if not harness.supports("grad"):
        return compare(
            f"outputs with {c.poison} in masked {c.into}", harness.attend(q, bad_k, bad_v, **options), want
        )
    leaves = (q.clone().requires_grad_(), bad_k.clone().requires_grad_(), bad_v.clone().requires_grad_())
    o = harness.attend(*leaves, **options)
    clean = (q.clone().requires_grad_(), k.clone().requires_grad_(), v.clone().requires_grad_())
    grad_output = harness.randn(*o.shape)
    got, wanted = (
        gradients(o, leaves, grad_output),
        gradients(harness.attend(*clean, **options), clean, grad_output),
    )
    return worst(
        compare(f"outputs with {c.poison} in masked {c.into}", o, want),
        *(
            compare(f"∂/∂{x} with {c.poison} in masked {c.into}", g, w, harness.slack)
            for x, g, w in zip("qkv", got, wanted)
        ),
    )


def model_hidden_poison(harness: Harness, c: Case) -> Measurement:
    x, context = harness.sequence(c.b, c.n), harness.context(c.b, c.n)
    l = harness.randint(c.n, c.b, low=1)
    real = (torch.arange(c.n, device=harness.device) < l[:, None])[..., None]
    with torch.no_grad():
        want = harness.run(x, context, lengths=l)
        got = harness.run(torch.where(real, x, POISON[c.poison]), context, lengths=l)
    if harness.supports("pooled"):
        return compare(f"outputs with {c.poison} in the padding", got, want)
    got, want = (torch.where(real, y, 0.0) for y in (got, want))
    return compare(f"outputs at real positions with {c.poison} in the padding", got, want)


def _token_input(harness: Harness) -> str | None:
    return (
        None
        if harness.model.vocab is None and harness.model.image is None
        else "its input cannot contain NaN"
    )


def empty_row(harness: Harness, c: Case) -> Measurement:
    """A query with no allowed key: zeros, finite gradients, and no effect on other queries."""
    q, k, v = harness.qkv(c, requires_grad=harness.supports("grad"))
    m = k.shape[-2]
    if c.by == "lengths":
        l = harness.randint(m + 1, c.b)
        l[int(harness.randint(c.b))] = 0
        allowed = mask_tail(harness, "mask", l, m).allowed
        assert allowed is not None
        allowed, options = allowed.expand(c.b, c.h, c.n, m), {"lengths": l}
    else:
        allowed = harness.rand(c.b, c.h, c.n, m) < 0.6
        allowed[:, :, int(harness.randint(c.n))] = False
        options = {"allowed": allowed}
    o = harness.attend(q, k, v, **options)
    empty = ~allowed.any(-1)
    measurements = [_empty_outputs(o[empty], v), *_other_rows(harness, q, k, v, o, allowed)]
    return worst(*measurements)


def _empty_outputs(o: Tensor, v: Tensor) -> Measurement:
    """The outputs of empty rows, which must be zeros."""
    o = o.detach()
    if bool(o.isnan().any()):
        return Measurement(
            math.nan,
            f"outputs of empty rows: got NaN in {int(o.isnan().sum())} of {o.numel()} values, expected zeros",
        )
    if bool((o == 0).all()):
        return Measurement(0.0, "outputs of empty rows are zeros")
    mean = v.detach().mean(-2)
    is_mean = bool(
        torch.isclose(o[:, None], mean.reshape(1, -1, mean.shape[-1]), atol=1e-6).all(-1).any(-1).all()
    )
    got = "the mean of the masked values" if is_mean else f"values up to {float(o.abs().max()):.3g}"
    return Measurement(float(o.abs().max()), f"outputs of empty rows: got {got}, expected zeros")


def _other_rows(
    harness: Harness, q: Tensor, k: Tensor, v: Tensor, o: Tensor, allowed: Tensor
) -> list[Measurement]:
    expected = harness.reference(q, k, v, allowed)
    nonempty = allowed.any(-1)
    measurements = [compare("outputs of the other rows", o[nonempty], expected.o[nonempty])]
    if harness.supports("grad"):
        grad_output = harness.randn(*o.shape)
        got, want = gradients(o, (q, k, v), grad_output), gradients(expected.o, (q, k, v), grad_output)
        measurements += [
            compare(f"∂/∂{x} in a batch with an empty row", g, w, harness.slack)
            for x, g, w in zip("qkv", got, want)
        ]
    return measurements


def model_empty_row(harness: Harness, c: Case) -> Measurement:
    """One batch row is all padding: it must be finite and not affect the other rows or any gradient."""
    module, x = harness.module_copy(), harness.sequence(c.b, c.n)
    context = harness.context(c.b, c.n)
    l = harness.randint(c.n + 1, c.b, low=1)
    with torch.no_grad():
        want = harness.run(x[1:], None if context is None else context[1:], module, lengths=l[1:])
    l[0] = 0
    options: dict[str, Any] = {"lengths": l, **({"weights": True} if c.weights else {})}
    real = (torch.arange(c.n, device=harness.device) < l[1:, None])[..., None]

    def others(o: Tensor) -> Tensor:
        return o if harness.supports("pooled") else torch.where(real, o, 0.0)

    o = harness.run(x, context, module, **options)
    with torch.no_grad():  # several libraries take a different path under no_grad
        without_grad = harness.run(x, context, module, **options)
    measurements = []
    for out, mode in ((o, ""), (without_grad, " under no_grad")):
        measurements += [
            _finite(f"a batch row of padding only{mode}", out[0].detach()),
            compare(
                f"the other rows in a batch with a row of padding only{mode}", others(out[1:]), others(want)
            ),
        ]
    if harness.supports("grad"):
        measurements.append(_nan_gradients(module, others(o[1:])))
    if c.n > 1 and not harness.supports("pooled"):
        other = x.clone()
        other[0, -1] = harness.changed(x)[0, -1]
        with torch.no_grad():
            changed = harness.run(other, context, module, **options)
        quantity = "a position with no allowed key after another padded position was changed"
        measurements.append(compare(quantity, changed[0, 0], without_grad[0, 0]))
    return combine(*measurements)


def _finite(quantity: str, o: Tensor) -> Measurement:
    ok = bool(torch.isfinite(o).all())
    return Measurement(
        0.0 if ok else math.nan, f"{quantity}: got NaN in {int(o.isnan().sum())} of {o.numel()} outputs"
    )


def _nan_gradients(module: Any, o: Tensor) -> Measurement:
    """Whether the gradients of a loss over these outputs are finite."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    grads = torch.autograd.grad(o.square().sum(), parameters, allow_unused=True)
    broken = sum(int(not bool(torch.isfinite(g).all())) for g in grads if g is not None)
    message = f"a loss over the other rows only: NaN gradients in {broken} of {len(parameters)} parameters"
    return Measurement(math.nan if broken else 0.0, message)


def double_backward(harness: Harness, c: Case) -> Measurement:
    leaves = harness.qkv(c, requires_grad=True)
    grad_output = harness.randn(*leaves[0].shape[:-1], leaves[2].shape[-1])

    def second(o: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad((o * grad_output).sum(), leaves, create_graph=True)
        return torch.autograd.grad(torch.stack([(g**2).sum() for g in first]).sum(), leaves)

    try:
        got, want = second(harness.attend(*leaves)), second(harness.reference(*leaves).o)
    except RuntimeError as e:  # raised by autograd if there is no second derivative
        return Measurement(math.inf, f"the gradient is not differentiable: {describe(e)}")
    return worst(
        *(
            compare(f"second derivatives with respect to {x}", g, w, 10 * harness.slack)
            for x, g, w in zip("qkv", got, want)
        )
    )


def determinism(harness: Harness, c: Case) -> Measurement:
    leaves = harness.qkv(c, requires_grad=harness.supports("grad"))
    masking, outs, grads = case_mask(harness, c), [], []
    grad_output = harness.randn(*leaves[0].shape[:-1], leaves[2].shape[-1])
    for _ in range(4):
        o = harness.attend(*leaves, **masking.options)
        outs.append(o.detach().clone())
        if harness.supports("grad"):
            grads.append(gradients(o, leaves, grad_output))
    far = max(float((o - outs[0]).abs().max()) for o in outs)
    measurements = [
        require(f"outputs of equal calls differ by {far:.2g}", all(torch.equal(o, outs[0]) for o in outs))
    ]
    for name, each in zip("qkv", zip(*grads)):
        measurements.append(
            require(f"∂/∂{name} of equal calls differ", all(torch.equal(g, each[0]) for g in each))
        )
    return worst(*measurements)


def model_determinism(harness: Harness, c: Case) -> Measurement:
    x, context = harness.sequence(c.b, c.n), harness.context(c.b, c.n)
    with torch.no_grad():
        outs = [harness.run(x, context) for _ in range(3)]
    return require("outputs of equal calls differ", all(torch.equal(o, outs[0]) for o in outs))


def against_reference(harness: Harness, c: Case) -> Measurement:
    dtype = torch.float64 if c.get("double") else harness.dtype
    q, k, v = (x.to(dtype) for x in harness.qkv(c))
    o = harness.attend(q, k, v)
    return compare(
        f"{c.n} queries and {k.shape[-2]} keys: outputs against the reference",
        o,
        harness.reference(q, k, v).o,
    )


def mask_and_causal(harness: Harness, c: Case) -> Measurement:
    q, k, v = harness.qkv(c)
    past = torch.ones(c.n, c.n, dtype=torch.bool, device=harness.device).tril()
    allowed = (harness.rand(c.n, c.n) < 0.6) | torch.eye(c.n, dtype=torch.bool, device=harness.device)
    o = harness.attend(q, k, v, allowed=allowed, causal=True)
    return compare("outputs with a mask and causal", o, harness.reference(q, k, v, allowed & past).o)


def beyond_float16(harness: Harness, c: Case) -> Measurement:
    """Products q·k above 65,504, the largest float16; after scaling by 1/√d_k they are below it."""
    q, k, v = (x.to(torch.float16) for x in harness.qkv(c))
    q, k = ((x.float() * 100.0).to(torch.float16) for x in (q, k))
    o = harness.attend(q, k, v)
    finite = torch.isfinite(o)
    return require(f"{int((~finite).sum())} of {o.numel()} outputs are not finite", finite)


def _poison_space(by: str):
    return lambda harness: harness.space(n=(2, 3, 5), by=(by,), poison=tuple(POISON), into=("v", "k", "k, v"))


def _empty_space(harness: Harness):
    return harness.space(by=tuple(x for x in ("mask", "lengths") if harness.supports(x)))


def _plain_softmax(scores: Tensor, allowed: Tensor) -> Tensor:
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1)


def _noisy() -> Function:
    correct = reference_function()

    def call(q, k, v, **options):
        o = correct.call(q, k, v, **options)
        return (
            tuple(x + 1e-15 * torch.rand_like(x) for x in o)
            if isinstance(o, tuple)
            else o + 1e-15 * torch.rand_like(o)
        )

    return Function("slightly noisy outputs", call, claims=correct.claims, alignment="bottom-right")


class _OnceDifferentiable(torch.autograd.Function):
    """Attention whose gradient is detached from the graph."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return reference.attend(q, k, v).o

    @staticmethod
    def backward(ctx, grad_output):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            return torch.autograd.grad(reference.attend(*leaves).o, leaves, grad_output.detach())


def _single_backward() -> Function:
    claims = {"float64", "float32", "grad", "double backward", "n≠m", "d_v≠d_k"}
    return Function("no double backward", lambda q, k, v: _OnceDifferentiable.apply(q, k, v), claims=claims)


def _wrong_where(condition: str, change) -> Function:
    return with_changed_call(f"wrong where {condition}", change, *CLAIMS)


def _cut_keys(q, k, v, options):
    n, m = q.shape[-2], k.shape[-2]
    return ((q, k[..., :n, :], v[..., :n, :]) if m > n and not options else (q, k, v)), options


def _as_float32(q, k, v, options):
    return tuple(x.float().double() if x.dtype == torch.float64 else x for x in (q, k, v)), options


def _mask_disables_causal(q, k, v, options):
    if options.get("causal") and options.get("allowed") is not None:
        options.pop("causal")
    return (q, k, v), options


def _overflowing() -> Function:
    def call(q, k, v):
        return ((q @ k.mT) * q.shape[-1] ** -0.5).softmax(-1) @ v

    return Function("scaled after the product", call, claims={"float16", "float32", "float16 range"})


def _promise(number, name, formula, capability, trials, control, tolerance=None) -> Law:
    return Law(
        number,
        name,
        formula,
        "required if claimed, else only observed",
        trials,
        control,
        tolerance or Tolerance(),
        capability,
    )


LAWS = (
    _promise(
        "P01",
        "NaN under a mask",
        "NaN or ±∞ in a key or value that is masked for every query has no effect",
        "nan under mask",
        {"function": Trial(hidden_poison, _poison_space("mask"), needs=("mask",))},
        lambda: reference_function().with_claims("nan under mask"),
    ),
    _promise(
        "P02",
        "NaN past the lengths",
        "NaN or ±∞ in padding has no effect",
        "nan under lengths",
        {
            "function": Trial(hidden_poison, _poison_space("lengths"), needs=("lengths",)),
            "model": Trial(
                model_hidden_poison,
                lambda harness: {"b": (1, 2), "n": sequence_lengths(harness, 2), "poison": tuple(POISON)},
                needs=("lengths",),
                unless=_token_input,
            ),
        },
        lambda: reference_function().with_claims("nan under lengths"),
    ),
    _promise(
        "P03",
        "empty row",
        "a query with no allowed key: o = 0, finite gradients, no effect on other queries",
        "empty rows",
        {
            "function": Trial(empty_row, _empty_space, needs=("mask|lengths",)),
            "model": Trial(
                model_empty_row,
                lambda harness: {
                    "b": (2, 3),
                    "n": sequence_lengths(harness),
                    "weights": (True, False) if harness.supports("weights") else (False,),
                },
                needs=("lengths",),
                unless=sequences,
            ),
        },
        lambda: with_weights("NaN on an empty row", _plain_softmax).with_claims("empty rows"),
    ),
    _promise(
        "P04",
        "double backward",
        "second derivatives exist and are correct",
        "double backward",
        {"function": Trial(double_backward, call_space(masked=False, n=(2, 3, 5)), needs=("grad",))},
        _single_backward,
    ),
    _promise(
        "P05",
        "bitwise determinism",
        "equal calls return equal bits, in outputs and gradients",
        "deterministic",
        {
            "function": Trial(determinism, call_space(n=(2, 7, 33))),
            "model": Trial(
                model_determinism, lambda harness: {"b": (1, 2, 3), "n": sequence_lengths(harness)}
            ),
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
                against_reference,
                lambda harness: harness.space(h=(2, 4, 6), h_kv=(1, 2, 3)),
                fits=lambda c: c.h != c.h_kv,
            )
        },
        lambda: _wrong_where(
            "heads are grouped",
            lambda q, k, v, options: (
                (q, *(x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x in (k, v))),
                options,
            ),
        ),
    ),
    _promise(
        "P07",
        "n ≠ m",
        "the number of keys differs from the number of queries",
        "n≠m",
        {
            "function": Trial(
                against_reference,
                lambda harness: harness.space(m=(1, 2, 3, 5, 7, 11)),
                fits=lambda c: c.n != c.m,
            )
        },
        lambda: _wrong_where("m > n", _cut_keys),
    ),
    _promise(
        "P08",
        "d_v ≠ d_k",
        "the width of values differs from that of keys",
        "d_v≠d_k",
        {
            "function": Trial(
                against_reference,
                lambda harness: harness.space(d_v=(1, 2, 3, 5, 8)),
                fits=lambda c: c.d_k != c.d_v,
            )
        },
        lambda: _wrong_where(
            "d_v ≠ d_k",
            lambda q, k, v, options: ((q, k * (1.0 if v.shape[-1] == k.shape[-1] else 1.1), v), options),
        ),
    ),
    _promise(
        "P09",
        "float64",
        "float64 inputs are computed in float64",
        "float64",
        {"function": Trial(against_reference, call_space(masked=False, double=(True,)))},
        lambda: _wrong_where("the dtype is float64", _as_float32),
        Tolerance(1e-12, 1e-12, 1e-12),
    ),
    _promise(
        "P10",
        "mask and causal combined",
        "a mask and causal in one call: the pairs that both allow",
        "mask and causal",
        {
            "function": Trial(
                mask_and_causal, call_space(masked=False, m=None, n=(2, 3, 5, 7)), needs=("mask", "causal")
            )
        },
        lambda: with_changed_call("a mask that disables causal", _mask_disables_causal),
    ),
    _promise(
        "P11",
        "range of float16",
        "unscaled products above 65,504 do not overflow in float16: outputs are finite",
        "float16 range",
        {
            "function": Trial(
                beyond_float16,
                lambda harness: harness.space(n=(7, 16), m=None, d_k=(16, 64), d_v=None, h=(1, 2)),
                needs=("float16",),
            )
        },
        _overflowing,
    ),
)
