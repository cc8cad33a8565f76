"""A model saved as a folder: config.json (the declaration) and model.safetensors (the weights)."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_model, save_model
from torch import nn

from .. import spec, value
from ..errors import FormatError, RegardError

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def save(model: nn.Module, folder: str | Path) -> Path:
    """Write the declaration and the weights; tied weights are stored once."""
    declared = getattr(model, "spec", None)
    if not isinstance(declared, spec.Spec):
        raise RegardError(
            f"{type(model).__name__} was not built from a spec, so it has no declaration to save"
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps({"format": 1, "spec": value.to_plain(declared)}, indent=1) + "\n")
    save_model(model, str(folder / WEIGHTS))
    return folder


def load(folder: str | Path, device: torch.device | str = "cpu") -> nn.Module:
    """Build the saved declaration and load its weights; tied weights are tied again."""
    folder = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise FormatError(
                f"{folder} contains no {name}; a folder written by rg.save has {CONFIG} and {WEIGHTS}"
            )
    try:
        config = json.loads((folder / CONFIG).read_text())
    except json.JSONDecodeError as e:
        raise FormatError(f"{folder / CONFIG} is not JSON: {e.msg} at line {e.lineno}") from e
    if not isinstance(config, dict) or config.get("format") != 1 or "spec" not in config:
        raise FormatError(f"{folder / CONFIG} is not in regard's format 1")
    model = value.from_plain(config["spec"], spec.KINDS).build().to(device)
    try:
        load_model(model, str(folder / WEIGHTS), device=str(device))
    except RuntimeError as e:
        raise FormatError(f"{folder / WEIGHTS} does not match its declaration: {e}") from e
    return model
