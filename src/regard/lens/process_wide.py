"""Process-wide changes during `rg.look`: the first thread that calls it makes them, the last one undoes them.

Most of the interception is local to a thread (a TorchDispatchMode). Some of it cannot be: PyTorch turns off the fast
paths of nn.MultiheadAttention and nn.TransformerEncoder as soon as a TorchFunctionMode is active, and the calls
inside a compiled function cannot be intercepted. So F.scaled_dot_product_attention and rg.attention are replaced by
functions that look up which interceptor, if any, is active in the calling thread; compiled functions run eagerly; and
global module hooks record the path of the running module. One lock guards all of it, and a count makes the changes
independent of the order in which threads finish.
"""

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch

from ..compat import clear_compiler_tables

_LOCK = threading.RLock()


class SharedChange:
    """A process-wide change as a context manager: the first to enter makes it, the last to leave undoes it."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]):
        self._make, self._users, self._undo = make, 0, ExitStack()

    def __enter__(self) -> None:
        with _LOCK:
            if self._users == 0:
                self._undo.enter_context(self._make())
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with _LOCK:
            self._users -= 1
            if self._users == 0:
                self._undo.close()


@contextmanager
def replaced_functions(replacements: dict[Any, Any]) -> Iterator[None]:
    """Each key is replaced by its value, under every name that it has in a loaded module.

    A module that is imported meanwhile may import a replacement; it gets the original back at the end.
    """
    known = set(sys.modules)
    touched = _exchange(list(sys.modules.values()), replacements)
    touched.append(sys.modules["regard"])  # its public names are imported on first use, perhaps meanwhile
    try:
        yield
    finally:
        new = [module for name, module in list(sys.modules.items()) if name not in known]
        _exchange([*touched, *new], {new: old for old, new in replacements.items()})
        clear_compiler_tables()  # one that was built meanwhile has the replacements instead of the originals


def _exchange(modules: list[Any], replacements: dict[Any, Any]) -> list[Any]:
    """The modules that hold one of the replaced objects."""
    by_id = {id(old): new for old, new in replacements.items()}
    changed = []
    for module in modules:
        if names := _names_of(module, by_id.keys()):
            changed.append(module)
        for name, value in names:
            setattr(module, name, by_id[id(value)])
    return changed


def _names_of(module: Any, ids: Any) -> list[tuple[str, Any]]:
    """The names under which a module holds one of these objects."""
    if not isinstance(module, ModuleType) or ids.isdisjoint(map(id, list(vars(module).values()))):
        return []
    return [(name, value) for name, value in list(vars(module).items()) if id(value) in ids]


@contextmanager
def eager_compiled_functions() -> Iterator[None]:
    """Functions compiled by torch.compile run eagerly; the warnings that this causes are suppressed."""
    with ExitStack() as undo:
        if "torch._dynamo" in sys.modules or "torch.nn.attention.flex_attention" in sys.modules:
            undo.enter_context(torch.compiler.set_stance("force_eager"))
        undo.enter_context(warnings.catch_warnings())
        for message in (
            "flex_attention called without torch.compile",
            r"Using `torch.compile\(module\)` when there are global hooks",
        ):
            warnings.filterwarnings("ignore", message=message)
        yield


@contextmanager
def _without_fast_path() -> Iterator[None]:
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


# nn.MultiheadAttention runs its parts one by one, so that the output of a head can be changed.
WITHOUT_FAST_PATH = SharedChange(_without_fast_path)
