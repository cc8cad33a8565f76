"""Closed forms behind attention: moments of scores, the softmax's derivative, memory, orders of products, losses,
layer normalization, receptive fields.

Everything takes plain numbers or tensors; counts also take a symbol (sympy) or its name and then return a formula.

>>> score_moments(64)
Moments(mean=0, variance=64)
>>> attention_memory("n").total
8*n**2 + 2048*n
"""

from collections.abc import Iterable, Sequence
from math import exp, log, sqrt
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .errors import ShapeError, SpecError
from .pattern import Pattern, causal, full, window
from .spec.base import require_positive

Number = int | float


class Moments(NamedTuple):
    """Mean and variance."""

    mean: Any
    variance: Any

    @property
    def deviation(self) -> float:
        """The standard deviation."""
        return sqrt(self.variance)


def score_moments(
    d: Any,
    *,
    mean_q: Number = 0,
    var_q: Number = 1,
    mean_k: Number = 0,
    var_k: Number = 1,
    scale: Number | None = 1,
) -> Moments:
    """Mean and variance of scale · q·k for independent entries.

    At scale 1 they are d μ_q μ_k and d ((σ_q² + μ_q²)(σ_k² + μ_k²) − μ_q² μ_k²).
    Only means, variances and independence are used, not normality. scale=None is 1/√d.

    >>> score_moments(512).deviation, score_moments(512, scale=None).variance
    (22.627416997969522, 1.0)
    """
    squares = (var_q + mean_q**2) * (var_k + mean_k**2) - mean_q**2 * mean_k**2
    if scale is None:
        return Moments(d**0.5 * mean_q * mean_k, float(squares))
    return Moments(scale * d * mean_q * mean_k, scale**2 * d * squares)


def tied_score_moments(d: Any, *, mean: Number = 0, var: Number = 1, scale: Number = 1) -> Moments:
    """Mean and variance of scale · q·k for normal entries and q = k (not independent): d and 2d at unit variance.

    >>> tied_score_moments(64)
    Moments(mean=64, variance=128)
    """
    return Moments(scale * d * (var + mean**2), scale**2 * d * (2 * var**2 + 4 * mean**2 * var))


def softmax_jacobian(weights: Float[Tensor, "*b m"], scale: Number = 1) -> Float[Tensor, "*b m m"]:
    """∂ weights / ∂ scores = scale · (diag a − a aᵀ), where weights a = softmax(scale · scores)."""
    outer = weights[..., :, None] * weights[..., None, :]
    return scale * (torch.diag_embed(weights) - outer)


def softmax_jacobian_norm(weights: Float[Tensor, "*b m"], scale: Number = 1) -> Float[Tensor, "*b"]:
    """The Frobenius norm of the Jacobian: ‖J‖² = scale² Σ_i a_i² ((1 − a_i)² + Σ_{j≠i} a_j²).

    p₂ − 2 p₃ + p₂² is the same number, but near a one-hot row it is a small difference of terms near 1. Here 1 − a_i
    of the largest weight is the sum of the others.
    """
    top = torch.zeros_like(weights, dtype=torch.bool)
    top.scatter_(-1, weights.argmax(-1, keepdim=True), True)
    others = weights.masked_fill(top, 0.0)
    rest = torch.where(top, others.sum(-1, keepdim=True), 1 - weights)
    squares = weights.square()
    rest_squares = torch.where(
        top, others.square().sum(-1, keepdim=True), squares.sum(-1, keepdim=True) - squares
    )
    return abs(scale) * (squares * (rest.square() + rest_squares)).sum(-1).sqrt()


class JacobianBounds(NamedTuple):
    """Upper bounds of the norm of softmax's Jacobian; eps = 1 − the largest weight."""

    eps: Float[Tensor, "*b"]
    by_length: Float[Tensor, "*b"]  # m · eps, loose for many keys
    trace: Float[Tensor, "*b"]  # 1 − Σ a²
    by_eps: Float[Tensor, "*b"]  # 2 eps − eps², whatever the number of keys
    any_weights: Float[Tensor, "*b"]  # 1/2, reached by two equal weights


def softmax_jacobian_bounds(weights: Float[Tensor, "*b m"], scale: Number = 1) -> JacobianBounds:
    """norm ≤ trace ≤ 2 eps − eps², norm ≤ m · eps, norm ≤ 1/2; each times |scale|."""
    ordered = weights.sort(-1).values
    eps = ordered[..., :-1].sum(-1)
    trace = (weights * (1 - weights)).sum(-1)
    half = torch.full_like(eps, 0.5)
    factor = abs(scale)
    return JacobianBounds(
        eps,
        factor * weights.shape[-1] * eps,
        factor * trace,
        factor * (2 * eps - eps**2),
        factor * half,
    )


def sharpness_bound(scores: Float[Tensor, "*b m"], scale: Number = 1) -> Float[Tensor, "*b"]:
    """1 − the largest weight ≤ (m − 1) exp(−scale · gap), gap = the difference of the two largest scores.

    Tied scores have gap 0: no bound below 1 exists, since c tied keys share the weight.
    """
    if scores.shape[-1] < 2:
        raise ShapeError(f"{scores.shape[-1]} score(s) per row: a gap needs at least two")
    two = scores.topk(2, -1).values
    return (scores.shape[-1] - 1) * (-scale * (two[..., 0] - two[..., 1])).exp()


def identity_weight(n: int, scale: Number = 1) -> float:
    """The diagonal of softmax(scale · I) for n orthonormal keys: e^scale/(e^scale + n − 1).

    >>> round(identity_weight(4), 6), round(identity_weight(16), 6)
    (0.475367, 0.153417)
    """
    return 1 / (1 + (n - 1) * exp(-scale))


def identity_scale(n: int, eps: Number) -> float:
    """The smallest scale at which the diagonal of softmax(scale · I) is at least 1 − eps: ln((n − 1)(1 − eps)/eps).

    >>> round(identity_scale(4, 0.01), 6)
    5.693732
    """
    if not 0 < eps < 1:
        raise SpecError(f"eps={eps}: a softmax over {n} keys gives weights between 0 and 1, neither included")
    return log((n - 1) * (1 - eps) / eps)


class AttentionMemory(NamedTuple):
    """The values of one attention layer that stores its weights: queries, keys and values; weights; head outputs."""

    qkv: Any
    weights: Any
    outputs: Any

    @property
    def total(self) -> Any:
        total = self.qkv + self.weights + self.outputs
        return total.expand() if hasattr(total, "expand") else total

    def bytes(self, dtype: str | torch.dtype = "float32") -> Any:
        """The total in bytes: 8 per value in float64, 4 in float32, 2 in float16 and bfloat16, 1 in 8-bit formats."""
        return _itemsize(dtype) * self.total


def attention_memory(
    n: Any, *, heads: Any = 8, d_k: Any = 64, d_v: Any = None, m: Any = None, batch: Any = 1
) -> AttentionMemory:
    """h n m weights and h ((n + m) d_k + (n + m) d_v) other values; 8n² + 2048n for 8 heads of 64 on n tokens.

    Not in it: the layer's input and output, the scores before the softmax, masks, parameters, gradients.

    >>> attention_memory(1000).total, attention_memory(1000).bytes("int8")
    (10048000, 10048000)
    >>> attention_memory("n").bytes("float16")
    16*n**2 + 4096*n
    """
    n, m, heads, d_k, d_v, batch = (_symbol(x) for x in (n, m, heads, d_k, d_v, batch))
    m, d_v = n if m is None else m, d_k if d_v is None else d_v
    return AttentionMemory(
        batch * heads * (n * d_k + m * (d_k + d_v)), batch * heads * n * m, batch * heads * n * d_v
    )


class ScoreOrders(NamedTuple):
    """FLOPs of all content scores x_i W_q W_kᵀ x_jᵀ of one attention, in three orders of the same products.

    naive      every pair projects its query and its key        n·m·(2·d·d_k + 2·d·d_k + 2·d_k) per head
    projected  every vector is projected once                   2·n·d·h·d_k + 2·m·d·h·d_k + 2·n·m·h·d_k
    merged_qk  W_q W_kᵀ first, then x (W_q W_kᵀ) xᵀ             2·d·d_k·d + 2·n·d·d + 2·n·m·d per head
    """

    naive: Any
    projected: Any
    merged_qk: Any


def score_orders(n: Any, m: Any, d: Any, heads: Any = 1, d_k: Any = None) -> ScoreOrders:
    """FLOPs of content scores in three orders; the sizes may be numbers or symbols.

    >>> score_orders(1000, 1000, 512)
    ScoreOrders(naive=1049600000000, projected=2072576000, merged_qk=1816723456)
    """
    d_k = d if d_k is None else d_k
    return ScoreOrders(
        naive=heads * n * m * (4 * d * d_k + 2 * d_k),
        projected=heads * (2 * n * d * d_k + 2 * m * d * d_k + 2 * n * m * d_k),
        merged_qk=heads * (2 * d * d_k * d + 2 * n * d * d + 2 * n * m * d),
    )


class RelativeOrders(NamedTuple):
    """FLOPs of scores r_{j−i} · v of relative positions with d_p features: per pair, or per distinct offset."""

    per_pair: Any
    offsets: Any  # the number of distinct offsets: n + m − 1 on a line
    per_offset: Any
    with_content: Any  # per pair, plus content scores with each vector projected once


def relative_orders(n: Any, m: Any, d_p: Any, d: Any, heads: Any = 1, offsets: Any = None) -> RelativeOrders:
    """FLOPs of position scores, and together with content scores of heads of width d / heads.

    offsets: the number of distinct offsets; needed on a grid.

    >>> relative_orders(1000, 1000, 3, 512)
    RelativeOrders(per_pair=6000000, offsets=1999, per_offset=11994, with_content=2078576000)
    """
    offsets = n + m - 1 if offsets is None else offsets
    per_pair = 2 * heads * n * m * d_p
    content = score_orders(n, m, d).projected  # for any number of heads: together their width is d
    return RelativeOrders(per_pair, offsets, 2 * heads * offsets * d_p, content + per_pair)


def loss_floor(vocab: int, n: int, pattern: Pattern | None = None, layers: int = 1) -> float:
    """The smallest mean loss on independent uniform tokens of a model that predicts the next token at n positions.

    The target of position t is the input of position t + 1. Where output t depends on it the model can copy it, at
    loss 0; elsewhere nothing helps, at loss ln(vocab). So the floor is ln(vocab) · (targets that are not inputs) / n.

    >>> from regard.pattern import full
    >>> round(loss_floor(16, 16), 6), round(loss_floor(16, 16, full()), 6)
    (2.772589, 0.173287)
    """
    if vocab < 1:
        raise SpecError(f"vocab={vocab}; it needs to be at least 1")
    seen = int(dependencies(causal() if pattern is None else pattern, n, layers).diagonal(1).sum())
    return log(vocab) * (n - seen) / n


def layer_norm(
    x: Float[Tensor, "*b d"],
    gain: Float[Tensor, " d"] | Number | None = None,
    shift: Float[Tensor, " d"] | Number | None = None,
    eps: Number = 1e-5,
) -> Float[Tensor, "*b d"]:
    """g (x − mean)/√(variance + eps) + b, mean and variance (over d, not d − 1) of each vector."""
    z, _ = _standardized(x, eps)
    z = z if gain is None else gain * z
    return z if shift is None else z + shift


def layer_norm_jacobian(
    x: Float[Tensor, "*b d"], gain: Float[Tensor, " d"] | Number | None = None, eps: Number = 1e-5
) -> Float[Tensor, "*b d d"]:
    """∂y/∂x = diag(g) (I − 1 1ᵀ/d − z zᵀ/d)/s, s = √(variance + eps), z = (x − mean)/s; of rank d − 2 at eps = 0."""
    (z, s), d = _standardized(x, eps), x.shape[-1]
    inner = torch.eye(d, dtype=x.dtype, device=x.device) - 1 / d - z[..., :, None] * z[..., None, :] / d
    j = inner / s[..., None]
    return j if gain is None else (gain[:, None] if isinstance(gain, Tensor) else gain) * j


def _standardized(
    x: Float[Tensor, "*b d"], eps: Number
) -> tuple[Float[Tensor, "*b d"], Float[Tensor, "*b 1"]]:
    s = (x.var(-1, correction=0, keepdim=True) + eps).sqrt()
    return (x - x.mean(-1, keepdim=True)) / s, s


def residual_slope(slope: Number, layers: int) -> tuple[float, float]:
    """The derivative through `layers` scalar layers of this slope, with the identity path and without it.

    >>> with_, without = residual_slope(0.1, 12)
    >>> round(with_, 6), f"{without:.0e}"
    (3.138428, '1e-12')
    """
    return (1 + slope) ** layers, slope**layers


# -- how far information travels through a stack of layers: a bound, and the exact set of inputs --------------------


class ReceptiveField(NamedTuple):
    """The number of inputs an output can depend on if each head attends to one position, with residuals."""

    bound: int  # (heads + 1)^layers
    clipped: int  # the bound, limited by the number of positions
    neighbors: int  # if the heads attend 1, 2, …, heads positions back in every layer: heads · layers + 1


def receptive_field(heads: int, layers: int, length: int | None = None) -> ReceptiveField:
    """The bound counts the position itself; shifts of c · (heads + 1)^l, c = 1 … heads, in layer l reach it.

    >>> receptive_field(8, 3, length=512)
    ReceptiveField(bound=729, clipped=512, neighbors=25)
    """
    require_positive("heads", heads)
    require_positive("layers", layers)
    bound, near = (heads + 1) ** layers, heads * layers + 1
    if length is None:
        return ReceptiveField(bound, bound, near)
    require_positive("length", length)
    return ReceptiveField(bound, min(length, bound), min(length, near))


def receptive_set(at: int, shifts: Sequence[Iterable[int]], length: int | None = None) -> frozenset[int]:
    """The exact set of inputs of position `at`, if layer l attends to the position itself and shifts[l] back.

    The last entry of `shifts` is the layer nearest to the output. Positions outside 0 … length − 1 are left out.

    >>> sorted(receptive_set(10, [[1, 2], [3, 6]]))
    [2, 3, 4, 5, 6, 7, 8, 9, 10]
    >>> sorted(receptive_set(1, [[1], [1], [1]]))
    [0, 1]
    """
    inputs = {at}
    for layer in reversed(shifts):
        inputs |= {i - s for i in inputs for s in tuple(layer)}
        inputs = {i for i in inputs if i >= 0 and (length is None or i < length)}
    return frozenset(inputs)


def dependencies(pattern: Pattern, n: int, layers: int = 1, residual: bool = True) -> Bool[Tensor, "n n"]:
    """Entry (i, j): whether output i depends on input j after this many layers. The boolean power of the pattern."""
    require_positive("n", n)
    require_positive("layers", layers)
    power = _one_layer(pattern, n, residual)
    result = torch.eye(n, dtype=torch.bool)
    while layers:  # exponentiation by squaring
        if layers & 1:
            result = _compose(result, power)
        power, layers = _compose(power, power), layers >> 1
    return result


def layers_to_connect(pattern: Pattern, n: int, residual: bool = True) -> int:
    """The number of layers after which every output depends on every input (if causal: on every earlier input).

    >>> from regard.pattern import every, window
    >>> layers_to_connect(window(2), 16), layers_to_connect(window(2) | every(4), 16)
    (8, 3)
    """
    require_positive("n", n)
    powers = [_one_layer(pattern, n, residual)]
    goal = causal().allowed(n) if (pattern - causal()).count(n) == 0 else torch.ones(n, n, dtype=torch.bool)
    while not torch.equal(powers[-1] | ~goal, goal | ~goal):
        if 1 << len(powers) > 2 * n:
            raise SpecError(f"{pattern!r} never connects all {n} positions, whatever the number of layers")
        powers.append(_compose(powers[-1], powers[-1]))
    layers, reached = 0, torch.eye(n, dtype=torch.bool)
    for k in reversed(range(len(powers))):  # the largest number of layers that does not connect, plus one
        further = _compose(reached, powers[k])
        if not torch.equal(further & goal, goal):
            layers, reached = layers + (1 << k), further
    return layers + 1


def _one_layer(pattern: Pattern, n: int, residual: bool) -> Bool[Tensor, "n n"]:
    allowed = pattern.allowed(n)
    if pattern.differs_by_head:  # a layer connects what one of its heads does
        allowed = allowed.any(0)
    return allowed | torch.eye(n, dtype=torch.bool) if residual else allowed.clone()


def _compose(a: Bool[Tensor, "n k"], b: Bool[Tensor, "k m"]) -> Bool[Tensor, "n m"]:
    return (a.float() @ b.float()) > 0


# -- formulas as values: symbols, counts of pairs, leading orders, LaTeX --------------------------------------------


class Symbols:
    """Reads every size as a symbol; `values` maps each symbol to its number, so that a formula can be evaluated.

    A name that is used for two different numbers becomes two symbols, for example d_ff and d_ff_2.
    """

    def __init__(self):
        self.sympy = _sympy()
        self.values: dict[Any, int] = {}

    def size(self, name: str, value: int) -> Any:
        for k in range(1, 100):
            symbol = _symbol(name if k == 1 else f"{name}_{k}")
            if self.values.setdefault(symbol, value) == value:
                return symbol
        raise AssertionError(f"a hundred sizes called {name}")


def pair_count(pattern: Pattern, n: Any, m: Any) -> Any:
    """The number of pairs that a pattern allows, for n = m no shorter than its window; None if it has no closed form.

    >>> from regard.pattern import window
    >>> pair_count(causal(), 7, 7), pair_count(window(2), 7, 7)
    (28.0, 29.0)
    """
    match pattern:
        case full():
            return n * m
        case causal():
            return n * (n + 1) / 2
        case window(before, after):
            b, a = before, before if after is None else after
            return (n * (2 * (b + a + 1)) - b * (b + 1) - a * (a + 1)) / 2
    return None


def leading_order(formula: Any) -> Any:
    """The monomials of a formula that no other monomial dominates, without coefficients.

    >>> leading_order(attention_memory("n").total)
    n**2
    """
    sympy = _sympy()

    def powers(term: Any) -> dict[Any, Any]:
        return {base: power for base, power in term.as_powers_dict().items() if base.free_symbols}

    terms = [powers(t) for t in sympy.Add.make_args(sympy.sympify(formula)) if t != 0]

    def dominated(term: dict[Any, Any]) -> bool:
        others = (t for t in terms if t != term)
        return any(all(other.get(base, 0) >= p for base, p in term.items()) for other in others)

    leading = {sympy.Mul(*(base**p for base, p in t.items())) for t in terms if not dominated(t)}
    return sympy.Add(*leading)


def latex_table(head: tuple[str, ...], rows: Iterable[tuple[Any, ...]], total: tuple[Any, ...]) -> str:
    """A LaTeX array: in each row a name and formulas, below them their sums."""
    sympy = _sympy()

    def as_latex(formula: Any) -> str:
        formula = sympy.sympify(formula)
        long = [s for s in formula.free_symbols if len(s.name) > 2 and "_" not in s.name]
        return sympy.latex(formula, symbol_names={s: r"\mathrm{" + s.name + "}" for s in long})

    def line(name: str, *formulas: Any) -> str:
        label = name.replace("_", r"\_")
        return rf"\text{{{label}}} & {' & '.join(map(as_latex, formulas))} \\"

    heading = " & ".join(rf"\text{{{title}}}" for title in head) + r" \\ \hline"
    columns = "l" + "|r" * (len(head) - 1)
    lines = [*(line(*row) for row in rows), r"\hline", line("total", *map(sympy.expand, total))]
    return "\n".join([rf"\begin{{array}}{{{columns}}}", heading, *lines, r"\end{array}"])


def _sympy() -> Any:
    try:
        import sympy
    except ModuleNotFoundError as missing:
        raise SpecError(
            "formulas need sympy, which is not installed: pip install 'regard[cost]'"
        ) from missing
    return sympy


def _symbol(x: Any) -> Any:
    return _sympy().Symbol(x, integer=True, positive=True) if isinstance(x, str) else x


def _itemsize(dtype: str | torch.dtype) -> int:
    name = "float8_e4m3fn" if dtype == "float8" else dtype  # every 8-bit format has one byte
    known = getattr(torch, name, None) if isinstance(name, str) else name
    if not isinstance(known, torch.dtype):
        raise SpecError(f"dtype={dtype!r} is not a dtype of torch; use float32, bfloat16, int8 or another")
    return known.itemsize
