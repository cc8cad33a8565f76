"""Trained models that are part of regard.

Each folder is a run as `regard train` writes it (recipe.json, tokens.json, model/), with a model card (README.md, and
card.json for programs) and the checksums of its files (SHA256SUMS).
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import FormatError
from ...generation import Strategy, beam, greedy

TRANSLATOR = "en-es"
CARD, SUMS = "card.json", "SHA256SUMS"


def folder(name: str = TRANSLATOR) -> Path:
    """The folder of a model that is part of regard: `en-es`, a translator."""
    found = Path(__file__).parent / name
    if not (found / SUMS).is_file():
        raise FormatError(f"this installation of regard contains no model {name!r}; train one: regard train")
    return found


def damaged(of: Path) -> list[str]:
    """The files of a model's folder that are missing, or differ from their checksums."""
    lines = (of / SUMS).read_text(encoding="utf-8").splitlines()
    entries = [line.split("  ", 1) for line in lines]
    return [name for digest, name in entries if not (of / name).is_file() or checksum(of / name) != digest]


def checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass(frozen=True)
class Card:
    """What a model's card.json states: how to decode, and the scores on its test rows."""

    beam: int = 1
    length_penalty: int | float = 0.6
    scores: Mapping[str, Any] = field(default_factory=dict)

    @property
    def strategy(self) -> Strategy:
        return greedy() if self.beam == 1 else beam(self.beam, length_penalty=self.length_penalty)


def card(of: str | Path) -> Card:
    """The card of a run or model; without card.json the defaults, which decode greedily."""
    path = Path(of) / CARD
    if not path.is_file():
        return Card()
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        return Card(plain["decoding"]["beam"], plain["decoding"]["length_penalty"], plain.get("scores", {}))
    except (json.JSONDecodeError, KeyError, TypeError) as e:
        raise FormatError(f"{path} is not a model card of regard: {e!r}") from e
