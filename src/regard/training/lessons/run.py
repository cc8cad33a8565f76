"""`rg.train("T5")`: run a lesson, store its models and curves, and write its page."""

import contextlib
import inspect
import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from ... import spec
from ...errors import FormatError, SpecError, nearest
from ...files import make_folder, read_json
from ...lens.recorder import Recorder
from ...nn.serialization import WEIGHTS, load, save
from ..loop import checkpoints
from ..loop.meter import machine
from .catalogue import LESSONS
from .experiment import Experiment, Training
from .lesson import Lesson, format_value

FILE, CURVES, MODELS, REPORT = "lesson.json", "curves.json", "models", "report.html"

Listener = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class LessonChoice:
    """A lesson and its settings; JSON: {"lesson": "T5", "settings": {"steps": 120}}."""

    number: str
    settings: dict[str, Any]

    def json(self) -> str:
        return json.dumps({"lesson": self.number, "settings": self.settings}, indent=1)


def lesson_number(name: str) -> str | None:
    """The number of a lesson, in upper case; None for any other name. T14 is an error.

    >>> lesson_number("t5"), lesson_number("translate")
    ('T5', None)
    """
    if not re.fullmatch(r"[Tt]\d+", name):
        return None
    if name.upper() not in LESSONS:
        raise SpecError(f"no lesson {name!r}; the lessons are T1 to T{len(LESSONS)}: regard train --list")
    return name.upper()


def choose(number: str, **settings: Any) -> LessonChoice:
    """A lesson with all of its settings; unknown ones, and values of the wrong kind, are errors."""
    known = {
        p.name: p.default
        for p in inspect.signature(LESSONS[number]).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    }
    for name, value in settings.items():
        if name not in known:
            close = nearest(name, known)
            hint = f"; {close}" if close.startswith("did") else ""
            raise SpecError(f"lesson {number} has no setting {name!r}{hint}; it has {', '.join(known)}")
        known[name] = _checked(number, name, value, known[name])
    return LessonChoice(number, known)


def _checked(number: str, name: str, value: Any, default: Any) -> Any:
    """Whole numbers where the default is one, several where it is several."""
    several = isinstance(default, tuple)
    if several and isinstance(value, list | tuple) and value and all(_whole(v, 1) for v in value):
        return tuple(value)
    if not several and _whole(value, 0 if name == "seed" else 1):
        return value
    kind = "whole numbers of at least 1" if several else f"a whole number of at least {int(name != 'seed')}"
    example = f"{name}={list(default) if several else default}"
    raise SpecError(f"lesson {number}: {name}={value!r}; it needs {kind}, such as {example}")


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def read_choice(text: str, source: str) -> LessonChoice | None:
    """A lesson as `--show` prints it; None where the JSON is not of a lesson."""
    with contextlib.suppress(json.JSONDecodeError):
        data = json.loads(text)
        if isinstance(data, dict) and "lesson" in data:
            number = lesson_number(str(data["lesson"]))
            settings = data.get("settings", {})
            if number is None or not isinstance(settings, dict) or set(data) - {"lesson", "settings"}:
                raise FormatError(f'{source}: a lesson is {{"lesson": "T5", "settings": {{…}}}}')
            return choose(number, **settings)
    return None


@dataclass(frozen=True)
class LessonEstimate:
    """What a lesson would train, and how long that would take here."""

    number: str
    settings: dict[str, Any]
    trainings: tuple[Training, ...]

    @property
    def seconds(self) -> float:
        return sum(t.seconds for t in self.trainings)

    def json(self) -> str:
        keys = ("name", "parameters", "updates", "seconds", "threads")
        models = [{k: asdict(t)[k] for k in keys} for t in self.trainings]
        plain = {"lesson": self.number, "settings": self.settings, "seconds": self.seconds}
        return json.dumps(plain | {"trainings": models})

    def __str__(self) -> str:
        settings = ", ".join(f"{k}={v}" for k, v in self.settings.items())
        rows = [
            f"  {t.name}: {t.parameters:,} parameters, {t.updates:,} updates, about {t.seconds:.1f} s "
            f"({t.threads} thread{'s' * (t.threads > 1)})"
            for t in self.trainings
        ]
        end = f"  about {self.seconds:.0f} s of training; estimated from a few updates of copies"
        return "\n".join([f"{self.number}: {settings}", *rows, end])


def _stored(folder: Path) -> dict[str, Any]:
    """The content of lesson.json."""
    stored = read_json(folder / FILE)
    if missing := {"lesson", "claim", "passed"} - stored.keys():
        raise FormatError(f"{folder / FILE} is not a lesson of regard: it has no {min(missing)}")
    return stored


@dataclass(frozen=True, repr=False)
class LessonResult:
    """A finished lesson. Everything is read from its folder; in a notebook it shows its page."""

    folder: Path

    @property
    def stored(self) -> dict[str, Any]:
        """The content of lesson.json."""
        return _stored(self.folder)

    @property
    def number(self) -> str:
        return self.stored["lesson"]

    @property
    def claim(self) -> str:
        return self.stored["claim"]

    @property
    def passed(self) -> bool:
        return self.stored["passed"]

    @property
    def checks(self) -> list[dict[str, Any]]:
        """name, measured, expected, passed of each number that decides the claim."""
        return self.stored["checks"]

    @property
    def measured(self) -> dict[str, Any]:
        """All numbers by name, those of the checks first."""
        stored = self.stored
        return {c["name"]: c["measured"] for c in stored["checks"]} | stored["measured"]

    @property
    def curves(self) -> Recorder:
        """The losses of each model, and their floors."""
        return Recorder.load(self.folder / CURVES)

    @property
    def models(self) -> list[str]:
        """The names of the trained models."""
        return list(self.stored["models"])

    @property
    def report(self) -> Path:
        return self.folder / REPORT

    def load(self, name: str | None = None) -> nn.Module:
        """A trained model by name (the first by default), in evaluation mode."""
        folders = self.stored["models"]
        name = next(iter(folders)) if name is None else name
        if name not in folders:
            raise SpecError(f"lesson {self.number} has no model {name!r}; {nearest(name, folders)}")
        if not (self.folder / folders[name] / "config.json").is_file():
            path = self.folder / folders[name] / WEIGHTS
            raise FormatError(
                f"{name!r} is not declared by a spec; its weights are safetensors.torch.load_file({str(path)!r})"
            )
        return load(self.folder / folders[name]).eval()

    def __str__(self) -> str:
        stored = self.stored
        lines = [f"{stored['lesson']} {'passed' if stored['passed'] else 'failed'}: {stored['claim']}"]
        for c in stored["checks"]:
            mark = "" if c["passed"] else "  ← not as expected"
            lines.append(f"  {c['name']}: {format_value(c['measured'])} (expected {c['expected']}){mark}")
        lines += [f"  {name}: {format_value(v)}" for name, v in stored["measured"].items()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        stored = self.stored
        return (
            f"LessonResult({stored['lesson']} {'passed' if stored['passed'] else 'failed'}, {self.folder}, "
            f"{len(stored['models'])} models, {stored['seconds']:.1f} s)"
        )

    def _repr_html_(self) -> str:
        from ..report.frame import framed

        return framed(self.report.read_text(encoding="utf-8"))


def estimate(chosen: LessonChoice, device: str | torch.device | None, threads: int | None) -> LessonEstimate:
    """The models of a lesson and the time to train them here, from a few updates of copies."""
    seed = chosen.settings["seed"]
    experiment = Experiment(seed, device or "cpu", threads, estimate=True)
    LESSONS[chosen.number](experiment, **chosen.settings)
    return LessonEstimate(chosen.number, chosen.settings, tuple(experiment.trainings))


def teach(
    chosen: LessonChoice,
    folder: Path,
    listener: Listener,
    *,
    device: str | torch.device | None = None,
    threads: int | None = None,
) -> LessonResult:
    """Run the lesson and write lesson.json, curves.json, models/ and report.html into the folder."""
    from ..report.lesson_page import lesson_page

    _claim(chosen, folder)
    with checkpoints.locked(folder):
        began = time.perf_counter()
        experiment = Experiment(chosen.settings["seed"], device or "cpu", threads, listener=listener)
        lesson = LESSONS[chosen.number](experiment, **chosen.settings)
        listener({"event": "drawing", "pictures": len(lesson.pictures)})
        folders = _save_models(experiment.models, folder)
        experiment.recorder.save(folder / CURVES)
        stored = _plain(chosen, lesson, experiment, folders) | {"seconds": time.perf_counter() - began}
        (folder / REPORT).write_text(lesson_page(lesson, stored, folder), encoding="utf-8")
        (folder / FILE).write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    listener({"event": "lesson", **stored, "report": str(folder / REPORT)})
    return LessonResult(folder)


def _claim(chosen: LessonChoice, folder: Path) -> None:
    """Make the folder; one of a recipe's run, or of another lesson, is an error. The same lesson is replaced."""
    make_folder(folder)
    if (folder / "recipe.json").is_file():
        raise FormatError(
            f"{folder} contains the run of a recipe; use another folder: --out runs/{chosen.number}"
        )
    if (folder / FILE).is_file():
        other = _stored(folder)["lesson"]
        if other != chosen.number:
            raise FormatError(
                f"{folder} contains lesson {other}; use another folder: --out runs/{chosen.number}"
            )


def _save_models(models: dict[str, nn.Module], folder: Path) -> dict[str, str]:
    """The folder of each model, relative to the lesson's."""
    folders = {}
    for name, model in models.items():
        at = f"{MODELS}/{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}"
        if isinstance(getattr(model, "spec", None), spec.Spec):
            save(model, folder / at)
        else:
            (folder / at).mkdir(parents=True, exist_ok=True)
            save_file({k: v.contiguous() for k, v in model.state_dict().items()}, str(folder / at / WEIGHTS))
        folders[name] = at
    return folders


def _plain(
    chosen: LessonChoice, lesson: Lesson, experiment: Experiment, folders: dict[str, str]
) -> dict[str, Any]:
    """The lesson as JSON."""
    return {
        "lesson": lesson.number,
        "claim": lesson.claim,
        "passed": lesson.passed,
        "method": lesson.method,
        "settings": chosen.settings,
        "checks": [asdict(c) | {"measured": _finite(c.measured)} for c in lesson.checks],
        "measured": _finite(lesson.measured),
        "models": folders,
        "trainings": [asdict(t) for t in experiment.trainings],
        "suggestions": [{"text": s.text, "command": s.command(lesson.number)} for s in lesson.suggestions],
        "machine": machine(torch.device(experiment.device)),
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity, and only text as keys."""
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
