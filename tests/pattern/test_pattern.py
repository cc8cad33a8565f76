"""Patterns: the readings of the ledger cell by cell, the algebra against dense algebra, data, error texts."""

import json
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from ledger_cases import case, cases
from pattern_strategies import offsets, patterns
from regard import pattern as grammar
from regard.errors import FormatError, RegardError, ShapeError, SpecError
from regard.pattern import (
    KINDS,
    WORDS,
    Both,
    Pattern,
    blocks,
    causal,
    dilated,
    documents,
    every,
    full,
    lengths,
    per_head,
    positions,
    prefix,
    query_offset,
    rows,
    sinks,
    strided,
    where,
    window,
)
from regard.progression import FAR

# The ledger's sixteen tokens (section 15.6): the readings of "every 4th token globally".


def reading(inputs: dict) -> Pattern:
    band, k, phase = window(inputs["window"]), inputs["stride"], inputs["phase"]
    wide = {
        "band": band,
        "columns": band | every(k, phase),
        "columns+rows": band | every(k, phase) | rows(k, phase),
        "strided": band | strided(k),
    }[inputs["reading"]]
    return causal() & wide if inputs["causal"] else wide


def layers_to_connect(p: Pattern, n: int, goal: Pattern) -> int:
    """The least L with the boolean power allowed^L = goal."""
    step, wanted = p.allowed(n).double(), goal.allowed(n)
    reached = torch.eye(n, dtype=torch.float64)
    for layers in range(1, n + 1):
        reached = (reached @ step > 0).double()
        if torch.equal(reached > 0, wanted):
            return layers
    raise AssertionError(f"{p!r} never connects all pairs")


@pytest.mark.ledger("S1.Q6a.1", "S1.Q6a.2", "S1.Q6a.3", "S1.Q6a.4", "S1.Q6a.5")
@pytest.mark.parametrize("c", cases("mask.pattern"), ids=lambda c: c["id"])
def test_the_sixteen_token_pattern_in_every_reading_is_the_ledgers(c):
    p, n, expected = reading(c["inputs"]), c["inputs"]["n"], c["expected"]
    table = p.allowed(n)
    assert ["".join(str(int(x)) for x in row) for row in table] == expected["rows"]
    assert p.draw(n).split("\n") == [" ".join("·■"[int(x)] for x in row) for row in expected["rows"]]
    assert p.count(n) == expected["nnz"] == int(table.sum())
    assert p.row_counts(n).tolist() == expected["row_nnz"]
    assert table.sum(0).tolist() == expected["column_nnz"]
    assert full().count(n) == expected["full"]
    assert Fraction(p.count(n), full().count(n)) == Fraction(expected["density"])
    assert 1 - Fraction(p.count(n), full().count(n)) == Fraction(expected["saving"])
    goal = causal() if c["inputs"]["causal"] else full()
    assert layers_to_connect(p, n, goal) == expected["layers_to_connect_all"]
    if c["inputs"]["causal"]:
        assert causal().count(n) == expected["full_causal"]
        assert 1 - Fraction(p.count(n), causal().count(n)) == Fraction(expected["saving_vs_causal"])


@pytest.mark.ledger("S1.Q6a.2", "S1.Q6a.3", "S1.Q6a.4")
@pytest.mark.parametrize(
    ("wide", "allowed", "in_the_past"),
    [
        (window(2), 74, 45),
        (window(2) | every(4), 120, 73),
        (window(2) | every(4, 3), 120, 63),
        (window(2) | every(4) | rows(4), 154, 85),
        (window(2) | every(4, 3) | rows(4, 3), 154, 85),
        (window(2) | strided(4), 122, 69),
    ],
    ids=repr,
)
def test_the_table_of_section_15_6_counts_each_reading(wide, allowed, in_the_past):
    assert wide.count(16) == allowed
    assert (causal() & wide).count(16) == in_the_past


@pytest.mark.ledger("S0.Q2b.8", "S1.Q3a.4")
@pytest.mark.parametrize("c", cases("mask.causal"), ids=lambda c: c["id"])
def test_causal_allows_the_lower_triangle_and_the_diagonal(c):
    n, expected = c["inputs"]["n"], c["expected"]
    assert causal().count(n) == expected["allowed"]
    assert (~causal()).count(n) == expected["forbidden"]
    assert (~causal()).count(n) / n**2 == expected["forbidden_fraction"]
    assert torch.equal(causal().allowed(n), torch.ones(n, n, dtype=torch.bool).tril())


@pytest.mark.ledger("S1.Q6b.1")
def test_a_window_of_two_holds_4994_of_a_million_pairs_and_connects_in_500_layers():
    c = case("compare.1000.512.k3.w2")
    n, p = c["inputs"]["n"], window(c["inputs"]["w"])
    assert p.count(n) == 4994 == n * 5 - 2 * 3
    table, reached, layers = p.allowed(n).float(), torch.zeros(n), 0
    reached[0] = 1.0  # query 0 is farthest from the last key
    while not reached.all():
        reached, layers = (table @ reached > 0).float(), layers + 1
    assert layers == 500 == -(-(n - 1) // c["inputs"]["w"])


def test_a_query_without_an_allowed_key_has_an_empty_row():  # its output is zero, so it must be known
    p = causal() & every(4, 2)
    assert p.row_counts(7).tolist() == [0, 0, 1, 1, 1, 1, 2]
    assert not p.allowed(7)[:2].any()
    assert (~full()).count(7, 11) == sinks(0).count(7) == 0


# Each word is its inequality.

INEQUALITIES = [
    (full(), lambda i, j: True),
    (causal(), lambda i, j: j <= i),
    (window(2), lambda i, j: -2 <= i - j <= 2),
    (window(3, 1), lambda i, j: -1 <= i - j <= 3),
    (window(0, 2), lambda i, j: -2 <= i - j <= 0),
    (dilated(2, 3), lambda i, j: i - j in (-6, -3, 0, 3, 6)),
    (every(4, 3), lambda i, j: j in (3, 7, 11)),
    (strided(5), lambda i, j: i - j in (-10, -5, 0, 5, 10)),
    (rows(4, 1), lambda i, j: i in (1, 5, 9)),
    (sinks(2), lambda i, j: j in (0, 1)),
    (prefix(3), lambda i, j: i in (0, 1, 2) and j in (0, 1, 2)),
    (blocks(4), lambda i, j: (i < 4 and j < 4) or (4 <= i < 8 and 4 <= j < 8) or (i >= 8 and j >= 8)),
]


def test_every_word_of_the_grammar_has_its_inequality_here():
    assert {type(p) for p, _ in INEQUALITIES} == set(WORDS)


@pytest.mark.parametrize(
    ("p", "holds"), INEQUALITIES, ids=lambda x: repr(x) if isinstance(x, Pattern) else ""
)
def test_a_word_allows_exactly_the_pairs_of_its_inequality(p, holds):
    expected = [[holds(i, j) for j in range(11)] for i in range(11)]
    assert p.allowed(11).tolist() == expected
    assert p.allowed(7, 11).tolist() == expected[4:]  # the last seven, behind a cache of four
    assert [[p.allows(i, j) for j in range(11)] for i in range(11)] == expected


def test_causal_or_prefix_is_a_prefix_language_model():
    assert (causal() | prefix(2)).draw(4) == "■ ■ · ·\n■ ■ · ·\n■ ■ ■ ·\n■ ■ ■ ■"


# The algebra is the dense algebra.

sizes = st.tuples(st.integers(1, 13), st.integers(0, 11)).map(lambda t: (t[0], t[0] + t[1]))


@given(patterns, patterns, sizes)
def test_the_algebra_of_patterns_is_that_of_their_tables(p, r, size):
    n, m = size
    a, b = p.allowed(n, m), r.allowed(n, m)
    assert torch.equal((p & r).allowed(n, m), a & b)
    assert torch.equal((p | r).allowed(n, m), a | b)
    assert torch.equal((~p).allowed(n, m), ~a)
    assert torch.equal((p - r).allowed(n, m), a & ~b)


@given(patterns, sizes)
def test_integers_and_tensors_are_allowed_the_same(p, size):
    n, m = size
    one_by_one = [[p.allows(i + m - n, j) for j in range(m)] for i in range(n)]
    assert all(type(cell) is bool for row in one_by_one for cell in row)
    assert p.allowed(n, m).tolist() == one_by_one


@given(patterns, patterns, sizes, offsets)
def test_same_means_the_same_table(p, r, size, at):
    n, m = size
    assert p.same(r, n, m, at) == torch.equal(p.allowed(n, m, at), r.allowed(n, m, at))
    assert p.same(~~p, n, m, at)
    assert (~(p & r)).same(~p | ~r, n, m, at)


def test_what_is_written_otherwise_is_the_same_but_not_equal():
    assert window(2).same(window(2, 2), 7) and window(2) != window(2, 2)
    assert not window(2).same(window(3), 7) and window(2).same(window(3), 3)


@given(patterns)
def test_repr_is_source(p):
    assert eval(repr(p), vars(grammar)) == p


@given(patterns)
def test_json_is_written_and_read_back(p):
    assert Pattern.from_json(p.json()) == p
    assert Pattern.from_json(p.json(indent=2)) == p


@given(patterns)
def test_equal_patterns_have_equal_hashes(p):
    assert hash(Pattern.from_json(p.json())) == hash(p)


def test_repr_has_no_more_brackets_than_the_algebra_needs():
    assert repr(causal() & (window(1) | every(4))) == "causal() & (window(1) | every(4))"
    assert repr(causal() - window(2, 3)) == "causal() & ~window(2, after=3)"
    assert repr(full() & (causal() & sinks(1))) == "full() & (causal() & sinks(1))"
    assert repr(~(full() | (rows(2, 1) | blocks(3)))) == "~(full() | (rows(2, offset=1) | blocks(3)))"


def test_a_pattern_takes_no_other_operand():
    for join in (lambda p: p & 1, lambda p: p | None, lambda p: p - True):
        with pytest.raises(TypeError, match="unsupported operand"):
            join(causal())


def test_words_know_whether_they_depend_on_the_position_of_the_query():
    assert {p for p, _ in INEQUALITIES if not p.reads_query} == {full(), every(4, 3), sinks(2)}
    assert (every(3) | causal()).reads_query and not (every(3) & ~sinks(2)).reads_query
    assert not any(p.has_data for p, _ in INEQUALITIES)
    assert (causal() & where(lambda i, j: i == j)).has_data


# The query offset.


def test_few_queries_follow_a_cache_of_keys():
    assert query_offset(causal(), 3, 11) == (8, 1)
    assert positions(causal(), 3, 11).tolist() == [8, 9, 10]
    assert positions(causal(), 3, 11, at=2).tolist() == [2, 3, 4]
    assert positions(causal(), 3, 11, at=(1, 4)).tolist() == [1, 5, 9]
    assert positions(causal(), 3, 11, at=torch.tensor([2, 0])).tolist() == [[2, 3, 4], [0, 1, 2]]


def test_one_offset_per_batch_row_gives_one_table_per_row():
    at, p = torch.tensor([5, 0, 2]), causal() & (window(3) | every(4, 1))
    table = p.allowed(7, 11, at)
    assert table.shape == (3, 1, 7, 11)
    for row, start in zip(table[:, 0], at.tolist()):
        assert torch.equal(row, p.allowed(7, 11, start))


def test_more_queries_than_keys_are_fine_where_no_position_is_compared():
    assert every(4).allowed(11, 7).tolist() == [[j % 4 == 0 for j in range(7)]] * 11
    assert causal().allowed(11, 7, at=0).sum() == causal().count(11, 7, at=0) == 28 + 4 * 7


def test_more_queries_than_keys_need_a_query_offset():
    message = (
        r"^11 queries over 7 keys: causal\(\) & every\(4\) compares positions, "
        r"and query 0 would be at -4; give the query offset with at=, for example at=0$"
    )
    for ask in (Pattern.allowed, Pattern.count, Pattern.row_counts, Pattern.draw):
        with pytest.raises(ShapeError, match=message):
            ask(causal() & every(4), 11, 7)


def test_a_step_between_queries_below_one_is_refused():
    with pytest.raises(SpecError, match=r"^at=\(3, 0\): the step between queries needs to be >= 1$"):
        causal().count(7, 11, at=(3, 0))


# Patterns that carry data.

IDS = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 3]])


@pytest.mark.ledger("S1.Q3a.5")
def test_documents_do_not_attend_to_one_another():
    one, two = documents(IDS[0]), documents(IDS)
    expected = IDS[:, None, :, None] == IDS[:, None, None, :]
    assert torch.equal(two.allowed(7), expected) and two.allowed(7).shape == (2, 1, 7, 7)
    assert torch.equal(one.allowed(7), expected[0, 0])
    assert torch.equal(two.allowed(3, 7), expected[:, :, 4:])  # the last three, after a cache of four
    assert torch.equal(one.allowed(3, 7), expected[0, 0, 4:])
    assert torch.equal((causal() & two).allowed(7), expected.tril())
    assert two.count(7) == int(expected.sum()) and one.count(3, 7) == 6


def test_documents_follow_one_offset_per_batch_row():
    at = torch.tensor([4, 1])
    expected = torch.stack([documents(IDS[0]).allowed(3, 7, start) for start in at.tolist()])[:, None]
    assert torch.equal(documents(IDS[0]).allowed(3, 7, at), expected)
    rows_of_two = torch.stack([documents(ids).allowed(3, 7, int(a)) for ids, a in zip(IDS, at)])[:, None]
    assert torch.equal(documents(IDS).allowed(3, 7, at), rows_of_two)


def test_a_query_beyond_the_documents_is_in_none():
    assert documents(IDS[0]).allowed(3, 7, at=6).any(-1).tolist() == [True, False, False]
    assert documents(IDS).allowed(2, 7, at=-1).any(-1).tolist() == [[[False, True]], [[False, True]]]
    assert not documents(IDS).allows(-1, 6) and documents(IDS).allows(6, 6)


def test_positions_within_a_document_count_from_its_beginning():
    ids = torch.tensor(
        [[4] * 3 + [1] * 4, [4] * 2 + [1] * 3 + [4] * 2]
    )  # the second row has one in two places
    pattern = documents(ids, causal() & every(2))
    place = [[0, 1, 2, 0, 1, 2, 3], [0, 1, 0, 1, 2, 0, 1]]
    for row in range(2):
        for i in range(7):
            for j in range(7):
                a, b = place[row][i], place[row][j]
                expected = bool(ids[row, i] == ids[row, j]) and b <= a and b % 2 == 0
                assert documents(ids[row], pattern.within).allows(i, j) == expected
                assert bool(pattern.allowed(7)[row, 0, i, j]) == expected
    both = [[all(cell) for cell in zip(*lines)] for lines in zip(*pattern.allowed(7)[:, 0].tolist())]
    assert [[pattern.allows(i, j) for j in range(7)] for i in range(7)] == both
    assert pattern.count(7) == int(pattern.allowed(7).sum())
    assert repr(pattern) == "documents(<2×7 ids>, causal() & every(2))"
    with pytest.raises(FormatError, match="carries data, so it has no JSON"):
        pattern.json()
    ids[0, 3] = 4  # read again when it is changed
    assert pattern.allowed(7)[0, 0, 3].tolist() == [True, False, True] + [False] * 4


def test_positions_that_a_transform_or_a_mode_computed_are_not_kept():
    def fresh():
        return documents(IDS, causal() & every(2))

    expected, pattern = fresh().allowed(7), fresh()
    torch.func.grad(lambda x: (x * pattern.allowed(7)).sum())(torch.ones(7, 7))
    assert type(pattern.positions) is torch.Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(
        pattern.positions
    )
    assert torch.equal(pattern.allowed(7), expected)
    pattern = fresh()
    with FakeTensorMode(allow_non_fake_inputs=True):
        pattern.allowed(7)
    assert type(pattern.positions) is torch.Tensor and torch.equal(pattern.allowed(7), expected)


def test_documents_need_one_id_per_key():
    message = r"^documents\(<2×7 ids>\) over 11 keys: one id per key is needed, \(11,\) or \(b, 11\)$"
    with pytest.raises(ShapeError, match=message):
        (causal() & documents(IDS)).allowed(7, 11)


@pytest.mark.ledger("S0.Q2b.9", "S3.Q2b.0")
def test_lengths_hide_keys_and_never_queries():
    p = lengths(torch.tensor([2, 7, 0]))
    table = p.allowed(5, 7)
    assert table.shape == (3, 1, 5, 7)
    assert table.sum(-1).squeeze(1).tolist() == [[2] * 5, [7] * 5, [0] * 5]
    assert table[0, 0, :, :2].all() and p.count(5, 7) == 45
    assert lengths(torch.tensor([2, 3])).allowed(11, 7).shape == (2, 1, 11, 7)  # compares no positions


def test_where_takes_any_function_of_positions():
    near = where(lambda i, j: (i - j).abs() <= 2)
    assert torch.equal(near.allowed(7, 11), window(2).allowed(7, 11))
    assert near.count(7, 11) == window(2).count(7, 11) and near.same(window(2), 7, 11)
    assert torch.equal((near & ~causal()).allowed(7), (window(2) - causal()).allowed(7))
    assert torch.equal(where(lambda i, j: True).allowed(3, 5), full().allowed(3, 5))


def test_data_of_integers_hold_for_the_whole_batch():
    for p in (documents(IDS), lengths(torch.tensor([2, 5]))):
        everywhere = p.allowed(7).all(0)[0]
        assert [[p.allows(i, j) for j in range(7)] for i in range(7)] == everywhere.tolist()


def test_data_are_compared_by_identity():
    p = documents(IDS)
    assert p == p and p != documents(IDS) and len({p, documents(IDS), p}) == 2
    assert causal() & p == causal() & p


@pytest.mark.parametrize(
    "text",
    [
        "per_head([causal()] * 4)",
        "per_head(causal(), causal())",
        "per_head(patterns=[causal()])",
        "per_head()",
        "[causal(), causal()]",
    ],
)
def test_a_text_of_per_head_that_is_no_list_is_refused_with_the_form_it_needs(text):
    with pytest.raises(FormatError) as refused:
        grammar.parse_pattern(f"~{text}")
    needed = "a pattern for each query head is written as one list, per_head([causal(), window(2)])"
    assert str(refused.value) == f"{text}: {needed}"


@pytest.mark.parametrize(
    "text, message",
    [
        ("causal & window(3)", "'causal' has no brackets; write causal()"),
        ("causal() & rows", "'rows' has no brackets; write rows(k, offset=0)"),
        ("neighborhood", "'neighborhood' has no brackets; write neighborhood(grid, kernel, step=1, border='clipped', "
         "causal=False)"),
        ("~rg.window(3)", "'rg.window(3)': a text names words without a module; write window(…)"),
        ("window(2, 3, 4)", "window(2, 3, 4): these are not its arguments; write window(before, after=None)"),
        ("window(aft=3)", "window(aft=3): these are not its arguments; write window(before, after=None)"),
        ("every(k=2, k=3)", "every(k=2, k=3): these are not its arguments; write every(k, offset=0)"),
        ("neighborhood((4, 4), 3, stride=2)", "neighborhood((4, 4), 3, stride=2): these are not its arguments; write "
         "neighborhood(grid, kernel, step=1, border='clipped', causal=False)"),
    ],
)  # fmt: skip
def test_a_text_that_is_almost_a_pattern_is_refused_with_what_to_write(text, message):
    with pytest.raises(FormatError) as refused:
        grammar.parse_pattern(text)
    assert str(refused.value) == message


def test_data_print_their_sizes():
    assert repr(causal() & documents(IDS)) == "causal() & documents(<2×7 ids>)"
    assert repr(documents(IDS[0])) == "documents(<7 ids>)"
    assert repr(lengths(torch.tensor([2, 3]))) == "lengths(<2 lengths>)"

    def twice(i, j):
        return i == 2 * j

    assert repr(where(twice)) == "where(twice)"


@pytest.mark.parametrize(
    "p", [documents(IDS), lengths(torch.tensor([2])), where(lambda i, j: i == j)], ids=repr
)
def test_data_have_no_json_and_no_formula(p):
    message = "carries data, so it has no JSON; pass it to the call (rg.attention, the module) instead"
    with pytest.raises(FormatError) as e:
        (causal() & ~p).json()
    assert str(e.value) == f"{type(p).__name__} {message}"
    with pytest.raises(ShapeError) as e:
        p.terms()
    assert str(e.value) == f"{p!r} carries data: there is no formula for it"
    assert (
        p.row_counts(7).tolist() == p.allowed(7).reshape(-1, 7, 7).sum((0, 2)).tolist()
    )  # enumerated instead


def test_a_pattern_that_differs_along_the_batch_draws_one_row_at_a_time():
    with pytest.raises(ShapeError) as e:
        documents(IDS).draw(7)
    assert str(e.value) == (
        "documents(<2×7 ids>) differs along the batch; draw one row: pattern.allowed(n)[b, 0]"
    )
    assert documents(IDS[0, :3]).draw(3) == "■ ■ ■\n■ ■ ■\n■ ■ ■"


# What cannot be declared.

RESIDUE = "k needs to be >= 1 and 0 <= offset < k"


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (
            lambda: window(-1),
            "window(-1): a window cannot end before it begins; before and after need to be >= 0",
        ),
        (
            lambda: window(2, -3),
            "window(2, after=-3): a window cannot end before it begins; before and after need to be >= 0",
        ),
        (lambda: dilated(-1, 2), "dilated(-1, 2): reach needs to be >= 0 and step >= 1"),
        (lambda: dilated(1, 0), "dilated(1, 0): reach needs to be >= 0 and step >= 1"),
        (lambda: every(0), f"every(0): {RESIDUE}"),
        (lambda: every(4, 4), f"every(4, offset=4): {RESIDUE}"),
        (lambda: every(4, -1), f"every(4, offset=-1): {RESIDUE}"),
        (lambda: rows(0), f"rows(0): {RESIDUE}"),
        (lambda: rows(3, 3), f"rows(3, offset=3): {RESIDUE}"),
        (lambda: strided(0), "strided(0): k needs to be >= 1"),
        (lambda: sinks(-1), "sinks(-1): m needs to be >= 0"),
        (lambda: prefix(-1), "prefix(-1): m needs to be >= 0"),
        (lambda: blocks(0), "blocks(0): size needs to be >= 1"),
        (lambda: window(FAR), f"window({FAR}): before needs to be below {FAR}, beyond any position"),
        (lambda: rows(FAR), f"rows({FAR}): k needs to be below {FAR}, beyond any position"),
        (
            lambda: dilated(1 << 30, 1 << 30),
            f"dilated({1 << 30}, {1 << 30}): reach · step needs to be below {FAR}, beyond any position",
        ),
    ],
)
def test_what_cannot_be_declared_says_why(declare, message):
    with pytest.raises(SpecError) as e:
        declare()
    assert str(e.value) == message


@pytest.mark.parametrize(
    ("pattern", "dense"),
    [
        (window(FAR - 1), full()),
        (window(0, FAR - 1), full() - (causal() - window(0))),
        (dilated(1, FAR - 1), window(0)),
        (every(FAR - 1), every(200)),
        (strided(FAR - 1), window(0)),
        (blocks(FAR - 1) & causal(), causal()),
        (sinks(FAR - 1), full()),
    ],
    ids=repr,
)
def test_numbers_past_any_position_count_as_what_they_come_to(pattern, dense):
    assert pattern.count(100) == dense.count(100) == int(pattern.allowed(100).sum())
    assert torch.equal(pattern.allowed(100), dense.allowed(100))


def test_numbers_of_a_word_may_be_of_numpy():
    made = window(np.int64(3), after=np.int32(2)) | dilated(np.uint8(4), 2)
    assert made == (window(3, after=2) | dilated(4, 2)) and hash(made) == hash(
        window(3, after=2) | dilated(4, 2)
    )
    assert Pattern.from_json(made.json()) == made and made.count(100) == int(made.allowed(100).sum())


@pytest.mark.compiled  # without the shape checker, which would refuse these first
@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: window(2.5), "window(2.5): before needs to be a whole number, an int"),
        (lambda: window(2, True), "window(2, after=True): after needs to be a whole number, an int"),
        (lambda: window(None), "window(None): before needs to be a whole number, an int"),
        (lambda: Both(causal(), 3), "Both combines patterns; 3 is not one"),
        (lambda: KINDS["Either"](None, causal()), "Either combines patterns; None is not one"),
        (lambda: KINDS["Not"]("causal"), "Not combines patterns; 'causal' is not one"),
    ],
)
def test_fields_of_the_wrong_kind_say_what_is_needed(declare, message):
    with pytest.raises(SpecError) as e:
        declare()
    assert str(e.value) == message


def test_a_pattern_is_a_value_that_does_not_change():
    with pytest.raises(AttributeError, match="cannot assign to field 'before'"):
        window(2).before = 3


@given(patterns)
def test_a_pattern_carries_its_json_as_text(p):
    """What a compiled graph carries: composed at declaration, and the same as `json()`."""
    assert json.loads(p.text) == json.loads(p.json())
    assert Pattern.from_json(p.text) == p


def test_a_pattern_with_data_has_no_text():
    p = causal() & documents(torch.tensor([0, 0, 1]))
    assert p.text is None and p.left.text is not None


def test_many_words_of_a_small_table_are_counted_pair_by_pair():
    p = causal()
    for k in range(2, 19):
        p = p | every(k, k - 1)
    assert p.count(97) == int(p.allowed(97).sum())


def test_a_table_is_on_the_device_of_the_pattern_s_data():
    """Patterns with ids on a GPU are counted and explained there; the meta device stands in for one."""
    ids = torch.arange(6, device="meta") // 2
    for pattern in (documents(ids), causal() & documents(ids), ~lengths(ids[:2]) | window(1)):
        assert pattern.device == ids.device and pattern.allowed(6).device == ids.device
    assert causal().device is None and (causal() | window(2)).allowed(3).device.type == "cpu"


WRONG_DATA = {  # the first case is shape-checked: it has the declared types
    "where(<lambda>): it returned torch.int64, and a condition is needed, true or false": lambda: where(
        lambda i, j: i - j
    ).count(5),
    "documents: ids is of type list, not a tensor; use torch.as_tensor(ids)": lambda: documents([0, 0, 1]),
    "documents: within=3 is not a pattern; use rg.causal(), rg.window(2), …": lambda: documents(IDS, 3),
    "documents: within= is for all heads; use rg.per_head([rg.documents(ids, p) for p in …])": lambda: (
        documents(IDS, per_head([causal(), full()]))
    ),
    "documents: within=documents(<2×7 ids>) carries data, and data have positions of the row; combine them with &: "
    "rg.documents(ids, …) & …": lambda: documents(IDS, documents(IDS)),
    "documents: ids of torch.float32; whole numbers are needed, such as ids.long()": lambda: documents(
        torch.tensor([0.0, 1.0])
    ),
    "lengths: l is of type int, not a tensor; use torch.as_tensor(l)": lambda: lengths(3),
    "lengths: l has shape (); one length per batch row is needed, (b,)": lambda: lengths(torch.tensor(3)),
    "where(3): a function of i and j is needed": lambda: where(3),
    "where(<lambda>): it returned int, and a condition is needed, true or false": lambda: where(
        lambda i, j: i - j
    ).allows(3, 1),
    "where(<lambda>): i and j are tensors; combine conditions with & and |, and choose with torch.where": (
        lambda: where(lambda i, j: i > j and j > 2).count(5)
    ),
}


@pytest.mark.parametrize("message", WRONG_DATA)
def test_data_that_is_none_is_refused(message):
    with pytest.raises(RegardError) as refused:
        WRONG_DATA[message]()
    assert str(refused.value) == message


@pytest.mark.compiled  # the type checker would speak first
@pytest.mark.parametrize("size", [-1, 4.0, "4", None])
def test_a_size_that_is_no_number_of_positions_is_refused_in_words(size):
    for read in (causal().count, (causal() & window(2)).draw, causal().allowed):
        with pytest.raises(
            SpecError, match=re.escape(f"={size!r}: a number of positions needs to be a whole")
        ):
            read(4, m=size) if size is not None else read(None)


def test_a_picture_that_no_terminal_could_show_is_refused():
    with pytest.raises(ShapeError, match="a picture of 100,000 × 100,000 pairs is too large"):
        causal().draw(100_000)


@pytest.mark.compiled  # the type checker would speak first
def test_sizes_may_be_numbers_of_numpy_and_tensors():
    for four in (np.int64(4), torch.tensor(4)):
        assert causal().count(four) == 10 and causal().allowed(four).sum() == 10
        assert causal().draw(four) == causal().draw(4)


def test_lengths_are_counted_without_visiting_pairs(monkeypatch):
    given = lengths(torch.tensor([3, 0, 11, 3, -2, 40]))
    patterns = [given, causal() & given, (window(2) | every(4)) - given, ~given & lengths(torch.tensor([9]))]
    tables = {(p, n, m): int(p.allowed(n, m).sum()) for p in patterns for n, m in ((11, 11), (5, 13))}
    monkeypatch.setattr(type(given), "allows", None)
    for (pattern, n, m), pairs in tables.items():
        assert pattern.count(n, m) == pairs
    assert (causal() & lengths(torch.tensor([10**6, 10**5]))).count(10**6) == 500000500000 + 95000050000
    with pytest.raises(ShapeError, match="has data for 6 batch rows, and there are 7"):
        (given & lengths(torch.arange(7))).count(11)


@pytest.mark.compiled  # the type checker would speak first
def test_what_is_no_pattern_is_refused_by_what_to_write():
    with pytest.raises(SpecError, match=r"^a tensor is not a pattern; use rg\.lengths"):
        causal() & torch.ones(4, 4, dtype=torch.bool)
    with pytest.raises(
        SpecError, match=r"^window is a kind of pattern; write it with parentheses: window\(…\)"
    ):
        causal() | window
    with pytest.raises(SpecError, match=r"^per_head\(causal\(\)\): give a list, with one pattern for each"):
        grammar.per_head(causal())
    with pytest.raises(SpecError, match=r"^per_head\(3\): give a list, with one pattern for each"):
        grammar.per_head(3)
    with pytest.raises(SpecError, match=r"^per_head: head 0: a tensor of shape \(.*\) is not a pattern"):
        grammar.per_head([torch.ones(4, 4, dtype=torch.bool)])
    with pytest.raises(TypeError, match="unsupported operand"):
        causal() & 3
