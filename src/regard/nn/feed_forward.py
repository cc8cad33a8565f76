"""The position-wise feed-forward network, and the activations by name."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from .. import spec
from . import branch_end
from .dropout import dropout

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
        self.w_in = nn.Linear(d_model, declared.d_ff, bias=declared.bias)
        self.w_gate = nn.Linear(d_model, declared.d_ff, bias=declared.bias) if declared.gated else None
        self.w_out = nn.Linear(declared.d_ff, d_model, bias=declared.bias)

    def forward(self, x: Float[Tensor, "*b d_model"]) -> Float[Tensor, "*b d_model"]:
        f, p = ACTIVATIONS[self.spec.activation], self.spec.dropout
        if self.fuses_dropout and self.training and 0 < p < 1 and self.spec.activation == "relu":
            inner = self.w_in(x)
            if branch_end.on_gpu(inner):
                return self.w_out(branch_end.relu_dropout(inner, p))
        hidden = f(self.w_in(x)) if self.w_gate is None else f(self.w_gate(x)) * self.w_in(x)
        return self.w_out(dropout(hidden, p, self.training))
