"""Pictures of every panel of the studio for docs/pictures, desktop and phone: needs playwright and chromium.

python examples/page_pictures.py docs/pictures
"""

import io
import sys
import threading
import time
from pathlib import Path

import uvicorn
from PIL import Image
from playwright.sync_api import sync_playwright

from regard.cli.models import included_translator
from regard.web.app import create_app
from regard.web.workers import Workers

PANELS = {
    "model": "#architecture .block",
    "heads": "#heads-panel .head",
    "generate": "#generate-stop:disabled",
    "patterns": "#count:not(:empty)",
    "cost": "#tree details",
    "laws": ".law",
    "runs": "#run-chart path, #runs-none:not([hidden])",
}


def save(raw: bytes, path: Path, width: int) -> None:
    """A small PNG: reduced in width, 160 colors."""
    picture = Image.open(io.BytesIO(raw)).convert("RGB")
    height = round(picture.height * width / picture.width)
    picture.resize((width, height), Image.Resampling.LANCZOS).quantize(160).save(path, optimize=True)
    print(path, f"{path.stat().st_size / 1024:.0f} KiB")


def main(out: Path) -> None:
    runs = Path("runs") if Path("runs").is_dir() else None
    app = create_app(
        included_translator(),
        workers=Workers(2, deadline=60),
        name="the translator of regard, English to Spanish",
        runs=runs,
    )
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for width, scheme, suffix, small in ((1280, "light", "", 800), (390, "dark", "_phone", 300)):
            page = browser.new_context(
                viewport={"width": width, "height": 860}, color_scheme=scheme
            ).new_page()
            page.goto(f"http://127.0.0.1:{port}/")
            for panel, ready in PANELS.items():
                page.click(f"#tab-{panel}")
                if panel == "laws":
                    page.click("#ask-laws button")
                page.wait_for_selector(ready, timeout=90_000, state="attached")
                if panel == "patterns":
                    page.fill("#pattern-2", "causal() & dilated(12, 4)")
                page.wait_for_timeout(2500)
                page.evaluate("scrollTo(0, 0)")
                save(page.screenshot(), out / f"studio_{panel}{suffix}.png", small)
        browser.close()
    server.should_exit = True
    thread.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("docs/pictures"))
