"""A fault: a piece of a correct source, replaced. The faulty target makes the same claims as the correct one."""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from regard.laws.adapters.seeded import seeded
from regard.laws.target import Function, Model, Projections, Target

HERE = Path(__file__).parent
DTYPES = {"float64", "float32", "float16", "bfloat16", "float16 range"}
PROPERTIES = {
    "grad",
    "double backward",
    "deterministic",
    "grouped",
    "n≠m",
    "d_v≠d_k",
    "empty rows",
    "nan under lengths",
}
FUNCTIONS = {
    "attention": {
        "mask",
        "causal",
        "lengths",
        "documents",
        "window",
        "bias",
        "scale",
        "lse",
        "mask and causal",
    },
    "tiled": {"mask", "causal", "lengths", "scale", "lse", "mask and causal"},
    "in_parts": {"mask", "scale", "lse"},
}


@dataclass(frozen=True)
class Fault:
    """`name` describes the fault; `law` must report it. `old` occurs once in the source of the target."""

    name: str
    law: str
    source: str  # a key of FUNCTIONS, MODULES or MODELS
    old: str
    new: str
    also: tuple[tuple[str, str], ...] = ()  # further replacements

    def target(self) -> Target:
        return correct(self.source, ((self.old, self.new), *self.also), self.name)


MODULES = {
    "module": {},
    "causal module": {"causal": True},
    "rotary module": {"causal": True, "rotary": True},
    "module with dropout": {"dropout": 0.3},
}
MODELS = {"decoder": {"causal": True}, "encoder": {"causal": False}}


def correct(source: str, changes: tuple[tuple[str, str], ...] = (), name: str = "") -> Target:
    """The correct target of this name, or the one with these changes."""
    if source in FUNCTIONS:
        module = load("correct_attention", changes)
        properties = PROPERTIES - {"nan under lengths"} if source == "in_parts" else PROPERTIES
        claims = FUNCTIONS[source] | properties | DTYPES
        return Function(name or source, getattr(module, source), claims=claims, alignment="bottom-right")
    if source in MODULES:
        return _module(source, load("correct_module", changes), name)
    return _model(source, load("correct_model", changes), name)


def load(name: str, changes: tuple[tuple[str, str], ...]) -> ModuleType:
    """The module of this name with its source changed; each old text must occur in it once."""
    text = (HERE / f"{name}.py").read_text("utf-8")
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {name}.py"
        text = text.replace(old, new)
    module = ModuleType(f"faults.{name}_changed")
    module.__file__ = str(HERE / f"{name}.py")
    sys.modules.setdefault(module.__name__, module)  # copying a class looks up its module
    exec(compile(text, module.__file__, "exec"), module.__dict__)
    return module


def _module(kind: str, source: ModuleType, name: str) -> Model:
    module = seeded(lambda: source.Attention(**MODULES[kind]))
    claims = {"mask", "lengths", "documents", "float32", "float64", "grad", "nan under lengths", "empty rows"}
    cache: dict = {}
    if module.causal:
        claims |= {"always causal", "cache"}
        cache = {
            "make_cache": lambda module, b, context=None: {},
            "decode": lambda module, x, cache: module(x, cache=cache),
        }
    if module.dropout:
        claims |= {"dropout"}
    return Model(
        name or kind,
        module,
        lambda module, x, context=None, **options: module(x, context, **options),
        architecture="attention",
        d_model=24,
        heads=4,
        layers=1,
        projections=None if module.rotary else _projections,
        claims=claims | ({"positions", "relative positions", "shift"} if module.rotary else set()),
        lacks=set() if module.rotary or module.causal else {"positions", "relative positions"},
        alignment="bottom-right",
        **cache,
    )


def _projections(module: torch.nn.Module) -> Projections:
    h, kv, d = module.heads, module.kv_heads, module.d_k
    into = [w.weight.view(c, d, -1).mT for w, c in ((module.w_q, h), (module.w_k, kv), (module.w_v, kv))]
    biases = [w.bias.view(c, d) for w, c in ((module.w_q, h), (module.w_k, kv), (module.w_v, kv))]
    return Projections(*into, module.w_o.weight.view(-1, h, d).permute(1, 2, 0), *biases, module.w_o.bias)


def _model(kind: str, source: ModuleType, name: str) -> Model:
    module = seeded(lambda: source.Model(**MODELS[kind]))
    claims = {"lengths", "documents", "float32", "float64", "grad", "positions"}
    cache: dict = {}
    if kind == "decoder":
        claims |= {"always causal", "cache"}
        cache = {
            "make_cache": lambda module, b, context=None: {},
            "decode": lambda module, x, cache: module(x, cache=cache),
        }
    return Model(
        name or kind,
        module,
        lambda module, x, **options: module(x, **options),
        architecture=kind,
        vocab=13,
        heads=4,
        layers=2,
        max_length=64,
        claims=claims,
        alignment="bottom-right",
        **cache,
    )
