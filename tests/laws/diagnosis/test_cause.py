"""One likely cause first: the faulty variant that returns the same numbers, and where the fault is limited to."""

import json
import math

import pytest
import torch

from long_cases import rows_in_long
from regard.laws import Budget, check
from regard.laws.diagnosis import VARIANTS
from regard.laws.diagnosis.conditions import condition
from regard.laws.diagnosis.formula import Call, Formula
from regard.laws.diagnosis.rounding import SIXTEEN_BITS, in_steps
from regard.laws.html_report import page

FEW = Budget(cases=2)


def attention(q, k, v, mask=None, causal=False, window=None, lengths=None, bias=None, scale=None):
    """A right one with many options; a window is (before, after)."""
    options = {
        "causal": causal,
        "window": window,
        "lengths": lengths,
        "bias": bias,
        "scale": scale,
        "allowed": mask,
    }
    call = Call(q, k, v, {name: x for name, x in options.items() if x is not None and x is not False})
    return Formula()(call)


def test_a_right_attention_has_no_cause():
    verdict = check(attention, ["L65"], FEW)
    assert verdict.ok and verdict.cause is None, str(verdict)


def test_there_are_many_variants_and_each_changes_something():
    assert len(VARIANTS) >= 60 and len({v.name for v in VARIANTS}) == len(VARIANTS)
    families = {v.family for v in VARIANTS}
    assert {"no scale", "softmax axis", "mask polarity", "grouped head order", "input detached"} <= families


LONG = pytest.mark.long


@pytest.mark.parametrize("fault", ["", "cast to bool"])
def test_a_mask_that_the_docstring_adds_may_have_any_value(fault):
    def attend(q, k, v, mask=None):
        """mask: bool, True = may attend; a float mask is added to the scores."""
        s = q @ k.mT / math.sqrt(q.shape[-1])
        if mask is not None and mask.dtype != torch.bool and not fault:
            s = s + mask
        elif mask is not None:
            s = s.masked_fill(~mask.bool(), -math.inf)
        return s.softmax(-1) @ v

    verdict = check(attend, ["L34", "L65"], FEW)
    if not fault:
        assert verdict.ok, str(verdict)
    else:
        assert not verdict.ok and verdict.cause.family.startswith("bias"), str(verdict.cause)


@pytest.mark.parametrize("fault, steps", [("16-bit products", True), ("a small term", False)])
def test_rounding_shows_in_steps(fault, steps):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 5, 6, dtype=torch.float64)
    found = [
        in_steps(lambda x: _nearly(fault)(x, k, v), lambda x: attention(x, k, v), q, size)
        for size in (SIXTEEN_BITS, 10.0)  # a change by several steps is that of the formula, rounded or not
    ]
    assert found == [steps, False]


def _nearly(fault):
    def attend(q, k, v):
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if fault == "16-bit products":
            scores = (q.bfloat16() @ k.bfloat16().mT).to(q.dtype) / math.sqrt(q.shape[-1])
        elif fault == "a small term":
            scores = scores + 0.01 * (3 * scores).sin()
        weights = scores.softmax(-1)
        if fault == "a little of other keys":
            weights = 0.995 * weights + 0.005 * weights.flip(-1)
        if fault == "wrong in bfloat16" and q.dtype == torch.bfloat16:
            return (7 * (weights @ v)).cos()
        return weights @ v

    return attend


@LONG
@pytest.mark.parametrize(
    "fault, family",
    [
        ("16-bit products", "precision lost"),
        ("a small term", "outputs are wrong"),
        ("a little of other keys", "outputs are wrong"),
        ("wrong in bfloat16", "outputs are wrong in bfloat16"),
    ],
)
def test_only_what_changes_in_steps_is_lost_precision(fault, family):
    found = check(_nearly(fault), ["L65"], FEW).cause
    assert found is not None and found.family == family, found


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(f, marks=LONG)  # `make test` has a missing scale below, and other faults
        for f in ("no scale", "softmax axis", "window off by one", "bias scaled", "overflow")
    ],
)
def test_a_variant_is_its_own_cause(family):
    variant = next(v for v in VARIANTS if v.family == family)

    def faulty(q, k, v, mask=None, causal=False, window=None, bias=None, scale=None):
        options = {"causal": causal, "window": window, "bias": bias, "scale": scale, "allowed": mask}
        chosen = {name: x for name, x in options.items() if x is not None and x is not False}
        return variant.formula()(Call(q, k, v, chosen))

    cause = check(faulty, ["L65"], FEW).cause
    assert (
        cause.name == variant.name
        and cause.exact
        and "got" in cause.evidence
        and "expected" in cause.evidence
    )


def unscaled(q, k, v):
    return (q @ k.mT).softmax(-1) @ v


def test_a_missing_scale_is_one_cause_with_its_laws_folded():
    verdict = check(unscaled, ["L05", "L06", "L09", "L65"], FEW)
    lines = str(verdict).splitlines()
    assert lines[1] == "likely cause: the scores are not scaled"
    assert "the output: got " in lines[2] and ", expected " in lines[2]
    assert lines[3] == "  fix: divide q·k by √d_k"
    assert lines[4] == "  4 laws are broken: L05, L06, L09, L65"
    assert len(lines) < 16
    data = json.loads(verdict.json())["cause"]
    assert data["family"] == "no scale" and data["laws"] == ["L05", "L06", "L09", "L65"] and data["exact"]
    html = page(verdict)
    assert html.index("Likely cause") < html.index("<h2>Broken</h2>") and "the scores are not scaled" in html


@pytest.mark.long
def test_two_faults_at_once_are_both_named():
    def faulty(q, k, v, mask=None):
        s = q @ k.mT
        return (s if mask is None else s.masked_fill(mask, -math.inf)).softmax(-1).nan_to_num(0.0) @ v

    cause = check(faulty, ["L65"], FEW).cause
    assert "not scaled" in cause.name and "inverted" in cause.name


LIMITED = {
    "m > 512": (lambda q, k, v: unscaled(q, k, v) if k.shape[-2] > 512 else attention(q, k, v), "where m > "),
    "d_k > 64": (
        lambda q, k, v: unscaled(q, k, v) if q.shape[-1] > 64 else attention(q, k, v),
        "where d_k > ",
    ),
    "odd m": (
        lambda q, k, v: attention(q, k, v, scale=2 * q.shape[-1] ** -0.5 if k.shape[-2] % 2 else None),
        "where m is not a multiple of 2",
    ),
    "bfloat16": (
        lambda q, k, v: unscaled(q, k, v) if q.dtype == torch.bfloat16 else attention(q, k, v),
        "in bfloat16",
    ),
    "both": (
        lambda q, k, v, mask=None, scale=None: attention(
            q, k, v, mask, scale=None if mask is not None else scale
        ),
        "with mask",
    ),
}


@pytest.mark.parametrize(
    "limit", [pytest.param(name, marks=() if name == "d_k > 64" else LONG) for name in LIMITED]
)
def test_a_fault_at_some_sizes_dtypes_or_options_is_found_with_its_condition(limit):
    faulty, where = LIMITED[limit]
    verdict = check(faulty, ["L65"], FEW)
    assert verdict.exit_code == 1
    assert where in verdict.cause.where, verdict.cause


def causal_up_to_64_ahead(q, k, v):
    """Causal, except that a query attends to 64 keys ahead, which is every key of a short sequence."""
    j = torch.arange(k.shape[-2])
    return attention(q, k, v, j[None] <= torch.arange(q.shape[-2])[:, None] + 64)


def shifted_and_aligned_with_the_first_key(q, k, v, mask=None, causal=False):
    """mask: bool, True = may attend. causal: aligned with the last key (bottom-right) where n ≠ m."""
    allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    allowed = allowed.tril(1) if causal else allowed
    return attention(q, k, v, allowed if mask is None else mask & allowed)


def first_key_twice(q, k, v):
    weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
    return weights @ v + weights[..., :1] * v[..., :1, :]


def first_key_twice_in_bfloat16(q, k, v):
    if q.dtype != torch.bfloat16:
        raise TypeError("q has to be in bfloat16")
    return first_key_twice(q, k, v)


def causal_without_itself(q, k, v):
    """Always causal."""
    later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(0)
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(later, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v + (k.shape[-2] == 1) * v


EVERYWHERE = {  # a fault in all sizes, of which a variant explains a few at most
    "a factor that depends on m": (
        lambda q, k, v: attention(q, k, v, scale=math.log(1 + k.shape[-2]) * q.shape[-1] ** -0.5),
        "outputs are wrong",
    ),
    "the first key twice": (first_key_twice, "outputs are wrong"),
    "the first key twice, in bfloat16": (first_key_twice_in_bfloat16, "outputs are wrong"),
    "an output that depends on m": (lambda q, k, v: k.shape[-2] * attention(q, k, v), "outputs are wrong"),
    "a mask 64 keys ahead": (causal_up_to_64_ahead, "causal is ignored"),
    "causal without the query itself": (causal_without_itself, "causal is off by one"),
    "causal with two faults": (shifted_and_aligned_with_the_first_key, "causal is off by one"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "a mask 64 keys ahead" else LONG) for name in EVERYWHERE],
)
def test_a_fault_in_all_sizes_is_not_limited_to_the_few_that_a_variant_explains(name):
    faulty, says = EVERYWHERE[name]
    cause = check(faulty, ["L65"], FEW).cause
    assert says in cause.name and not cause.where, cause.headline


def test_calls_that_raise_are_limited_only_by_what_all_of_them_have_in_common():
    def small(q, k, v):
        if k.shape[-2] > 64 or q.shape[0] * q.shape[1] > 8:
            raise RuntimeError("too large")
        return attention(q, k, v)

    cause = check(small, ["L65"], FEW).cause
    assert cause.headline == "a call raised RuntimeError: too large"


def test_a_query_without_a_key_is_no_evidence_of_a_second_fault():
    def narrow(q, k, v, mask=None, window=None, bias=None):
        """window: (before, after)."""
        scores = q @ k.mT / math.sqrt(q.shape[-1]) + (0.0 if bias is None else bias)
        n, m = scores.shape[-2:]
        distance = torch.arange(n)[:, None] + m - n - torch.arange(m)
        if window is not None:
            inside = (distance < window[0]) & (-distance < window[1])
            mask = inside if mask is None else mask & inside
        scores = scores if mask is None else scores.masked_fill(~mask, -math.inf)
        return scores.softmax(-1).nan_to_num(0.0) @ v

    assert check(narrow, ["L65"], FEW).cause.headline == "the window is one key too narrow on both sides"


def test_a_cached_answer_and_a_modified_input_are_causes():
    answers = {}

    def remembers(q, k, v):
        return answers.setdefault((q.shape, k.shape, q.dtype), attention(q, k, v).detach())

    def modifies(q, k, v):
        o = attention(q, k, v)
        q.data.mul_(0.5)
        return o

    assert check(remembers, ["L65"], FEW).cause.family == "cached answer"
    assert check(modifies, ["L62"], FEW).cause.family == "input modified"


def shortcut(same):
    def attend(q, k, v):
        """q, k and v may be one tensor: (batch, n, heads, d)."""
        scale = 1.0 if same(q, k, v) else q.shape[-1] ** -0.5
        weights = (torch.einsum("bihd,bjhd->bhij", q, k) * scale).softmax(-1)
        return torch.einsum("bhij,bjhd->bihd", weights, v)

    return attend


def test_a_shortcut_for_inputs_that_are_one_tensor_is_a_cause():
    assert check(shortcut(lambda q, k, v: False), ["L65"], FEW).ok
    cause = check(shortcut(lambda q, k, v: k is q), ["L65"], FEW).cause
    assert (cause.family, cause.where) == ("no scale", "where q, k and v are one tensor")
    cause = check(shortcut(lambda q, k, v: v is k), ["L65"], FEW).cause
    assert (cause.family, cause.where) == ("no scale", "where k and v are one tensor")


def test_dropout_that_is_always_active_is_a_cause():
    def drops(q, k, v):
        a = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return torch.nn.functional.dropout(a, 0.1) @ v

    assert check(drops, ["L65"], FEW).cause.family == "dropout in evaluation"


def test_the_condition_is_the_simplest_that_separates():
    base = {
        "b": 1,
        "h": 1,
        "h_kv": 1,
        "n": 5,
        "m": 5,
        "d_k": 4,
        "d_v": 4,
        "size": 1.0,
        "options": (),
        "dtype": "float64",
        "strided": False,
        "grad": False,
    }
    assert condition([base | {"n": 4}], [base, base | {"m": 4}]) == "where n < m"
    assert (
        condition([base | {"m": 600, "n": 600}], [base, base | {"m": 500, "n": 500}])
        == "where m > 500 (seen at 600)"
    )
    assert condition([base | {"dtype": "float16"}], [base]) == "in float16"
    assert condition([base], [base | {"h": 4}]) == "without grouped heads"
    assert (
        condition([base | {"h": 4, "h_kv": 4}], [base | {"h": 8, "h_kv": 8}])
        == "where the number of heads ≤ 4"
    )
    low = [base | {"dtype": "float16", "m": m} for m in (5, 600)]
    assert condition(low[:1], low[1:]) == "where n = m"
    assert "≤" not in condition([low[0] | {"n": 4}], [low[1] | {"n": 4}])  # 600 keys may hide it
    assert condition([base], []) == ""


def in_the_denominator(q, k, v):
    e = (q @ k.mT / q.shape[-1] ** 0.5).exp()
    return e @ v / (e.sum(-1, keepdim=True) + 0.037)


def capped(q, k, v):
    return (3.3 * (q @ k.mT / q.shape[-1] ** 0.5 / 3.3).tanh()).softmax(-1) @ v


def cosine_without_scale(q, k, v):
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    return (q @ k.mT).softmax(-1) @ v


def masked_in_head_0(q, k, v, mask=None):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        scores[:, :1] = scores[:, :1].masked_fill(~mask[..., :1, :, :].expand_as(scores[:, :1]), -math.inf)
    return scores.softmax(-1) @ v


def summed_over_the_batch(q, k, v):
    return (q @ k.sum(0, keepdim=True).mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def tiles_of_three(q, k, v):
    """Tiles of keys, with a running sum and maximum; the output is not rescaled."""
    total, top, o = 0.0, torch.full_like(q[..., :1], -math.inf), 0.0
    for keys, values in zip(k.split(3, -2), v.split(3, -2)):
        scores = q @ keys.mT / q.shape[-1] ** 0.5
        before, top = top, torch.maximum(top, scores.amax(-1, keepdim=True))
        weights = (scores - top).exp()
        total = total * (before - top).exp() + weights.sum(-1, keepdim=True)
        o = o + weights @ values
    return o / total


def zero_is_none(q, k, v, scale=None):
    return (q @ k.mT * (scale or q.shape[-1] ** -0.5)).softmax(-1) @ v


@pytest.mark.parametrize(
    ("faulty", "family", "words"),
    [
        *rows_in_long((in_the_denominator, "extra term in the denominator", "an additional term of 0.037")),
        (capped, "clipped scores", "squashed to 3.3 · tanh(s / 3.3)"),
        (cosine_without_scale, "cosine scores", "cosine similarity instead of q·k; and the scores"),
        (masked_in_head_0, "mask of one head", "the mask is ignored, for some of the heads (here head 1)"),
        (summed_over_the_batch, "batch rows mixed", "an output depends on another row of the batch"),
        (tiles_of_three, "tiles merged wrongly", "tiles of 3 keys are merged without rescaling the output"),
        (zero_is_none, "scale ignored", "a given scale of 0 is treated as if none were given"),
    ],
)
def test_numbers_pairs_and_parts_of_outputs_are_found(faulty, family, words):
    cause = check(faulty, ["L65"], FEW).cause
    assert cause.family == family and words in cause.headline


class MinusTheMean(torch.nn.Module):
    """Causal self-attention of x minus its mean over the batch, which is 0 for a single row."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x - x.mean(0, keepdim=True)).chunk(3, -1)
        return self.out(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_a_gradient_that_is_lost_as_rows_are_mixed_is_no_detached_input():
    cause = check(MinusTheMean(), ["L48", "L50"], FEW).cause
    assert (cause.family, cause.laws) == ("batch rows mixed", ("L48", "L50"))


@pytest.mark.parametrize("extra", [pytest.param(1e-3, marks=pytest.mark.long), 1e-6])
def test_a_mask_after_softmax_with_a_guarded_division_is_named(extra):
    def masked_late(q, k, v, mask=None):
        """mask: bool, True = may attend."""
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        if mask is not None:
            weights = weights * mask
            weights = weights / (weights.sum(-1, keepdim=True) + extra)
        return weights @ v

    cause = check(masked_late, ["L01", "L65"], Budget(cases=5)).cause
    assert cause.family == "mask after softmax" and f"their sum plus {extra:.4g}" in cause.name


@pytest.mark.long
def test_queries_are_spelled_in_the_plural():
    def narrow(q, k, v, window=(-1, -1)):
        """window: (before, after), keys with i - before <= j <= i + after."""
        i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
        seen = ((j >= i - window[0]) | (window[0] < 0)) & ((j < i + window[1]) | (window[1] < 0))
        return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf).softmax(-1) @ v

    assert "for some of the queries (here query" in check(narrow, ["L65"], Budget(cases=5)).cause.name
