"""Shape checks by jaxtyping and beartype, of each kind of call once per test.

A training run calls the same functions thousands of times with arguments of the same shapes: with every call checked,
checks take half of its time. And most functions of a process are never called with the checker on: their checks are
compiled at the first call that is checked, not where the function is defined.
"""

import inspect
from functools import wraps
from typing import Any

import jaxtyping
from jaxtyping import _decorator
from torch import Tensor

SEEN: set | None = None  # kinds of calls that this test has checked; None: every call is checked
MANY = 16  # entries of a list that are looked at: beartype looks at one
_jaxtyped = _decorator.jaxtyped


def begin(once: bool) -> None:
    """A new test, which checks each kind of call once, or every call."""
    global SEEN
    SEEN = set() if once else None


def kind(x: Any) -> Any:
    """What the checks of an argument depend on."""
    if isinstance(x, Tensor):
        return type(x), x.shape, x.dtype
    if x is None or isinstance(x, bool | int | str):
        return type(x), x
    if isinstance(x, float):
        return float
    if isinstance(x, tuple | list):
        return type(x), len(x), *map(kind, x[:MANY])
    if isinstance(x, dict):
        return type(x), *((name, kind(value)) for name, value in x.items())
    return type(x), id(x)


def at_first_call(typechecker: Any) -> Any:
    """A checker that compiles the checks of a function when it is called."""

    def later(fn: Any) -> Any:
        checked = None

        def check(*given, **named):
            nonlocal checked
            if checked is None:
                checked = typechecker(fn)
            return checked(*given, **named)

        return check

    return later


def jaxtyped(fn: Any = _decorator._sentinel, *, typechecker: Any = _decorator._sentinel) -> Any:
    """As jaxtyping's, which handles classes, methods and properties by this function."""
    if not inspect.isfunction(fn) or not callable(typechecker):
        return _jaxtyped(fn, typechecker=typechecker)
    checked = _jaxtyped(fn, typechecker=at_first_call(typechecker))

    @wraps(fn)
    def run(*given, **named):
        __tracebackhide__ = True
        if jaxtyping.config.jaxtyping_disable:
            return fn(*given, **named)
        call = None
        if SEEN is not None:
            try:
                call = fn.__code__, kind(given), kind(named)
                is_seen = call in SEEN
            except (TypeError, RuntimeError):  # symbolic sizes have no hash, nested tensors no sizes
                call, is_seen = None, False
            if is_seen:
                return fn(*given, **named)
        out = checked(*given, **named)
        if call is not None and SEEN is not None:
            SEEN.add(call)
        return out

    # Laws are not to take this frame of a traceback for one of the function that they check.
    run.__code__ = run.__code__.replace(co_filename=_decorator.__file__)
    return run


def install() -> None:
    """For modules that are imported after this."""
    jaxtyping.jaxtyped = _decorator.jaxtyped = jaxtyped
