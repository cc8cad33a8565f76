"""Text ⇄ token ids, by the `tokenizers` library; a tokenizer is stored as one JSON document."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ...errors import FormatError, RegardError

PAD, START, END, UNKNOWN = 0, 1, 2, 3
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")


class Tokens:
    """A tokenizer whose first four ids are pad, start, end and unknown."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        tokenizer.encode_special_tokens = (
            True  # so that "<s>" in a text is three characters; not stored in the tokenizer's JSON
        )
        if tuple(tokenizer.id_to_token(i) for i in range(4)) != SPECIAL:
            raise FormatError(
                f"the first ids of this tokenizer are not {', '.join(SPECIAL)}; it was not made by regard"
            )

    def __len__(self) -> int:
        return self.tokenizer.get_vocab_size()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without start and end. Special tokens written in a text are encoded as plain text."""
        if isinstance(texts, str):
            raise FormatError(f"{texts!r:.60} is one text; put it into a list, [{texts!r:.60}]")
        try:
            return [e.ids for e in self.tokenizer.encode_batch(list(texts), add_special_tokens=False)]
        except TypeError as e:
            raise FormatError(_not_text(texts)) from e

    def character_ids(self, text: str) -> np.ndarray:
        """The ids of a long text whose tokens are characters: as `encode` gives them, fifty times as fast."""
        points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        table = np.full(1 + points.max(initial=0), UNKNOWN, dtype=np.int32)
        for character in set(text):
            if (found := self.tokenizer.token_to_id(character)) is not None:
                table[ord(character)] = found
        return table[points]

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return self.tokenizer.decode_batch([list(r) for r in rows], skip_special_tokens=True)

    def words(self, ids: Sequence[int]) -> list[str]:
        """Each token as text, for the axes of a figure."""
        return [SPECIAL[i] if i < 4 else self.tokenizer.decode([i]) for i in ids]

    def json(self) -> str:
        return self.tokenizer.to_str()

    @staticmethod
    def from_json(text: str) -> "Tokens":
        try:
            return Tokens(_library().Tokenizer.from_str(text))
        except RegardError:  # the library is missing, or the file is damaged
            raise
        except Exception as e:  # the library raises Exception itself
            raise FormatError(f"not a tokenizer: {e}") from e


def _not_text(texts: Sequence[Any]) -> str:
    """Which of the texts cannot be encoded, and why."""
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            return f"text {i} is {text!r}, of type {type(text).__name__}, not a str"
        try:
            text.encode()
        except UnicodeEncodeError as e:
            return f"text {i} has {text[e.start]!a} as character {e.start}, which is not Unicode; read it as UTF-8"
    return "texts are needed, a list of str"


def bpe(texts: Iterable[str], vocab: int) -> Tokens:
    """Byte-pair encoding; any text can be encoded, byte by byte at worst."""
    library = _library()
    tokenizer = _byte_level(library.Tokenizer(library.models.BPE()))
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        show_progress=False,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
    )
    return _trained(tokenizer, texts, trainer, vocab)


def unigram(texts: Iterable[str], vocab: int) -> Tokens:
    """A unigram language model: the pieces that maximize the likelihood of the texts."""
    library = _library()
    tokenizer = _byte_level(library.Tokenizer(library.models.Unigram()))
    trainer = library.trainers.UnigramTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        unk_token=SPECIAL[UNKNOWN],
        show_progress=False,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
    )
    return _trained(tokenizer, texts, trainer, vocab)


def characters(texts: Iterable[str]) -> Tokens:
    """One token per character that occurs, in the order of code points; other characters are unknown."""
    library = _library()
    characters = sorted(set().union(*map(set, texts)))
    table = {token: i for i, token in enumerate((*SPECIAL, *characters))}
    tokenizer = library.Tokenizer(library.models.BPE(vocab=table, merges=[], unk_token=SPECIAL[UNKNOWN]))
    tokenizer.decoder = library.decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    return Tokens(tokenizer)


def _byte_level(tokenizer: Any) -> Any:
    library = _library()
    tokenizer.normalizer = library.normalizers.NFC()
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = library.decoders.Sequence(
        [library.decoders.ByteLevel(), library.decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _trained(tokenizer: Any, texts: Iterable[str], trainer: Any, vocab: int) -> Tokens:
    minimum = len(SPECIAL) + 256
    if vocab < minimum:
        raise FormatError(
            f"a vocabulary of {vocab} cannot hold {len(SPECIAL)} special tokens and 256 bytes; use {minimum} or more"
        )
    tokenizer.train_from_iterator(texts, trainer)
    return Tokens(tokenizer)


def _library() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.normalizers
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ModuleNotFoundError as e:
        raise RegardError("tokenizers need the library `tokenizers`: pip install 'regard[train]'") from e
    return tokenizers
