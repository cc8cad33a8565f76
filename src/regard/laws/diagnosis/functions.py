"""Finds the likely cause of a function's faults by comparing its outputs with those of faulty variants."""

import time
from collections.abc import Iterator
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor

from ..call_times import CallTimes
from ..harness import DTYPES, Harness, Inexpressible, WrongOutput
from ..measurement import compare
from ..probe import describe
from .cause import MATCH_SECONDS, Cause, unfinished
from .conditions import condition
from .fitted import fitting
from .formula import Formula, Variant
from .mixing import mixed
from .rounding import SIXTEEN_BITS, THIRTY_TWO_BITS, in_steps, precision_lost, relative_error
from .samples import TOLERANCE, Sample, close, expected, observe, rounds_like_running_sums, samples
from .symptoms import symptom
from .variants import CORE, VARIANTS

RIGHT = Formula()
UNDEFINED = (
    RuntimeError,
    IndexError,
    ValueError,
    ArithmeticError,
)  # a variant is not defined for these sizes
PAIR_SECONDS = 3.0  # processor time for comparing pairs of variants
OBSERVE_SECONDS = 5.0  # processor time of a target's calls; a large call that would exceed it is skipped
SMALL_PAIRS = 10_000  # queries times keys, over rows and heads, of a call that is never skipped
FEW_KEYS = 16  # a 16-bit sum over so few keys loses little precision
MAX_PAIRS = 3  # partial matches that are combined with every other variant
MAX_SIZE = 4_000_000  # multiplications of a sample on which the variants are compared
MAX_COMPARED = 24  # wrong and right samples on which a variant is compared
MIN_SHARE = 8  # a variant that explains less than 1/8 of the wrong samples fits those by chance


class Observations:
    """What a target returned on every sample, sorted into wrong results, right results and errors."""

    def __init__(self, harness: Harness):
        self.harness = harness
        self.wrong: list[tuple[Sample, list[Tensor], list[Tensor]]] = []
        self.right: list[tuple[Sample, list[Tensor]]] = []
        self.errors: list[tuple[Sample, str]] = []
        self.note = ""  # set if the time ran out before all variants were compared
        self.left_out: list[Sample] = []  # large calls for which the target is too slow
        times = CallTimes(OBSERVE_SECONDS)
        for sample in samples(harness):
            pairs, kind = _pairs(sample), "gradients" if sample.grad else ""
            if pairs > SMALL_PAIRS and times.estimate(pairs, kind) > times.left:
                self.left_out.append(sample)
                continue
            try:
                got = times.run(partial(observe, harness, sample), pairs, kind)
            except Inexpressible:
                continue
            except Exception as e:  # the target is foreign code, which may raise anything
                self.errors.append(
                    (sample, describe(e) if isinstance(e, WrongOutput) else f"raised {describe(e)}")
                )
                continue
            want = expected(RIGHT, sample)
            if close(got, want, dtype_of(sample)) or (
                not harness.supports("float32 sums") and rounds_like_running_sums(sample, got, want)
            ):
                self.right.append((sample, got))
            else:
                self.wrong.append((sample, got, want))
            if len(self.wrong) >= 40:  # enough to distinguish the variants
                break

    @property
    def right_of_several_keys(self) -> list[tuple[Sample, list[Tensor]]]:
        """Calls that say where a fault is not; one key has weight 1, whatever its score is."""
        return [(s, got) for s, got in self.right if s.facets["m"] > 1]

    @property
    def unseen(self) -> str:
        """A sentence about the calls that were skipped; "" if there were none."""
        if not self.left_out:
            return ""
        count = "1 call was" if len(self.left_out) == 1 else f"{len(self.left_out)} calls were"
        return f"{count} skipped, first {self.left_out[0].name}: the target is too slow for this size"

    def fault(self) -> str | None:
        """A call that raises or returns a wrong shape or dtype, although the signature has all of its options."""
        for sample, error in self.errors:
            if not refused(sample, error):
                return f"{error}, in {sample.name} ({sample.describe()})"
        return None


def refused(sample: Sample, error: str) -> bool:
    """Whether a call with several options was rejected; each works alone, so that is not a fault."""
    named = [name for name in sample.facets["options"] if name != "integer mask"]  # a form of the mask
    return error.startswith("raised") and len(named) > 1


def observations(harness: Harness) -> Observations:
    """The observations of a target, made once for all laws and for the cause."""
    if "observations" not in harness.cache:
        harness.cache["observations"] = Observations(harness)
    return harness.cache["observations"]


def _pairs(sample: Sample) -> int:
    """Queries times keys, of all rows and heads."""
    q, k = sample.call.q, sample.call.k
    return q.shape[:-1].numel() * k.shape[-2]


def dtype_of(sample: Sample) -> torch.dtype:
    return DTYPES[sample.facets["dtype"]]


def find_cause(harness: Harness) -> Cause | None:
    """The likely cause of a function's faults; None if no sample shows one."""
    if behavior := symptom(harness):
        return behavior
    seen = observations(harness)
    if not seen.wrong:
        return _from_error(seen)
    ranked = _ranked(seen)
    best = ranked[0] if ranked else None
    compared = _spread(seen.wrong, MAX_COMPARED)
    if best is None or len(best[1]) < len(compared):
        if (cause := _parts(seen)) is not None:
            return cause
        finite = [c for c in compared if all(bool(torch.isfinite(g).all()) for g in c[1])]
        if best is None or 2 * len(best[1]) < len(
            finite
        ):  # a variant that explains most calls is more precise
            cause = _dependence(seen)
        if cause is not None:
            return cause
        partial = [v for v, *_ in ranked[:MAX_PAIRS]] or [v for v in CORE if relevant(v, compared[0][0])]
        right = _spread(seen.right, MAX_COMPARED)
        best = _pair(partial, compared, right, len(best[2]) if best else len(right)) or best
    if best is None:
        return _unexplained(seen)
    variant, matched, contradicted = best
    where = ""
    if contradicted:  # right calls that the fault would change; "only" has to be true of all wrong calls
        right = _light(seen.right_of_several_keys)
        unlike = [s for s, got in right if relevant(variant, s) and not _matches(variant, s, got)]
        where = condition([s.facets for s, *_ in seen.wrong], [s.facets for s in unlike])
    sample, got, want = next(w for w in seen.wrong if w[0].name in matched)
    return Cause(
        variant.name,
        variant.family,
        variant.fix,
        evidence(sample, got, want),
        where,
        len(matched),
        len(compared),
    )


def evidence(sample: Sample, got: list[Tensor], want: list[Tensor]) -> str:
    """got …, expected …, for the quantity that differs most on this sample."""
    names = ("the output", "∂/∂q", "∂/∂k", "∂/∂v")
    measured = [compare(name, g, w) for name, g, w in zip(names, got, want)]
    largest = max(measured, key=lambda m: m.rank)
    return f"{largest.message}, in {sample.name} ({sample.describe()})"


def _matches(variant: Variant | Formula, sample: Sample, got: list[Tensor]) -> bool:
    formula = variant.formula() if isinstance(variant, Variant) else variant
    try:
        return close(got, expected(formula, sample), dtype_of(sample))
    except UNDEFINED:
        return False


def _ranked(seen: Observations) -> list[tuple[Variant, set[str], list[Sample]]]:
    """The variants that explain a wrong sample; first those that explain most and contradict fewest right ones."""
    wrong = _spread(seen.wrong, MAX_COMPARED)
    right = _spread(seen.right, MAX_COMPARED)
    first = _spread(seen.wrong, 6)
    scored = []
    until = time.process_time() + MATCH_SECONDS
    for order, variant in enumerate(_candidates(seen)):
        if time.process_time() > until:
            seen.note = unfinished(min(order, len(VARIANTS)), len(VARIANTS))
            break
        tried = [(s, got) for s, got, *_ in first if relevant(variant, s)]
        if not any(_matches(variant, sample, got) for sample, got in tried):
            continue
        matched = {s.name for s, got, *_ in wrong if _matches(variant, s, got)}
        share = (
            MIN_SHARE if order < len(VARIANTS) else 2
        )  # a fitted number explains the call it was fitted to
        if share * len(matched) < sum(relevant(variant, s) for s, *_ in wrong):
            continue
        contradicted = [s for s, got in right if relevant(variant, s) and not _matches(variant, s, got)]
        alone = "combine" not in variant.changes  # a fault of one mask rather than of combining two
        scored.append((len(matched), -len(contradicted), alone, -order, variant, matched, contradicted))
    scored.sort(key=lambda row: row[:4], reverse=True)
    return [row[4:] for row in scored]


def _candidates(seen: Observations) -> Iterator[Variant]:
    """The faulty variants, then those with a number that fits the simplest wrong call."""
    yield from VARIANTS
    exact = (torch.float64, torch.float32)  # 16-bit outputs are too coarse to fit a number
    plain = [
        w for w in seen.wrong if w[0].facets["size"] == 1.0 and not w[0].grad and dtype_of(w[0]) in exact
    ]
    for sample, got, _ in _spread(plain, 1):
        yield from fitting(sample, got, dtype_of(sample))


SLICES, PLURALS = ("batch row", "head", "query"), ("batch rows", "heads", "queries")


def _parts(seen: Observations) -> Cause | None:
    """A fault in only some batch rows, heads or queries, while the other outputs are right."""
    for axis, word in enumerate(SLICES):
        cut = [
            (s, got, want, _wrong_slices(got, want, axis, s))
            for s, got, want in _spread(seen.wrong, 6)
            if not s.grad
        ]
        cut = [c for c in cut if 0 < int(c[3].sum()) < len(c[3])]
        if not cut or len(cut) < sum(
            s.call.q.shape[axis] > 1 for s, *_ in _spread(seen.wrong, 6) if not s.grad
        ):
            continue
        for variant in VARIANTS:
            if all(
                relevant(variant, s) and _slices_match(variant, s, got, bad, axis) for s, got, _, bad in cut
            ):
                sample, got, want, bad = cut[0]
                some = ", ".join(str(i) for i in bad.nonzero().flatten().tolist()[:4])
                family = f"{variant.family.split(' ')[0]} of one {SLICES[axis].split(' ')[-1]}"
                return Cause(
                    f"{variant.name}, for some of the {PLURALS[axis]} (here {word} {some})",
                    family if variant.family.startswith("mask") else variant.family,
                    variant.fix, evidence(sample, got, want), "", len(cut), len(seen.wrong),
                )  # fmt: skip
    return None


def _wrong_slices(got: list[Tensor], want: list[Tensor], axis: int, sample: Sample) -> Tensor:
    """Which batch rows, heads or queries of an output are wrong."""
    if got[0].shape != want[0].shape:
        return torch.zeros(0, dtype=torch.bool)
    limit = TOLERANCE[dtype_of(sample)] * max(1.0, float(want[0].nan_to_num(0.0).abs().max()))
    gap = (got[0].double() - want[0].double()).nan_to_num(0.0).abs().movedim(axis, 0)
    return gap.flatten(1).amax(1) > limit


def _slices_match(variant: Variant, sample: Sample, got: list[Tensor], bad: Tensor, axis: int) -> bool:
    chosen = bad.nonzero().flatten()
    try:
        want = expected(variant.formula(), sample)[0].index_select(axis, chosen)
    except UNDEFINED:
        return False
    return close([got[0].index_select(axis, chosen)], [want], dtype_of(sample))


def _dependence(seen: Observations) -> Cause | None:
    """A dependence of outputs on other batch rows, heads or queries, on the simplest wrong call that shows it."""
    for sample, *_ in _spread(seen.wrong, 4):
        if not sample.grad and (cause := mixed(seen.harness, sample)):
            return cause
    return None


ONLY_WITH = {
    "mask": "mask",
    "causal": "causal",
    "window": "window",
    "lengths": "lengths",
    "documents": "documents",
    "bias": "bias",
}
MASKING = {"mask", "causal", "window", "lengths", "documents"}


def relevant(variant: Variant, sample: Sample) -> bool:
    """Whether a variant can differ from the formula on this sample: a fault of a window, for example, needs one."""
    options = {*sample.facets["options"], *(name for name, _ in sample.implied)}
    for step in variant.changes:
        if step == "positions":
            if ("rotary" if variant.family == "rotary positions" else "alibi") in options:
                return True
        elif step in ONLY_WITH:
            if ONLY_WITH[step] in options:
                return True
        elif step == "bias_before_scale":
            if options & {"bias", "alibi"}:
                return True
        elif step == "combine":
            if len(options & MASKING) > 1:
                return True
        elif step == "fill":
            if options & MASKING:
                return True
        elif step in ("repeat_k", "repeat_v"):
            if sample.facets["h"] != sample.facets["h_kv"] or variant.family != "grouped head order":
                return True
        else:
            return True
    return False


def _size(result: Any) -> int:
    q, k = result[0].call.q, result[0].call.k
    return q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * q.shape[3]


def _light(results: list) -> list:
    """The samples on which comparing a variant is cheap."""
    return [r for r in results if _size(r) < MAX_SIZE]


def _spread(results: list, count: int) -> list:
    """`count` of the samples: the smallest of each kind first, so that comparing the variants is cheap."""

    def kind(result: Any) -> tuple:
        f = result[0].facets
        wide = (
            (f["m"] > 64) + (f["m"] > 512) + (f["m"] > 2000),
            (f["d_k"] > 64) + (f["d_k"] > 128),
            f["n"] > 64,
        )
        return f["options"], f["grad"], f["h"] != f["h_kv"], f["dtype"], wide, f["n"] < f["m"]

    small = sorted(_light(results) or results, key=_size)
    kinds: dict = {}
    for result in small:
        kinds.setdefault(kind(result), result)
    chosen = sorted(kinds.values(), key=_size)[:count]
    for result in small:
        if len(chosen) >= count:
            break
        if all(result[0] is not c[0] for c in chosen):
            chosen.append(result)
    return chosen


def _pair(
    variants: list[Variant], wrong: list, right: list, max_contradicted: int
) -> tuple[Variant, set[str], list[Sample]] | None:
    """Two faults at once, if together they explain every wrong sample and contradict no more right ones than one."""
    until = time.process_time() + PAIR_SECONDS
    for one in variants:
        left = [(s, got) for s, got, *_ in wrong if not _matches(one, s, got) and _defined(one, s)]
        if not left:
            continue
        for two in CORE if len(variants) > MAX_PAIRS else VARIANTS:
            if time.process_time() > until:
                return None
            if not one.disjoint(two) or not relevant(two, left[0][0]):
                continue
            both = two.formula(one.formula())
            if not _matches(both, *left[0]) or not all(_matches(both, s, got) for s, got, *_ in wrong):
                continue
            contradicted = [s for s, got in right if not _matches(both, s, got)]
            if len(contradicted) > max_contradicted:
                continue
            scale_only = set(one.changes) <= {"factor"}
            first, second = (two, one) if scale_only else (one, two)  # the more serious fault first
            joined = Variant(
                f"{first.name}; and {second.name}",
                first.family,
                f"{first.fix}; {second.fix}",
                first.changes | second.changes,
            )
            return joined, {s.name for s, *_ in wrong}, contradicted
    return None


def _defined(variant: Variant, sample: Sample) -> bool:
    """Whether a variant leaves a key to every query: what its author returns for a query without one is not known."""
    try:
        return not any(bool(x.isnan().any()) for x in expected(variant.formula(), sample))
    except UNDEFINED:
        return True


def _unexplained(seen: Observations) -> Cause:
    sample, got, want = seen.wrong[0]
    right = [s.facets for s, _ in seen.right_of_several_keys]
    where = condition([s.facets for s, _, _ in seen.wrong], right)
    bad = [g for g in got if not bool(torch.isfinite(g).all())]
    name = "outputs are NaN or infinite" if bad else "outputs are wrong"
    if not bad and _only_rounded(seen):
        return precision_lost(evidence(sample, got, want), where, len(seen.wrong))
    if sample.grad and close(got[:1], want[:1], dtype_of(sample)):
        name = "gradients are wrong"
    family = f"{name} {where}".strip()
    if _only_overflows(seen):
        name, family = "outputs are NaN or infinite: an exponential overflows or all underflow", "overflow"
    return Cause(
        name, family, "compare with the formula on the call below", evidence(sample, got, want) + seen.note, where,
        0, len(seen.wrong), exact=False,
    )  # fmt: skip


def _only_overflows(seen: Observations) -> bool:
    """Whether every wrong output contains infinities or NaN, in at least one call without options."""
    finite = [bool(torch.isfinite(got[0]).all()) for _, got, _ in seen.wrong]
    return not any(finite) and any(not s.facets["options"] for s, *_ in seen.wrong)


def _only_rounded(seen: Observations) -> bool:
    """Whether the errors are rounding errors: small, and in steps, whereas those of a wrong formula are smooth."""
    dtypes = {dtype_of(s) for s, *_ in seen.wrong}
    plain = [w for w in seen.wrong if w[0].facets["size"] == 1.0 and not w[0].facets["options"]]
    lost = max((relative_error(got[0], want[0]) for _, got, want in plain), default=inf)
    if dtypes <= {torch.bfloat16, torch.float16}:
        # The rounding of the output itself hides steps in the inputs; sums over many keys lose much precision.
        few = [relative_error(got[0], want[0]) for s, got, want in plain if s.facets["m"] <= FEW_KEYS]
        return any(dtype_of(s) not in dtypes for s, _ in seen.right) and max(few, default=0.0) < 0.25
    smooth = [s for s, *_ in plain if not s.grad] or [s for s, *_ in seen.wrong if not s.grad]
    if not smooth:
        return False
    if all(close(got, want, torch.float32) for _, got, want in seen.wrong):
        return dtypes == {torch.float64} and _in_steps(seen.harness, smooth[0], THIRTY_TWO_BITS)
    # 16-bit products lose at most 2 % on plain scores, and more on larger ones.
    return lost < 0.02 and _in_steps(seen.harness, smooth[0], SIXTEEN_BITS)


def _in_steps(harness: Harness, sample: Sample, size: float) -> bool:
    """Whether the output changes in steps with q, k or v."""

    def stepped(name: str) -> bool:
        def changed(x: Tensor) -> Sample:
            change: dict[str, Any] = {name: x}
            return sample._replace(call=sample.call._replace(**change))

        return in_steps(
            lambda x: observe(harness, changed(x))[0],
            lambda x: expected(RIGHT, changed(x))[0],
            getattr(sample.call, name),
            size,
        )

    return any(stepped(name) for name in ("q", "k", "v"))


def _from_error(seen: Observations) -> Cause | None:
    """A cause for a call that raises or returns a wrong shape or dtype, although the signature has its options."""
    faults = [(s, error) for s, error in seen.errors if not refused(s, error)]
    for sample, error in faults[:1]:
        where = condition([s.facets for s, _ in faults], [s.facets for s, _ in seen.right])
        return Cause(
            f"a call {error}", "raises or returns a wrong shape", "support the call, or declare it as lacking",
            f"{error}, in {sample.name} ({sample.describe()})", where, 0, len(seen.errors), exact=False,
        )  # fmt: skip
    return None
