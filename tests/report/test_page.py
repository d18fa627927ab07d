"""`report.html` in a real Chromium: no errors, every figure drawn, nothing wider than the screen."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harli_cli.main import main
from harli_cli.report.columns import read_result
from harli_cli.report.digest import BINS, digest
from harli_core.errors import ConfigError

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
RUN = ("--gpus", "2", "--horizon-s", "60")


def command(*arguments: str | Path) -> None:
    """One command line that must succeed."""
    before = sys.argv
    sys.argv = ["harli", *map(str, arguments)]
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.argv = before
    assert ended.value.code == 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run and a comparison with their reports."""
    place = tmp_path_factory.mktemp("reports")
    command("run", *RUN, "--html", "--out", place / "run")
    command("compare", *RUN, "--policies", "hybrid,harli,inference_only", "--seeds", "2", "--out", place / "compare")
    return {name: place / name for name in ("run", "compare")}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium; without one the test is skipped, or fails where HARLI_REQUIRE_CHROMIUM=1."""
    found = shutil.which("chromium")
    if found is None:
        reason = "no chromium on this machine (Debian: apt-get install chromium)"
        if os.environ.get("HARLI_REQUIRE_CHROMIUM") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield started
        started.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("name", ["run", "compare"])
def test_in_chromium(folders: dict[str, Path], browser: Any, name: str, width: int, theme: str) -> None:
    """Offline: nothing said on the console, no request but the file, marks in every figure, no sideways scrolling."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((folders[name] / "report.html").as_uri())
    page.wait_for_selector("html[data-drawn]", state="attached")
    figures = page.locator(".figure")
    assert figures.count() >= 7
    assert page.locator(".none").count() == 0
    assert page.locator("h1").inner_text().startswith("Harli: ")
    assert "{{" not in page.locator("body").inner_text()
    for index in range(figures.count()):
        marks = figures.nth(index).locator(".trace path, .trace .point, .boxes path, .bars path")
        assert marks.count() > 0, figures.nth(index).get_attribute("id")
        assert figures.nth(index).bounding_box()["height"] > 100
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 21, 27)"
    assert dark == (theme == "dark")
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    page.close()


def test_figures_are_valid_for_plotly(folders: dict[str, Path]) -> None:
    """Its own schema accepts every trace and layout."""
    from plotly.graph_objects import Figure

    for folder in folders.values():
        text = (folder / "report.html").read_text("utf-8")
        found = re.search(r'id="figures">(.*?)</script>', text)
        assert found is not None
        for figure in json.loads(found[1]):
            Figure(data=figure["data"], layout=figure["layout"])


def test_report_of_a_finished_folder(folders: dict[str, Path]) -> None:
    """`harli report OUT` draws what `--html` drew, byte for byte."""
    page = folders["run"] / "report.html"
    before = page.read_bytes()
    page.unlink()
    command("report", folders["run"])
    assert page.read_bytes() == before


def test_a_long_run_stays_small(folders: dict[str, Path]) -> None:
    """Series have a fixed number of points, and tokens over time add up to all of them."""
    result = read_result(folders["run"])
    found = digest(result)
    assert {len(series) for series in found["series"].values()} == {BINS}
    width_s = result.summary["duration_s"] / BINS
    total = sum(found["series"]["finetune_tokens_per_s"]) * width_s
    assert total == pytest.approx(result.summary["finetune"]["tokens"], rel=0.05)


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    """One error that names the file and what would be right."""
    with pytest.raises(ConfigError, match=r"summary\.json: .*finished harli run"):
        read_result(tmp_path)
