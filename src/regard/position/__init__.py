"""Position encodings: the declared values, and their formulas.

acts        value                                    adds
"input"     sinusoidal, learned                      a vector to each input
"query_key" rope                                     a rotation of each query and key
"score"     alibi, t5_buckets, relative_table,       a number to each score, by the distance j − i
            shaw, quadratic                          from query i to key j

Positions count from 0. On a grid (H, W) a position is a cell index in row-major order, or a pair (row, column).
Angles are computed in float64: in float32 the angle of position 100,000 is off by up to 0.006.
"""

from .angles import cos_sin, rates, rotate, rotate_grid, sinusoid, sinusoid_grid
from .distance import (
    ByDistance,
    alibi_slopes,
    offsets,
    quadratic_scores,
    skew,
    t5_bucket,
    t5_bucket_between,
    t5_edges,
)
from .tables import coordinates, resample, resample_grid
from .words import (
    KINDS,
    Position,
    alibi,
    learned,
    quadratic,
    relative_table,
    rope,
    shaw,
    sinusoidal,
    t5_buckets,
)

__all__ = [
    "KINDS",
    "ByDistance",
    "Position",
    "alibi",
    "alibi_slopes",
    "coordinates",
    "cos_sin",
    "learned",
    "offsets",
    "quadratic",
    "quadratic_scores",
    "rates",
    "relative_table",
    "resample",
    "resample_grid",
    "rope",
    "rotate",
    "rotate_grid",
    "shaw",
    "sinusoid",
    "sinusoid_grid",
    "sinusoidal",
    "skew",
    "t5_bucket",
    "t5_bucket_between",
    "t5_buckets",
    "t5_edges",
]
