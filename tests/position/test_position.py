"""The formulas of positions, and the values that declare them."""

import math

import jaxtyping
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger_cases import agrees, case, cases
from regard import position as pos
from regard import value
from regard.errors import ShapeError, SpecError
from regard.position import (
    KINDS,
    ByDistance,
    alibi,
    alibi_slopes,
    coordinates,
    learned,
    offsets,
    quadratic,
    quadratic_scores,
    rates,
    relative_table,
    resample,
    resample_grid,
    rope,
    rotate,
    rotate_grid,
    shaw,
    sinusoid,
    sinusoid_grid,
    sinusoidal,
    skew,
    t5_bucket,
    t5_buckets,
)

f64 = torch.float64
VALUES = [
    sinusoidal(),
    sinusoidal(base=500, order="halves", grid=(3, 5)),
    learned(197),
    learned((14, 14), beyond="resample"),
    rope(),
    rope(base=500000, pairing="interleaved", fraction=0.25, grid=(7, 11)),
    alibi(),
    t5_buckets(),
    t5_buckets(16, 64, bidirectional=False),
    relative_table(5),
    relative_table(grid=(3, 5)),
    shaw(4),
    shaw(4, values=True),
    quadratic(),
    quadratic(grid=(6, 6)),
]


def randn(*shape, seed=0, dtype=f64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def pe(positions, d=512, base=10000.0, **options):
    return sinusoid(torch.as_tensor(positions, dtype=f64), d, base, dtype=f64, **options)


@pytest.fixture
def without_the_shape_checker():
    """As users run it: the checker of the test run would speak before the message under test."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


# The values


@pytest.mark.ledger("S0.Q1d.8")
@pytest.mark.parametrize("p", VALUES, ids=repr)
def test_a_position_is_its_source_and_its_json(p):
    assert eval(repr(p), vars(pos)) == p
    assert value.from_json(value.to_json(p), value.table(*KINDS)) == p
    assert hash(p) == hash(eval(repr(p), vars(pos)))


def test_every_kind_is_listed_and_says_where_it_acts():
    assert {type(p) for p in VALUES} == set(KINDS)
    assert {kind.__name__: kind.acts for kind in KINDS} == {
        "sinusoidal": "input",
        "learned": "input",
        "rope": "query_key",
        "alibi": "score",
        "t5_buckets": "score",
        "relative_table": "score",
        "shaw": "score",
        "quadratic": "score",
    }


@pytest.mark.parametrize(
    "declare, message",
    [
        (lambda: sinusoidal(base=1), "base=1 is not above 1; the usual base is 10000"),
        (lambda: sinusoidal(order="halfs"), "order='halfs' is unknown; did you mean halves?"),
        (
            lambda: sinusoidal(grid=(0, 4)),
            "sinusoidal(grid=(0, 4)): grid must be (height, width), both at least 1",
        ),
        (
            lambda: sinusoidal().check_width(7),
            "sinusoidal(): columns form pairs, and 7 is not a multiple of 2; use 6 or 8",
        ),
        (
            lambda: sinusoidal(grid=(3, 5)).check_width(6),
            "sinusoidal(grid=(3, 5)): rows and columns need pairs of their own, and 6 is not "
            "a multiple of 4; use 4 or 8",
        ),
        (lambda: learned(0), "learned(0) is an empty table; use at least 1 position"),
        (lambda: learned(512, beyond="wrap"), "beyond='wrap' is unknown; known: refuse, resample"),
        (lambda: rope(pairing="interleave"), "pairing='interleave' is unknown; did you mean interleaved?"),
        (lambda: rope(fraction=1.5), "fraction=1.5 is not in (0, 1]"),
        (
            lambda: rope(fraction=0.3).width(64),
            "fraction=0.3 of d_k=64 is 19.2 columns, which is not an integer",
        ),
        (
            lambda: rope().width(5),
            "rope() on d_k=5: columns form pairs, and 5 is not a multiple of 2; use 4 or 6",
        ),
        (
            lambda: t5_buckets(31),
            "buckets=31 with bidirectional=True: use an even number of at least 4, half for each direction",
        ),
        (
            lambda: t5_buckets(1, bidirectional=False),
            "buckets=1 with bidirectional=False: use at least 2",
        ),
        (
            lambda: t5_buckets(32, 8),
            "max_distance=8 is not above the 8 distances with a bucket each; use more than "
            "8, or fewer buckets",
        ),
        (
            lambda: relative_table(),
            "relative_table(): set either reach (for a sequence) or grid=(H, W) (for an image)",
        ),
        (
            lambda: relative_table(3, grid=(3, 5)),
            "relative_table(reach=3, grid=(3, 5)): set either reach (for a sequence) or "
            "grid=(H, W) (for an image)",
        ),
        (lambda: shaw(-1), "shaw(-1): reach is negative; use 0 or more"),
        (
            lambda: quadratic(grid=(3, 0)),
            "quadratic(grid=(3, 0)): grid must be (height, width), both at least 1",
        ),
    ],
)
def test_a_wrong_declaration_says_what_would_work(declare, message):
    with pytest.raises(SpecError) as error:
        declare()
    assert str(error.value) == message


# Sinusoids: law L22


@pytest.mark.ledger("S1.Q4c.2", "S1.Q4a.1")
def test_column_2i_is_the_sine_and_not_the_cosine_of_1_that_the_slip_would_give():
    """The document's second line for column 2i reads cos(pos/pos): cos 1 = 0.540302 for every position."""
    for base in (10000.0, 100.0):
        encoding = pe(range(1, 50), 16, base)
        for i in range(8):
            column = encoding[:, 2 * i]
            truth = [math.sin(pos / base ** (2 * i / 16)) for pos in range(1, 50)]
            assert column.tolist() == pytest.approx(truth, abs=1e-12)
            assert (column.diff().abs() > 1e-6).all()  # it depends on the position
    assert float((encoding - math.cos(1)).abs().amax(0).min()) > 1e-3  # no column is that constant


@pytest.mark.ledger("S1.Q4a.1", "S1.Q4c.1")
@pytest.mark.parametrize("c", cases("pe.sinusoidal"), ids=lambda c: c["id"])
def test_sinusoid_has_the_numbers_of_the_ledger(c):
    given = c["inputs"]
    encoding = pe(given["pos"], given["d_model"], given["base"])
    halves = pe(given["pos"], given["d_model"], given["base"], order="halves")
    for pair in c["expected"]:
        i = pair["i"]
        angle = float(given["pos"] * rates(given["d_model"], given["base"])[i])
        got = {"angle": angle, "sin": float(encoding[2 * i]), "cos": float(encoding[2 * i + 1])}
        assert agrees(got, {key: pair[key] for key in got}, c["compare"])
        assert (pair["dim_sin"], pair["dim_cos"]) == (2 * i, 2 * i + 1)
        assert halves[i] == encoding[2 * i] and halves[given["d_model"] // 2 + i] == encoding[2 * i + 1]


@pytest.mark.ledger("S1.Q4a.2")
@pytest.mark.parametrize("c", cases("pe.dot"), ids=lambda c: c["id"])
def test_the_product_of_two_sinusoids_depends_on_their_distance_alone(c):
    k, d = c["inputs"]["offset"], c["inputs"]["d_model"]
    products = einsum(pe(range(0, 1000, 37), d), pe(range(k, 1000 + k, 37), d), "p d, p d -> p")
    assert float(products.max() - products.min()) < 1e-9
    assert agrees(float(products[0]), c["expected"], c["compare"])
    single = sinusoid(torch.tensor([500, 500 + k]), d).double()
    assert abs(float(single[0] @ single[1]) - c["expected"]) < 1e-3  # float32: the angles are still float64


@pytest.mark.ledger("S1.Q4a.2", "S0.Q1d.6")
def test_sinusoids_of_a_thousand_positions_are_distinct_and_of_equal_norm():
    c = case("pe.summary.d512.L1000")
    encoding = pe(range(c["inputs"]["length"]), c["inputs"]["d_model"])
    assert float((encoding.norm(dim=-1) - c["expected"]["norm"]).abs().max()) < 1e-12
    assert float(encoding.abs().max()) <= 1.0
    distances = torch.cdist(encoding, encoding, compute_mode="donot_use_mm_for_euclid_dist")
    distances.fill_diagonal_(math.inf)
    p, r = divmod(int(distances.argmin()), len(encoding))
    got = {
        "norm": float(encoding[500].norm()),
        "min_distance": float(distances.min()),
        "min_distance_offset": abs(p - r),
        "longest_wavelength": float(2 * math.pi / rates(512)[-1]),
    }
    assert agrees(got, c["expected"], c["compare"])


@pytest.mark.ledger("S1.Q4a.2", "S1.Q4b.3")
@given(p=st.integers(0, 999), k=st.one_of(st.integers(-999, 999), st.just(0.5), st.floats(-50, 50)))
def test_a_shifted_sinusoid_is_a_rotation_of_it(p, k):
    """PE(p + k) = R_k PE(p), R_k in blocks ((cos, sin), (−sin, cos)); k = 1/2 is the half step."""
    before, after = pe(p).numpy(), pe(p + k).numpy()
    theta = k * 10000.0 ** (-np.arange(0, 512, 2) / 512)
    sin, cos = before[0::2], before[1::2]
    turned = np.stack(
        [sin * np.cos(theta) + cos * np.sin(theta), cos * np.cos(theta) - sin * np.sin(theta)], -1
    )
    assert np.abs(turned.reshape(-1) - after).max() < 1e-10
    by_rotate = rotate(pe([p]), torch.tensor([-k], dtype=f64), pairing="interleaved")[0]
    assert np.abs(by_rotate.numpy() - after).max() < 1e-10


@pytest.mark.ledger("S1.Q4a.1")
def test_a_sinusoid_far_out_keeps_its_digits_in_float32():
    far = torch.tensor([100_000, 1_000_003])
    assert float((sinusoid(far, 512).double() - pe(far)).abs().max()) < 1e-7
    careless = torch.sin(far.float()[:, None] * rates(512).float())
    assert float((careless.double() - pe(far)[:, 0::2]).abs().max()) > 1e-3  # what float64 angles are for


@pytest.mark.ledger("S1.Q4a.1")
def test_a_sinusoid_on_a_grid_is_the_row_then_the_column():
    where = torch.tensor([[2, 5], [0, 3], [2, 3]])
    grid = sinusoid_grid(where, 12, base=100.0, order="halves", dtype=f64)
    by_axis = [sinusoid(axis, 6, 100.0, "halves", f64) for axis in where.unbind(-1)]
    assert torch.equal(grid, torch.cat(by_axis, dim=-1))
    assert torch.equal(grid[0, :6], grid[2, :6]) and torch.equal(grid[1, 6:], grid[2, 6:])


def test_an_odd_width_is_refused():
    with pytest.raises(SpecError) as error:
        sinusoid(torch.arange(3), 7)
    assert (
        str(error.value)
        == "a sinusoid of width 7: columns form pairs, and 7 is not a multiple of 2; use 6 or 8"
    )


# Rotary: law L23


@pytest.mark.ledger("S0.Q1d.8", "S2.2.2.1")
@given(
    pairing=st.sampled_from(["halves", "interleaved"]),
    p_q=st.integers(0, 2000),
    p_k=st.integers(0, 2000),
    shift=st.integers(0, 1000),
)
def test_rotary_scores_depend_on_the_distance_alone(pairing, p_q, p_k, shift):
    q, k = randn(2, 1, 6, seed=p_q)

    def score(a, b):
        return float(
            rotate(q, torch.tensor([a]), pairing=pairing)[0]
            @ rotate(k, torch.tensor([b]), pairing=pairing)[0]
        )

    assert abs(score(p_q, p_k) - score(p_q + shift, p_k + shift)) < 1e-10
    assert abs(score(p_q, p_k) - score(p_q - p_k, 0)) < 1e-10
    assert score(p_q, p_q) == pytest.approx(float(q[0] @ k[0]), abs=1e-10)


@pytest.mark.ledger("S2.2.2.1")
def test_rotary_scores_do_differ_where_distances_do():
    q, k = randn(2, 1, 6)
    near, far = (rotate(q, torch.tensor([p]))[0] @ k[0] for p in (1, 4))
    assert abs(float(near - far)) > 1e-3


@pytest.mark.ledger("S0.Q1d.8")
def test_each_pairing_turns_its_own_columns_as_a_complex_product():
    x, where = randn(7, 10), torch.arange(7)
    theta = where.double()[:, None] * rates(10, 100.0)
    turn = torch.polar(torch.ones_like(theta), theta)
    interleaved = torch.view_as_real(torch.view_as_complex(x.reshape(7, 5, 2)) * turn).reshape(7, 10)
    assert torch.allclose(rotate(x, where, 100.0, "interleaved"), interleaved, atol=1e-14)
    halves = torch.complex(x[:, :5], x[:, 5:]) * turn
    assert torch.allclose(
        rotate(x, where, 100.0, "halves"), torch.cat([halves.real, halves.imag], -1), atol=1e-14
    )


def test_a_rotation_keeps_norms_and_is_undone_by_its_opposite():
    x, where = randn(2, 3, 7, 10), torch.arange(7) * 13
    turned = rotate(x, where)
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), atol=1e-13)
    assert torch.allclose(rotate(turned, -where), x, atol=1e-13)


def test_each_batch_row_may_have_its_own_positions():
    x = randn(2, 3, 7, 10)
    where = torch.stack([torch.arange(7), torch.arange(7) + 5])
    turned = rotate(x, where)
    assert torch.equal(turned[0], rotate(x[0], where[0])) and torch.equal(turned[1], rotate(x[1], where[1]))
    assert torch.equal(rotate(x[:, 0], where), turned[:, 0])  # without a head axis


def test_a_grid_rotation_turns_one_half_by_row_and_the_other_by_column():
    x, where = randn(3, 6, 12), coordinates(torch.arange(6), (2, 3))
    turned = rotate_grid(x, where, 100.0, "interleaved")
    assert torch.equal(turned[..., :6], rotate(x[..., :6], where[:, 0], 100.0, "interleaved"))
    assert torch.equal(turned[..., 6:], rotate(x[..., 6:], where[:, 1], 100.0, "interleaved"))


# ALiBi, T5 buckets, and biases by distance


def test_alibi_slopes_are_the_published_ones():
    assert alibi_slopes(8).tolist() == [2.0**-t for t in range(1, 9)]
    sixteen = [2 ** (-t / 2) for t in range(1, 17)]
    assert alibi_slopes(16).tolist() == pytest.approx(sixteen, rel=1e-7)
    assert alibi_slopes(12).tolist() == pytest.approx(
        [2.0**-t for t in range(1, 9)] + sixteen[0:8:2], rel=1e-7
    )
    assert alibi_slopes(1).tolist() == [2.0**-8]


@given(heads=st.integers(1, 200))
def test_alibi_slopes_are_distinct_and_within_one_half_power(heads):
    slopes = alibi_slopes(heads).tolist()
    assert len(set(slopes)) == heads
    assert min(slopes) >= 2.0**-8 and max(slopes) < 1


@pytest.mark.ledger("S0.Q1d.8")
def test_t5_buckets_by_hand():
    distances = torch.tensor([0, -1, -7, -8, -11, -12, -15, -16, -63, -64, -127, -128, -5000, 1, 7, 8, 5000])
    expected = [0, 1, 7, 8, 8, 9, 9, 10, 13, 14, 15, 15, 15, 17, 23, 24, 31]
    assert t5_bucket(distances).tolist() == expected
    causal = t5_bucket(torch.tensor([3, 0, -1, -15, -16, -127, -128]), bidirectional=False)
    assert causal.tolist() == [0, 0, 1, 15, 16, 31, 31]


@pytest.mark.ledger("S0.Q1d.8")
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("buckets, reach", [(32, 128), (32, 256), (8, 32), (320, 800), (20, 50), (12, 37)])
@pytest.mark.slow  # imports transformers
def test_t5_buckets_are_those_of_transformers(buckets, reach, bidirectional):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    distances = torch.arange(-2000, 2001)
    theirs = t5.T5Attention._relative_position_bucket(distances, bidirectional, buckets, reach)
    assert torch.equal(t5_bucket(distances, buckets, reach, bidirectional), theirs)


@given(
    n=st.integers(1, 7),
    m=st.integers(1, 11),
    reach=st.integers(0, 5),
    shift=st.integers(0, 10**6),
    slopes=st.booleans(),
)
@pytest.mark.ledger("S2.2.2.1")
def test_a_bias_by_distance_is_its_formula_and_ignores_a_common_shift(n, m, reach, shift, slopes):
    table = randn(3, 2 * reach + 1)
    bias = ByDistance(table, alibi_slopes(3).double() if slopes else None)
    q_positions, k_positions = torch.arange(n) + m - n, torch.arange(m)
    dense = bias.dense(q_positions, k_positions)
    alone = ByDistance(slopes=alibi_slopes(3).double()).dense(q_positions, k_positions)
    away = (k_positions - q_positions[:, None]).abs()
    assert torch.equal(alone, -alibi_slopes(3).double()[:, None, None] * away)  # distant keys are penalized
    for h in range(3):
        for i in range(n):
            for j in range(m):
                distance = int(k_positions[j] - q_positions[i])
                expected = table[h, max(-reach, min(reach, distance)) + reach]
                if slopes:
                    expected = expected - bias.slopes[h] * abs(distance)
                assert dense[h, i, j] == expected
    assert torch.equal(bias.dense(q_positions + shift, k_positions + shift), dense)
    assert bias.reach == reach and bias.heads == 3


def test_a_bias_by_distance_takes_each_rows_own_positions():
    bias = ByDistance(randn(3, 5), alibi_slopes(3).double())
    q_positions = torch.tensor([[4, 5], [9, 10]])
    dense = bias.dense(q_positions, torch.arange(11))
    assert dense.shape == (2, 3, 2, 11)
    assert torch.equal(dense[1], bias.dense(q_positions[1], torch.arange(11)))


def test_a_bias_by_distance_reaches_its_parameters():
    table, slopes = randn(3, 5).requires_grad_(), alibi_slopes(3).double().requires_grad_()
    ByDistance(table, slopes).dense(torch.arange(7), torch.arange(7)).sum().backward()
    counts = [sum(max(-2, min(2, j - i)) == r for i in range(7) for j in range(7)) for r in range(-2, 3)]
    assert table.grad.tolist() == [[float(c) for c in counts]] * 3
    assert slopes.grad.tolist() == [-float(sum(abs(i - j) for i in range(7) for j in range(7)))] * 3


def test_slopes_stay_exact_under_autocast():
    bias = ByDistance(slopes=alibi_slopes(16))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(bias.at(torch.arange(1000)), -alibi_slopes(16)[:, None] * torch.arange(1000))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: ByDistance(), "ByDistance() is empty; pass a table (h, 2R + 1), slopes (h), or both"),
        (
            lambda: ByDistance(randn(3, 4)),
            "a table of 4 distances has no center; use 2R + 1 distances, from −R to R",
        ),
        (
            lambda: ByDistance(randn(3, 5), alibi_slopes(2)),
            "the table has 3 heads and the slopes have 2; use the same number",
        ),
    ],
)
def test_a_bias_by_distance_that_does_not_fit_is_refused(make, message, without_the_shape_checker):
    with pytest.raises(ShapeError) as error:
        make()
    assert str(error.value) == message


# Relative scores by three formulas: law L23


@pytest.mark.ledger("S2.2.2.1", "S2.2.2.2")
@given(n=st.integers(1, 7), m=st.integers(1, 11))
def test_gathering_skewing_and_computing_each_pair_agree(n, m):
    q, vectors = randn(2, n, 5), randn(n + m - 1, 5, seed=1)
    logits = einsum(q, vectors, "b n d, r d -> b n r")  # one product an offset
    entry = offsets(torch.arange(n), torch.arange(m)) + n - 1
    gathered = logits.gather(-1, entry.expand(2, n, m))
    each_pair = einsum(q, vectors[entry], "b n d, n m d -> b n m")
    assert torch.equal(skew(logits), gathered)
    assert torch.allclose(gathered, each_pair, atol=1e-12)


# Quadratic scores: law L26


@pytest.mark.ledger("S2.3.2.1", "S2.4.1.1", "S0.Q1d.8")
@pytest.mark.parametrize("c", cases("attention.quadratic_head"), ids=lambda c: c["id"])
def test_a_quadratic_head_has_the_weights_of_the_ledger(c):
    given, expected = c["inputs"], c["expected"]
    cells = torch.cartesian_prod(*[torch.arange(side) for side in given["grid"]]).reshape(
        -1, len(given["grid"])
    )
    query, shift = torch.tensor(given["query"]), torch.tensor(given["shift"])
    alpha = torch.tensor([given["alpha"]], dtype=f64)
    scores = quadratic_scores(-shift.to(f64)[None], alpha, cells - query)[0]
    weights = scores.softmax(-1)
    rest = float(weights.sum() - weights.max())
    target = (query - shift).tolist()
    got = {
        "target": target,
        "target_inside": all(0 <= t < side for t, side in zip(target, given["grid"])),
        "p_max": float(weights.max()),
        "one_minus_p_max": rest,
    }
    assert agrees(got, expected, c["compare"])
    nearest_inside = [min(max(t, 0), side - 1) for t, side in zip(target, given["grid"])]
    assert cells[weights.argmax()].tolist() == nearest_inside


@pytest.mark.ledger("S2.3.2.1")
@given(axes=st.integers(1, 2), seed=st.integers(0, 2**16), alpha=st.floats(0.01, 50))
def test_quadratic_scores_are_a_product_and_a_squared_distance(axes, seed, alpha):
    """v·r = −α(‖t − s‖² − ‖s‖²) with v = −α(1, −2s), r = (‖t‖², t): D_p = axes + 1 numbers."""
    s, t = 3 * randn(5, axes, seed=seed), 4 * randn(7, 11, axes, seed=seed + 1)
    alphas = torch.full((5,), alpha, dtype=f64)
    scores = quadratic_scores(s, alphas, t)
    v = -alpha * torch.cat([torch.ones(5, 1, dtype=f64), -2 * s], -1)
    r = torch.cat([(t**2).sum(-1, keepdim=True), t], -1)
    by_product = einsum(v, r, "h p, n m p -> h n m")
    squared = ((t - rearrange(s, "h c -> h 1 1 c")) ** 2).sum(-1)
    by_distance = -alpha * (squared - (s**2).sum(-1)[:, None, None])
    scale = float(by_product.abs().max())
    assert float((scores - by_product).abs().max()) <= 1e-10 * scale
    assert float((scores - by_distance).abs().max()) <= 1e-10 * scale
    softmaxes = scores.softmax(-1), (-alpha * squared).softmax(-1)
    assert torch.allclose(*softmaxes, atol=1e-9)


@pytest.mark.ledger("S2.3.2.1", "S2.4.1.1")
@pytest.mark.parametrize("alpha, limit", [(10.0, 1e-2), (20.0, 1e-6), (46.0, 1e-13)])
def test_nine_sharp_quadratic_heads_are_a_3x3_convolution_inside(alpha, limit):
    shifts = torch.cartesian_prod(torch.arange(-1, 2), torch.arange(-1, 2))
    cells = coordinates(torch.arange(36), (6, 6))
    delta = cells[None, :] - cells[:, None]
    weights = quadratic_scores(shifts.double(), torch.full((9,), alpha, dtype=f64), delta).softmax(-1)
    image, kernel = randn(36), randn(3, 3, seed=1)
    heads = einsum(weights, image, "h n m, m -> h n")
    inside = ((cells > 0) & (cells < 5)).all(-1)
    got = einsum(kernel.flatten(), heads, "h, h n -> n")[inside]
    expected = F.conv2d(image.reshape(1, 1, 6, 6), kernel[None, None]).flatten()
    assert float((got - expected).abs().max()) < limit
    spread = float(
        image.max() - image.min()
    )  # a head is off its shifted input by (1 − p_max) · range at most
    for h, shift in enumerate(shifts):
        target = (cells + shift) @ torch.tensor([6, 1])
        off = (heads[h] - image[target.clamp(0, 35)])[inside].abs()
        rest = 1 - weights[h].amax(-1)[inside]
        assert bool((off <= rest * spread + 1e-14).all())
    if alpha == 10.0:
        assert float((got - expected).abs().max()) > 1e-6  # no finite score is exact


def test_quadratic_scores_of_a_half_precision_head_are_computed_in_float32():
    delta = torch.arange(-200, 201)[:, None]
    center, alpha = torch.tensor([[1.0]]), torch.tensor([0.5])
    with torch.autocast("cpu", torch.bfloat16):
        scores = quadratic_scores(center.bfloat16(), alpha.bfloat16(), delta)
    assert torch.equal(scores, quadratic_scores(center, alpha, delta)) and scores.dtype == torch.float32


# Grids and resampling


def test_positions_that_do_not_fit_a_grid_are_an_error():
    with pytest.raises(ShapeError) as error:
        coordinates(torch.zeros(3, 5, dtype=torch.long), (2, 3))
    assert str(error.value) == (
        "positions (3, 5) of torch.int64 on a grid of 2×3: pass integer cell indices (n), or rows and columns"
        " (…, n, 2)"
    )
    with pytest.raises(ShapeError, match=r"positions \(3,\) of torch.float32 on a grid of 2×3"):
        coordinates(torch.zeros(3), (2, 3))


@pytest.mark.ledger("S1.Q4b.3")
@given(old=st.integers(1, 13), new=st.integers(2, 29))
def test_a_resampled_table_keeps_its_ends_and_is_linear_between(old, new):
    table = randn(old, 3)
    longer = resample(table, new)
    assert torch.equal(longer[0], table[0]) and torch.equal(longer[-1], table[-1])
    by_torch = F.interpolate(rearrange(table, "t d -> 1 d t"), new, mode="linear", align_corners=True)
    assert torch.allclose(longer, rearrange(by_torch, "1 d t -> t d"), atol=1e-12)
    assert torch.equal(resample(table, old), table)


@pytest.mark.ledger("S1.Q4b.3", "S4.1.5c.2")
@given(
    old=st.tuples(st.integers(1, 7), st.integers(1, 7)), new=st.tuples(st.integers(2, 11), st.integers(2, 11))
)
@settings(max_examples=40)
def test_a_resampled_grid_keeps_its_corners_and_is_bilinear_between(old, new):
    table = randn(1 + math.prod(old), 3)  # one vector for the class token, as in ViT
    other = resample_grid(table, old, new)
    assert torch.equal(other[0], table[0])
    before, after = table[1:].reshape(*old, 3), other[1:].reshape(*new, 3)
    for row in (0, -1):
        for column in (0, -1):
            assert torch.equal(after[row, column], before[row, column])
    by_torch = F.interpolate(before.permute(2, 0, 1)[None], new, mode="bilinear", align_corners=True)
    assert torch.allclose(after, by_torch[0].permute(1, 2, 0), atol=1e-12)
    assert torch.equal(resample_grid(table, old, old), table)


def test_a_table_too_small_for_its_grid_is_refused():
    with pytest.raises(ShapeError) as error:
        resample_grid(randn(190, 3), (14, 14), (7, 7))
    assert str(error.value) == "a table of 190 vectors is too small for the 196 cells of a grid of 14×14"
