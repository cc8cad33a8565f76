"""Faulty norms, positions, schedules and other parts beyond the control of each law: every one is reported."""

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from regard.laws import Budget, Part, law, search, try_law
from regard.position import rotate, sinusoid
from regard.schedule import warmup_cosine

RATE = warmup_cosine(0.001, 40, 200)
RATE_FACTS = {"lr_max": 0.001, "warmup": 40, "total": 200}


def layer_norm(x, dims=(-1,), center=True):
    x = x - x.mean(dims, keepdim=True) if center else x
    return x / x.square().mean(dims, keepdim=True).sqrt()


def batch_norm(x, training, dims=(0,), frozen=True):
    return layer_norm(x, dims) if training or not frozen else x


def clip_each(grads, limit):
    return [g * min(1.0, limit / float(g.norm())) for g in grads]


def always_rescaled(grads, limit):
    norm = torch.cat([g.flatten() for g in grads]).norm()
    return [g * limit / norm for g in grads]


def feed_forward():
    torch.manual_seed(0)
    w_1, w_2 = nn.Linear(5, 7).double().requires_grad_(False), nn.Linear(7, 5).double().requires_grad_(False)
    facts = {"width": 5, "w_1": w_1.weight, "b_1": w_1.bias, "w_2": w_2.weight, "b_2": w_2.bias}
    return Part("GELU declared as ReLU", "feed-forward", lambda x: w_2(F.gelu(w_1(x))), facts)


def patches():
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 5, 4, stride=4).double().requires_grad_(False)
    facts = {"image": (3, 12, 8), "side": (4, 4), "weight": conv.weight, "bias": conv.bias}
    return Part(
        "patches in column order", "patches", lambda x: rearrange(conv(x), "b d y x -> b (x y) d"), facts
    )


def schedule(name, call):
    return Part(name, "schedule", call, RATE_FACTS)


def halves(positions, d):
    table = sinusoid(positions, d, dtype=torch.float64)
    return torch.cat([table[:, 0::2], table[:, 1::2]], -1)


FAULTS = [
    ("L37", Part("layer norm over the batch", "norm", lambda x: layer_norm(x, (0, 1)))),
    ("L37", Part("batch norm over each row", "batch norm", lambda x, t: batch_norm(x, t, (1,)))),
    (
        "L37",
        Part("batch statistics in evaluation", "batch norm", lambda x, t: batch_norm(x, t, frozen=False)),
    ),
    ("L37", Part("batch norm without statistics", "batch norm", lambda x, t: x)),
    ("L38", Part("RMS norm declared as layer norm", "norm", lambda x: layer_norm(x, center=False))),
    ("L38", Part("ε = 0.1 declared as 0", "norm", lambda x: F.layer_norm(x, x.shape[-1:], eps=0.1))),
    ("L22", Part("base 1000", "positions", lambda p, d: _base(p, d, 1000.0))),
    ("L22", Part("sines first, then cosines", "positions", halves)),
    ("L23", Part("rotation by squared positions", "rotary", lambda x, p: rotate(x, p.square()))),
    ("L23", Part("rotation that scales", "rotary", lambda x, p: 1.01 * rotate(x, p))),
    ("L39", feed_forward()),
    ("L40", patches()),
    ("L41", schedule("no warm-up", lambda step: RATE(max(step, 40)))),
    ("L41", schedule("half of the peak", lambda step: RATE(step) / 2)),
    (
        "L41",
        schedule(
            "quadratic decay", lambda s: RATE(s) if s < 40 else 0.001 * max(0.0, 1 - (s - 40) / 160) ** 2
        ),
    ),
    ("L41", schedule("a jump", lambda step: RATE(step) * (0.5 if 60 < step < 70 else 1.0))),
    ("L42", Part("each tensor clipped by itself", "clip", clip_each)),
    ("L42", Part("small gradients scaled up", "clip", always_rescaled)),
    ("L42", Part("no clipping", "clip", lambda grads, limit: grads)),
    ("L46", Part("one FLOP too few", "counts", lambda: [("parameters", 8, 8), ("FLOPs", 511, 512)])),
]


def _base(positions, d, base):
    angles = positions[:, None].double() * base ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)


@pytest.mark.parametrize(("number", "part"), FAULTS, ids=[part.name for _, part in FAULTS])
def test_a_faulty_part_is_reported(number, part, monkeypatch):
    monkeypatch.setattr(search, "MAX_SHRINK_RUNS", 0)
    outcome = try_law(law(number), part, Budget(cases=40))
    assert outcome.status == "broken", f"{outcome.status}: {outcome.message}"


def test_the_same_parts_without_a_fault_are_not_reported():
    correct = {
        "norm": layer_norm,
        "batch norm": batch_norm,
        "positions": lambda p, d: _base(p, d, 10000.0),
    }
    for kind, call in correct.items():
        for one in (law("L22"), law("L37"), law("L38")):
            if kind in one.trials:
                outcome = try_law(one, Part(kind, kind, call), Budget(cases=10))
                assert outcome.status == "holds", f"{kind} {one.number}: {outcome.message}"
