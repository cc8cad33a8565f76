"""What trains: L41, L42."""

import math

import torch

from ..harness import Lab
from ..law import Case, Law, Reading, Tolerance, Trial, bounded, compare, exactly, worst
from ..target import Part


def schedule(lab: Lab, c: Case) -> Reading:
    """Continuous, rising then falling, 0 at both ends, half in the middle of the fall, a known sum."""
    lr_max, warmup, total = (lab.part.facts[x] for x in ("lr_max", "warmup", "total"))
    rates = torch.tensor([lab.part.call(step) for step in range(total + 1)], dtype=torch.float64)
    steps = rates.diff() / lr_max
    wide = 1.0 / min(warmup, total - warmup)
    ends = torch.tensor([rates[0], rates[-1], lab.part.call(total + 1), lab.part.call(2 * total)]) / lr_max
    readings = [
        compare("0 at both ends and past the end", ends, torch.zeros(4)),
        compare("the rate at the end of the warm-up, over lr_max", rates[warmup] / lr_max, torch.tensor(1.0)),
        bounded("a fall during the warm-up", -steps[:warmup]),
        bounded("a rise after it", steps[warmup:]),
        bounded("a jump", steps.abs() - 2 * wide),
        compare("the sum over lr_max·total/2", rates.sum() / (lr_max * total / 2), torch.tensor(1.0)),
    ]
    if (total - warmup) % 2 == 0:
        middle = rates[(warmup + total) // 2] / lr_max
        readings.append(compare("the rate in the middle of the fall, over lr_max", middle, torch.tensor(0.5)))
    return worst(*readings)


def clipping(lab: Lab, c: Case) -> Reading:
    """The global norm after is min(norm, c), the direction stays, and below c nothing changes."""
    grads = [c.size * lab.randn(*shape) for shape in ((3, 2), (5,), (2, 2, 2))]
    flat = torch.cat([g.flatten() for g in grads]).double()
    norm = flat.norm()
    limit = float(norm) * c.share
    clipped = lab.part.call([g.clone() for g in grads], limit)
    after = torch.cat([g.flatten() for g in clipped]).double()
    cosine = (after @ flat) / (after.norm() * norm)
    want = torch.minimum(norm, torch.tensor(limit, dtype=torch.float64))
    readings = [
        # PyTorch divides by norm + 1e-6: that much shorter is its documented rule
        bounded("the norm after clipping above min(norm, c)", (after.norm() - want) / want),
        bounded(
            "the norm after clipping below min(norm, c)",
            (want - after.norm()) / want - 1e-6 / float(norm) - 1e-12,
        ),
        compare("the cosine to the direction before", cosine, torch.tensor(1.0)),
    ]
    if c.share > 1:
        readings.append(exactly("a gradient below the limit was changed", torch.equal(after, flat)))
    return worst(*readings)


def _raw_cosine() -> Part:
    def call(step: int) -> float:
        if step < 40:
            return 0.001 * step / 40
        return 0.001 * (1 + math.cos(math.pi * (step - 40) / 160)) / 2  # rises again past the end

    return Part(
        "the raw formula past the end", "schedule", call, {"lr_max": 0.001, "warmup": 40, "total": 200}
    )


LAWS = (
    Law(
        "L41",
        "schedule",
        "continuous at warm-up; rising then falling; 0 at both ends and past; Σ = lr_max·total/2",
        "warm-up and cosine, 0 < warm-up < total",
        {
            "schedule": Trial(
                schedule, lambda lab: {"draw": (0,)}, few=True, when=lambda lab: _with_warmup(lab)
            )
        },
        _raw_cosine,
        Tolerance(1e-12, 1e-12),
    ),
    Law(
        "L42",
        "clipping",
        "‖g‖ after = min(‖g‖, c), direction kept; below c nothing changes",
        "‖g‖ > 0",
        {
            "clip": Trial(
                clipping, lambda lab: {"share": (0.5, 0.01, 0.99, 1.5, 100.0), "size": (1.0, 1e-2, 1e3)}
            )
        },
        lambda: Part(
            "clipping by value", "clip", lambda grads, limit: [g.clamp(-limit / 5, limit / 5) for g in grads]
        ),
        Tolerance(1e-12, 1e-6),
    ),
)


def _with_warmup(lab: Lab) -> str | None:
    missing = [x for x in ("lr_max", "warmup", "total") if x not in lab.part.facts]
    return f"its facts do not say {', '.join(missing)}" if missing else None
