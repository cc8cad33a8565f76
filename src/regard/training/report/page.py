"""The report of a run: one HTML file with everything inside it, that opens from a disk without a network.

Numbers, curves and texts are markup; the attention maps are embedded as bytes and drawn by the page's script.
"""

import html
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ... import files
from ...errors import FormatError
from ...lens.html_report import fill
from ...machine import readable
from ...nn.serialization import load
from ..data.tokens import Tokens
from ..lessons.lesson import Check, format_value
from ..loop import log
from ..recipes import Recipe, evaluation, preflight
from ..recipes.evaluation import Evaluation
from ..recipes.preflight import LawResult, Preflight, format_duration
from ..recipes.run import MODEL, RECIPE, TOKENS, read_recipe
from . import head_statistics
from .charts import Line, chart
from .expectations import claim, expectations, suggestions
from .maps import cross_maps

FILE = "report.html"
NUMBERS = ("entropy_share", "distance", "on_self", "on_previous", "on_first")
PARTS = Path(__file__).parent


def report(folder: str | Path) -> Path:
    """Write report.html from the files in the folder of a run."""
    folder = Path(folder)
    for name in (RECIPE, MODEL):
        if not (folder / name).exists():
            raise FormatError(
                f"{folder} contains no {name}; a report needs a run that `regard train` has finished"
            )
    title, body, data = contents(folder)
    page = fill_page(title, body, data)
    path = folder / FILE
    files.write_text(path, page)
    return path


def fill_page(title: str, body: str, data: dict[str, Any], kind: str = "run") -> str:
    """The document around a body; data: for the page's script. kind: the class of the body."""
    parts = {name: (PARTS / f"page.{name}").read_text(encoding="utf-8") for name in ("html", "css", "js")}
    plain = json.dumps(data).replace("<", "\\u003c")  # so that no text can end the script element
    values = {"title": html.escape(title), "css": parts["css"], "js": parts["js"]}
    return fill(parts["html"], values | {"kind": kind, "data": plain, "body": body})


def contents(folder: Path) -> tuple[str, str, dict[str, Any]]:
    """The title, the markup, and the data for the script."""
    recipe = read_recipe(folder)
    model = load(folder / MODEL).eval()
    has_tokens = (folder / TOKENS).is_file()
    tokens = Tokens.from_json(files.read_checked(folder, TOKENS)) if has_tokens else None
    result, checks, events = evaluation.stored(folder), preflight.stored(folder), log.read(folder)
    maps = [] if tokens is None or result is None else cross_maps(model, tokens, result.examples)
    title = f"{recipe.name}: run of {_ended(events)}"
    kept = preflight.check_laws(model, preflight.AFTER_TRAINING)
    decided = expectations(recipe, result, kept)
    body = [
        headline(recipe, model, result, events, title),
        f'<p class="statement">{_text(claim(recipe))} {verdict(decided)}</p>' if decided else "",
        numbers(decided),
        curves(events),
        examples(result),
        attention_maps(bool(maps), "Cross-attention while translating", TRANSLATING),
        heads(head_statistics.read(folder)),
        costs(checks, model, events),
        laws(kept),
        try_next(suggestions(recipe, folder)),
        machine(checks),
        f"<footer>Written by regard on {time.strftime('%Y-%m-%d %H:%M')} from {_text(str(folder))}.</footer>",
    ]
    return title, "\n".join(part for part in body if part), {"maps": maps}


def headline(
    recipe: Recipe, model: nn.Module, result: Evaluation | None, events: list[dict[str, Any]], title: str
) -> str:
    """The title, the model and the settings in one line, and the main numbers."""
    train = [e for e in events if e["event"] == "train"]
    parameters = sum(p.numel() for p in model.parameters())
    tiles = []
    if result is not None:
        tiles += [(name, evaluation.format_score(name, score)) for name, score in result.scores.items()]
    tiles += [("parameters", f"{parameters / 1e6:.2f} M" if parameters > 1e5 else f"{parameters:,}")]
    if train:
        tiles += [
            ("updates", f"{train[-1]['step']:,}"),
            ("training time", format_duration(train[-1]["seconds"])),
            ("tokens/s", f"{_mean(train, 'tokens_per_second'):,.0f}"),
        ]
        if mfu := _mean(train, "mfu"):
            tiles.append(("FLOP utilization", f"{mfu:.1%}"))
    shown = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(n)}</dd></div>" for name, n in tiles)
    signed = (
        ""
        if result is None
        else "".join(
            f'<p class="signature">{_text(name)}: {_text(text)}</p>'
            for name, text in result.signatures.items()
        )
    )
    s = recipe.settings
    ends = f"{s.minutes:g} minutes" if s.minutes else f"{s.steps:,} updates"
    settings = (
        f"{shape(recipe.model)}; {ends} of {s.tokens * s.accumulate:,} tokens, {s.schedule!r}, seed {s.seed}"
    )
    rows = "" if result is None else f"; scores on {result.rows:,} test rows"
    lead = f'<p class="lead">{_text(settings + rows)}</p>'
    return f'<h1>{_text(title)}</h1>{lead}<dl class="tiles">{shown}</dl>{signed}'


def verdict(checks: Sequence[Check]) -> str:
    """A mark: passed or failed."""
    kind, word, mark = (
        ("holds", "passed", "✓") if all(c.passed for c in checks) else ("broken", "failed", "✗")
    )
    return f'<span class="verdict {kind}">{mark} {word}</span>'


def numbers(checks: Sequence[Check]) -> str:
    """Each number beside what was expected of it."""
    if not checks:
        return ""
    rows = "".join(
        f"<tr>{_mark(c.passed)}<td>{_text(c.name)}</td>"
        f'<td class="measured">{_text(format_value(c.measured))}</td><td>{_text(c.expected)}</td></tr>'
        for c in checks
    )
    head = "<tr><th>passed</th><th>number</th><th>measured</th><th>expected</th></tr>"
    return (
        f'<h2>The numbers that decide</h2><div class="scroll" tabindex="0"><table class="numbers">'
        f"<thead>{head}</thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _mark(passed: bool) -> str:
    if passed:
        return '<td class="mark holds" aria-label="as expected">✓</td>'
    return '<td class="mark broken" aria-label="not as expected">✗</td>'


def try_next(commands: Sequence[tuple[str, str]]) -> str:
    """What to try next, each with its command."""
    shown = "".join(
        f"<li>{_text(t)}<pre class='command' tabindex='0'>{_text(command)}</pre></li>"
        for t, command in commands
    )
    return f'<h2>Try next</h2><ul class="next">{shown}</ul>' if shown else ""


def shape(declared: Any) -> str:
    """A short description of a model.

    >>> from regard.training.recipes import recipe
    >>> shape(recipe("translate").model)
    '3 + 3 layers, d_model 256, 8 heads, vocabulary 8,000'
    """
    stacks = [getattr(declared, name) for name in ("encoder", "decoder") if hasattr(declared, name)] or [
        declared
    ]
    if not all(hasattr(stack, "block") for stack in stacks):
        return type(declared).__name__
    block = stacks[-1].block
    layers = " + ".join(str(stack.layers) for stack in stacks)
    embedding = getattr(stacks[-1], "embedding", None)
    vocab = "" if embedding is None else f", vocabulary {embedding.vocab:,}"
    return f"{layers} layers, d_model {block.d_model}, {block.attention.sizes.heads} heads{vocab}"


def curves(events: list[dict[str, Any]]) -> str:
    """The curves of the log, by update."""
    train, valid = ([e for e in events if e["event"] == kind] for kind in ("train", "valid"))

    def line(name: str, of: list[dict[str, Any]], field: str, dots: bool = False) -> Line:
        known = [e for e in of if isinstance(e.get(field), int | float)]  # NaN is a string in the log
        return Line(name, [(e["step"], e[field]) for e in known], dots)

    drawn = [
        chart("loss", [line("training", train, "loss"), line("validation", valid, "loss", dots=True)]),
        chart("tokens per second", [line("tokens/s", train, "tokens_per_second")]),
        chart("gradient norm", [line("norm", train, "norm")], log=True),
        chart("learning rate", [line("rate", train, "rate")]),
    ]
    return f'<h2>Curves</h2><div class="charts">{"".join(drawn)}</div>' if any(drawn) else ""


def examples(result: Evaluation | None) -> str:
    """Outputs beside their references, or the sample of a language model."""
    if result is None:
        return ""
    if result.sample:
        return f"<h2>Sampled text</h2><pre>{_text(result.sample)}</pre>"
    rows = [(e.source, e.output, e.reference or "–") for e in result.examples]
    if not rows:
        return ""
    note = "Test rows at even intervals, not selected by hand."
    title = "Translations" if "BLEU" in result.scores else "Examples"
    return (
        f"<h2>{title}</h2>{table(('source', 'output', 'reference'), rows, kind='texts')}"
        f'<p class="note">{note}</p>'
    )


TRANSLATING = "A row is a generated token, a column a source token."


def attention_maps(available: bool, title: str, note: str = "A row is a query, a column a key.") -> str:
    """The elements in which the page's script draws attention maps."""
    if not available:
        return ""
    return (
        f'<h2>{_text(title)}</h2><div class="controls"><label>sentence <select id="sentence"></select></label>'
        '<label>layer <select id="layer"></select></label></div>'
        '<div id="heads" role="group" aria-label="heads"></div>'
        '<div id="map" tabindex="0" role="group" aria-label="the map; a row is a query"></div>'
        '<p id="reading">&nbsp;</p>'
        f'<p class="note">{_text(note)} Bright means a large weight; colors show the square root of the weight, so '
        "that small weights stay visible.</p>"
    )


def heads(statistics: list[dict[str, Any]]) -> str:
    """Entropy and distance of the heads of each kind of attention over training, and a table of all heads."""
    if not statistics:
        return ""
    kinds = list(dict.fromkeys(_stack(row) for row in statistics[-1]["heads"]))
    drawn = []
    for number, title in (("entropy_share", "entropy, 1 is uniform"), ("distance", "distance, in tokens")):
        lines = []
        for kind in kinds:
            of = [
                (one["step"], [r.get(number) for r in one["heads"] if _stack(r) == kind])
                for one in statistics
            ]
            points = [(step, _mean_of(values)) for step, values in of]
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
        for r in statistics[-1]["heads"]
    ]
    each = table(
        ("layer", "head", "kind", "confidence", *NUMBERS), last, numbers=(1, 3, *range(4, 4 + len(NUMBERS)))
    )
    return (
        f'<h2>Heads</h2><div class="charts">{"".join(drawn)}</div><details><summary>Each head after update '
        f"{statistics[-1]['step']:,}</summary>{each}</details>"
        '<p class="note">Means over the heads of each kind of attention, on validation rows of one length.</p>'
    )


def _stack(row: dict[str, Any]) -> str:
    """The attention a head belongs to: encoder self, decoder self, or cross."""
    first = row["name"].partition(".")[0]
    named = first if first in ("encoder", "decoder") else "self"
    return "cross" if row["role"] == "cross" else f"{named} self" if named != "self" else named


def _mean_of(values: list[Any]) -> float | None:
    known = [v for v in values if isinstance(v, int | float)]
    return sum(known) / len(known) if known else None


def _short(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, int | float) else "–"


def costs(checks: Preflight | None, model: nn.Module, events: list[dict[str, Any]]) -> str:
    """Estimated and measured cost."""
    train = [e for e in events if e["event"] == "train"]
    if checks is None or not train:
        return ""
    b = checks.batch
    memory, used = checks.memory, max((e.get("memory") or 0 for e in train), default=0)
    per_batch = checks.flops * b.predicted * b.rows
    rows = [
        ("parameters", f"{checks.parameters:,}", f"{sum(p.numel() for p in model.parameters()):,}"),
        ("FLOPs per predicted token, both passes", _flops(checks.flops), ""),
        ("FLOPs of a mean batch", _flops(per_batch), ""),
        ("peak memory", "–" if memory is None else readable(memory), readable(used) if used else "–"),
        ("tokens/s", f"{checks.tokens_per_second:,.0f}", f"{_mean(train, 'tokens_per_second'):,.0f}"),
        ("updates", f"{checks.updates:,}", f"{train[-1]['step']:,}"),
        ("time", format_duration(checks.seconds), format_duration(train[-1]["seconds"])),
        ("model FLOP utilization", "–", f"{_mean(train, 'mfu'):.1%}"),
        ("padding", f"{b.padding_share:.1%}", f"{_mean(train, 'padding_share'):.1%}"),
    ]
    note = (
        f"Estimated {checks.method}. {_memory_note(checks, used)}"
        "A multiply-add is 2 FLOPs; utilization excludes padding and recomputation and is relative to the "
        "speed of a large matrix product on this machine."
    )
    shown = table(("", "estimated", "measured"), rows, numbers=(1, 2))
    return f'<h2>Cost</h2>{shown}<p class="note">{_text(note)}</p>'


def _memory_note(checks: Preflight, used: int) -> str:
    """Why the two amounts of memory differ."""
    if checks.memory is None or not used:
        return ""
    if checks.machine.get("device", "cpu").lower().startswith(("nvidia", "cuda")):
        return "Both amounts of memory are those of PyTorch's allocator. "
    more = readable(max(used - checks.memory, 0))
    return (
        "The estimate counts the tensors of an update (weights, gradients, optimizer state, activations); on a CPU "
        f"the measured memory is that of the whole process: {more} more for Python, libraries, data and its "
        "tokenizer, and memory that the allocator keeps for later. "
    )


def laws(results: tuple[LawResult, ...]) -> str:
    """The laws checked on the trained model."""
    if not results:
        return ""
    rows = "".join(
        f"<tr><td>{_text(o.number)}</td><td>{_text(o.name)}<br><span class='formula'>{_text(o.formula)}</span></td>"
        f"<td class='{'holds' if o.status == 'holds' else 'broken' if o.status in ('broken', 'raised') else ''}'>"
        f"{_text(o.status)}</td><td>{_text(o.message)}</td><td class='number'>{o.cases}</td></tr>"
        for o in results
    )
    head = "<tr><th>number</th><th>law</th><th>result</th><th>reason</th><th class='number'>cases</th></tr>"
    return (
        f'<h2>Laws</h2><div class="scroll" tabindex="0"><table><thead>{head}</thead>'
        f"<tbody>{rows}</tbody></table></div>"
        '<p class="note">Checked on the trained model in float64.</p>'
    )


def machine(checks: Preflight | None) -> str:
    """The machine of the run."""
    if checks is None:
        return ""
    memory = checks.machine["memory"]
    described = checks.machine | {"memory": readable(memory) if memory else "–"}
    rows = [(name, str(value)) for name, value in described.items()]
    return f"<h2>Machine</h2>{table(('', ''), rows)}"


def table(
    heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, kind: str = "", numbers: tuple[int, ...] = ()
) -> str:
    def cell(tag: str, i: int, text: str) -> str:
        kind = " class='number'" if i in numbers else ""
        return f"<{tag}{kind}>{_text(text)}</{tag}>"

    head = "".join(cell("th", i, h) for i, h in enumerate(heads))
    body = "".join(f"<tr>{''.join(cell('td', i, c) for i, c in enumerate(row))}</tr>" for row in rows)
    top = f"<thead><tr>{head}</tr></thead>" if any(heads) else ""
    return f'<div class="scroll" tabindex="0"><table class="{kind}">{top}<tbody>{body}</tbody></table></div>'


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
    """The mean over the second half: the first updates are slower."""
    values = [e[field] for e in events[len(events) // 2 :] if isinstance(e.get(field), int | float)]
    return sum(values) / len(values) if values else 0.0


def _ended(events: list[dict[str, Any]]) -> str:
    if not events:
        return "unknown date"
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(events[-1]["time"]))
