"""Files and folders that are there whole or not at all, also after a crash."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def write_durably(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content``: temporary name, fsync, rename. Raises `OSError`, and then ``path`` is as before."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


@contextmanager
def durable_folder(path: Path) -> Iterator[Path]:
    """A folder to fill; it becomes ``path``, which must not exist, when the block ends without an exception."""
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        for file in sorted(partial.iterdir()):
            _sync(file)
        _sync_folder(partial)
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _sync_folder(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(path: Path) -> None:
    _sync(path)
