"""Decision logs on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from harli_cli.unfinished_file import UnfinishedFile
from harli_core.decision_log import DecisionRecord, decode_header, encode_header, encode_record
from harli_core.errors import LogError


class DecisionLogWriter:
    """Writes records as they come to a temporary file that takes its name when the run is complete."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """Open ``path`` for writing; raises `LogError` when that cannot be done."""
        self._file = UnfinishedFile(path, partial(_unwritable, path))
        self._file.write(encode_header(header) + "\n")

    def write(self, record: DecisionRecord) -> None:
        """Append one record; raises `LogError` when the disk does not take it."""
        self._file.write(encode_record(record) + "\n")

    def __enter__(self) -> Self:
        """Use as a context manager: the log gets its name only when the block succeeds."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Name the complete log, or remove the partial one."""
        self._file.close("", complete=kind is None)


def _unwritable(path: Path, error: OSError) -> LogError:
    return LogError(f"cannot write the decision log {path}: {error.strerror}")


def read_log(path: Path) -> tuple[dict[str, Any], Iterator[str]]:
    """The header of a log and the lines after it; raises `LogError` for a missing, empty or foreign file."""
    try:
        with path.open(encoding="utf-8") as file:
            first = file.readline()
    except OSError as error:
        raise LogError(f"{path}: cannot read the decision log ({error.strerror})") from None
    except UnicodeDecodeError:
        raise LogError(f"{path}: line 1 is not text; a decision log begins with a header") from None
    if not first:
        raise LogError(f"{path}: the file is empty; a decision log begins with a header")
    return decode_header(first, str(path)), _lines(path)


def _lines(path: Path) -> Iterator[str]:
    """All lines but the first; the file is open only while they are read."""
    try:
        with path.open(encoding="utf-8") as file:
            next(file)
            yield from file
    except UnicodeDecodeError:
        raise LogError(f"{path}: not a text file") from None
