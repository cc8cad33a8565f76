"""Heads built to be of a kind are named by it; thresholds are data."""

from dataclasses import replace

import pytest
import torch

import regard as rg
from lens_models import captured
from regard.lens.calls import StoredWeights
from regard.lens.head_kinds import KINDS, RULES, Rule, classify_head, classify_heads
from regard.lens.patch_grid import Grid
from regard.lens.relations import read, related_weights
from regard.lens.statistics import head_statistics
from regard.lens.token_matches import numbered

N = 24
I, J = torch.arange(N)[:, None], torch.arange(N)[None, :]
TEXT = tuple(
    str.split("the cat saw the dog . the bird ate a fig and the cat saw the dog run to it . so it was")
)
SAME = torch.tensor([[a == b and i != j for j, b in enumerate(TEXT)] for i, a in enumerate(TEXT)])
FOLLOWED = torch.tensor(
    [[0 < j <= i and TEXT[j - 1] == TEXT[i] for j in range(len(TEXT))] for i in range(len(TEXT))]
)


def spread(pairs, rest=0.03):
    """Equal weight on the pairs of a row, a little everywhere; rows without one look everywhere."""
    pairs = pairs.expand(N, N).double()
    share = torch.where(
        pairs.sum(-1, keepdim=True) > 0, pairs / pairs.sum(-1, keepdim=True).clamp(min=1), 1 / N
    )
    return ((1 - rest) * share + rest / N).float()


def anywhere(seed):
    """One key a query, at no rule."""
    chosen = torch.randint(0, N, (N, 1), generator=torch.Generator().manual_seed(seed))
    return spread(chosen == J)


HEADS = {
    "self": spread(I == J),
    "previous": spread(I - J == 1),
    "next": spread(J - I == 1),
    "shift": spread(I - J == 4),
    "first": spread(J == 0),
    "separator": spread(torch.tensor([t == "." for t in TEXT])[None]),
    "sink": spread(J == 8),
    "same token": spread(SAME),
    "induction": spread(FOLLOWED),
    "window": spread((I - J).abs() <= 2),
    "stride": spread(J % 4 == 0),
    "uniform": spread(J >= 0),
    "content": anywhere(3),
}
MARKED = {
    "agreement": ((2, (1,)), (17, (4, 16))),  # saw → cat; run → dog, which occurs twice
    "coreference": ((19, (16,)), (22, (16,))),  # it → dog
}
for name, rows in MARKED.items():
    HEADS[name] = anywhere(4)
    for i, keys in rows:
        HEADS[name][i] = spread(torch.isin(J, torch.tensor(keys)))[i]
RELATIONS = {"agreement": [(2, 1), (0, "run", "dog")], "coreference": [("it", 16)]}


def stats(table, tokens=True, grid=None, relations=None):
    names = (TEXT,)
    numbers = numbered(names, names, (".",)) if tokens else None
    call = captured(StoredWeights(table[None, None]))
    call = replace(call, queries=names, keys=names)
    s = head_statistics(call, numbers, grid)
    return replace(s, relations=related_weights(call, read(relations))) if relations else s


@pytest.mark.ledger("S0.Q2c.5", "S2.4.2.6")
@pytest.mark.parametrize("name", HEADS)
def test_a_head_constructed_for_a_kind_is_classified_as_it(name):
    relations = {name: RELATIONS[name]} if name in RELATIONS else None
    kind = classify_head(stats(HEADS[name], relations=relations), 0)
    assert kind.name == name, kind
    assert 0.5 <= kind.confidence <= 1 and kind.evidence


@pytest.mark.ledger("S0.Q2c.5")
def test_the_weight_of_a_relation_is_that_of_its_queries_on_their_keys():
    for name, rows in MARKED.items():
        table = HEADS[name].double()
        s = stats(HEADS[name], relations=RELATIONS)
        truth = sum(table[i, list(keys)].sum() for i, keys in rows) / len(rows)
        assert s.relations[name][0] == pytest.approx(float(truth)) and truth > 0.9
        assert s.numbers(0)[name] == pytest.approx(float(truth))
        other = next(k for k in MARKED if k != name)
        assert s.relations[other][0] < 0.3
        assert classify_head(s, 0).evidence.startswith("97% of the marked queries' weight is on")
    assert (
        classify_head(stats(HEADS["agreement"]), 0).name == "content"
    )  # without the mark it is content only
    everywhere = stats(HEADS["uniform"], relations=RELATIONS)
    assert classify_head(everywhere, 0).name == "uniform"


def test_a_relation_that_no_row_has_is_an_error():
    torch.manual_seed(0)
    model, x = rg.Attention(8, heads=2).build().eval(), torch.randn(2, 3, 8)
    names = [["a", "cat", "it"], ["a", "mat", "it"]]
    view = rg.look(model, x, tokens=names).mark({"coreference": [("it", "cat"), (1, "it", "mat")]})
    both = (view.call(0).weights(None, [2], 0)[:, 0, 1] + view.call(0).weights(None, [2], 1)[:, 0, 1]) / 2
    assert torch.allclose(view.statistics[0].relations["coreference"].float(), both)
    assert view.row(0, 1, "it", 1) == pytest.approx(dict(zip(names[1], view.map(0, 1, 1)[2].tolist())))
    for relations, message in (
        ({"coreference": [("it", "dog")]}, r"no self-attention has both 'it' and 'dog' in any batch row"),
        ({"coreference": [(0, "it", "mat")]}, r"no self-attention has both 'it' and 'mat' in batch row 0"),
        ({"coreference": [(2, 3)]}, r"a relation names token 3; there are 3, 0 to 2"),
        ({"coreference": [(7, 2, 1)]}, r"relation \(7, 2, 1\): there are 2 batch rows, 0 to 1"),
    ):
        with pytest.raises(rg.ShapeError, match=message):
            view.mark(relations)
    with pytest.raises(rg.SpecError, match=r"it needs a list of \(query, key\) or \(batch row, query, key\)"):
        view.mark({"coreference": [3]})
    with pytest.raises(rg.RegardError, match=r"was recorded with keep=False"):
        rg.look(model, x, tokens=names, keep=False).mark({"coreference": [("it", "cat")]})
    with pytest.raises(rg.ShapeError, match=r"the token 'cat' occurs 0 times in batch row 1; use a position"):
        view.row(0, 0, "cat", 1)


def test_every_kind_but_mixed_has_such_a_head():
    assert set(KINDS) - {"mixed"} == set(HEADS)


@pytest.mark.parametrize("name", ["self", "previous", "first", "shift", "sink"])
def test_confidence_falls_with_the_share_of_the_behavior(name):
    sure = [classify_head(stats(0.2 * k * HEADS[name] + (1 - 0.2 * k) / N), 0) for k in (5, 4, 3)]
    assert [f.name for f in sure] == [name] * 3
    assert sure[0].confidence > sure[1].confidence > sure[2].confidence
    assert classify_head(stats(0.1 * HEADS[name] + 0.9 / N), 0).name == "uniform"


def test_a_causal_head_with_equal_weights_is_uniform_and_not_first():
    table = spread(J <= I, rest=0.0)
    s = head_statistics(captured(StoredWeights(table[None, None])))
    assert s.uniform["one_key"] == pytest.approx(float((1 / (I + 1.0)).mean()))
    assert classify_head(s, 0).name == "uniform"


def test_half_of_the_weight_on_one_of_two_keys_is_chance():
    s = head_statistics(captured(StoredWeights(torch.full((1, 1, 2, 2), 0.5))))
    assert s.on_self[0] == s.on_first[0] == 0.5 and classify_head(s, 0).name == "uniform"


def test_on_a_grid_a_shift_up_is_named():
    y, x = torch.arange(N) // 6, torch.arange(N) % 6
    up = (y[:, None] - y == 1) & (x[:, None] == x - 1)
    kind = classify_head(stats(spread(up, 0.0), tokens=False, grid=Grid(4, 6)), 0)
    assert kind.name == "shift" and "-1 rows and +1 columns" in kind.evidence


def test_what_reaches_no_threshold_is_mixed():
    g = torch.Generator().manual_seed(0)
    table = (torch.randn(N, N, generator=g) * 1.1).softmax(-1)
    kind = classify_head(stats(table), 0)
    assert kind.name == "mixed" and "no threshold is reached" in kind.evidence


def test_thresholds_are_data():
    s = stats(HEADS["previous"])
    stricter = tuple(replace(r, threshold=0.999) if r.name in ("previous", "shift") else r for r in RULES)
    assert classify_head(s, 0).name == "previous" and classify_head(s, 0, stricter).name not in (
        "previous",
        "shift",
    )
    mine = (Rule("mostly previous", "on_previous", 0.5, "{value:.0%} back"),)
    assert classify_heads(s, mine)[0].name == "mostly previous"
    with pytest.raises(
        rg.RegardError, match="unknown measure 'color'; known: agreement, coreference, flat, induction, near"
    ):
        classify_head(s, 0, (Rule("red", "color", 0.5, ""),))


def test_the_evidence_contains_the_number():
    assert classify_head(stats(HEADS["previous"]), 0).evidence == "97% is on the token before"
    assert classify_head(stats(HEADS["shift"]), 0).evidence == "97% is at one offset, 4 back"
    assert (
        classify_head(stats(HEADS["sink"]), 0).evidence == "97% of all queries' weight is on one key, key 8"
    )
    assert classify_head(stats(HEADS["window"]), 0).evidence == "90 % of the weight is at most 2 away"
