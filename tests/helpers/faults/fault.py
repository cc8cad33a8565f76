"""A fault: a few words of a sound source, replaced. What is made of it claims to be sound."""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from regard.laws.adapters.seeded import seeded
from regard.laws.target import Function, Model, Projections, Target

HERE = Path(__file__).parent
DTYPES = {"float64", "float32", "float16", "bfloat16"}
ABLE = {
    "grad",
    "double backward",
    "deterministic",
    "grouped",
    "n≠m",
    "d_v≠d_k",
    "empty rows",
    "nan under lengths",
}
ASKED = {
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
    """`said` is what went wrong; `law` must report it. `old` stands once in the source of `of`."""

    said: str
    law: str
    of: str  # a function of sound_attention, a key of MODULES or a key of MODELS
    old: str
    new: str
    also: tuple[tuple[str, str], ...] = ()  # further replacements

    def target(self) -> Target:
        return sound(self.of, ((self.old, self.new), *self.also), self.said)


MODULES = {
    "module": {},
    "causal module": {"past": True},
    "rotary module": {"past": True, "rotary": True},
    "module with dropout": {"dropout": 0.3},
}
MODELS = {"decoder": {"past": True}, "encoder": {"past": False}}


def sound(of: str, changes: tuple[tuple[str, str], ...] = (), name: str = "") -> Target:
    """The sound target of this name, or what is left of it after the changes."""
    if of in ASKED:
        source = load("sound_attention", changes)
        able = ABLE - {"nan under lengths"} if of == "in_parts" else ABLE
        claims = ASKED[of] | able | DTYPES
        return Function(name or of, getattr(source, of), claims=claims, alignment="bottom-right")
    if of in MODULES:
        return _module(of, load("sound_module", changes), name)
    return _model(of, load("sound_model", changes), name)


def load(name: str, changes: tuple[tuple[str, str], ...]) -> ModuleType:
    """The module of this name with its source changed; each old text must stand in it once."""
    text = (HERE / f"{name}.py").read_text("utf-8")
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {name}.py"
        text = text.replace(old, new)
    made = ModuleType(f"faults.{name}_changed")
    made.__file__ = str(HERE / f"{name}.py")
    sys.modules.setdefault(made.__name__, made)  # classes look up their module when they are copied
    exec(compile(text, made.__file__, "exec"), made.__dict__)
    return made


def _module(of: str, source: ModuleType, name: str) -> Model:
    module = seeded(lambda: source.Attention(**MODULES[of]))
    claims = {"mask", "lengths", "documents", "float32", "float64", "grad", "nan under lengths", "empty rows"}
    cache: dict = {}
    if module.past:
        claims |= {"always causal", "cache"}
        cache = {"start": lambda module, b, context=None: {}, "step": lambda module, x, c: module(x, cache=c)}
    if module.dropout:
        claims |= {"dropout"}
    return Model(
        name or of,
        module,
        lambda module, x, context=None, **asked: module(x, context, **asked),
        of="attention",
        d_model=24,
        heads=4,
        layers=1,
        projections=None if module.rotary else _projections,
        claims=claims | ({"positions", "relative positions", "shift"} if module.rotary else set()),
        lacks=set() if module.rotary or module.past else {"positions", "relative positions"},
        alignment="bottom-right",
        **cache,
    )


def _projections(module: torch.nn.Module) -> Projections:
    h, kv, d = module.heads, module.kv_heads, module.d_k
    into = [w.weight.view(c, d, -1).mT for w, c in ((module.w_q, h), (module.w_k, kv), (module.w_v, kv))]
    biases = [w.bias.view(c, d) for w, c in ((module.w_q, h), (module.w_k, kv), (module.w_v, kv))]
    return Projections(*into, module.w_o.weight.view(-1, h, d).permute(1, 2, 0), *biases, module.w_o.bias)


def _model(of: str, source: ModuleType, name: str) -> Model:
    module = seeded(lambda: source.Model(**MODELS[of]))
    claims = {"lengths", "documents", "float32", "float64", "grad", "positions"}
    cache: dict = {}
    if of == "decoder":
        claims |= {"always causal", "cache"}
        cache = {"start": lambda module, b, context=None: {}, "step": lambda module, x, c: module(x, cache=c)}
    return Model(
        name or of,
        module,
        lambda module, x, **asked: module(x, **asked),
        of=of,
        vocab=13,
        heads=4,
        layers=2,
        longest=64,
        claims=claims,
        alignment="bottom-right",
        **cache,
    )
