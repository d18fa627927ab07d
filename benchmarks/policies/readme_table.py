"""Write results of ``harli compare`` as tables between the markers in README.md, each with the command that made it.

Run from the repository root: ``python benchmarks/policies/readme_table.py RESULT ...`` (``compare.json`` of each).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from harli_cli.comparison.table import markdown  # noqa: E402
from traces.whole_file import replace_text  # noqa: E402

BEGIN, END = "<!-- compare: begin -->", "<!-- compare: end -->"


def with_tables(text: str, documents: Sequence[Mapping[str, Any]]) -> str:
    """The page with a section for each result where others were; `SystemExit` unless it has both markers once, in order."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise SystemExit(f"expected {BEGIN} and then {END}, each once")
    sections = (f"```sh\n{document['command']}\n```\n\n{markdown(document)}" for document in documents)
    return before + BEGIN + "\n" + "\n\n".join(sections) + "\n" + END + after


def main() -> None:
    """Read the results, replace the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT", help="compare.json of a comparison")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", metavar="FILE", help="[default: README.md]")
    asked = parser.parse_args()
    documents = [json.loads(path.read_text("utf-8")) for path in asked.results]
    page = with_tables(asked.readme.read_text("utf-8"), documents)
    replace_text(asked.readme, page)


if __name__ == "__main__":
    main()
