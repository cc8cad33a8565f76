"""A module that equals the formula at some positions and not at others, although it reads the same inputs at all."""

import re

import torch
from torch import Tensor, nn

from ..adapters.module_windows import KEYS_BY_POSITION
from ..adapters.names import mixes_otherwise, text_of
from ..harness import Harness
from ..law import Case
from ..measurement import compare
from .cause import Cause
from .formula import Call, Formula
from .module_samples import Implied, ModuleSample, evaluate
from .projections import Arrangement, mentions, position_tables

MIN_RIGHT = 3  # positions with several keys whose outputs are right
MAX_READ = 4  # wrong positions of which it is found out what they depend on
MAX_LENGTH = 70
SOME_POSITIONS = "outputs are wrong at some positions"  # the family of these causes
NOT_EVEN = (  # terms beside softmax, after which equal inputs may have different outputs
    r"sink|softmax_?(1|one)|\bnull|register|zero_attn|bias_k|gat(e|ing)|conv|decay|retention|linear attention|\bstate"
    r"|sinus|absolute|pos_?emb|learned pos|dropout|residual|\bnorm|memory|global|pool"
)


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
        f"outputs are wrong at positions {some} of {len(right)}", SOME_POSITIONS,
        "compare these positions with the others, which are right: what is in the buffer or the tile there?",
        f"{message} among these positions, in {sample.name}", "", 0, 1, exact=False,
    )  # fmt: skip


def uneven_positions(harness: Harness, module: nn.Module) -> Cause | None:
    """Where all inputs are equal, so are all values, and weights that sum to one give one output at all positions.

    That holds for any mask, window and relative or rotary positions; not for absolute ones, which are excluded.
    """
    model = harness.model
    if model.architecture != "attention" or position_tables(module) or mentions(module, NOT_EVEN):
        return None
    if harness.supports("positions") and not mentions(module, r"\brot|rope|alibi|slope|relative"):
        return None
    if mixes_otherwise(module):
        return None
    harness.seed(Case(seed=0))
    n = model.length or min(11, model.max_length)
    x = harness.sequence(2, 1).expand(-1, n, -1).contiguous()
    with torch.no_grad():
        o = harness.run(x, None, module)
    measured = compare("the output", o, o[:, -1:].expand_as(o))
    if measured.rank <= (1e-9 if o.dtype == torch.float64 else 1e-4):
        return None
    return Cause(
        "weights do not sum to one: positions with equal inputs have different outputs",
        SOME_POSITIONS, "normalize over the keys that take part, and over no others",
        f"{measured.message}, where that of the last position is expected (n = {n}, all inputs equal)",
        "", 0, 1, exact=False,
    )  # fmt: skip


def has_keys_of_its_own(
    harness: Harness, module: nn.Module, a: Arrangement, seen: list[ModuleSample]
) -> bool:
    """Whether a module that speaks of blocks, strides, random keys and the like equals the formula over the keys that
    its outputs depend on: which keys these should be, it alone knows."""
    plain = [s for s in seen if not s.options and s.context is None and s.x.shape[1] <= MAX_LENGTH]
    if (
        not plain
        or harness.model.window is not None
        or not re.search(KEYS_BY_POSITION, text_of(module), re.I)
    ):
        return False
    sample = max(plain, key=lambda s: s.x.shape[1])
    rows = list(range(sample.x.shape[1]))
    allowed = _read(harness, module, sample, rows)
    alone = sample._replace(options={"allowed": allowed[None].to(sample.x.device)})
    want = evaluate(a, Formula(), alone)
    limit = (1e-5 if sample.got.dtype == torch.float64 else 2e-4) * max(1.0, float(want.abs().max()))
    return want.shape == sample.got.shape and bool((sample.got.double() - want).abs().max() <= limit)


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
    return torch.equal(_read(harness, module, sample, rows), allowed[rows])


def _read(harness: Harness, module: nn.Module, sample: ModuleSample, rows: list[int]) -> Tensor:
    """(rows, n): the inputs that the outputs at these positions depend on."""
    columns = []
    other = harness.changed(sample.x)
    with torch.no_grad():
        for j in range(sample.x.shape[1]):
            x = sample.x.clone()
            x[:, j] = other[:, j]
            columns.append((harness.run(x, None, module) - sample.got).abs().amax((0, 2))[rows] > 0)
    return torch.stack(columns, -1).cpu()
