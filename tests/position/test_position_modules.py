"""The modules that positions build: what they hold, what they add, what they refuse."""

import math

import pytest
import torch
from einops import einsum, rearrange
from hypothesis import given
from hypothesis import strategies as st

from ledger_cases import cases
from long_cases import in_long
from regard.errors import ShapeError, SpecError
from regard.nn.position import build
from regard.position import (
    Position,
    alibi,
    alibi_slopes,
    coordinates,
    learned,
    quadratic,
    relative_table,
    resample,
    resample_grid,
    rope,
    rotate,
    shaw,
    sinusoid,
    sinusoid_grid,
    sinusoidal,
    t5_bucket,
    t5_buckets,
)

f64 = torch.float64
SIZES = {"d_model": 8, "heads": 3, "d_k": 8, "d_v": 5}
ON_A_LINE = [
    alibi(),
    t5_buckets(8, 16),
    t5_buckets(8, 16, bidirectional=False),
    relative_table(2),
    shaw(2),
    quadratic(),
]
ON_A_GRID = [relative_table(grid=(3, 5)), quadratic(grid=(3, 5))]
ALL = [
    sinusoidal(),
    sinusoidal(order="halves", grid=(3, 5)),
    learned(11),
    learned((3, 5)),
    learned(5, beyond="resample"),
    rope(),
    rope(pairing="interleaved", fraction=0.5),
    rope(grid=(3, 5)),
    *ON_A_LINE,
    *ON_A_GRID,
]


def randn(*shape, seed=0, dtype=f64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def made(position, seed=0, dtype=f64, **sizes):
    """The module with every parameter drawn at random, so that no zero hides a mistake."""
    module = build(position, **(sizes or SIZES)).to(dtype)
    for i, parameter in enumerate(module.parameters()):
        parameter.data = randn(*parameter.shape, seed=seed + i, dtype=dtype)
    return module


# What they hold


@pytest.mark.ledger("S1.Q4b.2", "S4.1.5c.2")
@pytest.mark.parametrize("c", cases("params.positional"), ids=lambda c: c["id"])
def test_learned_positions_cost_a_table_and_sinusoids_nothing(c):
    given = c["inputs"]
    position = {"learned": learned(given["max_len"]), "sinusoidal": sinusoidal()}[given["form"]]
    module = build(position, d_model=given["d_model"])
    assert sum(p.numel() for p in module.parameters()) == c["expected"]["total"]


@pytest.mark.ledger("S4.1.5c.2", "S0.Q1d.8")
@pytest.mark.parametrize(
    "position, shapes",
    [
        (learned(197), {"table": (197, 768)}),
        (learned((14, 14)), {"table": (196, 768)}),
        (sinusoidal(), {}),
        (rope(), {}),
        (alibi(), {}),
        (t5_buckets(), {"table": (12, 32)}),
        (relative_table(128), {"table": (12, 257)}),
        (relative_table(grid=(7, 11)), {"table": (12, 13 * 21)}),
        (shaw(16), {"keys": (33, 64)}),
        (shaw(16, values=True), {"keys": (33, 64), "for_values": (33, 48)}),
        (quadratic(), {"center": (12, 1), "alpha": (12,)}),
        (quadratic(grid=(7, 11)), {"center": (12, 2), "alpha": (12,)}),
    ],
    ids=repr,
)
def test_a_module_holds_what_its_position_declares(position, shapes):
    module = build(position, d_model=768, heads=12, d_k=64, d_v=48)
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == shapes
    assert set(module.state_dict()) == set(shapes)
    assert repr(position) in repr(module)


def test_first_values_are_small_vectors_zero_biases_and_scattered_centers():
    torch.manual_seed(0)
    for table in (build(learned(1000), d_model=64).table, build(shaw(500), d_k=64).keys):
        assert float(table.detach().std()) == pytest.approx(0.02, rel=0.02)
    for position in (t5_buckets(), relative_table(5), relative_table(grid=(3, 5))):
        assert not build(position, heads=3).table.any()
    head = build(quadratic(grid=(7, 7)), heads=1000)
    assert float(head.center.detach().std()) == pytest.approx(2.0, rel=0.05)
    assert torch.equal(head.alpha, torch.ones(1000))


@pytest.mark.parametrize(
    "position, sizes, message",
    [
        (learned(512), {"heads": 8}, "learned(512) needs d_model to be built"),
        (alibi(), {"d_model": 512}, "alibi() needs heads to be built"),
        (rope(), {"d_model": 512}, "rope() needs d_k to be built"),
        (shaw(4, values=True), {"heads": 3}, "shaw(4, values=True) needs d_k and d_v to be built"),
        (rope(), {"d_k": 5}, "rope() on d_k=5: columns form pairs, and 5 is not a multiple of 2; use 4 or 6"),
        (
            sinusoidal(),
            {"d_model": 7},
            "sinusoidal(): columns form pairs, and 7 is not a multiple of 2; use 6 or 8",
        ),
    ],
)
def test_sizes_that_are_missing_or_do_not_fit_are_named(position, sizes, message):
    with pytest.raises(SpecError) as error:
        build(position, **sizes)
    assert str(error.value) == message


def test_an_unknown_position_is_refused():
    class mystery(Position):
        def __repr__(self):
            return "mystery()"

    with pytest.raises(SpecError) as error:
        build(mystery())
    assert str(error.value) == "mystery() cannot be built: it is none of regard.position.KINDS"


# What is added to the input


@pytest.mark.ledger("S0.Q1d.6", "S4.1.5c.2", "S1.Q4b.3")
def test_the_encoding_is_added_to_the_input():
    x, where = randn(2, 7, 8), torch.tensor([0, 3, 5, 6, 2, 9, 10])
    assert torch.equal(build(sinusoidal())(x, where), x + sinusoid(where, 8, dtype=f64))
    assert torch.equal(build(sinusoidal())(x, where + 0.5), x + sinusoid(where + 0.5, 8, dtype=f64))
    table = made(learned(11))
    assert torch.equal(table(x, where), x + table.table[where])
    rows = torch.stack([where, where.flip(0)])
    assert torch.equal(table(x, rows)[1], x[1] + table.table[rows[1]])
    grid = made(learned((3, 5)))
    assert torch.equal(grid(x, where), x + grid.table[where])
    assert torch.equal(grid(x, coordinates(where, (3, 5))), x + grid.table[where])
    flat = build(sinusoidal(grid=(3, 5)))
    assert torch.equal(flat(x, where), x + sinusoid_grid(coordinates(where, (3, 5)), 8, dtype=f64))


@pytest.mark.ledger("S0.Q1d.7", "S1.Q4.0")
@pytest.mark.parametrize("position", [p for p in ALL if p.acts == "input"], ids=repr)
def test_the_same_token_at_two_places_has_two_representations(position):
    torch.manual_seed(0)
    module = build(position, **SIZES)
    token = randn(8, dtype=torch.float32).expand(1, 5, 8)
    placed = module(token, torch.arange(5))[0]
    assert float(torch.pdist(placed.detach()).min()) > 1e-3


@pytest.mark.ledger("S2.2.1.1")
@pytest.mark.parametrize("position", [sinusoidal(), learned(11)], ids=repr)
def test_absolute_positions_put_four_terms_into_the_scores(position):
    x, w_q, w_k = randn(1, 7, 8), randn(8, 5, seed=1), randn(8, 5, seed=2)
    placed = made(position)(x, torch.arange(7))[0].detach()
    p = placed - x[0]

    def scores(queries, keys):
        return einsum(queries @ w_q, keys @ w_k, "i d, j d -> i j")

    terms = [scores(a, b) for a in (x[0], p) for b in (x[0], p)]
    assert all(float(term.abs().max()) > 1e-2 for term in terms)
    assert torch.allclose(scores(placed, placed), sum(terms), atol=1e-11, rtol=0)


@pytest.mark.ledger("S1.Q4b.1")
def test_a_position_past_the_learned_table_is_refused():
    module = build(learned(512), d_model=8)
    x, where = randn(1, 1, 8, dtype=torch.float32), torch.tensor([600])
    for length in (None, 601):
        with pytest.raises(ShapeError) as error:
            module(x, where, length)
        assert str(error.value) == (
            "position 600 is past the learned table of 512: shorten the input, declare learned(1024), or"
            " learned(512, beyond='resample')"
        )
    module(x, torch.tensor([511]))
    with pytest.raises(ShapeError) as error:
        module(x, torch.tensor([-1]))
    assert str(error.value) == "position -1 is before the learned table: positions count from 0"
    with pytest.raises(ShapeError) as error:
        module(x, torch.tensor([0.5]))
    assert str(error.value) == (
        "learned(512) has vectors for integer positions, not for torch.float32: round them, or use sinusoidal()"
    )


@pytest.mark.ledger("S1.Q4b.1")
def test_no_length_however_wrong_makes_a_learned_table_wrap():
    x = randn(1, 1, 8, dtype=torch.float32)
    for where in (-1, 11):
        with pytest.raises(IndexError):
            build(learned(11), d_model=8)(x, torch.tensor([where]), length=1)
    for where in ([1, -1], [1, 5], [-1, 0], [3, 0]):
        with pytest.raises(IndexError):
            build(learned((3, 5)), d_model=8)(x, torch.tensor([where]), length=(3, 5))


@pytest.mark.ledger("S1.Q4b.1")
def test_a_cell_past_the_learned_grid_is_refused():
    module = build(learned((14, 14)), d_model=8)
    x = randn(1, 256, 8, dtype=torch.float32)
    message = (
        "a grid of 16×16 is past the learned table of 14×14: shrink the image, declare learned((16, 16)), or"
        " learned((14, 14), beyond='resample')"
    )
    for positions, length in [
        (torch.arange(256), (16, 16)),
        (coordinates(torch.arange(256), (16, 16)), None),
    ]:
        with pytest.raises(ShapeError) as error:
            module(x, positions, length)
        assert str(error.value) == message
    with pytest.raises(ShapeError, match=r"a grid of 19×14 is past the learned table of 14×14"):
        module(x, torch.arange(256))  # cell 255 in rows of 14
    with pytest.raises(ShapeError, match=r"a grid of 3×20 is past .* declare learned\(\(14, 20\)\)"):
        module(x[:, :60], torch.arange(60), (3, 20))


@pytest.mark.ledger("S1.Q4b.1", "S1.Q4b.3")
def test_a_table_that_may_be_resampled_stretches_as_a_whole():
    module, x = made(learned(5, beyond="resample")), torch.zeros(1, 9, 8, dtype=f64)
    longer = module(x, torch.arange(9), 9)[0]
    assert torch.equal(longer, resample(module.table, 9))
    assert torch.equal(longer[[0, 8]], module.table[[0, 4]])  # the end points are unchanged
    assert torch.equal(longer[0::2], module.table)  # 5 → 9 halves each step
    assert torch.equal(module(x, torch.arange(9)), longer[None])  # the length read off the positions
    assert torch.equal(module(x[:, :1], torch.tensor([3]), 9)[0], longer[3:4])  # one step of a cache
    assert torch.equal(module(x[:, :3], torch.arange(3), 3)[0], module.table[:3])  # shorter is no resampling


@pytest.mark.ledger("S1.Q4b.3")
def test_a_grid_that_may_be_resampled_follows_the_image():
    module = made(learned((3, 5), beyond="resample"))
    for grid in [(5, 9), (2, 3), (3, 7)]:
        cells = math.prod(grid)
        placed = module(torch.zeros(1, cells, 8, dtype=f64), torch.arange(cells), grid)[0]
        assert torch.equal(placed, resample_grid(module.table, (3, 5), grid))
    part = module(torch.zeros(1, 2, 8, dtype=f64), torch.tensor([[0, 1], [2, 2]]))[0]
    assert torch.equal(part, module.table[[1, 12]])  # a few cells do not shrink the grid


# What turns queries and keys


@pytest.mark.ledger("S2.2.2.1", "S0.Q1d.8")
@pytest.mark.parametrize(
    "position", [rope(), rope(pairing="interleaved", fraction=0.5), rope(grid=(300, 300))]
)
def test_a_rotary_module_shifts_no_score(position):
    module = build(position, d_k=8)
    q, k = randn(2, 3, 7, 8), randn(2, 3, 7, 8, seed=1)
    cells = torch.arange(7) if position.grid is None else coordinates(torch.arange(7) * 31, (300, 300))

    def scores(shift, dtype):
        turned = [module(x.to(dtype), cells + shift) for x in (q, k)]
        return einsum(*turned, "b h n d, b h m d -> b h n m").double()

    for dtype, tolerance in [(f64, 1e-10), (torch.float32, 1e-3)]:
        assert float((scores(100, dtype) - scores(0, dtype)).abs().max()) < tolerance
    assert float((scores(0, f64) - einsum(q, k, "b h n d, b h m d -> b h n m")).abs().max()) > 0.1


def test_a_fraction_leaves_the_other_columns_alone():
    module, x = build(rope(fraction=0.25), d_k=16), randn(3, 7, 16)
    turned = module(x, torch.arange(7))
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert torch.equal(turned[..., :4], rotate(x[..., :4], torch.arange(7)))


def test_a_rotary_module_refuses_another_width():
    with pytest.raises(ShapeError) as error:
        build(rope(), d_k=8)(randn(7, 6), torch.arange(7))
    assert str(error.value) == "rope() was built for d_k=8; the input has 6 columns"


def test_a_bfloat16_query_at_position_100000_is_right_to_its_rounding():
    x = randn(1, 2, 3, 64).bfloat16()
    where = torch.tensor([99_999, 100_000, 131_071], dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        got = build(rope(), d_k=64).bfloat16()(x, where)
    exact = rotate(x.double(), where)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, exact.bfloat16()) or float(
        ((got.double() - exact).abs() / exact.abs().clamp(min=1e-3)).max()
    ) <= 2**-8 * (1 + 1e-3)


@pytest.mark.slow  # imports transformers
def test_the_rotation_of_transformers_llama_is_rope_in_halves():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    x, where = randn(2, 3, 7, 8), torch.arange(7)
    theta = where.double()[:, None] * 10000.0 ** (-torch.arange(0, 8, 2, dtype=f64) / 8)
    theta = torch.cat([theta, theta], -1)[None]
    theirs, _ = llama.apply_rotary_pos_emb(x, x, theta.cos(), theta.sin())
    assert torch.allclose(build(rope(), d_k=8)(x, where), theirs, atol=1e-13)


# What is added to the scores


@pytest.mark.ledger("S2.2.2.1", "S0.Q1d.8")
@pytest.mark.parametrize("position", ON_A_LINE, ids=repr)
@given(shift=st.integers(0, 10**6))
def test_a_score_depends_on_the_distance_and_not_on_the_place(position, shift):
    module, q = made(position), randn(2, 3, 7, 8)
    q_positions, k_positions = torch.arange(7) + 4, torch.arange(11)
    bias = module(q_positions, k_positions, q=q, scale=0.5)
    moved = module(q_positions + shift, k_positions + shift, q=q, scale=0.5)
    assert torch.equal(moved, bias)
    assert float(bias.detach().std()) > 0.05
    if not isinstance(position, shaw):  # position alone: constant along the diagonals
        assert torch.equal(bias[:, 1:, 1:], bias[:, :-1, :-1])


@pytest.mark.parametrize("position", ON_A_LINE, ids=repr)
def test_each_batch_row_may_have_a_query_offset_of_its_own(position):
    module, q = made(position), randn(2, 3, 7, 8)
    q_positions = torch.stack([torch.arange(7), torch.arange(7) + 4])
    bias = module(q_positions, torch.arange(11), q=q)
    assert bias.shape == (2, 3, 7, 11)
    for row in range(2):
        alone = module(q_positions[row], torch.arange(11), q=q[row])
        assert torch.allclose(bias[row], alone, atol=1e-12)


@pytest.mark.parametrize("position", ON_A_LINE, ids=repr)
def test_by_distance_is_the_same_bias(position):
    module = made(position)
    by_distance = module.by_distance(reach=10)
    if isinstance(position, shaw):
        assert by_distance is None
        return
    where = torch.arange(11)
    assert torch.equal(by_distance.dense(where, where), module(where, where))


def test_by_distance_is_none_where_the_distance_does_not_decide():
    assert all(made(position).by_distance() is None for position in ON_A_GRID)
    assert made(quadratic()).by_distance() is None  # unbounded: say the reach
    assert made(quadratic()).by_distance(reach=4).table.shape == (3, 9)


def test_alibi_and_t5_are_their_formulas():
    i, j = torch.arange(7)[:, None], torch.arange(11)[None, :]
    half = build(alibi(), heads=12).bfloat16()(torch.arange(7), torch.arange(11))
    assert torch.equal(half, -alibi_slopes(12)[:, None, None] * (i - j).abs())  # no cast rounds the slopes
    for two_way in (True, False):
        module = made(t5_buckets(8, 9, bidirectional=two_way))
        bias = module(torch.arange(7) + 90, torch.arange(11) + 80)
        assert torch.equal(bias, module.table[:, t5_bucket(j + 80 - i - 90, 8, 9, two_way)])


def test_a_relative_grid_reads_rows_and_columns_apart():
    module = made(relative_table(grid=(3, 5)))
    table = rearrange(module.table, "h (r c) -> h r c", r=5)
    bias = module(torch.arange(15), torch.arange(15))
    for i, j in [(0, 0), (0, 14), (14, 0), (7, 3), (4, 5)]:
        (r_i, c_i), (r_j, c_j) = divmod(i, 5), divmod(j, 5)
        assert torch.equal(bias[:, i, j], table[:, r_j - r_i + 2, c_j - c_i + 4])
    cells = coordinates(torch.arange(15), (3, 5))
    assert torch.equal(module(cells, cells), bias)
    assert torch.equal(module(cells + 7, cells + 7), bias)  # distances alone


@pytest.mark.ledger("S0.Q1d.8", "S2.2.2.1", "S2.2.2.2")
def test_shaw_scores_and_values_are_those_of_each_pair():
    module = made(shaw(2, values=True))
    q, v, weights = randn(2, 3, 7, 8), randn(2, 3, 11, 5, seed=5), randn(2, 3, 7, 11, seed=6).softmax(-1)
    q_positions, k_positions = torch.arange(7) + 4, torch.arange(11)
    entry = (k_positions[None, :] - q_positions[:, None]).clamp(-2, 2) + 2
    each_pair = 0.5 * einsum(q, module.keys[entry], "b h i d, i j d -> b h i j")
    assert torch.allclose(module(q_positions, k_positions, q, scale=0.5), each_pair, atol=1e-12)
    k = randn(2, 3, 11, 8, seed=7)
    with_keys = 0.5 * einsum(q, k[:, :, None] + module.keys[entry], "b h i d, b h i j d -> b h i j")
    content = 0.5 * einsum(q, k, "b h i d, b h j d -> b h i j")
    assert torch.allclose(content + module(q_positions, k_positions, q, scale=0.5), with_keys, atol=1e-12)
    moved = einsum(weights, v[:, :, None] + module.for_values[entry], "b h i j, b h i j d -> b h i d")
    added = einsum(weights, v, "b h i j, b h j d -> b h i d") + module.values(
        weights, q_positions, k_positions
    )
    assert torch.allclose(added, moved, atol=1e-12)
    with pytest.raises(SpecError) as error:
        made(shaw(2)).values(weights, q_positions, k_positions)
    assert str(error.value) == "shaw(2) has no vectors for the values: declare shaw(…, values=True)"


@pytest.mark.ledger("S2.3.2.1", "S2.4.1.1")
def test_a_sharp_quadratic_head_attends_to_its_center():
    module = made(quadratic(grid=(7, 7)), heads=2)
    module.center.data = torch.tensor([[-1.0, 0.0], [2.0, -3.0]], dtype=f64)
    module.alpha.data.fill_(20.0)
    targets = module(torch.arange(49), torch.arange(49)).softmax(-1)[:, 24].argmax(-1)  # from cell (3, 3)
    assert [divmod(int(cell), 7) for cell in targets] == [(2, 3), (5, 0)]
    halfway = (
        module(torch.tensor([[3.5, 3.0]]), coordinates(torch.arange(49), (7, 7))).detach()[0, 0].softmax(-1)
    )
    assert float(halfway[2 * 7 + 3]) == pytest.approx(float(halfway[3 * 7 + 3])) == pytest.approx(0.5)


@pytest.mark.parametrize("position", [p for p in [*ON_A_LINE, *ON_A_GRID] if p != alibi()], ids=repr)
def test_gradients_of_scores_are_those_of_finite_differences(position):
    module, q = made(position), randn(1, 3, 4, 8).requires_grad_()
    names = [name for name, _ in module.named_parameters()]

    def bias(q, *parameters):
        where = torch.arange(4), torch.arange(6)
        return torch.func.functional_call(module, dict(zip(names, parameters)), where, {"q": q})

    assert torch.autograd.gradcheck(bias, (q, *module.parameters()))


@pytest.mark.parametrize("position", [p for p in ALL if p.acts != "score"], ids=repr)
def test_gradients_of_inputs_are_those_of_finite_differences(position):
    module, x = made(position), randn(1, 3, 8).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: module(x, torch.arange(3)), x)
    for parameter in module.parameters():
        module(x, torch.tensor([0, 2, 2])).sum().backward()
        assert parameter.grad[0].tolist() == [1.0] * 8 and parameter.grad[2].tolist() == [2.0] * 8
        assert int(parameter.grad.count_nonzero()) == 16


# Compiled

# torch 2.13 meets its own deprecation when inductor is first imported
INDUCTOR_WARNS = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


OTHER_GRAPHS = [  # each has a module of its own kind among the others
    sinusoidal(),
    learned(11),
    learned(5, beyond="resample"),
    rope(pairing="interleaved", fraction=0.5),
    t5_buckets(8, 16, bidirectional=False),
    relative_table(grid=(3, 5)),
]


@pytest.mark.compiled
@INDUCTOR_WARNS
@pytest.mark.parametrize(
    "position", [*(x for x in ALL if x not in OTHER_GRAPHS), *in_long(*OTHER_GRAPHS)], ids=repr
)
def test_one_graph_gives_what_eager_gives(position):
    torch.compiler.reset()
    module = made(position, dtype=torch.float32)
    backend = "inductor" if position == rope() else "aot_eager"  # code for one kind, the one graph for all
    fast = torch.compile(module, fullgraph=True, backend=backend)
    x = randn(2, 3, 7, 8, dtype=torch.float32)
    if position.acts == "input":
        length = {learned((3, 5)): (3, 5), sinusoidal(order="halves", grid=(3, 5)): (3, 5)}.get(position, 11)
        where = torch.arange(7) + 4
        got, expected = fast(x[0], where, length=length), module(x[0], where, length=length)
    elif position.acts == "query_key":
        got, expected = fast(x, torch.arange(7)), module(x, torch.arange(7))
    else:
        got, expected = (f(torch.arange(7) + 4, torch.arange(11), q=x, scale=0.5) for f in (fast, module))
    assert torch.allclose(got, expected, atol=1e-5)
    assert got.shape == expected.shape and got.dtype == expected.dtype


@pytest.mark.compiled
@INDUCTOR_WARNS
def test_angles_are_opaque_to_the_compiler_and_plain_to_an_export():
    torch.compiler.reset()
    module, x, where = build(rope(), d_k=8), randn(2, 3, 7, 8, dtype=torch.float32), torch.arange(7)
    graphs = []
    torch.compile(module, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph)(x, where)
    assert graphs[0].code.count("regard.cos_sin") == 1
    assert "regard" not in torch.export.export(module, (x, where)).graph_module.code


@pytest.mark.compiled
@INDUCTOR_WARNS
def test_a_compiled_table_refuses_positions_past_its_end():
    torch.compiler.reset()
    fast = torch.compile(build(learned(5), d_model=8), fullgraph=True)
    x = randn(2, 3, 8, dtype=torch.float32)
    fast(x, torch.arange(3))
    for where in ([3, 4, 5], [-1, 0, 1]):
        with pytest.raises(RuntimeError, match="index out of bounds"):
            fast(x, torch.tensor(where))


@pytest.mark.compiled
@INDUCTOR_WARNS
@pytest.mark.parametrize("cell", [(-1, 2), (0, 5), *in_long((0, -1), (3, 0))], ids=repr)
def test_a_compiled_grid_refuses_cells_outside_of_it(cell):
    torch.compiler.reset()
    fast = torch.compile(build(learned((3, 5)), d_model=8), fullgraph=True)
    x = randn(1, 2, 8, dtype=torch.float32)
    fast(x, torch.tensor([[0, 0], [2, 4]]))
    with pytest.raises(RuntimeError, match="index out of bounds"):
        fast(x, torch.tensor([[0, 0], cell]))
