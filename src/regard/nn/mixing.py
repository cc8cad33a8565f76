"""Fixed limits of attention: o = A v with a matrix A that does not depend on the input."""

import torch
from einops import rearrange, reduce, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..errors import ShapeError
from ..spec import Mixing


class MixingLayer(nn.Module):
    """o = A v. `identity`: A = I; `average`: every entry 1/m; `select`: row i is 1 at index[i], else 0.

    Attention equals `average` at scale 0; it equals `identity` or `select` at scale ∞ where the best key of query i
    is key i, or key index[i]. There the input decides, here the declaration. No parameters.

    lengths: values at and past lengths[b] are masked. `average` is then over the others, and an output that would
    copy a masked value is zeros.
    """

    def __init__(self, spec: Mixing):
        super().__init__()
        self.spec = spec
        self.index: Tensor
        self.register_buffer("index", torch.tensor(spec.index or (), dtype=torch.long), persistent=False)

    def forward(
        self, v: Float[Tensor, "b m d_v"], lengths: Int[Tensor, " b"] | None = None
    ) -> Float[Tensor, "b n d_v"]:
        m = v.shape[1]
        if lengths is not None:
            v = v.masked_fill(~rearrange(_real(lengths, m), "b m -> b m 1"), 0.0)
        match self.spec.how:
            case "identity":
                return v
            case "average":
                total = reduce(v, "b m d -> b d", "sum")
                count = m if lengths is None else rearrange(lengths.clamp(1, m), "b -> b 1")
                return repeat(total / count, "b d -> b n d", n=m)
        return v[:, self._index(m, v.device)]

    def matrix(self, m: int, lengths: Int[Tensor, " b"] | None = None) -> Float[Tensor, "*b n m"]:
        """The matrix A; one per batch row where lengths are given."""
        match self.spec.how:
            case "identity":
                a = torch.eye(m, device=self.index.device)
            case "average":
                a = torch.ones(m, m, device=self.index.device)
            case _:
                index = self._index(m, self.index.device)
                a = torch.eye(m, device=index.device)[index]
        if lengths is not None:
            a = a * rearrange(_real(lengths, m), "b m -> b 1 m")
        return a / a.sum(-1, keepdim=True).clamp(min=1)  # a row without an allowed value stays zeros

    def _index(self, m: int, device: torch.device) -> Int[Tensor, " n"]:
        """The declared index. The buffer moves with the module, but is empty memory after `to_empty`."""
        outside = [j for j in self.spec.index or () if not 0 <= j < m]
        if outside:
            raise ShapeError(
                f"index {outside[0]} of {self.spec!r} is not among the {m} positions 0 … {m - 1}"
            )
        return torch.tensor(self.spec.index or (), dtype=torch.long, device=device)

    def extra_repr(self) -> str:
        return repr(self.spec)


def _real(lengths: Int[Tensor, " b"], m: int) -> Bool[Tensor, "b m"]:
    return torch.arange(m, device=lengths.device) < rearrange(lengths, "b -> b 1")
