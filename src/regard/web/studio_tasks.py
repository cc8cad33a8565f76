"""The tasks of worker processes for the studio: parts of a pattern, curves of a cost, laws of an attention."""

import time
from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from statistics import median
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from .. import spec
from ..costs.entry import cost as price
from ..engine.attention import attention
from ..errors import SpecError, nearest
from ..pattern import Pattern, parse_pattern

HEADS, WIDTH = 8, 64  # of the call whose time is estimated or measured
REPEATS = 5
CELLS = 96  # of a drawing, along each side
SAMPLES = 12  # positions of a cell, along each side, where a cell is more than one pair
LENGTHS = tuple(8 << k for k in range(10))  # 8 … 4096, of which a curve has the longest
MAX_POINTS = 6
TARGETS = {
    "regard.attention": "regard:attention",
    "torch SDPA": "torch.nn.functional:scaled_dot_product_attention",
    "nn.MultiheadAttention": "torch.nn:MultiheadAttention",
}
LAWS = ("L01", "L02", "L19", "L29", "L31", "L34", "L45", "L50", "P01", "P03")


def drawn_pattern(text: str) -> Pattern:
    """A pattern as it is drawn: one for all heads."""
    parsed = parse_pattern(text)
    if parsed.differs_by_head:
        raise SpecError("per_head has a pattern for each head, and one is drawn here; enter one of them")
    return parsed


def region(fields: dict[str, Any]) -> dict[str, Any]:
    """A square of a pattern: the share of the allowed pairs of each cell; exact where a cell is one pair.

    Larger cells are sampled at random positions, one in each part of the cell: a regular grid of samples would show
    stripes that are not there.
    """
    parsed, n = drawn_pattern(fields["pattern"]), fields["n"]
    size = min(fields["size"], n)
    top, left = (min(max(fields[name], 0), n - size) for name in ("i", "j"))
    cells = min(CELLS, size)
    if size <= cells:
        i = top + torch.arange(size)
        j = left + torch.arange(size)
        shares = parsed.allows(i[:, None], j[None, :]).expand(size, size).float()
    else:
        random = torch.Generator().manual_seed(0)
        side = cells * SAMPLES
        at = [
            ((torch.arange(side) + torch.rand(side, side, generator=random)) * (size / side))
            .long()
            .clamp(max=size - 1)
            for _ in range(2)
        ]
        allowed = parsed.allows(top + at[0].T, left + at[1]).expand(side, side).float()
        shares = allowed.reshape(cells, SAMPLES, cells, SAMPLES).mean((1, 3))
    levels = (shares * 255).round().byte()
    return {
        "i": top,
        "j": left,
        "size": size,
        "exact": size <= cells,
        "rows": [bytes(row).hex() for row in levels.tolist()],  # two digits a cell: 00 none, ff all
    }


def pair(fields: dict[str, Any]) -> dict[str, Any]:
    """Whether a query may attend to a key, and whether each word of the pattern allows it."""
    parsed, i, j = drawn_pattern(fields["pattern"]), fields["i"], fields["j"]
    words = {repr(word): bool(word.allows(i, j)) for word in parsed.leaves()}
    return {"i": i, "j": j, "allowed": bool(parsed.allows(i, j)), "words": words}


def timing(fields: dict[str, Any]) -> dict[str, Any]:
    """Measured on this machine's CPU: the pattern, and attention without a mask; the median of a few calls."""
    parsed, n = drawn_pattern(fields["pattern"]), fields["n"]
    random = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, HEADS, n, WIDTH, generator=random).requires_grad_(fields["train"]) for _ in range(3)
    )

    def run(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(REPEATS + 1):
            began = time.perf_counter()
            o = call()
            if fields["train"]:
                o.sum().backward()
            times.append(time.perf_counter() - began)
        return median(times[1:])

    return {
        "seconds": run(lambda: attention(q, k, v, parsed)),
        "dense_seconds": run(lambda: scaled_dot_product_attention(q, k, v)),
        "threads": torch.get_num_threads(),
    }


def _preset(name: str) -> Any:
    if name not in spec.presets():
        raise SpecError(f"unknown preset {name!r}; {nearest(name, spec.presets())}")
    return spec.preset(name)


def curve(fields: dict[str, Any]) -> dict[str, Any]:
    """FLOPs of a preset over the length."""
    declared = _preset(fields["name"])
    if isinstance(declared, spec.Vision):
        raise SpecError("the image size of a vision model determines its length")
    points: list[dict[str, int]] = []
    for n in reversed(LENGTHS):
        try:
            result = price(declared, n=n, batch=fields["batch"])
        except SpecError:
            if n == LENGTHS[0]:
                raise
            continue  # longer than its table of positions
        points.insert(0, {"n": n, "flops": int(result.total.flops)})
        if len(points) == MAX_POINTS:
            break
    return {"points": points}


def fitting(fields: dict[str, Any]) -> dict[str, Any]:
    """The largest batch of a preset that fits a memory."""
    declared = _preset(fields["name"])
    n = None if isinstance(declared, spec.Vision) else fields["n"]
    result = price(declared, n=n, dtype=fields["dtype"], train=fields["train"], device="cuda")
    return {"batch": result.fits(int(fields["gib"] * 2**30))}


def laws(fields: dict[str, Any]) -> dict[str, Any]:
    """A few laws on a named attention, or on code that the server's owner allows the page to send."""
    from ..cli import targets
    from ..laws.adapters import adapt
    from ..laws.checker import check
    from ..laws.drawn_case import draw_case
    from ..laws.run_law import Budget

    if fields.get("code"):
        space: dict[str, Any] = {"torch": torch}
        try:
            exec(compile(fields["code"], "page", "exec"), space)
        except Exception as e:
            raise SpecError(f"the code raised {type(e).__name__}: {e}") from e
        codes = [(v, getattr(v, "__code__", None)) for v in space.values()]
        own = [v for v, c in codes if c is not None and c.co_filename == "page"]
        if not own:
            raise SpecError("the code defines no function; write def attention(q, k, v, mask=None): …")
        thing = adapt(own[-1])
    else:
        if fields["target"] not in TARGETS:
            raise SpecError(f"unknown target {fields['target']!r}; {nearest(fields['target'], TARGETS)}")
        options: dict[str, Any] = {"heads": 4} if "Multihead" in fields["target"] else {}
        thing = adapt(targets.read(TARGETS[fields["target"]]), **options)
    verdict = check(thing, list(LAWS), Budget(cases=fields["cases"], seconds=2.0))
    outcomes = [
        {
            "number": o.law.number,
            "name": o.law.name,
            "formula": o.law.formula,
            "status": o.status,
            "message": o.message,
            "counterexample": None if o.counterexample is None else str(o.counterexample),
            "snippet": o.snippet,
            "drawn": None if (drawn := draw_case(o, thing, verdict.probed)) is None else drawn.plain(),
            "worst": o.worst if o.ran and isfinite(o.worst) else None,  # JSON has no infinity
            "tolerance": o.tolerance if o.ran else None,
        }
        for o in verdict.outcomes
    ]
    cause = verdict.cause
    return {
        "name": thing.name,
        "outcomes": outcomes,
        "cause": None if cause is None else {"headline": cause.headline, "fix": cause.fix},
    }


def resized(fields: dict[str, Any]) -> dict[str, Any]:
    """A preset with another number of layers, priced."""
    declared = _preset(fields["name"])
    changed: Any = declared
    layers = fields["layers"]
    if layers is not None:
        changed = _with_layers(declared, layers)
    n = None if isinstance(declared, spec.Vision) else fields["n"]
    result = price(
        changed,
        n=n,
        batch=fields["batch"],
        dtype=fields["dtype"],
        device=fields["device"],
        train=fields["train"],
    )
    return {"text": str(result), "cost": result.plain(), "layers": _layers(changed)}


def _layers(declared: Any) -> int:
    match declared:
        case spec.EncoderDecoder():
            return declared.encoder.layers
        case spec.Vision():
            return declared.encoder.layers
    return declared.layers


def _with_layers(declared: Any, layers: int) -> Any:
    match declared:
        case spec.EncoderDecoder():
            encoder = replace(declared.encoder, layers=layers)
            return replace(declared, encoder=encoder, decoder=replace(declared.decoder, layers=layers))
        case spec.Vision():
            return replace(declared, encoder=replace(declared.encoder, layers=layers))
    return replace(declared, layers=layers)


TASKS = {
    "region": region,
    "pair": pair,
    "curve": curve,
    "fitting": fitting,
    "laws": laws,
    "resized": resized,
    "timing": timing,
}
