"""A toy language in which the last word decides what "it" is: the animal is tired, the place is soft, or it rains.

>>> first = sentences()[0]
>>> " ".join(first.words), first.words[first.referent], first.words[first.other]
('the cat sat on the mat because it was tired', 'cat', 'mat')
"""

from itertools import product
from typing import NamedTuple

ANIMALS = ("cat", "dog", "bird", "horse", "fox", "mouse", "goat", "hen", "pig", "cow")
PLACES = ("mat", "roof", "road", "sofa", "box", "bed", "rug", "bench", "sand", "grass")
OF_ANIMALS = ("tired", "hungry", "sleepy", "afraid")
OF_PLACES = ("soft", "warm", "flat", "clean")
OF_NEITHER = ("raining", "late")  # "it" refers to no noun
FRAMES = (("sat", "on"), ("lay", "on"))
PRONOUN = "it"


class Sentence(NamedTuple):
    """The words, and the positions of the pronoun, of the noun it refers to, and of the other noun.

    Where it refers to neither noun, referent is the pronoun itself.
    """

    words: tuple[str, ...]
    pronoun: int
    referent: int
    other: int


def sentence(animal: str, verb: str, preposition: str, place: str, adjective: str) -> Sentence:
    """the <animal> <verb> <preposition> the <place> because it was <adjective>."""
    words = ("the", animal, verb, preposition, "the", place, "because", PRONOUN, "was", adjective)
    if adjective in OF_NEITHER:
        return Sentence(words, 7, 7, 1)
    return Sentence(words, 7, *((1, 5) if adjective in OF_ANIMALS else (5, 1)))


def sentences() -> list[Sentence]:
    """Every sentence; the one about the cat on the mat that was tired comes first, its control with "soft" second."""
    pair = [sentence("cat", "sat", "on", "mat", adjective) for adjective in ("tired", "soft")]
    every = [
        sentence(animal, verb, preposition, place, adjective)
        for animal, (verb, preposition), place, adjective in product(
            ANIMALS, FRAMES, PLACES, OF_ANIMALS + OF_PLACES + OF_NEITHER
        )
    ]
    return pair + [s for s in every if s not in pair]
