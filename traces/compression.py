"""Packed files, told by their first bytes: gzip and zstd."""

from __future__ import annotations

import zlib

from harli_core.errors import TraceError

_MAGIC = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd"}
_CHUNK_BYTES = 1 << 20

MAX_UNPACKED_BYTES = 4 << 30
"""A packed file that grows beyond this is refused: it is damage or a trap, not a trace."""


def compression_of(content: bytes) -> str | None:
    """Name what packed these bytes; `None` where nothing did."""
    return next((name for name, magic in _MAGIC.items() if content.startswith(magic)), None)


def unpacked(content: bytes, compression: str, label: str) -> bytes:
    """Unpack the whole content; raises `TraceError` for damaged, cut off, doubly packed or immense content."""
    try:
        text = _gunzip(content, label) if compression == "gzip" else _unzstd(content, label)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        reason = repr(" ".join(str(error).split()) or "damaged")[1:-1]
        raise TraceError(f"{label}: {compression} data that cannot be unpacked ({reason}); is it cut off?") from None
    if compression_of(text) is not None:
        raise TraceError(f"{label}: packed twice ({compression} around {compression_of(text)}); expected once")
    return text


def _gunzip(content: bytes, label: str) -> bytes:
    """Unpack all members; unlike `gzip`, refuse bytes behind the last one."""
    parts: list[bytes] = []
    size = 0
    while content:
        member = zlib.decompressobj(wbits=31)
        data = content
        while not member.eof:
            part = member.decompress(data, _CHUNK_BYTES)
            data = member.unconsumed_tail
            size += len(part)
            _check_size(size, label)
            parts.append(part)
            if not part and not data and not member.eof:
                raise EOFError("the data ends within a member")
        content = member.unused_data
    return b"".join(parts)


def _unzstd(content: bytes, label: str) -> bytes:
    import pyarrow as pa  # noqa: PLC0415  (a heavy import that only packed files need)

    parts: list[bytes] = []
    size = 0
    with pa.CompressedInputStream(pa.BufferReader(content), "zstd") as stream:
        while part := stream.read(_CHUNK_BYTES):
            size += len(part)
            _check_size(size, label)
            parts.append(part)
    return b"".join(parts)


def _check_size(size: int, label: str) -> None:
    if size > MAX_UNPACKED_BYTES:
        limit = MAX_UNPACKED_BYTES >> 30
        raise TraceError(f"{label}: unpacks to more than {limit} GiB; expected a trace that fits in memory")
