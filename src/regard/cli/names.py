"""Names that the shell completes. They are listed here so that completion needs no PyTorch; a test compares them."""

import re
from pathlib import Path

PRESETS = (
    "transformer-base",
    "transformer-big",
    "bert-base",
    "gpt2",
    "t5-small",
    "vit-b16",
    "tiny",
    "tiny-gpt",
    "tiny-bert",
    "tiny-classifier",
    "tiny-vit",
)
RECIPES = (
    "translate",
    "translate-h200",
    "language-model",
    "long-context",
    "masked-language-model",
    "classify",
    "image",
)
LESSONS = tuple(f"T{i}" for i in range(1, 14))
DEVICES = ("cpu", "cuda")


def _begins(incomplete: str, known: tuple[str, ...]) -> list[str]:
    return [name for name in known if name.startswith(incomplete)]


def models(incomplete: str) -> list[str]:
    """Presets, declarations and folders."""
    return [*_begins(incomplete, PRESETS), *_paths(incomplete, (".json", ".yaml", ".yml", ".py"))]


def recipes(incomplete: str) -> list[str]:
    """Recipes, lessons and files of them."""
    return [*_begins(incomplete, (*RECIPES, *LESSONS)), *_paths(incomplete, (".json",))]


def laws(incomplete: str) -> list[str]:
    return _begins(incomplete, known_laws())


def known_laws() -> tuple[str, ...]:
    """The numbers of all laws, read from the source of the catalogue: importing it would import PyTorch."""
    folder = Path(__file__).parents[1] / "laws" / "catalogue"
    texts = (file.read_text(encoding="utf-8") for file in folder.glob("*.py"))
    return tuple(
        sorted({number for text in texts for number in re.findall(r'^ *"([LP]\d\d)",$', text, re.M)})
    )


def devices(incomplete: str) -> list[str]:
    return _begins(incomplete, DEVICES)


def _paths(incomplete: str, suffixes: tuple[str, ...]) -> list[str]:
    folder = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    try:
        found = sorted(p for p in folder.iterdir() if p.is_dir() or p.suffix in suffixes)
    except OSError:
        return []
    names = [f"{p}/" if p.is_dir() else str(p) for p in found if not p.name.startswith(".")]
    return [name for name in names if name.startswith(incomplete)]
