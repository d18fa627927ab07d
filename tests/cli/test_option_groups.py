"""Groups of options that several commands share."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from typing import Annotated

import typer

from harli_cli.option_groups import with_groups
from harli_cli.run_command import run
from harli_cli.trace_commands import convert
from harli_cli.trace_commands import inspect as inspect_trace
from harli_cli.trace_options import TracePart, TraceReading


@dataclass(frozen=True, slots=True)
class Size:
    """A group of two."""

    width: Annotated[int, typer.Option("--wide", help="Columns.")] = 3
    height: Annotated[int | None, typer.Option(help="Rows.")] = None


def test_a_group_reaches_the_command_as_one_value() -> None:
    """Its options stand where the group stood, under their own names and with their defaults."""
    seen: list[tuple[str, Size, bool]] = []
    app = typer.Typer()

    @app.command()
    @with_groups
    def draw(what: str, size: Size, loud: bool = False) -> None:
        seen.append((what, size, loud))

    assert list(inspect.signature(draw).parameters) == ["what", "width", "height", "loud"]
    app(["box", "--wide", "5", "--loud"], standalone_mode=False)
    app(["box", "--height", "2"], standalone_mode=False)
    assert seen == [("box", Size(5, None), True), ("box", Size(3, 2), False)]


def test_commands_that_read_a_trace_take_the_same_options() -> None:
    """Whatever a group gains, all of them gain."""
    reading, part = ({field.name for field in fields(group)} for group in (TraceReading, TracePart))
    for command, expected in ((run, reading | part), (convert, reading | part), (inspect_trace, reading)):
        assert expected <= set(inspect.signature(command).parameters)
