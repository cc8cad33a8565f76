"""The calls on which a target is compared with the formula and its faulty variants: few, small and varied."""

from collections.abc import Iterator
from itertools import combinations
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..harness import DTYPES, Harness
from ..law import Case
from ..measurement import compare, gradients
from ..option_values import option_value
from ..probe import probe_case
from ..target import OPTIONS
from .formula import Call, Formula

LARGE = (  # sizes beyond common limits of kernels: more than 2,048 keys, widths above 128, incomplete tiles
    {"n": 3, "m": 70, "d_k": 6},
    {"n": 67, "m": 67, "d_k": 5},
    {"n": 5, "m": 131, "d_k": 66},
    {"n": 3, "m": 530, "d_k": 5},
    {"n": 515, "m": 9, "d_k": 5},
    {"n": 4, "m": 9, "d_k": 80},
    {"n": 4, "m": 9, "d_k": 144},
    {"n": 5, "m": 1100, "d_k": 4},
    {"n": 3, "m": 2081, "d_k": 4},
    {"n": 3, "m": 4100, "d_k": 3},
    {"n": 2050, "m": 4, "d_k": 3},
    {"n": 3, "m": 600, "d_k": 136},
    {"n": 3, "m": 7, "d_k": 260},
    {"n": 3, "m": 7, "d_k": 4, "b": 9, "h": 2},
    {"n": 3, "m": 7, "d_k": 4, "h": 12},
    {"n": 300, "m": 300, "d_k": 4},
)
LARGEST = {"n": 1100, "m": 1100, "d_k": 2}  # the last calls: a slow target has no time for them
HUGE = 1e12  # an output of this size would make every relative error small
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 4e-2, torch.float16: 6e-3}


class Sample(NamedTuple):
    """One call, with the facets that distinguish it from others."""

    name: str
    call: Call
    facets: dict[str, Any]
    grad: bool = False
    upstream: Tensor | None = None  # the gradient of the output
    implied: tuple[tuple[str, Any], ...] = ()  # options that the target applies in every call

    def describe(self) -> str:
        """The sizes and options, as they appear in messages."""
        sizes = ", ".join(f"{k}={self.facets[k]}" for k in ("b", "h", "n", "m", "d_k") if k in self.facets)
        words = self.facets.get("options", ())
        return f"{sizes}{', ' + ', '.join(words) if words else ''}, {self.facets['dtype']}"


def samples(harness: Harness) -> Iterator[Sample]:
    """All calls for a function, the simplest first."""
    base = {"b": 2, "h": 2, "n": 5, "m": 5, "d_k": 6, "d_v": 6}
    gradable = harness.target.declares("grad") is not False
    yield _sample(harness, "a plain call", base)
    if harness.supports("n≠m"):
        yield _sample(harness, "fewer queries than keys", base | {"m": 7})
        if not _queries_without_keys(harness, {"n": 7, "m": 4}):
            yield _sample(harness, "more queries than keys", base | {"n": 7, "m": 4})
        yield _sample(harness, "one query", base | {"n": 1})
    if harness.supports("d_v≠d_k"):
        yield _sample(harness, "d_v ≠ d_k", base | {"d_v": 3})
    yield _sample(harness, "one key", base | {"n": 1, "m": 1})
    yield _sample(harness, "one head", base | {"h": 1, "d_k": 7, "d_v": 7})
    yield _sample(harness, "larger scores", base, size=8.0)
    if harness.supports("grouped"):
        yield _sample(harness, "grouped heads", base | {"h": 4, "h_kv": 2})
        yield _sample(harness, "grouped heads, 6 and 3", base | {"h": 6, "h_kv": 3})
    supported = option_names(harness)
    yield from _with_options(harness, base, supported)
    if "scale" in supported:
        yield _sample(harness, "a scale of 0", base, ("scale",), scale=0.0)
    yield from _forms(harness, base, supported)
    for name in ("float32", "bfloat16", "float16"):
        if harness.supports(name) and harness.dtype != DTYPES[name]:
            yield _sample(harness, name, base | {"n": 9, "m": 9, "d_k": 16, "d_v": 16}, dtype=DTYPES[name])
            if harness.supports("n≠m") and not harness.supports("always causal"):
                many = {"b": 1, "h": 1, "n": 3, "m": 900, "d_k": 16, "d_v": 16}
                yield _sample(harness, f"{name}, 900 keys", many, dtype=DTYPES[name], mean=2.0)
            if "mask" in supported or "causal" in supported:
                option = "mask" if "mask" in supported else "causal"
                yield _sample(
                    harness, f"{name}, {option}", base | {"n": 9, "m": 9}, (option,), dtype=DTYPES[name]
                )
    if gradable:
        yield _sample(harness, "gradients", base, grad=True)
        for name in supported:
            yield _sample(harness, f"gradients, {name}", base | {"n": 7, "m": 7}, (name,), grad=True)
        if harness.supports("grouped"):
            yield _sample(harness, "gradients, grouped heads", base | {"h": 4, "h_kv": 2}, grad=True)
        if harness.supports("n≠m"):
            yield _sample(harness, "gradients, n < m", base | {"m": 70}, grad=True)
    size = 400.0 if harness.dtype == torch.float64 else 60.0  # exp overflows without the row maximum
    yield _sample(harness, "large scores", base | {"d_k": 8, "d_v": 8}, size=size)
    for name in supported:
        if name in (
            "mask",
            "causal",
            "lengths",
        ):  # larger than a mask value of −1e4, smaller than one of −1e9
            wide_scores = base | {"n": 7, "m": 7, "d_k": 8, "d_v": 8}
            yield _sample(harness, f"{name}, large scores", wide_scores, (name,), size=5e4)
    for sizes in LARGE:
        yield _large(harness, sizes)
    wide = {"b": 1, "h": 2, "n": 300, "m": 300, "d_k": 4, "d_v": 4}
    for name in supported:
        yield _sample(harness, f"{name}, 300 positions", wide, (name,))
    if gradable:
        yield _sample(harness, "gradients, 150 positions", wide | {"n": 150, "m": 150}, grad=True)
        yield _sample(harness, "gradients, d_k = 130", base | {"d_k": 130, "d_v": 130}, grad=True)
    if "causal" in supported:
        yield _sample(harness, "causal, 1,100 positions", wide | {"h": 1, "n": 1100, "m": 1100}, ("causal",))
    yield _large(harness, LARGEST)


def _with_options(harness: Harness, base: dict[str, int], supported: list[str]) -> Iterator[Sample]:
    """Each option, all pairs, and some triples."""
    for count in (1, 2, 3):
        chosen = list(combinations(supported, count))
        for names in chosen if count < 3 else chosen[:10]:
            if excluded(harness, names):
                continue
            yield _sample(harness, " and ".join(names), base | {"n": 7, "m": 7}, names)
            if count == 1 and harness.supports("n≠m") and _unequal(harness, names):
                yield _sample(harness, f"{names[0]}, n < m", base | {"n": 4, "m": 9}, names)
            if (
                names == ("window",)
                and harness.supports("n≠m")
                and harness.target.alignment == "bottom-right"
            ):
                yield _sample(harness, "window, one query", base | {"n": 1, "m": 9}, names)
            if count == 1 and harness.supports("grouped"):
                yield _sample(
                    harness, f"{names[0]}, grouped", base | {"h": 4, "h_kv": 2, "n": 7, "m": 7}, names
                )


def _forms(harness: Harness, base: dict[str, int], supported: list[str]) -> Iterator[Sample]:
    """The same numbers in other forms: with strides, as one tensor, as a mask of integers."""
    yield _sample(harness, "strided inputs", base, strided=True)
    for names in ((), *((name,) for name in supported[:1])):
        words = f" and {names[0]}" if names else ""
        yield _sample(harness, f"one tensor as q, k and v{words}", base, names, shared="qkv")
    yield _sample(harness, "one tensor as k and v", base, shared="kv")
    if harness.supports("integer mask"):
        option = "mask" if "mask" in supported else "lengths"
        yield _sample(
            harness,
            "a mask of integers",
            base | {"n": 7, "m": 7},
            (option, "integer mask"),
            integer_mask=True,
        )


def _queries_without_keys(harness: Harness, sizes: dict[str, int]) -> bool:
    """Whether the first queries have no key: causal, aligned bottom-right, with more queries than keys."""
    always = harness.supports("always causal") and harness.target.alignment == "bottom-right"
    return always and sizes["n"] > sizes["m"]


def _large(harness: Harness, sizes: dict[str, int]) -> Sample:
    if sizes["n"] != sizes["m"] and (_queries_without_keys(harness, sizes) or not harness.supports("n≠m")):
        longest = max(sizes["n"], sizes["m"])
        sizes = sizes | dict.fromkeys(("n", "m"), longest if longest < 1200 else 1200)
    shape = {"b": 1, "h": 1, **sizes, "d_v": sizes["d_k"]}
    if harness.supports("d_v≠d_k") and shape["d_k"] < 64:
        shape["d_v"] = 3
    return _sample(harness, f"n = {shape['n']}, m = {shape['m']}, d_k = {shape['d_k']}", shape)


def option_names(harness: Harness) -> list[str]:
    return [
        name
        for name in ("mask", "causal", "window", "lengths", "documents", "bias", "scale")
        if harness.supports(name)
    ]


def excluded(harness: Harness, names: tuple[str, ...]) -> bool:
    """Whether these options share one argument, and the target declares the combination as lacking."""
    if {"mask", "causal"} <= set(names) or {"bias", "causal"} <= set(names):
        return harness.target.declares("mask and causal") is False
    return False


def _unequal(harness: Harness, names: tuple[str, ...]) -> bool:
    """Whether an option is defined where n ≠ m: positions need an alignment, documents need n = m."""
    if "documents" in names:
        return False
    return not {"causal", "window"} & set(names) or harness.target.alignment is not None


def _sample(
    harness: Harness, name: str, sizes: dict[str, int], options: tuple[str, ...] = (), **how: Any
) -> Sample:
    """how: grad, dtype, size (a factor of q), mean (of the values), strided, scale and integer_mask (arguments).

    shared: the inputs that are one tensor, "qkv" or "kv", where their sizes allow it.
    """
    grad, strided, size = how.get("grad", False), how.get("strided", False), how.get("size", 1.0)
    dtype = how.get("dtype") or harness.dtype
    if not harness.supports("d_v≠d_k"):
        sizes = sizes | {"d_v": sizes["d_k"]}
    c = Case(probe_case(harness.function, **sizes), seed=len(name))
    if sizes["n"] == sizes["m"]:
        c = Case(c, m=c.m if "m" in harness.function.sizes else c.n)
    harness.seed(c)
    q, k, v = harness.qkv(c)
    q, k, v = (x.to(dtype) for x in (q, k, v + how.get("mean", 0.0)))
    q = q * size
    shared = how.get("shared", "")
    if shared and k.shape == v.shape and (shared == "kv" or q.shape == k.shape):
        q, k, v = (q, q, q) if shared == "qkv" else (q, k, k)
    if strided:
        q, k, v = (torch.stack([x, x + 1], -1)[..., 0] for x in (q, k, v))
    keywords: dict[str, Any] = {}
    given = [name for name in ("scale", "integer_mask") if name in how]
    for option in options:
        if OPTIONS[option][0] not in given:
            keywords |= option_value(harness, option, c)
    keywords |= {name: how[name] for name in given}
    keywords = {
        key: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        for key, x in keywords.items()
    }
    facets = {
        **{key: c[key] for key in ("b", "h", "n", "m", "d_k", "d_v") if key in c},
        "h_kv": c.get("h_kv", c.h),
        "options": options,
        "dtype": str(dtype).removeprefix("torch."),
        "strided": strided,
        "shared": shared,
        "grad": grad,
        "size": size,
    }
    upstream = harness.randn(*q.shape[:-1], v.shape[-1]) if grad else None
    call = Call(q, k, v, keywords, harness.query_offset(c.n, c.get("m", c.n)))
    implied: tuple[tuple[str, Any], ...] = (("causal", True),) if harness.supports("always causal") else ()
    if harness.fixed_window is not None:
        implied = (*implied, ("window", harness.fixed_window))
    if positions := harness.function.positions:
        implied = (
            *implied,
            ("alibi", True) if positions == "alibi" else ("rotary", positions.removeprefix("rotary ")),
        )
    return Sample(name, call, facets, grad, upstream, implied)


def rows(sample: Sample) -> Tensor | None:
    """(b, h, n, 1): queries that have an allowed key. The output of the others is a matter of promises (P03)."""
    allowed = Formula().allowed(sample.call._replace(options=sample.call.options | dict(sample.implied)))
    return None if allowed is None else allowed.any(-1, keepdim=True)


def observe(harness: Harness, sample: Sample) -> list[Tensor]:
    """What the target returns: the output and, if the sample includes them, the gradients."""
    call = sample.call
    if not sample.grad:
        with torch.no_grad():
            o = harness.attend(call.q, call.k, call.v, **call.options)
        kept = rows(sample)
        return [o if kept is None else o.where(kept, 0.0)]
    leaves = tuple(x.clone().requires_grad_() for x in (call.q, call.k, call.v))
    o = harness.attend(*leaves, **call.options)
    assert sample.upstream is not None
    return [o.detach(), *gradients(o, leaves, sample.upstream)]


def expected(formula: Formula, sample: Sample) -> list[Tensor]:
    """What a formula gives, in float64."""
    call = sample.call
    options = {
        key: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for key, x in call.options.items()
    }
    options |= dict(sample.implied)
    q, k, v = (x.double() for x in (call.q, call.k, call.v))
    if not sample.grad:
        with torch.no_grad():
            o = formula(Call(q, k, v, options, call.offset))
        kept = rows(sample)
        return [o if kept is None else o.where(kept, 0.0)]
    q, k, v = leaves = tuple(x.clone().requires_grad_() for x in (q, k, v))
    o = formula(Call(q, k, v, options, call.offset))
    assert sample.upstream is not None
    return [o.detach(), *gradients(o, leaves, sample.upstream.double())]


def close(got: list[Tensor], want: list[Tensor], dtype: torch.dtype) -> bool:
    """Equal up to rounding. Where NaN is expected (a query without an allowed key), any value is accepted."""
    for g, w in zip(got, want, strict=True):
        g, w = g.double(), w.double()
        if g.shape != w.shape:
            return False
        if w.numel():
            gap, size = (float(x.abs().max()) for x in (g - w, w))
            if isfinite(gap) and size < HUGE:  # every number is finite
                if gap > TOLERANCE[dtype] * max(1.0, size):
                    return False
                continue
        undefined = w.isnan()
        if w.numel() and bool(undefined.double().mean() > 0.8):
            return False
        g, w = g.masked_fill(undefined, 0.0), w.masked_fill(undefined, 0.0)
        if not bool(torch.isfinite(g).all()) or (w.numel() and not float(w.abs().max()) < HUGE):
            return False
        size = max(1.0, float(w.abs().max())) if w.numel() else 1.0
        if w.numel() and float((g - w).abs().max()) > TOLERANCE[dtype] * size:
            return False
    return True


def rounds_like_running_sums(sample: Sample, got: list[Tensor], want: list[Tensor]) -> bool:
    """Whether a 16-bit output has at most twice the error of a running sum over the keys in that dtype.

    Such sums lose several percent over hundreds of keys. That is a fault only if the target promises `float32 sums`.
    """
    call, dtype = sample.call, sample.call.q.dtype
    if (
        dtype not in (torch.bfloat16, torch.float16)
        or sample.grad
        or sample.facets["options"]
        or sample.implied
    ):
        return False
    scores = call.q.double() @ call.k.double().mT * call.q.shape[-1] ** -0.5
    e = (scores - scores.amax(-1, keepdim=True)).exp().to(dtype)
    total, output = torch.zeros_like(e[..., :1]), torch.zeros_like(want[0], dtype=dtype)
    for j in range(e.shape[-1]):
        total = total + e[..., j : j + 1]
        output = output + e[..., j : j + 1] * call.v[..., j : j + 1, :]
    far = float(((output / total).double() - want[0]).abs().max())
    return float((got[0].double() - want[0]).abs().max()) <= 2 * far


def evidence_of(quantity: str, got: Tensor, want: Tensor, sample: Sample) -> str:
    """got …, expected … for one quantity."""
    return f"{compare(quantity, got, want).message} ({sample.describe()})"
