"""Python code that reproduces a counterexample."""

import inspect

from .law import Case, Law
from .target import Function, Target


def snippet(law: Law, target: Target, case: Case) -> str:
    """Code that runs this case again and prints what it measured."""
    lines = ["import regard as rg", "from regard.laws import replay"]
    if target.imports:
        lines.append(target.imports)
    if target.source is not None:
        lines += ["", f"target = {target.source}"]
    elif imported := _importable(target):
        module, name = imported
        lines += [f"from {module} import {name.split('.')[0]}", "", f"target = {name}"]
    else:
        lines += ["", f"target = ...  # {target.name}, the target that was checked"]
    fields = ", ".join(f"{k}={v!r}" for k, v in case.items())
    lines += [f"print(replay({law.number!r}, target, {fields}))  # {law.name}: {law.formula}"]
    return "\n".join(lines) + "\n"


def _importable(target: Target) -> tuple[str, str] | None:
    """The module and the qualified name of a function that can be imported."""
    call = target.call if isinstance(target, Function) else None
    raw = getattr(call, "__wrapped__", call)
    name, module = getattr(raw, "__qualname__", None), inspect.getmodule(raw) if raw is not None else None
    if name is None or module is None or "<" in name or module.__name__.startswith("regard."):
        return None
    return module.__name__, name
