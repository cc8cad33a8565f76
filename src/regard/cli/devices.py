"""Devices by their names on the command line."""

from ..errors import SpecError


def read_device(name: str) -> str:
    """The device, if PyTorch supports it and this machine has it."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as e:
        raise SpecError(f"unknown device {name!r}; use cpu, cuda or cuda:1") from e
    if device.type == "cuda" and not torch.cuda.is_available():
        reason = "this PyTorch was built without CUDA" if torch.version.cuda is None else "there is no GPU"
        raise SpecError(f"device {name!r}: {reason}; use cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SpecError(f"device {name!r}: this machine has {torch.cuda.device_count()} GPUs, cuda:0 and on")
    if device.type not in ("cpu", "cuda", "mps", "xpu"):
        raise SpecError(f"device {name!r} cannot run this; use cpu or cuda")
    return name
