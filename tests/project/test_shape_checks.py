"""The checks of shapes in the test run: of each kind of call once, and no wrong call gets through."""

import pytest
import torch
from jaxtyping import Float, TypeCheckError
from torch import Tensor

import shape_checks

beartype = pytest.importorskip("beartype").beartype


@pytest.fixture
def checks(monkeypatch):
    """A product of matrices, and how often its arguments have been checked."""
    for name in ("SEEN", "EVER"):
        monkeypatch.setattr(shape_checks, name, set())
    compiled = []

    def counted(fn):
        checked = beartype(fn)
        return lambda *given, **named: (compiled.append(fn), checked(*given, **named))[1]

    def product(a: Float[Tensor, "n m"], b: Float[Tensor, "m d"], times: int = 1) -> Float[Tensor, "n d"]:
        return (a @ b * times)[: len(a) if times < 5 else 1]

    return shape_checks.jaxtyped(product, typechecker=counted), compiled


def test_calls_of_one_kind_are_checked_once_and_of_other_shapes_dtypes_and_numbers_again(checks):
    product, checked = checks
    for _ in range(3):
        product(torch.ones(2, 3), torch.ones(3, 5))
    assert len(checked) == 2  # the arguments, and the result with them
    product(torch.ones(2, 7), torch.ones(7, 5))
    product(torch.ones(2, 3).double(), torch.ones(3, 5).double())
    product(torch.ones(2, 3), torch.ones(3, 5), times=2)
    assert len(checked) == 8


def test_a_wrong_shape_is_refused_after_right_ones_and_every_time(checks):
    product, _ = checks
    product(torch.ones(2, 3), torch.ones(3, 5))
    for _ in range(2):
        with pytest.raises(TypeCheckError, match="checking the parameters of"):
            product(torch.ones(2, 3), torch.ones(4, 5))
        with pytest.raises(TypeCheckError, match="checking the return value of"):
            product(torch.ones(2, 3), torch.ones(3, 5), times=5)


def test_without_a_limit_every_call_is_checked(checks, monkeypatch):
    product, checked = checks
    monkeypatch.setattr(shape_checks, "SEEN", None)
    for _ in range(3):
        product(torch.ones(2, 3), torch.ones(3, 5))
    assert len(checked) == 6


def test_a_call_with_an_object_is_checked_again_in_the_next_test_and_one_with_tensors_is_not(checks):
    product, checked = checks

    def scaled(self, a: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        return a

    def counted(fn):
        run = beartype(fn)
        return lambda *given, **named: (checked.append(fn), run(*given, **named))[1]

    scaled, one = shape_checks.jaxtyped(scaled, typechecker=counted), object()
    for _ in range(2):
        shape_checks.begin(once=True)
        for _ in range(2):
            product(torch.ones(2, 3), torch.ones(3, 5))
            scaled(one, torch.ones(2, 3))
    assert len(checked) == 2 + 2 * 2


def test_a_function_that_states_no_shape_is_checked_only_where_every_call_is(checks, monkeypatch):
    def double(n: int) -> int:
        return 2 * n

    monkeypatch.setattr(shape_checks, "LEAVES_OTHERS", True)
    assert shape_checks.jaxtyped(double, typechecker=beartype) is double
    monkeypatch.setattr(shape_checks, "LEAVES_OTHERS", False)
    double = shape_checks.jaxtyped(double, typechecker=beartype)
    assert double(1.5) == 3.0
    monkeypatch.setattr(shape_checks, "SEEN", None)
    with pytest.raises(TypeCheckError, match="checking the parameters of"):
        double(1.5)
