"""The axes of q, k and v that a function expects, and the translation of a call in (b, h, n, d) to them."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ...errors import SpecError, nearest

LAYOUTS = (
    *("b h n d", "b n h d", "b h d n", "b n d", "n b d", "b d n", "n d", "d n"),
    "b n (h d)",
)
LOOPED = ("n d", "d n")  # without a batch axis: one call for each head
FOLDED = ("b n d", "n b d", "b d n")  # heads are folded into the batch

Apply = Callable[..., Any]  # (q, k, v, options) → the output


def call_in_layout(layout: str, call: Apply, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Any:
    """call(q, k, v, options) with inputs and output in (b, h, n, d), translated to and from the function's layout."""
    b, h = q.shape[:2]
    if layout == "b h n d":
        return call(q, k, v, options)
    if layout in LOOPED:
        if k.shape[1] != h:
            raise ValueError("grouped heads need a head axis")
        rows = []
        for i in range(b):
            for g in range(h):
                mats = _each(lambda x, i=i, g=g: x[i, g] if layout == "n d" else x[i, g].mT, q, k, v)
                o = _first(call(*mats, _row_options(options, i, g, b, h)))
                rows.append(o if layout == "n d" else o.mT)
        return torch.stack(rows).unflatten(0, (b, h))
    if layout in FOLDED:
        if k.shape[1] != h:
            raise ValueError("grouped heads need a head axis")
        pattern = {"b n d": "(b h) n d", "n b d": "n (b h) d", "b d n": "(b h) d n"}[layout]
        folded = _each(lambda x: rearrange(x, f"b h n d -> {pattern}"), q, k, v)
        return _back(call(*folded, _folded_options(options, b, h)), pattern, b, h)
    inputs = _each(lambda x: rearrange(x, f"b h n d -> {layout}"), q, k, v)
    return _back(call(*inputs, options), layout, b, h)


def _each(convert: Callable[[Tensor], Tensor], *inputs: Tensor) -> list[Tensor]:
    """The inputs converted; one tensor in several places stays one tensor, as a function may test for that."""
    done = {id(x): convert(x) for x in inputs}
    return [done[id(x)] for x in inputs]


def _first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def _back(out: Any, pattern: str, b: int, h: int) -> Any:
    sizes = {"b": b} | ({"h": h} if "h" in pattern else {})
    if isinstance(out, tuple):
        return (rearrange(out[0], f"{pattern} -> b h n d", **sizes), *out[1:])
    return rearrange(out, f"{pattern} -> b h n d", **sizes) if isinstance(out, Tensor) else out


def _folded_options(options: dict[str, Any], b: int, h: int) -> dict[str, Any]:
    """Options per batch row, repeated for each head."""

    def fold(key: str, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if key in ("lengths", "documents"):
            return x.repeat_interleave(h, 0)
        return x.expand(b, h, *x.shape[-2:]).flatten(0, 1) if x.dim() == 4 else x

    return {key: fold(key, x) for key, x in options.items()}


def _row_options(options: dict[str, Any], i: int, g: int, b: int, h: int) -> dict[str, Any]:
    """The options of batch row i and head g."""

    def row(key: str, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if key in ("lengths", "documents"):
            return x[i]
        return x.expand(b, h, *x.shape[-2:])[i, g] if x.dim() == 4 else x

    return {key: row(key, x) for key, x in options.items()}


def declared_layout(text: str) -> str | None:
    """The layout that a docstring or comment states, such as (batch, heads, seq, dim) or "b h n d"."""
    for axes in re.findall(r"[(\[]\s*([A-Za-z_]\w*(?:\s*,\s*[A-Za-z_*]\w*){2,3})\s*[)\]]", text):
        letters = [_axis(word) for word in re.split(r"\s*,\s*", axes)]
        if None not in letters and " ".join(map(str, letters)) in LAYOUTS:
            return " ".join(map(str, letters))
    return None


def _axis(word: str) -> str | None:
    word = word.lower()
    for axis, names in (
        ("b", ("b", "bs", "bsz", "batch", "batch_size")),
        ("h", ("h", "heads", "nh", "n_heads", "num_heads", "n_head", "head", "hq", "h_q", "nheads")),
        (
            "n",
            ("n", "t", "l", "s", "seq", "seqlen", "seq_len", "length", "tokens", "time", "len", "positions"),
        ),
        (
            "d",
            ("d", "dh", "d_k", "dk", "hd", "head_dim", "dim", "d_head", "headdim", "e", "width", "features"),
        ),
    ):
        if word in names:
            return axis
    return None


def find_layout(
    attend: Callable[[str, Tensor, Tensor, Tensor], Tensor], wanted: tuple[str, ...], even: bool = False
) -> tuple[str | None, str]:
    """The first layout in which each output depends only on its own query, head and batch row; and the first error.

    even: with four heads and an even width, for functions that need them. The second choice is a layout in which the
    call runs and returns the right shape. None: no call ran.
    """
    error = ""
    for group in itertools.groupby(wanted, key=lambda layout: len(layout.split())):
        found, first = _find(attend, tuple(group[1]), even)
        error = error or first
        if found is not None:
            return found, error
    return None, error


def _find(
    attend: Callable[[str, Tensor, Tensor, Tensor], Tensor], wanted: tuple[str, ...], even: bool
) -> tuple[str | None, str]:
    """The layout among those with the same number of axes."""
    second, error = None, ""
    for layout in wanted:
        try:
            ran, right = _axes_are_right(lambda *x, layout=layout: attend(layout, *x), even)
        except Exception as e:  # foreign code; the first error is shown if no layout works
            error = error or f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else ''}"
            continue
        if right:
            return layout, error
        if ran and second is None:
            second = layout
    return second, error


def _axes_are_right(attend: Callable[..., Tensor], even: bool) -> tuple[bool, bool]:
    g = torch.Generator().manual_seed(0)
    h, d = (4, 8) if even else (3, 7)
    q, k, v = (torch.randn(2, h, 5, d, generator=g) for _ in range(3))
    with torch.no_grad():
        o = attend(q, k, v)
        if not isinstance(o, Tensor) or o.shape != q.shape:
            return False, False
        value_change = attend(q, k, v + _only(v, 1, 2, 3)) - o
        query_change = attend(q + _only(q, 1, 2, 3), k, v) - o
    if not bool(torch.isfinite(o).all()):
        return True, False
    own = torch.zeros(2, h, 5, dtype=torch.bool)
    own[1, 2] = True
    row = torch.zeros(2, h, 5, dtype=torch.bool)
    row[1, 2, 3] = True
    by_value, by_query = value_change.abs().amax(-1) > 1e-6, query_change.abs().amax(-1) > 1e-6
    inside = bool((by_value <= own).all()) and bool((by_query <= row).all())
    every_column = bool((value_change[1, 2].abs() > 0).any(0).all())
    return True, inside and bool(by_value[1, 2].sum() > 1) and every_column


def _only(x: Tensor, *index: int) -> Tensor:
    out = torch.zeros_like(x)
    out[index] = 1.0 + torch.arange(x.shape[-1]) / 7
    return out


def checked(layout: str) -> str:
    """A layout that the user gave."""
    words = " ".join(layout.replace(",", " ").split())
    if words not in LAYOUTS:
        raise SpecError(f"layout {layout!r}; {nearest(words, LAYOUTS)}")
    return words
