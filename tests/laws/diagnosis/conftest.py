"""Limits of processor time that a busy machine does not reach: a test that names a cause compares every variant.

A processor that other programs share takes several times as long for the same work, which processor time includes.
"""

import pytest

from regard.laws.adapters import fixed_parts
from regard.laws.diagnosis import functions, modules

LIMITS = {
    functions: ("MATCH_SECONDS", "PAIR_SECONDS", "OBSERVE_SECONDS"),
    modules: ("MATCH_SECONDS",),
    fixed_parts: ("WINDOW_SECONDS",),
}


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    for module, names in LIMITS.items():
        for name in names:
            monkeypatch.setattr(module, name, 20 * getattr(module, name))
