"""The core of attention, as the kernels hold it: streaming ones keep two numbers a query, stored weights n · m."""

from .rules import Play, Rules, round_up
from .tape import Bytes, Storage, Value

KERNELS = ("streaming", "stored")


class Shape:
    """How many rows, heads, queries, keys; how wide."""

    def __init__(self, b: Bytes, heads: Bytes, n: Bytes, m: Bytes, d_k: Bytes, d_v: Bytes):
        self.b, self.heads, self.n, self.m, self.d_k, self.d_v = b, heads, n, m, d_k, d_v

    @property
    def pairs(self) -> Bytes:
        return self.b * self.heads * self.n * self.m

    @property
    def out(self) -> Bytes:
        return self.b * self.heads * self.n * self.d_v


def streaming(play: Play, q: Value, k: Value, v: Value, at: Shape, mask: Bytes = 0) -> Value:
    """Fused attention saves q, k, v, its result and ln Σ exp of each query; `mask`: bytes of a table it reads."""
    sizes = q.bytes, k.bytes, v.bytes
    table = (play.new(mask),) if mask != 0 else ()
    lse = play.new(max(q.width, 4) * at.b * at.heads * _queries(at.n, play.rules, q.width))
    within = _backward_needs(at, play.rules, q.width)

    def backward(g: Storage) -> tuple[Storage, ...]:
        inside = play.new(within) if within != 0 else None
        grads = tuple(play.new(size) for size in sizes)
        del inside
        return grads

    saves = (q.storage, k.storage, v.storage, lse, *table)
    return play.step((q, k, v), at.out, q.width, saves, backward, saves_result=True)


def _queries(n: Bytes, rules: Rules, width: int) -> Bytes:
    """The memory-efficient kernel of a GPU, which float32 takes, pads its log-sum-exp to 32 queries."""
    return round_up(n, 32) if rules.cuda and width == 4 else n


def _backward_needs(at: Shape, rules: Rules, width: int) -> Bytes:
    """Σ o·do of each query; kernels of a GPU also add up the gradient of q in float32, float32's in tiles of 64."""
    rows = at.b * at.heads
    if not rules.cuda:
        return 4 * rows * at.n
    if width == 4:
        return 4 * rows * (round_up(at.n, 64) * at.d_k + 2 * at.n)
    return 4 * rows * at.n * (at.d_k + 1)


def stored(play: Play, q: Value, k: Value, v: Value, at: Shape, dropout: float = 0.0) -> Value:
    """The formula in three steps: q kᵀ, softmax, times v. It saves the weights, and q, k and v."""
    q_size, k_size, v_size, width = q.bytes, k.bytes, v.bytes, q.width
    table = at.pairs * width

    scores = play.step(
        (q, k),
        at.pairs,
        width,
        (q.storage, k.storage),
        lambda g: (play.new(q_size), play.new(k_size)),
    )
    weights = play.step((scores,), at.pairs, width, (), lambda g: (play.new(table),), saves_result=True)
    del scores
    weights = play.dropout(weights, dropout)
    return play.step(
        (weights, v),
        at.out,
        width,
        (weights.storage, v.storage),
        lambda g: (play.new(table), play.new(v_size)),
    )
