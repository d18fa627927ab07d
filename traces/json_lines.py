"""Traces with a JSON object a line: a format is told by the keys of the first one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from traces.content import TraceContent
from traces.json_records import Reader, RecordFaultError, Request, read_record
from traces.labels import Labels, PrefixHashes
from traces.rows import RawRows


@dataclass(frozen=True, slots=True)
class JsonLines:
    """A format: the key of arrivals and their units a second, its keys (optional ones in brackets), how to read a line.

    A file whose first line has all needed keys and no others than ``known`` is in this format, unless it has no others
    than ``instead`` (a simpler format that is meant then).
    """

    arrival: str
    per_s: int
    keys: tuple[str, ...]
    known: frozenset[str]
    read: Reader
    instead: frozenset[str] = frozenset()

    @property
    def shape(self) -> str:
        """The keys, optional ones in brackets."""
        return "{" + ",".join(self.keys) + "}"

    def recognises(self, content: TraceContent) -> bool:
        """Whether the first line is an object with this format's keys."""
        keys = first_keys(content)
        needed = {key for key in self.keys if not key.startswith("[")}
        return keys is not None and needed <= keys <= self.known and not keys <= self.instead

    def parse(self, content: TraceContent) -> RawRows:
        """Read every line; what is wrong with one is kept beside it."""
        state: dict[str, Any] = {}
        requests: list[Request] = []
        rows: list[int] = []
        faults: dict[int, RecordFaultError] = {}
        lines = content.text.rstrip(b"\r\n").split(b"\n")
        for row, line in enumerate(lines, start=1):
            try:
                read = self.read(_record(line.removesuffix(b"\r")), state)
            except RecordFaultError as fault:
                cut_off = row == len(lines) and not content.text.endswith(b"\n")
                faults[len(rows)] = _with_hint(fault) if cut_off else fault
                read = [Request(0, 1, 1)]
            requests += read
            rows += [row] * len(read)
        readable = np.ones(len(rows), dtype=np.bool_)
        readable[list(faults)] = False
        arrivals = [request.arrival for request in requests]
        whole = all(isinstance(arrival, int) for arrival in arrivals)
        hashes = [request.prefix_hashes for request in requests]

        def fault_of(index: int) -> tuple[str | None, str]:
            return faults[index].key, faults[index].what

        return RawRows(
            rows=np.array(rows, dtype=np.int64),
            arrivals=np.array(arrivals, dtype=np.int64 if whole else np.float64),
            per_s=self.per_s,
            arrival_name=self.arrival,
            prompt_tokens=np.array([request.prompt_tokens for request in requests], dtype=np.int64),
            output_tokens=np.array([request.output_tokens for request in requests], dtype=np.int64),
            readable=readable,
            failed=np.zeros(len(rows), dtype=np.bool_),
            fault=fault_of,
            arrival_text=lambda index: f"{arrivals[index]}",
            derived=np.array([request.derived for request in requests], dtype=np.bool_),
            session=_labels([request.session for request in requests]),
            request_class=_labels([request.request_class for request in requests]),
            prefix_hashes=None if all(h is None for h in hashes) else PrefixHashes.of([h or [] for h in hashes]),
        )


def first_keys(content: TraceContent) -> set[str] | None:
    """The keys of the object on the first line; `None` where there is none that can be read."""
    if not content.text.startswith(b"{"):
        return None
    try:
        return set(read_record(content.header))
    except RecordFaultError:
        return None


def first_line_fault(content: TraceContent) -> str | None:
    """What is wrong with the first line, where the file seems to hold JSON but not an object a line."""
    start = content.text[:64].lstrip()
    if not start.startswith((b"{", b"[")):
        return None
    try:
        read_record(content.header)
    except RecordFaultError as fault:
        return fault.what
    return None


def _record(line: bytes) -> dict[str, Any]:
    if not line.strip():
        raise RecordFaultError(None, "the line is blank; expected a request")
    return read_record(line)


def _with_hint(fault: RecordFaultError) -> RecordFaultError:
    return RecordFaultError(fault.key, f"{fault.what} (the last line: is the file cut off?)")


def _labels(values: list[str | None]) -> Labels | None:
    return None if all(value is None for value in values) else Labels.of(values)
