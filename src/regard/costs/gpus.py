"""Graphics cards: memory, bandwidth and peak rates, from the data sheets of their makers.

Rates are dense (without structured sparsity), 16-bit products with float32 sums, float32 without TF32. A large
product or copy reaches EFFICIENCY of them (`regard bench machine` on an H200).
"""

from typing import NamedTuple

from ..errors import SpecError, nearest
from ..machine import Roofline
from .trace.attention import Gpu

GB, TB, TFLOPS = 10**9, 10**12, 10**12
EFFICIENCY = {"products": 0.8, "bandwidth": 0.87}
KERNEL_S = 2.5e-6  # time of the shortest kernel
HOST_S = 13e-6  # time of the CPU to launch one operation


class Card(NamedTuple):
    """One card: bytes of memory, bytes/s, FLOP/s in 16 bits and in float32, multiprocessors, compute capability."""

    memory: int
    bandwidth: float
    half: float
    single: float
    multiprocessors: int
    capability: tuple[int, int]
    source: str

    @property
    def described(self) -> str:
        rates = f"{self.half / TFLOPS:,.0f} TFLOP/s in 16 bits, {self.single / TFLOPS:,.1f} in float32"
        return f"{self.memory / GB:,.0f} GB, {self.bandwidth / TB:.2f} TB/s, {rates} ({self.source})"

    @property
    def gpu(self) -> Gpu:
        return Gpu(self.capability, self.multiprocessors)

    def roofline(self, name: str) -> Roofline:
        products, bandwidth = EFFICIENCY["products"], EFFICIENCY["bandwidth"]
        half = products * self.half
        rates = {"float32": products * self.single, "bfloat16": half, "float16": half}
        return Roofline(name, rates, bandwidth * self.bandwidth, KERNEL_S, {"source": self.source}, HOST_S)


CARDS: dict[str, Card] = {
    "b200": Card(180 * GB, 8.0 * TB, 2250 * TFLOPS, 75 * TFLOPS, 148, (10, 0), "NVIDIA HGX B200 data sheet"),
    "h200": Card(141 * GB, 4.8 * TB, 989 * TFLOPS, 67 * TFLOPS, 132, (9, 0), "NVIDIA H200 data sheet (SXM)"),
    "h100": Card(80 * GB, 3.35 * TB, 989 * TFLOPS, 67 * TFLOPS, 132, (9, 0), "NVIDIA H100 data sheet (SXM)"),
    "a100-80": Card(
        80 * GB, 2.039 * TB, 312 * TFLOPS, 19.5 * TFLOPS, 108, (8, 0), "NVIDIA A100 data sheet (SXM)"
    ),
    "a100-40": Card(40 * GB, 1.555 * TB, 312 * TFLOPS, 19.5 * TFLOPS, 108, (8, 0), "NVIDIA A100 data sheet"),
    "l40s": Card(48 * GB, 0.864 * TB, 362 * TFLOPS, 91.6 * TFLOPS, 142, (8, 9), "NVIDIA L40S data sheet"),
    "l4": Card(24 * GB, 0.3 * TB, 121 * TFLOPS, 30.3 * TFLOPS, 58, (8, 9), "NVIDIA L4 data sheet"),
    "4090": Card(
        24 * GB, 1.008 * TB, 165 * TFLOPS, 82.6 * TFLOPS, 128, (8, 9), "NVIDIA Ada architecture paper"
    ),
    "3090": Card(24 * GB, 0.936 * TB, 71 * TFLOPS, 35.6 * TFLOPS, 82, (8, 6), "NVIDIA Ampere GA102 paper"),
}


def card(name: str) -> Card:
    key = name.lower().removeprefix("rtx").strip(" -")
    if key not in CARDS:
        raise SpecError(f"unknown GPU {name!r}; {nearest(key, list(CARDS))}")
    return CARDS[key]
