"""A file that is replaced whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

from harli_core.errors import ConfigError

LONGEST_NAME = 50
"""Characters of a file's name that the name beside it has too: that may have 255 bytes."""


def replaceable(path: Path) -> Path:
    """The file to replace in order to write ``path``: what it links to, in the end.

    Raises `OSError` where something else than a file is: a folder, a device or a pipe is never replaced.
    """
    try:
        target = path.resolve()
    except RuntimeError:
        raise OSError(errno.ELOOP, "its links go in a circle", path.name) from None
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder; expected the name of a file", path.name)
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "it is a device or a pipe; expected the name of a file", path.name)
    return target


def unused_beside(target: Path) -> Path:
    """A name in the folder of ``target`` that nothing has, for what becomes it once it is whole."""
    return target.with_name(f".{target.name[:LONGEST_NAME]}.{token_hex(8)}.partial")


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write ``path`` whole or not at all, readable as the umask has it.

    Raises `ConfigError` when the disk does not take it, and then ``path`` is as before. It is written beside that first,
    under a name that nothing has: another writer of ``path`` has its own.
    """
    partial: Path | None = None
    try:
        target = replaceable(path)
        unused = unused_beside(target)
        with unused.open("xb") as file:
            partial = unused
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        if partial is not None:
            with suppress(OSError):
                partial.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """`replace_file` with ``text`` in UTF-8."""
    replace_file(path, lambda file: file.write(text.encode()))
