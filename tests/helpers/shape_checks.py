"""Shape checks by jaxtyping and beartype, of each kind of call once.

A training run calls the same functions thousands of times with arguments of the same shapes: with every call
checked, checks take half of its time. A call that has only tensors, numbers and words is checked once per process,
one that has other objects, such as a module, once per test. Most functions of a process are never called with the
checker on: their checks are made at the first call that is checked, not where the function is defined. Functions that
state no shape are checked only where every call is.
"""

import inspect
import re
import sys
from functools import wraps
from typing import Any

import jaxtyping
from jaxtyping import _decorator
from torch import Tensor

SEEN: set | None = None  # kinds of calls that this test has checked; None: every call is checked
EVER: set = set()  # kinds of calls that a test of this process has checked, without objects that may be gone
STATED = re.compile(r"jaxtyping|\b(Float|Int|Bool|Real|Complex|Shaped)\[")
# Where only some calls are checked, functions that state no shape are left as they are: a call costs nothing more.
LEAVES_OTHERS = any(word.startswith("--checked-cases") for word in sys.argv)
STATES: dict = {}  # code of functions: whether they state shapes
MANY = 16  # entries of a list that are looked at: beartype looks at one
_jaxtyped = _decorator.jaxtyped


def begin(once: bool) -> None:
    """A new test, which checks each kind of call once, or every call."""
    global SEEN
    SEEN = set() if once else None


def kind(x: Any, others: list) -> Any:
    """What the checks of an argument depend on; others gets the objects that are known by their identity only."""
    if isinstance(x, Tensor):
        return type(x), x.shape, x.dtype
    if x is None or isinstance(x, bool | int | str):
        return type(x), x
    if isinstance(x, float):
        return float
    if isinstance(x, tuple | list):
        return type(x), len(x), *[kind(y, others) for y in x[:MANY]]
    if isinstance(x, dict):
        return type(x), *[(name, kind(value, others)) for name, value in x.items()]
    others.append(x)
    return type(x), id(x)


def states_shapes(fn: Any) -> bool:
    """Found once: an inner function is decorated each time that it is defined."""
    if fn.__code__ not in STATES:
        STATES[fn.__code__] = _states_shapes(fn)
    return STATES[fn.__code__]


def _states_shapes(fn: Any) -> bool:
    return any(STATED.search(str(hint)) for hint in getattr(fn, "__annotations__", {}).values())


def jaxtyped(fn: Any = _decorator._sentinel, *, typechecker: Any = _decorator._sentinel) -> Any:
    """As jaxtyping's, which handles classes, methods and properties by this function."""
    if not inspect.isfunction(fn) or not callable(typechecker):
        return _jaxtyped(fn, typechecker=typechecker)
    checked, has_shapes = None, states_shapes(fn)
    if LEAVES_OTHERS and not has_shapes:
        return fn

    @wraps(fn)
    def run(*given, **named):
        __tracebackhide__ = True
        nonlocal checked
        if jaxtyping.config.jaxtyping_disable or (SEEN is not None and not has_shapes):
            return fn(*given, **named)
        call = None
        if SEEN is not None:
            try:
                others = list(
                    fn.__closure__ or ()
                )  # what an inner function reads may be another time something else
                call = fn.__code__, kind(given, others), kind(named, others)
                seen = SEEN if others else EVER
                is_seen = call in seen
            except (TypeError, RuntimeError):  # symbolic sizes have no hash, nested tensors no sizes
                call, is_seen = None, False
            if is_seen:
                return fn(*given, **named)
        if checked is None:
            checked = _jaxtyped(fn, typechecker=typechecker)
        out = checked(*given, **named)
        if call is not None:
            seen.add(call)
        return out

    # Laws are not to take this frame of a traceback for one of the function that they check.
    run.__code__ = run.__code__.replace(co_filename=_decorator.__file__)
    return run


def install() -> None:
    """For modules that are imported after this."""
    jaxtyping.jaxtyped = _decorator.jaxtyped = jaxtyped
