"""The tasks of the service's worker processes: each takes the fields of a request and returns plain values."""

import json
import os
import signal
import traceback
from collections.abc import Callable
from math import isfinite
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import regard

from .. import spec, value
from ..costs.entry import cost as price
from ..engine.backends import TABLE
from ..engine.explain import facts_from
from ..errors import RegardError, SpecError, nearest
from ..pattern import full
from . import studio_tasks
from .studio_tasks import HEADS, WIDTH, drawn_pattern

NICENESS = 10  # of a worker process: the lowest are 19, the server's is 0
MAX_EXPLAINED = 1 << 17  # positions of a pattern that is explained
MAX_DRAWN = 64  # positions that are drawn


def pattern(fields: dict[str, Any]) -> dict[str, Any]:
    """The count, the drawing and the explanation of a pattern."""
    parsed, n = drawn_pattern(fields["pattern"]), fields["n"]
    count = parsed.count(n)
    rows = parsed.allowed(min(n, MAX_DRAWN)).int().tolist()
    explained = estimate = None
    if n <= MAX_EXPLAINED:
        how = {"n": n, "device": fields["device"], "grad": fields["train"]}
        explanation = regard.explain(parsed, **how)
        explained, estimate = str(explanation), _estimate(explanation, how)
    return {
        "pattern": repr(parsed),
        "count": str(count),  # as text: JavaScript's numbers are exact up to 2⁵³
        "pairs": str(n**2),
        "share": count / n**2,
        "rows": ["".join("01"[x] for x in row) for row in rows],
        "explained": explained,
        "estimate": estimate,
    }


def _estimate(explanation: Any, how: dict[str, Any]) -> dict[str, Any]:
    """FLOPs and estimated seconds of HEADS heads of width WIDTH, beside attention without a mask.

    The seconds are those by which a backend is chosen, fitted on two CPU cores and on an H200.
    """
    sizes = {"heads": HEADS, "d_k": WIDTH, **how}
    dense = regard.explain(full(), **sizes)
    each = 4 * WIDTH * HEADS * (3.5 if how["grad"] else 1.0)  # a backward pass has 2.5 times the products
    both = [_finite(TABLE[e.backend].estimate(facts_from(e.pattern, **sizes))) for e in (explanation, dense)]
    return {
        "heads": HEADS,
        "width": WIDTH,
        "flops": each * explanation.needed,
        "dense_flops": each * how["n"] ** 2,
        "seconds": both[0],
        "dense_seconds": both[1],
    }


def _finite(x: float) -> float | None:
    return x if isfinite(x) else None


def cost(fields: dict[str, Any]) -> dict[str, Any]:
    """The cost of a preset or a declaration."""
    model = fields.pop("model")
    if isinstance(model, dict):
        declared = value.from_plain(model, spec.KINDS)
        if not isinstance(declared, spec.Spec):
            raise SpecError(f"a declaration of a model is needed, not {declared!r:.60}")
    elif model in spec.presets():
        declared = spec.preset(model)
    else:
        raise SpecError(f"unknown preset {model!r}; {nearest(model, spec.presets())}")
    sizes = {**fields, "n": None} if isinstance(declared, spec.Vision) else fields
    result = price(declared, **sizes)
    return {"text": str(result), "cost": result.plain()}


TASKS: dict[str, Callable[[dict[str, Any]], Any]] = {"pattern": pattern, "cost": cost, **studio_tasks.TASKS}


def serve(pipe: Connection, memory: int) -> None:
    """The loop of a worker process: one request after the other, until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the server, and the server ends its workers
    if hasattr(os, "nice"):
        os.nice(NICENESS)  # the server answers the page while all cores compute
    _limit_memory(memory)
    pipe.send_bytes(b"ready")
    while True:
        try:
            task, fields = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(json.dumps(_answer(task, fields, memory)).encode())


def _answer(task: str, fields: dict[str, Any], memory: int) -> tuple[str, Any]:
    too_large = f"this needs more than the {memory / (1 << 30):g} GiB that this server allows"
    try:
        return "", TASKS[task](fields)
    except RegardError as error:
        return "error", str(error)
    except RecursionError:
        return "error", "this is nested too deeply"
    except MemoryError:
        return "error", too_large
    except (RuntimeError, TypeError) as error:
        if "allocate memory" in str(error):
            return "error", too_large
        if "verflow when unpacking" in str(error):  # PyTorch, of a size that has no 64 bits
            return "error", "a number is too large for a size"
        return "bug", traceback.format_exc()
    except OverflowError as error:
        return "error", f"a number is too large: {error}"
    except Exception:
        return "bug", traceback.format_exc()


def _limit_memory(extra: int) -> None:
    """Bound the address space of this process to what it has now and `extra` bytes, where the system can."""
    status = Path("/proc/self/statm")
    if status.is_file():
        import resource

        now = int(status.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + extra, now + extra))
