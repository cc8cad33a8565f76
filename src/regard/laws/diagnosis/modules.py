"""Finds the likely cause of a module's faults: its projections, then the formula or a faulty variant that fits."""

import itertools
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..adapters.names import text_of
from ..harness import Harness
from ..measurement import compare
from .cause import MATCH_SECONDS, Cause, unfinished
from .conditions import condition
from .fitted import FITTED, Fitted, nearest_slopes, smallest
from .formula import Formula, Variant
from .module_faults import MODULE_FAULTS, ModuleFault
from .module_samples import Implied, ModuleSample, evaluate, implied_options, module_samples
from .projections import (
    Arrangement,
    arrangements,
    has_learned_slopes,
    mentions,
    misread,
    without_tables,
)
from .relative_bias import relative_fault, rotary_fault
from .rounding import SIXTEEN_BITS, in_steps, precision_lost, relative_error
from .samples import HUGE
from .some_positions import has_keys_of_its_own, uneven_positions, wrong_positions
from .variants import GRADIENTS, PRECISION, VARIANTS
from .variants.causal_window import SINKS
from .variants.positions import with_slopes

MAX_ARRANGEMENTS = 64
MAX_COMPARED = 6  # wrong calls (the smallest ones) with which a matching fault is compared
QUICK_LENGTH = 140  # the longest call with which every fault is compared
MAX_FAULTY = 12  # arrangements (the most usual ones) that are combined with every fault
MAX_ROUNDED = 0.02  # the relative error of 16-bit products on plain scores
MAX_FITTED = 4  # arrangements for which an unknown number is fitted
ADJUSTED = r"temperature|logit_scale|\btau\b|soft_?cap"  # scores that are modified on purpose
SAYS_UNSCALED = r"(?i)\bunscaled|not scaled|no scal|without scal"
UNSCALED = r"\bt5|unscaled|not scaled|no scal|without scal"
RIGHT = Formula()


class Identified(NamedTuple):
    """How a module's outputs can be reproduced: with the formula, or with a faulty variant of it."""

    arrangement: Arrangement | None
    cause: Cause | None


def identified(harness: Harness) -> Identified:
    """`identify`, computed once for all laws and for the cause."""
    if "identified" not in harness.cache:
        harness.cache["identified"] = identify(harness)
    return harness.cache["identified"]


def identify(harness: Harness) -> Identified:
    """The projections of a module and, if no arrangement of them gives the formula, the fault that explains it.

    If nothing else explains the outputs, tables of positions are set to 0: then it is attention without positions.
    """
    model = harness.model
    if model.d_model is None or model.vocab is not None or model.image is not None:
        return Identified(None, None)
    if harness.supports("pooled") or (model.layers or 1) > 1:
        return Identified(None, None)
    found = _identify(harness, harness.module())
    if found.cause is None and (fault := relative_fault(harness, harness.module())) is not None:
        return Identified(found.arrangement, fault)
    if found == Identified(None, None) and (fault := rotary_fault(harness, harness.module())) is not None:
        return Identified(None, fault)
    if found == Identified(None, None):
        with suppress(Exception):  # foreign code; the laws report what raises
            if (uneven := uneven_positions(harness, harness.module())) is not None:
                return Identified(None, uneven)
    if found == Identified(None, None) and (plainer := without_tables(harness.module())) is not None:
        arrangement, cause = _identify(harness, plainer)
        if cause is not None and cause.family == "no scale" and mentions(model.module, UNSCALED):
            return Identified(None, None)
        if arrangement is not None and cause is None and re.search(SAYS_UNSCALED, text_of(model.module)):
            cause = Cause(
                "the scores are divided by √d_k, although the docstring says unscaled", "scale against its words",
                "use q·k as it is", "with tables of positions at 0 the outputs are softmax(q kᵀ/√d_k) v", "", 1, 1,
            )  # fmt: skip
        return Identified(None, cause)
    return found


def _identify(harness: Harness, module: nn.Module) -> Identified:
    seen = list(module_samples(harness, module))
    plain = [s for s in seen if not s.options and s.x.shape[1] > 1]
    if not plain:
        return Identified(None, None)
    implied = implied_options(harness)
    readings = list(itertools.islice(arrangements(module), MAX_ARRANGEMENTS))

    def fits(a: Arrangement, formula: Formula, s: ModuleSample, fault: ModuleFault | None = None) -> bool:
        try:
            want = evaluate(a, formula, s, fault, implied)
        except (RuntimeError, ValueError, IndexError):
            return False
        return near(s.got, want, _tolerance(a, s.got.dtype)) and _says_something(a, s, want, implied)

    first = plain[0]
    for a in readings:
        if fits(a, RIGHT, first):
            cause = _cause(a, seen, fits, implied)
            if cause is not None and not cause.exact and has_keys_of_its_own(harness, module, a, seen):
                cause = None
            return Identified(a, cause or misread(a, harness.model.module))
    if any("sink" in name for name, _ in module.named_parameters()):
        return Identified(None, None)  # sink logits of 0 are one more term of the softmax, and no fault
    usual = sorted(readings, key=lambda a: (bool(a.packing), a.residual, a.order != "(h d)"))
    for a in usual[:MAX_FAULTY]:
        for fault in MODULE_FAULTS:
            if all(fits(a, RIGHT, s, fault) for s in plain[:2]):
                return Identified(None, _described(a, seen, fault, RIGHT, implied))
        for variant in (*(SINKS if implied.get("sinks") else ()), *VARIANTS):
            if variant in GRADIENTS:
                continue
            if all(fits(a, variant.formula(), s) for s in plain[:2]):
                return Identified(None, _described(a, seen, variant, variant.formula(), implied))
        if implied.get("causal"):
            dense = replace(RIGHT, causal=lambda i, j, c: (i >= 0) & (j >= 0))
            if fits(a, dense, first):
                return Identified(None, None)
    for a in () if has_learned_slopes(module) else [a for a in usual[:MAX_FITTED] if a.alibi]:
        sloped = _slopes(a, first, implied)
        if sloped is not None and all(fits(a, sloped.formula(), s) for s in plain[:2]):
            return Identified(None, _described(a, seen, sloped, sloped.formula(), implied))
    if not mentions(module, ADJUSTED):
        for a in usual[:MAX_FITTED]:
            for variant in _fitted(a, first, implied):
                if all(fits(a, variant.formula(), s) for s in plain[:2]):
                    return Identified(None, _described(a, seen, variant, variant.formula(), implied))
    for a in usual[:MAX_FAULTY] if not mentions(module, ADJUSTED) else ():
        with suppress(RuntimeError, ValueError, IndexError):  # the shapes do not fit this arrangement
            limit = _tolerance(a, first.got.dtype)
            if (cause := wrong_positions(harness, module, a, seen, implied, limit)) is not None:
                return Identified(None, cause)
    for a in usual[:MAX_FAULTY]:
        with suppress(RuntimeError, ValueError, IndexError):  # the shapes do not fit this arrangement
            if _rounds(harness, module, a, first, implied):
                return Identified(None, precision_lost(_evidence(a, first, implied)))
    return Identified(None, None)


def _rounds(
    harness: Harness, module: nn.Module, a: Arrangement, sample: ModuleSample, implied: Implied
) -> bool:
    """Whether the outputs are nearly those of the formula, and change in steps with an input."""
    if relative_error(sample.got, evaluate(a, RIGHT, sample, None, implied)) > MAX_ROUNDED:
        return False

    def got(x: Tensor, context: Tensor | None) -> Tensor:
        with torch.no_grad():
            return harness.run(x, context, module, **sample.options)

    def want(x: Tensor, context: Tensor | None) -> Tensor:
        return evaluate(a, RIGHT, sample._replace(x=x, context=context), None, implied)

    x, context = sample.x, sample.context
    if in_steps(lambda y: got(y, context), lambda y: want(y, context), x, SIXTEEN_BITS):
        return True
    return context is not None and in_steps(lambda y: got(x, y), lambda y: want(x, y), context, SIXTEEN_BITS)


def _fitted(a: Arrangement, sample: ModuleSample, implied: Implied) -> Iterator[Variant]:
    """Variants with one unknown number, fitted to an output; not the constant scale, as a module has one width."""
    for each in FITTED[1:]:
        if each.option:
            continue

        def error(value: float, each: Fitted = each) -> float:
            want = evaluate(a, each.variant(value).formula(), sample, None, implied)
            return float((sample.got.double() - want).nan_to_num(0.0).abs().max())

        with suppress(RuntimeError, ValueError, IndexError):  # the shapes do not fit this arrangement
            yield each.variant(smallest(error, each.low, each.high))


def _slopes(a: Arrangement, sample: ModuleSample, implied: Implied) -> Variant | None:
    """ALiBi with slopes fitted to an output."""

    def error(slopes: Tensor) -> Tensor:
        return evaluate(a, with_slopes(slopes).formula(), sample, None, implied) - sample.got.double()

    with suppress(RuntimeError, ValueError, IndexError):  # the shapes do not fit this arrangement
        return with_slopes(nearest_slopes(error, a.heads))
    return None


def _described(
    a: Arrangement, seen: list[ModuleSample], fault: Variant | ModuleFault, formula: Formula, implied: Implied
) -> Cause:
    sample = next(s for s in seen if not s.options and s.x.shape[1] > 1)
    return Cause(fault.name, fault.family, fault.fix, _evidence(a, sample, implied), "", 1, 1)


def _evidence(a: Arrangement, sample: ModuleSample, implied: Implied) -> str:
    want = evaluate(a, RIGHT, sample, None, implied)
    return f"{compare('the output', sample.got, want).message}, in {sample.name}"


def _cause(a: Arrangement, seen: list[ModuleSample], fits: Any, implied: Implied) -> Cause | None:
    """With the projections known: the fault that explains the samples that the formula does not."""
    wrong = [s for s in seen if not fits(a, RIGHT, s) and bool(torch.isfinite(_real(s)).all())]
    wrong = [s for s in wrong if not _equal_at_real(a, s, implied)]
    if not wrong:
        return None
    right = [s for s in seen if all(s is not w for w in wrong)]
    best: tuple[int, int, Any] | None = None
    candidates: list[tuple[Any, Formula, ModuleFault | None]] = [
        (v, v.formula(), None) for v in VARIANTS if v not in GRADIENTS and v not in PRECISION
    ]
    candidates += [(f, RIGHT, f) for f in MODULE_FAULTS]
    candidates += [(v, v.formula(), None) for v in SINKS if implied.get("sinks")]
    compared = sorted(wrong, key=lambda s: s.x.shape[:2].numel())[:MAX_COMPARED]
    quick = [s for s in compared if s.x.shape[1] <= QUICK_LENGTH] or compared[:1]
    until, done = time.process_time() + MATCH_SECONDS, 0
    for fault, formula, outer in candidates:
        if time.process_time() > until:
            break
        done += 1
        if not any(_same(a, formula, s, outer, implied) for s in quick):
            continue
        matched = [s for s in compared if _same(a, formula, s, outer, implied)]
        kept = sum(fits(a, formula, s, outer) for s in right)
        if best is None or (len(matched), kept) > best[:2]:
            best = (len(matched), kept, fault)
    sample = wrong[0]
    want = evaluate(a, RIGHT, sample, None, implied)
    text = f"{compare('the output', *_at_real(sample, want)).message}, in {sample.name}"
    text += unfinished(done, len(candidates))
    where = condition([s.facets for s in wrong], [s.facets for s in right])
    if best is None:
        return Cause(
            "outputs are wrong", f"outputs are wrong {where}".strip(), "compare with the formula on this call",
            text, where, 0, len(wrong), exact=False,
        )  # fmt: skip
    fault = best[2]
    where = where if best[1] < len(right) else ""
    return Cause(fault.name, fault.family, fault.fix, text, where, best[0], len(compared))


def _tolerance(a: Arrangement, dtype: torch.dtype) -> float:
    """The tolerance for outputs of a module; rotary angles are usually computed in float32, whatever the dtype."""
    return 2e-4 if dtype != torch.float64 else 1e-5 if a.rotary else 1e-9


def near(got: Tensor, want: Tensor, tolerance: float) -> bool:
    """Equal up to rounding; where NaN is expected (a query without an allowed key), any value is accepted."""
    got, want = got.double(), want.double()
    if got.shape != want.shape:
        return False
    gap, size = (float(x.abs().max()) if x.numel() else 0.0 for x in (got - want, want))
    if isfinite(gap) and size < HUGE:  # every number is finite
        return gap <= tolerance * max(1.0, size)
    undefined = want.isnan()
    if bool(undefined.double().mean() > 0.8):
        return False
    got, want = got.masked_fill(undefined, 0.0), want.masked_fill(undefined, 0.0)
    if not float(want.abs().max()) < HUGE:
        return False
    gap = float((got - want).abs().max())
    return gap <= tolerance * max(1.0, float(want.abs().max()))


def _real(s: ModuleSample) -> Tensor:
    """The outputs at real positions; outputs at padding are not compared."""
    return _at_real(s, s.got)[0]


def _at_real(s: ModuleSample, want: Tensor) -> tuple[Tensor, Tensor]:
    lengths = s.options.get("lengths")
    if lengths is None:
        return s.got, want
    real = (torch.arange(s.x.shape[1], device=s.x.device) < lengths[:, None])[..., None]
    return torch.where(real, s.got, 0.0), torch.where(real, want.to(s.got.dtype), 0.0)


def _same(
    a: Arrangement, formula: Formula, s: ModuleSample, fault: ModuleFault | None, implied: Implied
) -> bool:
    try:
        got, want = _at_real(s, evaluate(a, formula, s, fault, implied))
    except (RuntimeError, ValueError, IndexError):
        return False
    return near(got, want, _tolerance(a, s.got.dtype)) and _says_something(a, s, want, implied)


def _says_something(a: Arrangement, s: ModuleSample, want: Tensor, implied: Implied) -> bool:
    """Whether a variant without a value for some queries has one for an output that the formula does not explain."""
    undefined = want.isnan()
    if not bool(undefined.any()):
        return True
    got, right = _at_real(s, evaluate(a, RIGHT, s, None, implied))
    if got.shape != right.shape:
        return True
    limit = _tolerance(a, got.dtype) * max(1.0, float(right.nan_to_num(0.0).abs().max()))
    wrong = ~((got - right).abs() <= limit) & ~right.isnan()
    return not bool(wrong.any()) or bool((wrong & ~undefined).any())


def _equal_at_real(a: Arrangement, s: ModuleSample, implied: Implied) -> bool:
    return _same(a, RIGHT, s, None, implied)
