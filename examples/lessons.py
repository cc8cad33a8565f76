"""Writes the gallery of lessons, docs/lessons.md: the first picture and the numbers of each lesson's run.

python examples/lessons.py                # runs the lessons that runs/ does not have yet, then writes the gallery
python examples/lessons.py --runs FOLDER  # takes the runs from another folder
"""

import argparse
import base64
import re
from pathlib import Path

import regard as rg
from regard.training.lessons import LESSONS, LessonResult
from regard.training.lessons.lesson import format_value

ROOT = Path(__file__).parents[1]
PICTURES, PAGE = ROOT / "docs" / "pictures", ROOT / "docs" / "lessons.md"
START = "<!-- written by examples/lessons.py -->"
FIGURE = re.compile(
    r'<figcaption>([^<]*)</figcaption>.*?<img src="data:image/svg\+xml;base64,([^"]*)".*?<p class="note">([^<]*)</p>',
    re.S,
)


def section(result: LessonResult) -> str:
    """Claim, picture and numbers of one lesson; its picture is taken from its page."""
    title, encoded, caption = FIGURE.search(result.report.read_text(encoding="utf-8")).groups()
    picture = f"lesson_{result.number}.svg"
    (PICTURES / picture).write_bytes(base64.b64decode(encoded))
    numbers = [
        f"- {c['name']}: **{format_value(c['measured'])}** (expected {c['expected']})" for c in result.checks
    ]
    claim = result.claim[:1].upper() + result.claim[1:]
    parts = [f"## {result.number}: {claim}", f"![{title}](pictures/{picture})", f"*{title}.* {caption}"]
    return "\n\n".join([*parts, "\n".join(numbers)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    runs = parser.parse_args().runs
    sections = []
    for number in LESSONS:
        stored = (runs / number / "lesson.json").is_file()
        result = LessonResult(runs / number) if stored else rg.train(number, out=runs / number)
        sections.append(section(result))
    head = PAGE.read_text(encoding="utf-8").partition(START)[0]
    PAGE.write_text("\n\n".join([head + START, *sections]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
