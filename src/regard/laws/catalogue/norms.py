"""Norms, feed-forward networks and patch embeddings: L37 to L40."""

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from ..controls import SmallAttention
from ..harness import Harness
from ..law import Case, Law, Tolerance, Trial
from ..measurement import Measurement, compare, require, worst
from ..target import Part


def jacobian(f, x: Float[Tensor, "b d"]) -> Float[Tensor, "b d b d"]:
    """|∂ y_ij / ∂ x_kl|, exactly 0 where y_ij does not depend on x_kl."""
    return torch.autograd.functional.jacobian(f, x).abs()


def own_row(harness: Harness, c: Case) -> Measurement:
    width = harness.part.facts.get("width") or c.d
    J = jacobian(harness.part.call, harness.randn(c.b, width))
    same = torch.eye(c.b, dtype=torch.bool)[:, None, :, None]
    inside = J[same.expand_as(J)]
    return worst(
        require("an output depends on another row", (J == 0) | same),
        require("an output does not depend on its own row", (inside > 1e-12).double().mean() > 0.9),
    )


def own_column(harness: Harness, c: Case) -> Measurement:
    """In training: only its own column, over all rows. In evaluation: only itself."""
    width = harness.part.facts.get("width") or c.d
    x = harness.randn(c.b, width)
    training = jacobian(lambda y: harness.part.call(y, True), x)
    evaluation = jacobian(lambda y: harness.part.call(y, False), x)
    column = torch.eye(width, dtype=torch.bool)[None, :, None, :]
    row = torch.eye(c.b, dtype=torch.bool)[:, None, :, None]
    return worst(
        require("in training an output depends on another column", (training < 1e-12) | column),
        require(
            "in training an output does not depend on another row",
            (training[(column & ~row).expand_as(training)] > 1e-12).any(),
        ),
        require("in evaluation an output depends on another entry", (evaluation == 0) | (row & column)),
    )


def geometry(harness: Harness, c: Case) -> Measurement:
    """z = (y − shift)/gain has mean 0, norm √(dσ²/(σ² + ε)), and for ε = 0 the Jacobian (I − 11ᵀ/d − zzᵀ/d)/σ."""
    facts = harness.part.facts
    d, eps = facts.get("width") or c.d, float(facts.get("eps", 0.0))
    gain, shift = (facts.get(x) for x in ("gain", "shift"))
    x = c.size * harness.randn(c.b, d)

    def z(x: Tensor) -> Tensor:
        y = harness.part.call(x)
        y = y if shift is None else y - harness.to_target(shift)
        return y if gain is None else y / harness.to_target(gain)

    out, sigma2 = z(x).double(), x.double().var(-1, correction=0)
    norm = (d * sigma2 / (sigma2 + eps)).sqrt()
    measurements = [
        compare("the mean of z", out.mean(-1), torch.zeros(c.b)),
        compare("‖z‖ relative to √(dσ²/(σ² + ε))", out.norm(dim=-1) / norm, torch.ones(c.b)),
    ]
    if eps == 0.0:
        measurements += [
            compare("LN(a x + c) against LN(x), a > 0", z(2.5 * x + 3.0), z(x)),
            compare("LN(a x + c) against −LN(x), a < 0", z(-2.5 * x + 3.0), -z(x)),
        ]
        if d <= 8:
            J = torch.autograd.functional.jacobian(z, x[:1])[0, :, 0].double()
            one = torch.ones(d, d).double() / d
            want = (torch.eye(d) - one - out[0][:, None] * out[0] / d) / sigma2[0].sqrt()
            measurements.append(
                compare("σ times the Jacobian", J * sigma2[0].sqrt(), want * sigma2[0].sqrt())
            )
    return worst(*measurements)


def position_wise(harness: Harness, c: Case) -> Measurement:
    width, facts = harness.part.facts.get("width") or c.d, harness.part.facts
    x = harness.randn(c.n, width)
    J = jacobian(lambda y: harness.part.call(y[None])[0], x)
    own = torch.eye(c.n, dtype=torch.bool)[:, None, :, None]
    measurements = [require("an output depends on another position", (J == 0) | own)]
    if "w_1" in facts:
        w_1, b_1, w_2, b_2 = (harness.to_target(facts[name]) for name in ("w_1", "b_1", "w_2", "b_2"))
        columns = rearrange(x, "n d -> 1 d n")
        hidden = F.conv1d(columns, w_1[..., None], b_1).relu()
        want = F.conv1d(hidden, w_2[..., None], b_2)
        measurements.append(
            compare(
                "outputs against two convolutions of kernel size 1",
                harness.part.call(x[None])[0],
                rearrange(want, "1 d n -> n d"),
            )
        )
    return worst(*measurements)


def patches(harness: Harness, c: Case) -> Measurement:
    """A patch embedding against cutting, flattening and a matrix product."""
    facts = harness.part.facts
    channels, height, width = facts["image"]
    (down, right), weight, bias = facts["side"], harness.to_target(facts["weight"]), facts.get("bias")
    images = harness.randn(c.b, channels, height, width)
    flat = rearrange(images, "b c (y p) (x r) -> b (y x) (c p r)", p=down, r=right)
    want = flat @ rearrange(weight, "d c p r -> (c p r) d")
    want = want if bias is None else want + harness.to_target(bias)
    return compare("patch embeddings against cut, flatten, linear", harness.part.call(images), want)


def _attention_part() -> Part:
    torch.manual_seed(0)
    module = SmallAttention().double()
    return Part(
        "attention declared as a feed-forward network",
        "feed-forward",
        lambda x: module(x),
        facts={"width": 6},
    )


def _overlapping() -> Part:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 5, 4, stride=3).double()

    def call(images: Tensor) -> Tensor:
        return rearrange(conv(images), "b d y x -> b (y x) d")

    facts = {"image": (3, 8, 8), "side": (4, 4), "weight": conv.weight.detach(), "bias": conv.bias.detach()}  # type: ignore[union-attr]
    return Part("patches that overlap", "patches", call, facts)


def _sizes(harness: Harness):
    fixed = "width" in harness.part.facts
    return {"b": (2, 3, 5), **({} if fixed else {"d": (2, 3, 5, 8)})}


LAWS = (
    Law(
        "L37",
        "dependencies of norms",
        "an output depends on its own row (layer norm), column (batch norm in training) or entry (in evaluation)",
        "width above 1; for batch norm more than 2 rows",
        {
            "norm": Trial(
                own_row,
                lambda harness: {
                    **_sizes(harness),
                    **({} if "width" in harness.part.facts else {"d": (3, 5, 8)}),
                },
            ),
            "batch norm": Trial(own_column, lambda harness: {**_sizes(harness), "b": (3, 5)}),
        },
        lambda: Part("layer norm of width 1", "norm", lambda x: F.layer_norm(x, (x.shape[-1],)) * 0.0),
    ),
    Law(
        "L38",
        "layer norm geometry",
        "Σz = 0, ‖z‖ = √(dσ²/(σ² + ε)); LN(a x + c) = ±LN(x); Jacobian (I − 11ᵀ/d − zzᵀ/d)/σ",
        "σ > 0, variance over d; the last two only for ε = 0",
        {
            "norm": Trial(
                geometry,
                lambda harness: {**_sizes(harness), "size": (1.0, 10.0)},
                unless=lambda harness: _centered(harness),
            )
        },
        lambda: Part(
            "variance over d − 1", "norm", lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)
        ),
        Tolerance(1e-12, 1e-4),
    ),
    Law(
        "L39",
        "position-wise",
        "∂ y_i/∂ x_j = 0 exactly for i ≠ j; equal to two convolutions of kernel size 1 with ReLU between",
        "a feed-forward network",
        {"feed-forward": Trial(position_wise, lambda harness: {"n": (2, 3, 5), "d": (2, 3, 5)})},
        _attention_part,
    ),
    Law(
        "L40",
        "patch embedding",
        "cut into P × P patches, flatten, linear = convolution with kernel = stride = P",
        "the image's sides are multiples of P",
        {"patches": Trial(patches, lambda harness: {"b": (1, 2, 3)})},
        _overlapping,
    ),
)


def _centered(harness: Harness) -> str | None:
    return "it does not subtract the mean" if harness.part.facts.get("rms") else None
