"""The tables of the README, from results of `harli compare`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "policies" / "readme_table.py"
BEGIN, END = "<!-- compare: begin -->", "<!-- compare: end -->"


@pytest.fixture
def results(tmp_path: Path) -> list[Path]:
    """The file of a real comparison of two policies on a few requests, and one as if of another command."""
    trace = tmp_path / "few.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,100,20\n0.5,200,30\n")
    options = ["--policies", "hybrid,inference_only", "--seeds", "2", "--no-html"]
    command = [sys.executable, "-m", "harli_cli", "compare", "--trace", str(trace), *options]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    first, second = tmp_path / "out" / "compare.json", tmp_path / "second.json"
    second.write_text(json.dumps({**json.loads(first.read_text()), "command": "harli compare --gpus 1"}))
    return [first, second]


def _rewrite(readme: Path, *results: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, results), "--readme", str(readme)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_tables_take_the_place_of_others(results: list[Path], tmp_path: Path) -> None:
    """One for each result, in order, under its command; the rest of the page stays, and so does all of it the next time."""
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n\n{BEGIN}\n| old |\n{END}\n\nThe end.\n")
    assert _rewrite(readme, *results).returncode == 0
    page = readme.read_text()
    first = "harli compare --trace few.csv --policies hybrid,inference_only --seeds 2 --no-html"
    assert page.startswith(f"# Title\n\n{BEGIN}\n```sh\n{first}\n```\n\n| policy |")
    assert page.endswith(f"\n{END}\n\nThe end.\n")
    assert "| old |" not in page
    assert page.index(first) < page.index("```sh\nharli compare --gpus 1\n```\n\n| policy |")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert [row.split(" | ")[0] for row in rows] == ["| `hybrid`", "| `inference_only`"] * 2
    found = json.loads(results[0].read_text())["rows"][0]["finetune_tokens_per_s"]
    assert f"| {found['mean']:,.0f}" in rows[0]
    assert _rewrite(readme, *results).returncode == 0
    assert readme.read_text() == page


@pytest.mark.parametrize("text", ["no markers", BEGIN, f"{END}\n{BEGIN}", f"{BEGIN}\n{END}\n{BEGIN}\n{END}"])
def test_a_page_without_its_markers_is_left_alone(tmp_path: Path, text: str) -> None:
    """It says what was expected, and changes nothing."""
    readme = tmp_path / "README.md"
    readme.write_text(text)
    (tmp_path / "r.json").write_text(json.dumps({"command": "", "rows": []}))
    done = _rewrite(readme, tmp_path / "r.json")
    assert done.returncode != 0
    assert done.stderr == f"expected {BEGIN} and then {END}, each once\n"
    assert readme.read_text() == text
