"""Declared counts are exact: L46."""

from ..harness import Harness
from ..law import Case, Law, Tolerance, Trial
from ..measurement import Measurement, require, worst
from ..target import Part


def counted(harness: Harness, c: Case) -> Measurement:
    rows = harness.part.call()
    return worst(
        *(
            require(f"{quantity}: declared {declared:,}, actual {actual:,}", declared == actual)
            for quantity, declared, actual in rows
        )
    )


def _without_w_o() -> Part:
    d, h = 8, 2
    actual = sum(rows * d + d for rows in (d, d, d, d))
    return Part(
        f"a formula without W_O, d_model {d}, {h} heads",
        "counts",
        lambda: [("parameters", 3 * (d * d + d), actual)],
    )


LAWS = (
    Law(
        "L46",
        "counts are exact",
        "declared parameters and FLOPs = those of the module that is built and run",
        "a multiply-add is 2 FLOPs; integers",
        {"counts": Trial(counted, lambda harness: {"repeat": (0,)}, per_seed=True)},
        _without_w_o,
        Tolerance(0.0, 0.0, 0.0),
    ),
)
