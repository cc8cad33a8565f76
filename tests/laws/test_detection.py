"""What `check` finds out about a target: layout, masks, caches, parts; and what it asks instead of guessing."""

import contextlib
import math
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard as rg
from long_cases import in_long
from regard.errors import SpecError
from regard.laws import Budget, Function, check, law, try_law
from regard.laws.adapters import adapt

FEW = Budget(cases=3, seconds=20.0)


def textbook(q, k, v, mask=None):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(-1) @ v


class Padded(nn.Module):
    """Self-attention; attention_mask (b, n) is 1 for tokens and 0 for padding."""

    def __init__(self, inverted=False, detach=False):
        super().__init__()
        self.num_heads, self.inverted, self.detach = 2, inverted, detach
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, attention_mask=None):
        q, k, v = (p(x).unflatten(-1, (2, 4)).transpose(1, 2) for p in (self.query, self.key, self.value))
        k = k.detach() if self.detach else k
        scores = q @ k.mT / 2.0
        if attention_mask is not None:
            hidden = attention_mask[:, None, None] == (1 if self.inverted else 0)
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def test_a_missing_gradient_is_a_broken_law_for_a_function():
    verdict = check(lambda q, k, v: textbook(q, k.detach(), v), ["L50", "L65"], FEW)
    assert verdict.exit_code == 1
    assert verdict["L50"].status == "broken" and verdict["L50"].message == "no gradient reached k"
    assert verdict.cause.family == "input detached" and "k is detached" in verdict.cause.name


def test_a_missing_gradient_is_a_broken_law_for_a_module():
    verdict = check(Padded(detach=True), ["L50"], FEW)
    assert verdict.exit_code == 1 and "no gradient reached key" in verdict["L50"].message
    assert check(Padded(), ["L50"], FEW).ok


def test_gradients_that_are_declared_as_lacking_are_not_requested():
    target = adapt(lambda q, k, v: textbook(q, k, v).detach(), lacks={"grad"})
    assert check(target, ["L50", "L06"], FEW).exit_code == 0


def test_a_padding_mask_of_ones_and_zeros_is_found_and_its_laws_run():
    verdict = check(Padded(), ["L31", "L32", "L34", "L49", "L06", "L65"], FEW)
    assert verdict.ok, str(verdict)
    assert verdict["L31"].status == verdict["L32"].status == verdict["L49"].status == "holds"
    assert verdict["L65"].status == "holds"
    assert "attention_mask: bool, True = may attend, shape (b, m)" in verdict.target.notes


def test_an_inverted_padding_mask_is_the_cause():
    verdict = check(Padded(inverted=True), ["L31", "L32"], FEW)
    assert verdict.exit_code == 1
    assert verdict.cause.family == "padding inverted"


@pytest.mark.parametrize(
    "kind", ["additive", *(pytest.param(x, marks=pytest.mark.long) for x in ("long", "masked"))]
)
def test_masks_of_other_types_and_polarities_are_found(kind):
    def attention(q, k, v, mask=None):
        if mask is None:
            return textbook(q, k, v)
        keep = {"additive": lambda: mask == 0, "long": lambda: mask == 1, "masked": lambda: ~mask}[kind]()
        if kind == "additive" and not mask.is_floating_point():
            raise TypeError("an additive mask is a float")
        return textbook(q, k, v, keep)

    if kind == "masked":
        assert check(attention, ["L34"], FEW).exit_code == 1  # True = may attend, as nothing else is said
    verdict = check(adapt(attention, mask="hide" if kind == "masked" else None), ["L34", "L01"], FEW)
    assert verdict.ok, str(verdict)


@pytest.mark.long
def test_the_code_of_a_counterexample_has_what_was_specified():
    plain, given = adapt(textbook).source, adapt(textbook, layout="b h n d", mask="hide").source
    assert plain.endswith("textbook)") and given == plain[:-1] + ", layout='b h n d', mask='hide')"


def test_a_docstring_defines_what_true_means():
    def attention(q, k, v, mask=None):
        """True in the mask means that the pair is masked out."""
        return textbook(q, k, v, None if mask is None else ~mask)

    assert check(attention, ["L34", "L01"], FEW).ok


def test_a_textbook_function_passes_although_products_overflow_float16():
    verdict = check(textbook, ["L60", "P11"], Budget(cases=12))
    assert verdict.exit_code == 0
    assert verdict["P11"].status == "not promised" and "outputs are not finite" in verdict["P11"].message


LAYOUTS = {
    "b n h d": lambda q, k, v: textbook(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2),
    "b h d n": lambda q, k, v: textbook(*(x.mT for x in (q, k, v))).mT,
    "b n d": lambda q, k, v: torch.bmm(torch.bmm(q, k.mT).div(q.shape[-1] ** 0.5).softmax(2), v),
    "n d": lambda q, k, v: torch.mm(torch.mm(q, k.T).div(q.shape[-1] ** 0.5).softmax(1), v),
    "d n": lambda q, k, v: torch.mm(v, torch.mm(k.T, q).div(q.shape[0] ** 0.5).softmax(0)),
}


@pytest.mark.parametrize(
    "layout", [pytest.param(x, marks=() if x == "b h d n" else pytest.mark.long) for x in LAYOUTS]
)
def test_the_layout_is_found(layout):
    verdict = check(LAYOUTS[layout], ["L05", "L06", "L20", "L48"], FEW)
    assert verdict.ok, str(verdict)
    assert verdict.target.notes == (f"layout ({', '.join(layout.split())}), found by probing",)


def test_a_layer_norm_is_checked_by_the_laws_of_layer_norm():
    class Norm(nn.Module):
        def __init__(self, unbiased):
            super().__init__()
            self.gamma, self.beta, self.eps = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(6)), 0.0
            self.unbiased = unbiased

        def forward(self, x):
            variance = x.var(-1, keepdim=True, unbiased=self.unbiased)
            return self.gamma * (x - x.mean(-1, keepdim=True)) / (variance + self.eps).sqrt() + self.beta

    assert check(nn.LayerNorm(6), ["L37", "L38", "L29"], FEW)["L29"].status == "not applicable"
    assert check(Norm(unbiased=False), ["L37", "L38"], FEW).ok
    assert check(Norm(unbiased=True), ["L37", "L38"], FEW).exit_code == 1


def test_a_schedule_is_checked_by_the_laws_of_schedules():
    def schedule(step):
        return rg.schedule.warmup_cosine(0.001, 40, 200)(step)

    verdict = check(schedule, ["L41"], FEW)
    assert verdict["L41"].status == "holds", str(verdict)
    with pytest.raises(
        SpecError, match="the end of this schedule could not be determined; give its parameters: --with"
    ):
        adapt(lambda step: 1.0, kind="schedule")
    given = adapt(lambda step: 1.0, kind="schedule", facts={"lr_max": 1.0, "warmup": 4, "total": 20})
    assert check(given, ["L41"], FEW).exit_code == 1


def test_a_decoder_block_with_a_memory_argument_is_given_a_memory():
    class Block(nn.Module):
        """Causal self-attention, then attention to the memory."""

        def __init__(self, leaks=False):
            super().__init__()
            self.own, self.cross = (nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))
            self.d_model, self.leaks = 8, leaks

        def forward(self, tgt, memory):
            n = tgt.shape[1]
            future = None if self.leaks else torch.ones(n, n, dtype=torch.bool).triu(1)
            tgt = tgt + self.own(tgt, tgt, tgt, attn_mask=future, need_weights=False)[0]
            return tgt + self.cross(tgt, memory, memory, need_weights=False)[0]

    verdict = check(Block(), ["L29", "L48", "L50"], FEW)
    assert verdict.ok and verdict["L29"].status == "holds", str(verdict)
    assert check(Block(leaks=True), ["L29"], FEW).cause.family == "causal ignored"


class Cached(nn.Module):
    """Causal; past is (keys, values)."""

    def __init__(self, restarts=False):
        super().__init__()
        self.heads, self.restarts = 2, restarts
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, past=None, use_cache=False):
        q, k, v = (p(x).unflatten(-1, (2, 4)).transpose(1, 2) for p in (self.q, self.k, self.v))
        if past is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(past, (k, v)))
        n, m = q.shape[2], k.shape[2]
        future = torch.ones(n, m, dtype=torch.bool).triu(1 if self.restarts else m - n + 1)
        o = (q @ k.mT / 2.0).masked_fill(future, -math.inf).softmax(-1) @ v
        o = self.o(o.transpose(1, 2).flatten(2))
        return (o, (k, v)) if use_cache else o


def test_a_cache_in_the_arguments_is_compared_with_the_full_pass():
    verdict = check(Cached(), ["L29", "L33", "L52"], FEW)
    assert [o.status for o in verdict.outcomes] == ["holds"] * 3, str(verdict)
    broken = check(Cached(restarts=True), ["L33"], FEW)
    assert broken.exit_code == 1 and broken.cause.family == "cache offset"


def test_sequences_of_a_packed_call_have_different_lengths():
    def packed(offset):
        def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=False):
            outs, lengths = [], (cu_seqlens_k.diff(), cu_seqlens_q.diff())
            for s in range(len(cu_seqlens_q) - 1):
                (a, b), (c, d) = cu_seqlens_q[s : s + 2].tolist(), cu_seqlens_k[s : s + 2].tolist()
                scores = torch.einsum("ihd,jhd->hij", q[a:b], k[c:d]) * q.shape[-1] ** -0.5
                if causal:
                    future = torch.arange(d - c) > torch.arange(b - a)[:, None] + offset(*lengths, s)
                    scores = scores.masked_fill(future, -math.inf)
                outs.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v[c:d]))
            return torch.cat(outs)

        return try_law(law("L29"), adapt(varlen), FEW).status

    assert packed(lambda m, n, s: int(m[s] - n[s])) == "holds"
    assert packed(lambda m, n, s: int(m.max() - n.max())) == "broken"  # the offset of the longest sequence
    assert packed(lambda m, n, s: int(m[s] - n[s]) + (s == len(m) - 1)) == "broken"  # of the last one alone
    assert packed(lambda m, n, s: int(m[s] - n[s]) + (s == 0)) == "broken"  # of the first one alone


def test_a_target_with_as_many_queries_as_keys_is_called_with_as_many():
    def square(q, k, v):
        """n == m."""
        if q.shape[-2] != k.shape[-2]:
            raise ValueError("self-attention only")
        return F.scaled_dot_product_attention(q, k, v)

    assert try_law(law("L10"), adapt(square), FEW).status == "holds"


@pytest.mark.long
def test_packed_sequences_are_recognized():
    def varlen(q, k, v, cu_seqlens, leaks=False):
        outs = []
        for a, b in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
            first = max(a - 1, 0) if leaks else a
            s = torch.einsum("ihd,jhd->hij", q[a:b], k[first:b]) * q.shape[-1] ** -0.5
            outs.append(torch.einsum("hij,jhd->ihd", s.softmax(-1), v[first:b]))
        return torch.cat(outs)

    assert check(varlen, ["L05", "L47", "L48"], FEW).ok
    assert check(lambda q, k, v, cu_seqlens: varlen(q, k, v, cu_seqlens, True), ["L48"], FEW).exit_code == 1


def test_a_call_that_fails_everywhere_is_reported_once():
    def attention(q, k, v):
        raise RuntimeError("needs a GPU")

    verdict = check(attention, None, FEW)
    assert verdict.exit_code == 2
    assert "needs a GPU" in verdict.failure and str(verdict).count("needs a GPU") <= 2
    assert len(str(verdict).splitlines()) < 6


def test_a_target_that_never_returns_is_stopped_and_reported_as_such():
    calls = []

    def attention(q, k, v):
        calls.append(1)
        if q.shape[-2] > 40:
            while True:
                with contextlib.suppress(Exception):  # a target may catch everything that is an Exception
                    time.sleep(1)
        return textbook(q, k, v)

    began = time.monotonic()
    verdict = check(Function("hangs", attention, lacks={"grad"}), ["L61", "L01"], FEW, call_seconds=0.4)
    assert time.monotonic() - began < 60
    assert (
        verdict["L61"].status == "raised"
        and "no answer within 0.4 s; the call was stopped" in verdict["L61"].message
    )
    assert verdict["L01"].status == "holds" and verdict.exit_code == 1


@pytest.mark.long
def test_float32_inside_gets_the_tolerance_of_float32():
    def attention(q, k, v):
        return (F.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1, dtype=torch.float32).to(q.dtype)) @ v

    verdict = check(attention, ["L01", "L05", "L06"], FEW)
    assert verdict.ok and verdict["L01"].dtype == "float32"
    assert verdict.probed.errors["float64"] == "computes in float32 for float64 inputs"


def test_a_pair_of_options_that_is_refused_is_reported_and_does_not_count_as_correct():
    def attention(q, k, v, mask=None, scale=None, causal=False):
        if mask is not None and scale is not None:
            raise NotImplementedError("a mask with a scale is not supported")
        if causal and scale is not None:
            raise IndexError("index out of range")
        s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        if causal:
            s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        return (s if mask is None else s.masked_fill(~mask, -math.inf)).softmax(-1) @ v

    verdict = check(attention, ["L64"], FEW)
    assert verdict["L64"].status == "broken"
    assert "causal and scale combined raised IndexError: index out of range" in verdict["L64"].message
    refusing = check(
        adapt(lambda q, k, v, mask=None, scale=None: attention(q, k, v, mask, scale)), ["L64"], FEW
    )
    assert refusing["L64"].status == "not applicable"


@pytest.mark.long
def test_a_factory_is_called_first():
    def make():
        return Padded()

    def build(d_model, heads):
        return nn.MultiheadAttention(d_model, heads, batch_first=True)

    assert check(make, ["L31"], FEW)["L31"].status == "holds"
    assert adapt(build, heads=4, d_model=16).heads == 4
    assert adapt(build).d_model == 16


def test_an_unclear_target_gets_an_error_that_names_the_options():
    with pytest.raises(
        SpecError, match=r"expected attention\(q, k, v\).*specify which: --as layer-norm, rotary"
    ):
        adapt(lambda x, y: x)
    with pytest.raises(SpecError, match="--as 'layernorm'; did you mean layer-norm"):
        adapt(nn.LayerNorm(3), kind="layernorm")
    with pytest.raises(SpecError, match="layout 'b h n'; "):
        adapt(textbook, layout="b h n")
    with pytest.raises(SpecError, match="mask='allowed'; "):
        adapt(textbook, mask="allowed")


class Images(nn.Module):
    """A small vision Transformer, as timm builds them."""

    def __init__(self):
        super().__init__()
        self.img_size = 8
        self.patches = nn.Conv2d(3, 12, 4, 4)
        self.pos_embed = nn.Parameter(torch.randn(1, 4, 12))
        self.block = nn.MultiheadAttention(12, 2, batch_first=True)

    def forward(self, x):
        x = self.patches(x).flatten(2).mT + self.pos_embed
        return (x + self.block(x, x, x, need_weights=False)[0]).mean(1)


def test_a_module_of_images_gets_images():
    target = adapt(Images())
    assert target.image == (3, 8, 8) and target.notes == ("images of 3 × 8 × 8",)
    verdict = check(target, ["L48", "L50"], FEW)
    assert [o.status for o in verdict.outcomes] == ["holds", "holds"]


class Pooling(nn.Module):
    """A learned query; positions are an option."""

    def __init__(self, pos_embed=None):
        super().__init__()
        self.pos_embed = pos_embed
        self.latent = nn.Parameter(torch.randn(1, 1, 12))
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)

    def forward(self, x):
        x = x if self.pos_embed is None else x + self.pos_embed
        return self.attention(self.latent.expand(len(x), -1, -1), x, x, need_weights=False)[0][:, 0]


def test_positions_that_are_switched_off_are_not_claimed():
    assert not adapt(Pooling()).declares("positions")
    assert adapt(Pooling(nn.Parameter(torch.randn(5, 12)))).declares("positions")


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = 2
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))

    def attend(self, x, **options):
        q, k, v = (p(x).unflatten(-1, (2, 4)).transpose(1, 2) for p in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2))


class Denied(Plain):
    """Self-attention without positional encodings."""

    def forward(self, x):
        return self.attend(x)


class Places(Plain):
    """Self-attention; padded positions are left out by the caller, real positions are kept."""

    def forward(self, x):
        return self.attend(x)


class Commented(Plain):
    def forward(self, x):
        # positions are added by the embedding
        return self.attend(x)


class Optional(Plain):
    def __init__(self, rope=False):
        super().__init__()
        if rope:
            self.rotary = nn.Identity()

    def forward(self, x):
        return self.attend(x)


@pytest.mark.parametrize("kind", [Denied, Places, Commented, Optional])
def test_words_about_positions_that_it_does_not_have_claim_none(kind):
    verdict = check(kind(), ["L19", "L21"], FEW)
    assert verdict.ok and verdict["L19"].status == "holds", verdict.explanation()
    assert verdict["L21"].status == "not applicable"


class NoTurn(Plain):
    """Self-attention with rotary positions."""

    def rotate(self, x):
        return x

    def forward(self, x):
        return self.attend(self.rotate(x))


def test_positions_that_are_stated_and_have_no_effect_are_a_broken_law():
    assert check(NoTurn(), ["L21"], FEW)["L21"].status == "broken"


class Triangle(Plain):
    def __init__(self, diagonal=0):
        super().__init__()
        self.diagonal = diagonal

    def forward(self, x):
        n = x.shape[1]
        return self.attend(x, attn_mask=torch.ones(n, n).tril(self.diagonal).bool())


class Flag(Plain):
    def forward(self, x):
        return self.attend(x, is_causal=True)


def test_a_module_whose_code_has_a_causal_mask_is_causal():
    for module in (Triangle(), Flag()):
        verdict = check(module, ["L19", "L29"], FEW)
        assert verdict.ok and verdict["L29"].status == "holds", verdict.explanation()
        assert "always causal: its code has a causal mask, and no output depends on a later input" in str(
            verdict
        )
    assert not check(Triangle(diagonal=1), ["L19", "L29"], FEW).ok


def earlier(n, most=None):
    distance = torch.arange(n)[:, None] - torch.arange(n)
    return (distance >= 0) & (distance < (most or n))


class MaskedElsewhere(Plain):
    def forward(self, x):
        return self.attend(x, attn_mask=earlier(x.shape[1]))


class Bidirectional(MaskedElsewhere):
    """Every position attends to all others, bidirectional."""


class Local(Plain):
    def __init__(self, before=2):
        super().__init__()
        self.window, self.before = 3, before

    def forward(self, x):
        return self.attend(x, attn_mask=earlier(x.shape[1], self.before + 1))


def test_a_mask_that_is_made_outside_the_class_makes_a_module_causal_unless_its_words_deny_it():
    verdict = check(MaskedElsewhere(), ["L19", "L29"], FEW)
    assert verdict.ok and verdict["L29"].status == "holds", verdict.explanation()
    assert "always causal: each output depends on all earlier inputs; no output depends on a later" in str(
        verdict
    )
    assert not check(Bidirectional(), ["L19", "L29"], FEW).ok


def test_a_window_of_a_module_is_found_by_its_attribute_and_by_probing():
    for before in (2, 3):  # the window counts the query itself, or it does not
        verdict = check(Local(before), ["L19", "L29"], FEW)
        assert verdict.ok and f"output i depends on the inputs i − {before} … i" in str(verdict)
    assert not check(Local(before=1), ["L19", "L29"], FEW).ok  # neither of the two


def test_arguments_in_the_order_of_keras_are_read_by_their_names():
    def attention(query, value, key):
        return textbook(query, key, value)

    target = adapt(attention)
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    assert "(query, value, key)" in target.notes[0]
    torch.testing.assert_close(target.call(q, k, v), textbook(q, k, v))


class CutMask(Padded):
    """Self-attention; mask: additive, (n_ctx, n_ctx), of which the first rows and columns are used."""

    def forward(self, x, mask=None):
        q, k, v = (p(x).unflatten(-1, (2, 4)).transpose(1, 2) for p in (self.query, self.key, self.value))
        scores = q @ k.mT / 2.0
        if mask is not None:
            scores = scores + mask[: x.shape[1], : x.shape[1]]
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_a_mask_that_is_cut_to_the_length_is_not_cut_along_the_batch():
    assert "mask: additive, 0 and −inf, shape (n, m)" in adapt(CutMask()).notes


class Inverted(nn.Module):
    """Self-attention; attn_mask (n, n): a bool mask is True where a query may not attend, floats are added."""

    def __init__(self, inverted):
        super().__init__()
        self.num_heads, self.inverted = 2, inverted
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, attn_mask=None):
        q, k, v = (p(x).unflatten(-1, (2, 4)).transpose(1, 2) for p in (self.query, self.key, self.value))
        scores = q @ k.mT / 2.0
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask if self.inverted else attn_mask, -1e9)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("inverted", [False, True])
def test_an_inverted_bool_mask_is_found_although_an_added_one_works(inverted):
    target = adapt(Inverted(inverted))
    assert target.notes[0].startswith("attn_mask: bool, True = masked")
    assert check(target, ["L34"], FEW).exit_code == inverted


@pytest.mark.parametrize("more", [0, 1])
def test_a_window_that_the_docstring_describes_is_not_inferred_from_outputs(more):
    def attention(q, k, v, window):
        """Causal; a query sees itself and the window - 1 keys before it."""
        i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
        return textbook(q, k, v, (j <= i) & (i - j < window + more))

    assert "window: w keys with itself, causal" in adapt(attention).notes
    assert check(attention, ["L65"], FEW).exit_code == more


def running_sums(q, k, v):
    scores = q.float() @ k.float().mT / math.sqrt(q.shape[-1])
    e = (scores - scores.amax(-1, keepdim=True)).exp().to(q.dtype)
    total, o = torch.zeros_like(e[..., :1]), torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    for j in range(k.shape[-2]):
        total, o = total + e[..., j : j + 1], o + e[..., j : j + 1] * v[..., j : j + 1, :]
    return o / total


def test_sums_in_sixteen_bits_break_a_law_only_if_the_target_promises_float32_sums():
    from regard.laws.diagnosis.formula import Formula
    from regard.laws.diagnosis.samples import expected, rounds_like_running_sums, samples
    from regard.laws.harness import Harness
    from regard.laws.probe import probe

    target = adapt(lambda q, k, v: running_sums(q, k, v))
    probed = probe(target)
    sample = next(s for s in samples(Harness(target, probed.supported)) if s.name == "bfloat16, 900 keys")
    got, want = [running_sums(sample.call.q, sample.call.k, sample.call.v)], expected(Formula(), sample)
    assert float((got[0].double() - want[0]).abs().max()) > 0.08  # of values around 2
    assert rounds_like_running_sums(sample, got, want)
    assert not rounds_like_running_sums(sample, [got[0] * 1.5], want)
    running_sums.__doc__ = "Sums are accumulated in float32."
    try:
        assert "float32 sums" in adapt(running_sums).claims and "float32 sums" not in target.claims
    finally:
        running_sums.__doc__ = None


class Counting(Padded):
    """Self-attention whose scores grow with every call."""

    calls = 0.0

    def forward(self, x):
        self.calls = self.calls + 1.0
        return super().forward(x * (1 + self.calls))


def test_a_state_that_changes_with_every_call_is_not_taken_for_dropout():
    verdict = check(Counting(), ["L56", "L62"], FEW)
    assert verdict.exit_code == 1 and verdict.cause.family == "state between calls"


class Strict(Padded):
    """Causal self-attention; faulty: a position does not attend to itself, the first one excepted."""

    def __init__(self, own):
        super().__init__()
        self.own = own

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (2, 4)).transpose(1, 2) for p in (self.query, self.key, self.value))
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1 if self.own else 0)
        future[0, 0] = False
        scores = (q @ k.mT / 2.0).masked_fill(future, -math.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("own", [True, False])
def test_a_causal_position_attends_to_itself(own):
    verdict = check(Strict(own), ["L29"], Budget(cases=20))
    assert verdict.exit_code == (not own)
    assert own or verdict.cause.family == "causal off by one"


class RaisesAtFive(nn.Module):
    """Self-attention."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.qkv, self.out = 2, nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x, key_padding_mask=None):
        if x.shape[1] == 5:
            raise KeyError("five")
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.out(((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_an_exception_while_masks_are_read_is_a_note():
    assert (
        "masks are not checked: a call without a mask raised KeyError: 'five'" in adapt(RaisesAtFive()).notes
    )


def with_sinks(q, k, v, sinks=None):
    """sinks: (h,), one more logit in the softmax of each head, without a value."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if sinks is None:
        return scores.softmax(-1) @ v
    return torch.cat([scores, sinks[:, None, None].expand_as(scores[..., :1])], -1).softmax(-1)[..., :-1] @ v


def scaled_by_sinks(q, k, v, sinks=None):
    """sinks: (h,), one more logit in the softmax of each head, without a value."""
    o = textbook(q, k, v)
    return o if sinks is None else o * torch.sigmoid(-sinks)[:, None, None]


def first_keys(q, k, v, sinks=4):
    """sinks: how many of the first keys every query may attend to; logits of others are masked."""
    return textbook(q, k, v)


def test_sinks_are_logits_where_the_words_say_so():
    assert try_law(law("L67"), adapt(with_sinks), FEW).status == "holds"
    assert try_law(law("L67"), adapt(scaled_by_sinks), FEW).status == "broken"
    assert try_law(law("L67"), adapt(first_keys), FEW).status == "not applicable"


def test_an_option_that_no_law_switches_on_is_named():
    def tempered(q, k, v, mask=None, temperature=None, fast=False, block=64):
        return textbook(q, k, v, mask)

    words = "not tested, as the laws do not pass it: temperature, fast; write an adapter"
    assert any(words in note for note in adapt(tempered).notes)
    assert not any("not tested" in note for note in adapt(textbook).notes)


@pytest.mark.parametrize(
    "words", ["number of keys, its own included", *in_long("the number of keys including itself")]
)
def test_a_window_that_counts_the_query_itself_is_read_from_words(words):
    def local(q, k, v, window):
        i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
        return textbook(q, k, v, (j <= i) & (i - j <= window))

    local.__doc__ = f"Causal. window: {words}."
    found = check(local, ["L60", "L65"], FEW)
    assert found.cause.name == "the window is one key too wide on the left"


class Dropped(nn.Module):
    """Self-attention with dropout of the weights in training; its probability is `self.p`."""

    def __init__(self, p=0.2, factor=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.num_heads, self.p, self.factor = 2, p, factor
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        o = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0)
        return self.o(o.transpose(1, 2).flatten(2)) * (self.factor if self.training else 1.0)


def test_dropout_of_any_name_is_no_difference_between_training_and_evaluation():
    assert try_law(law("L56"), adapt(Dropped()), FEW).status == "holds"
    assert try_law(law("L56"), adapt(Dropped(p=0.0, factor=1.1)), FEW).status == "broken"


class RoundedInside(nn.Module):
    """Attention whose norm or softmax is computed in float32, whatever the dtype, as in most language models."""

    def __init__(self, where):
        super().__init__()
        torch.manual_seed(0)
        self.where = where
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        if self.where == "norm":
            wide = x.float()
            x = (wide * wide.square().mean(-1, keepdim=True).add(1e-6).rsqrt()).type_as(x)
        q, k, v = (w(x).unflatten(-1, (4, -1)).transpose(1, 2) for w in (self.q, self.k, self.v))
        dtype = torch.float32 if self.where == "softmax" else x.dtype
        weights = (q @ k.mT / 2).softmax(-1, dtype=dtype).type_as(q)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("where", ["softmax", *in_long("norm")])
def test_a_module_that_computes_in_float32_inside_has_no_wrong_gradient(where):
    """Differences of its outputs in float64 have the steps of float32; its gradients were reported as wrong."""
    verdict = check(RoundedInside(where))
    assert verdict.exit_code == 0 and verdict["L50"].status == "holds"


class FixedCache(nn.Module):
    """Keys of an earlier call, for two batch rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.register_buffer("past", torch.randn(2, 3, 16))

    def forward(self, x):
        context = torch.cat([self.past, x], 1)
        return F.scaled_dot_product_attention(self.q(x), self.k(context), self.v(context))


def test_calls_that_fail_are_not_blamed_on_dropout():
    """The symptom was that dropout is active in evaluation."""
    text = str(check(FixedCache()))
    assert "symptom: calls of some sizes fail" in text and "raised RuntimeError: Sizes of tensors" in text
    assert "fix: accept every batch size and length" in text and "dropout" not in text.partition("\n\n")[0]
