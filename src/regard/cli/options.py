"""A command whose options are the fields of a dataclass."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any


def with_options(kind: Any, run: Callable[[Any], None]) -> Callable[..., None]:
    """A command whose options are the fields of this dataclass: one value in place of seventeen arguments."""

    def command(**given: Any) -> None:
        run(kind(**given))

    by_name, none = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                f.name, by_name, default=none if f.default is MISSING else f.default, annotation=f.type
            )
            for f in fields(kind)
        ]
    )
    command.__annotations__ = {f.name: f.type for f in fields(kind)}
    command.__doc__, command.__name__ = run.__doc__, run.__name__
    return command
