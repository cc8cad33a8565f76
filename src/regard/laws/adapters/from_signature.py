"""A target from a function that has no adapter: its options from its signature, layout and masks by probing."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import SpecError
from ..harness import Inexpressible
from ..target import OPTIONS, Function
from . import layouts
from .mask_encoding import KEY_SHAPES, PAIR_SHAPES, MaskEncoding, find_encoding
from .names import (
    GROUPED,
    HEAD_COUNTS,
    KV_HEAD_COUNTS,
    PADDING,
    START,
    TRAINING,
    parameters_of,
    polarity,
    recognized,
    text_of,
)
from .varlen import CU_KEYS, CU_QUERIES, MAX_LENGTHS, packed_call

DENSE, CAUSAL = "every key", "causal"
HOW = "write an adapter: regard.laws.Function(name, call, claims={…}), docs/check.md"


@dataclass(frozen=True)
class Hints:
    """What the user says about a target where probing cannot tell: `--as`, `--with layout=…`, `--with mask=…`."""

    kind: str | None = None
    layout: str | None = None
    mask: str | None = None  # "keep" or "hide": what True means
    device: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Reading:
    """A function and how its parameters are used."""

    function: Callable[..., Any]
    others: dict[str, Any]
    names: dict[str, str]
    padding: str | None
    layout: str = "b h n d"
    mask: MaskEncoding | None = None
    padding_mask: MaskEncoding | None = None
    window: str = "(before, after)"
    notes: list[str] = field(default_factory=list)

    def arguments(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments of one call; q, k and v in (b, h, n, d)."""
        size = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        given: dict[str, Any] = {}
        for option, (keyword, _) in OPTIONS.items():
            if keyword not in options or option not in self.names:
                continue
            value = options[keyword]
            if option == "mask" and self.mask is not None:
                value = self.mask.encode(value, size, q.dtype)
            if option == "window":
                value = encode_window(self.window, value)
            given[self.names[option]] = value
        if "lengths" in options and "lengths" not in self.names:
            kept = torch.arange(size[3], device=q.device) < options["lengths"][:, None, None, None]
            encoding, name = (
                (self.padding_mask, self.padding)
                if self.padding is not None
                else (self.mask, self.names.get("mask"))
            )
            assert encoding is not None and name is not None
            given[name] = encoding.encode(kept, size, q.dtype)
        return given | self.defaults(q, k, v, given)

    def defaults(self, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> dict[str, Any]:
        """Parameters that no option sets: dropout and causal off, head counts, required ones."""
        more: dict[str, Any] = {}
        for name, p in self.others.items():
            if name in given:
                continue
            required = p.default is p.empty
            if name == GROUPED and q.shape[1] != k.shape[1]:
                more[name] = True
            elif name in START and name not in self.names.values():
                more[name] = k.shape[2] - q.shape[2]
            elif name in HEAD_COUNTS and (required or self.layout == "b n (h d)"):
                more[name] = q.shape[1]
            elif name in KV_HEAD_COUNTS and required:
                more[name] = k.shape[1]
            elif name in TRAINING or (name == self.names.get("causal") and p.default is not False):
                more[name] = False
            elif name == self.names.get("dropout") and p.default:
                more[name] = 0.0
            elif name == self.names.get("scale") and required:
                more[name] = q.shape[-1] ** -0.5
            elif required:
                more[name] = None
        return more

    def call(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        if self.layout == "b h n d":
            return self.function(q, k, v, **self.arguments(q, k, v, options))
        if self.layout in layouts.LOOPED or self.layout in layouts.FOLDED:
            return self._without_heads(q, k, v, options)

        def apply(q_: Tensor, k_: Tensor, v_: Tensor, chosen: dict[str, Any]) -> Any:
            return self.function(q_, k_, v_, **chosen)

        return layouts.through(self.layout, apply, q, k, v, self.arguments(q, k, v, options))

    def _without_heads(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Any:
        """One call for each head, or heads folded into the batch; options are encoded for that smaller call."""
        if self.layout in layouts.FOLDED:
            sizes = (slice(None), slice(0, 1))

            def apply(q_: Tensor, k_: Tensor, v_: Tensor, chosen: dict[str, Any]) -> Any:
                view = [self._as_heads(x)[sizes] for x in (q_, k_, v_)]
                return self.function(
                    q_, k_, v_, **self.arguments(view[0], view[1], view[2], _with_head_axis(chosen))
                )

            return layouts.through(self.layout, apply, q, k, v, options)

        def one(q_: Tensor, k_: Tensor, v_: Tensor, chosen: dict[str, Any]) -> Any:
            view = [(x if self.layout == "n d" else x.mT)[None, None] for x in (q_, k_, v_)]
            return self.function(
                q_, k_, v_, **self.arguments(view[0], view[1], view[2], _with_head_axis(chosen))
            )

        return layouts.through(self.layout, one, q, k, v, options)

    def _as_heads(self, x: Tensor) -> Tensor:
        x = {"b n d": x, "n b d": x.transpose(0, 1), "b d n": x.mT}.get(self.layout, x)
        return x[:, None]


def _with_head_axis(options: dict[str, Any]) -> dict[str, Any]:
    """Tables (B, n, m) become (B, 1, n, m), as masks are encoded from four axes."""
    fixed = {}
    for key, x in options.items():
        if key in ("allowed",) and isinstance(x, Tensor) and x.dim() == 3:
            x = x[:, None]
        if (
            key in ("lengths", "documents")
            and isinstance(x, Tensor)
            and x.dim() == (0 if key == "lengths" else 1)
        ):
            x = x[None]
        fixed[key] = x
    return fixed


def encode_window(form: str, value: tuple[int, int]) -> Any:
    """A window (before, after) in the form that a target takes."""
    before, after = value
    if form == "(before, after)":
        return value
    if form == "w keys each side" and before == after:
        return before
    if form == "w keys before, causal" and after == 0:
        return before
    if form == "w keys with itself, causal" and after == 0:
        return before + 1
    if form == "w - 1 keys each side" and before == after:
        return before + 1
    raise Inexpressible(f"a window of {value} cannot be given as {form}")


def function_from_signature(function: Callable[..., Any], hints: Hints | None = None) -> Function:
    """attention(q, k, v, …) as a target; its options follow from the names of its other parameters."""
    hints = hints or Hints()
    name, parameters = _name(function), parameters_of(function)
    if parameters is not None and len(parameters) < 3:
        raise SpecError(
            f"{name}({', '.join(parameters)}): expected attention(q, k, v), an nn.Module, "
            "or an adapter (docs/check.md); if it is a part of a model, say which: --as layer-norm, rotary, "
            "positions, schedule, clip or feed-forward"
        )
    others = {} if parameters is None else dict(list(parameters.items())[3:])
    if CU_QUERIES & set(others):
        return _varlen(function, others)
    names = recognized(others)
    padding = next((n for n in PADDING if n in others), None)
    _refuse_unknown(name, others, names, padding)
    reading = _Reading(function, others, names, padding)
    text = text_of(function)
    _read_layout(reading, hints, text)
    claims, lacks = set(names), set()
    claims |= _read_masks(reading, hints, text)
    if "mask" in names and reading.mask is not None and not reading.mask.by_pairs:
        claims -= {"mask"}
        claims |= {"lengths"}
    if reading.layout in layouts.LOOPED or reading.layout in layouts.FOLDED:
        lacks |= {"grouped", "lse", "weights", "bias", "documents", "sink logits"} & ({"grouped"} | claims)
        claims -= lacks
    _read_window(reading, text)
    alignment = "bottom-right" if any(n in START for n in others) and "causal" in names else None
    if "causal" not in names and _only_past(reading, name, text):
        claims |= {"always causal"}
        alignment = alignment or "top-left"
        reading.notes.append("always causal, by its name or docstring")
    source, imports = _source(function)
    return Function(
        name,
        reading.call,
        claims=claims,
        lacks=lacks,
        alignment=alignment,
        source=source,
        imports=imports,
        per_head_masks=reading.mask is None or reading.mask.per_head,
        notes=tuple(reading.notes),
        device=hints.device or "cpu",
    )


def _refuse_unknown(name: str, others: dict[str, Any], names: dict[str, str], padding: str | None) -> None:
    known = {*names.values(), padding, *START, *HEAD_COUNTS, *KV_HEAD_COUNTS, *TRAINING, GROUPED}
    unknown = {
        n
        for n, p in others.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and n not in known
    }
    if unknown:
        raise SpecError(f"{name} requires {', '.join(sorted(unknown))}, which the laws do not pass; {HOW}")


def _read_layout(reading: _Reading, hints: Hints, text: str) -> None:
    """The layout that the user or the docstring states, else the first in which the axes behave as they should."""
    if hints.layout is not None:
        reading.layout = layouts.checked(hints.layout)
        return

    def attend(layout: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        reading.layout = layout
        out = reading.call(q, k, v)
        return out[0] if isinstance(out, tuple) else out

    stated = layouts.declared_layout(text)
    needs_heads = any(n in HEAD_COUNTS for n in reading.others)
    wanted = tuple(x for x in layouts.LAYOUTS if x != "b n (h d)")
    wanted = ("b n (h d)", *wanted) if needs_heads else wanted
    wanted = (stated,) if stated else wanted
    found, error = layouts.find_layout(attend, wanted)
    if found is None and stated:
        found, error = layouts.find_layout(attend, tuple(x for x in layouts.LAYOUTS if x != "b n (h d)"))
    reading.layout = found or "b h n d"
    if found is None:
        reading.notes.append(f"no call succeeded in any layout; the first error: {error}")
    elif found != "b h n d":
        reading.notes.append(
            f"layout ({', '.join(found.split())}), {'stated' if stated == found else 'found by probing'}"
        )


def _effect(reading: _Reading, options: dict[str, Any], n: int = 5) -> Tensor:
    """Which pairs have a weight, (b, h, n, n): with values e_1 … e_n the output is the table of weights."""
    g = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 3, n, n, generator=g), torch.randn(2, 3, n, n, generator=g)
    if reading.layout in layouts.LOOPED:
        q, k = q[:1, :1], k[:1, :1]
    v = torch.eye(n).expand_as(k).contiguous()
    with torch.no_grad():
        out = reading.call(q, k, v, **options)
    o = out[0] if isinstance(out, tuple) else out
    if o.shape != q.shape:
        raise ValueError(f"returned shape {tuple(o.shape)}")
    return o.abs() > 1e-7


def _table(reading: _Reading, by_pairs: bool) -> Tensor:
    """A mask without symmetry; the batch rows differ where there is a batch."""
    g = torch.Generator().manual_seed(3)
    rows = 1 if reading.layout in layouts.LOOPED else 2
    if not by_pairs:
        return (torch.arange(5) < torch.tensor([3, 4])[:rows, None])[:, None, None]
    table = torch.rand(rows, 1, 5, 5, generator=g) < 0.5
    return table | torch.eye(5, dtype=torch.bool)


def _read_masks(reading: _Reading, hints: Hints, text: str) -> set[str]:
    """Find the encodings of the mask and of the padding mask; the claims that follow."""
    claims: set[str] = set()
    if "mask" in reading.names:
        side = hints.mask or polarity(reading.names["mask"], text)

        def seen(encoding: MaskEncoding, table: Tensor) -> Tensor:
            reading.mask = encoding
            if encoding.shape == "any that broadcasts":
                _effect(reading, {"allowed": table[0, 0]})
                _effect(reading, {"allowed": table[:, :, :1]})
            return _effect(reading, {"allowed": table})

        pairs = find_encoding(seen, [side], _table(reading, True), ("any that broadcasts", *PAIR_SHAPES))
        if pairs is None:
            pairs = find_encoding(seen, [side], _table(reading, False), KEY_SHAPES)
        if pairs is None:
            pairs = MaskEncoding(
                "any that broadcasts", f"bool, True = {'may attend' if side == 'keep' else 'masked'}"
            )
        if pairs.shape == "(n, m)" and reading.layout not in layouts.LOOPED:
            reading.notes.append("the mask is the same for all batch rows: shape (n, m)")
        reading.mask = pairs
        if str(pairs) != "bool, True = may attend, shape any that broadcasts":
            reading.notes.append(f"{reading.names['mask']}: {pairs}")
    if reading.padding is not None:
        side = hints.mask or polarity(reading.padding, text)

        def padded(encoding: MaskEncoding, table: Tensor) -> Tensor:
            reading.padding_mask = encoding
            lengths = table.expand(-1, 1, 1, 5).sum((1, 2, 3))
            return _effect(reading, {"lengths": lengths})

        found = find_encoding(padded, [side], _table(reading, False), ("(b, m)", "(b, 1, 1, m)", "(b, 1, m)"))
        reading.padding_mask = found or MaskEncoding(
            "(b, m)", f"bool, True = {'may attend' if side == 'keep' else 'masked'}"
        )
        reading.notes.append(f"{reading.padding}: {reading.padding_mask}")
        claims |= {"lengths"}
    return claims


def _read_window(reading: _Reading, text: str) -> None:
    """Whether a window is a pair or a number of keys, and which keys a number includes."""
    if "window" not in reading.names:
        return
    i, j = torch.arange(9)[:, None], torch.arange(9)
    forms = {
        "(before, after)": ((3, 1), (i - j <= 3) & (j - i <= 1)),
        "w keys with itself, causal": ((2, 0), (i - j <= 2) & (j <= i)),
        "w keys before, causal": ((3, 0), (i - j <= 3) & (j <= i)),
        "w keys each side": ((3, 3), (i - j).abs() <= 3),
        "w - 1 keys each side": ((2, 2), (i - j).abs() <= 2),
    }
    stated = _stated_window(text)
    ran = None
    for form, (value, table) in forms.items():
        reading.window = form
        causal = {"causal": True} if form.endswith("causal") and "causal" in reading.names else {}
        try:
            effect = _effect(reading, {"window": value, **causal}, 9)
        except Exception:
            continue
        if stated is not None and form != "(before, after)" and form != stated:
            continue
        ran = ran or form
        if bool((effect == table).all()):
            break
    else:
        reading.window = stated or ran or "(before, after)"
    if reading.window != "(before, after)":
        reading.notes.append(f"{reading.names['window']}: {reading.window}")


def _stated_window(text: str) -> str | None:
    """The inequality that a docstring states for a window given as a number."""
    import re

    found = re.search(r"(\|?)i\s*[-−]\s*j\1?\s*(<=|<|≤)\s*w", text)
    if found is None:
        return None
    both = bool(found.group(1))
    if found.group(2) == "<":
        return "w - 1 keys each side" if both else "w keys with itself, causal"
    return "w keys each side" if both else "w keys before, causal"


def _only_past(reading: _Reading, name: str, text: str) -> bool:
    """Whether its name or docstring says that it is always causal."""
    import re

    words = f"{name}\n{text}".lower()
    return bool(re.search(r"causal|autoregressive|decoder self", words)) and not re.search(
        r"(not|non|no|without|never)[- ]?(causal|autoregressive)|causal\s*(=|if|when)|bidirectional", words
    )


def _varlen(function: Callable[..., Any], others: dict[str, Any]) -> Function:
    names = recognized(others)
    known = {*names.values(), *CU_QUERIES, *CU_KEYS, *MAX_LENGTHS, *TRAINING, GROUPED}
    unknown = [n for n, p in others.items() if p.default is p.empty and n not in known]
    if unknown:
        raise SpecError(f"{_name(function)} requires {', '.join(unknown)}, which the laws do not pass; {HOW}")
    call, two = packed_call(function, others, names)
    claims = {"documents"} | ({"lengths"} if two else set())
    claims |= {x for x in ("causal", "scale", "window") if x in names}
    source, imports = _source(function)
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


def _source(function: Callable[..., Any]) -> tuple[str | None, str]:
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
    return f"adapters.adapt({module}.{name})", f"import {module}\nfrom regard.laws import adapters"
