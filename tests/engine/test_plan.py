"""The planner: each allowed pair in exactly one part, few parts, hardly any pair computed in vain."""

import tracemalloc
from functools import reduce
from operator import or_

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from regard.engine import plan as planner
from regard.engine.plan import NoPlan, plan
from regard.pattern import (
    Pattern,
    Related,
    Relation,
    blocks,
    causal,
    dilated,
    documents,
    every,
    full,
    neighborhood,
    prefix,
    rows,
    sinks,
    strided,
    window,
)
from regard.pattern.clauses import clauses
from regard.pattern.parts import ALL, LIMITS, NONE, SOME, cover, divide


def transposed(*place):
    """The plan by keys. place: pattern, n, m, start, step and perhaps the rows of a tile."""
    return plan(*place, by_keys=True)


WORDS = [
    full(),
    causal(),
    window(0),
    window(5),
    window(40, 3),
    dilated(0, 3),
    dilated(4, 7),
    dilated(11, 1),
    every(1),
    every(7, 3),
    every(64),
    strided(1),
    strided(6),
    strided(64),
    rows(7, 3),
    rows(64, 1),
    sinks(0),
    sinks(5),
    sinks(1000),
    prefix(0),
    prefix(31),
    blocks(1),
    blocks(5),
    blocks(23),
    blocks(1000),
]
SIZES = [  # n, m, start, step, tile: primes, a cache, positions off the keys on both sides, steps
    (101, 101, 0, 1, 16),
    (7, 11, 4, 1, 8),
    (1, 131, 130, 1, 8),
    (61, 97, 36, 1, 11),
    (37, 113, -9, 4, 8),
    (19, 89, 5, 6, 32),
]


def needed(made: planner.Plan) -> int:
    """The pairs of the pattern."""
    return made.pattern.count(made.n, made.m, (made.start, made.step))


def waste(made: planner.Plan) -> float:
    """computed / needed; 1.0 where nothing is allowed and nothing computed."""
    return made.computed / needed(made) if needed(made) else 1.0 + made.computed


def checked(pattern: Pattern, n: int, m: int, start: int, step: int, tile: int, swap: bool) -> planner.Plan:
    """The plan, after every guarantee of it was compared with the dense table."""
    made = (transposed if swap else plan)(pattern, n, m, start, step, tile)
    wanted = _dense(pattern, n, m, start, step, swap)
    times, computed = np.zeros(wanted.shape, dtype=int), 0
    for one in made.passes:
        allowed = _dense(one.pattern, n, m, start, step, swap)
        tiled = np.zeros(len(wanted), dtype=int)
        assert len(one.offsets) == len(one.tiles) + 1
        assert (one.offsets[0], one.offsets[-1]) == (0, len(one.parts))
        for (first, hop, count), a, b in zip(one.tiles, one.offsets[:-1], one.offsets[1:]):
            assert 1 <= count <= tile
            row = first + hop * np.arange(count)
            tiled[row] += 1
            visited = np.zeros(wanted.shape[1], dtype=int)
            for key, by, many, whole in one.parts[a:b]:
                assert many >= 1 and by >= 1 and key >= 0
                keys = key + by * np.arange(many)
                visited[keys] += 1
                pairs = np.ix_(row, keys)
                assert not whole or allowed[pairs].all(), "a full part holds a pair that is not allowed"
                times[pairs] += allowed[pairs]
                computed += count * many
            assert visited.max(initial=0) <= 1, "the parts of a tile overlap"
        assert tiled.max() <= 1, "a row is in two tiles of a pass"
    assert np.array_equal(times, wanted.astype(int)), "not every allowed pair is counted exactly once"
    assert made.computed == computed >= needed(made) == wanted.sum()
    return made


def _dense(pattern: Pattern, n: int, m: int, start: int, step: int, swap: bool) -> np.ndarray:
    table = pattern.allowed(n, m, (start, step)).numpy()
    return table.T if swap else table


def _leaf() -> st.SearchStrategy[Pattern]:
    size = st.integers(1, 24)
    residue = size.flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k - 1)))
    return st.one_of(
        st.just(full()),
        st.just(causal()),
        st.builds(window, st.integers(0, 40), st.none() | st.integers(0, 20)),
        st.builds(dilated, st.integers(0, 9), st.integers(1, 12)),
        residue.map(lambda r: every(*r)),
        st.builds(strided, size),
        residue.map(lambda r: rows(*r)),
        st.builds(sinks, st.integers(0, 40)),
        st.builds(prefix, st.integers(0, 90)),
        st.builds(blocks, st.integers(1, 60)),
    )


def _composed(inner: st.SearchStrategy[Pattern]) -> st.SearchStrategy[Pattern]:
    two = st.tuples(inner, inner)
    return st.one_of(
        two.map(lambda t: t[0] & t[1]),
        two.map(lambda t: t[0] | t[1]),
        two.map(lambda t: t[0] - t[1]),
        inner.map(lambda p: ~p),
    )


patterns = st.recursive(_leaf(), _composed, max_leaves=5)


@st.composite
def sizes(draw):
    m = draw(st.integers(1, 200))
    n = draw(st.integers(1, m))
    at = st.tuples(st.integers(-20, 60), st.integers(1, 7))
    start, step = draw(st.sampled_from([(m - n, 1), (0, 1)]) | at)
    return n, m, start, step, draw(st.sampled_from([8, 11, 16, 32]))


residues = st.integers(1, 6).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k - 1)))
relation_fields = st.fixed_dictionaries(
    {},
    optional={
        "near": st.integers(-20, 20),
        "far": st.integers(-20, 40),
        "divisor": st.integers(1, 6),
        "query_below": st.integers(-5, 90),
        "key_below": st.integers(-5, 90),
        "query_class": residues,
        "key_class": residues,
        "blocks": st.sampled_from([(5,), (16,), (7, 24)]),
    },
)


@given(relation_fields, _leaf(), sizes(), st.booleans(), st.sampled_from("&|-~"))
def test_any_relation_is_planned_pair_by_pair(fields, other, size, swap, sign):
    """Words that no one has written yet: several conditions in one."""
    word = Related(Relation(**fields))
    pattern = {"&": word & other, "|": word | other, "-": other - word, "~": ~word}[sign]
    checked(pattern, *size, swap)


@pytest.mark.parametrize("swap", [False, True], ids=["plan", "transposed"])
@pytest.mark.parametrize("pattern", WORDS, ids=repr)
def test_every_word_is_planned_pair_by_pair(pattern, swap):
    for size in SIZES:
        checked(pattern, *size, swap)


@settings(deadline=None, derandomize=True)  # as many examples as `make test` or `make long` asks for
@given(patterns, sizes(), st.booleans())
@example(window(8) | strided(16), (199, 199, 0, 1, 16), False)
@example(window(8) | every(16), (199, 199, 0, 1, 16), True)
@example(every(9) | every(11) | window(3), (150, 200, 50, 1, 16), False)
@example((causal() & (sinks(3) | dilated(5, 6))) - rows(4, 1), (50, 191, -7, 4, 11), True)
def test_every_composition_is_planned_pair_by_pair(pattern, size, swap):
    checked(pattern, *size, swap)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(patterns)
def test_clauses_mean_the_same_as_the_pattern(pattern):
    def both(clause):
        return reduce(lambda a, b: a & b, clause)

    again = reduce(or_, map(both, clauses(pattern)))
    assert torch.equal(again.allowed(53), pattern.allowed(53))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.sampled_from([1, 2, 12, 30, 64, 97]), st.data())
def test_a_cover_holds_each_residue_once_and_is_full_where_all_are(period, data):
    values = np.array(
        data.draw(st.lists(st.sampled_from([NONE, SOME, ALL]), min_size=period, max_size=period))
    )
    times = np.zeros(period, dtype=int)
    for residue, step, whole in cover(values.astype(np.int8).tobytes()):
        assert period % step == 0 and 0 <= residue < step
        times[residue::step] += 1
        assert whole == (values[residue::step] == ALL).all()
    assert np.array_equal(times, values != NONE)


def test_a_cover_takes_few_progressions():
    comb = np.full(64, ALL, dtype=np.int8)
    comb[0] = NONE
    halves = tuple(sorted((2**e, 2 ** (e + 1), True) for e in range(6)))
    assert cover(comb.tobytes()) == halves  # all but 0 mod 64: odd, 2 mod 4, 4 mod 8, …


def _parts(one, tile):
    return one.parts[one.offsets[tile] : one.offsets[tile + 1]].tolist()


def test_a_window_with_a_comb_is_one_pass_of_neighbors():
    (one,) = plan(causal() & (window(128) | every(64)), 4096, 4096, 0, 1, 128).passes
    assert one.tiles[20].tolist() == [2560, 1, 128]
    assert _parts(one, 20) == [
        [0, 64, 38, 1],  # every 64th key before the band: seen by all 128 queries
        [2432, 1, 256, 0],  # the band, masked: its full interior of two keys is not worth a part
    ]


def test_a_wide_window_is_an_edge_an_interior_and_an_edge():
    (one,) = plan(window(256), 4096, 4096, 0, 1, 128).passes
    assert _parts(one, 16) == [[1792, 1, 127, 0], [1919, 1, 386, 1], [2305, 1, 127, 0]]


def test_a_dilated_window_has_tiles_of_one_residue_class():
    (one,) = plan(dilated(64, 16), 16384, 16384, 0, 1, 128).passes
    assert set(one.tiles[:, 1]) == {16} and set(one.parts[:, 1]) == {16}
    assert len(one.tiles) == 16 * 8


def test_causal_strides_have_tiles_of_one_residue_class():
    (one,) = plan(causal() & strided(128), 65536, 65536, 0, 1, 128).passes
    assert set(one.tiles[:, 1]) == {128} and set(one.parts[:, 1]) == {128}
    assert _parts(one, 3) == [[0, 128, 385, 1], [49280, 128, 127, 0]]  # all see the first of their own


def test_the_step_between_queries_shortens_the_row_step():
    (one,) = plan(strided(12), 500, 6000, 3, 8, 16).passes
    assert set(one.tiles[:, 1]) == {3}  # 8 · 3 is a multiple of 12
    assert set(one.parts[:, 1]) == {12} and set(one.parts[:, 3]) == {1}


def test_a_window_and_strides_are_two_passes_with_tiles_of_their_own():
    made = plan(window(8) | strided(64), 16384, 16384, 0, 1, 128)
    assert sorted(set(one.tiles[:, 1]).pop() for one in made.passes) == [1, 64]


def test_keys_seen_by_all_are_full_parts_of_every_row_when_transposed():
    comb, band = transposed(window(128) | every(64), 16384, 16384, 0, 1, 128).passes
    assert comb.tiles.tolist() == [[0, 64, 128], [8192, 64, 128]]
    assert comb.parts.tolist() == [[0, 1, 16384, 1]] * 2
    assert band.pattern == window(128) & ~every(64) and set(band.tiles[:, 1]) == {1}


def test_what_a_pass_leaves_out_is_written_once_and_outside():
    comb, rest = plan(window(64) | every(64) | rows(64), 16384, 16384, 0, 1, 128).passes
    assert comb.pattern == rows(64)
    assert rest.pattern == (window(64) | every(64)) & ~rows(64)
    comb, band = transposed(window(256) | every(128), 16384, 16384, 0, 1, 128).passes
    assert (comb.pattern, band.pattern) == (every(128), window(256) & ~every(128))


def test_tiles_end_where_a_range_of_queries_ends():
    (one,) = transposed(sinks(4) | window(64), 4096, 4096, 0, 1, 128).passes
    assert one.tiles[:2].tolist() == [[0, 1, 4], [4, 1, 128]]
    assert _parts(one, 0) == [[0, 1, 4096, 1]]


def test_tiles_do_not_cross_blocks():
    for size in (512, 100):
        made = plan(blocks(size), 16384, 16384, 0, 1, 128)
        assert waste(made) == 1.0 and made.passes[0].parts[:, 3].all()


WASTE = [  # computed / needed at n = 16384: plan at tile 64 and 128, transposed at tile 64 and 128
    (window(128) | every(64), 1.122, 1.245, 1.132, 1.257),
    (causal() & (window(128) | every(64)), 1.243, 1.491, 1.379, 1.754),
    (window(256), 1.123, 1.247, 1.123, 1.247),
    (dilated(64, 16), 1.474, 1.922, 1.474, 1.922),
    (causal() & strided(128), 1.489, 1.985, 1.489, 1.985),
    (window(8) | strided(64), 1.236, 1.471, 1.236, 1.471),
    (blocks(512), 1.0, 1.0, 1.0, 1.0),
    (causal() | prefix(1000), 1.004, 1.008, 1.004, 1.008),
    (sinks(4) | window(64), 1.474, 1.952, 1.474, 1.952),
    (causal(), 1.004, 1.008, 1.004, 1.008),
    (full(), 1.0, 1.0, 1.0, 1.0),
    (window(64) | every(64) | rows(64), 1.108, 1.207, 1.108, 1.207),
]


@pytest.mark.parametrize(("pattern", "limits"), [(p, w) for p, *w in WASTE], ids=lambda v: repr(v))
def test_hardly_a_pair_is_computed_in_vain(pattern, limits):
    made = [f(pattern, 16384, 16384, 0, 1, tile) for f in (plan, transposed) for tile in (64, 128)]
    for one, most in zip(made, limits):
        assert 1.0 <= waste(one) <= most + 1e-9
        assert one.max_parts <= 5


def test_one_query_after_a_cache_computes_what_it_needs_in_one_pass():
    comb = causal() & (window(16) | every(8))
    for pattern in (comb, window(8) | strided(64), dilated(500, 3) | strided(8), blocks(100)):
        made = plan(pattern, 1, 4001, 4000, 1)
        assert waste(made) == 1.0 and len(made.passes) == 1 and made.passes[0].parts[:, 3].all()


def test_two_combs_that_meet_in_few_keys_are_two_passes():
    made = plan(every(127) | every(129), 16384, 16384, 0, 1)
    assert [set(one.parts[:, 1]) for one in made.passes] == [{129}, {127}]
    assert waste(made) < 1.01


def test_combs_that_never_repeat_together_are_still_followed():
    made = plan(every(10007) | every(10009), 100_000, 100_000, 0, 1)
    assert made.max_parts == 1 and waste(made) < 1.06


def test_where_many_progressions_are_nearly_everything_one_is_masked():
    made = plan(~every(61), 16384, 16384, 0, 1)
    assert made.max_parts == 1 and waste(made) < 1.02


def test_many_progressions_are_planned_and_reported():
    ten = reduce(or_, [every(64, o) for o in (1, 3, 7, 8, 12, 20, 21, 30, 40, 50)])
    made = plan(ten, 8192, 8192, 0, 1)
    assert made.max_parts == 9  # 8 and 40 mod 64 are one: 8 mod 32
    assert made.computed == 8192 * 8192 * 10 // 64


def test_nothing_allowed_is_no_pass():
    for made in (plan(sinks(0), 7, 11, 4, 1), plan(causal(), 0, 11, 0, 1), transposed(causal(), 7, 0, 0, 1)):
        assert made.passes == () and made.computed == needed(made) == made.max_parts == 0
        assert waste(made) == 1.0


def test_rows_that_see_nothing_are_in_no_tile():
    (one,) = plan(rows(5, 2), 23, 23, 0, 1, 8).passes
    assert one.tiles.tolist() == [[2, 5, 5]]
    (one,) = plan(causal(), 50, 50, -30, 1, 8).passes  # rows 0 … 29 are before the first key
    assert one.tiles[:, 0].tolist() == [24, 32, 40, 48]


def test_a_clause_within_another_is_not_planned_again():
    made = checked(strided(4) | (strided(4) & every(8)) | window(2), 600, 600, 0, 1, 32, swap=True)
    assert [set(one.tiles[:, 1]) for one in made.passes] == [{4}]


def test_cells_without_keys_do_not_widen_a_part():
    made = checked(~full() | (every(4, 3) - causal()), 639, 639, 0, 1, 32, swap=False)
    assert made.computed == 53113


def test_a_plan_is_made_once():
    first = plan(window(3), 50, 50, 0, 1)
    assert plan(window(3), 50, 50, 0, 1) is first
    assert plan(window(3), 50, 50, 0, 1, 64) is not first
    assert transposed(window(3), 50, 50, 0, 1) is not first


@pytest.fixture
def divided(monkeypatch):
    """The calls of `divide`, which takes most of the time of a plan."""
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        return divide(*arguments)

    monkeypatch.setattr(planner, "divide", counted)
    for cache in (planner._cached, planner._cheapest):
        cache.cache_clear()
    return calls


def test_the_passes_of_the_cheapest_candidate_are_those_that_were_compared(divided):
    pattern = causal() & (window(61) | strided(67))
    made = plan(pattern, 4096, 4096, 0, 1)  # neighbors; residue classes; two passes, in either order
    assert len(made.passes) == 2 and len(divided) == 6
    divided.clear()
    long = planner.SAMPLE_TILES * 128 * 2  # more tiles than a sample has: what was compared is not all
    assert len(plan(pattern, long, long, 0, 1).passes) == 2 and len(divided) == 8


@pytest.mark.parametrize("by_keys", [False, True])
def test_a_sample_of_the_tiles_costs_as_much_as_all_of_them(by_keys, monkeypatch):
    request = planner.Request.of(39989, 39989, 0, 1, 16, by_keys)
    for pattern in (window(61), causal(), window(7) | strided(67)):
        tiling = planner.Tiling(pattern, 1)
        sampled, made = request.cost(tiling)
        assert made is None
        with monkeypatch.context() as patch:
            patch.setattr(planner, "SAMPLE_TILES", 2503)
            cost, made = request.cost(tiling)
        assert sampled == pytest.approx(cost, rel=0.05)
        assert isinstance(made, planner.Pass) and len(made.tiles) == 2500


def test_candidates_are_compared_once_for_similar_sizes(divided):
    pattern = causal() & (window(61) | strided(67))
    for n in (4097, 4099, 5119):
        assert len(plan(pattern, n, n, 0, 1).passes) == 2
    assert len(divided) == 6 + 3 * 2
    divided.clear()
    plan(pattern, 13, 2048, 1001, 1)
    compared = len(divided)
    assert plan(pattern, 13, 2048, 1019, 1).passes[0].computed and len(divided) == compared + 1


@given(st.integers(1, 10**9), st.integers(0, 10**9), st.integers(-(10**6), 10**9))
def test_similar_sizes_are_as_large_and_at_most_a_quarter_larger(n, before, start):
    rounded, m, first = planner._similar_sizes(n, before + n, start)
    assert n <= rounded <= 1.25 * n and before + n <= m <= 1.25 * (before + n)
    assert abs(start) <= abs(first) <= 1.25 * abs(start) and first * start >= 0
    assert planner._similar_sizes(rounded, rounded, 0) == (rounded, rounded, 0)


def test_where_similar_sizes_are_too_large_the_sizes_themselves_are_compared(monkeypatch):
    monkeypatch.setitem(LIMITS, "tiles", 35)
    n = 33 * 128  # of 33 tiles; the similar size has 40
    assert planner._similar_sizes(n, n, 0)[0] == 40 * 128
    assert len(plan(window(59) | every(61), n, n, 0, 1).passes) == 1
    assert len(plan(window(59) | strided(61), n, n, 0, 1).passes) == 1  # of several candidates
    with pytest.raises(NoPlan, match="the planner stops at 35"):
        plan(window(59) | every(61), 36 * 128, 36 * 128, 0, 1)


def test_a_plan_of_a_million_queries_is_small():
    planner._cached.cache_clear()
    tracemalloc.start()
    try:
        made = plan(causal() & (window(128) | every(64)), 10**6, 10**6, 0, 1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(made.passes[0].tiles) == 7813 and waste(made) < 1.02
    assert peak < 64 << 20


def test_what_has_no_plan_says_why_every_time():
    def reason(pattern, n=1000):
        found = []
        for _ in range(2):
            with pytest.raises(NoPlan) as why:
                plan(pattern, n, n, 0, 1)
            found.append(str(why.value))
        assert found[0] == found[1]
        return found[0]

    ids = torch.zeros(1000, dtype=torch.int64)
    assert reason(causal() & documents(ids)) == (
        "documents(<1000 ids>) carries data, so its keys are known only when it runs"
    )
    assert reason(window(1 << 41)) == (
        "window(2199023255552) reaches beyond any sequence: 2199023255552 positions, "
        "and the planner stops at 1099511627776"
    )
    assert reason(reduce(or_, map(window, range(17)))) == (
        "a pattern this long is masked: 17 words, and the planner stops at 16"
    )
    nested = reduce(or_, [every(2**e) & window(e) for e in range(1, 8)]) - every(3) - every(5)
    assert reason(nested) == "9 words with residues: 32 outcomes, and the planner stops at 12"
    assert reason(strided(7), 1 << 26) == (
        "67108864 rows in tiles of 128, row step 1: 524288 tiles, and the planner stops at 262144"
    )


def test_a_grid_has_a_plan_for_all_its_positions_and_coordinates_of_31_bits(monkeypatch):
    """Its kernels compare all coordinates of a pair in one int32."""
    grid = neighborhood((8, 8), 3)
    assert len(plan(grid, 64, 64, 0, 1).passes) == 1
    for place in ((32, 64, 32, 1), (64, 64, 1, 1)):
        with pytest.raises(NoPlan, match=r"^queries and keys are not all 64 positions of the grid$"):
            plan(grid, *place)
    assert LIMITS["bits"] == 31
    monkeypatch.setitem(LIMITS, "bits", 9)
    with pytest.raises(NoPlan, match=r"^the coordinates of .*: 11 bits, and the planner stops at 9$"):
        plan(neighborhood((8, 8), (3, 5)), 64, 64, 0, 1)
