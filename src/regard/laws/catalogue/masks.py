"""Who may look at whom: L29, L31, L32, L34, L45, L47 – L50, L58."""

import torch
from jaxtyping import Bool
from torch import Tensor

from ..controls import CLAIMS, small_attention, weighing, wrapped
from ..harness import Asked, Lab
from ..law import Case, Law, Reading, Trial, compare, exactly, gradients, worst
from .softmax import asked


def causality(lab: Lab, c: Case) -> Reading:
    n, m = c.n, c.get("m", c.n)
    q, k, v = lab.qkv(c, learn=lab.takes("grad"))
    if c.by == "causal":
        start, options = lab.standing(n, m), {"causal": True}
    else:
        start = m - n
        options = {
            "allowed": torch.arange(m, device=lab.device)
            <= torch.arange(n, device=lab.device)[:, None] + start
        }
    t = int(lab.below(n))
    last = t + start  # the last key that queries 0 … t may see
    o = lab.attend(q, k, v, **options)
    later_k, later_v = k.detach().clone(), v.detach().clone()
    later_k[..., last + 1 :, :] = lab.randn(*later_k[..., last + 1 :, :].shape) * 7.0
    later_v[..., last + 1 :, :] = lab.randn(*later_v[..., last + 1 :, :].shape) * 7.0
    changed = lab.attend(q.detach(), later_k, later_v, **options)
    readings = [
        compare(f"output {t} after keys past {last} were changed", changed[:, :, : t + 1], o[:, :, : t + 1])
    ]
    if lab.takes("grad"):
        grads = torch.autograd.grad(o[:, :, : t + 1].sum(), (k, v), allow_unused=True)
        for name, g in zip("kv", grads):
            if g is not None:
                readings.append(
                    exactly(f"∂ output {t}/∂{name} past {last} is not 0", g[:, :, last + 1 :] == 0)
                )
    seen = lab.formula(
        q, k, v, torch.arange(m, device=lab.device) <= torch.arange(n, device=lab.device)[:, None] + start
    )
    return worst(*readings, compare("outputs against the formula over the past", o, seen.o))


def _causal_by(lab: Lab) -> tuple[str, ...]:
    return tuple(by for by in ("causal", "mask") if lab.takes(by))


def _causal_space(lab: Lab):
    unequal = lab.takes("n≠m") and (lab.target.alignment is not None or not lab.takes("causal"))
    return lab.space(by=_causal_by(lab), **({} if unequal else {"m": None}))


def _past_within(c: Case) -> bool:
    return c.n <= c.get("m", c.n)


def model_causality(lab: Lab, c: Case) -> Reading:
    options: dict[str, Any] = {} if lab.takes("always causal") else {"causal": True}
    x, context = lab.sequence(c.b, c.n), lab.context(c.b, c.n)
    t = int(lab.below(c.n))
    later = x.clone()
    later[:, t + 1 :] = lab.others(x)[:, t + 1 :]
    if not x.is_floating_point():
        with torch.no_grad():
            o, changed = lab.run(x, context, **options), lab.run(later, context, **options)
        return compare(f"output {t} after its future was changed", changed[:, : t + 1], o[:, : t + 1])
    x.requires_grad_()
    o, changed = lab.run(x, context, **options), lab.run(later.detach(), context, **options)
    (g,) = gradients(o[:, : t + 1], (x,), torch.ones_like(o[:, : t + 1]))
    return worst(
        compare(f"output {t} after its future was changed", changed[:, : t + 1], o[:, : t + 1]),
        exactly(f"∂ output {t}/∂ its future is not 0", g[:, t + 1 :] == 0),
    )


def sequences(lab: Lab) -> str | None:
    return "its input is an image" if lab.model.image is not None else None


def positions_out(lab: Lab) -> str | None:
    return sequences(lab) or ("it gives one vector a sequence" if lab.takes("pooled") else None)


def lengths_in(lab: Lab, least: int = 1) -> tuple[int, ...]:
    return tuple(n for n in (1, 2, 3, 5, 7, 11) if least <= n <= lab.model.longest)


def hide_end(lab: Lab, by: str, lengths: Tensor, m: int) -> Asked:
    """Keys at and past the lengths hidden, by their own option or by a mask."""
    allowed = (torch.arange(m, device=lab.device) < lengths[:, None])[:, None, None]
    return Asked({"lengths": lengths} if by == "lengths" else {"allowed": allowed}, allowed)


def _pad_by(lab: Lab) -> tuple[str, ...]:
    return tuple(by for by in ("lengths", "mask") if lab.takes(by))


def padding(lab: Lab, c: Case) -> Reading:
    q, k, v = lab.qkv(c, learn=lab.takes("grad"))
    m = k.shape[-2]
    l = lab.below(m + 1, c.b, low=1)
    hiding = hide_end(lab, c.by, l, m)
    past = ~(torch.arange(m, device=lab.device) < l[:, None])[:, None, :, None]
    o = lab.attend(q, k, v, **hiding.options)
    other = [torch.where(past, 5.0 * x.detach() + lab.randn(*x.shape), x.detach()) for x in (k, v)]
    alike = lab.attend(q.detach(), *other, **hiding.options)
    readings = [compare("outputs after the padding was changed", alike, o)]
    more = [torch.cat([x.detach(), lab.randn(*x.shape[:2], 2, x.shape[-1])], 2) for x in (k, v)]
    if lab.takes("n≠m") and not lab.function.sizes:
        longer = lab.attend(q.detach(), *more, **hide_end(lab, c.by, l, m + 2).options)
        readings.append(compare("outputs after two more padded keys", longer, o))
    if lab.takes("grad"):
        grads = gradients(o, (k, v), lab.randn(*o.shape))
        readings += [
            exactly(f"∂/∂{x} of a padded key is not 0", (g == 0) | ~past) for x, g in zip("kv", grads)
        ]
        want = gradients(lab.formula(q, k, v, hiding.allowed).o, (k, v), torch.ones_like(o))
        got = gradients(lab.attend(q, k, v, **hiding.options), (k, v), torch.ones_like(o))
        readings += [compare(f"∂/∂{x} under padding", g, w, lab.slack) for x, g, w in zip("kv", got, want)]
    return worst(*readings)


def model_padding(lab: Lab, c: Case) -> Reading:
    """Padding of x, and of the context, changed and grown."""
    x, context = lab.sequence(c.b, c.n), lab.context(c.b, c.n)
    readings = []
    with torch.no_grad():
        if lab.takes("lengths"):
            l = lab.below(c.n + 1, c.b, low=1)
            real = (torch.arange(c.n, device=lab.device) < l[:, None])[..., None]
            o = lab.run(x, context, lengths=l)
            real_x = real if x.is_floating_point() else real[..., 0]
            changed = lab.run(torch.where(real_x, x, lab.others(x)), context, lengths=l)
            readings.append(compare("outputs after the padding was changed", *_real(lab, changed, o, real)))
            longer = torch.cat([x, lab.others(x)[:, :1]], 1)
            if longer.shape[1] <= lab.model.longest and not lab.takes("pooled"):
                grown = lab.run(longer, context, lengths=l)[:, : c.n]
                readings.append(
                    compare("outputs after one more padded position", *_real(lab, grown, o, real))
                )
        if lab.takes("context lengths"):
            context = lab.other(c.b, c.n)
            l = lab.below(c.n + 1, c.b, low=1)
            real = torch.arange(c.n, device=lab.device) < l[:, None]
            real = real[..., None] if context.is_floating_point() else real
            o = lab.run(x, context, context_lengths=l)
            changed = lab.run(x, torch.where(real, context, lab.others(context)), context_lengths=l)
            readings.append(compare("outputs after the context's padding was changed", changed, o))
    if lab.takes("lengths") and x.is_floating_point():
        readings.append(padded_gradients(lab, c))
    return worst(*readings)


def padded_gradients(lab: Lab, c: Case) -> Reading:
    """A loss over real outputs has no gradient towards padding."""
    x, context = lab.sequence(c.b, c.n).requires_grad_(), lab.context(c.b, c.n)
    l = lab.below(c.n + 1, c.b, low=1)
    real = (torch.arange(c.n, device=lab.device) < l[:, None])[..., None]
    o = lab.run(x, context, lengths=l)
    shown = o if lab.takes("pooled") else torch.where(real, o, 0.0)
    (g,) = gradients(shown, (x,), lab.randn(*o.shape))
    return exactly("a loss over real outputs has a gradient towards padding", (g == 0) | real)


def _real(lab: Lab, got: Tensor, want: Tensor, real: Bool[Tensor, "b n 1"]) -> tuple[Tensor, Tensor]:
    """Outputs at real positions alone; those at padding may be anything, NaN too."""
    if lab.takes("pooled"):
        return got, want
    return torch.where(real, got, 0.0), torch.where(real, want, 0.0)


def variable_lengths(lab: Lab, c: Case) -> Reading:
    """A padded batch against each sequence alone."""
    q, k, v = lab.qkv(c)
    l = lab.below(k.shape[-2] + 1, c.b, low=1)
    together = lab.attend(q, k, v, **hide_end(lab, c.by, l, k.shape[-2]).options)
    alone = [lab.attend(q[r : r + 1], *(x[r : r + 1, :, : int(l[r])] for x in (k, v))) for r in range(c.b)]
    return compare("a padded batch against each sequence alone", together, torch.cat(alone))


def model_variable_lengths(lab: Lab, c: Case) -> Reading:
    x, context = lab.sequence(c.b, c.n), lab.context(c.b, c.n)
    l = lab.below(c.n + 1, c.b, low=1)
    with torch.no_grad():
        together = lab.run(x, context, lengths=l)
        readings = []
        for r in range(c.b):
            alone = lab.run(x[r : r + 1, : int(l[r])], None if context is None else context[r : r + 1])[0]
            mine = together[r] if lab.takes("pooled") else together[r, : int(l[r])]
            readings.append(compare(f"row {r} of a padded batch against the sequence alone", mine, alone))
    return worst(*readings)


def sparse_is_masked_dense(lab: Lab, c: Case) -> Reading:
    q, k, v = lab.qkv(c, learn=lab.takes("grad"))
    hiding = asked(lab, c)
    o, want = lab.attend(q, k, v, **hiding.options), lab.formula(q, k, v, hiding.allowed).o
    readings = [compare(f"{c.hide!r} hidden, against dense attention with the same table", o, want)]
    if lab.takes("grad"):
        towards = lab.randn(*o.shape)
        got, right = gradients(o, (q, k, v), towards), gradients(want, (q, k, v), towards)
        readings += [
            compare(f"∂/∂{x} with {c.hide!r} hidden", g, w, lab.slack) for x, g, w in zip("qkv", got, right)
        ]
    return worst(*readings)


def model_masked(lab: Lab, c: Case) -> Reading:
    """What a mask hides from a query may hold anything; what it shows does not go unseen."""
    x, t = lab.sequence(c.b, c.n), int(lab.below(c.n))
    allowed = (lab.rand(c.b, c.n, c.n) < 0.5) | torch.eye(c.n, dtype=torch.bool, device=lab.device)
    shown = allowed[:, t] if not x.is_floating_point() else allowed[:, t, :, None]
    with torch.no_grad():
        o = lab.run(x, allowed=allowed)[:, t]
        changed = lab.run(torch.where(shown, x, lab.others(x)), allowed=allowed)[:, t]
    return compare(f"output {t} after what the mask hides from it was changed", changed, o)


def _one_layer(lab: Lab) -> str | None:
    if lab.model.of != "attention" and lab.model.layers != 1:
        return "past one layer a mask hides less than it says (L35)"
    return positions_out(lab)


def mask_arithmetic(lab: Lab, c: Case) -> Reading:
    q, k, v = lab.qkv(c, learn=lab.takes("grad"))
    allowed = lab.hide("random", c.b, c.h, c.n, k.shape[-2]).allowed
    assert allowed is not None
    zeros = lab.here(torch.zeros(allowed.shape, dtype=torch.float64))
    additive = zeros.masked_fill(~allowed, -torch.inf)
    m = k.shape[-2]
    bias = lab.randn(
        *{"one table": (c.n, m), "a head": (1, c.h, c.n, m), "a row": (c.b, c.h, c.n, m)}[c.bias]
    )
    o = lab.attend(q, k, v, allowed=allowed)
    ways = {"an additive mask": lab.attend(q, k, v, bias=additive)}
    right = lab.formula(q, k, v, allowed, bias=bias).o
    masked = bias.masked_fill(~allowed, -torch.inf)
    biased = {"a bias with −inf where forbidden": lab.attend(q, k, v, bias=masked)}
    if c.both:
        biased["a bias and a mask together"] = lab.attend(q, k, v, bias=bias, allowed=allowed)
    readings = [compare(f"a bool mask against {name}", way, o) for name, way in ways.items()]
    readings += [compare(f"{name} against the formula", way, right) for name, way in biased.items()]
    if lab.takes("grad"):
        grads = gradients(ways["an additive mask"], (q, k, v), lab.randn(*o.shape))
        readings += [exactly(f"∂/∂{x} is not finite", torch.isfinite(g)) for x, g in zip("qkv", grads)]
    return worst(*readings)


def alignment(lab: Lab, c: Case) -> Reading:
    """Which keys reach which outputs of a causal call with n ≠ m, against what is declared."""
    q, k, _ = lab.qkv(c)
    seen = lab.weights(q, k, causal=True)[0, 0] > 0
    i, j = torch.arange(c.n, device=lab.device)[:, None], torch.arange(c.m, device=lab.device)
    tables = {"top-left": j <= i, "bottom-right": j <= i + c.m - c.n}
    true = [name for name, table in tables.items() if torch.equal(seen, table)]
    if lab.target.alignment is None:
        return exactly(
            f"not declared: {true[0] if true else 'neither top-left nor bottom-right'}", bool(true)
        )
    is_said = " or ".join(true) or "neither top-left nor bottom-right"
    return exactly(f"declared {lab.target.alignment}, and it is {is_said}", lab.target.alignment in true)


def _inf_times_mask(scores: Tensor, allowed: Tensor) -> Tensor:
    return (scores + (~allowed).to(scores.dtype) * -torch.inf).softmax(-1)


def ignoring(*options: str):
    return lambda q, k, v, asked: ((q, k, v), {o: x for o, x in asked.items() if o not in options})


def _top_left(q, k, v, asked):
    if asked.pop("causal", False):
        n, m = q.shape[-2], k.shape[-2]
        shown = torch.arange(m) <= torch.arange(n)[:, None]
        asked["allowed"] = shown & asked.get("allowed", shown)
    return (q, k, v), asked


def _shifted_mask(q, k, v, asked):
    if (allowed := asked.get("allowed")) is not None:
        asked["allowed"] = torch.roll(allowed, 1, -1)
    return (q, k, v), asked


def each_length(least: int = 1, rows: tuple[int, ...] = (1, 2, 3)):
    return lambda lab: {"b": rows, "n": lengths_in(lab, least)}


LAWS = (
    Law(
        "L29",
        "causality",
        "∂ o_t/∂ x_s = 0 exactly for s > t; changing the future changes no past output",
        "causal, by option or mask; no batch statistics",
        {
            "function": Trial(causality, _causal_space, needs=("causal|mask",), fits=_past_within),
            "model": Trial(
                model_causality, each_length(2), needs=("always causal|causal",), when=positions_out
            ),
        },
        lambda: wrapped("causal ignored", ignoring("causal", "allowed")),
    ),
    Law(
        "L31",
        "padding has no effect",
        "content and number of padded keys change no real output; their gradients are 0",
        "padding declared: lengths or a mask",
        {
            "function": Trial(padding, lambda lab: lab.space(by=_pad_by(lab)), needs=("lengths|mask",)),
            "model": Trial(model_padding, each_length(), needs=("lengths|context lengths",), when=sequences),
        },
        lambda: wrapped("lengths ignored", ignoring("lengths", "allowed")),
    ),
    Law(
        "L32",
        "variable lengths",
        "a padded batch = each sequence alone",
        "padding declared: lengths or a mask; n ≠ m",
        {
            "function": Trial(
                variable_lengths, lambda lab: lab.space(by=_pad_by(lab)), needs=("lengths|mask", "n≠m")
            ),
            "model": Trial(model_variable_lengths, each_length(), needs=("lengths",), when=sequences),
        },
        lambda: small_attention("pools over padding", wrong="sees padding"),
    ),
    Law(
        "L34",
        "sparse equals masked dense",
        "a way that touches allowed pairs alone = softmax over the same table, gradients too",
        "each query has an allowed key",
        {
            "function": Trial(
                sparse_is_masked_dense,
                lambda lab: lab.space(hide=lab.hidings(some=True), n=(1, 2, 3, 5, 7, 11, 16)),
                when=lambda lab: None if lab.hidings(some=True) else "it can hide nothing",
            ),
            "model": Trial(model_masked, each_length(2), needs=("mask",), when=_one_layer),
        },
        lambda: wrapped("another reading of the pattern", _shifted_mask, "mask", "float64", "n≠m", "d_v≠d_k"),
    ),
    Law(
        "L45",
        "mask arithmetic",
        "bool mask = additive mask (0, −inf); bias and mask commute; nothing is NaN",
        "takes a bool mask and a bias; each query has an allowed key",
        {
            "function": Trial(
                mask_arithmetic,
                lambda lab: lab.space(both=(False, True), bias=("one table", "a head", "a row")),
                needs=("mask", "bias"),
            )
        },
        lambda: weighing("scores + mask · (−inf)", _inf_times_mask, *(set(CLAIMS) - {"lse", "weights"})),
    ),
    Law(
        "L58",
        "alignment as declared",
        "causal with n ≠ m: j ≤ i (top-left) or j ≤ i + m − n (bottom-right)",
        "n < m; where none is declared it must be one of the two",
        {
            "function": Trial(
                alignment,
                lambda lab: lab.space(n=(1, 2, 3, 5), m=(2, 3, 5, 7, 11), d_v=None),
                needs=("causal", "n≠m"),
                fits=lambda c: c.n < c.m,
                tells=True,
            )
        },
        lambda: wrapped("causal from the other corner", _top_left),
    ),
)
