"""Text ⇄ token ids, by the `tokenizers` library; one JSON text holds all of it."""

from collections.abc import Iterable, Sequence
from typing import Any

from ...errors import FormatError, RegardError

PAD, START, END, UNKNOWN = 0, 1, 2, 3
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")


class Tokens:
    """A tokeniser whose first four ids are pad, start, end and unknown."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        tokenizer.encode_special_tokens = (
            True  # "<s>" in a text is three characters; its JSON does not say so
        )
        if tuple(tokenizer.id_to_token(i) for i in range(4)) != SPECIAL:
            raise FormatError(
                f"a tokeniser whose first ids are not {', '.join(SPECIAL)}; it was not made by regard"
            )

    def __len__(self) -> int:
        return self.tokenizer.get_vocab_size()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without start and end. A text never holds a special token, whatever it says."""
        return [e.ids for e in self.tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return self.tokenizer.decode_batch([list(r) for r in rows], skip_special_tokens=True)

    def words(self, ids: Sequence[int]) -> list[str]:
        """Each token as it is read, for the axes of a picture."""
        return [SPECIAL[i] if i < 4 else self.tokenizer.decode([i]) for i in ids]

    def json(self) -> str:
        return self.tokenizer.to_str()

    @staticmethod
    def from_json(text: str) -> "Tokens":
        try:
            return Tokens(_library().Tokenizer.from_str(text))
        except FormatError:
            raise
        except Exception as e:  # the library raises Exception itself
            raise FormatError(f"not a tokeniser: {e}") from e


def bpe(texts: Iterable[str], vocab: int) -> Tokens:
    """Byte pairs merged by how often they stand together; any text can be written, byte by byte at worst."""
    library = _library()
    made = _bytes(library.Tokenizer(library.models.BPE()))
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        show_progress=False,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
    )
    return _trained(made, texts, trainer, vocab)


def unigram(texts: Iterable[str], vocab: int) -> Tokens:
    """The pieces that make the texts likeliest, each drawn on its own."""
    library = _library()
    made = _bytes(library.Tokenizer(library.models.Unigram()))
    trainer = library.trainers.UnigramTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        unk_token=SPECIAL[UNKNOWN],
        show_progress=False,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
    )
    return _trained(made, texts, trainer, vocab)


def characters(texts: Iterable[str]) -> Tokens:
    """One token a character that occurs, in the order of their code points; others are unknown."""
    library = _library()
    found = sorted(set().union(*map(set, texts)))
    table = {token: i for i, token in enumerate((*SPECIAL, *found))}
    made = library.Tokenizer(library.models.BPE(vocab=table, merges=[], unk_token=SPECIAL[UNKNOWN]))
    made.decoder = library.decoders.Fuse()
    made.add_special_tokens(list(SPECIAL))
    return Tokens(made)


def _bytes(made: Any) -> Any:
    library = _library()
    made.normalizer = library.normalizers.NFC()
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = library.decoders.Sequence(
        [library.decoders.ByteLevel(), library.decoders.Strip(" ", 1, 0)]
    )
    return made


def _trained(made: Any, texts: Iterable[str], trainer: Any, vocab: int) -> Tokens:
    least = len(SPECIAL) + 256
    if vocab < least:
        raise FormatError(
            f"a vocabulary of {vocab} does not hold {len(SPECIAL)} signs and 256 bytes; use {least} or more"
        )
    made.train_from_iterator(texts, trainer)
    return Tokens(made)


def _library() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.normalizers
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ModuleNotFoundError as e:
        raise RegardError("tokenisers need the library `tokenizers`: pip install 'regard[train]'") from e
    return tokenizers
