"""A verdict as a self-contained HTML page: no network, no script, all foreign text escaped."""

import math
from html import escape

from .catalogue import subject_of
from .dependence import Dependence, dependence
from .drawn_case import DrawnCase, draw_case
from .law import Outcome
from .verdict import MARK, Verdict

WORDS = {"holds": "passed"}  # a count of laws, such as 3 passed
STYLE = """
.regard { color-scheme: light dark; --ink: #1b1b1b; --dim: #6b6b6b; --line: #d8d8d8; --paper: #fff;
  --good: #1a7f37; --bad: #b42318; --deep: 33, 82, 173;
  font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 62rem; margin: auto;
  padding: 1.5rem; box-sizing: border-box }
@media (prefers-color-scheme: dark) { .regard { --ink: #e8e8e8; --dim: #9a9a9a; --line: #3a3a3a; --paper: #161616;
  --good: #4cc26a; --bad: #ff7b6b; --deep: 122, 170, 255 } }
.regard h1 { font-size: 1.4rem; margin: 0 0 .3rem; overflow-wrap: anywhere }
.regard h2 { font-size: 1.05rem; margin: 2rem 0 .5rem }
.regard p { margin: .3rem 0 } .regard .dim { color: var(--dim) }
.regard .wide { overflow-x: auto } .regard table { border-collapse: collapse; width: 100% }
.regard th, .regard td { text-align: left; vertical-align: top; padding: .3rem .6rem .3rem 0;
  border-top: 1px solid var(--line) }
.regard th { font-weight: 600 } .regard td.n { white-space: nowrap; font-variant-numeric: tabular-nums }
.regard .holds { color: var(--good) } .regard .broken, .regard .raised { color: var(--bad); font-weight: 600 }
.regard pre { overflow-x: auto; white-space: pre-wrap;
  padding: .7rem; border: 1px solid var(--line); border-radius: 4px; font-size: 13px }
.regard summary { cursor: pointer } .regard figure { display: inline-block; margin: .5rem 1.5rem .5rem 0 }
.regard figcaption { font-size: 13px } .regard svg text { fill: var(--dim); font-size: 9px }
.regard .case { display: flex; flex-wrap: wrap; gap: .4rem 1.4rem; margin: .4rem 0 }
.regard .case figure { margin: 0; max-width: 100%; overflow-x: auto } .regard .case table { width: auto }
.regard .case td { border: 1px solid var(--line); padding: .1rem .4rem; text-align: right; font-size: 13px;
  font-variant-numeric: tabular-nums; min-width: 1.3rem; height: 1.5rem }
.regard .case td.on { background: rgb(var(--deep)) }
.regard .case td.wrong { color: var(--bad); font-weight: 600; outline: 2px solid var(--bad); outline-offset: -2px }
@media (max-width: 640px) { .regard { padding: .8rem } .regard .laws tr { display: grid; padding: .4rem 0;
  grid-template-columns: 3rem 1fr; border-top: 1px solid var(--line) } .regard .laws tr:first-child { display: none }
  .regard .laws td { border: 0; padding: .1rem .4rem .1rem 0; grid-column: 2 } .regard .laws td:first-child {
  grid-column: 1 } .regard .laws td.n:empty { display: none } }
.regard svg rect { fill: rgb(var(--deep)); stroke: var(--line); stroke-width: .5 }
"""


def page(verdict: Verdict) -> str:
    """The complete document."""
    title = escape(f"regard check: {verdict.target.name}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<style>body { margin: 0 } @media (prefers-color-scheme: dark) { body { background: #161616 } }</style>"
        f"</head><body><main>{inline(verdict)}</main></body></html>\n"
    )


def inline(verdict: Verdict) -> str:
    """An HTML fragment with its own style, for notebooks."""
    promises = [o for o in verdict.outcomes if o.law.promise is not None]
    laws = [o for o in verdict.outcomes if o.law.promise is None]
    parts = [
        f"<style>{STYLE}</style>",
        f'<div class="regard"><h1>{escape(verdict.target.name)}</h1>',
        f"<p>{escape(', '.join(f'{n} {WORDS.get(s, s)}' for s, n in verdict.counts().items()))}; "
        f"{verdict.seconds:.1f} s; exit code {verdict.exit_code}</p>",
        _cause(verdict),
        _capabilities(verdict),
        _counterexamples(verdict, folded=verdict.cause is not None),
        *_by_subject([o for o in laws if o.status != "not applicable"]),
        _table("Promises", [o for o in promises if o.status != "not applicable"]),
        _pictures(dependence(verdict.target, verdict.probed.supported)),
        _not_applicable([o for o in verdict.outcomes if o.status == "not applicable"]),
        "</div>",
    ]
    return "\n".join(part for part in parts if part)


def _cause(verdict: Verdict) -> str:
    """The likely cause, before anything else."""
    notes = "".join(f'<p class="dim">{escape(note)}</p>' for note in verdict.target.notes)
    if verdict.failure is not None:
        return f'<p class="broken">{escape(verdict.failure)}</p>{notes}'
    cause = verdict.cause
    if cause is None:
        return notes
    title = "Likely cause" if cause.exact else "Symptom"
    laws = f"<p>Broken by it: {escape(', '.join(cause.laws))}</p>" if cause.laws else ""
    return (
        f'<h2>{title}</h2><p class="broken">{escape(cause.headline)}</p><p>{escape(cause.evidence)}</p>'
        f"<p>Fix: {escape(cause.fix)}</p>{laws}{notes}"
    )


def _capabilities(verdict: Verdict) -> str:
    target = verdict.target
    probed = {name for name, works in verdict.probed.supported.items() if works}
    groups = [("claims", target.claims), ("lacks", target.lacks), ("supports, by probing", probed)]
    lines = [f"{title}: {', '.join(sorted(names))}" for title, names in groups if names]
    return "".join(f'<p class="dim">{escape(line)}</p>' for line in lines)


def _counterexamples(verdict: Verdict, folded: bool = False) -> str:
    """Each broken law with a drawing of its case; if the cause is known, only the first is unfolded."""
    if not verdict.broken:
        return ""
    parts = ["<h2>Broken</h2>"]
    for i, o in enumerate(verdict.broken):
        is_open = "" if folded and i else " open"
        case = (
            "" if o.counterexample is None else f"<p>Smallest case found: {escape(str(o.counterexample))}</p>"
        )
        drawn = draw_case(o, verdict.target, verdict.probed)
        snippet = (
            f'<details><summary>Code that shows it</summary><pre tabindex="0">{escape(o.snippet)}</pre></details>'
            if o.snippet
            else ""
        )
        parts.append(
            f'<details{is_open}><summary><span class="broken">{escape(o.law.number)} {escape(o.law.name)}</span>: '
            f"{escape(o.message)}</summary><p>{escape(o.law.formula)}</p>{case}"
            f"{'' if drawn is None else _case(drawn)}{snippet}</details>"
        )
    return "\n".join(parts)


def _case(drawn: DrawnCase) -> str:
    """The allowed pairs, then each quantity as computed and as expected; wrong numbers are outlined."""
    figures = []
    if drawn.allowed is not None:
        rows = [[("", "on" if pair else "") for pair in row] for row in drawn.allowed]
        figures.append(_grid("allowed pairs: a row per query", rows))
    for t in drawn.tables:
        marked = [
            [(f"{x:.4g}", "wrong" if bad else "") for x, bad in zip(*row)] for row in zip(t.got, t.wrong)
        ]
        figures.append(_grid(f"{t.name}, got", marked))
        figures.append(_grid(f"{t.name}, expected", [[(f"{x:.4g}", "") for x in row] for row in t.expected]))
    return f'<p class="dim">{escape(drawn.title)}</p><div class="case">{"".join(figures)}</div>'


def _grid(name: str, rows: list[list[tuple[str, str]]]) -> str:
    body = "".join(
        "<tr>" + "".join(f'<td class="{mark}">{escape(text)}</td>' for text, mark in row) + "</tr>"
        for row in rows
    )
    return f"<figure><figcaption>{escape(name)}</figcaption><table>{body}</table></figure>"


def _by_subject(outcomes: list[Outcome]) -> list[str]:
    """A table for each subject of the catalogue, those with a broken law first; if all hold, it is folded."""
    groups: dict[str, list[Outcome]] = {}
    for o in outcomes:
        groups.setdefault(subject_of(o.law), []).append(o)
    wrong = {name: any(o.failed for o in each) for name, each in groups.items()}
    return [
        _table(f"Laws: {name}", groups[name], folded=not wrong[name])
        for name in sorted(groups, key=lambda name: not wrong[name])
    ]


def _table(title: str, outcomes: list[Outcome], folded: bool = False) -> str:
    if not outcomes:
        return ""
    rows = "\n".join(_row(o) for o in outcomes)
    head = "<tr><th>law</th><th>statement</th><th>outcome</th><th>tried</th><th>error / tolerance</th></tr>"
    scrolled = f'<div class="wide" tabindex="0" role="group" aria-label="{escape(title)}">'
    table = f'{scrolled}<table class="laws">{head}\n{rows}</table></div>'
    if folded:
        counted = "1 law holds" if len(outcomes) == 1 else f"all {len(outcomes)} laws hold"
        table = f"<details><summary>{counted}</summary>{table}</details>"
    return f"<h2>{escape(title)}</h2>{table}"


def _row(o: Outcome) -> str:
    measured = (
        f"{_number(o.worst)} / {_number(o.tolerance)} {escape(o.dtype)}" if o.cases and o.tolerance else ""
    )
    message = f'<br><span class="dim">{escape(o.message)}</span>' if o.message else ""
    status = o.status.replace(" ", "-")
    return (
        f'<tr><td class="n">{escape(o.law.number)}</td>'
        f'<td>{escape(o.law.name)}<br><span class="dim">{escape(o.law.formula)}</span></td>'
        f'<td><span class="{status}">{MARK[o.status]} {escape(o.status)}</span>{message}</td>'
        f'<td class="n">{o.cases} {"case" if o.cases == 1 else "cases"}</td><td class="n">{measured}</td></tr>'
    )


def _number(x: float) -> str:
    return f"{x:.1e}" if math.isfinite(x) else str(x)


def _not_applicable(outcomes: list[Outcome]) -> str:
    if not outcomes:
        return ""
    rows = "".join(
        f'<tr><td class="n">{escape(o.law.number)}</td><td>{escape(o.law.name)}</td><td>{escape(o.message)}</td></tr>'
        for o in outcomes
    )
    summary = f"<summary>{len(outcomes)} laws and the reasons</summary>"
    return f"<h2>Not applicable</h2><details>{summary}<table>{rows}</table></details>"


def _pictures(maps: list[Dependence]) -> str:
    if not maps:
        return ""
    caption = "Row i, column j: how strongly output i depends on input j. Empty: exactly 0, no dependence."
    title = "Which output depends on which input"
    return f'<h2>{title}</h2><p class="dim">{caption}</p>' + "".join(map(_picture, maps))


def _picture(d: Dependence, cell: int = 18) -> str:
    """One square per pair, shaded by the logarithm of its strength, down to 10⁻⁶ of the strongest."""
    cell = max(4, min(cell, 320 // max(d.strength.shape)))
    largest = float(d.strength.max()) or 1.0
    squares = []
    for i, row in enumerate(d.strength.tolist()):
        for j, value in enumerate(row):
            shade = 0.0 if value == 0 else max(0.08, 1 + math.log10(max(value / largest, 1e-6)) / 6)
            hint = f"output {d.outputs[i]}, input {d.inputs[j]}: {value:.3g}"
            squares.append(
                f'<rect x="{14 + j * cell}" y="{12 + i * cell}" width="{cell}" height="{cell}" '
                f'fill-opacity="{shade:.2f}"><title>{escape(hint)}</title></rect>'
            )
    height, width = (s * cell for s in d.strength.shape)
    every = range(0, len(d.inputs), max(1, 14 // cell))
    names = [f'<text x="{14 + (j + 0.3) * cell:.0f}" y="9">{escape(d.inputs[j])}</text>' for j in every]
    if len(d.outputs) > 1:
        names += [
            f'<text x="0" y="{12 + (i + 0.7) * cell:.0f}">{escape(d.outputs[i])}</text>'
            for i in range(0, len(d.outputs), max(1, 14 // cell))
        ]
    return (
        f'<figure><svg width="{width + 16}" height="{height + 14}" role="img" aria-label="{escape(d.name)}">'
        f"{''.join(squares)}{''.join(names)}</svg><figcaption>{escape(d.name)}</figcaption></figure>"
    )
