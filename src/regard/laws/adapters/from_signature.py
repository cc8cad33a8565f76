"""A target from a function without an adapter: its options from the signature, its layout and masks by probing."""

import inspect
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import SpecError
from ..target import Function
from . import layouts
from .fixed_parts import (
    find_fixed_window,
    is_stated_causal,
    probed_alignment,
    read_positions,
    read_window,
    sizes_of,
)
from .function_reader import FunctionReader, effect_of, probe_table
from .mask_encoding import KEY_SHAPES, KINDS, PAIR_SHAPES, MaskEncoding, find_encoding, stated_shapes
from .names import (
    GROUPED,
    HEAD_COUNTS,
    KV_HEAD_COUNTS,
    PADDING,
    START,
    TRAINING,
    in_usual_order,
    parameters_of,
    polarity,
    promised,
    recognized,
    says_added,
    says_integers,
    says_no_gradient,
    says_square,
    stated_alignment,
    stated_mask,
    text_of,
    windowed_by_default,
)
from .varlen import CU_KEYS, CU_QUERIES, MAX_LENGTHS, packed_call

DENSE, CAUSAL = "every key", "causal"
ADAPTER_HINT = "write an adapter: regard.laws.Function(name, call, claims={…}), docs/check.md"


@dataclass(frozen=True)
class Hints:
    """What the user specifies where probing cannot determine it: `--as`, `--with layout=…`, `--with mask=…`."""

    kind: str | None = None
    layout: str | None = None
    mask: str | None = None  # "keep" or "hide": what True means
    device: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def function_from_signature(function: Callable[..., Any], hints: Hints | None = None) -> Function:
    """attention(q, k, v, …) as a target; its options follow from the names of its other parameters."""
    hints = hints or Hints()
    name, parameters = _name(function), parameters_of(function)
    if parameters is not None and len(parameters) < 3:
        raise SpecError(
            f"{name}({', '.join(parameters)}): expected attention(q, k, v), an nn.Module, "
            "or an adapter (docs/check.md); if it is a part of a model, specify which: --as layer-norm, rotary, "
            "positions, schedule, clip or feed-forward"
        )
    others = {} if parameters is None else dict(list(parameters.items())[3:])
    if CU_QUERIES & set(others):
        return _varlen(function, others)
    text = text_of(function)
    names = recognized(others, text)
    padding = next((n for n in PADDING if n in others), None)
    left_out = _left_out(name, others, names, padding)
    usual, notes = in_usual_order(function, parameters or {})
    reader = FunctionReader(usual, others, names, padding, notes=[*notes, *left_out])
    _read_layout(reader, hints, text)
    claims, lacks = set(names), set()
    claims |= _read_masks(reader, hints, text)
    if "mask" in names and reader.mask is not None and not reader.mask.by_pairs:
        claims -= {"mask"}
        claims |= {"lengths"}
    if reader.layout in layouts.LOOPED or reader.layout in layouts.FOLDED:
        lacks |= {"grouped", "lse", "weights", "bias", "documents", "sink logits"} & ({"grouped"} | claims)
        claims -= lacks
    read_window(reader, text)
    alignment = "bottom-right" if any(n in START for n in others) and "causal" in names else None
    if {"causal", "window"} & set(names):
        alignment = alignment or stated_alignment(text)
    if "causal" not in names and is_stated_causal(name, text):
        claims |= {"always causal"}
        alignment = alignment or stated_alignment(text) or probed_alignment(reader)
        reader.notes.append(f"always causal, by its name or docstring; aligned {alignment} if n ≠ m")
    needed = others.get(names.get("window", ""))
    if needed is not None and windowed_by_default(needed) and reader.window.endswith("causal"):
        claims |= {"always causal"}  # every call has a window
        alignment = alignment or stated_alignment(text) or "top-left"
    claims |= promised(text) | _second_output(reader)
    if says_square(text):
        lacks |= {"n≠m"}
    if says_no_gradient(text):
        lacks |= {"grad"}
    positions = read_positions(reader, name, text)
    if positions.startswith("rotary"):
        lacks |= {"float64"}  # angles are usually computed in float32, also for float64 inputs
    fixed = find_fixed_window(reader, name, text)
    if fixed is not None:
        claims |= {"always causal"} if fixed[1] == 0 else set()
        lacks |= {"n≠m"}  # how its window is aligned with n ≠ m, and which queries have no key, is unknown
        alignment = alignment or "top-left"
    source, imports = _source(function, hints)
    return Function(
        name,
        reader.call,
        claims=claims,
        lacks=lacks,
        alignment=alignment,
        source=source,
        imports=imports,
        per_head_masks=reader.mask is None or reader.mask.per_head,
        window=fixed,
        positions=positions,
        dropout_in_eval=_dropout_in_eval(reader),
        sizes=sizes_of(reader, positions),
        notes=tuple(reader.notes),
        device=hints.device or "cpu",
    )


def _second_output(reader: FunctionReader) -> set[str]:
    """What a function that always returns a pair returns after the output, judging by its shape: lse or weights."""
    if reader.layout != "b h n d" or {"lse", "weights"} & set(reader.names):
        return set()
    g = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(2, 4, n, 8, generator=g) for n in (5, 5, 5))
    try:
        with torch.no_grad():
            out = reader.call(q, k, v)
    except Exception:  # foreign code; the laws report what raises
        return set()
    if not isinstance(out, tuple) or len(out) != 2 or not isinstance(out[1], Tensor):
        return set()
    name = {(2, 4, 5): "lse", (2, 4, 5, 5): "weights"}.get(tuple(out[1].shape))
    if name is not None:
        reader.notes.append(f"it returns a pair; the second element is taken to be the {name}")
    return set() if name is None else {name}


def _dropout_in_eval(reader: FunctionReader) -> Callable[..., Any] | None:
    if "dropout" not in reader.names or not any(n in TRAINING for n in reader.others):
        return None
    return replace(reader, eval_mode=True).call


def _left_out(name: str, others: dict[str, Any], names: dict[str, str], padding: str | None) -> list[str]:
    """A note on options that are off in every call of the laws; an error if a parameter is required."""
    known = {*names.values(), padding, *START, *HEAD_COUNTS, *KV_HEAD_COUNTS, *TRAINING, GROUPED}
    named = {
        n: p.default
        for n, p in others.items()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and n not in known
    }
    unknown = {n for n, default in named.items() if default is inspect.Parameter.empty}
    if unknown:
        raise SpecError(
            f"{name} requires {', '.join(sorted(unknown))}, which the laws do not pass; {ADAPTER_HINT}"
        )
    off = [n for n, default in named.items() if default is None or default is False]
    return [f"not tested, as the laws do not pass it: {', '.join(off)}; {ADAPTER_HINT}"] if off else []


def _read_layout(reader: FunctionReader, hints: Hints, text: str) -> None:
    """The layout that the user or the docstring states, else the first in which every axis behaves correctly."""
    if hints.layout is not None:
        reader.layout = layouts.checked(hints.layout)
        return

    def attend(layout: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        reader.layout = layout
        out = reader.call(q, k, v)
        return out[0] if isinstance(out, tuple) else out

    if "window" in reader.names:
        reader.window = "a number"
    stated = layouts.declared_layout(text)
    needs_heads = any(n in HEAD_COUNTS for n in reader.others)
    wanted = tuple(x for x in layouts.LAYOUTS if x != "b n (h d)")
    wanted = ("b n (h d)", *wanted) if needs_heads else wanted
    wanted = (stated,) if stated else wanted
    every = tuple(x for x in layouts.LAYOUTS if x != "b n (h d)")
    found, error = None, ""
    for choices, even, form in itertools.product(
        (wanted, every) if stated else (wanted,),
        (False, True),
        ("a number", "(before, after)") if "window" in reader.names else ("(before, after)",),
    ):
        reader.window, reader.even = form, even
        found, first = layouts.find_layout(attend, choices, even)
        error = error or first
        if found is not None:
            break
    reader.even = reader.even and found is not None
    reader.layout = found or "b h n d"
    if found is None:
        reader.notes.append("no call succeeded in any layout" + (f"; first error: {error}" if error else ""))
    elif found != "b h n d":
        reader.notes.append(
            f"layout ({', '.join(found.split())}), {'stated' if stated == found else 'found by probing'}"
        )


def _read_masks(reader: FunctionReader, hints: Hints, text: str) -> set[str]:
    """Find the encodings of the mask and of the padding mask; returns the claims that follow from them."""
    claims: set[str] = set()
    if "mask" in reader.names:
        side = hints.mask or polarity(reader.names["mask"], text)

        def seen(encoding: MaskEncoding, table: Tensor) -> Tensor:
            reader.mask = encoding
            if encoding.shape == "any that broadcasts":
                effect_of(reader, {"allowed": table[0, 0]})
                effect_of(reader, {"allowed": table[:, :, :1]})
            return effect_of(reader, {"allowed": table})

        stated = stated_mask(reader.names["mask"], text)
        shapes = stated_shapes(stated) or ("any that broadcasts", *PAIR_SHAPES)
        only_bool = "bool" in stated
        pairs = find_encoding(seen, [side], probe_table(reader, True), shapes, only_bool)
        if pairs is None and shapes[0] in PAIR_SHAPES:  # the stated shape is rejected: the laws report it
            pairs = MaskEncoding(shapes[0], KINDS[side][0])
        if pairs is None:
            pairs = find_encoding(seen, [side], probe_table(reader, False), KEY_SHAPES)
        if pairs is None:
            pairs = MaskEncoding(
                "any that broadcasts", f"bool, True = {'may attend' if side == 'keep' else 'masked'}"
            )
        if pairs.shape == "(n, m)" and reader.layout not in layouts.LOOPED:
            reader.notes.append("the mask is the same for all batch rows: shape (n, m)")
        reader.mask = pairs
        if "bias" not in reader.names and says_added(reader.names["mask"], text):
            reader.adds_mask = True
            claims |= {"bias"}
        if pairs.kind.startswith("bool") and says_integers(reader.names["mask"], text):
            claims |= {"integer mask"}
        if str(pairs) != "bool, True = may attend, shape any that broadcasts":
            reader.notes.append(f"{reader.names['mask']}: {pairs}")
    if reader.padding is not None:
        side = hints.mask or polarity(reader.padding, text)

        def padded(encoding: MaskEncoding, table: Tensor) -> Tensor:
            reader.padding_mask = encoding
            lengths = table.expand(-1, 1, 1, 5).sum((1, 2, 3))
            return effect_of(reader, {"lengths": lengths})

        found = find_encoding(
            padded, [side], probe_table(reader, False), ("(b, m)", "(b, 1, 1, m)", "(b, 1, m)")
        )
        reader.padding_mask = found or MaskEncoding(
            "(b, m)", f"bool, True = {'may attend' if side == 'keep' else 'masked'}"
        )
        reader.notes.append(f"{reader.padding}: {reader.padding_mask}")
        claims |= {"lengths"}
        if reader.padding_mask.kind.startswith("bool") and says_integers(reader.padding, text):
            claims |= {"integer mask"}
    return claims


def _varlen(function: Callable[..., Any], others: dict[str, Any]) -> Function:
    names = recognized(others)
    known = {*names.values(), *CU_QUERIES, *CU_KEYS, *MAX_LENGTHS, *TRAINING, GROUPED}
    unknown = [n for n, p in others.items() if p.default is p.empty and n not in known]
    if unknown:
        names_of_unknown = ", ".join(unknown)
        raise SpecError(
            f"{_name(function)} requires {names_of_unknown}, which the laws do not pass; {ADAPTER_HINT}"
        )
    call, two = packed_call(function, others, names)
    claims = {"documents"} | ({"lengths"} if two else set())
    claims |= {x for x in ("causal", "scale", "window") if x in names}
    source, imports = _source(function, Hints())
    return Function(
        _name(function),
        call,
        claims=claims,
        lacks=set() if two else {"n≠m"},
        alignment="bottom-right" if two else None,
        source=source,
        imports=imports,
        notes=("packed sequences, (total, h, d) with cumulative lengths",),
    )


def _name(thing: Any) -> str:
    return getattr(thing, "__name__", None) or type(thing).__name__


def _source(function: Callable[..., Any], hints: Hints) -> tuple[str | None, str]:
    """The expression and the imports with which a snippet gets this function, if it can be imported."""
    if isinstance(function, nn.Module):
        return None, ""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    thing: Any = sys.modules.get(module or "")
    if thing is None or module == "__main__" or "<" in name:
        return None, ""
    for part in name.split("."):
        thing = getattr(thing, part, None)
    if thing is not function:
        return None, ""
    specified = {n: value for n in ("layout", "mask") if (value := getattr(hints, n)) is not None}
    arguments = ", ".join([f"{module}.{name}", *(f"{n}={value!r}" for n, value in specified.items())])
    return f"adapters.adapt({arguments})", f"import {module}\nfrom regard.laws import adapters"
