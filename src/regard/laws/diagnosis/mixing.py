"""Which outputs depend on inputs that they must not depend on: those of other batch rows, heads or queries."""

from typing import Any

import torch
from torch import Tensor

from ..harness import Harness
from .cause import Cause
from .samples import Sample, observe

AXES = (
    (0, "qkv", "batch rows are mixed: an output depends on another row of the batch", "batch rows mixed",
     "compute each batch row by itself"),
    (1, "qkv", "heads are mixed: the output of a head depends on another head", "heads mixed",
     "keep the heads apart"),
    (2, "q", "queries are mixed: an output depends on another query", "queries mixed",
     "softmax over the keys of each query; keep the rows apart"),
)  # fmt: skip


def mixed(harness: Harness, plain: Sample) -> Cause | None:
    """A cause if changing one row, head or query changes the output of another one."""
    call = plain.call
    for axis, names, name, family, fix in AXES:
        if call.q.shape[axis] < 2 or (axis == 1 and call.k.shape[1] != call.q.shape[1]):
            continue
        before = observe(harness, plain)[0].clone()
        for letter in names:
            for changed, read in ((1, 0), (0, 1)):
                x: Tensor = getattr(call, letter)
                other = x.clone()
                other.select(axis, changed).add_(
                    1.0 + torch.arange(x.shape[-1], dtype=x.dtype, device=x.device)
                )
                replaced: dict[str, Any] = {letter: other}
                after = observe(harness, plain._replace(call=call._replace(**replaced)))[0]
                gap = float((after - before).abs().select(axis, read).max())
                if gap > 1e-6:
                    index = ("batch row", "head", "query")[axis]
                    text = f"changing {letter} of {index} {changed} changes the output of {index} {read} by {gap:.3g}"
                    return Cause(name, family, fix, f"{text} ({plain.describe()})", exact=False)
    return None
