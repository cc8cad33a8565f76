"""What all specs share: a frozen value that can be built, priced, written as JSON and read back."""

from typing import TYPE_CHECKING, Any

from .. import value
from ..errors import SpecError, nearest
from ..pattern import Pattern

if TYPE_CHECKING:
    from torch import nn

    from ..costs.tree import Cost

Number = int | float


class Spec:
    """A declaration. Variants by `dataclasses.replace`; `repr` is source."""

    def build(self) -> "nn.Module":
        """The module, with fresh weights."""
        from ..nn.build import build  # the one import that goes against the order: a spec knows its reader

        return build(self)

    def cost(self, n: int | None = None, m: int | None = None, **how: Any) -> "Cost":
        """What it costs at n queries (and m keys) before it is built: see `regard.cost` for `how`."""
        from ..costs.entry import cost

        return cost(self, n=n, m=m, **how)

    def json(self, indent: int | None = None) -> str:
        return value.to_json(self, indent)

    def __repr__(self) -> str:
        return value.source(self)


def need(ok: bool, message: str) -> None:
    if not ok:
        raise SpecError(message)


def need_positive(spec: Any, *names: str) -> None:
    """Every named field that is given is a whole number above zero."""
    for name in names:
        given = getattr(spec, name)
        if given is not None and (not isinstance(given, int) or isinstance(given, bool) or given < 1):
            raise SpecError(f"{name}={given!r}: a whole number of at least 1 is needed")


def need_fraction(spec: Any, *names: str) -> None:
    for name in names:
        given = getattr(spec, name)
        if not 0.0 <= given < 1.0:
            raise SpecError(f"{name}={given!r} is not in [0, 1)")


def need_word(field: str, word: str, known: tuple[str, ...]) -> None:
    if word not in known:
        raise SpecError(f"{field}={word!r} is unknown; {nearest(word, known)}")


def need_no_data(field: str, pattern: Pattern) -> None:
    if pattern.has_data:
        raise SpecError(
            f"{field}={pattern!r} carries data, which a declaration cannot hold; "
            f"pass it when the module is called: layer(x, pattern=...)"
        )
