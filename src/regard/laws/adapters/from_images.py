"""A target from a module that takes images and has no adapter: a vision Transformer of any library."""

import copy
from typing import Any

import torch
from torch import nn

from ..target import Model
from .from_signature import Hints
from .module_cache import tensor_of
from .names import HEAD_COUNTS, size_of

SIDES = ("img_size", "image_size", "input_size")
PATCHES = (2, 4)  # the side of an image in patches, if the module has no attribute for it


def images_from_signature(module: nn.Module, hints: Hints) -> Model | None:
    """The module as a target, if it begins with a convolution into patches and runs on images; else None."""
    patches = next((m for m in module.modules() if isinstance(m, nn.Conv2d)), None)
    if patches is None or patches.kernel_size != patches.stride:
        return None
    for side in _sides(module, patches):
        image = (patches.in_channels, side, side)
        out = _output(module, torch.zeros(3, *image))
        if out is not None:
            return Model(
                type(module).__name__,
                module,
                lambda module, images: tensor_of(module(images)),
                architecture="vision",
                d_model=patches.out_channels,
                image=image,
                layers=_layers(module),
                heads=next(
                    (size_of(m, HEAD_COUNTS) for m in module.modules() if size_of(m, HEAD_COUNTS)), None
                ),
                claims={"float32", "grad", "positions"} | ({"pooled"} if out.dim() == 2 else set()),
                notes=(f"images of {image[0]} × {side} × {side}",),
                device=hints.device or "cpu",
            )
    return None


def _sides(module: nn.Module, patches: nn.Conv2d) -> list[int]:
    """Sides from attributes of the module or its parts, then small ones."""
    named = [getattr(m, name, None) for m in module.modules() for name in SIDES]
    sizes = [x[0] if isinstance(x, tuple | list) and x else x for x in named]
    found = [x for x in sizes if isinstance(x, int) and x > 0]
    return list(dict.fromkeys((*found, *(count * patches.kernel_size[0] for count in PATCHES))))


def _output(module: nn.Module, images: torch.Tensor) -> torch.Tensor | None:
    try:
        with torch.no_grad():
            out: Any = tensor_of(copy.deepcopy(module).eval()(images))
    except Exception:  # foreign code: it does not take these images
        return None
    return out if out.dim() in (2, 3) and out.shape[0] == len(images) else None


def _layers(module: nn.Module) -> int | None:
    """The length of its longest list of blocks."""
    lists = [len(m) for m in module.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    return max(lists, default=None)
