"""A saved model is a folder: config.json (its declaration), model.safetensors (its weights) and their checksums."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn

from .. import files, spec, value
from ..errors import BackendError, FormatError, RegardError, SpecError

CONFIG, WEIGHTS = "config.json", "model.safetensors"
FLOAT, INT8 = 1, 2  # formats of a folder
SCALE = ".scale"  # the suffix of the scales of a matrix of 8-bit integers


def save(model: nn.Module, folder: str | Path, weights: str = "float") -> Path:
    """Write the declaration and the weights; tied weights are stored once.

    weights: "float" stores them as they are; "int8" stores each matrix as 8-bit integers and one scale per row, a
    quarter of the size of float32, rounded to 1/254 of the largest weight of the row.
    """
    if isinstance(model, spec.Spec):
        raise RegardError(f"{type(model).__name__} is a declaration without weights; save spec.build()")
    model = getattr(model, "_orig_mod", model)  # torch.compile(model) stores its weights under other names
    declared = getattr(model, "spec", None)
    if not isinstance(declared, spec.Spec):
        inner = getattr(model, "module", None)
        if isinstance(getattr(inner, "spec", None), spec.Spec):
            raise RegardError(f"{type(model).__name__} wraps a model; save the model itself: model.module")
        raise RegardError(
            f"{type(model).__name__} was not built from a spec, so it has no declaration to save"
        )
    if weights not in ("float", "int8"):
        raise SpecError(f"weights={weights!r}; use 'float' or 'int8'")
    _require_declared_weights(model, declared)
    folder = Path(folder)
    number = FLOAT if weights == "float" else INT8
    config = {"format": number, "spec": value.to_plain(declared)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{WEIGHTS}"
        if number == FLOAT:
            save_model(model, str(temporary))
        else:
            save_file(_quantized(model), str(temporary))
        files.flush(temporary)
        (folder / files.MANIFEST).unlink(
            missing_ok=True
        )  # until both files are new, a folder has no manifest
        files.write_text(folder / CONFIG, json.dumps(config, indent=1) + "\n")
        temporary.replace(folder / WEIGHTS)
    except (OSError, SafetensorError) as e:
        raise RegardError(f"cannot save a model in {folder}: {e}") from e
    files.write_manifest(folder, (CONFIG, WEIGHTS))
    return folder


def load(
    folder: str | Path, device: torch.device | str = "cpu", *, allow_non_finite: bool = False
) -> nn.Module:
    """Build the saved declaration and load its weights, as float; tied weights are tied again.

    The checksums of the folder are verified. Weights with NaN or infinite values are refused unless allow_non_finite.
    """
    folder, device = Path(folder), _available(device)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            if (folder / "model" / CONFIG).is_file():
                inside = str(folder / "model")
                raise FormatError(f"{folder} is the folder of a run; load its model: rg.load({inside!r})")
            raise FormatError(
                f"{folder} contains no {name}; a folder written by rg.save has {CONFIG} and {WEIGHTS}"
            )
    files.verify(folder, (CONFIG, WEIGHTS))
    config = files.read_json(folder / CONFIG)
    if config.get("format") not in (FLOAT, INT8) or "spec" not in config:
        raise FormatError(f"{folder / CONFIG} is not in regard's format {FLOAT} or {INT8}")
    model = value.from_plain(config["spec"], spec.KINDS).build().to(device)
    try:
        if config["format"] == FLOAT:
            load_model(model, str(folder / WEIGHTS), device=str(device))
        else:
            _fill(model, load_file(str(folder / WEIGHTS), device=str(device)))
    except RuntimeError as e:
        raise FormatError(f"{folder / WEIGHTS} does not match its declaration: {e}") from e
    except (SafetensorError, OSError) as e:
        raise FormatError(f"{folder / WEIGHTS} is damaged: {e}; restore it from a copy") from e
    if not allow_non_finite:
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise FormatError(
                    f"{folder / WEIGHTS}: {name} has NaN or infinite values; rg.load(…, allow_non_finite=True) "
                    f"loads it as it is"
                )
    return model


def _require_declared_weights(model: nn.Module, declared: spec.Spec) -> None:
    """Refuse a model that was changed after it was built: `load` builds the declaration."""
    with torch.device("meta"):
        built = declared.build().state_dict()
    own = model.state_dict()
    if changed := [name for name in (*own, *built) if name not in own or name not in built]:
        have, kind = "has" if changed[0] in own else "lacks", type(model).__name__
        raise RegardError(
            f"this {kind} {have} {changed[0]!r}, other than its declaration, so rg.load could not read it; save "
            f"the {kind} as it was built, or its state_dict() by safetensors"
        )
    for name, tensor in own.items():
        if tensor.shape != built[name].shape:
            raise RegardError(
                f"{name} has shape {tuple(tensor.shape)} and by its declaration {tuple(built[name].shape)}, so "
                "rg.load could not read it; change the declaration, and build it again"
            )


def _available(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError as e:
        raise SpecError(f"device={device!r} is unknown; use 'cpu', 'cuda' or 'cuda:1'") from e
    if found.type == "cuda" and not torch.cuda.is_available():
        raise BackendError(f"device={str(device)!r}: PyTorch finds no GPU on this machine; use device='cpu'")
    if found.type == "meta":
        raise SpecError("device='meta' has no values to load; use 'cpu' or 'cuda'")
    return found


def _quantized(model: nn.Module) -> dict[str, Tensor]:
    """Matrices as 8-bit integers with one scale per row, everything else as it is; tied weights once."""
    stored = {}
    for name, tensor in (*model.named_parameters(), *_saved_buffers(model)):
        tensor = tensor.detach().cpu()
        if tensor.dim() != 2 or not tensor.is_floating_point():
            stored[name] = tensor.contiguous().clone()
            continue
        scale = (tensor.abs().amax(1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        stored[name] = (tensor / scale).round().to(torch.int8).contiguous()
        stored[name + SCALE] = scale[:, 0].float().contiguous()
    return stored


@torch.no_grad()
def _fill(model: nn.Module, stored: dict[str, Tensor]) -> None:
    """Write stored values into the model's parameters and buffers; RuntimeError where names or shapes differ."""
    own = dict((*model.named_parameters(), *_saved_buffers(model)))
    names = {name for name in stored if not name.endswith(SCALE)}
    if different := sorted(names ^ set(own)):
        raise RuntimeError(f"{different[0]} is in only one of them")
    for name, tensor in own.items():
        found, scale = stored[name], stored.get(name + SCALE)
        if found.shape != tensor.shape:
            raise RuntimeError(f"{name} has shape {tuple(found.shape)}, not {tuple(tensor.shape)}")
        tensor.copy_(found if scale is None else found * scale[:, None])


def _saved_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    saved = model.state_dict().keys()
    return [(name, tensor) for name, tensor in model.named_buffers() if name in saved]
