"""The report: one self-contained HTML file. It opens from disk or in a notebook, without a network.

Maps are stored as bytes, 0 … 255 relative to each map's maximum, in base64. All text is stored as JSON and inserted
into the page as text, never as markup.
"""

import base64
import html
import json
import re
import struct
import zlib
from collections.abc import Mapping
from math import isqrt
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from .calls import AttentionCall
from .head_kinds import KINDS
from .view import View

BUDGET = 1_200_000  # bytes of all maps together
PARTS = Path(__file__).parent / "page"
COLUMNS = (
    ("entropy", "entropy"),
    ("distance", "distance"),
    ("span", "span"),
    ("on_self", "self"),
    ("on_previous", "previous"),
    ("on_first", "first"),
    ("induction", "induction"),
    ("shift", "shift"),
    ("shift_weight", "shift weight"),
    ("effect", "effect"),
)


def page(view: View, *, title: str | None = None) -> str:
    """The HTML document."""
    title = html.escape(title or f"Attention heads of {view.title}")
    data = json.dumps(contents(view)).replace("<", "\\u003c")  # so that no text can end its script element
    parts = {"heads": part("heads.html"), "css": part("heads.css"), "js": part("heads.js")}
    return fill(part("page.html"), {"title": title, "data": data, **parts})


def part(name: str) -> str:
    """A file of the page; the studio of `regard serve` uses the same files."""
    return (PARTS / name).read_text(encoding="utf-8")


def fill(template: str, values: Mapping[str, str]) -> str:
    """The template with each {{name}} replaced, in one pass: a value that contains {{name}} stays as it is."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match.group(1)], template)


def inline(view: View, height: int = 720) -> str:
    """The page in a sandboxed frame, for notebooks: its script has no access to the notebook's."""
    document = html.escape(page(view), quote=True)
    style = f"width:100%;height:{height}px;border:0"
    return f'<iframe srcdoc="{document}" sandbox="allow-scripts" style="{style}"></iframe>'


def contents(view: View, batch: int = 0, budget: int = BUDGET) -> dict[str, Any]:
    """The data of the page: layers with their tokens and maps, one row of statistics per head, the image."""
    heads = sum(c.heads for c in view.calls)
    side = max(isqrt(budget // max(heads, 1)), 8)
    layers = []
    for call in view.calls:
        stored = call.source is not None
        maps = [_packed(view.map(call.layer, h, batch), side) for h in range(call.heads)] if stored else []
        layers.append(
            {
                "name": call.name,
                "role": call.role,
                "group": _group(call),
                "implementation": call.implementation,
                "queries": list(view.queries(call.layer, batch)) if stored else [],
                "keys": list(view.keys(call.layer, batch)) if stored else [],
                "maps": maps,
                "shape": [min(call.n, side), min(call.m, side)],
            }
        )
    rows = view.rows()
    for row in rows:
        row["effect"] = view.effects.get((row["layer"], row["head"]))
    known = [c for c in COLUMNS if any(row.get(c[0]) is not None for row in rows)]
    keep = ("layer", "head", "kind", "confidence", "evidence", *(name for name, _ in known))
    return {
        "layers": layers,
        "start": _most_distinctive(rows),
        "rows": [{name: _rounded(row.get(name)) for name in keep} for row in rows],
        "columns": known,
        "kinds": [k for k in KINDS if any(row["kind"] == k for row in rows)],
        "missed": list(view.missed),
        "grid": view.grid,
        "skip": view.skip,
        "image": None if view.image is None else _png(view.image),
        "pooled": any(max(c.n, c.m) > side for c in view.calls),
    }


def _group(call: AttentionCall) -> str:
    """The stack that a call belongs to: encoder, decoder, cross, or self where the model has one stack."""
    name = call.name.lower()
    if call.role == "cross":
        return "cross"
    return "decoder" if "decoder" in name else "encoder" if "encoder" in name else "self"


COMMON = ("mixed", "uniform", "first", "sink", "self")  # kinds that nearly every model has many heads of


def _most_distinctive(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """The head that a page opens with: of an uncommon kind, with the highest confidence, then the lowest entropy."""
    best = max(
        rows, key=lambda r: (r["kind"] not in COMMON, r["confidence"], -(r.get("entropy_share") or 1.0))
    )
    return best["layer"], best["head"]


def _packed(weights: Float[Tensor, "n m"], side: int) -> dict[str, Any]:
    """A map as bytes; a map that is too large as means over small blocks."""
    n, m = weights.shape
    if max(n, m) > side:
        weights = F.adaptive_avg_pool2d(weights[None].float(), (min(n, side), min(m, side)))[0]
    top = float(weights.max()) if weights.numel() else 0.0
    raw = (weights.float() / (top or 1.0) * 255).round().byte().cpu().contiguous()
    return {"top": top, "bytes": base64.b64encode(raw.numpy().tobytes()).decode()}


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _png(image: Float[Tensor, "c height width"]) -> str:
    """A PNG of an image in 0 … 1, as a data URL."""
    rgb = image.detach().float().cpu().clamp(0, 1)
    rgb = (rgb.expand(3, -1, -1) if rgb.shape[0] == 1 else rgb[:3]).mul(255).round().byte()
    _, height, width = rgb.shape
    rows = rgb.permute(1, 2, 0).contiguous().numpy()
    lines = b"".join(b"\0" + rows[y].tobytes() for y in range(height))

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    png = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(lines, 9))
        + chunk(b"IEND", b"")
    )
    return "data:image/png;base64," + base64.b64encode(png).decode()
