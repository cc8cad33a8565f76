"""The definition itself, over sizes, dtypes and combinations of options: L65."""

import math

from ..controls import CLAIMS, with_changed_call
from ..harness import Harness
from ..law import Case, Law, Trial
from ..measurement import Measurement
from ..target import Function


def equals_definition(harness: Harness, c: Case) -> Measurement:
    """Every sample call against the formula; the first that differs is reported."""
    from ..diagnosis.functions import evidence, observations
    from ..diagnosis.samples import samples
    from ..diagnosis.symptoms import wrong_weights

    seen = observations(harness)
    if seen.wrong:
        sample, got, want = seen.wrong[0]
        others = f"; {len(seen.wrong)} of {len(seen.wrong) + len(seen.right)} calls differ"
        return Measurement(math.inf, evidence(sample, got, want) + others)
    if fault := seen.fault():
        return Measurement(math.inf, fault)
    if weights := wrong_weights(harness, next(iter(samples(harness)))):
        return Measurement(math.inf, weights.evidence)
    rest = f"; {seen.unseen}" if seen.unseen else ""
    return Measurement(0.0, f"{len(seen.right)} calls equal the formula{rest}")


def module_equals_definition(harness: Harness, c: Case) -> Measurement:
    from ..diagnosis.modules import identified

    cause = identified(harness).cause
    if cause is not None:
        return Measurement(math.inf, f"{cause.evidence}: {cause.headline}")
    return Measurement(0.0, "the outputs equal attention with the module's own projections")


def _unidentified(harness: Harness) -> str | None:
    from ..diagnosis.modules import identified

    found = identified(harness)
    if found.arrangement is None and found.cause is None:
        return "its W_q, W_k, W_v and W_o could not be determined, or it computes more than attention"
    return None


def _first_512_keys(q, k, v, options):
    """A kernel that reads at most 512 keys."""
    if k.shape[-2] > 512 and not options:
        k, v = k[..., :512, :], v[..., :512, :]
    return (q, k, v), options


def _control() -> Function:
    return with_changed_call("only the first 512 keys are read", _first_512_keys, *CLAIMS)


LAWS = (
    Law(
        "L65",
        "the definition at every size",
        "o = softmax(q kᵀ/√d_k + bias) v over the allowed keys, up to 4,100 keys and d_k = 260, in every dtype",
        "single options, pairs and triples of options, grouped heads, strided inputs, gradients; a module: with its "
        "own projections",
        {
            "function": Trial(
                equals_definition, lambda harness: {"all": (0,)}, per_seed=True, always_report=True
            ),
            "model": Trial(
                module_equals_definition,
                lambda harness: {"all": (0,)},
                per_seed=True,
                unless=_unidentified,
                always_report=True,
            ),
        },
        _control,
    ),
)
