"""Right attentions of many styles, and faulty ones made from them by one edit each, with the fault in words.

A style is a source text whose `make()` returns the attention. A fault is an edit of that text: (family, words,
old, new), where family is the cause that `check` should name ("a|b": either). `load` executes a text as a module.
"""

import linecache
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

FILES = ("functions", "kernels", "modules")
PRELUDE = """import math
import torch
import torch.nn.functional as F
from torch import nn
inf = float("inf")
"""


class Entry(NamedTuple):
    name: str
    source: str
    family: str = ""  # "" for a right one
    words: str = ""
    origin: str = "written"  # or "mutant": made by a program


class Style(NamedTuple):
    name: str
    source: str
    faults: tuple[tuple[str, str, str, str], ...] = ()


def load(entry: Entry) -> Any:
    """The attention of an entry. Its source is registered, so that inspect can read it."""
    file = f"<corpus {entry.name}>"
    text = PRELUDE + entry.source
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    module = types.ModuleType(f"corpus_{abs(hash(entry.name))}")
    module.__file__ = file
    sys.modules[module.__name__] = module
    exec(compile(text, file, "exec"), module.__dict__)
    return module.make()


def styles() -> list[Style]:
    """The styles of the data files, with their faults."""
    import yaml

    found = []
    for name in FILES:
        for each in yaml.safe_load((Path(__file__).parent / f"{name}.yaml").read_text("utf-8")):
            faults = tuple((f["cause"], f["words"], f["old"], f["new"]) for f in each["faults"])
            found.append(Style(each["name"], each["source"], faults))
    return found


def entries() -> list[Entry]:
    """All entries: every style once as it is, then its faults."""
    found = []
    for style in styles():
        found.append(Entry(style.name, style.source))
        for i, (family, words, old, new) in enumerate(style.faults):
            if style.source.count(old) < 1:
                raise ValueError(f"{style.name}, fault {i} ({words}): {old!r} does not occur")
            source = style.source.replace(old, new)
            found.append(Entry(f"{style.name}/{i} {words}", source, family, words))
    return found
