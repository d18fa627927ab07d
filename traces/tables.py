"""Comma-separated traces: a format is a list of columns, told by their names in the header, in any order.

Rows are read all at once, column by column; only a row at fault is read again on its own, to word the error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.cells import Cells, Kind, hash_lists, stamp
from traces.content import TraceContent, quoted
from traces.delimited import field_spans, line_spans
from traces.labels import Labels, PrefixHashes
from traces.rows import RawRows

_FIRST_ROW = 2
_LONGEST_HEADER_BYTES = 1 << 14
ZONE = b"+00:00"


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its name in the header, what it holds, and whether a file may lack it."""

    name: str
    kind: Kind
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A comma-separated format: its columns, and which of them say what of a request.

    ``zone``: what stamps end in, `None` where the first row tells. ``failed``: the column in which 0 marks a request
    that failed. ``total``: (sum, part, part), columns of which the first must be the sum of the others.
    """

    columns: tuple[Column, ...]
    arrival: str | None
    prompt: str
    output: str
    session: str | None = None
    request_class: str | None = None
    hashes: str | None = None
    zone: bytes | None = b""
    failed: str | None = None
    total: tuple[str, str, str] | None = None

    @property
    def shape(self) -> str:
        """The header, optional columns in brackets."""
        return ",".join(f"[{column.name}]" if column.optional else column.name for column in self.columns)

    def header(self, content: TraceContent) -> tuple[Column, ...] | None:
        """The columns in the order of the file; `None` where its header is not one of this format."""
        seen = _names(content)
        known = {column.name: column for column in self.columns}
        needed = {column.name for column in self.columns if not column.optional}
        if seen is None or len(set(seen)) != len(seen) or not needed <= set(seen) <= set(known):
            return None
        return tuple(known[name] for name in seen)

    def recognises(self, content: TraceContent) -> bool:
        """Whether the header has this format's columns, and the first stamp its zone."""
        columns = self.header(content)
        if columns is None:
            return False
        return self.zone is None or not self.zoned or _zone_of_first_stamp(content, columns) == self.zone

    @property
    def zoned(self) -> bool:
        """Whether the arrivals are stamps, with or without a zone."""
        return self.arrival == "TIMESTAMP"

    def parse(self, content: TraceContent) -> RawRows:
        """Read every row; raises `TraceError` for another header, or where no row follows it."""
        columns = self.header(content)
        if columns is None:
            raise content.fault(1, None, f"the columns are {quoted(content.header)}; {self._expected(content)}")
        if self.zoned:
            zone = self.zone if self.zone is not None else _zone_of_first_stamp(content, columns)
            columns = tuple(replace(one, kind=stamp(zone)) if one.name == self.arrival else one for one in columns)
        return _TableReader(self, columns, content).rows()

    def _expected(self, content: TraceContent) -> str:
        names = _names(content) or []
        twice = sorted({name for name in names if names.count(name) > 1})
        return f"expected {self.shape!r}" + (f", {twice[0]!r} only once" if twice else "")


class _TableReader:
    """One file being read as one format."""

    def __init__(self, table: Table, columns: tuple[Column, ...], content: TraceContent) -> None:
        """Find the cells; raises `TraceError` where there are no rows."""
        self.table, self.columns, self.content = table, columns, content
        self.buffer = np.frombuffer(content.text, dtype=np.uint8)
        self.lines = line_spans(self.buffer, content.body_at)
        if not len(self.lines):
            raise content.fault(_FIRST_ROW, None, "the file ends after its header; expected at least one request")
        spans, self.regular = field_spans(self.buffer, self.lines, len(columns))
        self.cells = {
            column.name: Cells(content.text, self.buffer, span) for column, span in zip(columns, spans, strict=True)
        }

    def rows(self) -> RawRows:
        """All rows, faulty ones included."""
        table = self.table
        values: dict[str, NDArray[Any]] = {}
        readable = self.regular.copy()
        for column in self.columns:
            values[column.name], good = column.kind.read(self.cells[column.name])
            readable &= good
        if table.total is not None:
            total, *parts = table.total
            readable &= values[total] == sum(values[part] for part in parts)
        failed = np.zeros(len(self.lines), dtype=np.bool_)
        if table.failed is not None:
            failed = readable & (values[table.failed] == 0)
            readable &= ~failed
        self.failed = failed
        arrival = table.arrival or ""
        return RawRows(
            rows=np.arange(_FIRST_ROW, _FIRST_ROW + len(self.lines), dtype=np.int64),
            arrivals=values.get(arrival),
            per_s=next((column.kind.per_s for column in self.columns if column.name == arrival), 1),
            arrival_name=arrival,
            prompt_tokens=values[table.prompt],
            output_tokens=values[table.output],
            readable=readable,
            failed=failed,
            fault=self.fault,
            arrival_text=lambda index: self.content.text[self.cells[arrival].spans.slice(index)],
            session=self._labels(table.session, values),
            request_class=self._labels(table.request_class, values),
            prefix_hashes=self._hashes(),
        )

    def _labels(self, name: str | None, values: dict[str, NDArray[Any]]) -> Labels | None:
        """A column of text is read as codes already; its names are the cells where each code first stands."""
        if name is None or name not in self.cells:
            return None
        codes, first = np.unique(values[name], return_index=True)
        spans = self.cells[name].spans
        cells = (self.content.text[spans.slice(int(row))] for code, row in zip(codes, first, strict=True) if code >= 0)
        return Labels(values[name].astype(np.int32), tuple(cell.decode("utf-8", "replace") for cell in cells))

    def _hashes(self) -> PrefixHashes | None:
        name = self.table.hashes
        return PrefixHashes.of(hash_lists(self.cells[name])) if name is not None and name in self.cells else None

    def fault(self, index: int) -> tuple[str | None, str]:
        """Field and words of the first thing that is wrong with a row."""
        columns, line = self.columns, self.content.text[self.lines.slice(index)]
        fields = line.split(b",", len(columns) + 1)
        cut_off = index == len(self.lines) - 1 and not self.content.text.endswith(b"\n")
        hint = " (the last line: is the file cut off?)" if cut_off else ""
        if not line:
            return columns[0].name, "the line is blank; expected a request"
        if len(fields) < len(columns):
            what = f"is missing, {quoted(line)} has {_counted(len(fields))}; expected {len(columns)}{hint}"
            return columns[len(fields)].name, what
        if len(fields) > len(columns):
            last, found = columns[-1].name, _counted(line.count(b",") + 1)
            return f"after {last}", f"{quoted(line)} has {found}; expected {len(columns)}, none after {last}"
        for column, value in zip(columns, fields, strict=True):
            what_is_wrong = column.kind.fault(value)
            if what_is_wrong is not None:
                return column.name, what_is_wrong + hint
        if self.failed[index]:
            assert self.table.failed is not None
            words = "'0' marks a request that failed; expected 1 or more (--drop-failed leaves failed requests out)"
            return self.table.failed, words
        assert self.table.total is not None, f"row {index + _FIRST_ROW} was refused but has no fault"
        total, *parts = self.table.total
        shown = quoted(self.content.text[self.cells[total].spans.slice(index)])
        return total, f"{shown} is not the sum of {' and '.join(parts)}; expected that{hint}"


def _names(content: TraceContent) -> list[str] | None:
    header = content.header
    if len(header) > _LONGEST_HEADER_BYTES:
        return None
    try:
        return header.decode("utf-8").split(",")
    except UnicodeDecodeError:
        return None


def _zone_of_first_stamp(content: TraceContent, columns: tuple[Column, ...]) -> bytes:
    end = content.text.find(b"\n", content.body_at)
    line = content.text[content.body_at : end if end >= 0 else len(content.text)]
    cells = line.removesuffix(b"\r").split(b",", len(columns))
    place = next(number for number, column in enumerate(columns) if column.name == "TIMESTAMP")
    return ZONE if place < len(cells) and cells[place].endswith(ZONE) else b""


def _counted(fields: int) -> str:
    return "1 field" if fields == 1 else f"{fields} fields"
