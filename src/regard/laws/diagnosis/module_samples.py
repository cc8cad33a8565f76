"""The calls on which a module is compared with the formula, and what the formula gives with its projections."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..harness import Harness
from ..law import Case
from .formula import Call, Formula
from .module_faults import ModuleFault
from .projections import Arrangement

Implied = dict[str, Any]  # options that a module applies in every call: causal, window, sinks


def implied_options(harness: Harness) -> Implied:
    implied: Implied = {"causal": True} if harness.supports("always causal") else {}
    if harness.model.window is not None:
        implied |= {"window": harness.model.window, "sinks": harness.model.sinks}
    return implied


class ModuleSample(NamedTuple):
    """One call of a module, with its output."""

    name: str
    x: Tensor
    context: Tensor | None
    options: dict[str, Any]
    got: Tensor
    facets: dict[str, Any]


def module_samples(harness: Harness, module: nn.Module) -> Iterator[ModuleSample]:
    """Calls of a module that takes vectors, with the options that it supports."""
    model = harness.model
    limit = model.max_length
    sizes = [n for n in (5, 7, 1) if n <= limit] if model.length is None else [model.length] * 2
    choices: list[tuple[str, ...]] = [()]
    choices += [(o,) for o in ("causal", "mask", "bias", "lengths") if harness.supports(o)]
    if harness.supports("context lengths") and model.architecture != "attention":
        choices.append(("context lengths",))
    pairs = (("causal", "mask"), ("causal", "lengths"), ("mask", "lengths"))
    choices += [p for p in pairs if all(harness.supports(o) for o in p)]
    for names in choices:
        for n in sizes if not names else sizes[1:2]:
            yield from _module_sample(harness, module, 2, n, names)
    if model.architecture == "attention" and harness.supports("context"):
        yield from _module_sample(harness, module, 2, 5, (), m=7)
        yield from _module_sample(harness, module, 2, 5, (), m=5)
        if harness.supports("separate values"):
            yield from _module_sample(harness, module, 2, 5, ("separate values",), m=7)
    for n in (70, 530, 1100):
        if n <= limit and model.length is None:
            yield from _module_sample(harness, module, 1, n, ())
    for names in choices[1:3]:
        if limit >= 140:
            yield from _module_sample(harness, module, 1, 140, names)


def _module_sample(
    harness: Harness, module: nn.Module, b: int, n: int, names: tuple[str, ...], m: int | None = None
) -> Iterator[ModuleSample]:
    harness.seed(Case(seed=n))
    x = harness.sequence(b, n)
    context = harness.context(b, n + 2) if m is None else harness.second_sequence(b, m)
    options: dict[str, Any] = {}
    if "causal" in names:
        options["causal"] = True
    if "mask" in names:
        table = harness.rand(b, n, n) < 0.5
        options["allowed"] = table | torch.eye(n, dtype=torch.bool, device=harness.device)
    if "bias" in names:
        size = (n, n if context is None else context.shape[1])
        options["bias"] = harness.randn(*size) * (harness.rand(*size) < 0.7)  # 0 at some pairs, as in a mask
    if "lengths" in names:
        options["lengths"] = torch.tensor([max(1, n - 2), n, n - 1][:b], device=harness.device)
    if "context lengths" in names:
        options["context_lengths"] = torch.tensor([max(1, n - 1), n + 2, n][:b], device=harness.device)
    if "separate values" in names:
        options["values"] = harness.second_sequence(b, n if m is None else m)
    try:
        with torch.no_grad():
            got = harness.run(x, context, module, **options)
    except Exception:  # foreign code; the laws report what raises
        return
    facets = {
        "b": b,
        "n": n,
        "m": n if context is None else context.shape[1],
        "h": harness.model.heads or 1,
        "h_kv": 0,
        "d_k": 0,
        "d_v": 0,
        "options": names,
        "dtype": "",
        "strided": False,
        "grad": False,
        "size": 1.0,
    }
    words = f"n = {n}{f', m = {m}' if m else ''}{', ' + ' and '.join(names) if names else ''}"
    yield ModuleSample(f"a call with {words}", x, context, options, got, facets)


def _projected(arrangement: Arrangement, sample: ModuleSample) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a sample, computed once for all variants; the sample is kept, so that its ids stay its own."""
    key = id(sample.x), id(sample.context)
    if key not in arrangement.projected:
        x = sample.x.double()
        source = x if sample.context is None else sample.context.double()
        arrangement.projected[key] = sample, arrangement.project(x, source)
    return arrangement.projected[key][1]


def evaluate(
    arrangement: Arrangement,
    formula: Formula,
    sample: ModuleSample,
    fault: ModuleFault | None = None,
    implied: Implied | None = None,
) -> Tensor:
    """What a module with these projections returns, in float64. implied: options of every call on x alone."""
    x = sample.x.double()
    source = x if sample.context is None else sample.context.double()
    project = fault.project if fault is not None and fault.project is not None else None
    merge = fault.merge if fault is not None and fault.merge is not None else None
    q, k, v = project(arrangement, x, source) if project else _projected(arrangement, sample)
    options = dict(sample.options)
    values = options.pop("values", None)
    if values is not None and not (fault is not None and fault.values_of_key):
        v = arrangement.project(x, values.double())[2]
    if options.get("allowed") is not None:
        options["allowed"] = options["allowed"][:, None]
    if "context_lengths" in options:  # the keys are those of the context
        options["lengths"] = options.pop("context_lengths")
    if sample.context is None:
        options |= implied or {}
    if arrangement.alibi:
        options["alibi"] = True
    o = formula(Call(q, k, v, options, k.shape[-2] - q.shape[-2]))
    return merge(arrangement, o, x) if merge else arrangement.merge(o, x)
