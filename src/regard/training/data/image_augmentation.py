"""Random affine transformations of images, as data augmentation."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ...errors import SpecError


@dataclass(frozen=True)
class random_affine:
    """Each image shifted, rotated and scaled at random, by at most the declared amounts."""

    shift: int | float = 0.5  # pixels along each axis
    rotation: int | float = 10.0  # degrees
    scaling: int | float = 0.1  # share of each side

    def __post_init__(self):
        if min(self.shift, self.rotation, self.scaling) < 0:
            raise SpecError(f"{self}: no amount can be below 0")

    def __call__(self, images: Float[Tensor, "b c height width"]) -> Float[Tensor, "b c height width"]:
        """Each image under its own affine map, bilinear between pixels; outside, the nearest border pixel."""
        b, _, height, width = images.shape
        angle, wide, tall, right, down = 2 * torch.rand(5, b) - 1
        cos, sin = (angle * math.radians(self.rotation)).cos(), (angle * math.radians(self.rotation)).sin()
        wide, tall = ((x * math.log1p(self.scaling)).exp() for x in (wide, tall))
        # Rows of the 2 × 3 matrix, in coordinates where an image spans −1 to 1.
        x = torch.stack([cos * wide, -sin * tall, right * 2 * self.shift / width], -1)
        y = torch.stack([sin * wide, cos * tall, down * 2 * self.shift / height], -1)
        grid = F.affine_grid(torch.stack([x, y], 1).to(images), list(images.shape), align_corners=False)
        return F.grid_sample(images, grid, padding_mode="border", align_corners=False)
