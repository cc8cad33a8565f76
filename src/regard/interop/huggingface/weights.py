"""Weights both ways: `from_huggingface` and `to_huggingface`, for families whose architecture a spec can express.

A family is a function from its configuration to a spec, and a list of links between the names of our parameters and
theirs. Every parameter on both sides must be linked, so that nothing is lost.
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ... import spec
from ...errors import FormatError, SpecError, nearest
from ...nn.build import build
from ...pattern import Pattern, per_head
from .families import FAMILIES, Family, Link
from .patterns import FIELD
from .problems import together


def from_huggingface(source: Any) -> nn.Module:
    """A transformers model, or a folder with config.json and safetensors, as a module of regard with equal outputs.

    The module has a `spec`, so that `rg.cost`, `rg.look`, `rg.generate` and `rg.lower` accept it. Nothing is
    downloaded, and no pickle is read.
    """
    model = _loaded(source) if isinstance(source, str | Path) else source
    family = _family(model)
    declared = _declared(family, model.config)
    ours = build(declared)
    theirs = model.state_dict()
    first = next(iter(model.parameters()))
    ours = ours.to(device=first.device, dtype=first.dtype)
    _copy_in(
        ours.state_dict(), theirs, list(family.links(model.config)), type(model).__name__, family.ignored
    )
    if family.check is not None:
        family.check(theirs)
    ours.huggingface = (type(model), model.config)  # type: ignore[assignment]
    return ours.train(model.training)


def to_huggingface(module: nn.Module, config: Any = None) -> Any:
    """A transformers model with the weights of a module of regard.

    config: the configuration of the model, which must describe the module; None for a module that
    `from_huggingface` returned.
    """
    declared = getattr(module, "spec", None)
    if not isinstance(declared, spec.Spec):
        raise SpecError(
            f"{type(module).__name__} was not built from a spec, so its architecture is not known"
        )
    kind, known = getattr(module, "huggingface", (None, None))
    config = known if config is None else config
    if config is None:
        raise SpecError(
            "give the configuration of the model to make: rg.to_huggingface(module, LlamaConfig(…))"
        )
    if kind is None or type(config) is not type(known):
        kind = _class_of(config)
    family = FAMILIES[kind.__name__]
    meant = _declared(family, config)
    if meant != declared:
        raise SpecError(
            f"the configuration declares {meant!r}, and the module is {declared!r}; make them the same"
        )
    first = next(iter(module.parameters()))
    model = kind(copy.deepcopy(config)).to(device=first.device, dtype=first.dtype)
    _copy_out(module.state_dict(), model.state_dict(), list(family.links(config)))
    return model.train(module.training)


def _declared(family: Family, config: Any) -> spec.Spec:
    """The spec of a configuration, with the pattern that `rg.use` gave to all of its layers."""
    declared = family.declare(config)
    saved = getattr(config, FIELD, None)
    rows = saved["layers"].values() if saved else ()
    texts = {tuple(row["patterns"] or ()) for row in rows}
    if not any(texts):
        return declared
    if len(texts) > 1 or not isinstance(declared, spec.Encoder):
        raise SpecError(
            "the layers of this model have different patterns (rg.use), and a spec has one for all its layers"
        )
    [each] = texts
    attention = declared.block.attention
    heads = [together(attention.pattern, Pattern.from_json(text)) for text in each]
    both = per_head(heads) if len(heads) > 1 else heads[0]
    return replace(declared, block=replace(declared.block, attention=replace(attention, pattern=both)))


def _loaded(folder: str | Path) -> Any:
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise FormatError(f"{folder} has no config.json; give a folder that save_pretrained wrote")
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    name = (config.architectures or ["?"])[0]
    if name not in FAMILIES:
        raise _unknown(name)
    if not list(folder.glob("*.safetensors")):
        raise FormatError(f"{folder} has no safetensors file; other formats may run code when they are read")
    return getattr(transformers, name).from_pretrained(folder, local_files_only=True, use_safetensors=True)


def _family(model: Any) -> Family:
    name = type(model).__name__
    if name not in FAMILIES:
        raise _unknown(name)
    return FAMILIES[name]


def _class_of(config: Any) -> Any:
    for name in FAMILIES:
        kind = getattr(transformers, name)
        if type(config) is kind.config_class and (not config.architectures or name in config.architectures):
            return kind
    raise _unknown(type(config).__name__)


def _unknown(name: str) -> SpecError:
    if name.startswith("DeiT"):
        return SpecError(
            f"{name}: only DeiTForImageClassification is converted, no DeiT with two heads or none"
        )
    return SpecError(f"{name} cannot be converted to a spec; {nearest(name, FAMILIES)}")


def _copy_in(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], links: list[Link], name: str, ignored: tuple[str, ...]
) -> None:
    with torch.no_grad():
        for link in links:
            if link.theirs is None:
                ours[link.ours].zero_()
            else:
                ours[link.ours].copy_(link.read(theirs[link.theirs]))
    used = {theirs[link.theirs].data_ptr() for link in links if link.theirs is not None}
    left = [k for k, x in theirs.items() if x.data_ptr() not in used and not k.endswith(ignored)]
    if left:
        raise SpecError(f"{name} has weights that its spec does not have: {', '.join(left[:4])}")
    missing = set(ours) - {link.ours for link in links}
    tied = {ours[link.ours].data_ptr() for link in links}
    missing = {k for k in missing if ours[k].data_ptr() not in tied}
    if missing:
        raise SpecError(f"no weights for {', '.join(sorted(missing)[:4])} in {name}")


def _copy_out(ours: dict[str, Tensor], theirs: dict[str, Tensor], links: list[Link]) -> None:
    with torch.no_grad():
        for link in links:
            if link.theirs is not None:
                link.write(theirs[link.theirs], ours[link.ours])
            elif bool(ours[link.ours].any()):
                raise SpecError(f"{link.ours} is not zero, and the model has no such bias")
