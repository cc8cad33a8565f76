"""The likely cause from the laws that are broken and from which output depends on which input."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..harness import Harness
from ..law import Case, Outcome
from ..probe import describe
from ..target import Function, Model
from .cause import Cause

DETACHED = "remove detach(), .data or no_grad; correct the backward pass"
AXES = "move axes with transpose, not with view or reshape"
LSE = "return ln Σ exp(scores) over the allowed keys"
BEFORE = "mask padded keys before softmax"

# Laws of functions that any wrong output breaks, whatever the fault is.
OF_EVERY_OUTPUT = {"L19", "L20", "L48", "L56", "L57", "L60", "L62"}
VALUES = {"L01", "L05", "L06", "L34", "L61"}  # wrong outputs: wrong gradients follow from them

# law → fault, family, fix; the first broken one in this order is the cause.
BY_LAW = {
    "L50": ("a gradient is missing or wrong", "input detached", DETACHED),
    "L56": (
        "dropout or another random part is active in evaluation",
        "dropout in evaluation",
        "F.dropout(x, p, training=self.training)",
    ),
    "L48": ("batch rows are mixed", "batch rows mixed", "compute each batch row by itself"),
    "L62": (
        "a call depends on earlier calls, or changes its input",
        "state between calls",
        "keep no state between calls",
    ),
    "L29": ("queries attend to the future", "causal ignored", "mask keys j > i in every layer"),
    "L59": (
        "a position depends on other inputs than those of its window",
        "window ignored",
        "mask pairs outside the window; a buffer holds the last keys of the window and no others",
    ),
    "L19": ("the output depends on the order of the input", "head split order", AXES),
    "L20": ("the output depends on the order of the context", "head split order", AXES),
    "L31": ("padding has an effect", "padding ignored", BEFORE),
    "L49": (
        "left padding has an effect",
        "padding side",
        "mask padding on either side, and skip it in positions",
    ),
    "L32": ("a padded batch differs from each sequence by itself", "padding ignored", BEFORE),
    "L33": (
        "decoding with a cache differs from the full pass",
        "cache offset",
        "continue positions and the causal mask where the cache ends",
    ),
    "L52": (
        "decoding in chunks differs from the full pass",
        "cache offset",
        "align the causal mask of a chunk with the end of the keys",
    ),
    "L47": ("packed documents are not isolated", "documents leak", "mask pairs of different documents"),
    "L34": ("the mask has the wrong effect", "mask ignored", "apply the mask to the scores before softmax"),
    "L58": ("causal is aligned wrongly where n ≠ m", "causal alignment", "the offset of query 0 is m − n"),
    "L63": ("dropout does not preserve the mean", "dropout scale", "divide the kept weights by 1 − p"),
    "L53": ("the log-sum-exp is wrong", "log-sum-exp", LSE),
    "L04": ("the log-sum-exp is wrong", "log-sum-exp", LSE),
    "L57": ("strides of the inputs are ignored", "strides ignored", "use strides, or call contiguous()"),
    "L64": ("options do not work together", "mask ignored in combination", "let every option take effect"),
    "L60": ("precision is lost in a 16-bit dtype", "precision lost", "accumulate in float32"),
    "P03": (
        "a query without an allowed key does not get zeros and finite gradients, as promised",
        "empty rows",
        "set its weights to 0 before the product",
    ),
    "P11": (
        "scores overflow in float16, against the promise",
        "overflow",
        "scale q before the product, or compute the scores in float32",
    ),
    "L06": ("the module differs from the formula", "outputs are wrong", "compare with softmax(q kᵀ/√d_k) v"),
    "L35": (
        "a position depends on inputs that its masks hide",
        "mask ignored",
        "apply the mask in every layer",
    ),
}


FAMILIES = {family for _, family, _ in BY_LAW.values()} | {
    "causal off by one",
    "causal inverted",
    "padding inverted",
}
FAMILIES |= {"padding off by one"}


def from_laws(harness: Harness, outcomes: Sequence[Outcome]) -> Cause | None:
    """A cause from the first broken law that points to one; None if no law is broken."""
    broken = {o.law.number: o for o in outcomes if o.failed}
    if not broken:
        return None
    if isinstance(harness.target, Model) and all(o.status == "raised" for o in broken.values()):
        return _failing_calls(next(iter(broken.values())))
    follows = "L50" in broken and "reached" not in broken["L50"].message and VALUES & set(broken)
    # A single row from which the mean of all rows is subtracted has no gradient.
    mixes = "L48" in broken and isinstance(harness.target, Model)
    order = [n for n in BY_LAW if n in broken and not (n == "L50" and (follows or mixes))]
    # A call that raised says nothing about the other laws.
    order = [n for n in order if not broken[n].message.startswith("raised")] or order
    values = sorted(VALUES & set(broken)) if isinstance(harness.target, Function) else []
    if values:
        order = [n for n in order if n not in OF_EVERY_OUTPUT]
    number = next(iter((*order, *values, *broken)))
    outcome = broken[number]
    name, family, fix = BY_LAW.get(
        number, (f"{outcome.law.name} does not hold", outcome.law.name, outcome.law.formula)
    )
    if number in values and number not in order:
        name, family, fix = "outputs are wrong", "outputs are wrong", "compare with the formula on this call"
    if number == "L29" and isinstance(harness.target, Model):
        name, family = _future(harness, name, family)
    if number == "L59" and isinstance(harness.target, Model):
        name, family = _window(harness, name, family)
    if number in ("L31", "L32") and isinstance(harness.target, Model):
        name, family = _padding(harness, name, family)
    if number in ("L48", "L56", "L62") and isinstance(harness.target, Model):
        name, family, fix = _kept_state(harness, (name, family, fix))
    if number == "L50" and "reached" in outcome.message:
        name = outcome.message.partition(" (")[0]
    if (
        isinstance(harness.target, Function)
        and number in ("L53", "L04")
        and "log-sum-exp" not in outcome.message
    ):
        name, family = f"{outcome.law.name} does not hold", outcome.law.name
    where = "" if outcome.counterexample is None else f", smallest case {outcome.counterexample}"
    return Cause(name, family, fix, f"{outcome.law.number}: {outcome.message}{where}", exact=False)


def _failing_calls(outcome: Outcome) -> Cause:
    """The cause where every law that does not hold failed in a call: nothing is known about the outputs."""
    fix = (
        "accept every batch size and length, and keep nothing between calls, such as a cache of another size"
    )
    return Cause(
        "calls of some sizes fail", "calls fail", fix, f"{outcome.law.number}: {outcome.message}", exact=False
    )


def _kept_state(harness: Harness, plain: tuple[str, str, str]) -> tuple[str, str, str]:
    """The cause "state between calls" if fresh copies of the module agree for every seed and a used copy differs."""
    harness.seed(Case(seed=0))
    x, context = harness.sequence(2, 5), harness.context(2, 5)
    other = harness.changed(x) if x.is_floating_point() else x.flip(0)
    try:
        with torch.random.fork_rng(), torch.no_grad():
            fresh = []
            for seed in (1, 2):
                torch.manual_seed(seed)
                fresh.append(harness.run(x, context, harness.module_copy()).clone())
            used = harness.module_copy()
            harness.run(other, context, used)
            after = harness.run(x, context, used)
    except Exception as e:  # foreign code, which may raise anything
        name, family, fix = plain
        return f"{name} (a second call raised {describe(e)})", family, fix
    if torch.equal(fresh[0], fresh[1]) and not torch.equal(after, fresh[0]):
        return BY_LAW["L62"]
    return plain


def _effect(harness: Harness, n: int = 6, **options) -> Tensor:
    """[i, j]: whether output i depends on input j, by changing input j."""
    harness.seed(Case(seed=0))
    x, context = harness.sequence(2, n), harness.context(2, n)
    with torch.no_grad():
        before = harness.run(x, context, **options)
        columns = []
        for j in range(n):
            other = x.clone()
            other[:, j] = harness.changed(x)[:, j]
            after = harness.run(other, context, **options)
            columns.append((after - before).abs().amax((0, 2)) > 1e-7)
    return torch.stack(columns, -1)


def _future(harness: Harness, name: str, family: str) -> tuple[str, str]:
    """How far into the future an output depends."""
    try:
        effect = _effect(harness, **({} if harness.supports("always causal") else {"causal": True}))
    except Exception:  # foreign code; the general description is correct as well
        return name, family
    i, j = torch.arange(6)[:, None], torch.arange(6)
    if torch.equal(effect & (j > i), (j == i + 1)):
        return "causal is off by one: a query also attends to the next key", "causal off by one"
    if not bool(effect[1, 1]) and bool(effect[1, 0]):
        return "causal is off by one: a query does not attend to its own key", "causal off by one"
    past = effect & (j < i)
    if not bool(past.any()):
        return "causal is inverted: queries attend to the future only", "causal inverted"
    return name, family


def _window(harness: Harness, name: str, family: str) -> tuple[str, str]:
    """Whether outputs depend on inputs outside the window, miss some inside, or both, as with a wrong slot."""
    before, after = harness.model.window or (0, 0)
    n = 2 * (before + after) + 5
    try:
        effect = _effect(harness, n)
    except Exception:  # foreign code; the plain words are right as well
        return name, family
    i, j = torch.arange(n)[:, None], torch.arange(n)
    inside = (i - j <= before) & (j - i <= after)
    outside, missing = (effect & ~inside).any(-1), (~effect & inside).any(-1)
    if bool((outside & missing).any()):
        row = int((outside & missing).nonzero()[0])
        return f"position {row} depends on inputs outside its window in place of some inside", "cache offset"
    if bool(missing.any()) and not bool(outside.any()):
        return f"position {int(missing.nonzero()[0])} misses inputs inside its window", "keys dropped"
    return name, family


def _padding(harness: Harness, name: str, family: str) -> tuple[str, str]:
    """Which fault of the padding mask the outputs show: inverted, off by one or ignored."""
    try:
        effect = _effect(harness, lengths=torch.tensor([4, 4], device=harness.device))
    except Exception:
        return name, family
    off = ~torch.eye(6, dtype=torch.bool)
    real, padded = (effect & off)[:4, :4], effect[:4, 4:]
    if bool(padded.any()) and not bool(real.any()):
        return "the padding mask is inverted: only padding takes part", "padding inverted"
    if bool(padded[:, 0].any()) and not bool(padded[:, 1:].any()):
        return "the padding mask is off by one: the first padded position takes part", "padding off by one"
    if bool(padded.any()):
        return "the padding mask is ignored: real positions attend to padding", "padding ignored"
    return name, family
