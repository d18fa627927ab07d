"""What a column of a comma-separated trace may hold: how to read it for all rows at once, and to word a fault."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.content import quoted
from traces.delimited import Spans
from traces.digits import read_seconds, read_whole, seconds_fault, text_fault, whole_fault
from traces.stamps import TICKS_PER_S, read_stamps, stamp_fault

LARGEST_HASH = 2**63 - 1
"""Hashes are kept as 64-bit integers."""

_CHUNK_ROWS = 1 << 16
_HASHES = re.compile(rb"[0-9]{1,19}(?: [0-9]{1,19})*")


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """One column: the bytes of the file, once as bytes and once as an array, and where each cell lies in them."""

    text: bytes
    buffer: NDArray[np.uint8]
    spans: Spans


@dataclass(frozen=True, slots=True)
class Kind:
    """``read`` gives a value a row and which rows hold one; ``fault`` says what is wrong with a cell, or `None`.

    ``per_s``: how many units make a second, where the value is a time.
    """

    read: Callable[[Cells], tuple[NDArray[Any], NDArray[np.bool_]]]
    fault: Callable[[bytes], str | None]
    per_s: int = 1


def whole(least: int) -> Kind:
    """A whole number in plain digits, ``least`` (0 or 1) or more."""
    return Kind(lambda cells: read_whole(cells.buffer, cells.spans, least), partial(whole_fault, least=least))


def stamp(zone: bytes) -> Kind:
    """A date and time of day, all of a file with or without the zone ``+00:00``."""
    return Kind(
        lambda cells: read_stamps(cells.buffer, cells.spans, zone), partial(stamp_fault, zone=zone), TICKS_PER_S
    )


def seconds(optional: bool = False) -> Kind:
    """A time of 0 s or more; ``optional``: or nothing."""

    def read(cells: Cells) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        values, good = read_seconds(cells.text, cells.buffer, cells.spans)
        return values, good | (cells.spans.ends == cells.spans.starts) if optional else good

    return Kind(read, lambda value: None if optional and not value else seconds_fault(value))


def just(value: bytes, meaning: str) -> Kind:
    """A column in which only one value can be replayed."""

    def read(cells: Cells) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        found = _each(cells, lambda cell: cell == value)
        return found.astype(np.int64), found

    return Kind(read, lambda cell: None if cell == value else f"{quoted(cell)} {meaning}; expected {quoted(value)}")


def text() -> Kind:
    """Any text without quotes; equal ones share a number, given in order of appearance, -1 is nothing."""

    def read(cells: Cells) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        codes, names = _coded(cells)
        bad = np.array([_label_fault(name) is not None for name in names] + [False], dtype=np.bool_)
        return codes.astype(np.int64), ~bad[codes]

    return Kind(read, _label_fault)


def hashes() -> Kind:
    """Whole numbers with blanks between them, or nothing; read by `hash_lists`."""
    return Kind(
        lambda cells: (np.zeros(len(cells.spans), np.int64), _each(cells, lambda cell: _hashes_fault(cell) is None)),
        _hashes_fault,
    )


def _coded(cells: Cells) -> tuple[NDArray[np.int32], list[bytes]]:
    """Number the different cells of a column; an empty one has number -1."""
    numbers: dict[bytes, int] = {b"": -1}
    parts = [np.zeros(0, dtype=np.int32)]
    for chunk in _chunks(cells):
        parts.append(np.array([numbers.setdefault(cell, len(numbers) - 1) for cell in chunk], dtype=np.int32))
    return np.concatenate(parts), list(numbers)[1:]


def hash_lists(cells: Cells) -> list[list[int]]:
    """The hashes of every row; none where the cell does not hold any."""
    return [
        [int(one) for one in cell.split()] if cell and _hashes_fault(cell) is None else []
        for chunk in _chunks(cells)
        for cell in chunk
    ]


def _chunks(cells: Cells) -> Any:
    for at in range(0, len(cells.spans), _CHUNK_ROWS):
        bounds = zip(
            cells.spans.starts[at : at + _CHUNK_ROWS].tolist(),
            cells.spans.ends[at : at + _CHUNK_ROWS].tolist(),
            strict=True,
        )
        yield [cells.text[start:end] for start, end in bounds]


def _each(cells: Cells, accepts: Callable[[bytes], bool]) -> NDArray[np.bool_]:
    parts = [np.zeros(0, dtype=np.bool_)]
    parts += [np.array([accepts(cell) for cell in chunk], dtype=np.bool_) for chunk in _chunks(cells)]
    return np.concatenate(parts)


def _label_fault(value: bytes) -> str | None:
    unreadable = text_fault(value)
    if unreadable is not None:
        return f"{quoted(value)} {unreadable}; expected text"
    if b'"' in value:
        return f"{quoted(value)} is quoted; expected text without quotes"
    return None


def _hashes_fault(value: bytes) -> str | None:
    if not value:
        return None
    right = "expected whole numbers with one blank between them"
    unreadable = text_fault(value)
    if unreadable is not None:
        return f"{quoted(value)} {unreadable}; {right}"
    if not _HASHES.fullmatch(value):
        return f"{quoted(value)} is no list of hashes; {right}"
    if any(int(one) > LARGEST_HASH for one in value.split()):
        return f"{quoted(value)} holds a number that is too large; {right}, up to {LARGEST_HASH}"
    return None
