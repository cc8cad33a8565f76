"""Modules and weights of other libraries as ours, and back."""

from .torch_weights import from_torch, to_torch

__all__ = ["from_torch", "to_torch"]
