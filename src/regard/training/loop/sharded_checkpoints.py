"""Sharded tensors in safetensors files, written and read by torch.distributed.checkpoint.

The writer and reader for Hugging Face's format are used, since the default ones pickle their metadata. Unsharded
tensors are written by one rank each. Files that a single process wrote are read too: the number of ranks may change.
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
    """Each rank writes its parts to its own file. All ranks call it together."""
    writer = HuggingFaceStorageWriter(str(at), save_distributed=True)
    try:
        dcp.save({name: t.detach() for name, t in tensors.items()}, storage_writer=writer)
    except CheckpointException as e:
        raise RegardError(_cause(e)) from e


def shapes(at: Path) -> dict[str, tuple[int, ...]]:
    """The full shape of every tensor of a folder."""
    metadata: dict[str, Any] = HuggingFaceStorageReader(str(at)).read_metadata().state_dict_metadata
    return {name: tuple(tensor.size) for name, tensor in metadata.items()}


def fill(at: Path, tensors: dict[str, Tensor], ranks: Ranks) -> None:
    """Read each tensor, or this rank's part of it, in place. All ranks call it together."""
    reader = HuggingFaceStorageReader(str(at))
    live = {name: t.detach() for name, t in tensors.items()}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "torch.distributed is disabled"
            )  # as intended for a single process
            dcp.load(live, storage_reader=reader, no_dist=ranks.world == 1)
    except CheckpointException as e:
        raise FormatError(f"{at} cannot be read: {_cause(e)}") from e


def _cause(e: CheckpointException) -> str:
    rank, (cause, _) = next(iter(e.failures.items()))
    return f"{cause} (rank {rank})"
