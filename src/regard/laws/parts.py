"""Parts of models as targets: those inside a given model, and those of this library."""

import copy
from collections.abc import Iterator

import torch
from einops import rearrange
from torch import Tensor, nn

from ..nn.feed_forward import FeedForward
from ..nn.norm import norm
from ..position import rotate, sinusoid
from ..schedule import warmup_cosine
from ..spec import FeedForward as FeedForwardSpec
from ..spec import Spec
from .declared_counts import counted_specs, counts_of
from .target import Model, Part


def parts_of(model: Model) -> tuple[Part, ...]:
    """The parts that the adapter declares, and the first norm of each class and patch embedding inside the module."""
    declared = model.parts(model.module) if model.parts is not None else ()
    kinds = {part.kind for part in declared}
    return (*declared, *(part for part in _inside(model) if part.kind not in kinds))


def _inside(model: Model) -> Iterator[Part]:
    visited: set[type] = set()
    for name, module in model.module.named_modules():
        if type(module) in visited:
            continue
        match module:
            case nn.LayerNorm() if len(module.normalized_shape) == 1:
                yield layer_norm(module, f"{model.name}: {name}")
            case nn.BatchNorm1d():
                yield batch_norm(module, f"{model.name}: {name}")
            case nn.Conv2d() if model.image is not None and module.kernel_size == module.stride:
                yield patch_embedding(module, model.image, f"{model.name}: {name}")
            case _:
                continue
        visited.add(type(module))
    declared = getattr(model.module, "spec", None)
    if isinstance(declared, Spec):
        yield counts_of(declared, f"{model.name}: its declaration")


def layer_norm(module: nn.LayerNorm, name: str = "nn.LayerNorm") -> Part:
    """A layer norm in float64; its gain and shift are in facts, so that the laws can undo them."""
    double = copy.deepcopy(module).double().requires_grad_(False)
    facts = {
        "width": module.normalized_shape[0],
        "eps": module.eps,
        "gain": double.weight,
        "shift": double.bias,
    }
    return Part(name, "norm", double, facts)


def batch_norm(module: nn.BatchNorm1d, name: str = "nn.BatchNorm1d") -> Part:
    double = copy.deepcopy(module).double().requires_grad_(False)

    def call(x: Tensor, training: bool) -> Tensor:
        return copy.deepcopy(double).train(training)(x)

    return Part(name, "batch norm", call, {"width": module.num_features})


def feed_forward(module: nn.Module, width: int, name: str = "feed-forward", **facts: Tensor) -> Part:
    return Part(name, "feed-forward", copy.deepcopy(module).double().eval(), {"width": width, **facts})


def patch_embedding(module: nn.Conv2d, image: tuple[int, int, int], name: str = "patches") -> Part:
    double = copy.deepcopy(module).double().requires_grad_(False)

    def call(images: Tensor) -> Tensor:
        return rearrange(double(images), "b d y x -> b (y x) d")

    facts = {"image": image, "side": module.kernel_size, "weight": double.weight, "bias": double.bias}
    return Part(name, "patches", call, facts)


def clip_by_norm(grads: list[Tensor], limit: float) -> list[Tensor]:
    """torch.nn.utils.clip_grad_norm_ applied to plain tensors."""
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(parameters, grads):
        p.grad = g
    torch.nn.utils.clip_grad_norm_(parameters, limit)
    return [p.grad for p in parameters if p.grad is not None]


def schedule_part(rate: warmup_cosine) -> Part:
    """A schedule of this library as a target."""
    facts = {"lr_max": rate.lr_max, "warmup": rate.warmup, "total": rate.total}
    return Part(repr(rate), "schedule", rate, facts)


def own_parts() -> tuple[Part, ...]:
    """The parts of this library, as targets."""
    torch.manual_seed(0)
    mlp = FeedForward(FeedForwardSpec(7), 5)
    facts = {
        "w_1": mlp.w_in.weight.detach().double(),
        "b_1": mlp.w_in.bias.detach().double(),
        "w_2": mlp.w_out.weight.detach().double(),
        "b_2": mlp.w_out.bias.detach().double(),
    }
    return (
        Part("sinusoidal()", "positions", lambda p, d: sinusoid(p, d, dtype=torch.float64)),
        Part("rope()", "rotary", lambda x, p: rotate(x, p)),
        Part("LayerNorm, ε = 0", "norm", norm("layer", 7, 0.0).double(), {"width": 7, "eps": 0.0}),
        batch_norm(nn.BatchNorm1d(5), "BatchNorm1d"),
        feed_forward(mlp, 5, "FeedForward", **facts),
        patch_embedding(nn.Conv2d(3, 5, 4, stride=4), (3, 12, 8), "Vision.patches"),
        schedule_part(warmup_cosine(0.001, 40, 200)),
        Part("clip_grad_norm_", "clip", clip_by_norm),
        *counted_specs(),
    )
