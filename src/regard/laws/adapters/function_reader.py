"""Calls a function of q, k and v with the options of the laws, as its signature, docstring and probing require."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..harness import Inexpressible
from ..target import OPTIONS
from . import layouts
from .mask_encoding import MaskEncoding, as_integers
from .names import GROUPED, HEAD_COUNTS, KV_HEAD_COUNTS, START, TRAINING, windowed_by_default


@dataclass
class FunctionReader:
    """A function, its parameters for each option, and what was determined about its layout and masks."""

    function: Callable[..., Any]
    others: dict[str, Any]
    names: dict[str, str]
    padding: str | None
    layout: str = "b h n d"
    mask: MaskEncoding | None = None
    padding_mask: MaskEncoding | None = None
    window: str = "(before, after)"
    eval_mode: bool = False  # call with training=False, even if there is a dropout probability
    adds_mask: bool = False  # its mask may be a bias, according to its docstring
    even: bool = False  # only even widths work, as for rotary positions
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
                value = as_integers(self.mask.encode(value, size, q.dtype), options)
            if option == "window":
                value = encode_window(self.window, value)
            given[self.names[option]] = value
        if "bias" in options and self.adds_mask:
            if self.mask is None or (
                "lengths" in options and "lengths" not in self.names and not self.padding
            ):
                raise Inexpressible("a bias and lengths do not fit into one argument")
            given[self.names["mask"]] = self.mask.added(options["bias"], options.get("allowed"), size)
        if "lengths" in options and "lengths" not in self.names:
            kept = torch.arange(size[3], device=q.device) < options["lengths"][:, None, None, None]
            encoding, name = (
                (self.padding_mask, self.padding)
                if self.padding is not None
                else (self.mask, self.names.get("mask"))
            )
            assert encoding is not None and name is not None
            given[name] = as_integers(encoding.encode(kept, size, q.dtype), options)
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
            elif name in TRAINING:
                more[name] = bool(given.get(self.names.get("dropout", ""))) and not self.eval_mode
            elif name == self.names.get("causal") and p.default is not False:
                more[name] = False
            elif name == self.names.get("dropout") and p.default:
                more[name] = 0.0
            elif name == self.names.get("scale") and required:
                more[name] = q.shape[-1] ** -0.5
            elif name == self.names.get("window") and windowed_by_default(p):  # one that reaches every key
                reach = q.shape[2] + k.shape[2]
                more[name] = (reach, reach) if self.window == "(before, after)" else reach
            elif name == self.names.get("lengths") and required:
                more[name] = torch.full((k.shape[0],), k.shape[2], device=k.device)
            elif name == self.names.get("documents") and required:
                more[name] = torch.zeros(k.shape[0], k.shape[2], dtype=torch.long, device=k.device)
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

        return layouts.call_in_layout(self.layout, apply, q, k, v, self.arguments(q, k, v, options))

    def _without_heads(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Any:
        """One call for each head, or heads folded into the batch; options are encoded for that smaller call."""
        if self.layout in layouts.FOLDED:
            sizes = (slice(None), slice(0, 1))

            def apply(q_: Tensor, k_: Tensor, v_: Tensor, chosen: dict[str, Any]) -> Any:
                view = [self._as_heads(x)[sizes] for x in (q_, k_, v_)]
                return self.function(
                    q_, k_, v_, **self.arguments(view[0], view[1], view[2], _with_head_axis(chosen))
                )

            return layouts.call_in_layout(self.layout, apply, q, k, v, options)

        def one(q_: Tensor, k_: Tensor, v_: Tensor, chosen: dict[str, Any]) -> Any:
            view = [(x if self.layout == "n d" else x.mT)[None, None] for x in (q_, k_, v_)]
            return self.function(
                q_, k_, v_, **self.arguments(view[0], view[1], view[2], _with_head_axis(chosen))
            )

        return layouts.call_in_layout(self.layout, one, q, k, v, options)

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


def effect_of(
    reader: FunctionReader, options: dict[str, Any], n: int = 5, heads: int | None = None
) -> Tensor:
    """Which pairs have a weight, (b, h, n, n): with values e_1 … e_n the output is the table of weights.

    heads: so many, of one batch row; None takes a few heads of two rows.
    """
    g = torch.Generator().manual_seed(1)
    m = n + n % 2 if reader.even else n
    if reader.layout in layouts.LOOPED:
        heads = 1
    b, h = (2, 4 if reader.even else 3) if heads is None else (1, heads)
    q, k = torch.randn(b, h, n, m, generator=g), torch.randn(b, h, n, m, generator=g)
    v = torch.eye(n, m).expand_as(k).contiguous()
    with torch.no_grad():
        out = reader.call(q, k, v, **options)
    o = out[0] if isinstance(out, tuple) else out
    if o.shape == q.shape and m != n:
        o, q = o[..., :n], q[..., :n]
    if o.shape != q.shape:
        raise ValueError(f"returned shape {tuple(o.shape)}")
    return o.abs() > 1e-7


def probe_table(reader: FunctionReader, by_pairs: bool) -> Tensor:
    """A mask without symmetry; the batch rows differ where there is a batch."""
    g = torch.Generator().manual_seed(3)
    rows = 1 if reader.layout in layouts.LOOPED else 2
    if not by_pairs:
        return (torch.arange(5) < torch.tensor([3, 4])[:rows, None])[:, None, None]
    table = torch.rand(rows, 1, 5, 5, generator=g) < 0.5
    return table | torch.eye(5, dtype=torch.bool)
