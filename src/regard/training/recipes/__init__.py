"""Recipes: a model, its data and how it is trained, as one value."""

from .base import Recipe
from .catalogue import RECIPES, classify, image, language_model, masked_language_model, recipe, translate

__all__ = [
    "RECIPES",
    "Recipe",
    "classify",
    "image",
    "language_model",
    "masked_language_model",
    "recipe",
    "translate",
]
