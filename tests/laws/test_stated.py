"""What a docstring states is checked: windows, positions, alignment, shapes and promises."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard.laws import Budget, check, law, try_law
from regard.laws.adapters import adapt
from regard.laws.adapters.names import polarity, says_integers, says_sequence_first, stated_alignment
from regard.position import alibi_slopes, rotate

FEW = Budget(cases=3, seconds=20.0)
DEFINITION = ["L65"]


def attend(q, k, v, allowed=None, bias=0.0):
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + bias
    return (scores if allowed is None else scores.masked_fill(~allowed, -math.inf)).softmax(-1) @ v


def grid(q, k):
    return torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])


def local_attention(q, k, v):
    """Attention in a sliding window."""
    i, j = grid(q, k)
    return attend(q, k, v, (i - j <= 3) & (j - i <= 1))


def wide_local_attention(q, k, v):
    """Attention in a sliding window, which is dense in the first 30 positions."""
    i, j = grid(q, k)
    return attend(q, k, v, (i - j <= 3) & (j - i <= 1) | (j < 30))


def test_a_window_of_every_call_is_found_and_the_rest_is_checked():
    target = adapt(local_attention)
    assert target.window == (3, 1) and "i − 3 … i + 1" in target.notes[0]
    assert adapt(wide_local_attention).window is None


@pytest.mark.long
def test_attention_in_a_window_of_every_call_is_compared_with_the_formula():
    assert check(local_attention, DEFINITION, FEW).ok
    assert not check(wide_local_attention, DEFINITION, FEW).ok


def with_window(short=0, both=False):
    def sliding(q, k, v, window):
        """Query i sees keys i - window + 1 .. i."""
        i, j = grid(q, k)
        near = (i - j).abs() < window - short if both else (j <= i) & (i - j < window - short)
        return attend(q, k, v, near | (i == j))

    return sliding


@pytest.mark.long
def test_a_window_that_is_required_gets_one_in_every_call():
    assert check(with_window(), DEFINITION, FEW).ok
    assert check(with_window(short=1), DEFINITION, FEW).cause.family == "window off by one"
    assert not check(with_window(both=True), DEFINITION, FEW).ok


def with_alibi(change):
    def attention(q, k, v):
        """Causal attention with ALiBi, n == m."""
        i, j = grid(q, k)
        bias = change(-alibi_slopes(q.shape[1])[:, None, None] * (i - j)).to(q.dtype)
        return attend(q, k, v, j <= i, bias)

    return attention


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "words"),
    [(lambda b: b, ""), (lambda b: -b, "its sign is wrong"), (lambda b: b.flip(0), "reverse order")],
)
def test_alibi_that_is_stated_is_checked(change, words):
    verdict = check(with_alibi(change), DEFINITION, FEW)
    assert (
        verdict.ok
        if not words
        else words in verdict.cause.headline and verdict.cause.family == "position bias"
    )


def with_rotation(turn_q, turn_k):
    def attention(q, k, v):
        """Rotary attention, causal, n == m; columns c and c + d/2 are rotate_half pairs."""
        i, j = grid(q, k)
        return attend(turn_q(q), turn_k(k), v, j <= i)

    return attention


def turned(x, sign=1, base=10000.0):
    return rotate(x, sign * torch.arange(x.shape[-2]), base)


@pytest.mark.long
@pytest.mark.parametrize(
    ("turn_q", "turn_k", "words"),
    [
        (turned, turned, ""),
        (turned, lambda k: k, "only q is rotated"),
        (turned, lambda k: turned(k, -1), "k is rotated backwards"),
    ],
)
def test_rotary_positions_that_are_stated_are_checked(turn_q, turn_k, words):
    verdict = check(with_rotation(turn_q, turn_k), DEFINITION, FEW)
    assert verdict.ok if not words else words in verdict.cause.headline


@pytest.mark.long
def test_the_stated_alignment_counts():
    def from_the_end(q, k, v):
        """Causal, aligned with the last key: query i sees keys j <= i + m - n."""
        i, j = grid(q, k)
        return attend(q, k, v, j <= i + (k.shape[-2] - q.shape[-2]))

    def from_the_start(q, k, v):
        i, j = grid(q, k)
        return attend(q, k, v, j <= i)

    from_the_start.__doc__ = from_the_end.__doc__
    assert check(from_the_end, DEFINITION, FEW).ok
    assert check(from_the_start, DEFINITION, FEW).cause.family == "causal alignment"
    assert (
        stated_alignment("as is_causal of torch, top-left") == "top-left"
        and stated_alignment("causal") is None
    )


@pytest.mark.long
def test_a_mask_that_is_stated_as_bool_and_added_is_a_fault():
    def attention(q, k, v, mask=None):
        return attend(q, k, v, bias=0.0 if mask is None else mask.to(q.dtype))

    assert check(attention, DEFINITION, FEW).ok  # an additive mask, as far as anyone can tell
    attention.__doc__ = "mask: bool, True = may attend"
    assert check(attention, DEFINITION, FEW).cause.family == "mask added"


def test_the_text_about_one_mask_is_not_that_about_another():
    text = "attn_mask: bool, True = attend.\nkey_padding_mask: True = padding."
    assert polarity("attn_mask", text) == "keep" and polarity("key_padding_mask", text) == "hide"


def test_zeros_for_empty_rows_are_checked_where_they_are_promised():
    def attention(q, k, v, mask=None):
        return attend(q, k, v, mask)

    assert check(attention, ["P03"], FEW)["P03"].status == "not promised"
    attention.__doc__ = "A query with no allowed key gets zeros."
    verdict = check(attention, ["P03"], FEW)
    assert verdict["P03"].status == "broken" and verdict.cause.family == "empty rows"


@pytest.mark.parametrize("fault", ["", "always", "scaled"])
def test_a_dropout_probability_does_nothing_outside_training(fault):
    def attention(q, k, v, p=0.0, training=False):
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        weights = F.dropout(weights, p, training or (fault == "always" and p > 0))
        return (weights * (1 - p) if fault == "scaled" and not training else weights) @ v

    assert check(attention, ["L56"], FEW).ok == (not fault)


@pytest.mark.parametrize("right", [True, False])
def test_weights_beside_the_output_are_compared(right):
    def attention(q, k, v):
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        return scores.softmax(-1) @ v, scores.softmax(-1) if right else scores

    verdict = check(attention, DEFINITION, FEW)
    assert verdict.ok if right else verdict.cause.family == "wrong weights"


class Fused(nn.Module):
    """Self-attention of axes (b, n, d) with a fused qkv."""

    def __init__(self, order="qkv"):
        super().__init__()
        torch.manual_seed(0)
        self.num_heads, self.order = 2, order
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        parts = dict(zip(self.order, self.qkv(x).chunk(3, -1)))
        q, k, v = (parts[c].unflatten(-1, (2, 4)).transpose(1, 2) for c in "qkv")
        return self.out(attend(q, k, v).transpose(1, 2).flatten(2))


def test_a_fused_projection_is_read_in_the_order_of_its_name():
    assert check(Fused(), DEFINITION, FEW).ok
    cause = check(Fused("kqv"), DEFINITION, FEW).cause
    assert cause.family == "wrong projection" and "in the order k, q, v" in cause.headline


class SequenceFirst(Fused):
    """Self-attention, sequence first: (n, b, d)."""

    def forward(self, x):
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


@pytest.mark.long
def test_axes_that_are_stated_as_sequence_first_are_moved():
    assert says_sequence_first(SequenceFirst.__doc__) and not says_sequence_first(Fused.__doc__)
    assert check(SequenceFirst(), ["L48", "L65"], FEW).ok
    assert not check(adapt(SequenceFirst2()), ["L48"], FEW).ok


class SequenceFirst2(SequenceFirst):
    """Self-attention."""


class Cross(nn.Module):
    """Attends from x to a context of another width; mask (b, m) is True for real keys."""

    def __init__(self, scale=0.5, inverted=False):
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.scale, self.inverted = 2, scale, inverted
        self.to_q, self.to_k, self.to_v = nn.Linear(8, 8), nn.Linear(6, 8), nn.Linear(6, 8)
        self.to_out = nn.Linear(8, 8)

    def forward(self, x, context, mask=None):
        parts = (self.to_q(x), self.to_k(context), self.to_v(context))
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in parts)
        scores = q @ k.mT * self.scale
        if mask is not None:
            hidden = mask if self.inverted else ~mask
            scores = scores.masked_fill(hidden[:, None, None], -1e30)
        return self.to_out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.long
def test_cross_attention_to_a_context_of_another_width_is_checked():
    target = adapt(Cross())
    assert (target.d_model, target.d_context) == (8, 6) and "context lengths" in target.claims
    assert check(target, ["L31", "L65"], FEW).ok
    assert check(Cross(scale=2.0), DEFINITION, FEW).cause.family == "scale inverted"
    assert check(Cross(inverted=True), DEFINITION, FEW).cause.family == "padding inverted"


def masked_by(hidden):
    def integer_or_bool(q, k, v, mask=None):
        """mask: bool or 0/1, 1 = may attend."""
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        return (scores if mask is None else scores.masked_fill(hidden(mask), -1e9)).softmax(-1) @ v

    return integer_or_bool


class Padded(Fused):
    """Self-attention. mask: (b, n), bool or 0 and 1, 1 = a real token."""

    def __init__(self, hidden):
        super().__init__()
        self.hidden = hidden

    def forward(self, x, mask=None):
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        scores = q @ k.mT / 2
        if mask is not None:
            scores = scores.masked_fill(self.hidden(mask)[:, None, None], -1e9)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_a_mask_that_may_be_integers_is_given_as_both():
    def bitwise(mask):  # ~1 is −2, which is not 0
        return (~mask).bool()

    def outcome(target, number):
        return try_law(law(number), adapt(target), FEW)

    assert outcome(masked_by(lambda mask: ~mask.bool()), "L65").status == "holds"
    assert "in a mask of integers (" in outcome(masked_by(bitwise), "L65").message
    assert "raised" in outcome(masked_by(lambda mask: ~mask), "L65").message
    assert outcome(Padded(lambda mask: mask == 0), "L31").status == "holds"
    assert "as integers: got" in outcome(Padded(bitwise), "L31").message


@pytest.mark.parametrize(
    "text, integers",
    [
        ("mask: bool or 0/1, 1 = may attend", True),
        ("mask: LongTensor, 1 for tokens", True),
        ("mask: int tensor (b, n)", True),
        ("mask: bool (b, 1, n, m), where True means masked", False),
        ("mask: True where a key may be attended to. Other 0/1 flags", False),
    ],
)
def test_whether_a_mask_may_be_integers_is_read(text, integers):
    assert says_integers("mask", text) == integers


def bidirectional_alibi(q, k, v):
    """Attention with ALiBi: a bias of -slope * |i - j|; n == m."""
    i = torch.arange(q.shape[-2], device=q.device)
    near = -alibi_slopes(q.shape[1]).to(q)[:, None, None] * (i[:, None] - i).abs()
    return (q @ k.mT / q.shape[-1] ** 0.5 + near).softmax(-1) @ v


def bidirectional_rotary(q, k, v):
    """Bidirectional attention with rotary positions, in halves; n == m."""
    q, k = (rotate(x, torch.arange(x.shape[-2]), pairing="halves") for x in (q, k))
    return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("attend", [bidirectional_alibi, bidirectional_rotary])
def test_laws_of_plain_calls_do_not_apply_where_every_call_has_positions(attend):
    """These compare with a formula without positions, or permute the keys."""
    verdict = check(attend, budget=FEW)
    assert verdict.ok, verdict.explanation()
    assert verdict["L65"].status == "holds"
    assert verdict["L19"].message == "the law needs calls without positions; this always adds positions"


def with_default_window(wide=0):
    def sliding(q, k, v, window=4):
        """Causal window: query i attends to the keys with 0 <= i - j < window, the last query to the last key."""
        n, m = q.shape[-2], k.shape[-2]
        i, j = torch.arange(n)[:, None] + m - n, torch.arange(m)
        return attend(q, k, v, (j <= i) & (i - j < window + wide))

    return sliding


def test_a_window_with_a_default_is_passed_in_every_call():
    verdict = check(with_default_window(), budget=FEW)
    assert verdict.ok and verdict["L65"].status == "holds", verdict.explanation()
    assert check(with_default_window(wide=1), DEFINITION, FEW).cause.family == "window off by one"
