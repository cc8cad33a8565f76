"""Targets on the command line: a preset, a declaration, a configuration, a checkpoint or a Python object."""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from .. import spec, value
from ..errors import FormatError, RegardError, SpecError, nearest
from ..files import read_json, read_text
from ..nn.serialization import load
from ..training.recipes.run import MODEL, RECIPE
from .forms import FORMS


def read(source: str) -> Any:
    """The object that `source` names.

    A preset or a declaration gives its spec; a Hugging Face configuration its PretrainedConfig; a folder
    written by `rg.save`, or by `regard train`, its model; `package.module:name` whatever has that name.
    """
    if not source:
        raise SpecError(f"the name of the model is empty; accepted: {FORMS}")
    if source.startswith("hf:"):
        return huggingface_config(Path(source.removeprefix("hf:")))
    path = Path(source)
    if path.is_dir():
        return _folder(path)
    if path.suffix in (".json", ".yaml", ".yml"):
        return _declaration(path)
    if ":" in source:
        try:
            return python_object(source)
        except RegardError:
            raise
        except Exception as e:  # foreign code may raise anything while it is imported
            raise SpecError(f"{source}: importing it raised {type(e).__name__}: {e}") from e
    if source in spec.presets():
        return spec.preset(source)
    if path.suffix == ".py":
        if not path.is_file():
            raise SpecError(f"file not found: {source}")
        raise SpecError(f"{source}: give the name of a function, a class or a model in it, {source}:NAME")
    raise SpecError(f"unknown model {source!r}; accepted: {FORMS}; {nearest(source, spec.presets())}")


def python_object(source: str) -> Any:
    """The object named by `package.module:name`, searched on PYTHONPATH and in the current folder."""
    module_name, _, name = source.rpartition(":")
    if not module_name or not name:
        raise SpecError(f"{source!r} is not of the form package.module:name or file.py:name")
    if module_name.endswith(".py"):
        return _attribute(_file(Path(module_name)), module_name, name)
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        if e.name != module_name and not module_name.startswith(f"{e.name}."):
            raise  # the module exists, and one of its own imports fails
        raise SpecError(f"no module {module_name!r} on PYTHONPATH or in {Path.cwd()}") from e
    return _attribute(target, module_name, name)


def _attribute(target: Any, module_name: str, name: str) -> Any:
    for part in name.split("."):
        if not hasattr(target, part):
            public = [n for n in dir(target) if not n.startswith("_")]
            raise SpecError(f"{module_name} has no {name!r}; {nearest(part, public)}")
        target = getattr(target, part)
    return target


def _file(path: Path) -> Any:
    """The module in a Python file; it can import other modules of its folder."""
    if not path.is_file():
        raise SpecError(f"file not found: {path}")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    located = importlib.util.spec_from_file_location(path.stem, path)
    if located is None or located.loader is None:
        raise SpecError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(located)
    sys.modules[path.stem] = module
    located.loader.exec_module(module)
    return module


def huggingface_config(path: Path) -> Any:
    """The PretrainedConfig of a config.json; nothing is downloaded."""
    path = path / "config.json" if path.is_dir() else path
    return _huggingface(read_json(path), path)


def _folder(path: Path) -> Any:
    if (recipe := path / RECIPE).is_file():
        if not (path / MODEL).is_dir():
            raise FormatError(
                f"{path} has no {MODEL} yet; `regard train {recipe} --out {path}` continues the run"
            )
        path = path / MODEL
    config = read_json(path / "config.json")
    return load(path) if "spec" in config else _huggingface(config, path)


def _declaration(path: Path) -> Any:
    data = read_json(path) if path.suffix == ".json" else _yaml(path)
    if "kind" in data:
        return value.from_plain(data, spec.KINDS)
    if "spec" in data:
        return value.from_plain(data["spec"], spec.KINDS)
    return _huggingface(data, path)


def _huggingface(data: dict[str, Any], path: Path) -> Any:
    if "model_type" not in data:
        raise FormatError(
            f'{path} has neither a "kind" (a declaration of regard) nor a "model_type" (a Hugging Face '
            f"configuration)"
        )
    try:
        from transformers import AutoConfig
    except ModuleNotFoundError as e:
        raise SpecError(f"{path} is a Hugging Face configuration; pip install 'regard[huggingface]'") from e
    fields = {k: v for k, v in data.items() if k not in ("model_type", "transformers_version")}
    try:
        return AutoConfig.for_model(data["model_type"], **fields)
    except ValueError as e:
        raise FormatError(
            f"{path}: unknown model_type {data['model_type']!r} in this version of transformers"
        ) from e


def _yaml(path: Path) -> dict[str, Any]:
    try:
        import yaml
    except ModuleNotFoundError as e:
        raise SpecError(f"{path} is YAML; pip install 'regard[cli]'") from e
    try:
        text = read_text(path)
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise FormatError(f"{path}: YAML aliases (*name) are not read; write the value out")
        return _mapping(yaml.safe_load(text), path)
    except yaml.YAMLError as e:
        raise FormatError(f"{path} is not YAML: {e}") from e


def _mapping(data: Any, path: Path) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise FormatError(f"{path}: expected a mapping, not {type(data).__name__}")
    return data
