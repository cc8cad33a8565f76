"""The memory of the attention core: fused kernels save a log-sum-exp per query, the reference n · m weights."""

from .rules import ModelTape, Rules, round_up
from .tape import Bytes, Storage, Value

KERNELS = ("streaming", "stored")


class Shape:
    """Batch, heads, queries, keys, widths."""

    def __init__(self, b: Bytes, heads: Bytes, n: Bytes, m: Bytes, d_k: Bytes, d_v: Bytes):
        self.b, self.heads, self.n, self.m, self.d_k, self.d_v = b, heads, n, m, d_k, d_v

    @property
    def pairs(self) -> Bytes:
        return self.b * self.heads * self.n * self.m

    @property
    def out(self) -> Bytes:
        return self.b * self.heads * self.n * self.d_v


def streaming(tape: ModelTape, q: Value, k: Value, v: Value, at: Shape, mask: Bytes = 0) -> Value:
    """Fused attention saves q, k, v, its result and the log-sum-exp of each query; `mask`: bytes of its mask."""
    sizes = q.bytes, k.bytes, v.bytes
    table = (tape.new(mask),) if mask != 0 else ()
    lse = tape.new(max(q.width, 4) * at.b * at.heads * _queries(at.n, tape.rules, q.width))
    within = _backward_needs(at, tape.rules, q.width)

    def backward(g: Storage) -> tuple[Storage, ...]:
        inside = tape.new(within) if within != 0 else None
        grads = tuple(tape.new(size) for size in sizes)
        del inside
        return grads

    saves = (q.storage, k.storage, v.storage, lse, *table)
    return tape.step((q, k, v), at.out, q.width, saves, backward, saves_result=True)


def _queries(n: Bytes, rules: Rules, width: int) -> Bytes:
    """The memory-efficient kernel of a GPU, which float32 takes, pads its log-sum-exp to 32 queries."""
    return round_up(n, 32) if rules.cuda and width == 4 else n


def _backward_needs(at: Shape, rules: Rules, width: int) -> Bytes:
    """Σ o·do of each query; GPU kernels also accumulate the gradient of q in float32, for float32 in tiles of 64."""
    rows = at.b * at.heads
    if not rules.cuda:
        return 4 * rows * at.n
    if width == 4:
        return 4 * rows * (round_up(at.n, 64) * at.d_k + 2 * at.n)
    return 4 * rows * at.n * (at.d_k + 1)


def stored(tape: ModelTape, q: Value, k: Value, v: Value, at: Shape, dropout: float = 0.0) -> Value:
    """The formula in three steps: q kᵀ, softmax, times v. It saves the weights, and q, k and v."""
    q_size, k_size, v_size, width = q.bytes, k.bytes, v.bytes, q.width
    table = at.pairs * width

    scores = tape.step(
        (q, k),
        at.pairs,
        width,
        (q.storage, k.storage),
        lambda g: (tape.new(q_size), tape.new(k_size)),
    )
    weights = tape.step((scores,), at.pairs, width, (), lambda g: (tape.new(table),), saves_result=True)
    del scores
    weights = tape.dropout(weights, dropout)
    return tape.step(
        (weights, v),
        at.out,
        width,
        (weights.storage, v.storage),
        lambda g: (tape.new(table), tape.new(v_size)),
    )
