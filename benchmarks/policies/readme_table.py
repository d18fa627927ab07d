"""Rewrite the table between the markers in README.md from a result of ``harli compare``.

Run from the repository root: ``python benchmarks/policies/readme_table.py benchmarks/policies/results/compare.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.record import ROOT as CHECKOUT  # noqa: E402
from harli_cli.comparison.table import markdown  # noqa: E402

BEGIN, END = "<!-- compare: begin -->", "<!-- compare: end -->"


def main() -> None:
    """Read the result, replace the table."""
    document = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    readme = CHECKOUT / "README.md"
    before, begin, rest = readme.read_text("utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"README.md lacks {BEGIN} or {END}")
    readme.write_text(f"{before}{BEGIN}\n{markdown(document)}\n{END}{after}", "utf-8")


if __name__ == "__main__":
    main()
