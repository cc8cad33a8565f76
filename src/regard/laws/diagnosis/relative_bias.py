"""Relative positions inside a module: the weights of equal inputs must depend on j − i alone.

Where all inputs are equal, so are all values, and changed weights do not change their mean: ∂ o_i/∂ x_j =
Σ_h a_hij W_v^h W_o^h, from which the weights of each head follow. Where all inputs are 0, they are the softmax of a
learned bias by distance, which must also tell the two sides apart; elsewhere rotary positions take part in them.
"""

import copy

import torch
from einops import rearrange
from torch import Tensor, nn

from ...reference import repeat_heads
from ..adapters.names import size_of
from ..harness import Harness
from ..law import Case
from .cause import Cause
from .projections import Arrangement, arrangements, mentions, position_tables

RELATIVE = r"relative|\brel_|\bt5\b|\bt5-|rel_?pos|distance"
GRIDS = r"swin|2-?d\b|two-dimensional|height|image|patch|grid|axial"  # distances in more than one direction
ROTARY = r"\brotary|\brope\b|(?<![a-z])rope_|rotary_"
NOT_BY_DISTANCE = (  # positions that restart, that have several axes, or that also change the scale of the scores
    rf"{GRIDS}|3-?d\b|video|mrope|section|chunk|document|segment|restart|reset|temperature|log_?n\b|absolute|sinus|learned"
)
MAX_READINGS = 12
MIN_POSITIONS, MAX_POSITIONS = 24, 140  # more than the table has rows, where that is not too many
REACHES = ("max_distance", "reach", "max_relative_position", "max_relative_positions", "longest")
PROJECTIONS = 2  # random directions of the output, so that heads can be distinguished
FIX = "index the table with j − i, clamped to its reach, and move the axis of heads to the front with permute"


def relative_fault(harness: Harness, module: nn.Module) -> Cause | None:
    """A fault of the bias by distance of a module that says that it has one; None where none is seen."""
    model = harness.model
    if (
        model.architecture != "attention"
        or model.length is not None
        or harness.target.declares("grad") is False
    ):
        return None
    if not mentions(module, RELATIVE) or mentions(module, GRIDS):
        return None
    module = copy.deepcopy(module)
    tables = position_tables(module)
    if not tables:
        return None
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for table in tables:  # a table that was initialized with zeros shows nothing
            table.copy_(torch.randn(table.shape, generator=g).to(table))
    reach = size_of(module, REACHES) or max(max(table.shape) for table in tables)
    n = min(max(reach + 4, MIN_POSITIONS), MAX_POSITIONS, model.max_length)
    weights = equal_input_weights(harness, module, torch.zeros(1, n, model.d_model or 0))
    if weights is None:
        return None
    words = _fault(harness, module, weights.log(), tables)
    if words is None:
        return None
    evidence = f"with all inputs 0 and random tables, in a call with n = {n}: {words[1]}"
    return Cause(words[0], "position bias", FIX, evidence, "", 1, 1)


def rotary_fault(harness: Harness, module: nn.Module) -> Cause | None:
    """A fault of the rotary positions of a module that says that it has them; None where none is seen."""
    model = harness.model
    if (
        model.architecture != "attention"
        or harness.target.declares("grad") is False
        or position_tables(module)
    ):
        return None
    if not mentions(module, ROTARY) or mentions(module, NOT_BY_DISTANCE):
        return None
    n = model.length or min(9, model.max_length)
    harness.seed(Case(seed=0))
    x = harness.sequence(1, 1).expand(-1, n, -1)
    weights = equal_input_weights(harness, copy.deepcopy(module), x)
    limit = 1e-3 if harness.dtype == torch.float64 else 1e-2  # angles are usually computed in float32
    if weights is None:
        return None
    headline = "with rotary positions the weights depend on more than j − i"
    words = _by_more(harness, weights.log(), "weight", limit)
    if words is None and (words := _queries_alone(harness, module, weights, limit)) is not None:
        headline = "only the queries are rotated, not the keys"
    if words is None:
        return None
    return Cause(
        headline, "rotary positions",
        "rotate q and k alike: by the angle position · frequency, in the same direction",
        f"with equal inputs, in a call with n = {n}: {words}", "", 1, 1,
    )  # fmt: skip


def equal_input_weights(harness: Harness, module: nn.Module, x: Tensor) -> Tensor | None:
    """(h, n, n): the weights of each head for inputs that are all equal; None where no reading of the projections
    gives them."""
    n = x.shape[1]
    harness.seed(Case(seed=n))
    x = x.to(harness.device, harness.dtype).clone().requires_grad_()
    try:
        out = harness.run(x, None, module)
        directions = harness.randn(PROJECTIONS, out.shape[-1])
        columns = [
            torch.stack([torch.autograd.grad(out[0, i] @ r, x, retain_graph=True)[0][0] for i in range(n)])
            for r in directions
        ]  # per direction (i, j, d)
    except Exception:  # foreign code; the laws report what raises
        return None
    jacobian = torch.cat(columns, -1).double()
    limit = 1e-7 if harness.dtype == torch.float64 else 1e-3
    for a in list(arrangements(module))[:MAX_READINGS]:
        if 2 * a.heads > PROJECTIONS * x.shape[-1] or a.residual:
            continue
        maps = _maps(a, directions.double())
        found = torch.linalg.lstsq(maps, rearrange(jacobian, "i j d -> d (i j)")).solution
        left = (maps @ found - rearrange(jacobian, "i j d -> d (i j)")).abs().max()
        weights = rearrange(found, "h (i j) -> h i j", i=n)
        total = (weights.sum(-1) - 1).abs().max()
        if float(left) < limit and float(total) < 10 * limit and float(weights.min()) > -limit:
            return weights.clamp(min=0.0)
    return None


def _maps(a: Arrangement, directions: Tensor) -> Tensor:
    """(directions · d, h): W_v^h W_o^h r, the part of each head in ∂(o·r)/∂x."""
    w_v = repeat_heads(a.split(a.v.w[None], a.kv_heads), a.heads)[0]
    width = a.heads * w_v.shape[-1]
    out = torch.eye(width, dtype=w_v.dtype) if a.o is None else a.o.w
    w_o = rearrange(out, f"{a.order} e -> h d e", h=a.heads)
    return rearrange(w_v @ w_o @ directions.mT, "h d r -> (r d) h")


def _fault(harness: Harness, module: nn.Module, logs: Tensor, tables: list[Tensor]) -> tuple[str, str] | None:
    """What is wrong with ln a, (h, n, n), in words, and the evidence."""
    limit = 1e-5 if harness.dtype == torch.float64 else 1e-2
    if (words := _by_more(harness, logs, "bias", limit)) is not None:
        return "the bias by distance depends on more than j − i", words
    if harness.supports("always causal") or not bool(torch.isfinite(logs).all()):
        return None
    future, past = logs[:, 0] - logs[:, 0, :1], (logs[:, -1] - logs[:, -1, -1:]).flip(-1)
    return _sides(harness, module, past[:, 1:], future[:, 1:], tables, limit)


def _by_more(harness: Harness, logs: Tensor, name: str, limit: float) -> str | None:
    """Where ln a, (h, n, n), depends on more than j − i, up to a number per row."""
    n, causal = logs.shape[-1], harness.supports("always causal")
    for i in range(1, n - 1):
        stop = i + 1 if causal else n - 1  # keys that both queries have
        step = logs[:, i + 1, 1 : stop + 1] - logs[:, i, :stop]
        apart = (step - step[:, :1]).abs().amax(0).nan_to_num(0.0)
        if float(apart.max()) > limit:
            j = int(apart.argmax())
            return f"the {name} of ({i}, {j}) and ({i + 1}, {j + 1}) differ by {float(apart.max()):.3g}"
    return None


def _queries_alone(harness: Harness, module: nn.Module, weights: Tensor, limit: float) -> str | None:
    """Where equal keys have equal weights at any distance, although a query's position changes its output.

    Of two inputs in turn, every second query sees each of them equally often: without positions, and with a function
    of j − i that is constant, its output is always the same.
    """
    n, exact = weights.shape[-1], 1e-6 if harness.dtype == torch.float64 else 1e-4
    seen = torch.ones(n, n, dtype=weights.dtype, device=weights.device)
    seen = seen.tril() if harness.supports("always causal") else seen
    if n < 4 or float((weights - seen / seen.sum(-1, keepdim=True)).abs().max()) > exact:
        return None
    with torch.no_grad():
        in_turn = harness.sequence(1, 2).repeat(1, n, 1)[:, :n]
        out = harness.run(in_turn, None, module)[0, 1::2]
    apart = (out - out[:1]).abs().amax(-1) / out.abs().max()
    if float(apart.max()) <= limit:
        return None
    far = 2 * int(apart.argmax()) + 1
    return (
        f"all weights of a query are equal; of two inputs in turn, the outputs at 1 and {far} differ by "
        f"{float(apart.max()):.2g} of the largest"
    )


def _sides(
    harness: Harness, module: nn.Module, past: Tensor, future: Tensor, tables: list[Tensor], limit: float
) -> tuple[str, str] | None:
    """Both (h, n − 1), by distance: keys before and after a query must not share rows of a table by mistake."""
    same = (past[:, :, None] - future[:, None]).abs().amax(0) <= limit
    if bool(same.diagonal().all()):
        unused = _unused_rows(harness, module, past.shape[-1] + 1, tables)
        if not unused:
            return None  # one bias for both sides, on purpose: the table has no other rows
        return (
            "the distance has lost its sign: keys before and after a query share one bias",
            f"the bias is the same on both sides, and {unused} rows of the table are never read",
        )
    same &= ~(_tail(past, limit)[:, None] & _tail(future, limit))
    if bool(same.any()):
        back, on = (int(d) + 1 for d in same.nonzero()[0])
        return (
            "distances past the reach of the table take rows of the other side",
            f"the keys at i − {back} and i + {on} have one bias",
        )
    many = [float((side - side[:, :1]).abs().max()) > limit for side in (past, future)]
    if many[0] != many[1] and not (harness.supports("mask") or harness.supports("causal")):
        which = "after" if many[0] else "before"
        return (
            f"all keys {which} a query share one bias",
            f"the bias of the keys {which} i does not depend on j",
        )
    return None


def _tail(side: Tensor, limit: float) -> Tensor:
    """Distances from which on the bias is constant: past the reach of the table."""
    moves = (side - side[:, -1:]).abs().amax(0) > limit
    return ~moves.flip(-1).cumsum(-1).flip(-1).bool()


def _unused_rows(harness: Harness, module: nn.Module, n: int, tables: list[Tensor]) -> int:
    """Rows of the tables without a gradient, if they are a third of a table or more."""
    harness.seed(Case(seed=1))
    out = harness.run(harness.sequence(1, n), None, module)
    grads = torch.autograd.grad((out * harness.randn(*out.shape)).sum(), tables, allow_unused=True)
    for grad in grads:
        if grad is None:
            continue
        longest = max(range(grad.dim()), key=lambda axis: grad.shape[axis])
        unused = int((grad.movedim(longest, 0).flatten(1).abs().amax(1) == 0).sum())
        if 3 * unused >= grad.shape[longest] and unused < grad.shape[longest]:
            return unused
    return 0
