"""Right attentions of many styles, and faulty ones made from them by one edit each, with the fault in words.

A style is a source text whose `make()` returns the attention. A fault is an edit of that text: (family, words,
old, new), where family is the cause that `check` should name ("a|b": either). `load` executes a text as a module.
"""

import functools
import linecache
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from .conventions import adapter_for

# Data files by who wrote them: "tuned" is by the author of the causes, who changed them until these were named.
SETS = {
    "tuned": ("functions", "kernels", "modules"),
    "issues": ("issues",),  # after public issue threads, by an engineer who had not read the laws
    "reports": (
        "reports",
    ),  # after other public reports, in other styles, by another who had not read them either
    "buffers": (
        "buffers",
    ),  # kinds of faults that were missed, in other styles, by the author of their probes
}
FRESH = (
    "faults_functions",
    "faults_modules",
    "faults_kernels",
)  # Python texts by an author who had not read the laws, unchanged
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
    set: str = "tuned"


class Style(NamedTuple):
    name: str
    source: str
    set: str
    faults: tuple[tuple[str, str, str, str], ...] = ()


def load(entry: Entry) -> Any:
    """The attention of an entry. Its source is registered, so that inspect can read it."""
    if entry.set == "fresh":
        return _fresh(entry)
    return _executed(
        f"corpus_{abs(hash(entry.name))}", f"<corpus {entry.name}>", PRELUDE + entry.source
    ).make()


def _executed(name: str, file: str, text: str) -> Any:
    """A module from its text."""
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    module = types.ModuleType(name)
    module.__file__ = file
    sys.modules[module.__name__] = module
    exec(compile(text, file, "exec"), module.__dict__)
    return module


@functools.cache
def _fresh_module(file: str) -> Any:
    path = Path(__file__).parent / "fresh" / f"{file}.txt"
    return _executed(f"corpus_{file}", f"<corpus {file}>", path.read_text("utf-8"))


def _fresh(entry: Entry) -> Any:
    """What a function of the fresh files builds; its author's claim is added to its docstring."""
    file, _, name = entry.source.partition(":")
    module = _fresh_module(file)
    each = next(e for e in (*module.FAULTY, *module.RIGHT) if e["name"] == name)
    thing = each["build"]()
    owner = type(thing) if isinstance(thing, nn.Module) else thing
    if (adapter := adapter_for(each["claims"])) is not None:
        return adapter(name, thing)
    own = "" if owner.__doc__ in (None, nn.Module.__doc__) else owner.__doc__
    if each["claims"] not in own:  # a class is built more than once
        owner.__doc__ = f"{own}\n{each['claims']}"
    return thing


def _fresh_entries() -> list[Entry]:
    import yaml

    causes = yaml.safe_load((Path(__file__).parent / "fresh" / "causes.yaml").read_text("utf-8"))
    found = []
    for file in FRESH:
        module = _fresh_module(file)
        found += [Entry(f"fresh {e['name']}", f"{file}:{e['name']}", set="fresh") for e in module.RIGHT]
        found += [
            Entry(
                f"fresh {e['name']}/ {e['cause']}",
                f"{file}:{e['name']}",
                causes[e["name"]],
                e["cause"],
                "fresh",
            )
            for e in module.FAULTY
        ]
    return found


def styles() -> list[Style]:
    """The styles of the data files, with their faults."""
    import yaml

    found = []
    for group, names in SETS.items():
        for name in names:
            for each in yaml.safe_load((Path(__file__).parent / f"{name}.yaml").read_text("utf-8")):
                faults = tuple((f["cause"], f["words"], f["old"], f["new"]) for f in each["faults"])
                found.append(Style(each["name"], each["source"], group, faults))
    return found


def entries() -> list[Entry]:
    """All entries: every style once as it is, then its faults."""
    found = []
    for style in styles():
        found.append(Entry(style.name, style.source, set=style.set))
        for i, (family, words, old, new) in enumerate(style.faults):
            if style.source.count(old) < 1:
                raise ValueError(f"{style.name}, fault {i} ({words}): {old!r} does not occur")
            source = style.source.replace(old, new)
            found.append(Entry(f"{style.name}/{i} {words}", source, family, words, style.set))
    return [*found, *_fresh_entries()]
