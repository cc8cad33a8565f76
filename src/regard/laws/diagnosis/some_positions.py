"""A module that equals the formula at some positions and not at others, although it reads the same inputs at all."""

import torch
from torch import Tensor, nn

from ..harness import Harness
from ..measurement import compare
from .cause import Cause
from .formula import Call, Formula
from .module_samples import Implied, ModuleSample, evaluate
from .projections import Arrangement

MIN_RIGHT = 3  # positions with several keys whose outputs are right
MAX_READ = 4  # wrong positions of which it is found out what they depend on
MAX_LENGTH = 70


def wrong_positions(
    harness: Harness,
    module: nn.Module,
    a: Arrangement,
    seen: list[ModuleSample],
    implied: Implied,
    limit: float,
) -> Cause | None:
    """Unfilled slots of a ring buffer, a first or last tile: no other formula is right at so many positions.

    A wrong position that depends on other inputs than the formula may have a mask that is not known: no cause.
    """
    plain = [s for s in seen if not s.options and s.context is None and s.x.shape[1] <= MAX_LENGTH]
    sample = max(plain, key=lambda s: s.x.shape[1], default=None)
    if sample is None or harness.model.architecture != "attention":
        return None
    want = evaluate(a, Formula(), sample, None, implied)
    if want.shape != sample.got.shape:
        return None
    size = max(1.0, float(want.abs().max()))
    right = ((sample.got.double() - want).abs().amax((0, 2)) <= limit * size).cpu()
    allowed = _allowed(sample, implied)
    if int((right & (allowed.sum(-1) > 1)).sum()) < MIN_RIGHT or bool(right.all()):
        return None
    wrong = (~right).nonzero().flatten()
    if not _reads_the_same(harness, module, sample, allowed, wrong[:MAX_READ].tolist()):
        return None
    some = ", ".join(str(i) for i in wrong[:MAX_READ].tolist()) + (", …" if len(wrong) > MAX_READ else "")
    message = compare("the output", sample.got[:, wrong], want[:, wrong]).message
    return Cause(
        f"outputs are wrong at positions {some} of {len(right)}", "outputs are wrong at some positions",
        "compare these positions with the others, which are right: what is in the buffer or the tile there?",
        f"{message} among these positions, in {sample.name}", "", 0, 1, exact=False,
    )  # fmt: skip


def _allowed(sample: ModuleSample, implied: Implied) -> Tensor:
    """(n, n): the pairs that the formula allows."""
    n = sample.x.shape[1]
    x = torch.zeros(1, 1, n, 1)
    allowed = Formula().allowed(Call(x, x, x, implied))
    return torch.ones(n, n, dtype=torch.bool) if allowed is None else allowed[0, 0]


def _reads_the_same(
    harness: Harness, module: nn.Module, sample: ModuleSample, allowed: Tensor, rows: list[int]
) -> bool:
    """Whether outputs at these positions depend on the inputs that the formula allows, and on no others."""
    columns = []
    other = harness.changed(sample.x)
    with torch.no_grad():
        for j in range(sample.x.shape[1]):
            x = sample.x.clone()
            x[:, j] = other[:, j]
            columns.append((harness.run(x, None, module) - sample.got).abs().amax((0, 2))[rows] > 0)
    return torch.equal(torch.stack(columns, -1).cpu(), allowed[rows])
