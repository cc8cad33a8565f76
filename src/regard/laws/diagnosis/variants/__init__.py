"""Faults that people make in attention, each as a small change of the formula."""

from ..formula import Variant
from .backward import GRADIENTS
from .causal_window import CAUSAL, WINDOW
from .masks import MASK, MASK_VALUES
from .outputs import GROUPED, OUTPUT
from .padding import BIAS, DOCUMENTS, LENGTHS
from .positions import ALIBI, ROTARY
from .precision import PRECISION
from .scale import SCALE
from .scores import SCORES
from .softmax import SOFTMAX
from .tiles import TILES

VARIANTS: tuple[Variant, ...] = (
    *SCALE,
    *SCORES,
    *SOFTMAX,
    *OUTPUT,
    *TILES,
    *GROUPED,
    *MASK,
    *MASK_VALUES,
    *CAUSAL,
    *WINDOW,
    *LENGTHS,
    *DOCUMENTS,
    *BIAS,
    *ROTARY,
    *ALIBI,
    *PRECISION,
    *GRADIENTS,
)

# Faults that are combined in pairs if none of them matches alone.
CORE: tuple[Variant, ...] = (*SCALE, *SCORES, *SOFTMAX[:21], *OUTPUT)

__all__ = ["CORE", "GRADIENTS", "PRECISION", "VARIANTS"]
