"""The convolutional rival: a residual stack whose positions see a fixed neighbourhood."""

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..errors import ShapeError
from ..pattern import Pattern, causal, dilated
from ..spec import Convolutional


def reach(spec: Convolutional) -> tuple[int, int]:
    """How many positions before and after itself an output can see: (kernel − 1) · Σ_l dilation^l in all.

    On an endless line, n neighbours all see one another once both reach n − 1 (causal: the first alone). On
    n positions with zeros beyond them that also holds where no path has to leave them: always when causal,
    or undilated. A dilation of n or more does nothing there, however far it reaches.

    >>> reach(Convolutional(64, layers=15, kernel=3))
    (15, 15)
    >>> reach(Convolutional(64, layers=4, kernel=3, dilation=3))
    (40, 40)
    """
    steps = sum(spec.dilation**l for l in range(spec.layers))
    if spec.causal:
        return (spec.kernel - 1) * steps, 0
    return (spec.kernel // 2) * steps, (spec.kernel // 2) * steps


class ConvolutionLayer(nn.Module):
    """x + gelu(Σ_t W_t x[i + t·step]): zeros beyond the ends, a kernel centred on i or ending there (causal).

    Separable: one kernel a channel, then one matrix over the channels: k·n·d + n·d² products, not k·n·d².
    """

    def __init__(self, spec: Convolutional, step: int):
        super().__init__()
        d_model, kernel = spec.d_model, spec.kernel
        self.step, self.causal, self.kernel = step, spec.causal, kernel
        groups = d_model if spec.separable else 1
        self.convolution = nn.Conv1d(d_model, d_model, kernel, groups=groups, bias=not spec.separable)
        self.pointwise = nn.Conv1d(d_model, d_model, 1) if spec.separable else nn.Identity()
        self.dropout = nn.Dropout(spec.dropout)

    @property
    def pattern(self) -> Pattern:
        """The pairs (output i, input j) that the kernel joins."""
        if self.causal:
            return causal() & dilated(self.kernel - 1, self.step)
        return dilated(self.kernel // 2, self.step)

    def forward(self, x: Float[Tensor, "b n d_model"]) -> Float[Tensor, "b n d_model"]:
        # Taps n or more apart see nothing but zeros, so a step of n is as good as any longer one: the
        # eleventh layer of a stack dilated by 3 would else pad with 2 · 59,049 of them.
        step = min(self.step, max(x.shape[1], 1))
        around = (self.kernel - 1) * step
        before = around if self.causal else around // 2
        columns = F.pad(rearrange(x, "b n d -> b d n"), (before, around - before))
        kernel = self.convolution
        mixed = F.conv1d(columns, kernel.weight, kernel.bias, dilation=step, groups=kernel.groups)
        return x + self.dropout(F.gelu(rearrange(self.pointwise(mixed), "b d n -> b n d")))

    def extra_repr(self) -> str:
        return f"sees {self.pattern!r}"


class ConvolutionalModel(nn.Module):
    """Layers of convolutions, layer l dilated by dilation^l; with a vocabulary, token ids in and logits out.

    lengths: positions at and past lengths[b] are zeros before every layer and after the last, so that what
    they hold reaches nothing. Their own outputs are zeros (with a vocabulary: the head's bias).
    """

    def __init__(self, spec: Convolutional):
        super().__init__()
        self.spec = spec
        self.embedding = None if spec.vocab is None else nn.Embedding(spec.vocab, spec.d_model)
        # No sequence is longer than 2^31, and past 2^63 a pattern's arithmetic would wrap around.
        steps = [min(spec.dilation**l, 1 << 31) for l in range(spec.layers)]
        self.layers = nn.ModuleList(ConvolutionLayer(spec, step) for step in steps)
        self.head = None if spec.vocab is None else nn.Linear(spec.d_model, spec.vocab)

    @property
    def receptive_field(self) -> int:
        """The most inputs an output can depend on, itself among them: 1 + (kernel − 1) · Σ_l dilation^l."""
        return 1 + sum(reach(self.spec))

    def sees(self, n: int) -> Bool[Tensor, "n n"]:
        """Which inputs each output depends on: the boolean product of the layers' patterns.

        Exact, where `receptive_field` bounds: near the ends a path may not leave the sequence, and a dilation
        above the kernel leaves gaps.
        """
        seen = torch.eye(n, dtype=torch.bool)
        for layer in self.layers:
            assert isinstance(layer, ConvolutionLayer)
            seen = (layer.pattern.allowed(n).float() @ seen.float()) > 0
        return seen

    def forward(
        self,
        x: Float[Tensor, "b n d_model"] | Int[Tensor, "b n"],
        lengths: Int[Tensor, " b"] | None = None,
    ) -> Float[Tensor, "b n d_out"]:
        self._check(x, lengths)
        hidden = None
        if lengths is not None:
            hidden = torch.arange(x.shape[1], device=x.device) >= rearrange(lengths, "b -> b 1")
        if self.embedding is not None:
            x = self.embedding(x if hidden is None else x.masked_fill(hidden, 0))
        x = _zeroed(x, hidden)
        for layer in self.layers:
            x = _zeroed(layer(x), hidden)
        return x if self.head is None else self.head(x)

    def _check(self, x: Tensor, lengths: Tensor | None) -> None:
        shape, d_model = tuple(x.shape), self.spec.d_model
        if self.embedding is not None and (x.dim() != 2 or x.is_floating_point()):
            raise ShapeError(
                f"input of shape {shape} and {x.dtype} to a model with vocab={self.spec.vocab}; "
                f"token ids (batch, positions) are needed"
            )
        if self.embedding is None and (x.dim() != 3 or shape[-1] != d_model):
            raise ShapeError(f"input of shape {shape}; (batch, positions, d_model={d_model}) is needed")
        if lengths is not None and tuple(lengths.shape) != shape[:1]:
            raise ShapeError(
                f"lengths has shape {tuple(lengths.shape)}; one a batch row is needed: ({shape[0]},)"
            )


def _zeroed(x: Float[Tensor, "b n d"], hidden: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b n d"]:
    return x if hidden is None else x.masked_fill(rearrange(hidden, "b n -> b n 1"), 0.0)
