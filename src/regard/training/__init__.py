"""Training of declared models: recipes, runs, tasks, the training loop and its settings."""

from .data.datasets import ContinuousText, Dataset, Digits, LabeledText, MaskedText, SentencePairs
from .data.image_augmentation import random_affine
from .data.rows import Batch, Labeled, Pairs, Windows
from .data.tokens import Tokens
from .entry import TrainingResult, train
from .lessons import LESSONS, LessonResult
from .loop.averaging import ema, last
from .loop.loss import cross_entropy
from .loop.optimizer import AdamW
from .loop.settings import Settings
from .loop.trainer import Diverged, Trainer
from .recipes.base import Recipe
from .recipes.catalogue import RECIPES, recipe
from .recipes.evaluation import Evaluation, evaluate
from .recipes.export import export
from .recipes.preflight import Preflight
from .recipes.run import Run, open_run
from .recipes.tasks import Classification, LanguageModeling, MaskedLanguageModeling, Translation
from .report.page import report as write_report
from .translator import translate

__all__ = [
    "LESSONS",
    "RECIPES",
    "AdamW",
    "Batch",
    "Classification",
    "ContinuousText",
    "Dataset",
    "Digits",
    "Diverged",
    "Evaluation",
    "Labeled",
    "LabeledText",
    "LanguageModeling",
    "LessonResult",
    "MaskedLanguageModeling",
    "MaskedText",
    "Pairs",
    "Preflight",
    "Recipe",
    "Run",
    "SentencePairs",
    "Settings",
    "Tokens",
    "Trainer",
    "TrainingResult",
    "Translation",
    "Windows",
    "cross_entropy",
    "ema",
    "evaluate",
    "export",
    "last",
    "open_run",
    "random_affine",
    "recipe",
    "train",
    "translate",
    "write_report",
]
