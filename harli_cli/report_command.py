"""``harli report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(out: Annotated[Path, typer.Argument(help="The folder of a finished 'harli run'.")] = Path("out")) -> None:
    """Draw a finished result folder: writes report.html into it, one file that opens offline."""
    from harli_cli.report.pages import run_report  # noqa: PLC0415

    typer.echo(f"written: {run_report(out)}")
