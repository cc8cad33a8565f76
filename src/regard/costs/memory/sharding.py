"""A training step over several ranks: what each one holds under FSDP2 or DDP.

fsdp  weights, gradients and optimizer state are divided; the weights of the block that runs and of the next one are
      gathered whole, and so is the gradient of the block before it is scattered
ddp   everything is on every rank, and gradients have a second copy in the buckets that are exchanged
"""

from collections import Counter

from ...spec.base import require_known, require_positive
from .allocator import Usage, replay
from .report import SMALL_LT, WORKSPACE
from .step import Step

STRATEGIES = ("fsdp", "ddp")


def per_rank(step: Step, ranks: int, strategy: str = "fsdp", limit: int | None = None) -> Usage:
    """Peak and reserved bytes of one rank."""
    require_positive("ranks", ranks)
    require_known("strategy", strategy, STRATEGIES)
    meter = step.trace.meter
    sizes = [r.bytes for r in meter.records]
    held = step.weights | step.gradients | step.state
    buffers = [WORKSPACE - SMALL_LT, SMALL_LT] * 2 if step.trace.device == "cuda" else []
    if ranks > 1 and strategy == "ddp":
        buffers.append(sum(sizes[k] for k in step.gradients))
    elif ranks > 1:
        buffers += [2 * _largest_block(step), _largest_block(step)]
        sizes = [-(-size // ranks) if key in held else size for key, size in enumerate(sizes)]
    setup = [*meter.events[: step.begin], *((len(sizes) + i, 1) for i in range(len(buffers)))]
    return replay(
        [*sizes, *buffers], setup, meter.events[step.begin :], step.state, step.trace.device, 2, limit
    )


def _largest_block(step: Step) -> int:
    """Bytes of the weights of the largest repeated block: modules under one number, as in layers.3."""
    blocks: Counter[str] = Counter()
    for key in step.weights:
        parts = step.owners.get(key, "").split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
        blocks[".".join(parts[: at + 1])] += step.trace.meter.records[key].bytes
    return max(blocks.values(), default=0)
