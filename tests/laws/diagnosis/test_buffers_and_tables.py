"""Sliding windows in ring buffers, and learned biases by distance, inside a module."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from regard.laws import Budget, law, try_law
from regard.laws.adapters import adapt
from regard.laws.diagnosis.module_samples import implied_options, module_samples
from regard.laws.diagnosis.projections import arrangements
from regard.laws.diagnosis.relative_bias import equal_input_weights, relative_fault, rotary_fault
from regard.laws.diagnosis.some_positions import uneven_positions, wrong_positions
from regard.laws.harness import Harness

FEW = Budget(cases=12)


class Ring(nn.Module):
    """Causal self-attention with a sliding window: keys in a ring buffer. Inference only."""

    def __init__(self, slot, filled, window=3):
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.window, self.slot, self.filled = 2, window, slot, filled
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    @torch.no_grad()
    def forward(self, x):
        parts = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k, v = parts
        buffers = [torch.zeros_like(k[:, :, :1]).repeat(1, 1, self.window, 1) for _ in range(2)]
        steps = []
        for t in range(x.shape[1]):
            for buffer, new in zip(buffers, (k, v)):
                buffer[:, :, self.slot(t)] = new[:, :, t]
            keys, values = (b[:, :, : self.filled(t)] for b in buffers)
            steps.append((q[:, :, t : t + 1] @ keys.mT / 2).softmax(-1) @ values)
        return self.o(torch.cat(steps, 2).transpose(1, 2).flatten(2))


def harness_of(module):
    return Harness(adapt(module), {"float64": True, "float32": True})


def outcome(module, number):
    return try_law(law(number), adapt(module), FEW)


def test_a_ring_buffer_is_a_sliding_window():
    right = Ring(lambda t: t % 3, lambda t: min(t + 1, 3))
    assert "output i depends on the inputs i − 2 … i (found by probing)" in adapt(right).notes
    assert outcome(right, "L59").status == "holds"


def found_positions(module, **changes):
    target = replace(adapt(module), max_length=7, **changes)
    harness = Harness(target, {"float64": True})
    module = harness.module()
    seen = list(module_samples(harness, module))
    return wrong_positions(harness, module, next(arrangements(module)), seen, implied_options(harness), 1e-9)


def test_slots_of_a_ring_buffer_that_are_read_too_early_are_found():
    cause = found_positions(Ring(lambda t: t % 3, lambda t: 3))
    assert cause.name == "outputs are wrong at positions 0, 1 of 7"
    assert found_positions(Ring(lambda t: t % 3, lambda t: min(t + 1, 3))) is None


def test_positions_with_an_unknown_mask_are_not_called_wrong():
    ring = Ring(lambda t: t % 4, lambda t: min(t + 1, 4), window=4)
    assert found_positions(ring) is None
    assert found_positions(ring, window=(5, 0)) is None  # the module reads fewer inputs than this


@pytest.mark.parametrize(
    "slot", [lambda t: min(t, 2), lambda t: t if t < 3 else t % 2], ids=["stops", "modulus"]
)
def test_slots_of_a_ring_buffer_that_keep_an_old_key_are_found(slot):
    assert outcome(Ring(slot, lambda t: min(t + 1, 3)), "L59").status == "broken"


class Relative(nn.Module):
    """Self-attention with a learned bias by relative position, clamped to 4."""

    def __init__(self, index=None, heads_first=True, rows=9, causal=False):
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.heads_first, self.causal = 3, heads_first, causal
        self.index = index or (lambda d: d.clamp(-4, 4) + 4)
        self.table = nn.Parameter(torch.zeros(rows, 3))
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x):
        n = x.shape[1]
        q, k, v = (y.unflatten(-1, (3, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        bias = self.table[self.index(torch.arange(n) - torch.arange(n)[:, None])]
        bias = bias.permute(2, 0, 1) if self.heads_first else bias.reshape(3, n, n)
        scores = q @ k.mT / 2 + bias
        if self.causal:
            scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -math.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class CausalRelative(Relative):
    """Causal self-attention with a learned bias by relative position, clamped to 4."""


@pytest.mark.parametrize(
    "module",
    [
        Relative(),
        Relative(lambda d: d.abs().clamp(max=8)),  # one bias for both sides, and no row for another
        Relative(lambda d: torch.where(d.abs() > 4, 8, d.clamp(-4, 4) + 4)),  # one row for all that is far
        CausalRelative(lambda d: (-d).clamp(0, 8), causal=True),
    ],
    ids=["clamped", "symmetric", "far", "causal"],
)
def test_a_bias_by_distance_is_right(module):
    assert relative_fault(harness_of(module), module.double()) is None


@pytest.mark.parametrize(
    "module, words",
    [
        (Relative(heads_first=False), "the bias of (1, "),
        (CausalRelative(lambda d: (-d).clamp(0, 8), heads_first=False, causal=True), "the bias of (1, "),
        (Relative(lambda d: d.abs().clamp(max=4) + 4), "4 rows of the table are never read"),
        (Relative(lambda d: d % 9), "the keys at i − 1 and i + 8 have one bias"),
        (Relative(lambda d: (-d).clamp(0, 8)), "the bias of the keys after i does not depend on j"),
    ],
    ids=["axes", "axes, causal", "no sign", "wraps", "one side"],
)
def test_a_bias_by_distance_with_a_fault_is_found(module, words):
    assert words in relative_fault(harness_of(module), module.double()).evidence


def test_the_weights_of_a_bias_are_recovered_from_outputs():
    module = Relative().double()
    torch.nn.init.normal_(module.table)
    weights = equal_input_weights(harness_of(module), module, torch.zeros(1, 6, 12))
    d = torch.arange(6) - torch.arange(6)[:, None]
    want = module.table[d.clamp(-4, 4) + 4].permute(2, 0, 1).softmax(-1)
    assert torch.allclose(weights, want, atol=1e-9)


class Rolled(Ring):
    """Causal self-attention with a sliding window: keys in a ring buffer. Inference only."""

    @torch.no_grad()
    def forward(self, x):
        first = super().forward(x[:, :1])
        return torch.cat([first, 0.7 * super().forward(x)[:, 1:]], 1)


def test_equal_inputs_have_equal_outputs():
    right = Ring(lambda t: t % 3, lambda t: min(t + 1, 3))
    assert uneven_positions(harness_of(right), right.double()) is None
    wrong = Rolled(lambda t: t % 3, lambda t: min(t + 1, 3))
    assert uneven_positions(harness_of(wrong), wrong.double()).name.startswith("weights do not sum to one")


def test_a_window_is_read_with_every_input_inside():
    late = Ring(lambda t: t % 3, lambda t: min(t + 1, 3) if t > 3 else 1)  # the first queries miss their past
    assert "does not depend on input" in outcome(late, "L59").message


class Rotated(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, of_keys=1.0, mask=True, share=1.0, angle=lambda t: t):
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.of_keys, self.mask, self.share, self.angle = 2, of_keys, mask, share, angle
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def rotated(self, x, direction):
        n, width = x.shape[-2], int(self.share * x.shape[-1])
        angles = self.angle(torch.arange(n).to(x))[:, None] * 100.0 ** (
            -torch.arange(0, width, 2).to(x) / width
        )
        turn, (a, b) = direction * angles, (x[..., i:width:2] for i in (0, 1))
        pairs = torch.stack([a * turn.cos() - b * turn.sin(), a * turn.sin() + b * turn.cos()], -1)
        return torch.cat([pairs.flatten(-2), x[..., width:]], -1)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (2, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = self.rotated(q, 1.0) @ self.rotated(k, self.of_keys).mT / math.sqrt(8)
        if self.mask:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Bidirectional(Rotated):
    """Self-attention with rotary positions, bidirectional."""


@pytest.mark.parametrize(
    "module",
    [Rotated(), Rotated(share=0.5), Bidirectional(mask=False), Rotated(angle=lambda t: t / 3)],
    ids=["causal", "half of the width", "bidirectional", "interpolated"],
)
def test_rotary_positions_of_any_kind_are_right(module):
    assert rotary_fault(harness_of(module), module.double()) is None


@pytest.mark.parametrize(
    "module",
    [Rotated(-1.0), Rotated(0.5), Bidirectional(-1.0, mask=False), Rotated(angle=lambda t: t**1.5)],
    ids=["keys turn back", "keys turn less", "bidirectional", "angles are no line"],
)
def test_rotary_positions_whose_weights_depend_on_more_than_the_distance_are_found(module):
    assert "the weight of (1, " in rotary_fault(harness_of(module), module.double()).evidence


class Reflected(Rotated):
    """Causal self-attention with rotary positions."""

    def rotated(self, x, direction):
        signs = torch.tensor([1.0, -1.0]).to(x).repeat(x.shape[-1] // 2)
        return super().rotated(x, direction) * signs if direction else x


@pytest.mark.parametrize(
    "module",
    [Rotated(0.0), Bidirectional(0.0, mask=False), Reflected(0.0)],
    ids=["causal", "bidirectional", "reflected"],
)
def test_queries_that_are_rotated_alone_are_found(module):
    """Equal keys then have equal weights, as they have with any function of j − i that is constant."""
    fault = rotary_fault(harness_of(module), module.double())
    assert fault.headline == "only the queries are rotated, not the keys"
    assert "the outputs at 1 and " in fault.evidence


def test_scores_that_are_nearly_0_hide_no_correct_rotation():
    """Both effects of a rotation shrink with the scores: the weights are equal, and the outputs are, too."""
    module = Rotated()
    with torch.no_grad():
        module.q.weight *= 1e-4
        module.q.bias *= 1e-4
    assert rotary_fault(harness_of(module), module.double()) is None


def test_keys_that_are_rotated_backwards_break_a_law():
    broken = outcome(Rotated(-1.0), "L65")
    assert broken.status == "broken"


@pytest.mark.long  # the same law and its search as of keys that are rotated backwards; rotary_fault is tested above
def test_queries_that_are_reflected_alone_break_a_law():
    assert outcome(Reflected(0.0), "L65").status == "broken"
