"""``harli policy new``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

policies_app = typer.Typer(help="Policies of your own.", rich_markup_mode=None)


@policies_app.command("new")
def new_policy(
    name: Annotated[str, typer.Argument(help="Lower-case name, as in my_policy.")],
    folder: Annotated[Path, typer.Option(help="Where to write the two files.")] = Path(),
) -> None:
    """Write a policy that runs and a test that holds it to the contract of all policies."""
    from harli_cli.policy_scaffold import scaffold  # noqa: PLC0415

    source, test = scaffold(name, folder)
    class_name = "".join(part.capitalize() for part in name.split("_"))
    typer.echo(f"written: {source} and {test}")
    typer.echo(f"test it: python -m pytest {test}")
    typer.echo(f"compare it: harli compare --policies {name}:{class_name},hybrid --seeds 2 --horizon-s 300")
