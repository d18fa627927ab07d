"""Take the pictures in docs/images again: the reports of a run and of a comparison on the bundled trace, in Chromium.

Run from the repository root: ``python tests/report/take_screenshots.py``. Needs what the tests of the report need.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync")  # fmt: skip
COMMANDS = {
    "run": ("run", "--horizon-s", "300", "--html"),
    "compare": ("compare", "--horizon-s", "300", "--seeds", "3"),
}
"""Which report each picture is of, and the command that writes it."""

PICTURES: dict[str, tuple[str, int, Literal["light", "dark"]]] = {
    "report-run.png": ("run", 1280, "light"),
    "report-compare.png": ("compare", 1280, "light"),
    "report-narrow-dark.png": ("run", 400, "dark"),
}


def main() -> None:
    """Write the reports, open each as wide as its picture, and keep the whole page."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("no chromium on this machine (Debian: apt-get install chromium)")
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        for name, command in COMMANDS.items():
            harli = [sys.executable, "-m", "harli_cli", *command, "--out", str(Path(scratch) / name)]
            subprocess.run(harli, cwd=ROOT, check=True)
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        for picture, (name, width, theme) in PICTURES.items():
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
            page.goto((Path(scratch) / name / "report.html").as_uri())
            page.wait_for_selector("html[data-drawn]", state="attached")
            page.wait_for_timeout(500)
            page.screenshot(path=IMAGES / picture, full_page=True)
        browser.close()


if __name__ == "__main__":
    main()
