"""Which calls a fault is limited to, from the calls that were wrong and those that were right."""

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

Facets = dict[str, Any]
Condition = tuple[str, Callable[[Facets], bool]]

SIXTEEN_BITS = ("bfloat16", "float16")
SIZE_NAMES = {"m": "m", "n": "n", "d_k": "d_k", "d_v": "d_v", "b": "b", "h": "the number of heads"}


def condition(wrong: Sequence[Facets], right: Sequence[Facets]) -> str:
    """The first simple condition that is true of every wrong call and of no right one; "" if there is none."""
    if not right:
        return ""
    for words, holds in _conditions(wrong, right):
        if all(holds(f) for f in wrong) and not any(holds(f) for f in right):
            return words
    return ""


def _conditions(wrong: Sequence[Facets], right: Sequence[Facets]):
    names = sorted({name for f in wrong for name in f["options"]})
    for dtype in sorted({f["dtype"] for f in wrong}):
        yield f"in {dtype}", lambda f, dtype=dtype: f["dtype"] == dtype
    if all(f["dtype"] in SIXTEEN_BITS for f in wrong):
        yield "in 16-bit dtypes", lambda f: f["dtype"] in SIXTEEN_BITS
    yield "in gradients", lambda f: f["grad"]
    yield "with inputs that are not contiguous", lambda f: f["strided"]
    yield "where q, k and v are one tensor", lambda f: f.get("shared") == "qkv"
    yield "where k and v are one tensor", lambda f: bool(f.get("shared"))
    yield "for large scores", lambda f: f["size"] > 1
    for name in names:
        yield f"with {name}", lambda f, name=name: name in f["options"]
    for pair in combinations(names, 2):
        yield f"with {' and '.join(pair)} together", lambda f, pair=pair: set(pair) <= set(f["options"])
    yield "with two options together", lambda f: len(f["options"]) > 1
    yield "with grouped heads", lambda f: f["h"] != f["h_kv"]
    yield "without grouped heads", lambda f: f["h"] == f["h_kv"]
    yield "where n ≠ m", lambda f: f["n"] != f["m"]
    yield "where n < m", lambda f: f["n"] < f["m"]
    yield "where n > m", lambda f: f["n"] > f["m"]
    yield "where n = m", lambda f: f["n"] == f["m"]
    yield "where d_v ≠ d_k", lambda f: f["d_k"] != f["d_v"]
    for key, word in SIZE_NAMES.items():
        smallest = min(f[key] for f in wrong)
        below = [f[key] for f in right if f[key] < smallest]
        if below:
            yield (
                f"where {word} > {max(below)} (seen at {smallest})",
                lambda f, key=key, s=smallest: f[key] >= s,
            )
        largest = max(f[key] for f in wrong)
        above = [f for f in right if f[key] > largest]
        # The tolerance of 16 bits hides a fault whose effect shrinks as the size grows.
        if any(f["dtype"] not in SIXTEEN_BITS for f in above):
            yield f"where {word} ≤ {largest}", lambda f, key=key, s=largest: f[key] <= s
    for size in (128, 64, 32, 16, 8, 4, 2):
        for key in ("m", "n", "d_k"):
            yield (
                f"where {SIZE_NAMES[key]} is not a multiple of {size}",
                lambda f, key=key, size=size: f[key] % size != 0,
            )
    for name in names:
        yield f"with {name}, where n ≠ m", lambda f, name=name: name in f["options"] and f["n"] != f["m"]
        smallest = min(f["m"] for f in wrong)
        yield (
            f"with {name}, where m ≥ {smallest}",
            lambda f, name=name, s=smallest: name in f["options"] and f["m"] >= s,
        )
        yield f"with {name} in gradients", lambda f, name=name: name in f["options"] and f["grad"]
        yield (
            f"with {name} and grouped heads",
            lambda f, name=name: name in f["options"] and f["h"] != f["h_kv"],
        )
    for key in ("m", "n", "d_k"):
        smallest = min(f[key] for f in wrong)
        yield (
            f"in gradients, where {SIZE_NAMES[key]} ≥ {smallest}",
            lambda f, key=key, s=smallest: f["grad"] and f[key] >= s,
        )
    sizes = {key: min(f[key] for f in wrong) for key in ("m", "d_k")}
    yield (
        f"where m ≥ {sizes['m']} and d_k ≥ {sizes['d_k']} together",
        lambda f: all(f[key] >= s for key, s in sizes.items()),
    )
