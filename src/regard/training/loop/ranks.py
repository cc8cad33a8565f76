"""A single process, or one of those that `torchrun` started, and their communication.

A recipe defines an update; the ranks share its work. So a rank's loss is divided by the number of predictions of all
ranks, and every decision (whether the time is up, whether Ctrl-C was pressed) is taken by all ranks together.
"""

import atexit
import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor, nn

from ...errors import BackendError, RegardError, SpecError
from ...nn.block import Block

T = TypeVar("T")
REPLICATE, SHARD = "replicate", "shard"
NO_GPU = "PyTorch finds no usable GPU (is there one, and is its driver new enough? see nvidia-smi)"


@dataclass(frozen=True)
class Ranks:
    """Rank `rank` of `world`, number `local` on its machine. With one rank, no method communicates."""

    rank: int = 0
    world: int = 1
    local: int = 0

    @staticmethod
    def here() -> "Ranks":
        """From torchrun's environment variables; a single rank without them."""
        world = int(os.environ.get("WORLD_SIZE", 1))
        if world == 1 or "RANK" not in os.environ:
            return ALONE
        if not dist.is_available():
            raise BackendError(
                f"WORLD_SIZE={world}, but this PyTorch was built without torch.distributed; start one process"
            )
        ranks = Ranks(int(os.environ["RANK"]), world, int(os.environ.get("LOCAL_RANK", 0)))
        if not dist.is_initialized():
            if torch.cuda.is_available():
                torch.cuda.set_device(ranks.local)
            # Small numbers are exchanged by gloo, so that this never synchronizes with a GPU.
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
            atexit.register(_destroy_process_group)
        return ranks

    def device(self, requested: str | torch.device | None = None) -> torch.device:
        """The device of this rank: its own GPU where GPUs are requested, or available."""
        try:
            device = torch.device(requested or ("cuda" if torch.cuda.is_available() else "cpu"))
        except RuntimeError as e:
            raise SpecError(f"device={requested!r} is unknown; use 'cpu', 'cuda' or 'cuda:1'") from e
        if device.type == "cuda" and not torch.cuda.is_available():
            reason = "this PyTorch was built without CUDA" if torch.version.cuda is None else NO_GPU
            raise BackendError(f"device={str(requested)!r}: {reason}; use device='cpu'")
        if self.world > 1 and device.type == "cuda":
            return torch.device("cuda", self.local)
        return device

    def distribute(self, task: nn.Module, mode: str, compiled: bool) -> Callable[..., Any]:
        """What to call in place of the task. Weights become those of rank 0; "shard" shards them in place.

        "replicate": every rank holds all weights (DDP). "shard": each holds a part, gathered block by block
        (FSDP2); there each block is compiled separately, since parameters are communicated between blocks.
        """
        if self.world == 1:
            return torch.compile(task) if compiled else task
        device = next(task.parameters()).device
        if mode == SHARD:
            _shard(task, device, self.world, compiled)
            return task
        ids = [device.index] if device.type == "cuda" else None
        replicated = nn.parallel.DistributedDataParallel(task, device_ids=ids)
        return torch.compile(replicated) if compiled else replicated

    def sum(self, *values: int | float) -> list[Any]:
        """Each number summed over the ranks."""
        if self.world == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def gather(self, text: str) -> list[str]:
        """The text of each rank, in order of rank."""
        if self.world == 1:
            return [text]
        raw = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else torch.zeros(0).byte()
        sizes = [torch.zeros((), dtype=torch.long) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor(len(raw)))
        longest = max(int(s) for s in sizes)
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(texts, nn.functional.pad(raw, (0, longest - len(raw))))
        return [bytes(t[: int(s)].tolist()).decode() for t, s in zip(texts, sizes, strict=True)]

    def on_all(self, act: Callable[[], T]) -> T:
        """Call `act` on every rank; if one fails, all raise its message."""
        try:
            result = act()
        except RegardError as e:
            self.gather(str(e))
            raise
        if failed := [(r, text) for r, text in enumerate(self.gather("")) if text]:
            raise RegardError("rank {}: {}".format(*failed[0]))
        return result

    def on_first(self, act: Callable[[], T]) -> T | None:
        """Call `act` on rank 0 while the others wait; an error is raised on all ranks."""
        return self.on_all(act if self.rank == 0 else lambda: None)


ALONE = Ranks()


def without_sync(call: Callable[..., Any]) -> AbstractContextManager[None]:
    """A context in which DDP only accumulates gradients. Shards reduce theirs each time, to hold only a part."""
    return getattr(call, "no_sync", contextlib.nullcontext)()


def full_tensor(tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """A sharded tensor gathered from all ranks; every rank has to call it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local_part(tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """This rank's part of a tensor, not copied."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _shard(task: nn.Module, device: torch.device, world: int, compiled: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for tensor in (*task.parameters(), *task.buffers()):
        dist.broadcast(tensor.detach(), 0)
    mesh = init_device_mesh(device.type, (world,))
    for block in [m for m in task.modules() if isinstance(m, Block)]:
        if compiled:
            block.compile()
        fully_shard(block, mesh=mesh)
    # By default the outermost weights stay gathered until a backward pass, so after a validation they would stay so.
    fully_shard(task, mesh=mesh, reshard_after_forward=True)


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
