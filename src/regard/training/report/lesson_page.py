"""The page of a lesson: one HTML file with everything inside it, readable on a projector and on a phone."""

import base64
import html
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import RegardError
from ..lessons.lesson import Lesson, Picture, format_value
from .page import attention_maps, fill_page, numbers, table, try_next, verdict


def lesson_page(lesson: Lesson, stored: Mapping[str, Any], folder: Path) -> str:
    """The document. stored: the content of lesson.json, with `seconds`."""
    title = f"{lesson.number}: {lesson.claim}"
    body = [
        _headline(lesson, stored),
        numbers(lesson.checks),
        _pictures(lesson.pictures),
        attention_maps(bool(lesson.maps), "Attention maps of this run"),
        _method(lesson, stored),
        _further(lesson.measured),
        try_next([(s["text"], s["command"]) for s in stored["suggestions"]]),
        _files(stored, folder),
    ]
    return fill_page(title, "\n".join(part for part in body if part), {"maps": list(lesson.maps)}, "lesson")


def _headline(lesson: Lesson, stored: Mapping[str, Any]) -> str:
    models = len(stored["models"])
    lead = f"{models} model{'s' * (models > 1)} trained and measured in {stored['seconds']:.0f} s"
    return (
        f'<header><p class="kicker">Lesson {lesson.number}{verdict(lesson.checks)}</p>'
        f'<h1 class="claim">{_text(lesson.claim)}</h1><p class="lead">{_text(lead)}</p></header>'
    )


def _pictures(pictures: tuple[Picture, ...]) -> str:
    if not pictures:
        return ""
    try:
        shown = "".join(_picture(p) for p in pictures)
    except RegardError as e:  # matplotlib is an extra
        return f'<h2>Pictures</h2><p class="note">{_text(str(e))}</p>'
    return f'<h2>Pictures</h2><div class="pictures">{shown}</div>'


def _picture(picture: Picture) -> str:
    """Drawn twice, for a light and for a dark page. On a narrow screen it scrolls and stays readable."""
    light, dark = (_svg(picture.draw(dark)) for dark in (False, True))
    width = light[1]
    wide = " wide" if width > 800 else ""
    least = (0.75 if width > 650 else 0.6) * width  # on a phone the smaller ones fit the screen
    alt = html.escape(f"{picture.title}. {picture.caption}", quote=True)
    return (
        f'<figure class="picture{wide}"><figcaption>{_text(picture.title)}</figcaption><div class="scroll">'
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark[0]}">'
        f'<img src="{light[0]}" alt="{alt}" style="min-width:{least:.0f}px;max-width:{1.6 * width:.0f}px">'
        f'</picture></div><p class="note">{_text(picture.caption)}</p></figure>'
    )


def _svg(figure: Any) -> tuple[str, float]:
    """The figure as the URL of an SVG, and its width in pixels of the page."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    encoded = base64.b64encode(file.getvalue()).decode()
    return f"data:image/svg+xml;base64,{encoded}", 96 * figure.get_figwidth()


def _method(lesson: Lesson, stored: Mapping[str, Any]) -> str:
    rows = [
        (
            t["name"],
            f"{t['parameters']:,}",
            f"{t['updates']:,}",
            f"{t['first_loss']:.3f} → {t['last_loss']:.3f}",
            f"{t['seconds']:.1f} s",
            str(t["threads"]),
        )
        for t in stored["trainings"]
    ]
    head = ("model", "parameters", "updates", "loss, first → last", "time", "threads")
    settings = ", ".join(f"{name} = {format_value(value)}" for name, value in stored["settings"].items())
    return (
        f"<h2>What was done</h2><p>{_text(lesson.method)}</p>{table(head, rows, numbers=(1, 2, 3, 4, 5))}"
        f'<p class="note">Settings: {_text(settings)}.</p>'
    )


def _further(measured: Mapping[str, Any]) -> str:
    """The numbers without an expectation; nested ones as tables."""
    flat = [(name, format_value(v)) for name, v in measured.items() if not isinstance(v, Mapping)]
    parts = [table(("", ""), flat)] if flat else []
    parts += [f"<h3>{_text(name)}</h3>{_nested(v)}" for name, v in measured.items() if isinstance(v, Mapping)]
    return f"<h2>Further numbers</h2>{''.join(parts)}" if parts else ""


def _nested(values: Mapping[Any, Any]) -> str:
    inner = [v for v in values.values() if isinstance(v, Mapping)]
    if len(inner) < len(values):
        return table(("", ""), [(str(k), format_value(v)) for k, v in values.items()])
    columns = list(dict.fromkeys(key for row in inner for key in row))
    rows = [
        (str(name), *(format_value(row[c]) if c in row else "–" for c in columns))
        for name, row in zip(values, inner, strict=True)
    ]
    return table(("", *map(str, columns)), rows)


def _files(stored: Mapping[str, Any], folder: Path) -> str:
    names = list(stored["models"])
    code = f'result = rg.train("{stored["lesson"]}")\nmodel = result.load("{names[0]}")' if names else ""
    rows = [(name, f"{folder}/{at}") for name, at in stored["models"].items()]
    machine = ", ".join(f"{k} {v}" for k, v in stored["machine"].items() if k != "memory")
    return (
        "<h2>Files</h2><p>Weights (safetensors) and declarations; the losses are in "
        f"{_text(str(folder))}/curves.json, all numbers in "
        f"{_text(str(folder))}/lesson.json.</p>{table(('model', 'folder'), rows)}"
        f'<pre class="command">{_text(code)}</pre>'
        f"<footer>Run on {_text(stored['date'])}: {_text(machine)}.</footer>"
    )


def _text(text: str) -> str:
    return html.escape(text)
