"""The sliding window of a module: from its words and attributes, and from which inputs an output depends on."""

import re
from typing import Any

import torch
from torch import Tensor

from .fixed_parts import stated_window
from .names import size_of

WINDOWS = ("window", "window_size", "sliding_window", "attention_window", "local_window", "win")
MAX_WINDOW = 24  # keys: a window of w is probed with 2 w + 3 calls
SINKS = (
    *(
        "sinks",
        "n_sink",
        "n_sinks",
        "num_sink",
        "num_sinks",
        "sink_tokens",
        "n_sink_tokens",
        "num_sink_tokens",
    ),
    *("sink_size", "attention_sinks", "num_attention_sinks", "attention_sink_size", "start_size"),
)
OTHERS = (  # words for windows that also reach other keys, or that do not slide
    r"global|registers|dilat|strid|block|chunk|prefix|anchor|random|shift|partition|swin(?!dow)|grid|image|dense"
)
KEYS_BY_POSITION = (  # words of a docstring for keys that are chosen by their positions
    r"window|sliding|\blocal|\bband|\bsinks?\b|global|dilat|strid|random|sparse|chunk|prefix|anchor"
    r"|\bblocks? of|block.?(local|sparse|diagonal|wise)"
)


def read_module_window(reader: Any) -> tuple[tuple[int, int] | None, int]:
    """(before, after) of a module with a sliding window, or None where that cannot be determined; and its sinks, the
    first keys that every query attends to besides.

    What its words state is taken as stated. Otherwise it is the usual window of that size that the outputs depend on;
    or, where they depend on no band of keys at all, the one that most outputs depend on: the laws report the others.
    A module that has a size of a window without a word about it has that window only if all outputs depend on it.
    """
    words = f"{type(reader.module).__name__}\n{reader.text}".lower()
    size, says = size_of(reader.module, WINDOWS), re.search("window|sliding", words)
    if reader.tokens or reader.length is not None or reader.context or not (says or size):
        return None, 0
    sinks = _sinks(reader, words)
    if re.search(OTHERS, words) or sinks is None:
        return None, 0
    exact = re.search(r"itself and the (\d+) (\w+ )?before", words)
    number = re.search(r"window of (\d+)|(\d+)[- ](token|key|position)s? window", words)
    if size is None and number is not None:
        size = int(number.group(1) or number.group(2))
    if exact is not None:
        size = int(exact.group(1)) + 1
    if size is None or not 1 <= size + sinks <= MAX_WINDOW:
        return None, 0
    forms = {
        "w keys with itself, causal": (size - 1, 0),
        "w keys before, causal": (size, 0),
        "w keys each side": (size, size),
        "w - 1 keys each side": (size - 1, size - 1),
        "half on each side": (size // 2, size // 2),
    }
    form = "w keys with itself, causal" if exact is not None else stated_window(words)
    found = (
        forms[form]
        if form is not None
        else _probed(reader, list(forms.values()), 2 * size + 3, bool(says), sinks)
    )
    if found is not None:
        keys = f"i − {found[0]} … i" + (f" + {found[1]}" if found[1] else "")
        keys = f"0 … {sinks - 1} and {keys}" if sinks else keys
        how = "as it says" if form is not None else "found by probing"
        reader.notes.append(f"output i depends on the inputs {keys} ({how})")
    return found, 0 if found is None else sinks


def _sinks(reader: Any, words: str) -> int | None:
    """How many attention sinks a module has; None where it has some and does not say how many."""
    if "sink" not in words and "streaming" not in words:
        return 0
    size = size_of(reader.module, SINKS)
    number = re.search(r"(\d+) (attention )?sinks?\b|first (\d+) (token|key|position)s", words)
    return size if size is not None or number is None else int(number.group(1) or number.group(3))


def _probed(
    reader: Any, windows: list[tuple[int, int]], n: int, says: bool, sinks: int
) -> tuple[int, int] | None:
    n += sinks
    try:
        effect = reader.effect(n)
    except Exception:  # foreign code; the laws report what raises
        return None
    if not torch.equal(effect, effect[:1].expand_as(effect)):
        return None
    for reach in windows if sinks else ():
        if torch.equal(effect[0], _band(n, reach)):
            return reach  # its sinks are missing
    right = {reach: (effect[0] == _band(n, reach, sinks)).all(-1) for reach in windows}
    best = max(right, key=lambda reach: int(right[reach].sum()))
    if bool(right[best].all()):
        return best
    if not says or _is_band(effect[0]) or 3 * int(right[best].sum()) < n:
        return None  # a window of another size, two layers of one, or something else
    return best


def _band(n: int, reach: tuple[int, int], sinks: int = 0) -> Tensor:
    i, j = torch.arange(n)[:, None], torch.arange(n)
    return ((i - j <= reach[0]) | (j < sinks)) & ((j - i <= reach[1]) | ((j < sinks) & (reach[1] > 0)))


def _is_band(effect: Tensor) -> bool:
    n = len(effect)
    far = (torch.arange(n)[:, None] - torch.arange(n)) * effect
    return torch.equal(effect, _band(n, (int(far.max()), int(-far.min()))))
