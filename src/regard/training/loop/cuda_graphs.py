"""Whole updates replayed as CUDA graphs, one per batch shape: the host launches one graph instead of 1,000 kernels.

An update of a small model is limited by the host: launching its kernels takes longer than running them. A graph
contains the forward pass, the backward pass, clipping and the optimizer's step. All graphs share one memory pool,
since no two run at the same time and nothing in the pool is read after a replay.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

EAGER_UPDATES = 2  # of each shape before it is captured: they compile kernels and fill caches
MAX_GRAPHS = 256

Inputs = list[dict[str, Tensor]]  # of the batches of an update
Work = Callable[[Inputs, Tensor], tuple[Tensor, Tensor]]


@dataclass
class Graph:
    """A captured update: replay it after its inputs were written."""

    graph: Any
    inputs: Inputs
    results: tuple[Tensor, Tensor]


@dataclass
class GraphedUpdates:
    """Runs `work(inputs, divisor)`, and from the third time of a shape on replays it.

    `work` must not read results on the host, and its random numbers must come from the GPU's generator. Where a
    capture shows otherwise, all updates run without graphs, and `refused` says why.
    """

    work: Work
    device: torch.device
    refused: str | None = None
    graphs: dict[Any, Graph] = field(default_factory=dict)
    seen: dict[Any, int] = field(default_factory=dict)

    def __post_init__(self):
        self.divisor = torch.ones((), device=self.device)
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, inputs: Inputs, divisor: float) -> tuple[Tensor, Tensor]:
        """The results of `work` for these batches, which may be in pinned memory."""
        self.divisor.fill_(divisor)
        key = tuple((name, t.shape, t.dtype) for batch in inputs for name, t in batch.items())
        found = self.graphs.get(key)
        if found is None and self._should_capture(key):
            found = self._capture(inputs)
            if found is not None:
                self.graphs[key] = found
        if found is None:
            return self.work([_on(batch, self.device) for batch in inputs], self.divisor)
        for ours, new in zip(found.inputs, inputs, strict=True):
            for name, t in new.items():
                ours[name].copy_(t, non_blocking=True)
        found.graph.replay()
        total, norm = (t.clone() for t in found.results)
        return total, norm

    def _should_capture(self, key: Any) -> bool:
        times = self.seen[key] = self.seen.get(key, 0) + 1
        return self.refused is None and times > EAGER_UPDATES and len(self.graphs) < MAX_GRAPHS

    def _capture(self, inputs: Inputs) -> Graph | None:
        """Record an update without running it; None where it cannot be replayed."""
        static = [{name: torch.empty_like(t, device=self.device) for name, t in b.items()} for b in inputs]
        for ours, new in zip(static, inputs, strict=True):  # valid ids, should a kernel check them
            for name, t in new.items():
                ours[name].copy_(t)
        results = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        before, graph = torch.get_rng_state(), torch.cuda.CUDAGraph()
        try:
            with _no_garbage_collection(), torch.cuda.graph(graph, pool=self.pool):
                for kept, result in zip(results, self.work(static, self.divisor), strict=True):
                    kept.copy_(result)
        except RuntimeError as e:
            message = (str(e).splitlines() or [type(e).__name__])[0]
            self.refused = f"an update reads results on the host ({message})"
        if not torch.equal(before, torch.get_rng_state()):
            torch.set_rng_state(before)
            self.refused = "an update samples random numbers on the host"
        return None if self.refused else Graph(graph, static, results)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Python might collect an older graph meanwhile; freeing its memory would end the capture with an error."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _on(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: t.to(device, non_blocking=True) for name, t in batch.items()}
