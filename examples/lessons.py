"""All lessons, one page each, and one picture of each for docs/lessons.md.

    python examples/lessons.py                # runs all thirteen into runs/, then writes docs/lessons.md
    python examples/lessons.py T5 T13         # these again; the others stay as they are in docs/

A picture is the first of the lesson's page. The numbers in the page are those of the run that drew it.
"""

import json
import sys
from pathlib import Path

from regard.training.lessons import LESSONS
from regard.training.lessons.experiment import Experiment
from regard.training.lessons.lesson import Lesson, format_value
from regard.training.lessons.run import choose

ROOT = Path(__file__).parents[1]
PICTURES, PAGE, STORED = (
    ROOT / "docs" / "pictures",
    ROOT / "docs" / "lessons.md",
    ROOT / "docs" / "pictures" / "lessons.json",
)
START = "<!-- written by examples/lessons.py -->"


def run(number: str) -> tuple[Lesson, float]:
    """The lesson with its default settings, and the seconds of its trainings."""
    chosen = choose(number)
    experiment = Experiment(chosen.settings["seed"])
    lesson = LESSONS[number](experiment, **chosen.settings)
    return lesson, sum(t.seconds for t in experiment.trainings)


def stored(lesson: Lesson, seconds: float) -> dict:
    """What the page says about a lesson."""
    return {
        "claim": lesson.claim,
        "passed": lesson.passed,
        "numbers": [
            f"{c.name}: **{format_value(c.measured)}** (expected {c.expected})" for c in lesson.checks
        ],
        "picture": lesson.pictures[0].title,
        "caption": lesson.pictures[0].caption,
        "seconds": round(seconds),
    }


def gallery(lessons: dict[str, dict]) -> str:
    """The part of docs/lessons.md that this script writes."""
    parts = [START]
    for number in (n for n in LESSONS if n in lessons):
        one = lessons[number]
        numbers = "\n".join(f"- {text}" for text in one["numbers"])
        claim = one["claim"][:1].upper() + one["claim"][1:]
        parts += [
            f"## {number}: {claim}",
            f"![{one['picture']}](pictures/lesson_{number}.png)",
            f"*{one['picture']}.* {one['caption']}",
            numbers,
            f"`regard train {number}`, {one['seconds']} s of training when this page was written.",
        ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    lessons = json.loads(STORED.read_text(encoding="utf-8")) if STORED.is_file() else {}
    for number in sys.argv[1:] or LESSONS:
        lesson, seconds = run(number)
        print(lesson, flush=True)
        lesson.pictures[0].draw(False).savefig(PICTURES / f"lesson_{number}.png", dpi=110)
        lessons[number] = stored(lesson, seconds)
        STORED.write_text(json.dumps(lessons, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    head = PAGE.read_text(encoding="utf-8").partition(START)[0]
    PAGE.write_text(head + gallery(lessons), encoding="utf-8")


if __name__ == "__main__":
    main()
