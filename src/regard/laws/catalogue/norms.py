"""Parts that act at one position: L37 – L40."""

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from ..controls import SmallAttention
from ..harness import Lab
from ..law import Case, Law, Reading, Tolerance, Trial, compare, exactly, worst
from ..target import Part


def dependence(f, x: Float[Tensor, "b d"]) -> Float[Tensor, "b d b d"]:
    """|∂ y_ij / ∂ x_kl|, which is 0 exactly where y does not read x."""
    return torch.autograd.functional.jacobian(f, x).abs()


def own_row(lab: Lab, c: Case) -> Reading:
    width = lab.part.facts.get("width") or c.d
    J = dependence(lab.part.call, lab.randn(c.b, width))
    same = torch.eye(c.b, dtype=torch.bool)[:, None, :, None]
    inside = J[same.expand_as(J)]
    return worst(
        exactly("an output depends on another row", (J == 0) | same),
        exactly("an output does not depend on its own row", (inside > 1e-12).double().mean() > 0.9),
    )


def own_column(lab: Lab, c: Case) -> Reading:
    """In training: its own column, all rows. In evaluation: itself alone."""
    width = lab.part.facts.get("width") or c.d
    x = lab.randn(c.b, width)
    training = dependence(lambda y: lab.part.call(y, True), x)
    frozen = dependence(lambda y: lab.part.call(y, False), x)
    column = torch.eye(width, dtype=torch.bool)[None, :, None, :]
    row = torch.eye(c.b, dtype=torch.bool)[:, None, :, None]
    return worst(
        exactly("in training an output depends on another column", (training < 1e-12) | column),
        exactly(
            "in training an output does not depend on another row",
            (training[(column & ~row).expand_as(training)] > 1e-12).any(),
        ),
        exactly("in evaluation an output depends on another entry", (frozen == 0) | (row & column)),
    )


def geometry(lab: Lab, c: Case) -> Reading:
    """z = (y − shift)/gain has mean 0, length √(dσ²/(σ² + ε)), and the Jacobian (I − 11ᵀ/d − zzᵀ/d)/σ where ε = 0."""
    facts = lab.part.facts
    d, eps = facts.get("width") or c.d, float(facts.get("eps", 0.0))
    gain, shift = (facts.get(x) for x in ("gain", "shift"))
    x = c.size * lab.randn(c.b, d)

    def z(given: Tensor) -> Tensor:
        y = lab.part.call(given)
        y = y if shift is None else y - lab.here(shift)
        return y if gain is None else y / lab.here(gain)

    out, sigma2 = z(x).double(), x.double().var(-1, correction=0)
    length = (d * sigma2 / (sigma2 + eps)).sqrt()
    readings = [
        compare("the mean of z", out.mean(-1), torch.zeros(c.b)),
        compare("‖z‖ against √(dσ²/(σ² + ε))", out.norm(dim=-1) / length, torch.ones(c.b)),
    ]
    if eps == 0.0:
        readings += [
            compare("LN(a x + c), a > 0", z(2.5 * x + 3.0), z(x)),
            compare("LN(a x + c), a < 0", z(-2.5 * x + 3.0), -z(x)),
        ]
        if d <= 8:
            J = torch.autograd.functional.jacobian(z, x[:1])[0, :, 0].double()
            one = torch.ones(d, d).double() / d
            want = (torch.eye(d) - one - out[0][:, None] * out[0] / d) / sigma2[0].sqrt()
            readings.append(compare("its Jacobian, times σ", J * sigma2[0].sqrt(), want * sigma2[0].sqrt()))
    return worst(*readings)


def position_wise(lab: Lab, c: Case) -> Reading:
    width, facts = lab.part.facts.get("width") or c.d, lab.part.facts
    x = lab.randn(c.n, width)
    J = dependence(lambda y: lab.part.call(y[None])[0], x)
    own = torch.eye(c.n, dtype=torch.bool)[:, None, :, None]
    readings = [exactly("an output depends on another position", (J == 0) | own)]
    if "w_1" in facts:
        w_1, b_1, w_2, b_2 = (lab.here(facts[name]) for name in ("w_1", "b_1", "w_2", "b_2"))
        columns = rearrange(x, "n d -> 1 d n")
        hidden = F.conv1d(columns, w_1[..., None], b_1).relu()
        want = F.conv1d(hidden, w_2[..., None], b_2)
        readings.append(
            compare(
                "against two convolutions of kernel 1",
                lab.part.call(x[None])[0],
                rearrange(want, "1 d n -> n d"),
            )
        )
    return worst(*readings)


def patches(lab: Lab, c: Case) -> Reading:
    """Cut, flatten, multiply."""
    facts = lab.part.facts
    channels, height, width = facts["image"]
    (down, right), weight, bias = facts["side"], lab.here(facts["weight"]), facts.get("bias")
    images = lab.randn(c.b, channels, height, width)
    flat = rearrange(images, "b c (y p) (x r) -> b (y x) (c p r)", p=down, r=right)
    want = flat @ rearrange(weight, "d c p r -> (c p r) d")
    want = want if bias is None else want + lab.here(bias)
    return compare("patches against cut, flatten, linear", lab.part.call(images), want)


def _attention_part() -> Part:
    torch.manual_seed(0)
    module = SmallAttention().double()
    return Part("attention, called position-wise", "feed-forward", lambda x: module(x), facts={"width": 6})


def _overlapping() -> Part:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 5, 4, stride=3).double()

    def call(images: Tensor) -> Tensor:
        return rearrange(conv(images), "b d y x -> b (y x) d")

    facts = {"image": (3, 8, 8), "side": (4, 4), "weight": conv.weight.detach(), "bias": conv.bias.detach()}  # type: ignore[union-attr]
    return Part("patches that overlap", "patches", call, facts)


def _sizes(lab: Lab):
    fixed = "width" in lab.part.facts
    return {"b": (2, 3, 5), **({} if fixed else {"d": (2, 3, 5, 8)})}


LAWS = (
    Law(
        "L37",
        "who depends on whom",
        "layer norm: its own row; batch norm in training: its own column; in evaluation: its own entry",
        "width above 1; for batch norm more than 2 rows",
        {
            "norm": Trial(
                own_row,
                lambda lab: {**_sizes(lab), **({} if "width" in lab.part.facts else {"d": (3, 5, 8)})},
            ),
            "batch norm": Trial(own_column, lambda lab: {**_sizes(lab), "b": (3, 5)}),
        },
        lambda: Part("layer norm of width 1", "norm", lambda x: F.layer_norm(x, (x.shape[-1],)) * 0.0),
    ),
    Law(
        "L38",
        "layer norm geometry",
        "Σz = 0, ‖z‖ = √(dσ²/(σ² + ε)); LN(a x + c) = ±LN(x); Jacobian (I − 11ᵀ/d − zzᵀ/d)/σ",
        "σ > 0, variance over d; the last two where ε = 0",
        {
            "norm": Trial(
                geometry, lambda lab: {**_sizes(lab), "size": (1.0, 10.0)}, when=lambda lab: _centred(lab)
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
        "∂ y_i/∂ x_j = 0 exactly for i ≠ j; two convolutions of kernel 1 with ReLU between",
        "a feed-forward network",
        {"feed-forward": Trial(position_wise, lambda lab: {"n": (2, 3, 5), "d": (2, 3, 5)})},
        _attention_part,
    ),
    Law(
        "L40",
        "patches",
        "cut into P × P patches, flatten, linear = convolution with kernel = stride = P",
        "the image's sides are multiples of P",
        {"patches": Trial(patches, lambda lab: {"b": (1, 2, 3)})},
        _overlapping,
    ),
)


def _centred(lab: Lab) -> str | None:
    return "it does not subtract the mean" if lab.part.facts.get("rms") else None
