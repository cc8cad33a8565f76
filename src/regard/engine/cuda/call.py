"""One call of the kernels: what it computes, the shapes and strides of its tensors, the tile sizes of its kernels.

    bias(i, j) = table[clip(j − i, ±reach)] − slope · |j − i|       stored in base 2, as scores are

Dropout is decided by Philox, a function of seed, head, query and key: forward and backward agree in any launch.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import compress
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ...pattern import Pattern
from ...pattern.one_query import run_formulas
from ..call import Extras, Options, Place
from .documents import Packed

LOG2E = 1.4426950408889634


# The stored configurations, by direction, width and dtype: chosen on an H200 (bench/gpu_patterns.py --group sweep).
# There is no tuning at run time, so the first call is fast.


@dataclass(frozen=True)
class Config:
    """One kernel: members of a tile, members of a block, warps, stages of the load pipeline, a cap on registers."""

    tile: int
    block: int
    warps: int
    stages: int
    registers: int | None = None


@dataclass(frozen=True, eq=False)
class Configs:
    """Compared by identity: a key of every call."""

    forward: Config
    dq: Config
    dkv: Config
    hopper_forward: Config | None = None  # of the kernels for Hopper; None: only the general ones
    hopper_dq: Config | None = None
    hopper_dkv: Config | None = None
    one_launch: Config | None = None  # of a backward pass by one launch; None: it takes several
    # Where the products of float32 are split (`splits_float32`).
    split: "Configs | None" = field(default=None, kw_only=True)

    def without_caps(self) -> "Configs":
        """For calls with a bias, a softcap or dropout: their general kernels would spill registers under a cap."""
        forward, dq, dkv = (replace(x, registers=None) for x in (self.forward, self.dq, self.dkv))
        split = None if self.split is None else self.split.without_caps()
        return replace(self, forward=forward, dq=dq, dkv=dkv, one_launch=None, split=split)


HALF = {  # by the larger of the two padded widths
    32: Configs(*[Config(128, 64, 4, 3)] * 3, one_launch=Config(64, 64, 4, 2)),
    64: Configs(
        Config(64, 64, 4, 3), Config(64, 64, 4, 3, 168), Config(64, 64, 4, 3, 168),
        Config(64, 64, 4, 1, 128), Config(64, 64, 4, 1, 168), Config(64, 64, 4, 1), Config(64, 64, 4, 2),
    ),
    128: Configs(
        Config(64, 64, 4, 3), Config(64, 64, 4, 2), Config(64, 64, 4, 2),
        Config(64, 64, 4, 1, 168), Config(64, 64, 4, 1), Config(64, 64, 4, 1), Config(64, 64, 8, 2),
    ),
    256: Configs(
        Config(128, 64, 8, 2), Config(64, 32, 4, 1), Config(32, 32, 4, 3),
        Config(64, 64, 4, 1), Config(64, 64, 8, 1), Config(64, 64, 8, 1),
    ),
}  # fmt: skip
# Of float32. Split, a number is the sum of three in bfloat16, and a product is six of these products on tensor cores:
# as exact as IEEE products on the ordinary arithmetic units, where larger tiles would overflow the registers.
SPLIT = {
    32: Configs(*[Config(64, 64, 4, 2)] * 3, one_launch=Config(32, 32, 8, 1)),
    64: Configs(Config(128, 32, 4, 2), *[Config(64, 32, 4, 2)] * 2, one_launch=Config(32, 32, 8, 1)),
    128: Configs(Config(64, 64, 4, 1), *[Config(64, 32, 4, 2)] * 2, one_launch=Config(16, 32, 8, 1)),
    256: Configs(*[Config(64, 16, 4, 1)] * 3),
}
SINGLE = {
    32: Configs(
        Config(64, 32, 4, 2), *[Config(32, 32, 4, 2)] * 2, one_launch=Config(32, 32, 8, 1), split=SPLIT[32]
    ),
    64: Configs(*[Config(32, 32, 4, 2)] * 3, one_launch=Config(32, 32, 8, 1), split=SPLIT[64]),
    128: Configs(
        Config(32, 32, 4, 2), *[Config(32, 32, 4, 1)] * 2, one_launch=Config(16, 32, 8, 1), split=SPLIT[128]
    ),
    256: Configs(Config(16, 32, 4, 1), *[Config(16, 16, 4, 1)] * 2, split=SPLIT[256]),
}


def splits_float32(device: torch.device) -> bool:
    """Whether the products of float32 run on tensor cores: on Hopper, for whose shared memory the tiles are."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device)[0] == 9


def padded(d: int) -> int:
    """The width a kernel works with: the next power of two, at least 16."""
    return max(16, 1 << (d - 1).bit_length())


def default(d_k: int, d_v: int, dtype: torch.dtype) -> Configs:
    """The stored configuration of these widths, at most 256."""
    return (SINGLE if dtype == torch.float32 else HALF)[max(32, padded(d_k), padded(d_v))]


MAX_GROUP = 64  # query heads per key head of the kernel for few queries: one tile
MIN_KEYS = 8  # for each of several queries: with fewer, a plan is worth its time


def has_few_queries(pattern: Pattern, n: int, m: int, group: int, per_row: bool) -> bool:
    """Whether a call without bias and dropout runs without a plan: one query, a few that continue a long sequence, or
    any number whose positions differ by batch row. Their keys are formulas of the position."""
    few = n == 1 or per_row or (n * group <= MAX_GROUP and m >= MIN_KEYS * n)
    return few and group <= MAX_GROUP and run_formulas(pattern) is not None


# What is computed

PLAIN = Extras()


def on_device(extras: Extras, device: torch.device) -> Extras:
    """The inputs as the kernels read them: contiguous, on this device, the bias in float32 and base 2."""
    # `==` of a tensor takes 20 µs.
    absent = extras.table is extras.slopes is extras.lengths is extras.at is None
    if absent and (extras.sink is None or extras.sink.is_contiguous()):
        return extras
    table, slopes = (None if x is None else x.detach().float().mul(LOG2E).contiguous() for x in extras[:2])
    lengths, at = _integers(extras.lengths, device), _integers(extras.at, device)
    sink = None if extras.sink is None else extras.sink.contiguous()
    return Extras(table, slopes, lengths, extras.seed, at, sink=sink)


def kinds_of_rows(extras: Extras) -> tuple[int, bool, tuple[torch.dtype, ...], bool]:
    """`lengths`, `per_row`, `dtypes` and `has_sink` of a CallLayout."""
    dtypes = tuple(x.dtype for x in (extras.lengths, extras.at, extras.sink) if x is not None)
    lengths = 0 if extras.lengths is None else extras.lengths.dim()
    return lengths, extras.at is not None, dtypes, extras.sink is not None


def _integers(x: Tensor | None, device: torch.device) -> Tensor | None:
    """32- or 64-bit integers as they are: a conversion would be another launch."""
    if x is None or (x.device == device and x.dtype in (torch.int32, torch.int64) and x.is_contiguous()):
        return x
    return x.to(device, torch.int32).contiguous()


def base2(scale: float) -> float:
    """The scale of scores in base 2. Never 0, because it multiplies the −∞ of pairs that are not allowed."""
    return max(scale * LOG2E, 1e-30)


# The largest softcap of the Hopper kernels: c · tanh(x / c) has an error of about 3 · 10⁻⁷ c there, by estimate.
MAX_SOFTCAP = 1024.0


@dataclass(frozen=True, eq=False)
class Task:
    """What one call computes, without its tensors. Compared by identity: equal calls share one object."""

    pattern: Pattern
    start: int  # query r is at position start + step · r
    step: int
    scale: float  # above 0, as `attention` passes it: kernels take the running maximum before scaling
    dropout_p: float
    softcap: float | None
    configs: Configs
    reach: int | None = None  # of the bias table; None: no table
    has_slopes: bool = False

    @property
    def plain(self) -> bool:
        """Neither bias, softcap nor dropout."""
        return self.fits_hopper and self.softcap is None

    @property
    def fits_hopper(self) -> bool:
        """Whether it has no terms that only the general kernels support."""
        has_bias = self.reach is not None or self.has_slopes
        return not has_bias and self.dropout_p == 0 and (self.softcap or 0.0) <= MAX_SOFTCAP

    @property
    def factors(self) -> tuple[float, float]:
        """Of the Hopper kernels: the factor of scores in base 2; and that of products in the exponent of a softcap's
        tanh, 0 without a softcap."""
        if self.softcap is None:
            return base2(self.scale), 0.0
        return base2(self.softcap), 2.0 * LOG2E * self.scale / self.softcap


@lru_cache(maxsize=256)
def _task(options: Options, reach: int | None, has_slopes: bool, configs: Configs, is_default: bool) -> Task:
    result = Task(*options, configs, reach, has_slopes)
    return replace(result, configs=configs.without_caps()) if is_default and not result.plain else result


def task(
    q: Float[Tensor, "b h n d_k"],
    v: Float[Tensor, "b h_kv m d_v"],
    options: Options,
    extras: Extras = PLAIN,
    configs: Configs | None = None,
) -> Task:
    """The task, with the stored configuration of these widths unless one is given."""
    reach = None if extras.table is None else extras.table.shape[-1] // 2
    stored = default(q.shape[-1], v.shape[-1], q.dtype) if configs is None else configs
    arguments = options, reach, extras.slopes is not None, stored, configs is None
    # A cache would keep the tables of ids; their launches are found by the values of a task.
    return (_task.__wrapped__ if isinstance(options.pattern, Packed) else _task)(*arguments)


# Shapes and strides


class Layout(NamedTuple):
    """Shape and strides of a tensor, and whether it begins at a multiple of 16 bytes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    aligned: bool

    @property
    def strides(self) -> tuple[int, ...]:
        """Of batch, head and row; numbers of a row are adjacent."""
        return self.stride[:3]

    def like(self) -> "Layout":
        """The layout that torch.empty_like gives a tensor of this one."""
        if self.stride == contiguous(*self.shape).stride:
            return self
        result = torch.empty_like(torch.empty_strided(self.shape, self.stride, device="meta"))
        return self._replace(stride=result.stride())


def layout(x: Tensor) -> Layout:
    return Layout(x.shape, x.stride(), x.data_ptr() % 16 == 0)


def contiguous(*shape: int) -> Layout:
    _, h, n, d = shape
    return Layout(shape, (h * n * d, n * d, d, 1), True)


def exceeds_int32(*layouts: Layout) -> bool:
    """Whether an offset within one head can pass 2³¹."""
    return any(x.shape[2] * x.stride[2] >= 2**31 for x in layouts)


def as_one_head(layouts: tuple[Layout, ...]) -> tuple[Layout, ...] | None:
    """All heads as one long sequence, if the memory layout allows it."""
    b, h, n, d = layouts[0].shape
    flat = tuple(x._replace(shape=(1, 1, b * h * n, d)) for x in layouts)
    for x in layouts:
        batch, head, row = x.strides
        if x.shape != layouts[0].shape or (h > 1 and head != n * row) or (b > 1 and batch != h * n * row):
            return None
    return None if exceeds_int32(*flat) else flat


OPTIONAL_INPUTS = "dlse", "table", "slopes", "lengths", "at", "sink"  # in the order of `Extras`, after dlse


class CallLayout(NamedTuple):
    """Everything that is known about a call without its tensors; prepared launches are cached by it."""

    task: Task
    tensors: tuple[Layout, ...]  # q, k, v; backward also o and the gradient of o
    dtype: torch.dtype
    device: torch.device
    lengths: int = 0  # numbers that say which keys of a batch row are hidden: none, the end, or begin and end
    per_row: bool = False  # the position of the query differs by batch row
    dtypes: tuple[torch.dtype, ...] = ()  # of lengths, positions and the sink
    has_sink: bool = False  # forward: the softmax of each head has a sink, which the kernels may join
    has_dlse: bool = False  # backward: the log-sum-exp has a gradient
    bias_gradient: bool = False  # backward: the bias needs a gradient

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """b, h, h_kv, n, m, d_k, d_v."""
        q, k, v = (x.shape for x in self.tensors[:3])
        return q[0], q[1], k[1], q[2], k[2], q[3], v[3]

    @property
    def configs(self) -> Configs:
        """The stored configurations for this device."""
        split = self.task.configs.split if self.dtype == torch.float32 else None
        return split if split is not None and splits_float32(self.device) else self.task.configs

    @property
    def place(self) -> Place:
        return self.task.pattern, self.sizes[3], self.sizes[4], self.task.start, self.task.step

    @property
    def output(self) -> Layout:
        """The layout of o, with the axes in the same order in memory as in q. A model that stores the heads of a
        position together, and reads o in that order, then needs no copy of it."""
        (b, h, n, _), d_v = self.tensors[0].shape, self.tensors[2].shape[-1]
        _, of_head, of_query, _ = self.tensors[0].stride
        if not self.has_few_queries and of_head < of_query and n > 1 and h > 1:
            return Layout((b, h, n, d_v), (n * h * d_v, d_v, h * d_v, 1), True)
        return contiguous(b, h, n, d_v)

    @property
    def has_few_queries(self) -> bool:
        """Whether the forward kernel for few queries runs it; its output is contiguous."""
        (_, h, h_kv, n, m, *_), task = self.sizes, self.task
        has_bias = task.reach is not None or task.has_slopes
        sizes = n, m, h // h_kv, self.per_row
        return not has_bias and not task.dropout_p and has_few_queries(task.pattern, *sizes)

    @property
    def optional_inputs(self) -> tuple[str, ...]:
        """Which of OPTIONAL_INPUTS this call has."""
        of_bias = self.task.reach is not None, self.task.has_slopes
        of_rows = self.lengths > 0, self.per_row, self.has_sink
        return tuple(compress(OPTIONAL_INPUTS, (self.has_dlse, *of_bias, *of_rows)))


def call_layout(task: Task, tensors: tuple[Tensor, ...], extras: Extras, *more: bool) -> CallLayout:
    """Of q, k, v and, backward, o and its gradient; more: has_dlse, bias_gradient."""
    q = tensors[0]
    return CallLayout(task, tuple(map(layout, tensors)), q.dtype, q.device, *kinds_of_rows(extras), *more)


# A backward pass in one launch takes the CPU 10 to 30 µs less than one in three, and the GPU longer: with heads of 64
# about 1.3 times as long, with wider ones and in float32 2 to 3 times (one H200, 148 calls). It is chosen where the
# GPU would wait for the CPU. Limits: pairs of a head, allowed or not; and allowed pairs of all heads, in 16 bits with
# heads up to 64 wide, with wider ones, and in float32.
MAX_PAIRS = 1 << 20
MAX_ALLOWED_NARROW, MAX_ALLOWED_WIDE, MAX_ALLOWED_FLOAT32 = 1 << 24, 1 << 22, 1 << 20


def one_launch(place: Place, heads: int, width: int, dtype: torch.dtype) -> bool:
    """Whether the backward pass is one launch, as for calls so short that the GPU would wait for the CPU."""
    pattern, n, m, start, step = place
    if n * m > MAX_PAIRS or width > 128:
        return False
    limit = MAX_ALLOWED_NARROW if width <= 64 else MAX_ALLOWED_WIDE
    limit = MAX_ALLOWED_FLOAT32 if dtype == torch.float32 else limit
    return heads * pattern.count(n, m, (start, step)) <= limit


def one_launch_config(call: CallLayout) -> Config | None:
    """The configuration of the one-launch backward; None if there is none, or if the call is too long or too wide, or
    has extras or documents."""
    b, h, _, _, _, d_k, d_v = call.sizes
    if call.per_row or isinstance(call.task.pattern, Packed):
        return None
    short = one_launch(call.place, b * h, max(d_k, d_v), call.dtype) and not exceeds_int32(*call.tensors)
    return call.configs.one_launch if short and call.task.plain and not call.lengths else None
