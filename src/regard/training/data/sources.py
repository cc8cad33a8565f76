"""Where a recipe's rows come from: declared by name or path, made ready in the run's folder.

A file of your own may be plain text or TSV, or JSONL with the fields by name (`.jsonl`); gzip too (`.gz`).
"""

import json
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import FormatError, SpecError
from . import corpora, text, tokens
from .image_augmentation import moves
from .ragged import Ragged
from .rows import Labelled, Pairs, Stretches
from .token_masking import Hidden
from .tokens import Tokens


@dataclass(frozen=True)
class Ready:
    """Rows to train on, to validate and to test with; the tokens they are made of; what was left out."""

    train: Any
    valid: Any
    test: Any
    tokens: Tokens | None = None
    texts: tuple[tuple[str, str], ...] = ()  # the test rows as text, where they have one
    left_out: int = 0  # training rows that were too long
    cut: int = 0  # rows of which only the beginning is read


@dataclass(frozen=True)
class Sentences:
    """Sentence pairs, source<TAB>target a line: the corpus that comes along, or files of your own."""

    corpus: str = "en-es"
    _: KW_ONLY
    train: str | None = None  # files instead of the corpus
    valid: str | None = None
    test: str | None = None
    vocab: int = 8000
    longest: int = 120  # tokens a side; longer training pairs are left out

    def __post_init__(self):
        if (self.train is None) != (self.valid is None):
            raise SpecError(
                "files of your own come together: give train= and valid=, and test= where you have one"
            )

    def ready(self, folder: Path) -> Ready:
        train, valid, test = (_pairs(f, "source", "target") for f in self._files())
        made = _tokens(folder, lambda: tokens.bpe((side for pair in train for side in pair), self.vocab))
        if len(made) > self.vocab:
            raise FormatError(f"tokens.json in {folder} has {len(made)} tokens; the model has {self.vocab}")
        rows, left_out = self._pairs(train, made, drop=True)
        return Ready(
            rows, self._pairs(valid, made)[0], self._pairs(test, made)[0], made, tuple(test), left_out
        )

    def _files(self) -> list[Any]:
        if self.train is None:
            home = corpora.folder(self.corpus)
            return [home / name for name in ("train.tsv.gz", "valid.tsv", "test.tsv")]
        return [self.train, self.valid, self.test or self.valid]

    def _pairs(self, pairs: Sequence[tuple[str, str]], made: Tokens, drop: bool = False) -> tuple[Pairs, int]:
        sides = [made.encode([p[side] for p in pairs]) for side in (0, 1)]
        if drop:
            kept = [i for i, row in enumerate(zip(*sides, strict=True)) if max(map(len, row)) <= self.longest]
            if not kept:
                raise FormatError(
                    f"every training pair is longer than longest={self.longest} tokens; raise it"
                )
            sides = [[side[i] for i in kept] for side in sides]
        else:
            sides = [[row[: self.longest] for row in side] for side in sides]
        return Pairs(*map(Ragged.of, sides)), len(pairs) - len(sides[0])


@dataclass(frozen=True)
class Running:
    """One long text, cut into stretches; its last tenth is held out."""

    corpus: str = "shakespeare"
    _: KW_ONLY
    file: str | None = None
    context: int = 64
    vocab: int | None = None  # None: one token a character; otherwise byte pairs

    def text(self) -> str:
        if self.file is None:
            return text.whole(corpora.folder(self.corpus) / "tiny.txt.gz")
        return "\n".join(_texts(self.file)) + "\n"

    def ready(self, folder: Path) -> Ready:
        whole, size = self.text(), self.vocab
        cut = int(0.9 * len(whole))
        made = _tokens(
            folder, lambda: tokens.characters([whole]) if size is None else tokens.bpe([whole[:cut]], size)
        )
        train, valid = (
            torch.tensor(ids, dtype=torch.int32) for ids in made.encode([whole[:cut], whole[cut:]])
        )
        if min(len(train), len(valid)) <= self.context:
            raise FormatError(
                f"{len(train) + len(valid)} tokens are too few for stretches of {self.context}; give a longer text"
            )
        held = Stretches(valid, self.context, self.context)
        return Ready(Stretches(train, self.context, self.context, loose=True), held, held, made)


@dataclass(frozen=True)
class Lines:
    """Texts, one a line, of which some tokens are hidden: the English of a corpus, or files of your own."""

    corpus: str = "en-es"
    _: KW_ONLY
    train: str | None = None  # files instead of the corpus
    valid: str | None = None
    vocab: int = 4000  # the last id is the mask's
    longest: int = 64  # tokens; of a longer text the beginning is read
    share: int | float = 0.15  # of the tokens hidden
    seed: int = 0  # of what is hidden where it is validated

    def __post_init__(self):
        if (self.train is None) != (self.valid is None):
            raise SpecError("files of your own come together: give train= and valid=")

    @property
    def mask(self) -> int:
        return self.vocab - 1

    def ready(self, folder: Path) -> Ready:
        if self.train is None or self.valid is None:
            home = corpora.folder(self.corpus)
            parts = [[a for a, _ in text.pairs(home / name)] for name in ("train.tsv.gz", "valid.tsv")]
        else:
            parts = [_texts(f) for f in (self.train, self.valid)]
        made = _tokens(folder, lambda: tokens.bpe(parts[0], self.vocab - 1))
        if len(made) > self.mask:
            raise FormatError(f"tokens.json in {folder} has {len(made)} tokens; the model has {self.vocab}")
        encoded = [[ids for ids in made.encode(part) if ids] for part in parts]
        if empty := [where for where, rows in zip(("train", "valid"), encoded, strict=True) if not rows]:
            raise FormatError(f"{getattr(self, empty[0])} holds nothing but empty lines")
        train, valid = (
            Hidden(Ragged.of([ids[: self.longest] for ids in rows]), self.mask, self.share)
            for rows in encoded
        )
        held = valid.once(self.seed)
        return Ready(train, held, held, made, cut=sum(len(ids) > self.longest for ids in encoded[0]))


@dataclass(frozen=True)
class Digits:
    """scikit-learn's 1,797 handwritten digits, 8 × 8, one of five parts held out."""

    fold: int = 0
    seed: int = 0
    _: KW_ONLY
    moved: moves | None = None  # of the training images

    def __post_init__(self):
        if not 0 <= self.fold < 5:
            raise SpecError(f"fold={self.fold}: there are five, 0 to 4")

    def ready(self, folder: Path) -> Ready:
        try:
            from sklearn.datasets import load_digits
        except ModuleNotFoundError as e:
            raise SpecError("the digits come with scikit-learn: pip install scikit-learn") from e
        data = load_digits()
        images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
        labels = torch.tensor(data.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(self.seed))
        held = torch.zeros(len(labels), dtype=torch.bool)
        held[order[self.fold :: 5]] = True
        test = Labelled(images[held], labels[held])
        return Ready(Labelled(images[~held], labels[~held], self.moved), test, test)


@dataclass(frozen=True)
class Classes:
    """Labelled texts, label<TAB>text a line; labels are numbered in the order of their names."""

    train: str
    valid: str
    _: KW_ONLY
    vocab: int = 4000
    longest: int = 256  # tokens; of a longer text the beginning is read
    classes: int | None = None  # that the model tells apart; None: as many as there are

    def labels(self) -> list[str]:
        """The labels of the training file, in order."""
        return sorted({label for label, _ in self._rows(self.train)})

    def ready(self, folder: Path) -> Ready:
        rows = [self._rows(f) for f in (self.train, self.valid)]
        names = sorted({label for label, _ in rows[0]})
        if unknown := {label for label, _ in rows[1]} - set(names):
            raise FormatError(
                f"{self.valid} has the label {sorted(unknown)[0]!r}, which {self.train} has not"
            )
        if self.classes is not None and len(names) != self.classes:
            some = ", ".join(map(repr, names[:5])) + (", …" if len(names) > 5 else "")
            raise FormatError(
                f"{self.train} has {len(names)} labels ({some}); the model tells {self.classes} apart; "
                f"use classes={len(names)}"
            )
        made = _tokens(folder, lambda: tokens.bpe((t for _, t in rows[0]), self.vocab))
        _store(folder / "labels.json", json.dumps(names, ensure_ascii=False))
        encoded = [made.encode([t for _, t in part]) for part in rows]
        train, valid = (
            Labelled(
                Ragged.of([row[: self.longest] or [tokens.UNKNOWN] for row in ids]),
                torch.tensor([names.index(label) for label, _ in part]),
            )
            for ids, part in zip(encoded, rows, strict=True)
        )
        return Ready(train, valid, valid, made, cut=sum(len(row) > self.longest for row in encoded[0]))

    @staticmethod
    def _rows(path: str) -> list[tuple[str, str]]:
        rows = [(label.strip(), told) for label, told in _pairs(path, "label", "text")]
        if empty := [number for number, (label, _) in enumerate(rows, 1) if not label]:
            raise FormatError(f"{path}, line {empty[0]}: no label before the tab, label<TAB>text")
        return rows


Source = Sentences | Running | Lines | Digits | Classes


def _pairs(path: Any, first: str, second: str) -> list[tuple[str, str]]:
    """Two texts a line: the named fields of JSONL, else with a tab between them."""
    if _jsonl(path):
        return [(a, b) for a, b in text.records(path, first, second)]
    return text.pairs(path, (first, second))


def _texts(path: Any) -> list[str]:
    """One text a line: the field `text` of JSONL, else the line."""
    return [told for (told,) in text.records(path, "text")] if _jsonl(path) else text.sentences(path)


def _jsonl(path: Any) -> bool:
    return str(path).removesuffix(".gz").endswith(".jsonl")


def _tokens(folder: Path, make) -> Tokens:
    """The run's own tokens, made once."""
    path = folder / "tokens.json"
    if path.is_file():
        return Tokens.from_json(path.read_text(encoding="utf-8"))
    made = make()
    _store(path, made.json())
    return made


def _store(path: Path, written: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    temporary.write_text(written, encoding="utf-8")
    temporary.replace(path)
