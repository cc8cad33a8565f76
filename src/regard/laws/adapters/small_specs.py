"""A spec reduced to a size that can be checked in seconds, without dropout."""

from dataclasses import fields, replace
from typing import Any

from ... import spec
from ...errors import SpecError
from ...pattern import per_head
from ...pattern.heads import of_heads
from ...position import learned
from .seeded import seeded

MAX_SIZES = {
    "d_model": 32,
    "d_context": 32,
    "d_out": 32,
    "d_ff": 64,
    "d_k": 8,
    "d_v": 8,
    "vocab": 61,
    "layers": 2,
}
MAX_SIZES |= {"classes": 7, "hidden": 16}
LARGE = {"d_model": 64, "layers": 4, "vocab": 1000}


def reduced(declared: spec.Spec) -> tuple[spec.Spec, str]:
    """The spec without dropout, reduced in size if it is large, and a note that says so."""
    if not _is_large(declared):
        return _changed(declared, shrink=False), ""
    try:
        changed = _changed(declared, shrink=True)
        seeded(changed.build)  # some sizes are only checked when the module is built
    except SpecError:  # its sizes depend on one another, so it is not reduced
        return _changed(declared, shrink=False), ""
    return changed, ", reduced in size"


def _is_large(declared: spec.Spec) -> bool:
    own = any(getattr(declared, field, 0) > limit for field, limit in LARGE.items())
    image = max(getattr(declared, "image", (0,))) > 32
    return own or image or any(_is_large(part) for part in _parts(declared).values())


def _parts(declared: Any) -> dict[str, Any]:
    values = {f.name: getattr(declared, f.name) for f in fields(declared)}
    return {name: value for name, value in values.items() if isinstance(value, spec.Spec)}


def _changed(declared: Any, shrink: bool) -> Any:
    changes: dict[str, Any] = {name: _changed(part, shrink) for name, part in _parts(declared).items()}
    names = {f.name for f in fields(declared)}
    if "dropout" in names:
        changes["dropout"] = 0.0
    if shrink:
        sizes = {f: getattr(declared, f, None) for f in MAX_SIZES if f in names}
        changes |= {f: min(v, MAX_SIZES[f]) for f, v in sizes.items() if isinstance(v, int)}
        if isinstance(declared, spec.Attention):
            changes |= _heads(declared)
        if isinstance(declared, spec.Vision):
            changes |= {"image": (8, 8), "patch": (2, 2)}
        if isinstance(getattr(declared, "position", None), learned):
            changes["position"] = learned(64)
    return replace(declared, **changes)


def _heads(declared: spec.Attention) -> dict[str, Any]:
    heads = declared.heads if declared.heads in (1, 2, 4) else 4
    shared = declared.heads // declared.sizes.kv_heads
    changes: dict[str, Any] = {"heads": heads, "kv_heads": None if shared == 1 else max(1, heads // shared)}
    if isinstance(declared.pattern, per_head):  # the first heads, and before them one of each pattern
        first = [of[0] for of in declared.pattern.heads_of.values()]
        kept = dict.fromkeys([*first, *range(heads)])
        changes["pattern"] = of_heads(declared.pattern, sorted([*kept][:heads]))
    return changes
