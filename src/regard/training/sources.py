"""Where a recipe's rows come from: declared by name or path, made ready in the run's folder."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import FormatError, SpecError
from . import corpora, text, tokens
from .ragged import Ragged
from .tasks import Labelled, Pairs, Stretches
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
        train, valid, test = (text.pairs(f) for f in self._files())
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

    def ready(self, folder: Path) -> Ready:
        whole = text.whole(corpora.folder(self.corpus) / "tiny.txt.gz" if self.file is None else self.file)
        cut = int(0.9 * len(whole))
        size = self.vocab
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
        return Ready(Stretches(train, self.context), held, held, made)


@dataclass(frozen=True)
class Digits:
    """scikit-learn's 1,797 handwritten digits, 8 × 8, one of five parts held out."""

    fold: int = 0
    seed: int = 0

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
        return Ready(Labelled(images[~held], labels[~held]), test, test)


@dataclass(frozen=True)
class Classes:
    """Labelled texts, label<TAB>text a line; labels are numbered in the order of their names."""

    train: str
    valid: str
    _: KW_ONLY
    vocab: int = 4000
    longest: int = 256  # tokens; a longer text is cut

    def ready(self, folder: Path) -> Ready:
        rows = [text.pairs(f) for f in (self.train, self.valid)]
        names = sorted({label for label, _ in rows[0]})
        if unknown := {label for label, _ in rows[1]} - set(names):
            raise FormatError(
                f"{self.valid} has the label {sorted(unknown)[0]!r}, which {self.train} has not"
            )
        made = _tokens(folder, lambda: tokens.bpe((t for _, t in rows[0]), self.vocab))
        train, valid = (
            Labelled(
                Ragged.of(
                    [ids[: self.longest] or [tokens.UNKNOWN] for ids in made.encode([t for _, t in part])]
                ),
                torch.tensor([names.index(label) for label, _ in part]),
            )
            for part in rows
        )
        return Ready(train, valid, valid, made)


Source = Sentences | Running | Digits | Classes


def _tokens(folder: Path, make) -> Tokens:
    """The run's own tokens, made once."""
    path = folder / "tokens.json"
    if path.is_file():
        return Tokens.from_json(path.read_text(encoding="utf-8"))
    made = make()
    folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    temporary.write_text(made.json(), encoding="utf-8")
    temporary.replace(path)
    return made
