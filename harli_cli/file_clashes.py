"""Files of one command that must not be each other."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from harli_core.errors import ConfigError


def check_clashes(read: Iterable[Path], written: Iterable[tuple[str, Path]]) -> None:
    """Raise `ConfigError` where a file that is read, or written for another purpose, would be written over.

    ``written`` is (option, file), in the order in which a clash is told of the later one.
    """
    used = {os.path.realpath(path): path for path in read}
    for option, path in written:
        place = os.path.realpath(path)  # which minds no links in a circle; whoever writes there tells of them
        if place in used:
            raise ConfigError(f"{option} {path}: {used[place]} is in use already; give it a name of its own")
        used[place] = path
