"""Learning-rate schedules and gradient clipping: L41, L42."""

import math

import torch

from ..harness import Harness
from ..law import Case, Law, Tolerance, Trial
from ..measurement import Measurement, compare, excess, require, worst
from ..target import Part


def schedule(harness: Harness, c: Case) -> Measurement:
    """Continuous, rising then falling, 0 at both ends, half of lr_max in the middle of the decay, a known sum."""
    lr_max, warmup, total = (harness.part.facts[x] for x in ("lr_max", "warmup", "total"))
    rates = torch.tensor([harness.part.call(step) for step in range(total + 1)], dtype=torch.float64)
    steps = rates.diff() / lr_max
    largest_step = 1.0 / min(warmup, total - warmup)
    ends = (
        torch.tensor([rates[0], rates[-1], harness.part.call(total + 1), harness.part.call(2 * total)])
        / lr_max
    )
    measurements = [
        compare("the rate at both ends and past the end, over lr_max", ends, torch.zeros(4)),
        compare("the rate at the end of the warm-up, over lr_max", rates[warmup] / lr_max, torch.tensor(1.0)),
        excess("the rate falls during warm-up", -steps[:warmup]),
        excess("the rate rises after warm-up", steps[warmup:]),
        excess("the rate jumps", steps.abs() - 2 * largest_step),
        compare(
            "the sum of all rates, over lr_max·total/2", rates.sum() / (lr_max * total / 2), torch.tensor(1.0)
        ),
    ]
    if (total - warmup) % 2 == 0:
        middle = rates[(warmup + total) // 2] / lr_max
        measurements.append(
            compare("the rate in the middle of the decay, over lr_max", middle, torch.tensor(0.5))
        )
    return worst(*measurements)


def clipping(harness: Harness, c: Case) -> Measurement:
    """After clipping the global norm is min(norm, c), in the same direction; below c nothing changes."""
    grads = [c.size * harness.randn(*shape) for shape in ((3, 2), (5,), (2, 2, 2))]
    flat = torch.cat([g.flatten() for g in grads]).double()
    norm = flat.norm()
    limit = float(norm) * c.share
    clipped = harness.part.call([g.clone() for g in grads], limit)
    after = torch.cat([g.flatten() for g in clipped]).double()
    cosine = (after @ flat) / (after.norm() * norm)
    want = torch.minimum(norm, torch.tensor(limit, dtype=torch.float64))
    measurements = [
        # PyTorch documents a division by norm + 1e-6, so the result may be that much smaller
        excess("the norm after clipping exceeds min(norm, c)", (after.norm() - want) / want),
        excess(
            "the norm after clipping is below min(norm, c)",
            (want - after.norm()) / want - 1e-6 / float(norm) - 1e-12,
        ),
        compare("the cosine between the gradients before and after", cosine, torch.tensor(1.0)),
    ]
    if c.share > 1:
        measurements.append(require("gradients below the limit were changed", torch.equal(after, flat)))
    return worst(*measurements)


def _raw_cosine() -> Part:
    def call(step: int) -> float:
        if step < 40:
            return 0.001 * step / 40
        return 0.001 * (1 + math.cos(math.pi * (step - 40) / 160)) / 2  # rises again after the last step

    return Part(
        "a cosine that continues past the end",
        "schedule",
        call,
        {"lr_max": 0.001, "warmup": 40, "total": 200},
    )


LAWS = (
    Law(
        "L41",
        "schedule",
        "continuous at warm-up; rising then falling; 0 at both ends and past; Σ = lr_max·total/2",
        "warm-up and cosine, 0 < warm-up < total",
        {
            "schedule": Trial(
                schedule,
                lambda harness: {"repeat": (0,)},
                per_seed=True,
                unless=lambda harness: _with_warmup(harness),
            )
        },
        _raw_cosine,
        Tolerance(1e-12, 1e-12),
    ),
    Law(
        "L42",
        "clipping",
        "‖g‖ after = min(‖g‖, c), same direction; below c nothing changes",
        "‖g‖ > 0",
        {
            "clip": Trial(
                clipping, lambda harness: {"share": (0.5, 0.01, 0.99, 1.5, 100.0), "size": (1.0, 1e-2, 1e3)}
            )
        },
        lambda: Part(
            "clipping by value", "clip", lambda grads, limit: [g.clamp(-limit / 5, limit / 5) for g in grads]
        ),
        Tolerance(1e-12, 1e-6),
    ),
)


def _with_warmup(harness: Harness) -> str | None:
    missing = [x for x in ("lr_max", "warmup", "total") if x not in harness.part.facts]
    return f"its facts do not include {', '.join(missing)}" if missing else None
