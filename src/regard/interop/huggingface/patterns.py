"""Patterns of the user's in Hugging Face models: `rg.use`, and how they are saved with the model's configuration."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from ...errors import SpecError
from ...pattern import Pattern
from ..patterned import Patterns
from ..use import Applied, assign, check_patterns, forward_names, is_named_cross
from .own_attention import REGISTRY
from .registration import NAME

FIELD = "regard_patterns"  # where the configuration keeps them


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The self-attention modules of a model that call the registry, by name. Cross-attention is left alone."""
    return {name: m for name, m in registry_modules(model).items() if not is_named_cross(name, m)}


def registry_modules(model: nn.Module) -> dict[str, nn.Module]:
    """All attention modules of a model that call the registry, by name."""
    return {name: m for name, m in model.named_modules() if REGISTRY in forward_names(m)}


def use_in_hugging_face(model: Any, pattern: Any) -> Applied:
    modules, every = attention_modules(model), registry_modules(model)
    if not modules:
        raise SpecError(
            f"{type(model).__name__}: no attention of this family goes through the registry of transformers, so it "
            f"cannot be replaced; docs/huggingface_families.md has the families whose attention does"
        )
    saved = getattr(model.config, FIELD, None)
    if pattern is None:
        chosen = {} if not saved else _by_name(saved, modules)
    else:
        chosen = assign(pattern, modules, cross=every.keys() - modules.keys())
    for name, given in chosen.items():
        check_patterns(given, _heads(modules[name]), name, bool(getattr(modules[name], "is_causal", False)))
    states = model.__dict__.setdefault(STATES, [_State(model, every, None)])
    state = _State(model, every, chosen)
    before = model.config._attn_implementation
    state.apply()
    if model.config._attn_implementation != NAME:
        states[-1].apply()
        if len(states) == 1:
            del model.__dict__[STATES]
        raise SpecError(
            f"{type(model).__name__} did not take attn_implementation={NAME!r}; it has {before!r}"
        )
    states.append(state)

    def undo() -> None:
        states[:] = [x for x in states if x is not state]
        states[-1].apply()
        if len(states) == 1:
            model.__dict__.pop(STATES, None)

    return Applied(chosen, undo)


STATES = "_regard_states"  # of a model: as it was, then one for each use that has not been removed


class _State:
    """What a model's attention is set to; chosen is None: as it is now.

    modules: also those without a pattern, cross-attention among them. A module on which nothing is set looks for a
    saved pattern, and would find that of another module of its class.
    """

    def __init__(self, model: Any, modules: Mapping[str, nn.Module], chosen: dict[str, Patterns] | None):
        self.model, self.modules, self.chosen = model, modules, chosen
        configs = {id(c): c for c in (getattr(m, "config", None) for m in model.modules()) if c is not None}
        self.configs = list(configs.values())
        self.earlier = [(c._attn_implementation, getattr(c, FIELD, None)) for c in self.configs]
        self.had = {name: m.__dict__.get("regard_pattern", ...) for name, m in modules.items()}

    def apply(self) -> None:
        if self.chosen is None:
            self._restore()
            return
        self.model.set_attn_implementation(NAME)
        for name, module in self.modules.items():
            module.__dict__["regard_pattern"] = self.chosen.get(name)
            module.__dict__["regard_name"] = name
        written = written_patterns(self.chosen, self.modules)
        for config in self.configs:
            setattr(config, FIELD, written)

    def _restore(self) -> None:
        for config, (implementation, patterns) in zip(self.configs, self.earlier):
            config._attn_implementation = implementation
            if patterns is None:
                config.__dict__.pop(FIELD, None)
            else:
                setattr(config, FIELD, patterns)
        for name, module in self.modules.items():
            if self.had[name] is ...:
                module.__dict__.pop("regard_pattern", None)
            else:
                module.__dict__["regard_pattern"] = self.had[name]


def _heads(module: nn.Module) -> int | None:
    for holder in (module, getattr(module, "config", None)):
        for name in ("num_attention_heads", "num_heads", "n_heads", "n_head"):
            if isinstance(count := getattr(holder, name, None), int):
                return count
    return None


# As saved: {module name: {"class", "layer", "per_head", "patterns"}}, patterns as JSON texts, which config.json
# holds, or None for a module without one.


def written_patterns(chosen: Mapping[str, Patterns], modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    rows = {}
    for name, module in modules.items():
        given = chosen.get(name)
        each = given if given is None or isinstance(given, tuple) else (given,)
        rows[name] = {
            "class": type(module).__name__,
            "layer": getattr(module, "layer_idx", None),
            "per_head": isinstance(given, tuple),
            "patterns": None if each is None else [one.json() for one in each],
        }
    return {"layers": rows}


def _read_row(row: Mapping[str, Any]) -> Patterns | None:
    if row["patterns"] is None:
        return None
    each = tuple(Pattern.from_json(text) for text in row["patterns"])
    return each if row["per_head"] else each[0]


def _named(rows: Mapping[str, Any], name: str) -> Any:
    """The saved row of a module: of its name, or, in a model inside another, of the one name with the same end."""
    if name in rows:
        return rows[name]
    found = [row for each, row in rows.items() if name.endswith("." + each) or each.endswith("." + name)]
    return found[0] if len(found) == 1 else None


def _by_name(saved: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> dict[str, Patterns]:
    rows = saved["layers"]
    found = {name: row for name in modules if (row := _named(rows, name)) is not None}
    taken = {id(row) for row in found.values()}
    for name, row in rows.items():
        if row["patterns"] is not None and id(row) not in taken:
            raise SpecError(f"the configuration saves a pattern for {name}, which this model does not have")
    return {name: given for name, row in found.items() if (given := _read_row(row)) is not None}


def take_saved(model: Any) -> None:
    """Give the modules of a model that was just made, or set to "regard", the patterns saved in its configuration."""
    saved = getattr(model.config, FIELD, None)
    if saved:
        for name, module in registry_modules(model).items():
            if (row := _named(saved["layers"], name)) is not None:
                module.__dict__["regard_pattern"] = _read_row(row)


def saved_pattern(module: nn.Module, saved: Mapping[str, Any]) -> Any:
    """The saved pattern of a module of which no name is known: found by its class and its layer number."""
    rows = [row for row in saved["layers"].values() if row["class"] == type(module).__name__]
    layer = getattr(module, "layer_idx", None)
    here = [row for row in rows if row["layer"] == layer] if layer is not None else rows
    if not here:
        return None
    if all(row["patterns"] == here[0]["patterns"] for row in here):
        return _read_row(here[0])
    which = "" if layer is None else f" {layer}"
    raise SpecError(
        f"the configuration saves different patterns for modules like {type(module).__name__}{which}; call "
        f"rg.use(model) once after loading"
    )
