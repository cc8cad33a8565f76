"""The base of all specs: a frozen value that can be built, priced, and written to and read from JSON."""

from dataclasses import fields
from html import escape
from typing import TYPE_CHECKING, Any

from .. import value
from ..errors import SpecError, nearest
from ..pattern import Pattern

if TYPE_CHECKING:
    from torch import nn

    from ..costs.result import Cost

Number = int | float


class Spec:
    """A declaration. Variants by `dataclasses.replace`; `repr` is source."""

    def build(self) -> "nn.Module":
        """The module, with newly initialized weights."""
        from ..nn.build import build  # imported late: `nn` imports `spec`

        return build(self)

    def cost(self, n: int | None = None, m: int | None = None, **options: Any) -> "Cost":
        """The cost at n queries (and m keys), without building the model; see `regard.cost` for the options."""
        from ..costs.entry import cost

        return cost(self, n=n, m=m, **options)

    def json(self, indent: int | None = None) -> str:
        return value.to_json(self, indent)

    def __repr__(self) -> str:
        return value.source(self)

    def _repr_html_(self) -> str:
        """The fields that were set, nested and folded, in a notebook."""
        return _folded(type(self).__name__, self, opened=True)


def _folded(name: str, part: Any, opened: bool = False) -> str:
    """A declared value as HTML: its simple fields in one line, its nested declarations folded below."""
    changed = [(f.name, getattr(part, f.name)) for f in fields(part) if getattr(part, f.name) != f.default]
    simple = ", ".join(f"{key}={v!r}" for key, v in changed if not isinstance(v, Spec))
    inner = "".join(_folded(f"{key}: {type(v).__name__}", v) for key, v in changed if isinstance(v, Spec))
    title = f"<b>{escape(name)}</b> <code>{escape(simple)}</code>"
    if not inner:
        return f'<div style="margin-left:1em">{title}</div>'
    return f'<details style="margin-left:1em"{" open" * opened}><summary>{title}</summary>{inner}</details>'


def require(condition: bool, message: str) -> None:
    if not condition:
        raise SpecError(message)


def require_positive(name: str, number: Any) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise SpecError(f"{name}={number!r} is not a positive integer")


def require_positive_fields(spec: Any, *names: str) -> None:
    """Every named field that is not None is a positive integer."""
    for name in names:
        if getattr(spec, name) is not None:
            require_positive(name, getattr(spec, name))


def require_probability(spec: Any, *names: str) -> None:
    for name in names:
        number = getattr(spec, name)
        if not isinstance(number, int | float) or not 0.0 <= number < 1.0:
            raise SpecError(f"{name}={number!r} is not in [0, 1)")


def require_known(field: str, word: str, known: tuple[str, ...]) -> None:
    if word not in known:
        raise SpecError(f"{field}={word!r} is unknown; {nearest(word, known)}")


def require_no_data(field: str, pattern: Pattern) -> None:
    if pattern.text is None:
        raise SpecError(
            f"{field}={pattern!r} carries data, which a declaration cannot contain; "
            f"pass it in the call instead: layer(x, pattern=...)"
        )
