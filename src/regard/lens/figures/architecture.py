"""A diagram of a model, one box per part, drawn from its declaration."""

from dataclasses import dataclass
from typing import Any

from ... import spec
from ...errors import SpecError
from ...pattern import full
from . import style

WIDTH, HEIGHT, GAP = 3.0, 0.44, 0.24  # of a box, and between two
COLUMN = 5.2  # from one column's middle to the next


@dataclass(frozen=True)
class Box:
    """One part: its label, its kind, and whether a residual connection runs around it."""

    label: str
    kind: str  # table, attention, norm, layer, sum, word
    around: bool = False  # the residual branch begins below this box …
    joins: bool = False  # … and is added at this one


FILLS = {
    "table": "#CC79A7",
    "attention": "#E69F00",
    "norm": "#F0E442",
    "layer": "#56B4E9",
    "sum": "#009E73",
    "word": "none",
}


@dataclass(frozen=True)
class Column:
    """Boxes from the bottom up; those from `first` to `last` are one block, repeated `times` times."""

    name: str
    boxes: tuple[Box, ...]
    first: int
    last: int
    times: int
    cross: int | None = None  # the box that also attends to the column on the left


def architecture(declared: spec.Spec, *, source: str = "", target: str = "", dark: bool = False) -> Any:
    """The diagram of an encoder, a decoder, an encoder-decoder or a vision Transformer."""
    columns = columns_of(declared, source, target)
    tallest = max(len(c.boxes) for c in columns)
    figure = style.canvas(1.2 + 3.9 * len(columns), 1.0 + 0.52 * tallest, dark)
    ax = figure.add_subplot(111)
    ax.set_axis_off()
    theme = style.theme(dark)
    for number, column in enumerate(columns):
        _draw(ax, column, COLUMN * number, theme)
    if len(columns) == 2 and columns[1].cross is not None:
        top, cross = _middle(len(columns[0].boxes) - 1), _middle(columns[1].cross)
        left, right = WIDTH / 2, COLUMN - WIDTH / 2
        between = COLUMN / 2 - 0.55
        ax.plot([left, between, between], [top, top, cross], color=theme.ink, linewidth=1.2)
        ax.annotate("", (right, cross), (between, cross), arrowprops=_arrow(theme))
    ax.set_xlim(-WIDTH / 2 - 1.3, COLUMN * (len(columns) - 1) + WIDTH / 2 + 1.3)
    ax.set_ylim(-0.3, _middle(tallest) + 0.5)
    return figure


def columns_of(declared: spec.Spec, source: str = "", target: str = "") -> list[Column]:
    """The columns of a model, from the bottom up."""
    match declared:
        case spec.EncoderDecoder():
            return [
                _stack("encoder", declared.encoder, source or "source tokens", ""),
                _stack("decoder", declared.decoder, target or "target so far", "next token"),
            ]
        case spec.Vision():
            (height, width), (p, q) = declared.image, declared.patch
            start = [Box(f"image {height} × {width}", "word"), Box(f"patches {p} × {q}, linear", "table")]
            if declared.class_token:
                start.append(Box("class token in front", "table"))
            if declared.registers:
                start.append(Box(f"registers in front: {declared.registers}", "table"))
            start.append(Box(f"+ {_position(declared.position) or 'learned positions'}", "sum"))
            head = [] if declared.head is None else _head(declared.head)
            return [_column("vision Transformer", start, declared.encoder, [*head, Box("class", "word")])]
        case spec.Encoder() | spec.Decoder():
            name = "decoder" if _is_decoder(declared) else "encoder"
            ends = "next token" if isinstance(declared.head, spec.LanguageHead) else "out"
            return [_stack(name, declared, source or "tokens", ends)]
    raise SpecError(
        f"{type(declared).__name__} has no diagram; use an Encoder, a Decoder, an EncoderDecoder or a Vision"
    )


def _stack(name: str, declared: spec.Encoder | spec.Decoder, given: str, ends: str) -> Column:
    start = [Box(given, "word")]
    if declared.embedding is not None:
        start.append(Box(f"embedding, {declared.embedding.vocab:,} × {declared.d_model}", "table"))
        if position := _position(declared.embedding.position):
            start.append(Box(f"+ {position}", "sum"))
        if declared.embedding.norm:
            start.append(Box("layer norm", "norm"))
    end = [] if declared.head is None else _head(declared.head)
    return _column(name, start, declared, [*end, *([Box(ends, "word")] if ends else [])])


def _column(name: str, start: list[Box], declared: spec.Encoder | spec.Decoder, end: list[Box]) -> Column:
    block = declared.block
    parts = [(_attention(block.attention, declared.position), "attention")]
    if block.cross is not None:
        parts.append((f"cross-attention, {block.cross.heads} heads", "attention"))
    if block.feed_forward is not None:
        parts.append((f"feed-forward, {block.feed_forward.d_ff}, {block.feed_forward.activation}", "layer"))
    boxes: list[Box] = []
    cross = None
    for label, kind in parts:
        if label.startswith("cross"):
            cross = len(start) + len(boxes) + (block.norm_at == "pre" and block.norm != "none")
        boxes += _branch(block, label, kind)
    after = [Box(f"{block.norm} norm", "norm")] if declared.has_final_norm and block.norm != "none" else []
    all_boxes = (*start, *boxes, *after, *end)
    return Column(name, all_boxes, len(start), len(start) + len(boxes) - 1, declared.layers, cross)


def _branch(block: spec.Block, label: str, kind: str) -> list[Box]:
    """post: F, sum, norm. pre: norm, F, sum."""
    normed = [] if block.norm == "none" else [Box(f"{block.norm} norm", "norm")]
    added = [Box("add", "sum", joins=True)] if block.residual else []
    inside = [*normed, Box(label, kind)] if block.norm_at == "pre" else [Box(label, kind)]
    if block.residual:
        inside[0] = Box(inside[0].label, inside[0].kind, around=True)
    return [*inside, *added] if block.norm_at == "pre" else [*inside, *added, *normed]


def _attention(a: spec.Attention, shared: Any) -> str:
    masked = "" if isinstance(a.pattern, full) else "masked "
    where = _position(a.position) or _position(shared)
    return f"{masked}self-attention, {a.heads} heads" + (f", {where}" if where else "")


def _head(head: Any) -> list[Box]:
    match head:
        case spec.LanguageHead():
            return [Box("linear (tied)" if head.tied else "linear", "layer"), Box("softmax", "layer")]
        case spec.ClassifierHead():
            hidden = [] if head.hidden is None else [Box(f"linear to {head.hidden}, tanh", "layer")]
            return [Box(f"pool: {head.pool}", "layer"), *hidden, Box(f"linear to {head.classes}", "layer")]
        case spec.MaskedHead():
            return [Box(f"linear, {head.activation}, norm", "layer"), Box("linear (tied)", "layer")]
    return [Box("linear of the first token, tanh", "layer")]


def _position(position: Any) -> str:
    return "" if position is None else f"{type(position).__name__} positions".replace("_", " ")


def _is_decoder(declared: spec.Encoder | spec.Decoder) -> bool:
    return isinstance(declared, spec.Decoder) or isinstance(declared.head, spec.LanguageHead)


def _middle(number: int) -> float:
    return number * (HEIGHT + GAP) + HEIGHT / 2


def _arrow(theme: style.Theme) -> dict[str, Any]:
    return {"arrowstyle": "-|>", "color": theme.ink, "linewidth": 1.0, "shrinkA": 0, "shrinkB": 0}


def _draw(ax: Any, column: Column, x: float, theme: style.Theme) -> None:
    from matplotlib.patches import FancyBboxPatch

    for number, box in enumerate(column.boxes):
        y = _middle(number)
        fill = FILLS[box.kind]
        ink = theme.ink if fill == "none" else "#1c1c1c"
        ax.add_patch(
            FancyBboxPatch(
                (x - WIDTH / 2, y - HEIGHT / 2),
                WIDTH,
                HEIGHT,
                boxstyle="round,pad=0,rounding_size=0.08",
                facecolor=fill,
                edgecolor="none" if fill == "none" else theme.ink,
                linewidth=0.8,
            )
        )
        size = 8 if len(box.label) < 34 else 6.5
        ax.text(x, y, box.label, ha="center", va="center", fontsize=size, color=ink)
        if number:
            ax.annotate("", (x, y - HEIGHT / 2), (x, y - HEIGHT / 2 - GAP), arrowprops=_arrow(theme))
    _residuals(ax, column, x, theme)
    low = _middle(column.first) - HEIGHT / 2 - 0.17
    high = _middle(column.last) + HEIGHT / 2 + 0.09
    ax.add_patch(
        FancyBboxPatch(
            (x - WIDTH / 2 - 0.75, low),
            WIDTH + 1.0,
            high - low,
            boxstyle="round,pad=0,rounding_size=0.15",
            facecolor="none",
            edgecolor=theme.faint,
            linewidth=1.2,
        )
    )
    ax.text(x + WIDTH / 2 + 0.35, high - 0.05, f"× {column.times}", fontsize=10, color=theme.ink, va="top")
    top = _middle(len(column.boxes) - 1) + HEIGHT / 2 + 0.16
    ax.text(x, top, column.name, ha="center", va="bottom", fontsize=10, weight="bold", color=theme.ink)


def _residuals(ax: Any, column: Column, x: float, theme: style.Theme) -> None:
    """The residual connections: from below a branch's first box, around its left side, into the sum."""
    begins = None
    for number, box in enumerate(column.boxes):
        if box.around:
            begins = _middle(number) - HEIGHT / 2 - 0.6 * GAP
        if box.joins and begins is not None:
            side, end = x - WIDTH / 2 - 0.4, _middle(number)
            ax.plot([x, side, side], [begins, begins, end], color=theme.ink, linewidth=1.0)
            ax.annotate("", (x - WIDTH / 2, end), (side, end), arrowprops=_arrow(theme))
