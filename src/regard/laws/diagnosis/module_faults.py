"""Faults of a module outside the attention formula: in projections, in splitting or merging heads, in positions."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .projections import Arrangement, Matrix, rotated

Projected = Callable[[Arrangement, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class ModuleFault:
    """A fault outside the attention formula: in projections, in splitting or merging heads."""

    name: str
    family: str
    fix: str
    project: Projected | None = None
    merge: Callable[[Arrangement, Tensor, Tensor], Tensor] | None = None
    values_of_key: bool = False  # the argument `value` has no effect


def _viewed(a: Arrangement, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    def split(y: Tensor, heads: int) -> Tensor:
        b, n, width = y.shape
        return y.reshape(b, heads, n, width // heads)

    return split(a.q(x), a.heads), split(a.k(source), a.kv_heads), split(a.v(source), a.kv_heads)


def _wrong_matrix(**roles: str) -> Projected:
    """Some of q, k and v with the matrix of another."""

    def project(a: Arrangement, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        changed = replace(a, **{role: getattr(a, other) for role, other in roles.items()})
        return changed.project(x, source)

    return project


def _other_order(a: Arrangement) -> Arrangement:
    return replace(a, order="(d h)" if a.order == "(h d)" else "(h d)")


def _merged_in_other_order(a: Arrangement, o: Tensor, x: Tensor) -> Tensor:
    return _other_order(a).merge(o, x)


def _merged_by_view(a: Arrangement, o: Tensor, x: Tensor) -> Tensor:
    b, h, n, d = o.shape
    y = o.reshape(b, n, h * d)
    return y if a.o is None else a.o(y)


def _in_other_order(a: Arrangement, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _other_order(a).project(x, source)


def _only_some(which: str, faulty: Projected) -> Projected:
    """The faulty projection for only some of q, k and v."""

    def project(a: Arrangement, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        usual, other = a.project(x, source), faulty(a, x, source)
        q, k, v = (o if name in which else u for name, u, o in zip("qkv", usual, other))
        return q, k, v

    return project


def _unprojected(which: str) -> Projected:
    def project(a: Arrangement, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        same = Matrix(torch.eye(x.shape[-1], dtype=x.dtype, device=x.device))
        changes: dict[str, Any] = dict.fromkeys(which, same)
        return replace(a, **changes).project(x, source)

    return project


def _twice(a: Arrangement, o: Tensor, x: Tensor) -> Tensor:
    y = a.merge(o, x)
    return y if a.o is None else a.o(y)


def _from_x(which: str) -> Projected:
    """Keys or values projected from the input instead of the context."""

    def project(a: Arrangement, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = a.project(x, source)
        _, own_k, own_v = a.project(x, x)
        return q, (own_k if "k" in which else k), (own_v if "v" in which else v)

    return project


def _rotated_value(a: Arrangement, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = a.project(x, source)
    return q, k, rotated(v, a.rotary) if a.rotary else v


def _rotated_only(which: str) -> Projected:
    def project(a: Arrangement, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = a.project(x, source)
        plain_q, plain_k, _ = replace(a, rotary="").project(x, source)
        return (q if "q" in which else plain_q), (k if "k" in which else plain_k), v

    return project


def _over_heads(a: Arrangement, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Heads and positions exchanged: each position attends over its own heads."""
    q, k, v = (t.transpose(1, 2) for t in a.project(x, source))
    return q, k, v


def _back_from_heads(a: Arrangement, o: Tensor, x: Tensor) -> Tensor:
    return a.merge(o.transpose(1, 2), x)


def _rotated_apart(a: Arrangement, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q rotated with another pairing of its columns than k."""
    q, k, v = replace(a, rotary="").project(x, source)
    other = {"half": "pairs", "pairs": "half"}.get(a.rotary, "")
    return (rotated(q, other), rotated(k, a.rotary), v) if a.rotary else (q, k, v)


def _biases(**factors: float | str) -> Projected:
    """Projections whose biases are multiplied by these numbers; "√d": by the root of a head's width."""

    def project(a: Arrangement, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        changed: dict[str, Any] = {}
        for role, factor in factors.items():
            matrix = getattr(a, role)
            size = (matrix.w.shape[1] // a.heads) ** 0.5 if factor == "√d" else factor
            changed[role] = Matrix(matrix.w, None if matrix.b is None else matrix.b * size)
        return replace(a, **changed).project(x, source)

    return project


MODULE_FAULTS = (
    ModuleFault(
        "heads are split with view(b, h, n, d) instead of view(b, n, h, d).transpose(1, 2)",
        "head split order",
        "split as (b, n, h, d), then move the head axis",
        project=_viewed,
    ),
    ModuleFault(
        "heads are merged with view instead of transpose: positions and heads are mixed",
        "head split order",
        "move the head axis back before merging: transpose(1, 2).reshape(b, n, h · d)",
        merge=_merged_by_view,
    ),
    ModuleFault(
        "heads are split and merged with view: positions and heads are mixed",
        "head split order",
        "move axes with transpose before and after attention",
        project=_viewed,
        merge=_merged_by_view,
    ),
    ModuleFault(
        "heads are merged in another order than they were split",
        "head split order",
        "merge as (h d) what was split as (h d)",
        merge=_merged_in_other_order,
    ),
    *(
        ModuleFault(
            f"{' and '.join(which)} {'is' if len(which) == 1 else 'are'} split into heads {words}",
            "head split order",
            fix,
            project=_only_some(which, faulty),
        )
        for words, fix, faulty in (
            ("in another order than the others", "split q, k and v alike", _in_other_order),
            (
                "with view instead of transpose",
                "split as (b, n, h, d), then move the head axis",
                _viewed,
            ),
        )
        for which in ("q", "k", "v", "qk", "kv", "qv")
    ),
    *(
        ModuleFault(
            f"{role} is projected with the matrix of {other}",
            "wrong projection",
            f"use W_{role} for {role}",
            project=_wrong_matrix(**{role: other}),
        )
        for role in "qkv"
        for other in "qkv"
        if role != other
    ),
    ModuleFault(
        "q, k and v share the matrix of q",
        "wrong projection",
        "use W_q, W_k and W_v",
        project=_wrong_matrix(k="q", v="q"),
    ),
    *(
        ModuleFault(
            f"{role} is not projected", "projection missing", f"apply W_{role}", project=_unprojected(role)
        )
        for role in "qkv"
    ),
    ModuleFault(
        "the output projection is not applied",
        "projection missing",
        "apply W_o to the merged heads",
        merge=lambda a, o, x: replace(a, o=None).merge(o, x),
    ),
    ModuleFault("the output projection is applied twice", "projection twice", "apply W_o once", merge=_twice),
    *(
        ModuleFault(
            f"cross-attention takes {word} from the input instead of the context",
            "context ignored",
            "project the context for keys and values",
            project=_from_x(which),
        )
        for which, word in (("kv", "keys and values"), ("k", "keys"), ("v", "values"))
    ),
    ModuleFault(
        "rotary positions are applied to v as well",
        "rotary positions",
        "rotate q and k only",
        project=_rotated_value,
    ),
    *(
        ModuleFault(
            f"rotary positions are applied to {word} only",
            "rotary positions",
            "rotate q and k alike",
            project=_rotated_only(which),
        )
        for which, word in (("q", "q"), ("k", "k"))
    ),
    *(
        ModuleFault(
            f"the bias of the projection of {' and '.join(which)} is not added",
            "bias of the projection",
            "add the biases of the input projections",
            project=_biases(**dict.fromkeys(which, 0.0)),
        )
        for which in ("qkv", "q", "k", "v", "qk")
    ),
    ModuleFault(
        "the scale is applied before the bias of q is added, so that the bias is not scaled",
        "scale before the bias",
        "scale q after its projection",
        project=_biases(q="√d"),
    ),
    ModuleFault(
        "the values are computed from the argument key; the argument value has no effect",
        "wrong operand",
        "project the argument value",
        values_of_key=True,
    ),
    ModuleFault(
        "rotary positions pair the columns of q differently from those of k",
        "rotary positions",
        "pair the columns of q and k alike",
        project=_rotated_apart,
    ),
    *(
        ModuleFault(
            "each position attends to its own heads instead of to the positions",
            "head split order",
            "bring q, k and v to (b, h, n, d) before attention",
            project=_over_heads,
            merge=merge,
        )
        for merge in (_back_from_heads, lambda a, o, x: _merged_by_view(a, o.transpose(1, 2), x))
    ),
)
