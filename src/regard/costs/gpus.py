"""Graphics cards: memory, bandwidth and peak rates, from the data sheets of their makers.

Rates are dense (without structured sparsity), 16-bit products with float32 sums, float32 without TF32.
"""

from typing import NamedTuple

from ..errors import SpecError, nearest
from ..machine import Roofline
from .trace.attention import Gpu

GB, TB, TFLOPS = 10**9, 10**12, 10**12
PRODUCTS, BANDWIDTH = 0.8, 0.87  # shares that large products and copies reach (`regard bench machine`)
KERNEL_S = 2.5e-6  # time of the shortest kernel
HOST_S = 13e-6  # time of the CPU to launch one operation


class Card(NamedTuple):
    """One card: bytes of memory, bytes/s, FLOP/s in 16 bits and in float32, what decides its kernels."""

    memory: int
    bandwidth: float
    half: float
    single: float
    gpu: Gpu
    source: str

    @property
    def described(self) -> str:
        rates = f"{self.half / TFLOPS:,.0f} TFLOP/s in 16 bits, {self.single / TFLOPS:,.1f} in float32"
        return f"{self.memory / GB:,.0f} GB, {self.bandwidth / TB:.2f} TB/s, {rates} ({self.source})"

    def roofline(self, name: str) -> Roofline:
        half = PRODUCTS * self.half
        rates = {"float32": PRODUCTS * self.single, "bfloat16": half, "float16": half}
        return Roofline(name, rates, BANDWIDTH * self.bandwidth, KERNEL_S, {"source": self.source}, HOST_S)


def _card(gb: int, tb: float, half: int, single: int | float, gpu: Gpu, source: str) -> Card:
    return Card(gb * GB, tb * TB, half * TFLOPS, single * TFLOPS, gpu, f"NVIDIA {source}")


CARDS: dict[str, Card] = {  # GB, TB/s, TFLOP/s in 16 bits and in float32, capability and multiprocessors
    "b200": _card(180, 8.0, 2250, 75, Gpu((10, 0), 148), "HGX B200 data sheet"),
    "h200": _card(141, 4.8, 989, 67, Gpu((9, 0), 132), "H200 data sheet (SXM)"),
    "h100": _card(80, 3.35, 989, 67, Gpu((9, 0), 132), "H100 data sheet (SXM)"),
    "a100-80": _card(80, 2.039, 312, 19.5, Gpu((8, 0), 108), "A100 data sheet (SXM)"),
    "a100-40": _card(40, 1.555, 312, 19.5, Gpu((8, 0), 108), "A100 data sheet"),
    "l40s": _card(48, 0.864, 362, 91.6, Gpu((8, 9), 142), "L40S data sheet"),
    "l4": _card(24, 0.3, 121, 30.3, Gpu((8, 9), 58), "L4 data sheet"),
    "4090": _card(24, 1.008, 165, 82.6, Gpu((8, 9), 128), "Ada architecture paper"),
    "3090": _card(24, 0.936, 71, 35.6, Gpu((8, 6), 82), "Ampere GA102 paper"),
}


def card(name: str) -> Card:
    key = name.lower().removeprefix("rtx").strip(" -")
    if key not in CARDS:
        raise SpecError(f"unknown GPU {name!r}; {nearest(key, list(CARDS))}")
    return CARDS[key]
