"""How strongly each output depends on each input, from Jacobians, or from replaced tokens."""

import copy
import warnings
from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from .harness import Harness
from .target import Function, Model, Part, Target

LENGTH = 8  # positions in a map


class Dependence(NamedTuple):
    """strength[i, j] = ‖∂ output i / ∂ input j‖, exactly 0 where output i does not depend on input j."""

    name: str
    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    strength: Float[Tensor, "i j"]


def dependence(target: Target, probed: dict[str, bool] | None = None) -> list[Dependence]:
    """One map for each kind of mask that the target supports; a call that raises gives no map."""
    harness = Harness(target, probed)
    maps = []
    for kind in _mask_kinds(target):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                maps.append(_map(harness, target, kind))
            except Exception:  # foreign code; the laws report what is wrong with it
                continue
    return maps


def _mask_kinds(target: Target) -> list[str]:
    if isinstance(target, Part):
        return ["in training", "in evaluation"] if target.kind == "batch norm" else ["entries"]
    kinds = ("causal", "lengths", "documents", "window", "left padding")
    return ["no mask", *(kind for kind in kinds if kind in target.claims)]


def _map(harness: Harness, target: Target, kind: str) -> Dependence:
    torch.manual_seed(0)
    harness.random.manual_seed(0)
    if isinstance(target, Part):
        return _of_part(target, kind)
    options = _options(kind, 2 if isinstance(target, Model) else 1)
    if isinstance(target, Function):
        strength = _of_function(harness, options)
    elif target.image is not None:
        return _of_image(harness)
    else:
        strength = _of_model(harness, options)
    titles = {
        "lengths": f"lengths: {LENGTH - 3} of {LENGTH} positions are real",
        "documents": "documents of 3, 2 and 3 positions",
        "window": "a window of 2 before, 1 after",
        "left padding": "2 padded positions on the left",
    }
    rows = ("all",) if len(strength) == 1 else _numbers(len(strength))
    return Dependence(titles.get(kind, kind), rows, _numbers(strength.shape[1]), strength)


def _numbers(n: int) -> tuple[str, ...]:
    return tuple(map(str, range(n)))


def _options(kind: str, b: int) -> dict[str, Any]:
    match kind:
        case "causal":
            return {"causal": True}
        case "lengths":
            return {"lengths": torch.full((b,), LENGTH - 3)}
        case "documents":
            return {"documents": torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]] * b)}
        case "window":
            return {"window": (2, 1)}
        case "left padding":
            return {"left_padding": torch.full((b,), 2)}
    return {}


def _of_function(harness: Harness, options: dict[str, Any]) -> Float[Tensor, "i j"]:
    """The dependence on key and value j together; without gradients, measured by changing both."""
    q, k, v = (harness.randn(1, 2, LENGTH, 8) for _ in range(3))
    if not harness.supports("grad"):
        before, rows = harness.attend(q, k, v, **options), []
        for j in range(LENGTH):
            k_j, v_j = k.clone(), v.clone()
            k_j[:, :, j], v_j[:, :, j] = harness.randn(8), harness.randn(8)
            rows.append((harness.attend(q, k_j, v_j, **options) - before).square().sum((0, 1, 3)).sqrt())
        return torch.stack(rows, 1)
    k, v = k.requires_grad_(), v.requires_grad_()
    o = harness.attend(q, k, v, **options)
    rows = []
    for i in range(LENGTH):
        got = torch.autograd.grad((o[:, :, i] * harness.randn(8)).sum(), (k, v), retain_graph=True)
        rows.append(sum(g.square().sum((0, 1, 3)) for g in got).sqrt())  # type: ignore[union-attr]
    return torch.stack(rows)


def _of_model(harness: Harness, options: dict[str, Any]) -> Float[Tensor, "i j"]:
    x, context = (
        harness.sequence(2, LENGTH),
        harness.context(2, LENGTH) if harness.model.architecture != "attention" else None,
    )
    if not x.is_floating_point():
        return _of_tokens(harness, x, context, options)
    x.requires_grad_()
    out = harness.run(x, context, **options)
    outputs = rearrange(out[0], "... d -> (...) d")
    rows = []
    for output in outputs:
        grad_output = harness.randn(len(output)).to(out.dtype)
        (g,) = torch.autograd.grad((output * grad_output).sum(), x, retain_graph=True)
        rows.append(g[0].norm(dim=-1))
    return torch.stack(rows)


def _of_tokens(
    harness: Harness, x: Tensor, context: Tensor | None, options: dict[str, Any]
) -> Float[Tensor, "i j"]:
    """A token has no derivative, so each is replaced by another one."""
    columns = []
    with torch.no_grad():
        before = harness.run(x, context, **options)[0]
        for j in range(LENGTH):
            other = x.clone()
            other[:, j] = harness.changed(x)[:, j]
            columns.append((harness.run(other, context, **options)[0] - before).norm(dim=-1).reshape(-1))
    return torch.stack(columns, 1)


def _of_image(harness: Harness) -> Dependence:
    """How strongly all outputs together depend on each pixel."""
    x = harness.sequence(1, 0).requires_grad_()
    out = harness.run(x)
    (g,) = torch.autograd.grad((out * harness.randn(*out.shape).to(out.dtype)).sum(), x)
    strength = g[0].norm(dim=0)
    return Dependence("all outputs, by pixel", _numbers(len(strength)), _numbers(strength.shape[1]), strength)


def _of_part(part: Part, kind: str) -> Dependence:
    """Each entry of a 3 × 4 output with respect to each entry of the input."""
    part = copy.deepcopy(part)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    y = part.call(x, kind == "in training") if part.kind == "batch norm" else part.call(x)
    rows = [torch.autograd.grad(y_e, x, retain_graph=True)[0].abs().reshape(-1) for y_e in y.reshape(-1)]
    names = tuple(f"{i},{c}" for i in range(3) for c in range(4))
    return Dependence(kind, names, names, torch.stack(rows))
