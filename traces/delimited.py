"""Where the fields of a comma-separated file lie in its bytes, found for all rows at once."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

_COMMA, _LINE_FEED, _RETURN = 44, 10, 13


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """One byte range ``[starts[i], ends[i])`` a row: a field, or the whole line."""

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        """Count the rows."""
        return int(self.starts.size)

    def slice(self, row: int) -> slice:
        """Where the range of one row lies, to cut it out of the bytes."""
        return slice(int(self.starts[row]), int(self.ends[row]))


def line_spans(buffer: NDArray[np.uint8], body_at: int) -> Spans:
    r"""Find the lines from ``body_at`` on, without their ``\n`` or ``\r\n``; blank lines at the end are left out."""
    breaks = np.flatnonzero(buffer[body_at:] == _LINE_FEED) + body_at
    starts = np.concatenate((np.array([body_at], dtype=np.int64), breaks + 1))
    ends = np.concatenate((breaks, np.array([buffer.size], dtype=np.int64)))
    ends = ends - (buffer.take(ends - 1, mode="clip") == _RETURN)
    filled = np.flatnonzero(ends > starts)
    count = int(filled[-1]) + 1 if filled.size else 0
    return Spans(starts[:count], ends[:count])


def field_spans(buffer: NDArray[np.uint8], lines: Spans, fields: int) -> tuple[tuple[Spans, ...], NDArray[np.bool_]]:
    """Split the lines at their commas into ``fields`` columns; returns them, and which lines have exactly that many.

    The fields of any other line are empty ranges at its start.
    """
    commas = np.flatnonzero(buffer == _COMMA)
    first = np.searchsorted(commas, lines.starts)
    regular = np.searchsorted(commas, lines.ends) - first == fields - 1
    bounds = [lines.starts - 1]
    bounds += [commas.take(first + k, mode="clip") if commas.size else lines.starts for k in range(fields - 1)]
    bounds += [lines.ends]
    spans = [Spans(left + 1, right) for left, right in pairwise(bounds)]
    if not regular.all():
        spans = [Spans(*(np.where(regular, edge, lines.starts) for edge in (s.starts, s.ends))) for s in spans]
    return tuple(spans), regular
