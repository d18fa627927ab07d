r"""The Azure 2023 traces (Azure/AzurePublicDataset): ``TIMESTAMP,ContextTokens,GeneratedTokens``.

Lines end in CRLF or LF, the last one in either or nothing; a byte order mark is accepted. Whatever else differs from
the format is a `TraceError` about the first row that does. Rows are read all at once, column by column; only a row
at fault is read again on its own, to word the error.
"""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from harli_core.errors import TraceError
from traces.content import TraceContent, quoted
from traces.delimited import Spans, field_spans, line_spans
from traces.digits import positive_fault, read_positive
from traces.schema import Repairs, RequestTrace
from traces.stamps import TICKS_PER_S, read_stamps, stamp_fault

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
"""The header, which is also what the format is recognised by."""

_FAULTS = (stamp_fault, positive_fault, positive_fault)
_FIRST_ROW = 2


def load_azure(path: str | os.PathLike[str], *, sort: bool = False) -> tuple[RequestTrace, Repairs]:
    """Read a file; see `parse_azure`."""
    return parse_azure(TraceContent.read(path), sort=sort)


def is_azure(content: TraceContent) -> bool:
    """Tell by the header whether this is an Azure trace."""
    return content.header == ",".join(COLUMNS).encode()


def parse_azure(content: TraceContent, *, sort: bool = False) -> tuple[RequestTrace, Repairs]:
    """Read requests from the bytes of a file; arrivals become seconds from the first request.

    They are differences of whole 100 ns ticks, rounded once, to the nearest float64 (over a span of up to 28 years).
    ``sort`` puts rows that are out of order in their place (equal stamps keep the file's order) and counts them.
    Raises `TraceError`, one line: file, row (the header is row 1), field, the value seen and what would be right.
    """
    if not is_azure(content):
        raise content.fault(1, None, f"the columns are {quoted(content.header)}; expected {','.join(COLUMNS)!r}")
    buffer = np.frombuffer(content.text, dtype=np.uint8)
    lines = line_spans(buffer, content.body_at)
    if not len(lines):
        raise content.fault(_FIRST_ROW, None, "the file ends after its header; expected at least one request")
    stamps, prompts, outputs = field_spans(buffer, lines, len(COLUMNS))
    ticks, stamps_good = read_stamps(buffer, stamps)
    prompt_tokens, prompts_good = read_positive(buffer, prompts)
    output_tokens, outputs_good = read_positive(buffer, outputs)
    good_rows = _leading(stamps_good & prompts_good & outputs_good)

    repairs = Repairs()
    ordered_rows = 1 + _leading(ticks[1:good_rows] >= ticks[: good_rows - 1]) if good_rows else 0
    if ordered_rows < good_rows and not sort:
        raise _order_fault(content, stamps, ordered_rows)
    if good_rows < len(lines):
        raise _row_fault(content, lines, good_rows)
    if ordered_rows < good_rows:
        repairs = Repairs(sorted_rows=int((ticks < np.maximum.accumulate(ticks)).sum()))
        order = np.argsort(ticks, kind="stable")
        ticks, prompt_tokens, output_tokens = ticks[order], prompt_tokens[order], output_tokens[order]
    arrival_s = (ticks - ticks[0]) / TICKS_PER_S
    return RequestTrace.of(arrival_s, prompt_tokens, output_tokens, source=content.label), repairs


def _leading(flags: NDArray[np.bool_]) -> int:
    """Count the rows before the first false one."""
    return flags.size if flags.all() else int(np.argmin(flags))


def _order_fault(content: TraceContent, stamps: Spans, index: int) -> TraceError:
    seen, before = (quoted(content.text[stamps.slice(row)]) for row in (index, index - 1))
    row = index + _FIRST_ROW
    what = f"{seen} is earlier than {before} in row {row - 1}; expected arrivals in order (--sort puts them in order)"
    return content.fault(row, COLUMNS[0], what)


def _row_fault(content: TraceContent, lines: Spans, index: int) -> TraceError:
    row, line = index + _FIRST_ROW, content.text[lines.slice(index)]
    fields = line.split(b",")
    cut_off = index == len(lines) - 1 and not content.text.endswith(b"\n")
    hint = " (the last line: is the file cut off?)" if cut_off else ""
    if not line:
        return content.fault(row, COLUMNS[0], "the line is blank; expected a request")
    if len(fields) < len(COLUMNS):
        what = f"is missing, {quoted(line)} has {_counted(len(fields))}; expected {len(COLUMNS)}{hint}"
        return content.fault(row, COLUMNS[len(fields)], what)
    if len(fields) > len(COLUMNS):
        what = f"{quoted(line)} has {_counted(len(fields))}; expected {len(COLUMNS)}, none after {COLUMNS[-1]}"
        return content.fault(row, f"after {COLUMNS[-1]}", what)
    for name, value, fault_of in zip(COLUMNS, fields, _FAULTS, strict=True):
        fault = fault_of(value)
        if fault is not None:
            return content.fault(row, name, fault + hint)
    raise AssertionError(f"row {row} was refused but has no fault")


def _counted(fields: int) -> str:
    return "1 field" if fields == 1 else f"{fields} fields"
