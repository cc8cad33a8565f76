"""regard: attention you can declare, run, price, prove, train and see.

The public names are listed in `__init__.pyi`, for type checkers and for this file. Each is imported when it is first
used, so that the command line can print its help without importing PyTorch.
"""

import ast
import pkgutil
from importlib import import_module
from importlib.util import find_spec
from typing import Any

__version__ = "0.2.0"

_STUB = ast.parse(pkgutil.get_data(__name__, "__init__.pyi") or b"")
_IMPORTS = [node for node in _STUB.body if isinstance(node, ast.ImportFrom) and node.module]  # no submodules
_MODULE_OF = {alias.name: f".{node.module}" for node in _IMPORTS for alias in node.names if alias.name != "*"}


def __getattr__(name: str) -> Any:
    """A public name or a submodule, imported now."""
    if name in _MODULE_OF:
        value = getattr(import_module(_MODULE_OF[name], __name__), name)
    elif name == "__all__":
        value = sorted([*_MODULE_OF, *import_module(".pattern.words", __name__).__all__])
    elif not name.startswith("_") and find_spec(f"{__name__}.{name}"):
        value = import_module(f".{name}", __name__)
    elif not name.startswith("_") and name in import_module(".pattern.words", __name__).__all__:
        value = getattr(import_module(".pattern.words", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__getattr__("__all__"), "__version__"]
