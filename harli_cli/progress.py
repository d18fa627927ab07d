"""How far a simulation is, for who watches a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def progress() -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """A progress bar on a terminal's standard error, nothing elsewhere; one bar a simulation."""
    if not sys.stderr.isatty():
        yield lambda _name, _total: _ignore
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4) as bars:

        def stage(name: str, total: int) -> Callable[[int], None]:
            task = bars.add_task(name, total=total)
            every = max(1, total // 200)

            def done(count: int) -> None:
                if count % every == 0 or count == total:
                    bars.update(task, completed=count)

            return done

        yield stage


def _ignore(_count: int) -> None:
    """Nobody watches."""
