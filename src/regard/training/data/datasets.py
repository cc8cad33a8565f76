"""The data of a recipe: declared by the name of a corpus or by paths, and tokenized in the run's folder.

Your own files may be plain text, TSV, or JSONL with named fields (`.jsonl`), also gzipped (`.gz`).
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from ... import files
from ...errors import FormatError, SpecError
from . import corpora, text, tokens
from .image_augmentation import random_affine
from .ragged import Ragged
from .rows import Labeled, Pairs, Windows
from .token_masking import MaskedSentences
from .tokens import Tokens

Row = TypeVar("Row")


@dataclass(frozen=True)
class Dataset:
    """Training, validation and test rows; their tokenizer; how many rows were dropped or truncated."""

    train: Any
    valid: Any
    test: Any
    tokens: Tokens | None = None
    texts: tuple[tuple[str, str], ...] = ()  # the test rows as text, where there are any
    dropped: int = 0  # training rows that were too long
    truncated: int = 0  # training rows of which only the beginning is read


@dataclass(frozen=True)
class SentencePairs:
    """Sentence pairs, source<TAB>target per line: the included corpus, or your own files."""

    corpus: str = "en-es"
    _: KW_ONLY
    train: str | None = None  # files instead of the corpus
    valid: str | None = None  # None with `train`: every twentieth pair of it
    test: str | None = None  # None with `train`: the validation pairs
    vocab: int = 8000
    max_tokens: int = 120  # per side; longer training pairs are dropped

    def __post_init__(self):
        _paths_as_text(self, "train", "valid", "test")
        _require_train(self.train, valid=self.valid, test=self.test)
        _require_vocab(self.vocab)

    def load(self, folder: Path) -> Dataset:
        train, valid, test = self._parts()
        tokenizer = _tokenizer(
            folder, lambda: tokens.bpe((side for pair in train for side in pair), self.vocab)
        )
        if len(tokenizer) > self.vocab:
            raise FormatError(
                f"tokens.json in {folder} has {len(tokenizer)} tokens; the model has {self.vocab}"
            )
        rows, dropped = self._pairs(train, tokenizer, drop=True)
        return Dataset(
            rows,
            self._pairs(valid, tokenizer)[0],
            self._pairs(test, tokenizer)[0],
            tokenizer,
            tuple(test),
            dropped,
        )

    def _parts(self) -> tuple[list[tuple[str, str]], ...]:
        if self.train is None:
            home = corpora.folder(self.corpus)
            return tuple(_sentence_pairs(home / name) for name in ("train.tsv.gz", "valid.tsv", "test.tsv"))
        train = _sentence_pairs(self.train)
        train, valid = (
            _held_out(train, self.train) if self.valid is None else (train, _sentence_pairs(self.valid))
        )
        return train, valid, valid if self.test is None else _sentence_pairs(self.test)

    def _pairs(
        self, pairs: Sequence[tuple[str, str]], tokenizer: Tokens, drop: bool = False
    ) -> tuple[Pairs, int]:
        sides = [tokenizer.encode([p[side] for p in pairs]) for side in (0, 1)]
        if drop:
            kept = [
                i for i, row in enumerate(zip(*sides, strict=True)) if max(map(len, row)) <= self.max_tokens
            ]
            if not kept:
                raise FormatError(
                    f"every training pair is longer than max_tokens={self.max_tokens}; raise it"
                )
            sides = [[side[i] for i in kept] for side in sides]
        else:
            sides = [[row[: self.max_tokens] for row in side] for side in sides]
        return Pairs(*map(Ragged.of, sides)), len(pairs) - len(sides[0])


@dataclass(frozen=True)
class ContinuousText:
    """One long text, split into windows; its last tenth is for validation.

    The corpora: "shakespeare", the plays; "en-es", the sentence pairs, those of one source after another.
    """

    corpus: str = "shakespeare"
    _: KW_ONLY
    file: str | None = None
    context: int = 64
    vocab: int | None = None  # None: one token per character; otherwise byte pairs

    def __post_init__(self):
        _paths_as_text(self, "file")
        if self.context < 2:
            raise SpecError(f"context={self.context}: it needs to be at least 2")
        if self.vocab is not None:
            _require_vocab(self.vocab)

    def text(self) -> str:
        if self.file is not None:
            return "\n".join(_texts(self.file)) + "\n"
        home = corpora.folder(self.corpus)
        if (home / "tiny.txt.gz").is_file():
            return text.content(home / "tiny.txt.gz")
        pairs, origins = text.sentences(home / "train.tsv.gz"), text.sentences(home / "train.origin.gz")
        grouped = sorted(zip(origins, pairs, strict=True), key=lambda line: line[0])
        return "\n".join(pair for _, pair in grouped) + "\n"

    def load(self, folder: Path) -> Dataset:
        content, size = self.text(), self.vocab
        cut = int(0.9 * len(content))
        parts = content[:cut], content[cut:]
        if size is None:
            tokenizer = _tokenizer(folder, lambda: tokens.characters([content]))
            train, valid = (torch.from_numpy(tokenizer.character_ids(part)) for part in parts)
        else:
            tokenizer = _tokenizer(folder, lambda: tokens.bpe(_sample(text.pieces(parts[0])), size))
            train, valid = (
                torch.tensor(
                    [i for ids in tokenizer.encode(text.pieces(part)) for i in ids], dtype=torch.int32
                )
                for part in parts
            )
        if min(len(train), len(valid)) <= self.context:
            raise FormatError(
                f"{len(train) + len(valid)} tokens are too few for windows of {self.context}, as the last tenth is "
                "for validation; give a longer text, or a smaller context"
            )
        held_out = Windows(valid, self.context, self.context)
        rows = Windows(train, self.context, self.context, random_offset=True)
        return Dataset(rows, held_out, held_out, tokenizer)


def _sample(pieces: list[str], characters: int = 16_000_000) -> list[str]:
    """Pieces from all over a text, of about this many characters: enough to learn subwords from."""
    return pieces[:: max(1, round(sum(map(len, pieces)) / characters))]


@dataclass(frozen=True)
class MaskedText:
    """Texts, one per line, with masked tokens: the English side of a corpus, or your own files."""

    corpus: str = "en-es"
    _: KW_ONLY
    train: str | None = None  # files instead of the corpus
    valid: str | None = None  # None with `train`: every twentieth line of it
    vocab: int = 4000  # the last id is the mask token
    max_tokens: int = 64  # of a longer text the beginning is read
    share: int | float = 0.15  # of the tokens masked
    seed: int = 0  # of the masked positions in validation

    def __post_init__(self):
        _paths_as_text(self, "train", "valid")
        _require_train(self.train, valid=self.valid)
        _require_vocab(self.vocab)

    @property
    def mask(self) -> int:
        return self.vocab - 1

    def load(self, folder: Path) -> Dataset:
        if self.train is None:
            home = corpora.folder(self.corpus)
            parts = [[a for a, _ in text.pairs(home / name)] for name in ("train.tsv.gz", "valid.tsv")]
        elif self.valid is None:
            parts = list(_held_out(_texts(self.train), self.train))
        else:
            parts = [_texts(f) for f in (self.train, self.valid)]
        tokenizer = _tokenizer(folder, lambda: tokens.bpe(parts[0], self.vocab - 1))
        if len(tokenizer) > self.mask:
            raise FormatError(
                f"tokens.json in {folder} has {len(tokenizer)} tokens; the model has {self.vocab}"
            )
        encoded = [[ids for ids in tokenizer.encode(part) if ids] for part in parts]
        if empty := [where for where, rows in zip(("train", "valid"), encoded, strict=True) if not rows]:
            raise FormatError(f"{getattr(self, empty[0]) or self.train} has only empty lines")
        train, valid = (
            MaskedSentences(Ragged.of([ids[: self.max_tokens] for ids in rows]), self.mask, self.share)
            for rows in encoded
        )
        held_out = valid.fixed(self.seed)
        return Dataset(
            train,
            held_out,
            held_out,
            tokenizer,
            truncated=sum(len(ids) > self.max_tokens for ids in encoded[0]),
        )


@dataclass(frozen=True)
class Digits:
    """scikit-learn's 1,797 handwritten digits, 8 × 8; one of five folds is for testing."""

    fold: int = 0
    seed: int = 0
    _: KW_ONLY
    augmentation: random_affine | None = None  # of the training images

    def __post_init__(self):
        if not 0 <= self.fold < 5:
            raise SpecError(f"fold={self.fold}: it needs to be 0 to 4")

    def load(self, folder: Path) -> Dataset:
        try:
            from sklearn.datasets import load_digits
        except ModuleNotFoundError as e:
            raise SpecError("the digits are part of scikit-learn: pip install scikit-learn") from e
        data = load_digits()
        images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
        labels = torch.tensor(data.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(self.seed))
        held_out = torch.zeros(len(labels), dtype=torch.bool)
        held_out[order[self.fold :: 5]] = True
        test = Labeled(images[held_out], labels[held_out])
        return Dataset(Labeled(images[~held_out], labels[~held_out], self.augmentation), test, test)


@dataclass(frozen=True)
class LabeledText:
    """Labeled texts, label<TAB>text per line; labels are numbered in alphabetical order."""

    train: str
    valid: str | None = None  # None: every twentieth text of `train`
    _: KW_ONLY
    vocab: int = 4000
    max_tokens: int = 256  # of a longer text the beginning is read
    classes: int | None = None  # of the model; None: as many as the training file has

    def __post_init__(self):
        _paths_as_text(self, "train", "valid")
        _require_vocab(self.vocab)

    def labels(self) -> list[str]:
        """The labels of the training file, in order."""
        return sorted({label for label, _ in self._rows(self.train)})

    def load(self, folder: Path) -> Dataset:
        if self.valid is None:
            rows = list(_held_out(self._rows(self.train), self.train))
        else:
            rows = [self._rows(f) for f in (self.train, self.valid)]
        names = self.labels() if self.valid is None else sorted({label for label, _ in rows[0]})
        if unknown := {label for label, _ in rows[1]} - set(names):
            raise FormatError(
                f"{self.valid} has the label {sorted(unknown)[0]!r}, which does not occur in {self.train}"
            )
        if self.classes is not None and len(names) != self.classes:
            listed = ", ".join(map(repr, names[:5])) + (", …" if len(names) > 5 else "")
            raise FormatError(
                f"{self.train} has {len(names)} labels ({listed}); the model has {self.classes} classes; "
                f"use classes={len(names)}"
            )
        tokenizer = _tokenizer(folder, lambda: tokens.bpe((t for _, t in rows[0]), self.vocab))
        files.write_text(folder / "labels.json", json.dumps(names, ensure_ascii=False))
        encoded = [tokenizer.encode([t for _, t in part]) for part in rows]
        train, valid = (
            Labeled(
                Ragged.of([row[: self.max_tokens] or [tokens.UNKNOWN] for row in ids]),
                torch.tensor([names.index(label) for label, _ in part]),
            )
            for ids, part in zip(encoded, rows, strict=True)
        )
        return Dataset(
            train, valid, valid, tokenizer, truncated=sum(len(row) > self.max_tokens for row in encoded[0])
        )

    @staticmethod
    def _rows(path: str) -> list[tuple[str, str]]:
        rows = [(label.strip(), content) for label, content in _pairs(path, "label", "text")]
        if empty := [number for number, (label, _) in enumerate(rows, 1) if not label]:
            raise FormatError(
                f"{path}, line {empty[0]}: the label before the tab is empty; needed: label<TAB>text"
            )
        return rows


Source = SentencePairs | ContinuousText | MaskedText | Digits | LabeledText


def _pairs(path: Any, first: str, second: str) -> list[tuple[str, str]]:
    """Two texts per line: the named fields of JSONL, otherwise separated by a tab."""
    if _jsonl(path):
        return [(a, b) for a, b in text.records(path, first, second)]
    return text.pairs(path, (first, second))


def _sentence_pairs(path: Any) -> list[tuple[str, str]]:
    rows = _pairs(path, "source", "target")
    for number, (source, target) in enumerate(rows, 1):
        if not source.strip() or not target.strip():
            side = "target" if source.strip() else "source"
            raise FormatError(
                f"{path}, line {number}: the {side} is empty; remove lines without a translation"
            )
    return rows


def _texts(path: Any) -> list[str]:
    """One text per line: the field `text` of JSONL, otherwise the line."""
    return [content for (content,) in text.records(path, "text")] if _jsonl(path) else text.sentences(path)


def _paths_as_text(data: Any, *fields: str) -> None:
    """Store paths as text, since a recipe is stored as JSON."""
    for field in fields:
        if isinstance(path := getattr(data, field), os.PathLike):
            object.__setattr__(data, field, os.fspath(path))


def _require_train(train: str | None, **others: str | None) -> None:
    """Validation and test files belong to a training file."""
    for name, file in others.items():
        if train is None and file is not None:
            raise SpecError(f"{name}={file!r} needs train= (on the command line --data) as well")


def _require_vocab(vocab: int) -> None:
    if not isinstance(vocab, int):
        raise SpecError(f"vocab={vocab!r}: a whole number is needed")
    smallest = len(tokens.SPECIAL) + 256  # every byte is a token
    if vocab < smallest:
        raise SpecError(
            f"vocab={vocab}: it needs to be at least {smallest}, the special tokens and the 256 bytes"
        )


def _held_out(rows: list[Row], path: Any) -> tuple[list[Row], list[Row]]:
    """Every twentieth row is for validation; at least one, at most 2,000."""
    if len(rows) < 2:
        raise FormatError(f"{path} has {len(rows)} row; training and validation need at least 2")
    every = max(min(20, len(rows)), len(rows) // 2000)
    held_out = rows[every - 1 :: every]
    return [row for i, row in enumerate(rows) if (i + 1) % every], held_out


def _jsonl(path: Any) -> bool:
    return str(path).lower().removesuffix(".gz").endswith(".jsonl")


def _tokenizer(folder: Path, train: Callable[[], Tokens]) -> Tokens:
    """The tokenizer of the run, trained where the folder has none yet."""
    path = folder / "tokens.json"
    if path.is_file():
        try:
            return Tokens.from_json(files.read_checked(folder, path.name))
        except FormatError as e:
            raise FormatError(f"{path} cannot be read: {e}") from e
    tokenizer = train()
    folder.mkdir(parents=True, exist_ok=True)
    files.write_checked(folder, path.name, tokenizer.json())
    return tokenizer
