"""Cases of a parametrized test that `make long` runs and `make test` leaves out, as they prove what others prove."""

import pytest


def in_long(*cases):
    """The cases of a test with one parameter."""
    return [pytest.param(case, marks=pytest.mark.long) for case in cases]


def rows_in_long(*rows):
    """The cases of a test with several parameters, one tuple each."""
    return [pytest.param(*row, marks=pytest.mark.long) for row in rows]
