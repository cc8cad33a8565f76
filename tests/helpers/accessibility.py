"""Whether a page fits its screen and axe-core finds no serious violation, in a real browser."""

from pathlib import Path
from typing import Any

import pytest

SCREENS = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]


def problems(browser: Any, page: Path) -> list[Any]:
    """What is wrong with a file on a desktop and on a phone, in light and dark colors."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    found = []
    for width, scheme in SCREENS:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True
        )
        at = context.new_page()
        at.on("pageerror", lambda e: found.append(str(e)))
        at.goto(page.as_uri())
        if (wide := at.evaluate("document.documentElement.scrollWidth")) > width:
            found.append(f"{wide} pixels wide on a screen of {width}")
        for v in axe.Axe().run(at).response["violations"]:
            if v["impact"] in ("serious", "critical"):
                found.append((width, scheme, v["id"], v["nodes"][0]["html"]))
        context.close()
    return found
