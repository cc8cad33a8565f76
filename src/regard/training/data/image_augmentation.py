"""Images moved a little by chance, so that few of them teach as many."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ...errors import SpecError


@dataclass(frozen=True)
class moves:
    """Each image shifted, turned and stretched by as much as is declared at most, each drawn on its own."""

    shift: int | float = 0.5  # pixels along each axis
    turn: int | float = 10.0  # degrees
    stretch: int | float = 0.1  # of each side

    def __post_init__(self):
        if min(self.shift, self.turn, self.stretch) < 0:
            raise SpecError(f"{self}: an image cannot move by less than 0")

    def __call__(self, images: Float[Tensor, "b c height width"]) -> Float[Tensor, "b c height width"]:
        """Each under its own affine map; between pixels an image is linear, past its edge as its edge."""
        b, _, height, width = images.shape
        angle, wide, tall, right, down = 2 * torch.rand(5, b) - 1
        cos, sin = (angle * math.radians(self.turn)).cos(), (angle * math.radians(self.turn)).sin()
        wide, tall = ((x * math.log1p(self.stretch)).exp() for x in (wide, tall))
        # Rows of the 2 × 3 matrix, in coordinates where an image reaches from −1 to 1.
        x = torch.stack([cos * wide, -sin * tall, right * 2 * self.shift / width], -1)
        y = torch.stack([sin * wide, cos * tall, down * 2 * self.shift / height], -1)
        grid = F.affine_grid(torch.stack([x, y], 1).to(images), list(images.shape), align_corners=False)
        return F.grid_sample(images, grid, padding_mode="border", align_corners=False)
