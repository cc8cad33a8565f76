"""Tensors of which each rank holds a part, in safetensors files: PyTorch's distributed checkpoint does the work.

Its writer and reader for Hugging Face's format are used: the default ones pickle what they know of the tensors. Plain
tensors are written by one rank each, and files that one process wrote are read too: the number of ranks may change.
"""

import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from ...errors import FormatError, RegardError
from .ranks import Ranks


def save(at: Path, tensors: dict[str, Tensor]) -> None:
    """Each rank writes its parts to a file of its own. All ranks call it together."""
    writer = HuggingFaceStorageWriter(str(at), save_distributed=True)
    try:
        dcp.save({name: t.detach() for name, t in tensors.items()}, storage_writer=writer)
    except CheckpointException as e:
        raise RegardError(_cause(e)) from e


def shapes(at: Path) -> dict[str, tuple[int, ...]]:
    """Every tensor of a folder, as large as all its parts together."""
    found: dict[str, Any] = HuggingFaceStorageReader(str(at)).read_metadata().state_dict_metadata
    return {name: tuple(kept.size) for name, kept in found.items()}


def fill(at: Path, tensors: dict[str, Tensor], ranks: Ranks) -> None:
    """Read each tensor, or the part this rank holds, into its place. All ranks call it together."""
    reader = HuggingFaceStorageReader(str(at))
    live = {name: t.detach() for name, t in tensors.items()}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it should be, alone
            dcp.load(live, storage_reader=reader, no_dist=ranks.world == 1)
    except CheckpointException as e:
        raise FormatError(f"{at} cannot be read: {_cause(e)}") from e


def _cause(e: CheckpointException) -> str:
    rank, (cause, _) = next(iter(e.failures.items()))
    return f"{cause} (rank {rank})"
