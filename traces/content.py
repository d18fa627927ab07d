"""The bytes of a trace file, and how a fault in them is worded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from harli_core.errors import TraceError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SHOWN_CHARACTERS = 48


@dataclass(frozen=True, slots=True)
class TraceContent:
    """A whole trace file in memory; ``label`` is its printable name, ``text`` its bytes without a byte order mark."""

    label: str
    text: bytes

    @classmethod
    def of(cls, label: str, content: bytes) -> Self:
        """Drop a UTF-8 byte order mark; raises `TraceError` where nothing but blanks is left."""
        printable = _printable(label)
        text = content.removeprefix(BYTE_ORDER_MARK)
        if not text.strip():
            raise TraceError(f"{printable}: the file is empty; expected a header line and at least one request")
        return cls(printable, text)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file (or a pipe) once; raises `TraceError` where there is nothing to read."""
        label = _printable(os.fspath(path))
        try:
            content = Path(path).read_bytes()
        except IsADirectoryError:
            raise TraceError(f"{label}: is a directory; expected a trace file") from None
        except FileNotFoundError:
            raise TraceError(f"{label}: no such file; expected a path to a trace file") from None
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise TraceError(f"{label}: cannot be read ({reason}); expected a readable trace file") from None
        return cls.of(os.fspath(path), content)

    @property
    def header(self) -> bytes:
        """The first line, without its line end."""
        return self.text[: self.body_at].removesuffix(b"\n").removesuffix(b"\r")

    @property
    def body_at(self) -> int:
        """Where row 2 starts in ``text``; the length of ``text`` where there is none."""
        end = self.text.find(b"\n")
        return len(self.text) if end < 0 else end + 1

    def fault(self, row: int, field: str | None, what: str) -> TraceError:
        """Word a fault on one line; ``row`` is the line that an editor shows (the header is 1)."""
        where = f"{self.label}: row {row}" if field is None else f"{self.label}: row {row}, {field}"
        return TraceError(f"{where}: {what}")


def quoted(value: bytes | str) -> str:
    """Show a value from a file on one line: quoted, unprintable parts escaped, cut where it is long."""
    cut = value[:_SHOWN_CHARACTERS]
    tail = "..." if len(value) > len(cut) else ""
    if isinstance(cut, bytes):
        try:
            cut = cut.decode("utf-8")
        except UnicodeDecodeError:
            return repr(cut)[1:] + tail
    return repr(cut) + tail


def _printable(path: str) -> str:
    return path if path.isprintable() and path else repr(path)
