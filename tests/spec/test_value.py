"""Declared values to JSON and back, and the text of every error."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard import errors, value
from regard.errors import BackendError, FormatError, RegardError, ShapeError, SpecError, nearest
from regard.pattern import KINDS, Pattern, causal, window


@dataclass(frozen=True, repr=False)
class knob:
    """A value with every sort of field: needed, with a default, by keyword only."""

    turn: float
    name: str = "knob"
    marks: tuple = ()
    inner: object = None
    limit: float = field(default=1.0, kw_only=True)

    __repr__ = value.source


TABLE = value.table(knob)
numbers = st.floats(allow_nan=False) | st.integers()
knobs = st.builds(
    knob,
    numbers,
    st.text(max_size=4).filter(lambda t: t not in ("inf", "-inf")),
    st.lists(numbers | st.booleans(), max_size=3).map(tuple),
    limit=numbers,
)
nested = st.builds(knob, numbers, inner=knobs)


@given(knobs | nested)
def test_a_value_goes_to_json_and_back(one):
    assert value.from_json(value.to_json(one), TABLE) == one


@given(st.builds(knob, numbers, limit=numbers))
def test_the_repr_of_a_value_is_source(one):
    assert eval(repr(one), {"knob": knob}) == one


def test_json_is_the_kind_and_the_fields():
    assert (causal() & window(2, 0)).json() == (
        '{"kind": "Both", "left": {"kind": "causal"}, "right": {"kind": "window", "before": 2, "after": 0}}'
    )


def test_json_has_no_infinity_so_it_is_a_word():
    assert value.to_plain(knob(float("inf"), limit=float("-inf")))["turn"] == "inf"
    assert '"limit": "-inf"' in value.to_json(knob(1, limit=float("-inf")))


def test_source_leaves_out_what_equals_its_default():
    assert repr(knob(2)) == "knob(2)"
    assert repr(knob(float("inf"), limit=float("-inf"))) == "knob(float('inf'), limit=float('-inf'))"
    assert repr(window(2)) == "window(2)" and repr(window(2, 2)) == "window(2, after=2)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"kind": "windw", "before": 2}', "unknown kind 'windw'; did you mean window?"),
        (
            '{"kind": "pickle"}',
            "unknown kind 'pickle'; known: Both, Either, Not, blocks, causal, dilated, documents, every, "
            "full, lengths, neighborhood, per_head, prefix, rows, selected, sinks, strided, tree, where, window",
        ),
        ('{"kind": "window", "befor": 2}', "window has no field 'befor'; did you mean before?"),
        ('{"kind": "causal", "size": 2}', "causal has no field 'size'; known: none"),
        ('{"kind": "window"}', "window needs 'before', which the JSON does not give"),
        ('{"kind": "Both"}', "Both needs 'left', 'right', which the JSON does not give"),
        ('{"before": 2}', "a JSON object without a kind; its fields: 'before'; add \"kind\""),
        ("{}", 'a JSON object without a kind; its fields: none; add "kind"'),
        ('{"kind": "window", "before": 2', "not JSON: Expecting ',' delimiter at line 1, column 31"),
        ("", "not JSON: Expecting value at line 1, column 1"),
        ("[1]", 'a JSON object with a "kind" was expected, not list'),
        ("3", 'a JSON object with a "kind" was expected, not int'),
    ],
)
def test_json_that_is_no_pattern_says_why(text, message):
    with pytest.raises(FormatError) as e:
        Pattern.from_json(text)
    assert str(e.value) == message


def test_data_do_not_come_from_json():
    message = (
        r"^where carries data, so it has no JSON; pass it to the call \(rg.attention, the module\) instead$"
    )
    with pytest.raises(FormatError, match=message):
        Pattern.from_json('{"kind": "Not", "inner": {"kind": "where", "fn": 3}}')


@pytest.mark.parametrize("kind", ['["window"]', '{"kind": "window", "before": 1}', "3", "true"])
def test_a_kind_that_is_no_name_is_unknown(kind):
    with pytest.raises(FormatError, match=r"^unknown kind "):
        Pattern.from_json(f'{{"kind": {kind}, "before": 2}}')


def test_what_json_gives_is_checked_as_any_declaration():
    with pytest.raises(SpecError, match=r"^window\(-2\): a window cannot end before it begins"):
        Pattern.from_json('{"kind": "window", "before": -2}')


@pytest.mark.compiled  # without the shape checker, which would refuse these first
def test_fields_of_the_wrong_kind_in_json_are_refused():
    with pytest.raises(SpecError, match=r"^window\('2'\): before needs to be a whole number, an int$"):
        Pattern.from_json('{"kind": "window", "before": "2"}')
    with pytest.raises(SpecError, match=r"^Not combines patterns; 3 is not one$"):
        Pattern.from_json('{"kind": "Not", "inner": 3}')


def test_reading_knows_only_the_kinds_it_is_given():
    with pytest.raises(FormatError, match=r"^unknown kind 'window'; known: knob$"):
        value.from_json(window(2).json(), TABLE)
    assert set(KINDS) >= {"window", "Both", "documents"} and "knob" not in KINDS


def test_the_nearest_name_is_offered_or_else_all():
    assert nearest("windw", ["window", "every"]) == "did you mean window?"
    assert nearest("zzz", ["window", "every"]) == "known: every, window"


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (SpecError, ValueError),
        (ShapeError, ValueError),
        (FormatError, ValueError),
        (BackendError, RuntimeError),
    ],
)
def test_every_error_is_a_regard_error_and_a_builtin_one(kind, builtin):
    assert issubclass(kind, RegardError) and issubclass(kind, builtin)
    assert kind.__name__ in errors.__doc__
