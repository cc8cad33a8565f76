"""The sliding window of a module: from its words and attributes, and from which inputs an output depends on."""

import re
from typing import Any

import torch
from torch import Tensor

from .fixed_parts import stated_window
from .names import size_of

WINDOWS = ("window", "window_size", "sliding_window", "attention_window", "local_window", "win")
MAX_WINDOW = 24  # keys: a window of w is probed with 2 w + 3 calls
OTHERS = (  # words for windows that also reach other keys, or that do not slide
    r"global|sink|registers|dilat|strid|block|chunk|prefix|anchor|random|shift|partition|swin|grid|image|dense"
)


def read_module_window(reader: Any) -> tuple[int, int] | None:
    """(before, after) of a module with a sliding window; None where that cannot be determined.

    What its words state is taken as stated. Otherwise it is the usual window of that size that the outputs depend on;
    or, where they depend on no band of keys at all, the one that most outputs depend on: the laws report the others.
    A module that has a size of a window without a word about it has that window only if all outputs depend on it.
    """
    words = f"{type(reader.module).__name__}\n{reader.text}".lower()
    size, says = size_of(reader.module, WINDOWS), re.search("window|sliding", words)
    if reader.tokens or reader.length is not None or reader.context or not (says or size):
        return None
    if re.search(OTHERS, words):
        return None
    exact = re.search(r"itself and the (\d+) (\w+ )?before", words)
    number = re.search(r"window of (\d+)|(\d+)[- ](token|key|position)s? window", words)
    if size is None and number is not None:
        size = int(number.group(1) or number.group(2))
    if exact is not None:
        size = int(exact.group(1)) + 1
    if size is None or not 1 <= size <= MAX_WINDOW:
        return None
    forms = {
        "w keys with itself, causal": (size - 1, 0),
        "w keys before, causal": (size, 0),
        "w keys each side": (size, size),
        "w - 1 keys each side": (size - 1, size - 1),
        "half on each side": (size // 2, size // 2),
    }
    form = "w keys with itself, causal" if exact is not None else stated_window(words)
    found = (
        forms[form] if form is not None else _probed(reader, list(forms.values()), 2 * size + 3, bool(says))
    )
    if found is not None:
        keys = f"i − {found[0]} … i" + (f" + {found[1]}" if found[1] else "")
        how = "as it says" if form is not None else "found by probing"
        reader.notes.append(f"output i depends on the inputs {keys} ({how})")
    return found


def _probed(reader: Any, windows: list[tuple[int, int]], n: int, says: bool) -> tuple[int, int] | None:
    try:
        effect = reader.effect(n)
    except Exception:  # foreign code; the laws report what raises
        return None
    if not torch.equal(effect, effect[:1].expand_as(effect)):
        return None
    right = {reach: (effect[0] == _band(n, reach)).all(-1) for reach in windows}
    best = max(right, key=lambda reach: int(right[reach].sum()))
    if bool(right[best].all()):
        return best
    if not says or _is_band(effect[0]) or 3 * int(right[best].sum()) < n:
        return None  # a window of another size, two layers of one, or something else
    return best


def _band(n: int, reach: tuple[int, int]) -> Tensor:
    i, j = torch.arange(n)[:, None], torch.arange(n)
    return (i - j <= reach[0]) & (j - i <= reach[1])


def _is_band(effect: Tensor) -> bool:
    n = len(effect)
    far = (torch.arange(n)[:, None] - torch.arange(n)) * effect
    return torch.equal(effect, _band(n, (int(far.max()), int(-far.min()))))
