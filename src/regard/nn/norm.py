"""Norms by name."""

from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn


class BatchNorm(nn.Module):
    """Each feature normalized over all positions of the batch; in evaluation by running statistics."""

    def __init__(self, d_model: int, eps: int | float, bias: bool = True):
        super().__init__()
        self.norm = nn.BatchNorm1d(d_model, eps)
        if not bias:
            self.norm.register_parameter("bias", None)

    def forward(self, x: Float[Tensor, "b n d_model"]) -> Float[Tensor, "b n d_model"]:
        return rearrange(self.norm(rearrange(x, "b n d -> (b n) d")), "(b n) d -> b n d", b=len(x))


def norm(kind: str, d_model: int, eps: int | float = 1e-5, bias: bool = True) -> nn.Module:
    """layer: (x − mean)/√(var + eps) · g + b for each vector; rms: x/√(mean x² + eps) · g."""
    match kind:
        case "layer":
            return nn.LayerNorm(d_model, eps, bias=bias)
        case "rms":
            return nn.RMSNorm(d_model, eps)
        case "batch":
            return BatchNorm(d_model, eps, bias)
    return nn.Identity()
