"""The position-wise feed-forward network, and the activations by name."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from .. import compat, spec
from . import branch_end
from .dropout import dropout
from .packed import Packed, product

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "leaky_relu": F.leaky_relu,
    "relu6": F.relu6,
    "elu": F.elu,
    "selu": F.selu,
    "mish": F.mish,
    "softplus": F.softplus,
    "hardswish": F.hardswish,
    "swiglu": F.silu,
    "geglu": F.gelu,
}


class FeedForward(nn.Module):
    """f(x W₁ + b₁) W₂ + b₂ at each position; gated: (f(x W_g) ∘ x W₁) W₂."""

    def __init__(self, declared: spec.FeedForward, d_model: int):
        super().__init__()
        self.spec = declared
        self.fuses_dropout = False  # set by the training loop
        self.packed: dict[str, Packed] = {}  # likewise, within an update
        self.w_in = nn.Linear(d_model, declared.d_ff, bias=declared.bias)
        self.w_gate = nn.Linear(d_model, declared.d_ff, bias=declared.bias) if declared.gated else None
        self.w_out = nn.Linear(declared.d_ff, d_model, bias=declared.bias)

    def forward(
        self, x: Float[Tensor, "*b d_model"], *, adds_bias: bool = True
    ) -> Float[Tensor, "*b d_model"]:
        """adds_bias: False leaves the bias of w_out to the caller."""
        return product(self.packed.get("out"), self._hidden(x), (self.w_out,), adds_bias)

    def _hidden(self, x: Float[Tensor, "*b d_model"]) -> Float[Tensor, "*b d_ff"]:
        f, p = ACTIVATIONS[self.spec.activation], self.spec.dropout
        fuses = self.fuses_dropout and self.training and p < 1 and self.spec.activation == "relu"
        if fuses and branch_end.on_gpu(x) and not compat.has_hooks(self.w_in):
            inner = product(self.packed.get("in"), x, (self.w_in,), adds_bias=False)
            return branch_end.relu_dropout(inner, p, self.w_in.bias)
        inner = product(self.packed.get("in"), x, (self.w_in,))
        if self.w_gate is not None:
            inner = f(product(self.packed.get("gate"), x, (self.w_gate,))) * inner
        else:
            inner = f(inner)
        return dropout(inner, p, self.training)

    def packs(self) -> dict[str, list[Any]]:
        """The linear layers that are one product each, by name."""
        groups = {"in": [self.w_in], "out": [self.w_out]}
        return groups if self.w_gate is None else {**groups, "gate": [self.w_gate]}
