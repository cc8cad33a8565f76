"""Random values for the options of a call."""

from typing import Any

from .harness import Harness
from .law import Case
from .target import OPTIONS


def option_value(harness: Harness, name: str, c: Case) -> dict[str, Any]:
    """The keyword arguments of one option for the sizes of a case; each query keeps an allowed key."""
    n, m = c.n, c.get("m", c.n)
    if name == "mask":
        return harness.make_mask("per head" if harness.per_head_masks else "random", c.b, c.h, n, m).options
    if name in ("causal", "lengths", "documents", "window"):
        return harness.make_mask(name, c.b, c.h, n, m).options
    keyword = OPTIONS[name][0]
    return {keyword: harness.randn(n, m) if name == "bias" else 0.7}
