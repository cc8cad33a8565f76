"""Who depends on whom: how strongly each output answers to each input, from Jacobians (or from changed tokens)."""

import copy
import warnings
from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from .harness import Lab
from .target import Function, Model, Part, Target

LONG = 8  # positions in a picture


class Dependence(NamedTuple):
    """strength[i, j] = ‖∂ output i / ∂ input j‖, exactly 0 where output i does not depend on input j."""

    name: str
    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    strength: Float[Tensor, "i j"]


def dependence(target: Target, found: dict[str, bool] | None = None) -> list[Dependence]:
    """One picture for each way of hiding that the target knows; what raises leaves no picture."""
    lab = Lab(target, found or {})
    ways = _ways(target)
    pictures = []
    for name in ways:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                pictures.append(_picture(lab, target, name))
            except Exception:  # a stranger's code; the laws have already said what is wrong with it
                continue
    return pictures


def _ways(target: Target) -> list[str]:
    if isinstance(target, Part):
        return ["in training", "in evaluation"] if target.of == "batch norm" else ["entries"]
    asked = [
        word for word in ("causal", "lengths", "documents", "window", "left padding") if word in target.claims
    ]
    return ["nothing hidden", *asked]


def _picture(lab: Lab, target: Target, way: str) -> Dependence:
    torch.manual_seed(0)
    lab.random.manual_seed(0)
    if isinstance(target, Part):
        return _of_part(target, way)
    options = _options(way, 2 if isinstance(target, Model) else 1)
    if isinstance(target, Function):
        strength = _of_function(lab, options)
    elif target.image is not None:
        return _of_image(lab)
    else:
        strength = _of_model(lab, options)
    said = {"nothing hidden": "nothing hidden", "lengths": f"lengths: {LONG - 3} of {LONG} are real"}
    said |= {"documents": "documents of 3, 2 and 3", "window": "a window of 2 before, 1 after"}
    said |= {"left padding": "2 of padding on the left"}
    rows = ("all",) if len(strength) == 1 else _numbers(len(strength))
    return Dependence(said.get(way, way), rows, _numbers(strength.shape[1]), strength)


def _numbers(n: int) -> tuple[str, ...]:
    return tuple(map(str, range(n)))


def _options(way: str, b: int) -> dict[str, Any]:
    match way:
        case "causal":
            return {"causal": True}
        case "lengths":
            return {"lengths": torch.full((b,), LONG - 3)}
        case "documents":
            return {"documents": torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]] * b)}
        case "window":
            return {"window": (2, 1)}
        case "left padding":
            return {"pads": torch.full((b,), 2)}
    return {}


def _of_function(lab: Lab, options: dict[str, Any]) -> Float[Tensor, "i j"]:
    """Towards key and value j together; by changing them where there is no gradient."""
    q, k, v = (lab.randn(1, 2, LONG, 8) for _ in range(3))
    if not lab.takes("grad"):
        before, rows = lab.attend(q, k, v, **options), []
        for j in range(LONG):
            k_j, v_j = k.clone(), v.clone()
            k_j[:, :, j], v_j[:, :, j] = lab.randn(8), lab.randn(8)
            rows.append((lab.attend(q, k_j, v_j, **options) - before).square().sum((0, 1, 3)).sqrt())
        return torch.stack(rows, 1)
    k, v = k.requires_grad_(), v.requires_grad_()
    o = lab.attend(q, k, v, **options)
    rows = []
    for i in range(LONG):
        got = torch.autograd.grad((o[:, :, i] * lab.randn(8)).sum(), (k, v), retain_graph=True)
        rows.append(sum(g.square().sum((0, 1, 3)) for g in got).sqrt())  # type: ignore[union-attr]
    return torch.stack(rows)


def _of_model(lab: Lab, options: dict[str, Any]) -> Float[Tensor, "i j"]:
    x, context = lab.sequence(2, LONG), lab.context(2, LONG) if lab.model.of != "attention" else None
    if not x.is_floating_point():
        return _of_tokens(lab, x, context, options)
    x.requires_grad_()
    out = lab.run(x, context, **options)
    outputs = rearrange(out[0], "... d -> (...) d")
    rows = []
    for output in outputs:
        towards = lab.randn(len(output)).to(out.dtype)
        (g,) = torch.autograd.grad((output * towards).sum(), x, retain_graph=True)
        rows.append(g[0].norm(dim=-1))
    return torch.stack(rows)


def _of_tokens(lab: Lab, x: Tensor, context: Tensor | None, options: dict[str, Any]) -> Float[Tensor, "i j"]:
    """A token has no derivative: put another one in its place."""
    columns = []
    with torch.no_grad():
        before = lab.run(x, context, **options)[0]
        for j in range(LONG):
            other = x.clone()
            other[:, j] = lab.others(x)[:, j]
            columns.append((lab.run(other, context, **options)[0] - before).norm(dim=-1).reshape(-1))
    return torch.stack(columns, 1)


def _of_image(lab: Lab) -> Dependence:
    """What is given answers to which pixels: all outputs, over the grid of the image."""
    x = lab.sequence(1, 0).requires_grad_()
    out = lab.run(x)
    (g,) = torch.autograd.grad((out * lab.randn(*out.shape).to(out.dtype)).sum(), x)
    strength = g[0].norm(dim=0)
    return Dependence("all outputs, by pixel", _numbers(len(strength)), _numbers(strength.shape[1]), strength)


def _of_part(part: Part, way: str) -> Dependence:
    """Entry (i, c) of 3 rows of 4, towards every entry."""
    part = copy.deepcopy(part)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    y = part.call(x, way == "in training") if part.of == "batch norm" else part.call(x)
    rows = [torch.autograd.grad(y_e, x, retain_graph=True)[0].abs().reshape(-1) for y_e in y.reshape(-1)]
    names = tuple(f"{i},{c}" for i in range(3) for c in range(4))
    return Dependence(way, names, names, torch.stack(rows))
