"""One process, or one of the many that `torchrun` started: who it is, and what they do together.

A recipe says what an update is; the ranks only share its work. So a rank's losses are divided by what all ranks
predict, and every decision (when the time is up, whether someone pressed Ctrl-C) is one that all of them take.
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

from ...errors import BackendError, RegardError
from ...nn.block import Block

T = TypeVar("T")
REPLICATE, SHARD = "replicate", "shard"


@dataclass(frozen=True)
class Ranks:
    """Rank `rank` of `world`, the `local`-th on its machine. Alone, everything here does nothing."""

    rank: int = 0
    world: int = 1
    local: int = 0

    @staticmethod
    def here() -> "Ranks":
        """As torchrun's environment says; alone where it says nothing."""
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
            # Small numbers travel by gloo, so that agreeing on them never waits for a device.
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
            atexit.register(_leave)
        return ranks

    def device(self, asked: str | torch.device | None = None) -> torch.device:
        """The device of this rank: its own GPU where GPUs are asked for, or are there."""
        device = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
        if self.world > 1 and device.type == "cuda":
            return torch.device("cuda", self.local)
        return device

    def spread(self, task: nn.Module, how: str, compiled: bool) -> Callable[..., Any]:
        """What to call in the task's place. Its weights become rank 0's, and those of shards are cut in place.

        "replicate": every rank holds all weights (DDP). "shard": each holds a part, gathered block by block
        (FSDP2); there blocks are compiled one by one, since between them parts travel.
        """
        if self.world == 1:
            return torch.compile(task) if compiled else task
        device = next(task.parameters()).device
        if how == SHARD:
            _shard(task, device, self.world, compiled)
            return task
        ids = [device.index] if device.type == "cuda" else None
        whole = nn.parallel.DistributedDataParallel(task, device_ids=ids)
        return torch.compile(whole) if compiled else whole

    def sum(self, *values: int | float) -> list[Any]:
        """Each number summed over the ranks."""
        if self.world == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def everyone(self, word: str) -> list[str]:
        """What each rank says, in their order."""
        if self.world == 1:
            return [word]
        said = (
            torch.frombuffer(bytearray(word.encode()), dtype=torch.uint8) if word else torch.zeros(0).byte()
        )
        sizes = [torch.zeros((), dtype=torch.long) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor(len(said)))
        most = max(int(s) for s in sizes)
        texts = [torch.zeros(most, dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(texts, nn.functional.pad(said, (0, most - len(said))))
        return [bytes(t[: int(s)].tolist()).decode() for t, s in zip(texts, sizes, strict=True)]

    def all(self, act: Callable[[], T]) -> T:
        """Every rank acts; where one fails, all do, with its message."""
        try:
            done = act()
        except RegardError as e:
            self.everyone(str(e))
            raise
        if failed := [(r, text) for r, text in enumerate(self.everyone("")) if text]:
            raise RegardError("rank {}: {}".format(*failed[0]))
        return done

    def first(self, act: Callable[[], T]) -> T | None:
        """Rank 0 acts and the others wait for it; its error is everyone's."""
        return self.all(act if self.rank == 0 else lambda: None)


ALONE = Ranks()


def silent(call: Callable[..., Any]) -> AbstractContextManager[None]:
    """Gradients that are not sent yet: more are to be added. Shards send theirs each time, to hold only a part."""
    return getattr(call, "no_sync", contextlib.nullcontext)()


def whole(tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """All of a tensor of which each rank has a part; every rank has to ask."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def part(tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """What this rank holds of a tensor, in place."""
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
    # By default the outermost weights stay whole until a backward pass, so after a validation for ever.
    fully_shard(task, mesh=mesh, reshard_after_forward=True)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
