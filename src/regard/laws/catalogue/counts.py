"""Counts are exact: L46."""

from ..harness import Lab
from ..law import Case, Law, Reading, Tolerance, Trial, exactly, worst
from ..target import Part


def counted(lab: Lab, c: Case) -> Reading:
    rows = lab.part.call()
    return worst(
        *(
            exactly(f"{what}: declared {declared:,}, found {found:,}", declared == found)
            for what, declared, found in rows
        )
    )


def _without_w_o() -> Part:
    d, h = 8, 2
    found = sum(rows * d + d for rows in (d, d, d, d))
    return Part(
        f"a formula without W_O, d_model {d}, {h} heads",
        "counts",
        lambda: [("parameters", 3 * (d * d + d), found)],
    )


LAWS = (
    Law(
        "L46",
        "counts are exact",
        "declared parameters, FLOPs and bytes = the tensors made, the products executed, the bytes held",
        "multiply-add = 2; whole numbers",
        {"counts": Trial(counted, lambda lab: {"draw": (0,)}, few=True)},
        _without_w_o,
        Tolerance(0.0, 0.0, 0.0),
    ),
)
