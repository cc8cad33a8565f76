"""The settings of a training run, as one value."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

from ...errors import SpecError
from ...schedule import Schedule
from .averaging import ema, last
from .optimizer import AdamW
from .ranks import REPLICATE, SHARD

ADAMW = AdamW()


@dataclass(frozen=True)
class Settings:
    """How a model is trained: length, batches, schedule, optimizer, checkpoints."""

    steps: int  # updates
    tokens: int  # per batch, padding included
    schedule: Schedule
    _: KW_ONLY
    optimizer: AdamW = ADAMW
    minutes: int | float | None = None  # train for this time; the schedule of `steps` is stretched to it
    clip: int | float | None = 1.0  # maximum global norm of the gradient
    accumulate: int = 1  # batches per update, over all ranks
    packed: bool = False  # several texts per row, one after the other, instead of rows of similar length
    bucketed: bool = False  # lengths rounded up, so that batches have few shapes
    average: ema | last | None = None
    autocast: str | None = None  # "bfloat16" or "float16"
    parallel: str = REPLICATE  # each rank holds all weights, or with "shard" a part of them
    compile: bool = False
    graphs: bool = True  # on a GPU, updates whose shapes repeat are replayed as CUDA graphs
    seed: int = 0
    save_every: int = 500
    keep: int = 3
    log_every: int = 20
    valid_every: int = 500
    # Stop after more than this many validations without improvement; the model is then that of the best validation.
    patience: int | None = None

    def __post_init__(self):
        for name in ("steps", "tokens", "accumulate", "save_every", "keep", "log_every", "valid_every"):
            _require_whole(name, getattr(self, name), at_least=1)
        if self.patience is not None:
            _require_whole("patience", self.patience, at_least=0)
        _require_whole("seed", self.seed)
        if abs(self.seed) > 2**32:
            raise SpecError(f"seed={self.seed}: it needs to be between -2^32 and 2^32")
        if self.minutes is not None and not self.minutes > 0:
            raise SpecError(f"minutes={self.minutes}: it needs to be more than 0")
        if self.clip is not None and not self.clip > 0:
            raise SpecError(f"clip={self.clip}: the norm needs to be more than 0; None does not clip")
        if self.autocast not in (None, "bfloat16", "float16"):
            raise SpecError(f"autocast={self.autocast!r}; use 'bfloat16', 'float16' or None")
        if self.parallel not in (REPLICATE, SHARD):
            raise SpecError(f"parallel={self.parallel!r}; use {REPLICATE!r} or {SHARD!r}")
        if self.packed and self.bucketed:
            raise SpecError("packed=True and bucketed=True cannot be combined; packed rows have one length")
        if isinstance(self.average, last) and self.average.k > self.keep:
            raise SpecError(
                f"{self.average} averages more checkpoints than keep={self.keep} stores; raise keep"
            )


def _require_whole(name: str, given: Any, at_least: int | None = None) -> None:
    if not isinstance(given, int) or isinstance(given, bool):
        raise SpecError(f"{name}={given!r}: a whole number is needed")
    if at_least is not None and given < at_least:
        raise SpecError(f"{name}={given}: it needs to be at least {at_least}")
