"""What each PyTorch operation allocates, saves for the backward pass and needs while it runs, by device and dtype.

Taken from PyTorch's derivative formulas and kernels, and compared with its allocators by tests and by
bench/cost_memory.py. Autocast: products run in the low dtype, copies of weights are cached until its region ends,
copies of anything else are made at every use.
"""

from dataclasses import dataclass
from typing import Any

from .tape import Bytes, Storage, Tape, Value, Weight


def scaled(entries: Bytes, up: Bytes, down: Bytes) -> Bytes:
    """entries · up / down, which is an integer."""
    return entries // down * up if isinstance(entries, int) and isinstance(down, int) else entries * up / down


def round_up(size: Bytes, to: int) -> Bytes:
    if isinstance(size, int):
        return -(-size // to) * to
    from sympy import ceiling

    return to * ceiling(size / to)


def sum_needs(rows: Bytes, columns: Bytes, multiprocessors: int) -> Bytes:
    """The scratch memory of PyTorch's sum over the rows of a table on a GPU: 132 MiB for 8192 × 3072.

    The rows are split among blocks of 128 threads until every multiprocessor has sixteen blocks; each thread stores
    one partial result, four columns wide.
    """
    if not isinstance(rows, int) or not isinstance(columns, int) or rows < 1:
        return 0
    vector = 4 if columns % 4 == 0 else 2 if columns % 2 == 0 else 1
    most, across = 512 // vector, columns // vector
    width = min(_power(across, most), 32)
    height = min(_power(rows, most), most // width)
    width = min(_power(across, most), most // height)
    each, grid = rows, -(-across // width)
    if each < min(16 * height, 256):
        return 0
    each = -(-each // height)
    fill = multiprocessors * (2048 // (width * height))
    if each < 256 or grid > fill:
        return 0
    shares = max(min(-(-fill // grid), -(-each // 16)), -(-each // 256))
    return 4 * columns * shares * width * vector if shares > 1 else 0


def _power(size: int, most: int) -> int:
    """The largest power of two that is at most `size` and `most`."""
    return most if size >= most else 1 << (size.bit_length() - 1)


def sort_needs(rows: Bytes, vocab: Bytes, d: Bytes) -> Bytes:
    """The gradient of an embedding with more than 3072 ids sorts them and sums runs of ten."""
    if not isinstance(rows, int) or not isinstance(vocab, int) or rows <= 3072:
        return 0
    return 4 * d * (rows // 10 + min(rows, vocab)) + 48 * rows + (800 << 10)


@dataclass(frozen=True)
class Rules:
    """The device, and the dtypes in bytes: of weights, and of autocast where it is on."""

    device: str = "cpu"  # cpu or cuda
    width: int = 4
    low: int | None = None
    multiprocessors: int = 132  # of an H100 or H200; a sum over rows spreads over them

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"


@dataclass
class Linear:
    """x Wᵀ + b."""

    weight: Weight
    bias: Weight | None
    d_in: Bytes
    d_out: Bytes


class ModelTape(Tape):
    """A tape with the operations of a model, by these rules."""

    def __init__(self, rules: Rules, grad: bool = True):
        super().__init__(grad)
        self.rules = rules
        self.weights: list[Weight] = []
        self.random_state = 0 if rules.cuda else 5056

    # -- weights --------------------------------------------------------------------------------------------------

    def new_weight(self, entries: Bytes) -> Weight:
        self.weights.append(self.weight(entries, self.rules.width))
        return self.weights[-1]

    def new_linear(self, d_in: Bytes, d_out: Bytes, bias: bool) -> Linear:
        return Linear(self.new_weight(d_in * d_out), self.new_weight(d_out) if bias else None, d_in, d_out)

    # -- casts ----------------------------------------------------------------------------------------------------

    def cast(self, x: Value, width: int) -> Value:
        if x.width == width:
            return x
        entries, before = x.entries, x.width
        return self.step((x,), entries, width, backward=lambda g: (self.new(entries * before),))

    def lowered(self, x: Value) -> Value:
        """x as a product reads it."""
        if self.casts is None or self.rules.low is None or x.width == self.rules.low:
            return x
        if not isinstance(x, Weight):
            return self.cast(x, self.rules.low)
        if id(x) not in self.casts:
            self.casts[id(x)] = self.cast(x, self.rules.low)
        return self.casts[id(x)]

    def raised(self, x: Value) -> Value:
        """x as an operation reads it that autocast runs in float32."""
        return self.cast(x, 4) if self.casts is not None and self.rules.cuda else x

    # -- products -------------------------------------------------------------------------------------------------

    def linear(self, x: Value, by: Linear) -> Value:
        return self.product(x, by.weight, by.bias, by.d_in, by.d_out)

    def product(
        self,
        x: Value,
        weight: Value,
        bias: Value | None,
        d_in: Bytes,
        d_out: Bytes,
        convolves: bool = False,
    ) -> Value:
        """x Wᵀ + b saves x, and W where x learns; a convolution saves both."""
        x, weight = self.lowered(x), self.lowered(weight)
        bias = None if bias is None else self.lowered(bias)
        width, learns, biased = x.width, x.node is not None, bias is not None
        x_bytes, w_bytes = x.bytes, weight.bytes  # a step of the backward pass holds sizes, and no storage

        rows = scaled(x.entries, 1, d_in)
        inputs = (x, weight) if bias is None else (x, weight, bias)
        saves = (x.storage, weight.storage) if learns or convolves else (x.storage,)
        entries = scaled(x.entries, d_out, d_in)
        return self.step(
            inputs,
            entries,
            width,
            saves,
            lambda g: (
                self._multiplied(x_bytes, width) if learns else None,
                self._multiplied(w_bytes, width),
                (lambda: self.summed(rows, d_out, width)) if biased else None,
            ),
            within=self._product_needs(entries, width),
        )

    def _product_needs(self, entries: Bytes, width: int) -> Bytes:
        """oneDNN adds up a 16-bit product in float32 beside its result (on a CPU without matrix units)."""
        return 4 * entries if width == 2 and not self.rules.cuda else 0

    def _multiplied(self, size: Bytes, width: int) -> Storage:
        inside = self._product_needs(scaled(size, 1, width), width)
        held = self.new(inside) if inside != 0 else None
        out = self.new(size)
        del held
        return out

    def summed(self, rows: Bytes, columns: Bytes, width: int) -> Storage:
        """The sum of a table over its rows: the gradient of a bias."""
        inside = self.new(sum_needs(rows, columns, self.rules.multiprocessors)) if self.rules.cuda else None
        out = self.new(columns * width)
        del inside
        return out

    # -- entry by entry -------------------------------------------------------------------------------------------

    def add(self, x: Value, y: Value) -> Value:
        """x + y saves nothing, and passes its gradient on as it is; y may be smaller and is repeated."""
        width = max(x.width, y.width)
        sizes = [(v.entries, v.width) for v in (x, y)]
        entries = x.entries
        return self.step(
            (x, y),
            entries,
            width,
            backward=lambda g: tuple(g if (e, w) == (entries, width) else self.new(e * w) for e, w in sizes),
        )

    def times(self, x: Value) -> Value:
        """x · a number saves nothing."""
        size = x.bytes
        return self.step((x,), x.entries, x.width, backward=lambda g: (self.new(size),))

    def multiply(self, x: Value, y: Value) -> Value:
        size = x.bytes
        return self.step(
            (x, y),
            x.entries,
            x.width,
            (x.storage, y.storage),
            lambda g: (self.new(size), self.new(size)),
        )

    def copy(self, x: Value) -> Value:
        return self.times(x)

    def activation(self, x: Value, name: str) -> Value:
        """relu and tanh save their result, the others their input."""
        size = x.bytes
        result = name in ("relu", "tanh")
        saves = () if result else (x.storage,)
        return self.step((x,), x.entries, x.width, saves, lambda g: (self.new(size),), saves_result=result)

    def dropout(self, x: Value, p: float) -> Value:
        """Saves a mask: one byte per entry on a GPU, in the dtype of x on a CPU."""
        if not p or not self.training:
            return x
        size = x.bytes
        mask = self.new(x.entries if self.rules.cuda else size)
        return self.step((x,), x.entries, x.width, (mask,), lambda g: (self.new(size),))

    training = True

    # -- norms, loss ----------------------------------------------------------------------------------------------

    def layer_norm(self, x: Value, rows: Bytes, weight: Weight, bias: Weight | None) -> Value:
        """Saves x, and the mean and the deviation of each row in float32."""
        x = self.raised(x)
        size, w_size, biased = x.bytes, weight.bytes, bias is not None
        mean, deviation = self.new(4 * rows), self.new(4 * rows)
        inputs = (x, weight) if bias is None else (x, weight, bias)
        return self.step(
            inputs,
            x.entries,
            x.width,
            (x.storage, mean, deviation, weight.storage),
            lambda g: (self.new(size), self.new(w_size), self.new(w_size) if biased else None),
        )

    def rms_norm(self, x: Value, rows: Bytes, weight: Weight) -> Value:
        """Fused on a GPU, where x and one number per row are saved; on a CPU x and x / rms are saved."""
        w_size = weight.bytes
        if self.rules.cuda:
            size, factor = x.bytes, self.new(4 * rows)
            return self.step(
                (x, weight),
                x.entries,
                x.width,
                (x.storage, factor, weight.storage),
                lambda g: (self.new(size), self.new(w_size)),
            )
        size, factor = x.bytes, self.new(x.width * rows)
        normed = self.step((x,), x.entries, x.width, (x.storage, factor), lambda g: (self.new(size),))
        return self.step(
            (normed, weight),
            x.entries,
            x.width,
            (normed.storage, weight.storage),
            lambda g: (self.new(size), self.new(w_size)),
        )

    def cross_entropy(self, logits: Value, targets: Value) -> Value:
        """Saves the log-probabilities and the targets; its backward makes two more tables of that size.

        Under autocast the CPU computes all of it in float32, a GPU the log-probabilities in the low dtype and
        their mean in float32.
        """
        autocast = self.casts is not None
        if autocast and not self.rules.cuda:
            logits = self.cast(logits, 4)
        size = logits.bytes
        logs = self.step(
            (logits,), logits.entries, logits.width, (), lambda g: (self.new(size),), saves_result=True
        )
        if autocast:
            logs = self.cast(logs, 4)
        wide, total = logs.bytes, self.new(4)
        return self.step(
            (logs,), 1, logs.width, (logs.storage, targets.storage, total), lambda g: (self.new(wide),)
        )

    def mean_square(self, x: Value) -> Value:
        """The mean of x²: the loss of a model that returns states and declares no targets."""
        x = self.raised(x)
        size = x.bytes
        square = self.step((x,), x.entries, x.width, (x.storage,), lambda g: (self.new(size),))
        return self.step((square,), 1, x.width, (), lambda g: (self.new(size),))

    def embedding(self, rows: Bytes, table: Weight, d: Bytes, ids: Value) -> Value:
        """table[ids] saves the ids; the gradient is as large as the table."""
        size = table.bytes
        extra = sort_needs(rows, scaled(table.entries, 1, d), d) if self.rules.cuda else 0

        def backward(g: Storage) -> tuple[Storage, ...]:
            inside = self.new(extra) if extra != 0 else None
            grad = self.new(size)
            del inside
            return (grad,)

        return self.step((table,), rows * d, self.rules.width, (ids.storage,), backward)

    def opaque(self, inputs: tuple[Value, ...], entries: Bytes, saves: tuple[Any, ...] = ()) -> Value:
        """An operation with one result, these saved storages, and a gradient for each input."""
        sizes = [x.bytes for x in inputs]
        return self.step(inputs, entries, inputs[0].width, saves, lambda g: tuple(self.new(s) for s in sizes))
