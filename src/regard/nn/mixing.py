"""Attention's fixed limits: o = A v with an A that no input can change."""

import torch
from einops import rearrange, reduce, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..errors import ShapeError
from ..spec import Mixing


class MixingLayer(nn.Module):
    """o = A v. `identity`: A = I; `average`: every entry 1/m; `select`: row i is 1 at index[i], else 0.

    Attention gives `average` at scale 0, `identity` and `select` at scale ∞ where each query's best key is
    its own, or key index[i]: there the input decides, here the declaration. No parameters.

    lengths: values at and past lengths[b] are hidden, whatever they hold. `average` is then over the rest,
    and an output that would copy a hidden value is zeros.
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
            v = v.masked_fill(~rearrange(_seen(lengths, m), "b m -> b m 1"), 0.0)
        match self.spec.how:
            case "identity":
                return v
            case "average":
                total = reduce(v, "b m d -> b d", "sum")
                count = m if lengths is None else rearrange(lengths.clamp(1, m), "b -> b 1")
                return repeat(total / count, "b d -> b n d", n=m)
        self._check_index(m)
        return v[:, self.index]

    def matrix(self, m: int, lengths: Int[Tensor, " b"] | None = None) -> Float[Tensor, "*b n m"]:
        """A itself, for looking at; one a batch row where lengths are given."""
        match self.spec.how:
            case "identity":
                a = torch.eye(m, device=self.index.device)
            case "average":
                a = torch.ones(m, m, device=self.index.device)
            case _:
                self._check_index(m)
                a = torch.eye(m, device=self.index.device)[self.index]
        if lengths is not None:
            a = a * rearrange(_seen(lengths, m), "b m -> b 1 m")
        return a / a.sum(-1, keepdim=True).clamp(min=1)  # a row that sees nothing stays zeros

    def _check_index(self, m: int) -> None:
        far = [j for j in self.spec.index or () if not 0 <= j < m]
        if far:
            raise ShapeError(f"index {far[0]} of {self.spec!r} is not among the {m} positions 0 … {m - 1}")

    def extra_repr(self) -> str:
        return repr(self.spec)


def _seen(lengths: Int[Tensor, " b"], m: int) -> Bool[Tensor, "b m"]:
    return torch.arange(m, device=lengths.device) < rearrange(lengths, "b -> b 1")
