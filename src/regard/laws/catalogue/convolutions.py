"""Attention as convolution, seen from outside: L17, L18, L25 – L28."""

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ..controls import small_attention, weighing, wrapped
from ..harness import Lab
from ..law import Case, Law, Reading, Space, Tolerance, Trial, bounded, compare, worst
from ..target import Model, Projections
from .equivalences import has_projections, projected


def small(lab: Lab, **fields) -> Space:
    return lab.space(**{**dict.fromkeys(("b", "h", "n", "m", "d_k", "d_v")), **fields})


def free(lab: Lab) -> str | None:
    return "the target takes fixed sizes only" if lab.function.sizes else None


def diagonal_weights(lab: Lab, c: Case) -> Reading:
    """Each query sees itself alone: the layer is x W_V W_O at each position, a convolution of kernel 1."""
    x, w_v, w_o = lab.randn(c.b, c.n, 4), lab.randn(4, 3), lab.randn(3, 5)
    v = (x @ w_v)[:, None]
    q = lab.randn(c.b, 1, c.n, 3)
    own = torch.eye(c.n, dtype=torch.bool, device=lab.device)
    o = lab.attend(q, lab.randn(c.b, 1, c.n, 3), v, allowed=own)
    kernel = rearrange(w_v @ w_o, "i o -> o i 1")
    convolved = F.conv1d(rearrange(x, "b n d -> b d n"), kernel)
    return worst(
        compare("outputs under a diagonal mask against the values", o, v),
        compare(
            "x W_V W_O against a convolution of kernel 1",
            rearrange(o[:, 0] @ w_o, "b n d -> b d n"),
            convolved,
        ),
    )


def band_average(lab: Lab, c: Case) -> Reading:
    """Equal scores in a band: average pooling that leaves the border out; with zero keys, one that counts it."""
    n, w = c.n, c.w
    v = lab.randn(c.b, 1, n, 3)
    zero = torch.zeros_like(v)
    i, j = torch.arange(n, device=lab.device)[:, None], torch.arange(n, device=lab.device)
    o = lab.attend(zero, lab.randn(c.b, 1, n, 3), v, allowed=(i - j).abs() <= w)
    columns = rearrange(v[:, 0], "b n d -> b d n")

    def pooled(border: bool) -> Tensor:
        out = F.avg_pool1d(columns.double(), 2 * w + 1, 1, w, count_include_pad=border)
        return rearrange(out, "b d n -> b 1 n d")

    readings = [
        compare("a band of equal scores against average pooling", o, pooled(False), slack=1e-2 if w else 1.0)
    ]
    if lab.takes("n≠m"):
        wide = F.pad(v, (0, 0, w, w))
        spread = torch.arange(n + 2 * w, device=lab.device) - w
        counted = lab.attend(zero, torch.zeros_like(wide), wide, allowed=(i - spread).abs() <= w)
        readings.append(compare("with zero keys past the border", counted, pooled(True)))
    return worst(*readings)


def one_hot(lab: Lab, keys: Tensor, many: int) -> Tensor:
    """Table (h, n, m + 1): query i of head h sees keys[h, i] alone, or the last (zero) key where it is outside."""
    inside = (keys >= 0) & (keys < many)
    return F.one_hot(torch.where(inside, keys, many), many + 1).bool()


def with_zero_key(lab: Lab, x: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Random keys and values x with one zero key at the end, for each head: (1, h, m + 1, ·)."""
    values = F.pad(x, (0, 0, 0, 1)).expand(1, heads, -1, -1).contiguous()
    return lab.randn(1, heads, len(x) + 1, x.shape[-1]), values


def shift_heads(lab: Lab, c: Case) -> Reading:
    """One head a tap, each looking s_h back; then Σ_h o_h W^(h): a convolution, its kernel flipped for F.conv1d."""
    n, taps, d = c.n, c.taps, 3
    x, kernel = lab.randn(n, d), lab.randn(taps, d, 4)
    shifts = (torch.arange(taps, device=lab.device) - taps // 2) * c.dilation
    k, v = with_zero_key(lab, x, taps)
    queries = torch.arange(n, device=lab.device)
    table = one_hot(lab, queries - shifts[:, None], n)
    o = lab.attend(lab.randn(1, taps, n, d), k, v, allowed=table[None])[0]
    got = torch.einsum("hnd,hde->ne", o, kernel)
    flipped = rearrange(kernel.flip(0), "t i o -> o i t")
    columns = rearrange(x, "n d -> 1 d n")
    want = F.conv1d(columns, flipped, padding=taps // 2 * c.dilation, dilation=c.dilation)
    readings = [compare("shift heads against a convolution", got, rearrange(want, "1 o n -> n o"))]
    if c.stride > 1:
        some = queries[:: c.stride]
        strided = lab.attend(
            lab.randn(1, taps, len(some), d), k, v, allowed=one_hot(lab, some - shifts[:, None], n)[None]
        )[0]
        by_stride = F.conv1d(
            columns, flipped, padding=taps // 2 * c.dilation, dilation=c.dilation, stride=c.stride
        )
        rows = torch.einsum("hnd,hde->ne", strided, kernel)
        readings += [
            compare(
                "queries 0, s, 2s, … against a strided convolution",
                rows,
                rearrange(by_stride, "1 o n -> n o"),
            ),
            compare("a strided convolution against every s-th row of the dense one", rows, got[:: c.stride]),
        ]
    return worst(*readings)


def shift_heads_2d(lab: Lab, side: int) -> Reading:
    x, kernel = lab.randn(side * side, 2), lab.randn(9, 2, 3)
    place = torch.arange(side * side, device=lab.device)
    row, column = place // side, place % side
    steps = [(down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)]
    keys = []
    for down, right in steps:
        r, s = row - down, column - right
        inside = (r >= 0) & (r < side) & (s >= 0) & (s < side)
        keys.append(torch.where(inside, r * side + s, -1))
    k, v = with_zero_key(lab, x, 9)
    o = lab.attend(
        lab.randn(1, 9, side * side, 2), k, v, allowed=one_hot(lab, torch.stack(keys), side * side)[None]
    )[0]
    got = torch.einsum("hnd,hde->ne", o, kernel)
    flipped = rearrange(kernel.flip(0), "(y x) i o -> o i y x", y=3)
    want = F.conv2d(rearrange(x, "(y x) d -> 1 d y x", y=side), flipped, padding=1)
    return compare("nine shift heads against a 3 × 3 convolution", got, rearrange(want, "1 o y x -> (y x) o"))


def convolution(lab: Lab, c: Case) -> Reading:
    return worst(shift_heads(lab, Case(c, dilation=1, stride=1)), shift_heads_2d(lab, 3 + c.n % 3))


def quadratic(lab: Lab, c: Case) -> Reading:
    """v·r = −α(‖t − s‖² − ‖s‖²): a head that looks at one neighbour as α grows."""
    side, alpha = 6, c.alpha
    place = torch.arange(side * side)
    grid = torch.stack([place // side, place % side], -1).double()
    t = grid[None] - grid[:, None]  # (q, k, 2): where the key lies, seen from the query
    shift = torch.tensor([float(c.down), float(c.right)], dtype=torch.float64)
    vector = -alpha * torch.tensor([1.0, -2 * shift[0], -2 * shift[1]], dtype=torch.float64)
    relative = torch.cat([(t**2).sum(-1, keepdim=True), t], -1)
    scores = relative @ vector
    squares = -alpha * (((t - shift) ** 2).sum(-1) - (shift**2).sum())
    x = lab.randn(side * side, 3)
    bias = lab.here(scores)[None, None]
    zero = torch.zeros(1, 1, side * side, 3, device=lab.device, dtype=lab.dtype)
    o = lab.attend(zero, zero, x[None, None], bias=bias)[0, 0]
    a = lab.weights(zero, zero, bias=bias)[0, 0].double()
    target = grid + shift
    inside = ((target >= 0) & (target < side)).all(-1).to(lab.device)
    key = (target[:, 0] * side + target[:, 1]).long().clamp(0, side * side - 1).to(lab.device)
    spread = (x.amax(0) - x.amin(0)).double()
    far = (o - x[key]).abs().double()
    least = 1 - a.amax(-1, keepdim=True)
    bound = {10.0: 1e-2, 20.0: 1e-6, 46.0: 1e-13}.get(alpha, math.inf)
    reach = bound if lab.dtype == torch.float64 else max(bound, 1e-5)
    return worst(
        compare("v·r against −α(‖t − s‖² − ‖s‖²)", scores / alpha, squares / alpha),
        bounded(
            "a head further from the shifted input than (1 − p_max) times its range",
            (far - least * spread)[inside],
        ),
        bounded(
            f"at α = {alpha} further from the shifted input than {bound:.0e} of its range",
            (far / spread)[inside] - reach,
        ),
        compare("weights of a bias alone against softmax", a, scores.softmax(-1).to(a.device)),
    )


def tap_rank(lab: Lab, c: Case) -> Reading:
    """One position alone has the weight 1, so the layer is x Σ_h W_V^(h) W_O^(h): its rank is at most Σ_h d_v."""
    module = lab.module()
    assert lab.model.projections is not None
    p: Projections = lab.model.projections(module)
    d_v, groups = p.w_v.shape[-1], p.w_q.shape[0] // p.w_v.shape[0]
    w_v = p.w_v.repeat_interleave(groups, 0)
    taps = torch.einsum("hid,hdo->hio", w_v.double(), p.w_o.double())
    readings = []
    if d_v < min(taps.shape[1:]):
        sizes = torch.linalg.svdvals(taps)
        readings.append(
            bounded(f"singular value {d_v + 1} of a tap, over the first", sizes[:, d_v] / sizes[:, 0])
        )
    x = lab.randn(c.b, 1, p.w_q.shape[1])
    context = lab.other(c.b, 1) if lab.takes("context") else None
    with torch.no_grad():
        source = x if context is None else context
        _, parts = projected(x, source, p)
        want = parts.sum(1) if p.b_o is None else parts.sum(1) + p.b_o
        close = 1e2 if lab.dtype == torch.float64 else 1.0
        readings.append(
            compare("one position alone against x Σ_h W_V W_O", lab.run(x, context), want, slack=1 / close)
        )
    return worst(*readings)


def _reversed_heads(q, k, v, asked):
    allowed = asked.get("allowed")
    if allowed is not None and allowed.dim() == 4:
        asked["allowed"] = allowed.flip(1)
    return (q, k, v), asked


def _border_counted(scores: Tensor, allowed: Tensor) -> Tensor:
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return weights * allowed.sum(-1, keepdim=True) / allowed.sum(-1).amax()


def _with_a_sink(scores: Tensor, allowed: Tensor) -> Tensor:
    """softmax with 1 more in the denominator: a diagonal of less than 1."""
    return F.pad(scores.masked_fill(~allowed, -torch.inf), (0, 1)).softmax(-1)[..., :-1]


def _pooling(q, k, v, asked):
    allowed = asked.get("allowed")
    if allowed is not None and allowed.shape[-2] > 1:  # each query sees its neighbour's key as well
        asked["allowed"] = allowed | torch.roll(allowed, 1, -2)
    return (q, k, v), asked


def _full_rank_tap() -> Model:
    """Says its heads are one wide, and adds a full-rank map of the input."""
    right = small_attention("a full-rank tap beside heads of rank 3")

    def call(module, x, context=None, **asked):
        return right.call(module, x, context, **asked) + 0.5 * (
            x if context is None else context[:, : x.shape[1]]
        )

    return Model(
        right.name,
        right.module,
        call,
        d_model=6,
        projections=right.projections,
        claims=right.claims,
        lacks=right.lacks,
    )


LAWS = (
    Law(
        "L17",
        "diagonal weights",
        "A diagonal, rows summing to 1: A = I, o = V, the layer is x W_V W_O: a convolution of kernel 1",
        "takes a mask",
        {
            "function": Trial(
                diagonal_weights,
                lambda lab: small(lab, b=(1, 2), n=(1, 2, 3, 7, 11)),
                needs=("mask",),
                when=free,
            )
        },
        lambda: weighing("a diagonal of less than 1", _with_a_sink),
    ),
    Law(
        "L18",
        "band average",
        "equal scores, |i − j| ≤ w: average pooling of width 2w + 1 that does not count the border",
        "takes a mask; with zero keys past the border it is counted",
        {
            "function": Trial(
                band_average,
                lambda lab: small(lab, b=(1, 2), n=(3, 5, 7, 11), w=(0, 1, 2)),
                needs=("mask",),
                when=free,
            )
        },
        lambda: weighing("an average that counts the border", _border_counted),
        Tolerance(1e-12, 1e-5),
    ),
    Law(
        "L25",
        "shift heads are a convolution",
        "one head a tap, weights one-hot at q − s_h: Σ_h x_{q − s_h} W^(h) = convolution, 1-D and 2-D",
        "a mask a head, n ≠ m; zero border by a zero key; F.conv1d and conv2d take the kernel flipped",
        {
            "function": Trial(
                convolution,
                lambda lab: small(lab, n=(3, 5, 7, 11), taps=(3, 1, 5)),
                needs=("mask", "n≠m"),
                when=free,
            )
        },
        lambda: wrapped("the kernel not flipped", _reversed_heads),
    ),
    Law(
        "L26",
        "quadratic scores",
        "v = −α(1, −2s₁, −2s₂), r = (‖t‖², t₁, t₂): v·r = −α(‖t − s‖² − ‖s‖²); |o − x_{q+s}| ≤ (1 − p_max) range",
        "takes a bias; 6 × 6 grid, one head a neighbour",
        {
            "function": Trial(
                quadratic,
                lambda lab: small(lab, alpha=(46.0, 20.0, 10.0, 1.0), down=(0, 1, -1), right=(0, 1, -1)),
                needs=("bias",),
                when=free,
            )
        },
        lambda: wrapped(
            "a bias that is halved",
            lambda q, k, v, asked: (
                (q, k, v),
                {**asked, "bias": 0.01 * asked["bias"]} if "bias" in asked else asked,
            ),
        ),
        Tolerance(1e-10, 1e-4),
    ),
    Law(
        "L27",
        "dilated and strided",
        "shifts times a dilation = dilated convolution; queries 0, s, 2s, … = strided convolution = every s-th row",
        "a mask a head, n ≠ m",
        {
            "function": Trial(
                shift_heads,
                lambda lab: small(
                    lab, n=(5, 7, 11, 13), taps=(3, 1, 5), dilation=(1, 2, 3), stride=(1, 2, 3)
                ),
                needs=("mask", "n≠m"),
                when=free,
            )
        },
        lambda: wrapped("pooling in place of taking every s-th", _pooling),
    ),
    Law(
        "L28",
        "tap rank",
        "rank(W_V^(h) W_O^(h)) ≤ d_v; one position alone: o = x Σ_h W_V^(h) W_O^(h)",
        "an attention module whose matrices are given",
        {
            "model": Trial(
                tap_rank, lambda lab: {"b": (1, 2, 3)}, when=lambda lab: has_projections(lab) or _unmoved(lab)
            )
        },
        _full_rank_tap,
        Tolerance(1e-10, 1e-4),
    ),
)


def _unmoved(lab: Lab) -> str | None:
    return "its input is not vectors" if lab.model.vocab is not None or lab.model.image is not None else None
