"""The report of a run: one HTML file with everything inside it, that opens from a disk without a network.

Numbers, curves and texts stand in it as markup; the maps travel as bytes beside it and are drawn by its script.
"""

import html
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ...errors import FormatError
from ...nn.serialization import load
from ..data.tokens import Tokens
from ..loop import log
from ..recipes import Recipe, evaluation
from ..recipes import preflight as before
from ..recipes.evaluation import Evaluation
from ..recipes.preflight import Before, LawTold, duration, written
from ..recipes.run import MODEL, RECIPE, TOKENS
from . import head_statistics as watching
from .charts import Line, chart
from .maps import cross_maps

FILE = "report.html"
NUMBERS = ("entropy_share", "distance", "on_self", "on_previous", "on_first")
PARTS = Path(__file__).parent


def report(folder: str | Path) -> Path:
    """Write report.html from what lies in the folder of a run."""
    folder = Path(folder)
    for name in (RECIPE, MODEL):
        if not (folder / name).exists():
            raise FormatError(f"{folder} holds no {name}; a report is of a run that `regard train` has ended")
    parts = {name: (PARTS / f"page.{name}").read_text(encoding="utf-8") for name in ("html", "css", "js")}
    title, body, data = contents(folder)
    plain = json.dumps(data).replace("<", "\\u003c")  # no text can end the script it stands in
    filled = {"{{title}}": html.escape(title), "{{css}}": parts["css"], "{{js}}": parts["js"]}
    whole = parts["html"]
    for name, text in (filled | {"{{data}}": plain, "{{body}}": body}).items():
        whole = whole.replace(name, text, 1)
    path = folder / FILE
    path.write_text(whole, encoding="utf-8")
    return path


def contents(folder: Path) -> tuple[str, str, dict[str, Any]]:
    """The title, the markup, and what the script reads."""
    recipe = Recipe.from_json((folder / RECIPE).read_text(encoding="utf-8"))
    model = load(folder / MODEL).eval()
    there = (folder / TOKENS).is_file()
    tokens = Tokens.from_json((folder / TOKENS).read_text(encoding="utf-8")) if there else None
    told, first, events = evaluation.stored(folder), before.stored(folder), log.read(folder)
    maps = [] if tokens is None or told is None else cross_maps(model, tokens, told.examples)
    title = f"{recipe.name}: a run of {_ended(events)}"
    body = [
        headline(recipe, model, told, events, title),
        curves(events),
        examples(told),
        _maps(bool(maps)),
        heads(watching.read(folder)),
        costs(first, model, events),
        laws(before.tried(model, before.AFTERWARDS)),
        machine(first),
        f"<footer>Written by regard on {time.strftime('%Y-%m-%d %H:%M')} from {_text(str(folder))}.</footer>",
    ]
    return title, "\n".join(part for part in body if part), {"maps": maps}


def headline(
    recipe: Recipe, model: nn.Module, told: Evaluation | None, events: list[dict[str, Any]], title: str
) -> str:
    """What it is, and the numbers one asks for first."""
    train = [e for e in events if e["event"] == "train"]
    parameters = sum(p.numel() for p in model.parameters())
    tiles = [] if told is None else [(name, evaluation.written(name, n)) for name, n in told.numbers.items()]
    tiles += [("parameters", f"{parameters / 1e6:.2f} M" if parameters > 1e5 else f"{parameters:,}")]
    if train:
        tiles += [
            ("updates", f"{train[-1]['step']:,}"),
            ("training time", duration(train[-1]["seconds"])),
            ("tokens/s", f"{_mean(train, 'tokens_per_second'):,.0f}"),
        ]
        if mfu := _mean(train, "mfu"):
            tiles.append(("of peak FLOP/s", f"{mfu:.1%}"))
    shown = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(n)}</dd></div>" for name, n in tiles)
    signed = (
        ""
        if told is None
        else "".join(
            f'<p class="signature">{_text(name)}: {_text(how)}</p>' for name, how in told.signatures.items()
        )
    )
    s = recipe.settings
    ends = f"{s.minutes:g} minutes" if s.minutes else f"{s.steps:,} updates"
    asked = (
        f"{shape(recipe.model)}; {ends} of {s.tokens * s.accumulate:,} tokens, {s.schedule!r}, seed {s.seed}"
    )
    rows = "" if told is None else f"; scores on {told.rows:,} test rows"
    return f'<h1>{_text(title)}</h1><p class="lead">{_text(asked + rows)}</p><dl class="tiles">{shown}</dl>{signed}'


def shape(declared: Any) -> str:
    """A model in a few words.

    >>> from regard.training.recipes import recipe
    >>> shape(recipe("translate").model)
    '3 + 3 layers of 256, 8 heads, 8,000 tokens'
    """
    stacks = [getattr(declared, name) for name in ("encoder", "decoder") if hasattr(declared, name)] or [
        declared
    ]
    if not all(hasattr(stack, "block") for stack in stacks):
        return type(declared).__name__
    block = stacks[-1].block
    layers = " + ".join(str(stack.layers) for stack in stacks)
    words = getattr(stacks[-1], "embedding", None)
    vocab = "" if words is None else f", {words.vocab:,} tokens"
    return f"{layers} layers of {block.d_model}, {block.attention.sizes.heads} heads{vocab}"


def curves(events: list[dict[str, Any]]) -> str:
    """What the log holds, by update."""
    train, valid = ([e for e in events if e["event"] == kind] for kind in ("train", "valid"))

    def line(name: str, of: list[dict[str, Any]], field: str, dots: bool = False) -> Line:
        known = [e for e in of if isinstance(e.get(field), int | float)]  # a NaN is a word in the log
        return Line(name, [(e["step"], e[field]) for e in known], dots)

    drawn = [
        chart("loss", [line("training", train, "loss"), line("validation", valid, "loss", dots=True)]),
        chart("tokens a second", [line("tokens/s", train, "tokens_per_second")]),
        chart("norm of the gradient", [line("norm", train, "norm")], log=True),
        chart("learning rate", [line("rate", train, "rate")]),
    ]
    return f'<h2>Curves</h2><div class="charts">{"".join(drawn)}</div>' if any(drawn) else ""


def examples(told: Evaluation | None) -> str:
    """Sentences beside their references, or what a language model writes."""
    if told is None:
        return ""
    if told.written:
        return f"<h2>What it writes</h2><pre>{_text(told.written)}</pre>"
    rows = [(e.source, e.ours, e.reference or "–") for e in told.examples]
    if not rows:
        return ""
    note = "Rows of the test, evenly spaced, not chosen."
    title = "Translations" if "BLEU" in told.numbers else "Examples"
    return (
        f"<h2>{title}</h2>{_table(('source', 'ours', 'reference'), rows, kind='texts')}"
        f'<p class="note">{note}</p>'
    )


def _maps(there: bool) -> str:
    if not there:
        return ""
    return (
        "<h2>Where it looks while it writes</h2>"
        '<div class="controls"><label>sentence <select id="sentence"></select></label>'
        '<label>layer <select id="layer"></select></label></div>'
        '<div id="heads" aria-label="heads"></div><div id="map"></div><p id="reading">&nbsp;</p>'
        '<p class="note">Cross-attention: a row is a token as it is written, a column one of the source. Bright is '
        "a large weight; the scale is of square roots, so that small ones stay visible.</p>"
    )


def heads(seen: list[dict[str, Any]]) -> str:
    """How the heads of each kind of attention sharpened, and what they are now."""
    if not seen:
        return ""
    kinds = list(dict.fromkeys(_stack(row) for row in seen[-1]["heads"]))
    drawn = []
    for number, title in (("entropy_share", "entropy, 1 is even"), ("distance", "distance, in tokens")):
        lines = []
        for kind in kinds:
            of = [(one["step"], [r.get(number) for r in one["heads"] if _stack(r) == kind]) for one in seen]
            points = [(step, _middle(values)) for step, values in of]
            lines.append(Line(kind, [(step, y) for step, y in points if y is not None], dots=True))
        drawn.append(chart(title, lines))
    last = [
        (
            r["name"],
            str(r["head"] + 1),
            r["kind"],
            f"{r['confidence']:.0%}",
            *(_short(r.get(n)) for n in NUMBERS),
        )
        for r in seen[-1]["heads"]
    ]
    table = _table(
        ("layer", "head", "kind", "sure", *NUMBERS), last, numbers=(1, 3, *range(4, 4 + len(NUMBERS)))
    )
    return (
        f'<h2>Heads</h2><div class="charts">{"".join(drawn)}</div><details><summary>Each head after update '
        f"{seen[-1]['step']:,}</summary>{table}</details>"
        '<p class="note">Means over the heads of each kind of attention, on held-out rows of one length.</p>'
    )


def _stack(row: dict[str, Any]) -> str:
    """Which attention a head belongs to: the encoder's, the decoder's own, or across."""
    first = row["name"].partition(".")[0]
    named = first if first in ("encoder", "decoder") else "self"
    return "cross" if row["role"] == "cross" else f"{named} self" if named != "self" else named


def _middle(values: list[Any]) -> float | None:
    known = [v for v in values if isinstance(v, int | float)]
    return sum(known) / len(known) if known else None


def _short(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, int | float) else "–"


def costs(first: Before | None, model: nn.Module, events: list[dict[str, Any]]) -> str:
    """What it was thought to cost, and what it did."""
    train = [e for e in events if e["event"] == "train"]
    if first is None or not train:
        return ""
    b = first.batch
    memory, used = first.memory, max((e.get("memory") or 0 for e in train), default=0)
    an_update = first.operations * b.predicted * b.rows
    rows = [
        ("parameters", f"{first.parameters:,}", f"{sum(p.numel() for p in model.parameters()):,}"),
        ("operations a predicted token, both passes", _flops(first.operations), ""),
        ("operations of a mean batch", _flops(an_update), ""),
        ("memory at the peak", "–" if memory is None else written(memory), written(used) if used else "–"),
        ("tokens/s", f"{first.tokens_per_second:,.0f}", f"{_mean(train, 'tokens_per_second'):,.0f}"),
        ("updates", f"{first.updates:,}", f"{train[-1]['step']:,}"),
        ("time", duration(first.seconds), duration(train[-1]["seconds"])),
        ("share of the machine's peak", "–", f"{_mean(train, 'mfu'):.1%}"),
        ("padding", f"{b.waste:.1%}", f"{_mean(train, 'waste'):.1%}"),
    ]
    note = (
        f"Estimated {first.how}. Measured memory is the whole process's on a CPU, Python and data with it. A "
        "multiply-add is 2 operations; padding and recomputation are not counted into the share of the peak, which "
        "is that of a large matrix product on this machine."
    )
    shown = _table(("", "estimated", "measured"), rows, numbers=(1, 2))
    return f'<h2>Cost</h2>{shown}<p class="note">{_text(note)}</p>'


def laws(found: tuple[LawTold, ...]) -> str:
    """The verdicts on the trained model."""
    if not found:
        return ""
    rows = "".join(
        f"<tr><td>{_text(o.number)}</td><td>{_text(o.name)}<br><span class='formula'>{_text(o.formula)}</span></td>"
        f"<td class='{'holds' if o.status == 'holds' else 'broken' if o.status in ('broken', 'raised') else ''}'>"
        f"{_text(o.status)}</td><td>{_text(o.said)}</td><td class='number'>{o.cases}</td></tr>"
        for o in found
    )
    head = "<tr><th></th><th>law</th><th>verdict</th><th></th><th class='number'>cases</th></tr>"
    return (
        f'<h2>Laws</h2><div class="scroll"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>'
        '<p class="note">Tried on the trained model, in float64.</p>'
    )


def machine(first: Before | None) -> str:
    """Where it ran."""
    if first is None:
        return ""
    told = first.machine | {
        "memory": "–" if not first.machine["memory"] else written(first.machine["memory"])
    }
    rows = [(name, str(value)) for name, value in told.items()]
    return f"<h2>Machine</h2>{_table(('', ''), rows)}"


def _table(
    heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, kind: str = "", numbers: tuple[int, ...] = ()
) -> str:
    def cell(tag: str, i: int, text: str) -> str:
        kind = " class='number'" if i in numbers else ""
        return f"<{tag}{kind}>{_text(text)}</{tag}>"

    head = "".join(cell("th", i, h) for i, h in enumerate(heads))
    body = "".join(f"<tr>{''.join(cell('td', i, c) for i, c in enumerate(row))}</tr>" for row in rows)
    top = f"<thead><tr>{head}</tr></thead>" if any(heads) else ""
    return f'<div class="scroll"><table class="{kind}">{top}<tbody>{body}</tbody></table></div>'


def _text(text: str) -> str:
    return html.escape(text)


def _flops(amount: int | float) -> str:
    """
    >>> _flops(42_150_000), _flops(1.4e11)
    ('42.15 MFLOP', '140.00 GFLOP')
    """
    size, unit = next(
        (s, u) for s, u in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (0, "")) if amount >= s
    )
    return f"{amount / (size or 1):,.2f} {unit}FLOP"


def _mean(events: list[dict[str, Any]], field: str) -> float:
    """Over the later half: the first updates warm up the machine."""
    some = [e[field] for e in events[len(events) // 2 :] if isinstance(e.get(field), int | float)]
    return sum(some) / len(some) if some else 0.0


def _ended(events: list[dict[str, Any]]) -> str:
    if not events:
        return "an unknown day"
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(events[-1]["time"]))
