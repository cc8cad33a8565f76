"""The table of backends: which one runs a call, and why. `attention`, `explain` and `cost` read this table alone.

reference  the formula, a chunk of queries at a time; every call
sdpa       PyTorch's own attention, dense or with a mask
tiles      on the CPU, only the keys of the pattern
triton     on CUDA, only the keys of the pattern
flex       compiled FlexAttention: what data or a function decide, on CUDA
flash4     FlashAttention-4's kernels on CUDA, where its package is installed
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from math import isinf
from typing import Any, Protocol, runtime_checkable

import torch

from .. import compat
from ..errors import BackendError, SpecError, nearest
from ..pattern import full
from .call import Cache, CallFacts, Prepared
from .cpu.backend import Tiles
from .cuda.backend import Triton
from .flash4 import Flash4
from .flex import Flex
from .reference_backend import Reference
from .sdpa import Sdpa


@runtime_checkable
class Backend(Protocol):
    """A method to compute attention exactly."""

    name: str

    @property
    def automatic(self) -> tuple[str, ...]:
        """The device types on which it is considered without being named."""

    def refuses(self, f: CallFacts) -> str | None:
        """Why it cannot run this call; None: it can."""

    def estimate(self, f: CallFacts) -> float:
        """About how long it takes, in seconds; inf: it is never the fastest."""

    def prepare(self, f: CallFacts) -> Prepared:
        """All that depends on shapes alone, done or ready to be done at the first call."""


TABLE: dict[str, Backend] = {b.name: b for b in (Reference(), Sdpa(), Tiles(), Triton(), Flex(), Flash4())}
BACKENDS = ("auto", *TABLE)

_named: ContextVar[str] = ContextVar("backend", default="auto")
_open: list[str] = []  # of all threads: a compiled graph is guarded by a list, and reads no ContextVar


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Within it, attention runs by this backend: for modules and models, whose calls do not name one.

        with rg.backend("reference"):
            expected = model(x)

    A call's own backend="…" comes first; of several contexts, the innermost; "auto" gives the choice back. A backend
    that cannot run a call raises a BackendError, as with backend=. It holds in this thread or task. A backward pass
    belongs to its forward pass. Under torch.compile the graph breaks at attention; fullgraph=True raises an error.
    """
    _require_known(name)
    token = _named.set(name)
    _open.append(name)
    try:
        yield
    finally:
        _open.remove(name)
        _named.reset(token)


def named(own: str = "auto") -> str:
    """The name of the backend of a call: its own, or that of the context."""
    if type(own) is not str:  # it may have no hash
        _require_known(own)
    within = own == "auto" and _open
    return _of_context() if within else own  # rg.backend(…) breaks a graph: for fullgraph=True, use backend=


@compat.not_compiled
def _of_context() -> str:
    return _named.get()


def _require_known(name: str) -> None:
    if name not in BACKENDS:
        raise SpecError(f"unknown backend {name!r}; {nearest(name, BACKENDS)}")


def choose(f: CallFacts, backend: str = "auto") -> Prepared:
    """The call prepared by the backend of that name, or by the fastest that can run it."""
    _require_known(backend)
    if compat.sizes_are_symbols():
        return _prepare(f, backend)
    calls, key = PREPARED, (f, backend)
    if f.pattern.text is None:
        # It is compared by identity, and its data may change. (NumPy may change a CPU tensor unnoticed.)
        state = f.pattern.state() if f.device_type == "cuda" and not f.observed else None
        if state is None:
            return _prepare(f, backend)
        calls, key = calls_with_data(f.pattern, state), (replace(f, pattern=full()), backend)
    return calls.get(key) or calls.put(key, _prepare(f, backend))


def calls_with_data(pattern: Any, state: tuple) -> Cache:
    """The same as PREPARED for the calls of one pattern with data as they are now."""
    return (PREPARED_BY_DATA.get(state) or PREPARED_BY_DATA.put(state, (Cache(64), pattern.values())))[0]


def _prepare(f: CallFacts, backend: str) -> Prepared:
    compiling, chosen, reason = compat.sizes_are_symbols(), TABLE.get(backend), "requested by name"
    if chosen is None or (why := _refusal(chosen, f)):
        best, reason = (_without_sizes(f), "") if compiling else _fastest(f)
        if chosen is not None:
            raise BackendError(f"backend={backend!r} cannot run this: {why}; use backend={best.name!r}")
        chosen = best
    prepared = chosen.prepare(f)
    reason = f"{reason}; {prepared.note}" if prepared.note else reason
    return prepared if compiling else replace(prepared, reason=reason)


def _refusal(backend: Backend, f: CallFacts) -> str | None:
    if torch.jit.is_tracing() and backend.name not in ("reference", "sdpa"):
        return "torch.jit.trace records PyTorch's own operations, and no others"
    higher = f.higher and backend.name != "reference"
    return "only the formula has forward-mode and second derivatives here" if higher else backend.refuses(f)


def _fastest(f: CallFacts) -> tuple[Backend, str]:
    """The backend with the smallest estimate of those that do not refuse, and why."""
    # A checkpoint may run without gradients what it repeats with them: dropout has to draw the same numbers.
    f = replace(f, grad=True, bias_grad=False) if f.dropout_p else f
    device = f.device_type if f.device_type in ("cpu", "cuda") else "other"
    times: list[tuple[float, Backend]] = []
    reasons = []
    for backend in TABLE.values():
        if device not in backend.automatic or not getattr(backend, "installed", True):  # some need a package
            continue
        if why := _refusal(backend, f):
            reasons.append(f"{backend.name} cannot: {why}")
        else:
            times.append((backend.estimate(f), backend))
    times = sorted((pair for pair in times if not isinf(pair[0])), key=lambda pair: pair[0])
    # SDPA's CUDA kernel for masks computes a float32 product by three in TF32; dq was off by 1.2 × the tolerance.
    rounds = device == "cuda" and f.grad and f.dtype == torch.float32 and not f.unmasked
    if rounds or (device == "cuda" and f.makes_table):
        rounding = "sdpa's kernel for masks rounds gradients in float32 more than the formula does"
        if without_sdpa := [pair for pair in times if pair[1].name != "sdpa"]:
            why = "sdpa would hold a table of all pairs" if f.makes_table else rounding
            reasons += [why] if len(without_sdpa) < len(times) else []
            times = without_sdpa
        elif times and rounds:
            reasons.append(f"{rounding}: backend='reference' is more exact, and slower")
    if len(times) > 1:
        (shortest, _), (next_time, runner_up), *_ = times
        reasons.insert(0, f"about {next_time / max(shortest, 1e-12):.1f} × faster than {runner_up.name}")
    chosen = times[0][1] if times else TABLE["reference"]
    return chosen, "; ".join(reasons) or "no other backend is for this device"


def _without_sizes(f: CallFacts) -> Backend:
    """The choice inside a compiled graph, whose sizes may be symbols: nothing that compares times. Under torch.func
    only PyTorch's own operations: it has no rules for others, and would take their forward derivatives for 0."""
    has_dropout = f.dropout_p > 0 and f.bias != "distance"
    tiles = () if f.pattern.has_data or has_dropout else ("tiles",)  # a graph does not know the ids
    kernels = ("flex", "triton") if f.pattern.has_data else ("triton",)
    sparse = () if compat.transforms_active() else {"cpu": tiles, "cuda": kernels}.get(f.device_type, ())
    dense = f.unmasked and not f.needs_lse
    for name in (*(() if dense else sparse), "sdpa"):
        if not _refusal(TABLE[name], f):
            return TABLE[name]
    return TABLE["reference"]


# Prepared calls by (facts, backend), and the functions (q, k, v) → o of calls without further arguments, by the key
# that `attention._cache_key` computes.
PREPARED = Cache(256)
# The same of patterns with data, by state; with the values of these, so that the id of a tensor stays its own.
PREPARED_BY_DATA = Cache(8)
