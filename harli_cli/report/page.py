"""One HTML file from figures and numbers; plotly.js and everything else is inside it."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from traces.whole_file import replace_file

PLACE = files("harli_cli.report")


@dataclass(frozen=True, slots=True)
class Headline:
    """A number on top of the page; its meaning shows on hover and on focus."""

    label: str
    value: str
    meaning: str


def write_page(
    path: Path, title: str, about: str, headlines: Sequence[Headline], table: str, figures: Sequence[dict[str, Any]]
) -> None:
    """Write the page in one step; ``table`` is HTML, everything else is text. Raises `ConfigError` as results do."""
    shown = [figure for figure in figures if not figure["empty"]]
    parts = {
        "title": html.escape(title),
        "heading": html.escape(title),
        "about": html.escape(about),
        "style": (PLACE / "page.css").read_text("utf-8"),
        "headlines": "\n".join(_headline(one) for one in headlines),
        "table": table,
        "figures": "\n".join(_section(figure) for figure in figures),
        "data": json.dumps(shown, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        "script": (PLACE / "page.js").read_text("utf-8"),
    }
    page = (PLACE / "page.html").read_text("utf-8")
    for name, text in parts.items():
        before, _, after = page.partition("{{" + name + "}}")
        page = before + text + after
    before, _, after = page.rpartition("{{plotly}}")
    plotly = (files("plotly") / "package_data" / "plotly.min.js").read_bytes()  # megabytes, so never copied or decoded
    replace_file(path, lambda file: file.writelines((before.encode(), plotly, after.encode())))


def _headline(one: Headline) -> str:
    label, value, meaning = (html.escape(text) for text in (one.label, one.value, one.meaning))
    return (
        f'<div class="headline" tabindex="0" title="{meaning}"><span class="value">{value}</span>'
        f'<span class="label">{label}</span><span class="meaning" role="tooltip">{meaning}</span></div>'
    )


def _section(figure: dict[str, Any]) -> str:
    inside = '<p class="none">nothing of this in the run</p>' if figure["empty"] else ""
    drawn = "" if figure["empty"] else f'<div class="figure" id="figure-{html.escape(figure["id"])}"></div>'
    return f"<section><h2>{html.escape(figure['title'])}</h2>{inside}{drawn}</section>"
