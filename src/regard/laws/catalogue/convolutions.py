"""Attention that computes a convolution: L17, L18, L25 to L28."""

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ..controls import small_attention, with_changed_call, with_weights
from ..harness import Harness
from ..law import Case, Law, Space, Tolerance, Trial
from ..measurement import Measurement, compare, excess, worst
from ..target import Model, Projections
from .equivalences import has_projections, projected


def _only(harness: Harness, **fields) -> Space:
    return harness.space(**{**dict.fromkeys(("b", "h", "n", "m", "d_k", "d_v")), **fields})


def fixed_sizes(harness: Harness) -> str | None:
    return "the target accepts only fixed sizes" if harness.function.sizes else None


def diagonal_weights(harness: Harness, c: Case) -> Measurement:
    """Each query attends only to itself: the layer is x W_V W_O at each position, a convolution of kernel size 1."""
    x, w_v, w_o = harness.randn(c.b, c.n, 4), harness.randn(4, 3), harness.randn(3, 5)
    v = (x @ w_v)[:, None]
    q = harness.randn(c.b, 1, c.n, 3)
    own = torch.eye(c.n, dtype=torch.bool, device=harness.device)
    o = harness.attend(q, harness.randn(c.b, 1, c.n, 3), v, allowed=own)
    kernel = rearrange(w_v @ w_o, "i o -> o i 1")
    convolved = F.conv1d(rearrange(x, "b n d -> b d n"), kernel)
    return worst(
        compare("outputs with a diagonal mask against the values", o, v),
        compare(
            "x W_V W_O against a convolution of kernel size 1",
            rearrange(o[:, 0] @ w_o, "b n d -> b d n"),
            convolved,
        ),
    )


def band_average(harness: Harness, c: Case) -> Measurement:
    """Equal scores in a band: average pooling that excludes the border; with zero keys, pooling that includes it."""
    n, w = c.n, c.w
    v = harness.randn(c.b, 1, n, 3)
    zero = torch.zeros_like(v)
    i, j = torch.arange(n, device=harness.device)[:, None], torch.arange(n, device=harness.device)
    o = harness.attend(zero, harness.randn(c.b, 1, n, 3), v, allowed=(i - j).abs() <= w)
    columns = rearrange(v[:, 0], "b n d -> b d n")

    def pooled(border: bool) -> Tensor:
        out = F.avg_pool1d(columns.double(), 2 * w + 1, 1, w, count_include_pad=border)
        return rearrange(out, "b d n -> b 1 n d")

    slack = 1e-2 if w and harness.dtype == torch.float64 else 1.0  # float32 has no digits to spare
    measurements = [compare("a band of equal scores against average pooling", o, pooled(False), slack=slack)]
    if harness.supports("n≠m"):
        padded = F.pad(v, (0, 0, w, w))
        positions = torch.arange(n + 2 * w, device=harness.device) - w
        counted = harness.attend(zero, torch.zeros_like(padded), padded, allowed=(i - positions).abs() <= w)
        measurements.append(
            compare("a band with zero keys past the border against average pooling", counted, pooled(True))
        )
    return worst(*measurements)


def one_hot(keys: Tensor, m: int) -> Tensor:
    """A mask (h, n, m + 1): query i of head h attends only to keys[h, i], or to the last (zero) key if outside."""
    inside = (keys >= 0) & (keys < m)
    return F.one_hot(torch.where(inside, keys, m), m + 1).bool()


def with_zero_key(harness: Harness, x: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Random keys, and the values x with a zero row at the end, for each head: (1, h, m + 1, ·)."""
    values = F.pad(x, (0, 0, 0, 1)).expand(1, heads, -1, -1).contiguous()
    return harness.randn(1, heads, len(x) + 1, x.shape[-1]), values


def shift_heads(harness: Harness, c: Case) -> Measurement:
    """One head per tap with shift s_h, then Σ_h o_h W^(h): a convolution whose kernel is flipped for F.conv1d."""
    n, taps, d = c.n, c.taps, 3
    x, kernel = harness.randn(n, d), harness.randn(taps, d, 4)
    shifts = (torch.arange(taps, device=harness.device) - taps // 2) * c.dilation
    k, v = with_zero_key(harness, x, taps)
    queries = torch.arange(n, device=harness.device)
    table = one_hot(queries - shifts[:, None], n)
    o = harness.attend(harness.randn(1, taps, n, d), k, v, allowed=table[None])[0]
    got = torch.einsum("hnd,hde->ne", o, kernel)
    flipped = rearrange(kernel.flip(0), "t i o -> o i t")
    columns = rearrange(x, "n d -> 1 d n")
    want = F.conv1d(columns, flipped, padding=taps // 2 * c.dilation, dilation=c.dilation)
    measurements = [compare("shift heads against a convolution", got, rearrange(want, "1 o n -> n o"))]
    if c.stride > 1:
        strided_queries = queries[:: c.stride]
        strided = harness.attend(
            harness.randn(1, taps, len(strided_queries), d),
            k,
            v,
            allowed=one_hot(strided_queries - shifts[:, None], n)[None],
        )[0]
        by_stride = F.conv1d(
            columns, flipped, padding=taps // 2 * c.dilation, dilation=c.dilation, stride=c.stride
        )
        rows = torch.einsum("hnd,hde->ne", strided, kernel)
        measurements += [
            compare(
                "queries 0, s, 2s, … against a strided convolution",
                rows,
                rearrange(by_stride, "1 o n -> n o"),
            ),
            compare("a strided convolution against every s-th row of the dense one", rows, got[:: c.stride]),
        ]
    return worst(*measurements)


def shift_heads_2d(harness: Harness, side: int) -> Measurement:
    x, kernel = harness.randn(side * side, 2), harness.randn(9, 2, 3)
    position = torch.arange(side * side, device=harness.device)
    row, column = position // side, position % side
    steps = [(down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)]
    keys = []
    for down, right in steps:
        r, s = row - down, column - right
        inside = (r >= 0) & (r < side) & (s >= 0) & (s < side)
        keys.append(torch.where(inside, r * side + s, -1))
    k, v = with_zero_key(harness, x, 9)
    o = harness.attend(
        harness.randn(1, 9, side * side, 2), k, v, allowed=one_hot(torch.stack(keys), side * side)[None]
    )[0]
    got = torch.einsum("hnd,hde->ne", o, kernel)
    flipped = rearrange(kernel.flip(0), "(y x) i o -> o i y x", y=3)
    want = F.conv2d(rearrange(x, "(y x) d -> 1 d y x", y=side), flipped, padding=1)
    return compare("nine shift heads against a 3 × 3 convolution", got, rearrange(want, "1 o y x -> (y x) o"))


def convolution(harness: Harness, c: Case) -> Measurement:
    return worst(shift_heads(harness, Case(c, dilation=1, stride=1)), shift_heads_2d(harness, 3 + c.n % 3))


def quadratic(harness: Harness, c: Case) -> Measurement:
    """v·r = −α(‖t − s‖² − ‖s‖²): as α grows, the head attends to a single neighbor."""
    side, alpha = 6, c.alpha
    position = torch.arange(side * side)
    grid = torch.stack([position // side, position % side], -1).double()
    t = grid[None] - grid[:, None]  # (q, k, 2): the key's position relative to the query
    shift = torch.tensor([float(c.down), float(c.right)], dtype=torch.float64)
    vector = -alpha * torch.tensor([1.0, -2 * shift[0], -2 * shift[1]], dtype=torch.float64)
    relative = torch.cat([(t**2).sum(-1, keepdim=True), t], -1)
    scores = relative @ vector
    squares = -alpha * (((t - shift) ** 2).sum(-1) - (shift**2).sum())
    x = harness.randn(side * side, 3)
    bias = harness.to_target(scores)[None, None]
    zero = torch.zeros(1, 1, side * side, 3, device=harness.device, dtype=harness.dtype)
    o = harness.attend(zero, zero, x[None, None], bias=bias)[0, 0]
    a = harness.weights(zero, zero, bias=bias)[0, 0].double()
    target = grid + shift
    inside = ((target >= 0) & (target < side)).all(-1).to(harness.device)
    key = (target[:, 0] * side + target[:, 1]).long().clamp(0, side * side - 1).to(harness.device)
    value_range = (x.amax(0) - x.amin(0)).double()
    far = (o - x[key]).abs().double()
    rest = 1 - a.amax(-1, keepdim=True)
    bound = {10.0: 1e-2, 20.0: 1e-6, 46.0: 1e-13}.get(alpha, math.inf)
    limit = bound if harness.dtype == torch.float64 else max(bound, 1e-5)
    return worst(
        compare("v·r against −α(‖t − s‖² − ‖s‖²)", scores / alpha, squares / alpha),
        excess(
            "the distance to the shifted input exceeds (1 − p_max) times the range of the values",
            (far - rest * value_range)[inside],
        ),
        excess(
            f"at α = {alpha} the distance to the shifted input exceeds {bound:.0e} of the range of the values",
            (far / value_range)[inside] - limit,
        ),
        compare("weights with only a bias against softmax of the bias", a, scores.softmax(-1).to(a.device)),
    )


def tap_rank(harness: Harness, c: Case) -> Measurement:
    """A single position has weight 1, so the layer is x Σ_h W_V^(h) W_O^(h), whose rank is at most Σ_h d_v."""
    module = harness.module()
    assert harness.model.projections is not None
    p: Projections = harness.model.projections(module)
    d_v, groups = p.w_v.shape[-1], p.w_q.shape[0] // p.w_v.shape[0]
    w_v = p.w_v.repeat_interleave(groups, 0)
    taps = torch.einsum("hid,hdo->hio", w_v.double(), p.w_o.double())
    measurements = []
    if d_v < min(taps.shape[1:]):
        sizes = torch.linalg.svdvals(taps)
        measurements.append(
            excess(
                f"singular value {d_v + 1} of W_V W_O, relative to the first, is not 0",
                sizes[:, d_v] / sizes[:, 0],
            )
        )
    x = harness.randn(c.b, 1, p.w_q.shape[1])
    context = harness.second_sequence(c.b, 1) if harness.supports("context") else None
    with torch.no_grad():
        source = x if context is None else context
        _, parts = projected(x, source, p)
        want = parts.sum(1) if p.b_o is None else parts.sum(1) + p.b_o
        slack = 1e-2 if harness.dtype == torch.float64 else 1.0
        measurements.append(
            compare(
                "the output of a single position against x Σ_h W_V W_O",
                harness.run(x, context),
                want,
                slack=slack,
            )
        )
    return worst(*measurements)


def _reversed_heads(q, k, v, options):
    allowed = options.get("allowed")
    if allowed is not None and allowed.dim() == 4:
        options["allowed"] = allowed.flip(1)
    return (q, k, v), options


def _border_counted(scores: Tensor, allowed: Tensor) -> Tensor:
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return weights * allowed.sum(-1, keepdim=True) / allowed.sum(-1).amax()


def _with_a_sink(scores: Tensor, allowed: Tensor) -> Tensor:
    """softmax with an additional 1 in the denominator: weights that sum to less than 1."""
    return F.pad(scores.masked_fill(~allowed, -torch.inf), (0, 1)).softmax(-1)[..., :-1]


def _neighbor_added(q, k, v, options):
    allowed = options.get("allowed")
    if allowed is not None and allowed.shape[-2] > 1:  # each query also attends to its neighbor's keys
        options["allowed"] = allowed | torch.roll(allowed, 1, -2)
    return (q, k, v), options


def _full_rank_tap() -> Model:
    """Adds a full-rank map of the input to heads of rank 3."""
    correct = small_attention("a full-rank map added to heads of rank 3")

    def call(module, x, context=None, **options):
        return correct.call(module, x, context, **options) + 0.5 * (
            x if context is None else context[:, : x.shape[1]]
        )

    return Model(
        correct.name,
        correct.module,
        call,
        d_model=6,
        projections=correct.projections,
        claims=correct.claims,
        lacks=correct.lacks,
    )


LAWS = (
    Law(
        "L17",
        "diagonal weights",
        "A diagonal, rows summing to 1: A = I, o = V, the layer is x W_V W_O, a convolution of kernel size 1",
        "supports a mask",
        {
            "function": Trial(
                diagonal_weights,
                lambda harness: _only(harness, b=(1, 2), n=(1, 2, 3, 7, 11)),
                needs=("mask",),
                unless=fixed_sizes,
            )
        },
        lambda: with_weights("weights that sum to less than 1", _with_a_sink),
    ),
    Law(
        "L18",
        "band average",
        "equal scores, |i − j| ≤ w: average pooling of width 2w + 1 that excludes the border",
        "supports a mask; zero keys past the border include it",
        {
            "function": Trial(
                band_average,
                lambda harness: _only(harness, b=(1, 2), n=(3, 5, 7, 11), w=(0, 1, 2)),
                needs=("mask",),
                unless=fixed_sizes,
            )
        },
        lambda: with_weights("an average that includes the border", _border_counted),
        Tolerance(1e-12, 1e-5),
    ),
    Law(
        "L25",
        "shift heads are a convolution",
        "one head per tap, weights one-hot at q − s_h: Σ_h x_{q − s_h} W^(h) = convolution, 1-D and 2-D",
        "a mask per head, n ≠ m; a zero key for the border; F.conv1d and conv2d take the kernel flipped",
        {
            "function": Trial(
                convolution,
                lambda harness: _only(harness, n=(3, 5, 7, 11), taps=(3, 1, 5)),
                needs=("mask", "n≠m"),
                unless=fixed_sizes,
            )
        },
        lambda: with_changed_call("the kernel not flipped", _reversed_heads),
    ),
    Law(
        "L26",
        "quadratic scores",
        "v = −α(1, −2s₁, −2s₂), r = (‖t‖², t₁, t₂): v·r = −α(‖t − s‖² − ‖s‖²); |o − x_{q+s}| ≤ (1 − p_max) range",
        "supports a bias; 6 × 6 grid, one head per neighbor",
        {
            "function": Trial(
                quadratic,
                lambda harness: _only(
                    harness, alpha=(46.0, 20.0, 10.0, 1.0), down=(0, 1, -1), right=(0, 1, -1)
                ),
                needs=("bias",),
                unless=fixed_sizes,
            )
        },
        lambda: with_changed_call(
            "a bias scaled by 0.01",
            lambda q, k, v, options: (
                (q, k, v),
                {**options, "bias": 0.01 * options["bias"]} if "bias" in options else options,
            ),
        ),
        Tolerance(1e-10, 1e-4),
    ),
    Law(
        "L27",
        "dilated and strided",
        "shifts times a dilation = dilated convolution; queries 0, s, 2s, … = strided convolution = every s-th row",
        "a mask per head, n ≠ m",
        {
            "function": Trial(
                shift_heads,
                lambda harness: _only(
                    harness, n=(5, 7, 11, 13), taps=(3, 1, 5), dilation=(1, 2, 3), stride=(1, 2, 3)
                ),
                needs=("mask", "n≠m"),
                unless=fixed_sizes,
            )
        },
        lambda: with_changed_call("each query also attends to its neighbor's key", _neighbor_added),
    ),
    Law(
        "L28",
        "rank of a head",
        "rank(W_V^(h) W_O^(h)) ≤ d_v; a single position: o = x Σ_h W_V^(h) W_O^(h)",
        "an attention module whose adapter gives its matrices",
        {
            "model": Trial(
                tap_rank,
                lambda harness: {"b": (1, 2, 3)},
                unless=lambda harness: has_projections(harness) or _no_vectors(harness),
            )
        },
        _full_rank_tap,
        Tolerance(1e-10, 1e-4),
    ),
)


def _no_vectors(harness: Harness) -> str | None:
    return (
        "its input is not vectors"
        if harness.model.vocab is not None or harness.model.image is not None
        else None
    )
