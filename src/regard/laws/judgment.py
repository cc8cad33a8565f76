"""`judge`: a score for generated attention code, with the reasons."""

import copy
import hashlib
import random
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import search
from .diagnosis.cause import Cause
from .diagnosis.diagnose import diagnose
from .diagnosis.formula import Formula
from .diagnosis.samples import TOLERANCE, Sample, expected, observe, samples
from .harness import DTYPES, Harness, Inexpressible
from .law import Case
from .probe import probe
from .run_law import kind_name
from .target import Model, Part, Target

GROUPS = {  # the weight of each group of calls in the score
    "plain calls": 3.0,
    "options": 3.0,
    "options together": 1.5,
    "sizes": 2.0,
    "dtypes": 1.0,
    "gradients": 2.0,
    "fresh inputs": 3.0,
}
ROUNDS = 3  # fresh inputs of the same shape, so that memorized results are wrong


@dataclass(frozen=True)
class Judgment:
    """score: from 0.0 (nothing is right) to 1.0 (everything is). reasons: what lowered it, the largest loss first."""

    score: float
    reasons: tuple[str, ...]
    cause: Cause | None = None
    groups: dict[str, float] = field(default_factory=dict)  # group → the share of its calls that are right
    seconds: float = 0.0

    def __iter__(self):
        return iter((self.score, self.reasons))

    def __float__(self) -> float:
        return self.score


def judge(attention: Any, *, seed: int | None = None, seconds: float | int = 20.0, **hints: Any) -> Judgment:
    """A score between 0 and 1 for an attention, and the reasons: a reward for generated code.

    Every call is compared with the definition, on inputs that depend on a fresh seed: constants, zeros, echoed
    inputs, memorized results and results keyed on shapes or seeds are not rewarded. If the output does not depend on
    its inputs as it should, the score is 0, however many calls are right.
    seed: None uses a new seed each time; pass one to repeat a judgment. hints: as in `regard.laws.adapters.adapt`.
    """
    from .adapters import adapt

    began = time.monotonic()
    fresh = random.SystemRandom().getrandbits(48) if seed is None else seed
    try:
        target = adapt(attention, **hints)
    except Exception as e:
        return Judgment(0.0, (f"it is not an attention that can be called: {e}",))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng():
            warnings.simplefilter("ignore")
            torch.manual_seed((fresh * 2654435761 + 97) % (2**31))  # not the seed of the inputs
            if isinstance(target, Part) and "kind" not in hints:
                result = Judgment(0.0, (f"it is {kind_name(target)}, not an attention",))
            else:
                result = _judged(target, fresh, began + seconds)
    finally:
        torch.set_num_threads(threads)
    return Judgment(result.score, result.reasons, result.cause, result.groups, time.monotonic() - began)


def _judged(target: Target, seed: int, until: float | int) -> Judgment:
    if isinstance(target, Model) and (cheat := _module_cheating_reason(target, seed)):
        return Judgment(0.0, (cheat,))
    if target.kind != "function":
        return _module(target)
    probed = probe(target)
    harness = Harness(target, probed.supported, cache=probed.cache)
    if not any(harness.supports(name) for name in DTYPES):
        return Judgment(0.0, (f"an ordinary call failed: {probed.errors.get('float32', 'no dtype works')}",))
    if cheat := _cheating_reason(harness, seed):
        return Judgment(0.0, (cheat,))
    right: dict[str, list[float]] = {name: [] for name in GROUPS}
    reasons: dict[str, str] = {}
    for i, sample in enumerate(samples(harness)):
        if time.monotonic() > until:
            reasons["time"] = "not every call was tried: the time ran out"
            break
        group = _group(sample)
        sample = _fresh(harness, sample, seed + i)
        share, reason = _share(harness, sample)
        if share is None:
            continue
        right[group].append(share)
        if reason:
            reasons.setdefault(group, reason)
    for i in range(ROUNDS):
        plain = _fresh(harness, next(iter(samples(harness))), seed ^ (i * 7919 + 13))
        share, reason = _share(harness, plain)
        right["fresh inputs"].append(share or 0.0)
        if reason:
            reasons.setdefault("fresh inputs", reason)
    groups = {name: sum(values) / len(values) for name, values in right.items() if values}
    total = sum(GROUPS[name] for name in groups)
    score = sum(GROUPS[name] * share for name, share in groups.items()) / total if total else 0.0
    order = sorted(groups, key=lambda name: GROUPS[name] * (groups[name] - 1))
    texts = [f"{name}: {groups[name]:.0%} right; {reasons[name]}" for name in order if name in reasons]
    cause = diagnose(target, harness, ()) if score < 1.0 else None
    if cause is not None:
        texts.insert(0, f"{cause.line}; fix: {cause.fix}")
    if "time" in reasons:
        texts.append(reasons["time"])
    return Judgment(score, tuple(texts), cause, groups)


def _group(sample: Sample) -> str:
    f = sample.facets
    if f["grad"]:
        return "gradients"
    if f["dtype"] in ("bfloat16", "float16"):
        return "dtypes"
    if max(f["n"], f["m"], f["d_k"]) > 60 or f["b"] > 8 or f["h"] > 8:
        return "sizes"
    if len(f["options"]) > 1:
        return "options together"
    return "options" if f["options"] or f["h"] != f["h_kv"] else "plain calls"


def _fresh(harness: Harness, sample: Sample, seed: int) -> Sample:
    """The same shapes and options with new numbers."""
    digest = hashlib.sha256(f"{seed} {sample.name}".encode()).digest()
    g = torch.Generator().manual_seed(int.from_bytes(digest[:6], "big"))
    call = sample.call

    def new(x: Tensor) -> Tensor:
        y = torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.device, x.dtype)
        return y * sample.facets["size"] if x is call.q else y

    fresh = {id(x): new(x) for x in (call.q, call.k, call.v)}  # one tensor in two places stays one
    q, k, v = (fresh[id(x)] for x in (call.q, call.k, call.v))
    return sample._replace(call=call._replace(q=q, k=k, v=v))


def _share(harness: Harness, sample: Sample) -> tuple[float | None, str]:
    """1 if a call is right, 0 if it is wrong or raises, None if the target cannot express it; and the reason."""
    from .diagnosis.functions import evidence

    try:
        got = observe(harness, sample)
    except Inexpressible:
        return None, ""
    except Exception as e:  # foreign code
        if len(sample.facets["options"]) > 1 and isinstance(e, NotImplementedError | ValueError):
            return None, ""
        return (
            0.0,
            f"raised {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''} ({sample.describe()})",
        )
    want = expected(Formula(), sample)
    tolerance = TOLERANCE[DTYPES[sample.facets["dtype"]]]
    worst = 0.0
    for g, w in zip(got, want, strict=True):
        if g.shape != w.shape or not bool(torch.isfinite(g).all()):
            return 0.0, evidence(sample, got, want)
        size = max(1.0, float(w.abs().max()))
        worst = max(worst, float((g.double() - w.double()).abs().max()) / size)
    return (1.0, "") if worst <= tolerance else (0.0, evidence(sample, got, want))


def _cheating_reason(harness: Harness, seed: int) -> str | None:
    """Why the score is 0 even if some outputs are right: the output does not depend on its inputs as it should."""
    c = Case(b=2, h=2, n=6, d_k=8, seed=seed % (2**31))
    harness.seed(c)
    q, k, v = harness.qkv(c)
    before = [x.clone() for x in (q, k, v)]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            return harness.attend(q, k, v).clone()

    try:
        o = call(q, k, v)
        if not all(torch.equal(x, y) for x, y in zip((q, k, v), before)):
            return "it modifies its inputs"
        if bool((o == o.flatten()[0]).all()):
            return f"the output is constant, {float(o.flatten()[0]):g}"
        for name, x in zip("qkv", (q, k, v)):
            if o.shape == x.shape and torch.equal(o, x):
                return f"it returns {name} unchanged"
        if _ignores_inputs(call, o, q, k, v):
            return "the output does not depend on the values of q, k and v, only on their shapes"
        again = call(q, k, v)
        if float((again - o).abs().max()) > 1e-6:
            return "equal calls give different outputs"
        global_state = torch.get_rng_state()
        torch.manual_seed(seed % 1009)
        other = call(q, k, v)
        torch.set_rng_state(global_state)
        if float((other - o).abs().max()) > 1e-6:
            return "the output depends on the random seed"
    except search.CallTooSlow as e:
        return str(e)
    except Exception:  # a call that raises is scored below
        return None
    return None


def _ignores_inputs(call: Any, o: Tensor, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether other values of the same shapes give the same output, even if only a single element differs."""
    moved_v, moved_q = v.clone(), q.clone()
    moved_v[..., -1, -1] += 3.0
    moved_q[..., -1, :] += 3.0
    everything = call(q.flip(0) * 1.3, k.flip(-1) - 0.2, v.roll(1, -2) + 0.7)
    return torch.equal(everything, o) or (
        torch.equal(call(q, k, moved_v), o) and torch.equal(call(moved_q, k, v), o)
    )


def _module_cheating_reason(target: Model, seed: int) -> str | None:
    """Why a module of vectors gets the score 0 although laws hold: it is not an attention."""
    if target.d_model is None or target.vocab is not None or target.image is not None:
        return None
    g = torch.Generator().manual_seed(seed % (2**31))
    shape = (2, target.length or min(6, target.max_length), target.d_model)
    module = copy.deepcopy(target.module).double().eval()
    x, y, step = (2.0 * torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(3))
    context: tuple[Tensor, ...] = ()
    if target.architecture == "decoder":
        width = target.d_context or target.d_model
        context = (torch.randn(2, 5, width, generator=g, dtype=torch.float64),)

    def call(x: Tensor) -> Tensor:
        with torch.no_grad():
            out = target.call(module, x.to(target.device), *context)
        return (out[0] if isinstance(out, tuple) else out).double().cpu()

    try:
        o, other = call(x), call(y)
        if torch.equal(o, other):
            return "the output does not depend on the input"
        size = float((o - other).abs().max())
        moved = x.clone()
        moved[:, shape[1] // 2] = y[:, shape[1] // 2]
        changed = (call(moved) - o).abs().flatten(2).amax((0, 2)) if o.dim() > 2 else None
        if changed is not None and not context and int((changed > 1e-9 * size).sum()) < 2:
            return "no output depends on another position"
        bend = (call(x + step) - o) - (call(y + step) - other)
        if float(bend.abs().max()) < 1e-6 * size:
            return "the output is an affine map of the input, which no attention is"
    except Exception:  # a call that raises is scored by the laws
        return None
    return None


def _module(target: Target) -> Judgment:
    """A module or a part: the share of the laws that hold, with the likely cause."""
    from .checker import check

    verdict = check(target, budget=8)
    if verdict.failure is not None:
        return Judgment(0.0, (verdict.failure,))
    ran = [o for o in verdict.outcomes if o.ran or o.failed]
    held = [o for o in ran if not o.failed]
    score = len(held) / len(ran) if ran else 0.0
    reasons = [f"{o.law.number} {o.law.name}: {o.message}" for o in verdict.broken]
    if verdict.cause is not None:
        reasons.insert(0, f"{verdict.cause.line}; fix: {verdict.cause.fix}")
    return Judgment(score, tuple(reasons), verdict.cause, {"laws": score})
