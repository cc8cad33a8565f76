"""The exact numbers of the ledger: `case(id)` is one case, `cases(kind)` all of a kind."""

import json
import math
from pathlib import Path
from typing import Any

_CASES = json.loads((Path(__file__).parent / "data" / "ledger_numbers.json").read_text())["cases"]
_BY_ID = {c["id"]: c for c in _CASES}


def case(id: str) -> dict[str, Any]:
    return _BY_ID[id]


def cases(kind: str) -> list[dict[str, Any]]:
    found = [c for c in _CASES if c["kind"] == kind]
    assert found, f"no case of kind {kind}"
    return found


def agrees(got: Any, expected: Any, compare: dict[str, Any]) -> bool:
    """`got` equals `expected` as the case's `compare` says: exact (floats to 1e-12 relative) or close."""
    if isinstance(expected, dict):
        return all(agrees(got[k], v, compare) for k, v in expected.items())
    if isinstance(expected, list):
        return len(got) == len(expected) and all(agrees(g, e, compare) for g, e in zip(got, expected))
    if isinstance(expected, bool | str | int) or expected is None:
        return got == expected
    rel, abs_ = (
        (1e-12, 0.0) if compare["type"] == "exact" else (compare.get("rel", 0.0), compare.get("abs", 0.0))
    )
    return math.isclose(got, expected, rel_tol=rel, abs_tol=abs_) or abs(got - expected) <= abs_ + rel * abs(
        expected
    )
