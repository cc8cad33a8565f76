"""Models of transformers, or parts of them, whose attention does not go through the registry.

Some choose a class from a dictionary by the name of the implementation: "regard" gets an entry there, whose calls of
F.scaled_dot_product_attention are computed by regard. Others have one attention of their own: they keep it, with the
masks that it expects, and a warning says so; without this they would get masks that they cannot read.
"""

import inspect
import sys
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakValueDictionary

from torch import nn
from transformers import PreTrainedModel

from ...pattern import full
from ..patterned import Intercepted
from ..use import SDPA, forward_names, reached_names

REGISTRY = "ALL_ATTENTION_FUNCTIONS"
EAGER = "eager"
_set_to_eager: WeakValueDictionary[int, Any] = WeakValueDictionary()  # configurations, by their id


def install(name: str, take_saved: Callable[[Any], None]) -> None:
    """Let models that are made with, or set to, attn_implementation=name be examined. A second call does nothing.

    take_saved(model) gives such a model the patterns that its configuration saves.
    """
    check, finish = PreTrainedModel.get_correct_attn_implementation, PreTrainedModel.post_init
    if hasattr(finish, "regard"):
        return

    @wraps(check)
    def get_correct_attn_implementation(self, requested_attention=None, *args, **kwargs):
        found = check(self, requested_attention, *args, **kwargs)
        if found != name:
            return found
        add_classes(type(self), name)
        initialized = bool(getattr(self, "_modules", None))
        if initialized:
            take_saved(self)
        return EAGER if initialized and has_own_attention(self) else found

    @wraps(finish)
    def post_init(self):
        finish(self)
        take_saved(self)
        config = self.config
        if getattr(config, "_attn_implementation", None) == name and has_own_attention(self):
            config._attn_implementation_internal = EAGER
            _set_to_eager[id(config)] = config
        elif id(config) in _set_to_eager and any(calls_registry(m) for m in _own_modules(self)):
            config._attn_implementation_internal = name  # other parts that share this configuration do use it
            del _set_to_eager[id(config)]

    post_init.regard = True  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation  # type: ignore[method-assign]
    PreTrainedModel.post_init = post_init  # type: ignore[method-assign]


def add_classes(model: type, name: str) -> None:
    """An entry for `name` in every dictionary from implementations to attention classes of the model's files."""
    for module in {
        sys.modules[c.__module__] for c in model.__mro__ if c.__module__.startswith("transformers.")
    }:
        for classes in list(vars(module).values()):
            if (
                isinstance(classes, dict)
                and EAGER in classes
                and name not in classes
                and _are_modules(classes)
            ):
                fused = classes.get("sdpa", classes[EAGER])
                classes[name] = fused if fused is classes[EAGER] else through_regard(fused)


def _are_modules(classes: dict) -> bool:
    return all(inspect.isclass(x) and issubclass(x, nn.Module) for x in classes.values())


def through_regard(kind: Any) -> Any:
    """The class with its calls of F.scaled_dot_product_attention computed by `rg.attention`."""

    def forward(self, *args, **kwargs):
        with Intercepted(kind.__name__, full()):
            return kind.forward(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": wraps(kind.forward)(forward), "regard": True})


def calls_registry(module: nn.Module) -> bool:
    """Whether the attention of this module is computed by what is registered."""
    return REGISTRY in forward_names(module) or hasattr(type(module), "regard")


def has_own_attention(model: Any) -> bool:
    """Whether the model has attention and none of it goes through the registry; models inside it do not count."""
    own = list(_own_modules(model))
    if any(calls_registry(m) for m in own):
        return False
    attention = next((m for m in own if "Attention" in type(m).__name__ and _computes(m)), None)
    if attention is not None:
        warnings.warn(
            f"{type(model).__name__}: {type(attention).__name__} does not go through the registry of transformers; "
            f'it computes its own attention, and attn_implementation="regard" changes nothing there: packed '
            "documents are separated only if the model does it",
            stacklevel=4,
        )
    return attention is not None


def _computes(module: nn.Module) -> bool:
    return any(
        name in ("softmax", "matmul", SDPA, "bmm", "einsum") for name, _ in reached_names(type(module))
    )


def _own_modules(module: Any, config: Any = None) -> Any:
    """The modules of a model, without those of models inside it that have a configuration of their own."""
    config = module.config if config is None else config
    yield module
    for child in module.children():
        if not (isinstance(child, PreTrainedModel) and child.config is not config):
            yield from _own_modules(child, config)
