"""Masks, causality and padding: L29, L31, L32, L34, L45, L58."""

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from ..controls import CLAIMS, small_attention, with_changed_call, with_weights
from ..harness import Harness, Masking
from ..law import Case, Law, Trial
from ..measurement import Measurement, compare, gradients, require, worst
from .softmax import case_mask


def causality(harness: Harness, c: Case) -> Measurement:
    n, m = c.n, c.get("m", c.n)
    q, k, v = harness.qkv(c, requires_grad=harness.supports("grad"))
    if c.by == "causal":
        start, options = harness.query_offset(n, m), {"causal": True}
    else:
        start = m - n
        options = {
            "allowed": torch.arange(m, device=harness.device)
            <= torch.arange(n, device=harness.device)[:, None] + start
        }
    t = int(harness.randint(n))
    last = t + start  # the last key that queries 0 … t may attend to
    o = harness.attend(q, k, v, **options)
    later_k, later_v = k.detach().clone(), v.detach().clone()
    later_k[..., last + 1 :, :] = harness.randn(*later_k[..., last + 1 :, :].shape) * 7.0
    later_v[..., last + 1 :, :] = harness.randn(*later_v[..., last + 1 :, :].shape) * 7.0
    changed = harness.attend(q.detach(), later_k, later_v, **options)
    measurements = [
        compare(
            f"outputs up to {t} after keys past {last} were changed", changed[:, :, : t + 1], o[:, :, : t + 1]
        )
    ]
    if harness.supports("grad"):
        grads = torch.autograd.grad(o[:, :, : t + 1].sum(), (k, v), allow_unused=True)
        for name, g in zip("kv", grads):
            if g is not None:
                measurements.append(
                    require(
                        f"outputs up to {t} have a gradient with respect to {name} past {last}",
                        g[:, :, last + 1 :] == 0,
                    )
                )
    expected = harness.reference(
        q,
        k,
        v,
        torch.arange(m, device=harness.device) <= torch.arange(n, device=harness.device)[:, None] + start,
    )
    return worst(*measurements, compare("outputs against the reference with a causal mask", o, expected.o))


def _causal_by(harness: Harness) -> tuple[str, ...]:
    return tuple(by for by in ("causal", "mask") if harness.supports(by))


def _causal_space(harness: Harness):
    unequal = harness.supports("n≠m") and (
        harness.target.alignment is not None or not harness.supports("causal")
    )
    return harness.space(by=_causal_by(harness), **({} if unequal else {"m": None}))


def _past_within(c: Case) -> bool:
    return c.n <= c.get("m", c.n)


def model_causality(harness: Harness, c: Case) -> Measurement:
    options: dict[str, Any] = {} if harness.supports("always causal") else {"causal": True}
    x, context = harness.sequence(c.b, c.n), harness.context(c.b, c.n)
    t = int(harness.randint(c.n))
    later, present = x.clone(), x.clone()
    later[:, t + 1 :] = harness.changed(x)[:, t + 1 :]
    present[:, t] = harness.changed(x)[:, t]
    with torch.no_grad():
        own = (harness.run(present, context, **options) - harness.run(x, context, **options))[:, t]
    # With few keys a position that does not attend to itself does not depend on itself at all.
    itself = require(f"output {t} does not depend on input {t}", bool((own != 0).any()))
    if not x.is_floating_point():
        with torch.no_grad():
            o, changed = harness.run(x, context, **options), harness.run(later, context, **options)
        return worst(
            compare(f"outputs up to {t} after later inputs were changed", changed[:, : t + 1], o[:, : t + 1]),
            itself,
        )
    x.requires_grad_()
    o, changed = harness.run(x, context, **options), harness.run(later.detach(), context, **options)
    (g,) = gradients(o[:, : t + 1], (x,), torch.ones_like(o[:, : t + 1]))
    return worst(
        compare(f"outputs up to {t} after later inputs were changed", changed[:, : t + 1], o[:, : t + 1]),
        require(f"outputs up to {t} have a gradient with respect to later inputs", g[:, t + 1 :] == 0),
        itself,
    )


def sequences(harness: Harness) -> str | None:
    return "its input is an image" if harness.model.image is not None else None


def positions_out(harness: Harness) -> str | None:
    return sequences(harness) or (
        "it returns one vector per sequence" if harness.supports("pooled") else None
    )


def sequence_lengths(harness: Harness, min_length: int = 1) -> tuple[int, ...]:
    if harness.model.length is not None:
        return (harness.model.length,)
    return tuple(n for n in (1, 2, 3, 5, 7, 11) if min_length <= n <= harness.model.max_length)


def mask_tail(harness: Harness, by: str, lengths: Tensor, m: int) -> Masking:
    """Keys at and past the lengths masked, by the option `lengths` or by a mask."""
    allowed = (torch.arange(m, device=harness.device) < lengths[:, None])[:, None, None]
    return Masking({"lengths": lengths} if by == "lengths" else {"allowed": allowed}, allowed)


def _pad_by(harness: Harness) -> tuple[str, ...]:
    return tuple(by for by in ("lengths", "mask") if harness.supports(by))


def padding(harness: Harness, c: Case) -> Measurement:
    q, k, v = harness.qkv(c, requires_grad=harness.supports("grad"))
    m = k.shape[-2]
    l = harness.randint(m + 1, c.b, low=1)
    masking = mask_tail(harness, c.by, l, m)
    past = ~(torch.arange(m, device=harness.device) < l[:, None])[:, None, :, None]
    o = harness.attend(q, k, v, **masking.options)
    other = [torch.where(past, 5.0 * x.detach() + harness.randn(*x.shape), x.detach()) for x in (k, v)]
    unchanged = harness.attend(q.detach(), *other, **masking.options)
    measurements = [compare("outputs after the padding was changed", unchanged, o)]
    more = [torch.cat([x.detach(), harness.randn(*x.shape[:2], 2, x.shape[-1])], 2) for x in (k, v)]
    if harness.supports("n≠m") and not harness.function.sizes:
        longer = harness.attend(q.detach(), *more, **mask_tail(harness, c.by, l, m + 2).options)
        measurements.append(compare("outputs after two padded keys were added", longer, o))
    if harness.supports("grad"):
        grads = gradients(o, (k, v), harness.randn(*o.shape))
        measurements += [
            require(f"the gradient of a padded {x} is not 0", (g == 0) | ~past) for x, g in zip("kv", grads)
        ]
        want = gradients(harness.reference(q, k, v, masking.allowed).o, (k, v), torch.ones_like(o))
        got = gradients(harness.attend(q, k, v, **masking.options), (k, v), torch.ones_like(o))
        measurements += [
            compare(f"∂/∂{x} with padding", g, w, harness.slack) for x, g, w in zip("kv", got, want)
        ]
    return worst(*measurements)


def model_padding(harness: Harness, c: Case) -> Measurement:
    """The padding of x and of the context with other content, and of another length."""
    x, context = harness.sequence(c.b, c.n), harness.context(c.b, c.n)
    measurements = []
    with torch.no_grad():
        if harness.supports("lengths"):
            l = harness.randint(c.n + 1, c.b, low=1)
            real = (torch.arange(c.n, device=harness.device) < l[:, None])[..., None]
            o = harness.run(x, context, lengths=l)
            real_x = real if x.is_floating_point() else real[..., 0]
            changed = harness.run(torch.where(real_x, x, harness.changed(x)), context, lengths=l)
            measurements.append(
                compare("outputs after the padding was changed", *_real(harness, changed, o, real))
            )
            if harness.supports("integer mask"):
                integers = harness.run(x, context, lengths=l, integer_mask=True)
                measurements.append(
                    compare("outputs with the padding mask as integers", *_real(harness, integers, o, real))
                )
            longer = torch.cat([x, harness.changed(x)[:, :1]], 1)
            if longer.shape[1] <= harness.model.max_length and not harness.supports("pooled"):
                grown = harness.run(longer, context, lengths=l)[:, : c.n]
                measurements.append(
                    compare("outputs after one padded position was added", *_real(harness, grown, o, real))
                )
        if harness.supports("context lengths"):
            context = harness.second_sequence(c.b, c.n)
            l = harness.randint(c.n + 1, c.b, low=1)
            real = torch.arange(c.n, device=harness.device) < l[:, None]
            real = real[..., None] if context.is_floating_point() else real
            o = harness.run(x, context, context_lengths=l)
            changed = harness.run(x, torch.where(real, context, harness.changed(context)), context_lengths=l)
            measurements.append(compare("outputs after the context's padding was changed", changed, o))
    if harness.supports("lengths") and x.is_floating_point():
        measurements.append(padded_gradients(harness, c))
    return worst(*measurements)


def padded_gradients(harness: Harness, c: Case) -> Measurement:
    """A loss over outputs at real positions has no gradient with respect to padding."""
    x, context = harness.sequence(c.b, c.n).requires_grad_(), harness.context(c.b, c.n)
    l = harness.randint(c.n + 1, c.b, low=1)
    real = (torch.arange(c.n, device=harness.device) < l[:, None])[..., None]
    o = harness.run(x, context, lengths=l)
    visible = o if harness.supports("pooled") else torch.where(real, o, 0.0)
    (g,) = gradients(visible, (x,), harness.randn(*o.shape))
    return require(
        "a loss over outputs at real positions has a gradient with respect to padding", (g == 0) | real
    )


def _real(harness: Harness, got: Tensor, want: Tensor, real: Bool[Tensor, "b n 1"]) -> tuple[Tensor, Tensor]:
    """Only the outputs at real positions; those at padding may be anything, even NaN."""
    if harness.supports("pooled"):
        return got, want
    return torch.where(real, got, 0.0), torch.where(real, want, 0.0)


def variable_lengths(harness: Harness, c: Case) -> Measurement:
    """A padded batch against each sequence by itself."""
    q, k, v = harness.qkv(c)
    l = harness.randint(k.shape[-2] + 1, c.b, low=1)
    batched = harness.attend(q, k, v, **mask_tail(harness, c.by, l, k.shape[-2]).options)
    alone = [
        harness.attend(q[r : r + 1], *(x[r : r + 1, :, : int(l[r])] for x in (k, v))) for r in range(c.b)
    ]
    return compare("a padded batch against each sequence by itself", batched, torch.cat(alone))


def model_variable_lengths(harness: Harness, c: Case) -> Measurement:
    x, context = harness.sequence(c.b, c.n), harness.context(c.b, c.n)
    l = harness.randint(c.n + 1, c.b, low=1)
    with torch.no_grad():
        batched = harness.run(x, context, lengths=l)
        measurements = []
        for r in range(c.b):
            alone = harness.run(x[r : r + 1, : int(l[r])], None if context is None else context[r : r + 1])[0]
            mine = batched[r] if harness.supports("pooled") else batched[r, : int(l[r])]
            measurements.append(
                compare(f"row {r} of a padded batch against the sequence by itself", mine, alone)
            )
    return worst(*measurements)


def sparse_is_masked_dense(harness: Harness, c: Case) -> Measurement:
    q, k, v = harness.qkv(c, requires_grad=harness.supports("grad"))
    masking = case_mask(harness, c)
    o, want = harness.attend(q, k, v, **masking.options), harness.reference(q, k, v, masking.allowed).o
    measurements = [compare(f"mask {c.mask!r}: outputs against dense attention with the same mask", o, want)]
    if harness.supports("grad"):
        grad_output = harness.randn(*o.shape)
        got, expected = gradients(o, (q, k, v), grad_output), gradients(want, (q, k, v), grad_output)
        measurements += [
            compare(f"mask {c.mask!r}: ∂/∂{x}", g, w, harness.slack) for x, g, w in zip("qkv", got, expected)
        ]
    return worst(*measurements)


def model_masked(harness: Harness, c: Case) -> Measurement:
    """Inputs that a mask hides from a query have no effect on its output."""
    x, t = harness.sequence(c.b, c.n), int(harness.randint(c.n))
    context = harness.context(c.b, c.n)
    allowed = (harness.rand(c.b, c.n, c.n) < 0.5) | torch.eye(c.n, dtype=torch.bool, device=harness.device)
    visible = allowed[:, t] if not x.is_floating_point() else allowed[:, t, :, None]
    with torch.no_grad():
        o = harness.run(x, context, allowed=allowed)[:, t]
        changed = harness.run(torch.where(visible, x, harness.changed(x)), context, allowed=allowed)[:, t]
    return compare(f"output {t} after masked inputs were changed", changed, o)


def _one_layer(harness: Harness) -> str | None:
    if harness.model.architecture != "attention" and harness.model.layers != 1:
        return "with more than one layer, masked inputs act through other positions (L35)"
    return positions_out(harness)


def mask_arithmetic(harness: Harness, c: Case) -> Measurement:
    q, k, v = harness.qkv(c, requires_grad=harness.supports("grad"))
    allowed = harness.make_mask("random", c.b, c.h, c.n, k.shape[-2]).allowed
    assert allowed is not None
    zeros = harness.to_target(torch.zeros(allowed.shape, dtype=torch.float64))
    additive = zeros.masked_fill(~allowed, -torch.inf)
    m = k.shape[-2]
    bias = harness.randn(
        *{"(n, m)": (c.n, m), "(1, h, n, m)": (1, c.h, c.n, m), "(b, h, n, m)": (c.b, c.h, c.n, m)}[c.bias]
    )
    o = harness.attend(q, k, v, allowed=allowed)
    masked_only = {"an additive mask": harness.attend(q, k, v, bias=additive)}
    expected = harness.reference(q, k, v, allowed, bias=bias).o
    masked = bias.masked_fill(~allowed, -torch.inf)
    biased = {"a bias with −inf at masked pairs": harness.attend(q, k, v, bias=masked)}
    if c.both:
        biased["a bias and a mask together"] = harness.attend(q, k, v, bias=bias, allowed=allowed)
    measurements = [compare(f"a bool mask against {name}", other, o) for name, other in masked_only.items()]
    measurements += [
        compare(f"{name} against the reference", other, expected) for name, other in biased.items()
    ]
    if harness.supports("grad"):
        grads = gradients(masked_only["an additive mask"], (q, k, v), harness.randn(*o.shape))
        measurements += [require(f"∂/∂{x} is not finite", torch.isfinite(g)) for x, g in zip("qkv", grads)]
    return worst(*measurements)


def alignment(harness: Harness, c: Case) -> Measurement:
    """The keys that have weight in a causal call with n ≠ m, against the declared alignment."""
    q, k, _ = harness.qkv(c)
    visible = harness.weights(q, k, causal=True)[0, 0] > 0
    i, j = torch.arange(c.n, device=harness.device)[:, None], torch.arange(c.m, device=harness.device)
    tables = {"top-left": j <= i, "bottom-right": j <= i + c.m - c.n}
    observed = [name for name, table in tables.items() if torch.equal(visible, table)]
    if harness.target.alignment is None:
        name = observed[0] if observed else "neither top-left nor bottom-right"
        return require(f"alignment not declared, observed {name}", bool(observed))
    name = " or ".join(observed) or "neither top-left nor bottom-right"
    declared = harness.target.alignment
    return require(f"alignment declared {declared}, observed {name}", declared in observed)


def _inf_times_mask(scores: Tensor, allowed: Tensor) -> Tensor:
    return (scores + (~allowed).to(scores.dtype) * -torch.inf).softmax(-1)


def ignoring(*names: str):
    """A change of a call that drops these options."""
    return lambda q, k, v, options: ((q, k, v), {o: x for o, x in options.items() if o not in names})


def _top_left(q, k, v, options):
    if options.pop("causal", False):
        n, m = q.shape[-2], k.shape[-2]
        past = torch.arange(m) <= torch.arange(n)[:, None]
        options["allowed"] = past & options.get("allowed", past)
    return (q, k, v), options


def _shifted_mask(q, k, v, options):
    if (allowed := options.get("allowed")) is not None:
        options["allowed"] = torch.roll(allowed, 1, -1)
    return (q, k, v), options


def each_length(min_length: int = 1, rows: tuple[int, ...] = (1, 2, 3)):
    return lambda harness: {"b": rows, "n": sequence_lengths(harness, min_length)}


LAWS = (
    Law(
        "L29",
        "causality",
        "∂ o_t/∂ x_s = 0 exactly for s > t; changing the future changes no past output, changing x_t changes o_t",
        "causal, by option or mask; no batch statistics",
        {
            "function": Trial(causality, _causal_space, needs=("causal|mask",), fits=_past_within),
            "model": Trial(
                model_causality, each_length(2), needs=("always causal|causal",), unless=positions_out
            ),
        },
        lambda: with_changed_call("causal ignored", ignoring("causal", "allowed")),
    ),
    Law(
        "L31",
        "padding has no effect",
        "the content and number of padded keys change no output at a real position; their gradients are 0",
        "padding declared: lengths or a mask",
        {
            "function": Trial(
                padding, lambda harness: harness.space(by=_pad_by(harness)), needs=("lengths|mask",)
            ),
            "model": Trial(
                model_padding, each_length(), needs=("lengths|context lengths",), unless=sequences
            ),
        },
        lambda: with_changed_call("lengths ignored", ignoring("lengths", "allowed")),
    ),
    Law(
        "L32",
        "variable lengths",
        "a padded batch = each sequence by itself",
        "padding declared: lengths or a mask; n ≠ m",
        {
            "function": Trial(
                variable_lengths,
                lambda harness: harness.space(by=_pad_by(harness)),
                needs=("lengths|mask", "n≠m"),
            ),
            "model": Trial(model_variable_lengths, each_length(), needs=("lengths",), unless=sequences),
        },
        lambda: small_attention("padding is not masked", fault="attends to padding"),
    ),
    Law(
        "L34",
        "sparse equals masked dense",
        "sparse attention = dense attention with the same mask, gradients included",
        "each query has an allowed key",
        {
            "function": Trial(
                sparse_is_masked_dense,
                lambda harness: harness.space(mask=harness.mask_kinds(none=False), n=(1, 2, 3, 5, 7, 11, 16)),
                unless=lambda harness: None if harness.mask_kinds(none=False) else "it supports no mask",
            ),
            "model": Trial(model_masked, each_length(2), needs=("mask",), unless=_one_layer),
        },
        lambda: with_changed_call(
            "a mask shifted by one key", _shifted_mask, "mask", "float64", "n≠m", "d_v≠d_k"
        ),
    ),
    Law(
        "L45",
        "mask arithmetic",
        "bool mask = additive mask (0, −inf); bias and mask commute; no output is NaN",
        "supports a bool mask and a bias; each query has an allowed key",
        {
            "function": Trial(
                mask_arithmetic,
                lambda harness: harness.space(
                    both=(False, True), bias=("(n, m)", "(1, h, n, m)", "(b, h, n, m)")
                ),
                needs=("mask", "bias"),
            )
        },
        lambda: with_weights("scores + mask · (−inf)", _inf_times_mask, *(set(CLAIMS) - {"lse", "weights"})),
    ),
    Law(
        "L58",
        "alignment as declared",
        "causal with n ≠ m: j ≤ i (top-left) or j ≤ i + m − n (bottom-right)",
        "n < m; if none is declared, either is accepted",
        {
            "function": Trial(
                alignment,
                lambda harness: harness.space(n=(1, 2, 3, 5), m=(2, 3, 5, 7, 11), d_v=None),
                needs=("causal", "n≠m"),
                fits=lambda c: c.n < c.m,
                always_report=True,
            )
        },
        lambda: with_changed_call("causal aligned top-left", _top_left),
    ),
)
