"""The convolutional baseline: a residual stack in which each position depends on a fixed neighborhood."""

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..errors import ShapeError
from ..pattern import Pattern, causal, dilated
from ..spec import Convolutional


def reach(spec: Convolutional) -> tuple[int, int]:
    """How many positions before and after itself an output can depend on: (kernel − 1) · Σ_l dilation^l in all.

    On an infinite line, n neighbors all depend on one another once both numbers are at least n − 1 (causal: the
    first number). On n positions with zeros outside, that also holds where no path has to leave them: always when
    causal, or undilated. A dilation of n or more has no effect there.

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
    """x + gelu(Σ_t W_t x[i + t·step]): zero padding, a kernel centered on i or ending there (causal).

    Separable: one kernel per channel, then one matrix over the channels: k·n·d + n·d² products, not k·n·d².
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
        """The pairs (output i, input j) that the kernel connects."""
        if self.causal:
            return causal() & dilated(self.kernel - 1, self.step)
        return dilated(self.kernel // 2, self.step)

    def forward(self, x: Float[Tensor, "b n d_model"]) -> Float[Tensor, "b n d_model"]:
        # Taps n or more apart read only zeros, so a step of n is equivalent to any longer one; without this limit
        # the eleventh layer of a stack dilated by 3 would pad with 2 · 59,049 zeros.
        step = min(self.step, max(x.shape[1], 1))
        padding = (self.kernel - 1) * step
        before = padding if self.causal else padding // 2
        columns = F.pad(rearrange(x, "b n d -> b d n"), (before, padding - before))
        kernel = self.convolution
        mixed = F.conv1d(columns, kernel.weight, kernel.bias, dilation=step, groups=kernel.groups)
        return x + self.dropout(F.gelu(rearrange(self.pointwise(mixed), "b d n -> b n d")))

    def extra_repr(self) -> str:
        return f"pattern={self.pattern!r}"


class ConvolutionalModel(nn.Module):
    """Layers of convolutions, layer l dilated by dilation^l; with a vocabulary, token ids in and logits out.

    lengths: positions at and past lengths[b] are set to zero before every layer and after the last, so that no
    output depends on them. Their own outputs are zeros (with a vocabulary: the head's bias).
    """

    def __init__(self, spec: Convolutional):
        super().__init__()
        self.spec = spec
        self.embedding = None if spec.vocab is None else nn.Embedding(spec.vocab, spec.d_model)
        # No sequence is longer than 2^31, and past 2^63 the pattern's integers would overflow.
        steps = [min(spec.dilation**l, 1 << 31) for l in range(spec.layers)]
        self.layers = nn.ModuleList(ConvolutionLayer(spec, step) for step in steps)
        self.head = None if spec.vocab is None else nn.Linear(spec.d_model, spec.vocab)

    @property
    def receptive_field(self) -> int:
        """The largest number of inputs an output can depend on: 1 + (kernel − 1) · Σ_l dilation^l."""
        return 1 + sum(reach(self.spec))

    def dependence(self, n: int) -> Bool[Tensor, "n n"]:
        """Which inputs each output depends on: the boolean product of the layers' patterns.

        Exact, where `receptive_field` is a bound: near the ends a path must not leave the sequence, and a dilation
        larger than the kernel leaves gaps.
        """
        depends = torch.eye(n, dtype=torch.bool)
        for layer in self.layers:
            assert isinstance(layer, ConvolutionLayer)
            depends = (layer.pattern.allowed(n).float() @ depends.float()) > 0
        return depends

    def forward(
        self,
        x: Float[Tensor, "b n d_model"] | Int[Tensor, "b n"],
        lengths: Int[Tensor, " b"] | None = None,
    ) -> Float[Tensor, "b n d_out"]:
        self._check(x, lengths)
        padding_mask = None
        if lengths is not None:
            padding_mask = torch.arange(x.shape[1], device=x.device) >= rearrange(lengths, "b -> b 1")
        if self.embedding is not None:
            x = self.embedding(x if padding_mask is None else x.masked_fill(padding_mask, 0))
        x = _zeroed(x, padding_mask)
        for layer in self.layers:
            x = _zeroed(layer(x), padding_mask)
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
                f"lengths has shape {tuple(lengths.shape)}; one per batch row is needed: ({shape[0]},)"
            )


def image_classifier(
    image: tuple[int, int],
    classes: int,
    *,
    channels: int = 1,
    widths: tuple[int, ...] = (32, 64),
    kernel: int = 3,
) -> nn.Sequential:
    """A small convolutional classifier of images, the baseline of a vision Transformer.

    Per width: a convolution, GELU, and a maximum over 2 × 2 pixels, so that later layers see larger regions; then one
    linear layer on what remains. Its inputs are (batch, channels, height, width).

    >>> sum(p.numel() for p in image_classifier((8, 8), 10).parameters())
    21386
    """
    shrunk = 2 ** len(widths)
    if image[0] % shrunk or image[1] % shrunk:
        raise ShapeError(
            f"an image of {image[0]} × {image[1]} cannot be halved {len(widths)} times; "
            f"use sides divisible by {shrunk}"
        )
    layers: list[nn.Module] = []
    for before, width in zip((channels, *widths), widths):
        layers += [nn.Conv2d(before, width, kernel, padding=kernel // 2), nn.GELU(), nn.MaxPool2d(2)]
    remaining = (channels, *widths)[-1] * (image[0] // shrunk) * (image[1] // shrunk)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(remaining, classes))


def _zeroed(x: Float[Tensor, "b n d"], padding_mask: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b n d"]:
    return x if padding_mask is None else x.masked_fill(rearrange(padding_mask, "b n -> b n 1"), 0.0)
