"""Which way to run a call, and why. A way asked for by name never falls back in silence."""

from typing import NamedTuple

from ..errors import BackendError, SpecError, nearest
from ..pattern import causal, full
from .call import Call

BACKENDS = ("auto", "dense", "masked", "plain")


class Choice(NamedTuple):
    backend: str
    reason: str


def choose(call: Call, backend: str = "auto") -> Choice:
    if backend not in BACKENDS:
        raise SpecError(f"unknown backend {backend!r}; {nearest(backend, BACKENDS)}")
    if backend == "auto":
        return _auto(call)
    if refusal := _cannot(call, backend):
        raise BackendError(f"backend={backend!r} cannot run this: {refusal}")
    return Choice(backend, "asked for by name")


def _auto(call: Call) -> Choice:
    if call.hard:
        return Choice("plain", "hard attention has no softmax to fuse")
    if call.return_lse:
        return Choice("plain", "the log-sum-exp is asked for")
    if call.plain and _some_pairs(call) and _full_or_causal(call):  # no message: it would fix the sizes in a trace
        return Choice("dense", "every pair, or every past one: PyTorch's own attention as it is")
    return Choice("masked", f"{call.pattern!r} by a table of allowed pairs")


def _cannot(call: Call, backend: str) -> str | None:
    """Why this way cannot run the call; None if it can."""
    if backend != "plain" and call.hard:
        return "scale=inf has no softmax; use backend='plain'"
    if backend != "plain" and call.return_lse:
        return "it gives no log-sum-exp; use backend='plain'"
    if backend == "dense":
        if not call.plain:
            return "a bool tensor, lengths or a bias needs a mask; use backend='masked'"
        if not _some_pairs(call):
            return "there are no pairs"
        if not _full_or_causal(call):
            return f"{call.pattern!r} over {call.n} queries and {call.m} keys is neither full nor square causal"
    return None


def _some_pairs(call: Call) -> bool:
    return call.n != 0 and call.m != 0


def _full_or_causal(call: Call) -> bool:
    """Every pair; or every past one, for as many queries as keys or one query at the end."""
    if isinstance(call.pattern, full):
        return True
    return isinstance(call.pattern, causal) and call.at is None and (call.n == call.m or call.n == 1)
