"""The bytes of a trace file, unpacked, and how a fault in them is worded."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import Self

from harli_core.errors import TraceError
from traces.compression import compression_of, unpacked

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SHOWN_CHARACTERS = 48
_PEEKED = 4096


@dataclass(frozen=True, slots=True)
class TraceContent:
    """A whole trace file in memory.

    ``label`` is its printable name, ``text`` its bytes, unpacked and without a byte order mark; ``compression`` says
    what they were packed with (gzip, zstd, or `None`).
    """

    label: str
    text: bytes
    compression: str | None = None

    @classmethod
    def of(cls, label: str, content: bytes) -> Self:
        """Unpack and drop a UTF-8 byte order mark; raises `TraceError` where nothing but blanks is left."""
        printable = _printable(label)
        compression = compression_of(content)
        if compression is not None:
            content = unpacked(content, compression, printable)
        text = content.removeprefix(BYTE_ORDER_MARK)
        if not text[:_PEEKED].strip() and not text.strip():
            raise TraceError(f"{printable}: the file is empty; expected a header line and at least one request")
        return cls(printable, text, compression)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file (or a pipe that something writes to) once; raises `TraceError` where there is nothing to read."""
        label = _printable(os.fspath(path))
        try:
            content = _read_once(path)
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


def _read_once(path: str | os.PathLike[str]) -> bytes:
    """Read everything; a named pipe that nobody writes to is empty, not a wait for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
            raise OSError("it is a device")
        os.set_blocking(descriptor, True)
        return file.read()


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
