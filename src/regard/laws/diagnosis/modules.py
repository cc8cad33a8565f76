"""Finds the likely cause of a module's faults: its projections, then the formula or a faulty variant that fits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from ..harness import Harness
from ..measurement import compare
from .cause import Cause
from .conditions import condition
from .formula import Call, Formula, Variant
from .projections import Arrangement, Matrix, arrangements, misread
from .samples import HUGE
from .variants import GRADIENTS, PRECISION, VARIANTS

MAX_ARRANGEMENTS = 64
RIGHT = Formula()


class ModuleSample(NamedTuple):
    """One call of a module, with its output."""

    name: str
    x: Tensor
    context: Tensor | None
    options: dict[str, Any]
    got: Tensor
    facets: dict[str, Any]


@dataclass(frozen=True)
class ModuleFault:
    """A fault outside the attention formula: in projecting, splitting or merging heads."""

    name: str
    family: str
    fix: str
    project: Callable[[Arrangement, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] | None = None
    merge: Callable[[Arrangement, Tensor, Tensor], Tensor] | None = None


def _viewed(a: Arrangement, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    def split(y: Tensor, heads: int) -> Tensor:
        b, n, width = y.shape
        return y.reshape(b, heads, n, width // heads)

    return split(a.q(x), a.heads), split(a.k(source), a.kv_heads), split(a.v(source), a.kv_heads)


def _wrong_matrix(**roles: str) -> Callable[[Arrangement, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Some of q, k and v with the matrix of another."""

    def project(a: Arrangement, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        changed = replace(a, **{role: getattr(a, other) for role, other in roles.items()})
        return changed.project(x, source)

    return project


def _own_order(a: Arrangement) -> Arrangement:
    return replace(a, order="(d h)" if a.order == "(h d)" else "(h d)")


def _merged_otherwise(a: Arrangement, o: Tensor, x: Tensor) -> Tensor:
    return _own_order(a).merge(o, x)


def _merged_by_view(a: Arrangement, o: Tensor, x: Tensor) -> Tensor:
    b, h, n, d = o.shape
    y = o.reshape(b, n, h * d)
    return y if a.o is None else a.o(y)


def _split_alone(which: str) -> Callable[[Arrangement, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """One of q, k and v split into heads in another order than the others."""

    def project(a: Arrangement, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        usual, other = a.project(x, source), _own_order(a).project(x, source)
        q, k, v = (o if name in which else u for name, u, o in zip("qkv", usual, other))
        return q, k, v

    return project


def _view_alone(which: str) -> Callable[[Arrangement, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    def project(a: Arrangement, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        usual, other = a.project(x, source), _viewed(a, x, source)
        q, k, v = (o if name in which else u for name, u, o in zip("qkv", usual, other))
        return q, k, v

    return project


def _unprojected(which: str) -> Callable[[Arrangement, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    def project(a: Arrangement, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        same = Matrix(torch.eye(x.shape[-1], dtype=x.dtype, device=x.device))
        changes: dict[str, Any] = dict.fromkeys(which, same)
        return replace(a, **changes).project(x, source)

    return project


def _twice(a: Arrangement, o: Tensor, x: Tensor) -> Tensor:
    y = a.merge(o, x)
    return y if a.o is None else a.o(y)


def _from_x(which: str) -> Callable[[Arrangement, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Keys or values of the input where the context belongs."""

    def project(a: Arrangement, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = a.project(x, source)
        _, own_k, own_v = a.project(x, x)
        if own_k.shape[-2] != k.shape[-2]:
            return q, (own_k if "k" in which else k), (own_v if "v" in which else v)
        return q, (own_k if "k" in which else k), (own_v if "v" in which else v)

    return project


def _rotated_value(a: Arrangement, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from .projections import rotated

    q, k, v = a.project(x, source)
    return q, k, rotated(v, a.rotary) if a.rotary else v


def _rotated_only(which: str) -> Callable[[Arrangement, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    def project(a: Arrangement, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = a.project(x, source)
        plain_q, plain_k, _ = replace(a, rotary="").project(x, source)
        return (q if "q" in which else plain_q), (k if "k" in which else plain_k), v

    return project


def _rotated_against(a: Arrangement, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from .projections import rotated

    q, k, v = replace(a, rotary="").project(x, source)
    if not a.rotary:
        return q, k, v
    return rotated(q, a.rotary), rotated(k.flip(-2), a.rotary).flip(-2), v


MODULE_FAULTS = (
    ModuleFault(
        "heads are split with view(b, h, n, d) instead of view(b, n, h, d).transpose(1, 2)",
        "head split order",
        "split as (b, n, h, d), then move the head axis",
        project=_viewed,
    ),
    ModuleFault(
        "heads are merged with view instead of transpose: positions and heads are mixed",
        "head split order",
        "move the head axis back before merging: transpose(1, 2).reshape(b, n, h · d)",
        merge=_merged_by_view,
    ),
    ModuleFault(
        "heads are split and merged with view: positions and heads are mixed",
        "head split order",
        "move axes with transpose before and after attention",
        project=_viewed,
        merge=_merged_by_view,
    ),
    ModuleFault(
        "heads are merged in another order than they were split",
        "head split order",
        "merge as (h d) what was split as (h d)",
        merge=_merged_otherwise,
    ),
    *(
        ModuleFault(
            f"{' and '.join(which)} are split into heads in another order",
            "head split order",
            "split q, k and v alike",
            project=_split_alone(which),
        )
        for which in ("q", "k", "v", "qk", "kv", "qv")
    ),
    *(
        ModuleFault(
            f"{' and '.join(which)} split with view instead of transpose",
            "head split order",
            "split as (b, n, h, d), then move the head axis",
            project=_view_alone(which),
        )
        for which in ("q", "k", "v", "qk", "kv", "qv")
    ),
    *(
        ModuleFault(
            f"{role} is projected with the matrix of {other}",
            "wrong projection",
            f"use W_{role} for {role}",
            project=_wrong_matrix(**{role: other}),
        )
        for role in "qkv"
        for other in "qkv"
        if role != other
    ),
    ModuleFault(
        "q, k and v share the matrix of q",
        "wrong projection",
        "use W_q, W_k and W_v",
        project=_wrong_matrix(k="q", v="q"),
    ),
    *(
        ModuleFault(
            f"{role} is not projected", "projection missing", f"apply W_{role}", project=_unprojected(role)
        )
        for role in "qkv"
    ),
    ModuleFault(
        "the output projection is not applied",
        "projection missing",
        "apply W_o to the merged heads",
        merge=lambda a, o, x: replace(a, o=None).merge(o, x),
    ),
    ModuleFault("the output projection is applied twice", "projection twice", "apply W_o once", merge=_twice),
    *(
        ModuleFault(
            f"cross-attention takes {word} from the input instead of the context",
            "context ignored",
            "project the context for keys and values",
            project=_from_x(which),
        )
        for which, word in (("kv", "keys and values"), ("k", "keys"), ("v", "values"))
    ),
    ModuleFault(
        "rotary positions are applied to v as well",
        "rotary positions",
        "rotate q and k only",
        project=_rotated_value,
    ),
    *(
        ModuleFault(
            f"rotary positions are applied to {word} only",
            "rotary positions",
            "rotate q and k alike",
            project=_rotated_only(which),
        )
        for which, word in (("q", "q"), ("k", "k"))
    ),
)


def module_samples(harness: Harness) -> Iterator[ModuleSample]:
    """Calls of a module that takes vectors, with the options that it supports."""
    model = harness.model
    limit = model.max_length
    sizes = [n for n in (5, 7, 1) if n <= limit]
    choices: list[tuple[str, ...]] = [()]
    choices += [(o,) for o in ("causal", "mask", "lengths") if harness.supports(o)]
    if harness.supports("context lengths") and model.architecture != "attention":
        choices.append(("context lengths",))
    pairs = (("causal", "mask"), ("causal", "lengths"), ("mask", "lengths"))
    choices += [p for p in pairs if all(harness.supports(o) for o in p)]
    for names in choices:
        for n in sizes if not names else sizes[1:2]:
            yield from _module_sample(harness, 2, n, names)
    if model.architecture == "attention" and harness.supports("context"):
        yield from _module_sample(harness, 2, 5, (), m=7)
    for n in (70, 530, 1100):
        if n <= limit:
            yield from _module_sample(harness, 1, n, ())
    for names in choices[1:3]:
        if limit >= 140:
            yield from _module_sample(harness, 1, 140, names)


def _module_sample(
    harness: Harness, b: int, n: int, names: tuple[str, ...], m: int | None = None
) -> Iterator[ModuleSample]:
    from ..law import Case

    harness.seed(Case(seed=n))
    x = harness.sequence(b, n)
    context = harness.context(b, n + 2) if m is None else harness.second_sequence(b, m)
    options: dict[str, Any] = {}
    if "causal" in names:
        options["causal"] = True
    if "mask" in names:
        table = harness.rand(b, n, n) < 0.5
        options["allowed"] = table | torch.eye(n, dtype=torch.bool, device=harness.device)
    if "lengths" in names:
        options["lengths"] = torch.tensor([max(1, n - 2), n, n - 1][:b], device=harness.device)
    if "context lengths" in names:
        options["context_lengths"] = torch.tensor([max(1, n - 1), n + 2, n][:b], device=harness.device)
    try:
        with torch.no_grad():
            got = harness.run(x, context, **options)
    except Exception:  # foreign code; the laws report what raises
        return
    facets = {
        "b": b,
        "n": n,
        "m": n if context is None else context.shape[1],
        "h": harness.model.heads or 1,
        "h_kv": 0,
        "d_k": 0,
        "d_v": 0,
        "options": names,
        "dtype": "",
        "strided": False,
        "grad": False,
        "size": 1.0,
    }
    words = f"n = {n}{f', m = {m}' if m else ''}{', ' + ' and '.join(names) if names else ''}"
    yield ModuleSample(f"a call with {words}", x, context, options, got, facets)


def evaluate(
    arrangement: Arrangement,
    formula: Formula,
    sample: ModuleSample,
    fault: ModuleFault | None = None,
    always_causal: bool = False,
) -> Tensor:
    """What a module with these projections returns, in float64."""
    x = sample.x.double()
    source = x if sample.context is None else sample.context.double()
    project = fault.project if fault is not None and fault.project is not None else None
    merge = fault.merge if fault is not None and fault.merge is not None else None
    q, k, v = project(arrangement, x, source) if project else arrangement.project(x, source)
    options = dict(sample.options)
    if options.get("allowed") is not None:
        options["allowed"] = options["allowed"][:, None]
    if "context_lengths" in options:  # the keys are those of the context
        options["lengths"] = options.pop("context_lengths")
    if always_causal and sample.context is None:
        options["causal"] = True
    o = formula(Call(q, k, v, options, k.shape[-2] - q.shape[-2]))
    return merge(arrangement, o, x) if merge else arrangement.merge(o, x)


class Identified(NamedTuple):
    """How a module's outputs can be reproduced: with the formula, or with a faulty variant of it."""

    arrangement: Arrangement | None
    cause: Cause | None


def identified(harness: Harness) -> Identified:
    """`identify`, made once for all laws and for the cause."""
    if "identified" not in harness.cache:
        harness.cache["identified"] = identify(harness)
    return harness.cache["identified"]


def identify(harness: Harness) -> Identified:
    """The projections of a module and, if no reading of them gives the formula, the fault that does."""
    model = harness.model
    if model.d_model is None or model.vocab is not None or model.image is not None:
        return Identified(None, None)
    if harness.supports("pooled") or (model.layers or 1) > 1:
        return Identified(None, None)
    seen = list(module_samples(harness))
    plain = [s for s in seen if not s.options and s.x.shape[1] > 1]
    if not plain:
        return Identified(None, None)
    always = harness.supports("always causal")
    tolerance = 1e-9 if harness.dtype == torch.float64 else 2e-4
    readings = []
    for each in arrangements(harness.module()):
        readings.append(each)
        if len(readings) >= MAX_ARRANGEMENTS:
            break

    def fits(a: Arrangement, formula: Formula, s: ModuleSample, fault: ModuleFault | None = None) -> bool:
        try:
            want = evaluate(a, formula, s, fault, always)
        except (RuntimeError, ValueError, IndexError):
            return False
        return near(s.got, want, tolerance)

    first = plain[0]
    for a in readings:
        if fits(a, RIGHT, first):
            return Identified(a, _cause(a, seen, fits, always) or misread(a, harness.model.module))
    for a in readings:
        for fault in MODULE_FAULTS:
            if all(fits(a, RIGHT, s, fault) for s in plain[:2]):
                return Identified(None, _described(a, seen, fault, RIGHT, always))
        for variant in VARIANTS:
            if variant in GRADIENTS:
                continue
            if all(fits(a, variant.formula(), s) for s in plain[:2]):
                return Identified(None, _described(a, seen, variant, variant.formula(), always))
        if always:
            dense = replace(RIGHT, causal=lambda i, j, c: (i >= 0) & (j >= 0))
            if fits(a, dense, first):
                return Identified(None, None)
    return Identified(None, None)


def _described(
    a: Arrangement, seen: list[ModuleSample], fault: Variant | ModuleFault, formula: Formula, always: bool
) -> Cause:
    sample = next(s for s in seen if not s.options and s.x.shape[1] > 1)
    want = evaluate(a, RIGHT, sample, None, always)
    text = f"{compare('the output', sample.got, want).message}, in {sample.name}"
    return Cause(fault.name, fault.family, fault.fix, text, "", 1, 1)


def _cause(a: Arrangement, seen: list[ModuleSample], fits: Any, always: bool) -> Cause | None:
    """With the projections known: the fault that explains the samples that the formula does not."""
    wrong = [s for s in seen if not fits(a, RIGHT, s) and bool(torch.isfinite(_real(s)).all())]
    wrong = [s for s in wrong if not _equal_at_real(a, s, always)]
    if not wrong:
        return None
    right = [s for s in seen if all(s is not w for w in wrong)]
    best: tuple[int, int, Any] | None = None
    candidates: list[tuple[Any, Formula, ModuleFault | None]] = [
        (v, v.formula(), None) for v in VARIANTS if v not in GRADIENTS and v not in PRECISION
    ]
    candidates += [(f, RIGHT, f) for f in MODULE_FAULTS]
    for fault, formula, outer in candidates:
        matched = [s for s in wrong if _same(a, formula, s, outer, always)]
        if not matched:
            continue
        kept = sum(fits(a, formula, s, outer) for s in right)
        if best is None or (len(matched), kept) > best[:2]:
            best = (len(matched), kept, fault)
    sample = wrong[0]
    want = evaluate(a, RIGHT, sample, None, always)
    text = f"{compare('the output', *_at_real(sample, want)).message}, in {sample.name}"
    where = condition([s.facets for s in wrong], [s.facets for s in right])
    if best is None:
        return Cause(
            "outputs are wrong", f"outputs are wrong {where}".strip(), "compare with the formula on this call",
            text, where, 0, len(wrong), exact=False,
        )  # fmt: skip
    fault = best[2]
    where = where if best[1] < len(right) else ""
    return Cause(fault.name, fault.family, fault.fix, text, where, best[0], len(wrong))


def near(got: Tensor, want: Tensor, tolerance: float) -> bool:
    """Equal up to rounding; where NaN is expected, at a query without an allowed key, anything may be."""
    got, want = got.double(), want.double()
    if got.shape != want.shape:
        return False
    undefined = want.isnan()
    if bool(undefined.double().mean() > 0.8):
        return False
    got, want = got.masked_fill(undefined, 0.0), want.masked_fill(undefined, 0.0)
    if not float(want.abs().max()) < HUGE:
        return False
    gap = float((got - want).abs().max())
    return gap <= tolerance * max(1.0, float(want.abs().max()))


def _real(s: ModuleSample) -> Tensor:
    """Outputs at real positions; the others may be anything."""
    return _at_real(s, s.got)[0]


def _at_real(s: ModuleSample, want: Tensor) -> tuple[Tensor, Tensor]:
    lengths = s.options.get("lengths")
    if lengths is None:
        return s.got, want
    real = (torch.arange(s.x.shape[1], device=s.x.device) < lengths[:, None])[..., None]
    return torch.where(real, s.got, 0.0), torch.where(real, want.to(s.got.dtype), 0.0)


def _same(a: Arrangement, formula: Formula, s: ModuleSample, fault: ModuleFault | None, always: bool) -> bool:
    try:
        got, want = _at_real(s, evaluate(a, formula, s, fault, always))
    except (RuntimeError, ValueError, IndexError):
        return False
    return near(got, want, 1e-9 if s.got.dtype == torch.float64 else 2e-4)


def _equal_at_real(a: Arrangement, s: ModuleSample, always: bool) -> bool:
    return _same(a, RIGHT, s, None, always)


def as_projections(a: Arrangement) -> Any:
    """The matrices per head, as the laws of modules take them; None where the reading has positions or a residual."""
    from ..target import Projections

    if a.rotary or a.residual or a.order != "(h d)" or a.o is None:
        return None

    def per_head(matrix: Matrix, heads: int) -> Tensor:
        return rearrange(matrix.w, "e (h d) -> h e d", h=heads)

    def biases(matrix: Matrix, heads: int) -> Tensor | None:
        return None if matrix.b is None else rearrange(matrix.b, "(h d) -> h d", h=heads)

    return Projections(
        per_head(a.q, a.heads), per_head(a.k, a.kv_heads), per_head(a.v, a.kv_heads),
        rearrange(a.o.w, "(h d) e -> h d e", h=a.heads),
        biases(a.q, a.heads), biases(a.k, a.kv_heads), biases(a.v, a.kv_heads), a.o.b,
    )  # fmt: skip
