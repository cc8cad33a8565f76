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
    """The self-attention modules of a model that call the registry, by name. Cross attention is left alone."""
    found = {}
    for name, module in model.named_modules():
        if REGISTRY in forward_names(module) and not is_named_cross(name, module):
            found[name] = module
    return found


def use_in_hugging_face(model: Any, pattern: Any) -> Applied:
    modules = attention_modules(model)
    if not modules:
        raise SpecError(
            f"{type(model).__name__}: no attention of this family goes through the registry of transformers, so it "
            f"cannot be replaced; docs/huggingface_families.md has the families whose attention does"
        )
    saved = getattr(model.config, FIELD, None)
    if pattern is None:
        chosen = {} if not saved else _by_name(saved, modules)
    else:
        chosen = assign(pattern, modules)
    for name, given in chosen.items():
        check_patterns(given, _heads(modules[name]), name, bool(getattr(modules[name], "is_causal", False)))
    states = model.__dict__.setdefault(STATES, [_State(model, modules, None)])
    state = _State(model, modules, chosen)
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
    """What a model's attention is set to; chosen is None: as it is now."""

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


# As saved: {module name: {"class", "layer", "patterns"}}, patterns as JSON texts, which config.json holds.


def written_patterns(chosen: Mapping[str, Patterns], modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    rows = {}
    for name, module in modules.items():
        given = chosen.get(name)
        if given is None:
            continue
        each = given if isinstance(given, tuple) else (given,)
        rows[name] = {
            "class": type(module).__name__,
            "layer": getattr(module, "layer_idx", None),
            "per_head": isinstance(given, tuple),
            "patterns": [one.json() for one in each],
        }
    return {"layers": rows, "complete": len(rows) == len(modules)}


def _read_row(row: Mapping[str, Any]) -> Patterns:
    each = tuple(Pattern.from_json(text) for text in row["patterns"])
    return each if row["per_head"] else each[0]


def _by_name(saved: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> dict[str, Patterns]:
    rows = saved["layers"]
    chosen = {}
    for name, row in rows.items():
        here = (
            name
            if name in modules
            else next((m for m in modules if m.endswith("." + name) or name.endswith("." + m)), None)
        )
        if here is None:
            raise SpecError(f"the configuration saves a pattern for {name}, which this model does not have")
        chosen[here] = _read_row(row)
    return chosen


def saved_pattern(module: nn.Module, saved: Mapping[str, Any]) -> Any:
    """The saved pattern of a module of a model that was just loaded: found by its class and its layer number."""
    rows = saved["layers"].values()
    same = [row for row in rows if row["class"] == type(module).__name__]
    layer = getattr(module, "layer_idx", None)
    here = [row for row in same if row["layer"] == layer] if layer is not None else same
    texts = {tuple(row["patterns"]) for row in here}
    if len(texts) == 1 and (layer is not None or saved["complete"]):
        return _read_row(here[0])
    if not same or (layer is not None and not here):
        return None
    raise SpecError(
        f"{type(module).__name__} does not know its layer number, and the saved patterns differ by layer; call "
        f"rg.use(model) once after loading"
    )
